"""Polygons as text and files of other programs: GeoJSON (QuPath), COCO and ImageJ regions. Needs NumPy alone.

GeoJSON text is made in a few operations on all points together. As nested lists, points take ten times as long to
write, which is more than finding them; and a service writes hundreds of such texts a second under the interpreter's
lock.
"""

import io
import json
import struct
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from brim.segmentation.objects.polygons import Polygon, Prediction, Rings, fill, measures

# Axes: C points of all rings one after the other, R rings, N polygons


RINGS = "application/x-brim-rings"  # media type of Rings.to_bytes, for a caller that writes the GeoJSON itself
MEDIA_TYPES = {
    "geojson": "application/geo+json",
    "coco": "application/json",
    "roi": "application/zip",
    "mask": "image/png",
    "overlay": "image/png",
}
COLOUR = (255, 200, 0)  # of an object in QuPath

_FEATURE = (
    b'{"type":"Feature","geometry":{"type":"Polygon","coordinates":[%%b]},"properties":{"objectType":"annotation",'
    b'"classification":{"name":"object","color":[%d,%d,%d]},"measurements":{"area_px":%%a,"confidence":%%a}}}' % COLOUR
)
_WIDEST = 10**5  # from here on a number, with what stands around it, does not fit into eight bytes


def geojson_of(rings: Rings) -> bytes:
    """What `geojson` writes of the polygons of these rings, without making them."""
    owned = np.flatnonzero(rings.owner >= 0)
    if not len(owned):
        return collection([], [], [])
    # an outline begins above its holes, so it is the first of those that belong to it
    order = owned[np.argsort(rings.owner[owned], kind="stable")]
    first = rings.first[order]
    num = rings.first[order + 1] - first
    texts = ring_texts(rings.points, first, num, np.ones(len(order), bool))  # outlines run downwards first
    outlines, area, confidence = measures(rings)
    if len(outlines) < len(order):
        texts = grouped(texts, np.bincount(rings.owner[owned], minlength=1)[outlines].tolist())
    return collection(texts, area.tolist(), confidence.tolist())


def collection(coordinates: Sequence[bytes], area: Sequence[float], confidence: Sequence[float]) -> bytes:
    """The whole text, from that of each polygon's rings."""
    rounded = np.round(np.asarray(confidence), 6).tolist()
    values = chain.from_iterable(zip(coordinates, area, rounded, strict=True))
    features = b",".join([_FEATURE] * len(coordinates)) % tuple(values)
    return b'{"type":"FeatureCollection","features":[%b]}' % features


def grouped(texts: list[bytes], sizes: Sequence[int]) -> list[bytes]:
    """The texts of rings that belong to one polygon as one."""
    rest = iter(texts)
    return [next(rest) if size == 1 else b",".join([next(rest) for _ in range(size)]) for size in sizes]


def ring_texts(points: np.ndarray, first: np.ndarray, num: np.ndarray, backwards: np.ndarray) -> list[bytes]:
    """Each ring as `[[x,y],…,[x,y]]`, closed: the outline counter-clockwise, as the standard wants it, holes not.

    first, num  (R,)  where the ring's points begin, and how many there are
    backwards   (R,)  whether they are to be read from the last to the first
    """
    behind = np.cumsum(num + 1)
    step, head = np.where(backwards, -1, 1), np.where(backwards, first + num - 1, first)
    # where each point of the text comes from, and the first of a ring again at its end
    order = np.repeat(step, num + 1) * np.arange(behind[-1]) + np.repeat(head - step * (behind - num - 1), num + 1)
    order[behind - 1] = head
    # a point as one number: rows of two are gathered ten times as slowly
    closed = np.ascontiguousarray(points, np.int32).view(np.int64)[order, 0].view(np.int32).reshape(-1, 2)
    start, last, most = behind - num - 1, behind - 1, int(closed.max())
    if most >= _WIDEST:
        return [_slowly(closed[at : end + 1]) for at, end in zip(start.tolist(), last.tolist(), strict=True)]
    (begin, left), (right, end) = _tables(10_000 if most < 10_000 else _WIDEST)
    x, y = closed.T
    words = np.empty((len(order), 2), np.uint64)
    words[:, 0], words[:, 1] = left[x], right[y]
    words[start, 0], words[last, 1] = begin[x[start]], end[y[last]]
    return words.tobytes().translate(None, b"\0").split(b"\n")[:-1]


@cache
def _tables(size: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Of each number below size the text as eight bytes, zeros behind: `[[x,` and `[x,`, `y],` and `y]]` ↵."""
    numbers = [b"%d" % number for number in range(size)]

    def table(pattern: bytes) -> np.ndarray:
        return np.array([pattern % number for number in numbers], "S8").view(np.uint64)

    return (table(b"[[%b,"), table(b"[%b,")), (table(b"%b],"), table(b"%b]]\n"))


def _slowly(points: np.ndarray) -> bytes:
    """One ring of an image that is wider or higher than any table."""
    return b"[%b]" % b",".join(b"[%d,%d]" % (x, y) for x, y in points.tolist())


# Axes: P points of all rings one after the other, R rings


def geojson(polygons: Iterable[Polygon]) -> bytes:
    """A FeatureCollection that QuPath opens as annotations; x and y in pixel corners, y down."""
    polygons = list(polygons)
    rings = [ring for polygon in polygons for ring in (polygon.points, *polygon.holes)]
    if not rings:
        return collection([], [], [])
    points, num = np.concatenate(rings), np.array([len(ring) for ring in rings])
    is_outline = np.array([n == 0 for polygon in polygons for n in range(1 + len(polygon.holes))])
    first = np.cumsum(num) - num
    backwards = (_turn(points, first, num) > 0) != is_outline
    texts = ring_texts(points, first, num, backwards)
    of_each = grouped(texts, [1 + len(polygon.holes) for polygon in polygons])
    about = [(polygon.area, polygon.confidence) for polygon in polygons]
    return collection(of_each, *map(list, zip(*about, strict=True)))


def _turn(points: np.ndarray, first: np.ndarray, num: np.ndarray) -> np.ndarray:
    """(R,) twice what each ring encloses; positive or negative by its direction."""
    x, y = points.astype(np.int64).T
    after = np.arange(1, len(points) + 1)
    after[first + num - 1] = first
    return np.asarray(np.add.reduceat(x * y[after] - x[after] * y, first))


CATEGORY = {"id": 1, "name": "object"}


class CocoFile:
    """Images and annotations of a run; add from any thread, in any order. Without a directory all is in memory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._spool: IO[bytes] = io.BytesIO()
        if directory is not None:
            self._spool = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  lives until close
        self._images: dict[int, tuple[str, int, int]] = {}  # number: its entry, and where its annotations lie
        self._lock = threading.Lock()

    def add(self, number: int, file_name: str, prediction: Prediction) -> None:
        """Take an image and its annotations; number is its id, and its place in the file."""
        self.add_lines(number, file_name, (prediction.height, prediction.width), annotation_lines(prediction))

    def add_lines(self, number: int, file_name: str, size: tuple[int, int], lines: bytes) -> None:
        """The same of what annotation_lines made, perhaps elsewhere and long ago; size is (H, W)."""
        image = {"id": number, "file_name": file_name, "height": size[0], "width": size[1]}
        with self._lock:
            start = self._spool.seek(0, 2)
            self._spool.write(lines)
            self._images[number] = (_dumps(image).decode(), start, len(lines))

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, piece by piece: images by number, annotations numbered from 1."""
        order = [(image, *self._images[image]) for image in sorted(self._images)]
        images = ",\n".join(entry for _, entry, _, _ in order).encode()
        yield b'{"info":{"description":"brim"},"categories":[' + _dumps(CATEGORY) + b'],\n"images":[' + images
        yield b'],\n"annotations":['
        number = 0
        for image, _, start, length in order:
            self._spool.seek(start)
            for line in self._spool.read(length).splitlines():
                number += 1
                yield (b",\n" if number > 1 else b"\n") + f'{{"id":{number},"image_id":{image},'.encode() + line[1:]
        yield b"]}\n"

    def close(self) -> None:
        """Forget what was gathered."""
        with suppress(OSError):  # what did not fit on the disk is not needed any more
            self._spool.close()


def annotation_lines(prediction: Prediction) -> bytes:
    """An image's annotations, one JSON object a line, without what depends on the others of the file: their ids."""
    return b"".join(_dumps(_annotation(polygon, prediction)) + b"\n" for polygon in prediction.polygons)


def _annotation(polygon: Polygon, prediction: Prediction) -> dict[str, Any]:
    left, top = polygon.points.min(0).tolist()
    right, bottom = polygon.points.max(0).tolist()
    # COCO's polygons have no holes: several rings are several parts.
    outline: Any = [polygon.points.ravel().tolist()]
    return {
        "category_id": CATEGORY["id"],
        "segmentation": _run_lengths(polygon, prediction.height, prediction.width) if polygon.holes else outline,
        "bbox": [left, top, right - left, bottom - top],
        "area": polygon.area,
        "iscrowd": 0,
        "score": round(polygon.confidence, 6),
    }


def _run_lengths(polygon: Polygon, height: int, width: int) -> dict[str, Any]:
    """COCO's uncompressed run lengths: outside, inside, outside… down the columns, from the left."""
    start, end = polygon.points.min(0), polygon.points.max(0)
    corner = Polygon(polygon.points - start, tuple(hole - start for hole in polygon.holes), 0, 0)
    columns = fill([corner], int(end[1] - start[1]), int(end[0] - start[0])).T
    change = np.diff(np.pad(columns.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    column, row = np.nonzero(change)  # by turns where a run of the column starts and where it ends
    bounds = (column + start[0]) * height + row + start[1]
    merged = np.flatnonzero(bounds[1:-1:2] == bounds[2::2]) * 2 + 1  # a run that goes on in the next column
    bounds = np.delete(bounds, np.concatenate([merged, merged + 1]))
    return {"size": [height, width], "counts": np.diff(bounds, prepend=0, append=height * width).tolist()}


def _dumps(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_VERSION, _RECTANGLE, _TRACED = 228, 1, 8  # a shape calls itself a rectangle: its bounds, for readers without shapes
_MOVE, _LINE, _CLOSE = 0.0, 1.0, 4.0
_LARGEST_SHORT, _MOST_POINTS = 2**15 - 1, 2**16 - 1


def roi_zip(polygons: Iterable[Polygon]) -> bytes:
    """A zip with one region for each polygon, numbered in their order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, polygon in enumerate(polygons, 1):
            entry = zipfile.ZipInfo(f"{number:05d}.roi")  # without a date: the same polygons are the same bytes
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, roi_bytes(polygon))
    return stream.getvalue()


def roi_bytes(polygon: Polygon) -> bytes:
    """One polygon in ImageJ's format."""
    points = polygon.points
    start, end = points.min(0), points.max(0)
    if polygon.holes or len(points) > _MOST_POINTS or end.max() > _LARGEST_SHORT:
        shape = np.concatenate([_segments(ring) for ring in (points, *polygon.holes)])
        floats: bytes = shape.astype(">f4").tobytes()
        return _header(_RECTANGLE, start, end, num_floats=len(shape)) + floats
    corners: bytes = (points - start).T.astype(">i2").tobytes()  # all x, then all y
    return _header(_TRACED, start, end, num_points=len(points)) + corners


def _header(kind: int, start: np.ndarray, end: np.ndarray, *, num_points: int = 0, num_floats: int = 0) -> bytes:
    left, top, right, bottom = (min(int(side), _LARGEST_SHORT) for side in (*start, *end))
    head = struct.pack(">4sHBBhhhhH", b"Iout", _VERSION, kind, 0, top, left, bottom, right, num_points)
    return head.ljust(36, b"\0") + struct.pack(">i", num_floats).ljust(28, b"\0")


def _segments(ring: np.ndarray) -> np.ndarray:
    """A closed ring as ImageJ's numbers: what to do, x, y for each point, and the end."""
    kinds = np.full((len(ring), 1), _LINE)
    kinds[0] = _MOVE
    return np.append(np.hstack([kinds, ring]).ravel(), _CLOSE)

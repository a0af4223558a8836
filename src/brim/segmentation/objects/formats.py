"""Polygons in the formats of other programs: GeoJSON (QuPath), COCO and ImageJ regions. Needs only NumPy.

GeoJSON is written by a few operations on all points together. Nested lists would take ten times as long, more than
finding the points, and a service writes hundreds of such texts a second under the interpreter lock.
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

from brim.segmentation.objects.polygons import Polygon, Prediction, Rings, doubled_areas, fill, measures
from brim.segmentation.objects.tables import Measurements, json_texts

# Axes: C points of all rings one after the other, R rings, N polygons


RINGS = "application/x-brim-rings"  # media type of ImageObjects.to_bytes, for a caller that writes the GeoJSON itself
MEDIA_TYPES = {
    "geojson": "application/geo+json",
    "coco": "application/json",
    "roi": "application/zip",
    "mask": "image/png",
    "overlay": "image/png",
    "labels": "image/tiff",
    "csv": "text/csv",
    "imagej": "application/zip",
    "ome-zarr": "application/zip",
}
COLOUR = (255, 200, 0)  # of an object in QuPath
_COLOURS = (COLOUR, (0, 160, 255), (230, 60, 180), (80, 200, 80), (255, 110, 60), (150, 120, 255))  # of classes

_FEATURE = (
    b'{"type":"Feature","geometry":{"type":"Polygon","coordinates":[%%b]},"properties":{"objectType":"annotation",'
    b'"classification":{"name":"object","color":[%d,%d,%d]},"measurements":{"area_px":%%a,"confidence":%%a}}}' % COLOUR
)
_DETECTION = (
    b'{"type":"Feature","id":%%d,"geometry":{"type":"Polygon","coordinates":[%%b]},"properties":{"objectType":'
    b'"detection","class":%b,"classification":{"name":%b,"color":[%d,%d,%d]},"measurements":{%%b}}}'
)
_WIDEST = 10**5  # from here on a number with its brackets does not fit into eight bytes


def geojson_of(rings: Rings, measurements: Measurements | None = None, first_number: int = 1) -> bytes:
    """The same as `geojson(to_polygons(rings), measurements)`, without making the polygons; instances are numbered from
    first_number on."""
    owned = np.flatnonzero(rings.owner >= 0)
    if not len(owned):
        return collection([], [], [])
    # an outline begins above its holes, so it comes first
    order = owned[np.argsort(rings.owner[owned], kind="stable")]
    first = rings.first[order]
    num = rings.first[order + 1] - first
    texts = ring_texts(rings.points, first, num, np.ones(len(order), bool))  # outlines run downwards first
    outlines, area, confidence = measures(rings)
    if len(outlines) < len(order):
        texts = grouped(texts, np.bincount(rings.owner[owned], minlength=1)[outlines].tolist())
    if measurements is not None:
        return detections(texts, measurements, first_number)
    return collection(texts, area.tolist(), confidence.tolist())


def detections(coordinates: Sequence[bytes], measurements: Measurements, first_number: int = 1) -> bytes:
    """The whole text of instances: numbered, with their class and measurements."""
    names = [json.dumps(name).encode().replace(b"%", b"%%") for name in measurements.classes]
    templates = [_DETECTION % (name, name, *_COLOURS[kind % len(_COLOURS)]) for kind, name in enumerate(names)]
    named = [templates[kind] for kind in measurements.kind.tolist()]
    numbers = range(first_number, first_number + len(named))
    values = chain.from_iterable(zip(numbers, coordinates, json_texts(measurements), strict=True))
    features = b",".join(named) % tuple(values)
    return b'{"type":"FeatureCollection","features":[%b]}' % features


def collection(coordinates: Sequence[bytes], area: Sequence[float], confidence: Sequence[float]) -> bytes:
    """The whole text; coordinates holds the rings of each polygon as text."""
    rounded = np.round(np.asarray(confidence), 6).tolist()
    values = chain.from_iterable(zip(coordinates, area, rounded, strict=True))
    features = b",".join([_FEATURE] * len(coordinates)) % tuple(values)
    return b'{"type":"FeatureCollection","features":[%b]}' % features


def grouped(texts: list[bytes], sizes: Sequence[int]) -> list[bytes]:
    """Join the texts of the rings of each polygon; sizes are their numbers of rings."""
    rest = iter(texts)
    return [next(rest) if size == 1 else b",".join([next(rest) for _ in range(size)]) for size in sizes]


def ring_texts(points: np.ndarray, first: np.ndarray, num: np.ndarray, backwards: np.ndarray) -> list[bytes]:
    """Each ring as `[[x,y],…,[x,y]]`, closed.

    first, num  (R,)  index of the ring's first point, and number of its points
    backwards   (R,)  whether to write them in reverse: the standard wants outlines counter-clockwise, holes clockwise
    """
    behind = np.cumsum(num + 1)
    step, head = np.where(backwards, -1, 1), np.where(backwards, first + num - 1, first)
    # index of each point of the text; the first of a ring is repeated at its end
    order = np.repeat(step, num + 1) * np.arange(behind[-1]) + np.repeat(head - step * (behind - num - 1), num + 1)
    order[behind - 1] = head
    # each point as one 64-bit number: gathering rows of two is ten times as slow
    closed = np.ascontiguousarray(points, np.int32).view(np.int64)[order, 0].view(np.int32).reshape(-1, 2)
    start, last, most = behind - num - 1, behind - 1, int(closed.max())
    if most >= _WIDEST:
        parts = [closed[at : end + 1].tolist() for at, end in zip(start.tolist(), last.tolist(), strict=True)]
        return [json.dumps(part, separators=(",", ":")).encode() for part in parts]
    (begin, left), (right, end) = _tables(10_000 if most < 10_000 else _WIDEST)
    x, y = closed.T
    words = np.empty((len(order), 2), np.uint64)
    words[:, 0], words[:, 1] = left[x], right[y]
    words[start, 0], words[last, 1] = begin[x[start]], end[y[last]]
    return words.tobytes().translate(None, b"\0").split(b"\n")[:-1]


@cache
def _tables(size: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Each number below size as eight bytes of text, padded with zeros: `[[x,` and `[x,`, `y],` and `y]]` ↵."""
    numbers = [b"%d" % number for number in range(size)]

    def table(pattern: bytes) -> np.ndarray:
        return np.array([pattern % number for number in numbers], "S8").view(np.uint64)

    return (table(b"[[%b,"), table(b"[%b,")), (table(b"%b],"), table(b"%b]]\n"))


def geojson(polygons: Iterable[Polygon], measurements: Measurements | None = None) -> bytes:
    """A FeatureCollection that QuPath opens as annotations; x and y in pixel corners, y down.

    With measurements, which instances have, they are detections with a number.
    """
    polygons = list(polygons)
    rings = [ring for polygon in polygons for ring in (polygon.points, *polygon.holes)]
    if not rings:
        return collection([], [], [])
    points, num = np.concatenate(rings), np.array([len(ring) for ring in rings])
    is_outline = np.array([n == 0 for polygon in polygons for n in range(1 + len(polygon.holes))])
    first = np.cumsum(num) - num
    texts = ring_texts(points, first, num, (doubled_areas(points, first, num) > 0) != is_outline)
    of_each = grouped(texts, [1 + len(polygon.holes) for polygon in polygons])
    if measurements is not None:
        return detections(of_each, measurements)
    return collection(of_each, [polygon.area for polygon in polygons], [polygon.confidence for polygon in polygons])


CATEGORY = {"id": 1, "name": "object"}


class CocoFile:
    """Images and annotations of a run, added from any thread in any order; kept in memory without a directory."""

    def __init__(self, directory: Path | None = None, classes: Sequence[str] = ()) -> None:
        self._categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)] or [CATEGORY]
        self._spool: IO[bytes] = io.BytesIO()
        if directory is not None:
            self._spool = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  lives until close
        self._images: dict[int, tuple[str, int, int]] = {}  # number: entry, start and length of its annotations
        self._lock = threading.Lock()

    def add(self, number: int, file_name: str, prediction: Prediction) -> None:
        """Add an image and its annotations; number is its id and its position in the file."""
        self.add_lines(number, file_name, (prediction.height, prediction.width), annotation_lines(prediction))

    def add_lines(self, number: int, file_name: str, size: tuple[int, int], lines: bytes) -> None:
        """Add an image with its annotation_lines; size is (H, W)."""
        image = {"id": number, "file_name": file_name, "height": size[0], "width": size[1]}
        with self._lock:
            start = self._spool.seek(0, 2)
            self._spool.write(lines)
            self._images[number] = (_dumps(image).decode(), start, len(lines))

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes in parts: images by number, annotations numbered from 1."""
        order = [(image, *self._images[image]) for image in sorted(self._images)]
        images = ",\n".join(entry for _, entry, _, _ in order).encode()
        yield b'{"info":{"description":"brim"},"categories":' + _dumps(self._categories) + b',\n"images":[' + images
        yield b'],\n"annotations":['
        number = 0
        for image, _, start, length in order:
            self._spool.seek(start)
            for line in self._spool.read(length).splitlines():
                number += 1
                yield (b",\n" if number > 1 else b"\n") + f'{{"id":{number},"image_id":{image},'.encode() + line[1:]
        yield b"]}\n"

    def close(self) -> None:
        with suppress(OSError):  # data that did not fit on the disk is no longer needed
            self._spool.close()


def annotation_lines(prediction: Prediction) -> bytes:
    """An image's annotations, one JSON object per line, without ids, which depend on the other images."""
    measured = prediction.measurements
    kinds = [0] * len(prediction.polygons) if measured is None else measured.kind.tolist()
    pairs = zip(prediction.polygons, kinds, strict=True)
    return b"".join(_dumps(_annotation(polygon, prediction, kind + 1)) + b"\n" for polygon, kind in pairs)


def _annotation(polygon: Polygon, prediction: Prediction, category: int) -> dict[str, Any]:
    left, top = polygon.points.min(0).tolist()
    right, bottom = polygon.points.max(0).tolist()
    # COCO's polygons have no holes: several rings would be several parts.
    outline: Any = [polygon.points.ravel().tolist()]
    return {
        "category_id": category,
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
    column, row = np.nonzero(change)  # alternately starts and ends of runs
    bounds = (column + start[0]) * height + row + start[1]
    merged = np.flatnonzero(bounds[1:-1:2] == bounds[2::2]) * 2 + 1  # a run that continues in the next column
    bounds = np.delete(bounds, np.concatenate([merged, merged + 1]))
    return {"size": [height, width], "counts": np.diff(bounds, prepend=0, append=height * width).tolist()}


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_VERSION, _RECTANGLE, _TRACED = 228, 1, 8  # composite shapes have the type of their bounds, a rectangle
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
    """A closed ring in ImageJ's encoding: command, x, y for each point, then the closing command."""
    kinds = np.full((len(ring), 1), _LINE)
    kinds[0] = _MOVE
    return np.append(np.hstack([kinds, ring]).ravel(), _CLOSE)

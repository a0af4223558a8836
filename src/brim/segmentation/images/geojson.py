"""Polygons as GeoJSON, in a few operations on all of their points.

As nested lists, points take ten times as long to write, which is more than finding them; and whoever serves writes
hundreds of such texts a second, one at a time under the interpreter's lock.
"""

# Axes: P points of all rings one after the other, R rings, N polygons

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

import numpy as np

from brim.segmentation.objects.outlines import Rings
from brim.segmentation.objects.polygons import Polygon, measures

COLOUR = (255, 200, 0)  # of an object in QuPath

_FEATURE = (
    b'{"type":"Feature","geometry":{"type":"Polygon","coordinates":[%%b]},"properties":{"objectType":"annotation",'
    b'"classification":{"name":"object","color":[%d,%d,%d]},"measurements":{"area_px":%%a,"confidence":%%a}}}' % COLOUR
)
_WIDEST = 10**5  # from here on a number, with what stands around it, does not fit into eight bytes


def geojson(polygons: Iterable[Polygon]) -> bytes:
    """A FeatureCollection that QuPath opens as annotations; x and y in pixel corners, y down."""
    polygons = list(polygons)
    rings = [ring for polygon in polygons for ring in (polygon.points, *polygon.holes)]
    if not rings:
        return _collection([], [], [])
    points, num = np.concatenate(rings), np.array([len(ring) for ring in rings])
    is_outline = np.array([n == 0 for polygon in polygons for n in range(1 + len(polygon.holes))])
    first = np.cumsum(num) - num
    backwards = (_turn(points, first, num) > 0) != is_outline
    texts = _ring_texts(points, first, num, backwards)
    of_each = _grouped(texts, [1 + len(polygon.holes) for polygon in polygons])
    about = [(polygon.area, polygon.confidence) for polygon in polygons]
    return _collection(of_each, *map(list, zip(*about, strict=True)))


def geojson_of(rings: Rings) -> bytes:
    """What `geojson` writes of the polygons of these rings, without making them."""
    owned = np.flatnonzero(rings.owner >= 0)
    if not len(owned):
        return _collection([], [], [])
    # an outline begins above its holes, so it is the first of those that belong to it
    order = owned[np.argsort(rings.owner[owned], kind="stable")]
    first = rings.first[order]
    num = rings.first[order + 1] - first
    texts = _ring_texts(rings.points, first, num, np.ones(len(order), bool))  # outlines run downwards first
    outlines, area, confidence = measures(rings)
    if len(outlines) < len(order):
        texts = _grouped(texts, np.bincount(rings.owner[owned], minlength=1)[outlines].tolist())
    return _collection(texts, area.tolist(), confidence.tolist())


def _collection(coordinates: Sequence[bytes], area: Sequence[float], confidence: Sequence[float]) -> bytes:
    """The whole text, from that of each polygon's rings."""
    rounded = np.round(np.asarray(confidence), 6).tolist()
    values = chain.from_iterable(zip(coordinates, area, rounded, strict=True))
    features = b",".join([_FEATURE] * len(coordinates)) % tuple(values)
    return b'{"type":"FeatureCollection","features":[%b]}' % features


def _grouped(texts: list[bytes], sizes: Sequence[int]) -> list[bytes]:
    """The texts of rings that belong to one polygon as one."""
    rest = iter(texts)
    return [next(rest) if size == 1 else b",".join([next(rest) for _ in range(size)]) for size in sizes]


def _turn(points: np.ndarray, first: np.ndarray, num: np.ndarray) -> np.ndarray:
    """(R,) twice what each ring encloses; positive or negative by its direction."""
    x, y = points.astype(np.int64).T
    after = np.arange(1, len(points) + 1)
    after[first + num - 1] = first
    return np.asarray(np.add.reduceat(x * y[after] - x[after] * y, first))


def _ring_texts(points: np.ndarray, first: np.ndarray, num: np.ndarray, backwards: np.ndarray) -> list[bytes]:
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

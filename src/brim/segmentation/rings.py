"""Rings of pixel edges as one process hands them to another, and as GeoJSON text. Needs NumPy alone.

The text is made in a few operations on all points together. As nested lists, points take ten times as long to write,
which is more than finding them; and a service writes hundreds of such texts a second under the interpreter's lock.
"""

# Axes: C points of all rings one after the other, R rings, N polygons

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

RINGS = "application/x-brim-rings"  # media type of Rings.to_bytes, for a caller that writes the GeoJSON itself
COLOUR = (255, 200, 0)  # of an object in QuPath

_FEATURE = (
    b'{"type":"Feature","geometry":{"type":"Polygon","coordinates":[%%b]},"properties":{"objectType":"annotation",'
    b'"classification":{"name":"object","color":[%d,%d,%d]},"measurements":{"area_px":%%a,"confidence":%%a}}}' % COLOUR
)
_WIDEST = 10**5  # from here on a number, with what stands around it, does not fit into eight bytes


class Rings(NamedTuple):
    """Rings in the order of their first points, from top to bottom; an outline starts at its upper left."""

    points: np.ndarray  # (C, 2) int32, x and y; outlines run downwards first, holes the other way
    first: np.ndarray  # (R + 1,) where each ring starts in points, and where the last one ends
    area: np.ndarray  # (R,) float64, pixels that the ring encloses; negative for a hole
    mass: np.ndarray  # (R,) float64, sum of their probabilities, signed like the area; exact
    owner: np.ndarray  # (R,) the outline that the ring belongs to; -1: it belongs to none

    def between(self, start: int, end: int, top: int) -> "Rings":
        """The rings from start to end, of the mask that begins in row top of the stack; the points are copied."""
        first, own = self.first[start : end + 1], slice(start, end)
        points = self.points[first[0] : first[-1]] - np.array([0, top], np.int32)
        owner = np.maximum(self.owner[own] - start, -1)
        return Rings(points, first - first[0], self.area[own], self.mass[own], owner)

    @property
    def num_outlines(self) -> int:
        """Objects."""
        return int((self.owner == np.arange(len(self.owner))).sum())

    def to_bytes(self) -> bytes:
        """For another process of this machine, in a few copies."""
        head = np.array([len(self.points), len(self.owner)], np.int64)
        return b"".join(
            (head.tobytes(), *(a.astype(t, copy=False).tobytes() for a, t in zip(self, _DTYPES, strict=True)))
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Rings":
        """What to_bytes wrote; the arrays are views of it."""
        num_points, num_rings = np.frombuffer(data, np.int64, 2).tolist()
        sizes, at, arrays = (2 * num_points, num_rings + 1, num_rings, num_rings, num_rings), 16, []
        for size, dtype in zip(sizes, _DTYPES, strict=True):
            arrays.append(np.frombuffer(data, dtype, size, at))
            at += size * dtype.itemsize
        return cls(arrays[0].reshape(-1, 2), *arrays[1:])


_DTYPES: tuple[Any, ...] = tuple(map(np.dtype, (np.int32, np.int64, np.float64, np.float64, np.int64)))  # of Rings


def measures(rings: Rings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each polygon: the ring that is its outline, its area in pixels, its confidence."""
    outlines = np.flatnonzero(rings.owner == np.arange(len(rings.owner)))
    belongs = np.flatnonzero(rings.owner >= 0)
    owner, num = rings.owner[belongs], len(rings.owner)
    area, mass = (np.bincount(owner, values[belongs], num)[outlines] for values in (rings.area, rings.mass))
    return outlines, area, np.clip(mass / area, 0, 1)


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

"""Objects of an image: rings of pixel edges, the polygons made of them, and back to a mask. Needs NumPy alone.

An outline runs along the edges of pixels, so its points are pixel corners: x from 0 to W, y from 0 to H, y down. A
single pixel is a unit square of area 1, and an area is a number of pixels. Objects are 4-connected: two that share
only a corner are two polygons, since a ring that touches itself is not a valid polygon for shapely or QuPath.
No pixel is lost: `fill(trace(mask)) == mask`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


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


# Axes: H rows, W columns, P points of all rings one after the other, R rings


@dataclass(frozen=True, slots=True)
class Polygon:
    """One object: its outline, its holes, and how sure the network is of it."""

    points: np.ndarray  # (N, 2) int32, x and y of pixel corners; not closed, no point on a straight line
    holes: tuple[np.ndarray, ...]  # rings like points, running the other way
    area: float  # pixels inside, holes excluded
    confidence: float  # mean probability of the pixels inside


def to_polygons(rings: Rings) -> list[Polygon]:
    """Polygons of the rings that belong to one; all Python that runs once per object is here."""
    outlines, area, confidence = measures(rings)
    belongs = np.flatnonzero(rings.owner >= 0)
    first, points = rings.first.tolist(), rings.points
    parts = [points[start:end] for start, end in pairwise(first)]
    holes: dict[int, list[np.ndarray]] = {}
    inner = belongs[rings.owner[belongs] != belongs]
    for ring, owner in zip(inner.tolist(), rings.owner[inner].tolist(), strict=True):
        holes.setdefault(owner, []).append(parts[ring])
    chosen = outlines.tolist()
    within = [tuple(holes[ring]) if ring in holes else () for ring in chosen]
    return list(map(Polygon, [parts[ring] for ring in chosen], within, area.tolist(), confidence.tolist()))


def fill(polygons: Iterable[Polygon], height: int, width: int) -> np.ndarray:
    """Mask (H, W) bool of the pixels whose centre is inside any polygon; the inverse of trace."""
    outlines = [(ring, kind) for p in polygons for ring, kind in ((p.points, 1), *((hole, -1) for hole in p.holes))]
    if not outlines:
        return np.zeros((height, width), bool)
    points = np.concatenate([ring for ring, _ in outlines])
    lengths = np.array([len(ring) for ring, _ in outlines])
    first = np.cumsum(lengths) - lengths
    after = np.arange(1, len(points) + 1)
    after[first + lengths - 1] = first
    turn = np.sign(_areas(points, after, first)) * [kind for _, kind in outlines]
    return _paint(points, points[after], np.repeat(turn, lengths), (height, width))


def _paint(start: np.ndarray, end: np.ndarray, turn: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Mask of the pixels that edges (P, 2) to (P, 2) wind around. turn (P,): -1 for those to be run the other way."""
    height, width = shape
    weight = np.sign(end[:, 1] - start[:, 1]) * turn
    swap = (end[:, 1] < start[:, 1])[:, None]
    top, bottom = np.where(swap, end, start), np.where(swap, start, end)
    num_rows = bottom[:, 1] - top[:, 1]
    edge = np.repeat(np.arange(len(top)), num_rows)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    slope = (bottom[:, 0] - top[:, 0]) / np.maximum(num_rows, 1)
    column = np.clip(np.ceil(top[edge, 0] + (row + 0.5) * slope[edge] - 0.5), 0, width).astype(np.int64)
    row += top[edge, 1]
    seen = (row >= 0) & (row < height)
    winding = np.zeros((height, width + 1), np.int32)
    np.add.at(winding, (row[seen], column[seen]), weight[edge[seen]])
    return np.asarray(np.cumsum(winding, axis=1, out=winding)[:, :width] != 0)


def _areas(points: np.ndarray, after: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(R,) what each ring encloses; positive or negative by its direction."""
    x, y = points.astype(np.int64).T
    return np.asarray(np.add.reduceat(x * y[after] - x[after] * y, first) / 2)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The objects of one image, or why there are none: `error` is set and the rest is empty."""

    name: str  # of the image: its path, or what the caller called it
    height: int  # pixels, of the image as it was given
    width: int
    polygons: tuple[Polygon, ...] = ()
    mask: np.ndarray | None = None  # (H, W) uint8, 0 or 255
    error: str | None = None

    @property
    def confidence(self) -> float | None:
        """Mean probability over all pixels inside polygons; None when there are none."""
        area = sum(polygon.area for polygon in self.polygons)
        if not area:
            return None
        return sum(polygon.confidence * polygon.area for polygon in self.polygons) / area

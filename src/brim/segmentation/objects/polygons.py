"""Between masks and polygons, without losing a pixel: `fill(trace(mask)) == mask`.

An outline runs along the edges of pixels, so its points are pixel corners: x from 0 to W, y from 0 to H, y down. A
single pixel is a unit square of area 1, and an area is a number of pixels. Objects are 4-connected: two that share
only a corner are two polygons, since a ring that touches itself is not a valid polygon for shapely or QuPath.
"""

# Axes: H rows, W columns, P points of all rings one after the other, R rings

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from brim.errors import ConfigError
from brim.segmentation.objects.outlines import find_rings, stack
from brim.segmentation.rings import Rings, measures


@dataclass(frozen=True, slots=True)
class Polygon:
    """One object: its outline, its holes, and how sure the network is of it."""

    points: np.ndarray  # (N, 2) int32, x and y of pixel corners; not closed, no point on a straight line
    holes: tuple[np.ndarray, ...]  # rings like points, running the other way
    area: float  # pixels inside, holes excluded
    confidence: float  # mean probability of the pixels inside


def trace(mask: np.ndarray, probability: np.ndarray | None = None, *, detect_holes: bool = True) -> list[Polygon]:
    """Polygons of a mask's objects, from top to bottom.

    mask         (H, W)  any dtype  non-zero is inside
    probability  (H, W)  float      in [0, 1]; without it every confidence is 1

    Without detect_holes an outline stands for all it encloses: holes, and whatever lies in them, count as inside.
    """
    if mask.ndim != 2 or (probability is not None and probability.shape != mask.shape):
        got = "" if probability is None else f" with probabilities {probability.shape}"
        raise ConfigError(f"mask {mask.shape}{got}: expected (H, W), and probabilities of the same shape")
    if not mask.size:
        return []
    return trace_all([mask], None if probability is None else [probability], detect_holes=detect_holes)[0]


def trace_all(
    masks: Sequence[np.ndarray], probabilities: Sequence[np.ndarray] | None = None, *, detect_holes: bool = True
) -> list[list[Polygon]]:
    """What trace gives for each of several masks, at least a pixel in each; they are found together."""
    pile = stack(masks)
    rings = find_rings(pile, probabilities, detect_holes)
    ends = np.searchsorted(rings.points[rings.first[:-1], 1], pile.tops)  # rings come from top to bottom
    return [
        to_polygons(rings.between(start, end, top))
        for (start, end), top in zip(pairwise(ends.tolist()), pile.tops.tolist(), strict=False)
    ]


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

"""Between masks and polygons, without losing a pixel: `fill(trace(mask)) == mask`.

An outline runs along the edges of pixels, so its points are pixel corners: x from 0 to W, y from 0 to H, y down. A
single pixel is a unit square of area 1, and an area is a number of pixels. Objects are 4-connected: two that share
only a corner are two polygons, since a ring that touches itself is not a valid polygon for shapely or QuPath.

OpenCV follows pixel centres. In a mask enlarged twice (without smoothing) every outline pixel c, of an object or of a
hole, lies beside the corner (c + 1) // 2, which turns its contours into ours. It also joins what touches at a corner;
such objects are recognised by a corner that occurs twice, and traced again with that corner cut off.
"""

# Axes: H rows, W columns, P points of all rings one after the other, R rings

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from brim.errors import ConfigError

_ONE_BY_ONE = 8  # touching objects cut out singly; from more of them on, one pass over the whole mask is quicker


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
    rings = _rings(mask if mask.dtype == np.uint8 else (mask != 0).view(np.uint8))
    if not detect_holes and rings.holes.any():
        rings = _rings(_paint(rings.select(~rings.holes), mask.shape).view(np.uint8))
    return _polygons(rings, probability) if len(rings.first) else []


def fill(polygons: Iterable[Polygon], height: int, width: int) -> np.ndarray:
    """Mask (H, W) bool of the pixels whose centre is inside any polygon; the inverse of trace."""
    outlines = [(ring, kind) for p in polygons for ring, kind in ((p.points, 1), *((hole, -1) for hole in p.holes))]
    if not outlines:
        return np.zeros((height, width), bool)
    first = np.cumsum([0, *(len(ring) for ring, _ in outlines[:-1])])
    rings = _Rings(np.concatenate([ring for ring, _ in outlines]), first, np.arange(len(first)))
    turn = np.sign(_areas(rings)) * [kind for _, kind in outlines]
    return _paint(rings, (height, width), turn)


class _Rings(NamedTuple):
    """Closed rings of several objects."""

    points: np.ndarray  # (P, 2) int32
    first: np.ndarray  # (R,) where each ring starts in points
    owner: np.ndarray  # (R,) the ring that is the outline of the same object; of an outline: itself

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.first, append=len(self.points))

    @property
    def holes(self) -> np.ndarray:
        return np.asarray(self.owner != np.arange(len(self.owner)))

    def following(self) -> np.ndarray:
        """(P,) the index of the next point of the same ring."""
        index = np.arange(1, len(self.points) + 1)
        index[np.append(self.first[1:], len(self.points)) - 1] = self.first
        return index

    def select(self, chosen: np.ndarray) -> "_Rings":
        """The chosen rings (R,) bool: whole objects, or outlines alone."""
        points, lengths = self.points[np.repeat(chosen, self.lengths)], self.lengths[chosen]
        return _Rings(points, np.cumsum(lengths) - lengths, (np.cumsum(chosen) - 1)[self.owner[chosen]])


# Mask to rings


def _rings(pixels: np.ndarray) -> _Rings:
    """Rings of all 4-connected objects of a mask (H, W) uint8."""
    twice = cv2.resize(pixels, None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
    rings = _contours(twice, 2)
    corners, owners = _met_twice(rings, pixels.shape)
    if not len(owners):
        return rings
    groups = [owners] if len(np.unique(owners)) > _ONE_BY_ONE else [owners[owners == one] for one in np.unique(owners)]
    whole = [rings.select(np.isin(rings.owner, owners, invert=True))]
    parts = [_cut_apart(rings.select(np.isin(rings.owner, group)), corners[np.isin(owners, group)]) for group in groups]
    return _joined(whole + parts)


def _contours(enlarged: np.ndarray, scale: int) -> _Rings:
    """OpenCV's contours of a mask enlarged scale times, as rings of pixel corners."""
    contours, hierarchy = cv2.findContours(enlarged, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if not contours:
        return _Rings(np.zeros((0, 2), np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    parent = hierarchy.reshape(-1, 4)[:, 3]
    lengths = np.fromiter(map(len, contours), np.int64, len(contours))
    points = (np.concatenate(contours).reshape(-1, 2) + 1) // scale
    rings = _Rings(points, np.cumsum(lengths) - lengths, np.where(parent < 0, np.arange(len(parent)), parent))
    return _straightened(_squared(rings) if scale == 3 else rings)


def _squared(rings: _Rings) -> _Rings:
    """Put back the corners that `_cut_apart` took: only at a lower right one does this leave a slanting step."""
    after = rings.points[rings.following()]
    steps = after != rings.points
    slanting = steps[:, 0] & steps[:, 1]
    at = np.flatnonzero(slanting) + 1
    points = np.insert(rings.points, at, np.maximum(rings.points, after)[slanting], axis=0)
    return rings._replace(points=points, first=rings.first + np.searchsorted(at, rings.first, side="right"))


def _straightened(rings: _Rings) -> _Rings:
    """Without repeated points, and then without points on straight lines."""
    steps = rings.points[rings.following()] != rings.points
    rings = _kept(rings, steps[:, 0] | steps[:, 1])
    level = rings.points[rings.following(), 1] == rings.points[:, 1]  # the step that leaves each point
    arrives = np.empty_like(level)
    arrives[rings.following()] = level
    return _kept(rings, level != arrives)


def _kept(rings: _Rings, kept: np.ndarray) -> _Rings:
    if kept.all():
        return rings
    before = np.cumsum(kept) - kept
    return rings._replace(points=rings.points[kept], first=before[rings.first])


def _met_twice(rings: _Rings, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Corners (K, 2) that occur twice in the rings of one object, and the object (K,) of each."""
    num_corners, stride = (shape[0] + 1) * (shape[1] + 1), shape[1] + 1
    corner = rings.points[:, 1].astype(np.int64) * stride + rings.points[:, 0]
    key = np.sort(np.repeat(rings.owner, rings.lengths) * num_corners + corner)
    owner, corner = np.divmod(key[1:][key[1:] == key[:-1]], num_corners)
    return np.stack((corner % stride, corner // stride), 1), owner


def _cut_apart(rings: _Rings, corners: np.ndarray) -> _Rings:
    """Trace objects again, those that share only one of the corners (K, 2) as several.

    Enlarged three times, each pixel can lose its corners and still hold together. A corner where an object touches
    itself stays: that is where its hole touches its outline, in a single point, which is valid.
    """
    start, end = rings.points.min(0), rings.points.max(0)
    pixels = _paint(rings._replace(points=rings.points - start), tuple((end - start)[::-1])).view(np.uint8)
    thrice = cv2.resize(pixels, None, fx=3, fy=3, interpolation=cv2.INTER_NEAREST)
    labels = cv2.connectedComponents(pixels, connectivity=4)[1]
    x, y = (corners - start).T
    # Two of the four pixels around such a corner are inside, diagonally: all its neighbours lie in the image.
    apart = labels[y - 1, x - 1] + labels[y - 1, x] != labels[y, x] + labels[y, x - 1]
    x, y = 3 * x[apart], 3 * y[apart]
    for dy, dx in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        thrice[y + dy, x + dx] = 0
    found = _contours(thrice, 3)
    return found._replace(points=found.points + start)


def _joined(several: list[_Rings]) -> _Rings:
    sizes = np.cumsum([0, *(len(rings.points) for rings in several)])
    counts = np.cumsum([0, *(len(rings.first) for rings in several)])
    first = [rings.first + size for rings, size in zip(several, sizes, strict=False)]
    owner = [rings.owner + count for rings, count in zip(several, counts, strict=False)]
    return _Rings(np.concatenate([rings.points for rings in several]), np.concatenate(first), np.concatenate(owner))


# Rings to pixels and polygons


def _paint(rings: _Rings, shape: tuple[int, ...], turn: np.ndarray | None = None) -> np.ndarray:
    """Mask of the pixels that rings wind around. turn (R,): 1 or -1 where a ring has to run the other way."""
    height, width = shape
    after = rings.points[rings.following()]
    weight = np.sign(after[:, 1] - rings.points[:, 1]) * (1 if turn is None else np.repeat(turn, rings.lengths))
    swap = (after[:, 1] < rings.points[:, 1])[:, None]
    top, bottom = np.where(swap, after, rings.points), np.where(swap, rings.points, after)
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


def _areas(rings: _Rings) -> np.ndarray:
    """(R,) pixels that each ring encloses; positive or negative by its direction."""
    x, y = rings.points.astype(np.int64).T
    after = rings.following()
    return np.asarray(np.add.reduceat(x * y[after] - x[after] * y, rings.first) / 2)


def _masses(rings: _Rings, probability: np.ndarray) -> np.ndarray:
    """(R,) sum of the probabilities that each ring encloses, signed like its area.

    Green's theorem on pixels: with the sum over all pixels above and left of each corner at hand, the sum inside a
    ring is a sum over its vertical edges, so that no pixel is looked at twice.
    """
    if probability.dtype not in (np.float32, np.float64):
        probability = probability.astype(np.float32)
    sums = cv2.integral(probability, sdepth=cv2.CV_64F)
    if not np.isfinite(sums[-1, -1]):  # one NaN, inside or outside, would reach every sum behind it
        sums = cv2.integral(np.nan_to_num(probability, posinf=0, neginf=0), sdepth=cv2.CV_64F)
    x, y = rings.points.T
    after, here = rings.following(), sums[y, x]
    return np.asarray(np.add.reduceat(np.where(x[after] == x, here[after] - here, 0.0), rings.first))


def _polygons(rings: _Rings, probability: np.ndarray | None) -> list[Polygon]:
    """Rings as polygons, by their first point: OpenCV's own order differs between its versions."""
    area = np.bincount(rings.owner, _areas(rings))
    mass = area if probability is None else np.bincount(rings.owner, _masses(rings, probability))
    ends = zip(rings.first.tolist(), [*rings.first[1:].tolist(), len(rings.points)], strict=True)
    parts = [rings.points[first:end] for first, end in ends]
    holes: dict[int, list[np.ndarray]] = {}
    for index in np.flatnonzero(rings.holes).tolist():
        holes.setdefault(int(rings.owner[index]), []).append(parts[index])
    outlines = np.flatnonzero(~rings.holes)
    start = rings.points[rings.first[outlines]]
    order = outlines[np.lexsort((start[:, 0], start[:, 1]))]
    confidence = np.clip(mass[order] / area[order], 0, 1).tolist()
    return [
        Polygon(parts[index], tuple(holes.get(index, ())), size, sure)
        for index, size, sure in zip(order.tolist(), np.abs(area[order]).tolist(), confidence, strict=True)
    ]

"""The rings along the pixel edges of masks, by array operations alone.

Many threads trace at once. Python code, and calls that allocate one array per object like OpenCV's findContours, hold
the interpreter lock; here every step is one NumPy operation on all corners of all objects, which releases it. Taking
the lock back after each operation also costs: on 16 cores, four threads that traced one mask at a time did 225 a
second, sixteen 130. So the masks of a batch are traced together, as if stacked; only the steps that read every pixel
run mask by mask, since one mask fits the cache and ten do not.

A corner is a point where an outline turns. Where two pixels touch only diagonally, two outlines turn: such a crossing
is listed twice. Then every corner has one horizontal and one vertical edge, and edges need no search: in reading order
corners 0 and 1, 2 and 3, … are the ends of horizontal edges; sorted by column, of vertical ones.

Probabilities are rounded to multiples of 2⁻²³, so sums of them are exact in any order, and device_rings.py, which does
the same on a GPU, gives the same bits."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import cv2
import numpy as np

from brim.errors import ConfigError
from brim.segmentation.objects.polygons import Polygon, Rings, to_polygons

# Axes: H rows, W columns; C corners; E = C / 2 horizontal edges, edge e from corner 2e on its left to 2e + 1; R rings

_BAND_PIXELS = 2**21  # examined together, so that temporary arrays fit the cache


class _Corners(NamedTuple):
    """Corners in reading order."""

    x: np.ndarray  # (C,)
    y: np.ndarray  # (C,)
    above: np.ndarray  # (C,) bool, whether the pixel above and to the right is inside
    double: np.ndarray  # (C,) bool, whether this is one of the two at a crossing
    mass: np.ndarray  # (C,) float64, sum of 1 + probability over all pixels above and to the left


class _Links(NamedTuple):
    """How edges form rings."""

    upright: np.ndarray  # (C,) corners by column: 0 and 1, 2 and 3, … are the ends of vertical edges
    mate: np.ndarray  # (C,) the other end of a corner's vertical edge
    heads: np.ndarray  # (R,) the first edge of each ring, in reading order
    ring: np.ndarray  # (E,) the ring of each edge
    rank: np.ndarray  # (E,) its position in the ring; the first edge has 0


class _Stack(NamedTuple):
    """Masks that are traced as if one lay below the other."""

    masks: Sequence[np.ndarray]  # (H, W) each, H and W at least 1; W may differ
    tops: np.ndarray  # first row of each mask, and one past the last; one row is free between two masks


def trace(mask: np.ndarray, probability: np.ndarray | None = None, *, detect_holes: bool = True) -> list[Polygon]:
    """Polygons of a mask's objects, from top to bottom.

    mask         (H, W)  any dtype  non-zero is inside
    probability  (H, W)  float      in [0, 1]; without it every confidence is 1

    Without detect_holes, an outline includes all that it encloses: holes and objects inside them.
    """
    if mask.ndim != 2 or (probability is not None and probability.shape != mask.shape):
        got = "" if probability is None else f" with probabilities {probability.shape}"
        raise ConfigError(f"mask {mask.shape}{got}: expected (H, W), and probabilities of the same shape")
    if not mask.size:
        return []
    (rings,) = find_rings([mask], None if probability is None else [probability], detect_holes=detect_holes)
    return to_polygons(rings)


def find_rings(
    masks: Sequence[np.ndarray], probabilities: Sequence[np.ndarray] | None = None, *, detect_holes: bool = True
) -> list[Rings]:
    """Rings of the 4-connected objects of each mask, found together; a mask has at least one pixel.

    Without detect_holes the owner of holes, and of outlines inside holes, is -1.
    """
    if not masks:
        return []
    stack = _Stack(masks, np.cumsum([0, *(len(mask) + 1 for mask in masks)]))
    rings = _find(stack, probabilities, detect_holes)
    ends = np.searchsorted(rings.points[rings.first[:-1], 1], stack.tops)  # rings come from top to bottom
    return [
        rings.between(start, end, top)
        for (start, end), top in zip(pairwise(ends.tolist()), stack.tops.tolist(), strict=False)
    ]


def _find(stack: _Stack, probabilities: Sequence[np.ndarray] | None, detect_holes: bool) -> Rings:
    """Rings of all masks; the rows of their points are those of the stack."""
    corners = _corners(stack, probabilities)
    links = _links(corners)
    to_right, ring, num_rings = corners.above[::2], links.ring, len(links.heads)  # the inside is on the left
    sign = np.where(to_right, 1.0, -1.0)
    # Green's theorem: a ring encloses what lies above its lower edges minus what lies above its upper edges.
    area = np.bincount(ring, sign * (corners.x[1::2] - corners.x[::2]) * corners.y[::2], num_rings)
    mass = area
    if probabilities is not None:
        mass = np.bincount(ring, sign * (corners.mass[1::2] - corners.mass[::2]), num_rings) - area
    first = np.append(0, np.cumsum(np.bincount(ring, minlength=num_rings)))
    points = _in_order(corners, links.mate, first[ring] + links.rank)
    is_hole = to_right[links.heads]
    owner = np.arange(num_rings)
    if is_hole.any():
        owner = (_hole_owners if detect_holes else _outermost)(stack, corners, links, is_hole)
    return Rings(points, 2 * first, area, mass, owner)


def _in_order(corners: _Corners, mate: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Points (C, 2) of horizontal edges by position (E,): the end of each, and of the vertical edge after it.

    The first edge of an outline is on top and runs to the left: it ends at the upper left corner.
    """
    end = np.arange(0, len(mate), 2) + corners.above[::2]
    order = np.empty((len(end), 2), np.intp)
    order[position, 0] = end
    order[position, 1] = mate[end]
    points = np.empty((len(mate), 2), np.int32)
    points[:, 0] = corners.x[order.ravel()]
    points[:, 1] = corners.y[order.ravel()]
    return points


# Corners


def _corners(stack: _Stack, probabilities: Sequence[np.ndarray] | None) -> _Corners:
    bands = [
        _Corners(*band)
        for index, mask in enumerate(stack.masks)
        for band in _bands(mask, None if probabilities is None else probabilities[index], stack.tops[index])
    ]
    corners = bands[0] if len(bands) == 1 else _Corners(*map(np.concatenate, zip(*bands, strict=True)))
    if not corners.double.any():
        return corners
    twice = np.repeat(np.arange(len(corners.x)), corners.double + 1)
    return _Corners(*(values[twice] for values in corners))


def _bands(mask: np.ndarray, probability: np.ndarray | None, start: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Corners of some rows at a time, crossings listed once; start is the mask's first row in the stack."""
    height, width = mask.shape
    num_rows = max(1, _BAND_PIXELS // width)
    sums = np.zeros(width + 1)  # of the bands before
    for top in range(0, height, num_rows):
        bottom = top + num_rows if top + num_rows < height else height + 1
        x, y, above, double = _turns(mask, top, bottom)
        mass = np.zeros(len(x))
        if probability is not None:
            table = _integral(probability[top:bottom])
            mass = table.ravel()[y * (width + 1) + x]
            mass += sums[x]
            sums += table[-1]
        y += start + top
        yield x, y, above, double, mass


def _turns(mask: np.ndarray, top: int, bottom: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Corners at the upper edges of the pixel rows from top to bottom: x, y - top, above, double."""
    stride = mask.shape[1] + 2
    rows = mask[max(top - 1, 0) : bottom]
    framed = np.zeros((bottom - top + 1, stride), bool)  # with the row above, and a background frame
    np.not_equal(rows, 0, out=framed[int(top == 0) :][: len(rows), 1:-1])
    pixels = framed.view(np.uint8).ravel()
    size = (bottom - top) * stride - 1
    # At a corner one vertical edge ends, above or below; at a crossing both do, and both horizontal ones.
    upright = pixels[:-1] ^ pixels[1:]
    double = pixels[:size] ^ pixels[stride : stride + size]
    double &= upright[:size]
    double &= upright[stride:]
    turns = upright[:size] ^ upright[stride:]
    turns |= double
    at = np.flatnonzero(turns.view(bool))
    y = at // stride
    return at - y * stride, y, pixels[at + 1].view(bool), double[at].view(bool)


def _integral(probability: np.ndarray) -> np.ndarray:
    """(H + 1, W + 1) float64 sums of 1 + probability over all pixels above and to the left of each point.

    From 1 to 2 a float32 is a multiple of 2⁻²³: adding 1 rounds, in one pass. NaN and Inf count as 0.
    """
    raised = np.add(probability, np.float32(1), dtype=np.float32)
    sums = cv2.integral(raised, sdepth=cv2.CV_64F)
    if not np.isfinite(sums[-1, -1]):  # one NaN spoils all later sums
        sums = cv2.integral(np.nan_to_num(raised, copy=False, nan=1, posinf=1, neginf=1), sdepth=cv2.CV_64F)
    return np.asarray(sums)


# Edges to rings


def _links(corners: _Corners) -> _Links:
    """Separate the outlines that touch at crossings; then split every ring that still touches itself.

    So objects that share only a corner are two, and where an object touches itself, its hole touches its outline or
    another hole in a single point: both are valid polygons.
    """
    column = corners.x.astype(np.uint16) if corners.x.max(initial=0) < 2**16 else corners.x  # sorts in linear time
    upright = np.argsort(column, kind="stable")
    crossings = np.flatnonzero(corners.double)[::2]
    links = _ranked(_swapped(upright, crossings[corners.above[crossings]]), corners)
    if len(crossings):
        itself = links.ring[crossings >> 1] == links.ring[(crossings + 1) >> 1]
        if itself.any():
            return _ranked(_swapped(links.upright, crossings[itself]), corners)
    return links


def _swapped(upright: np.ndarray, crossings: np.ndarray) -> np.ndarray:
    """Exchange the vertical edges of the two corners at each crossing."""
    if not len(crossings):
        return upright
    other = np.arange(len(upright))
    other[crossings] += 1
    other[crossings + 1] -= 1
    return np.asarray(other[upright])


def _ranked(upright: np.ndarray, corners: _Corners) -> _Links:
    """Find each edge's ring and position by pointer doubling along the rings, backwards.

    `seen` packs the first edge in reading order seen so far (high half) and the steps back to it (low half); the
    minimum wins. When nothing changes, every edge has seen its whole ring.
    """
    mate = np.empty_like(upright)
    mate[upright[::2]], mate[upright[1::2]] = upright[1::2], upright[::2]
    start = np.arange(0, len(upright), 2) + ~corners.above[::2]
    back = mate[start] >> 1
    seen, step = np.arange(len(back)) << 32, 1
    while True:
        further = seen[back]
        further += step
        if step > 4 and not (further < seen).any():  # rings are seldom shorter: not worth testing before
            break
        np.minimum(seen, further, out=seen)
        back, step = back[back], step * 2
    rank = seen & (2**32 - 1)
    heads = np.flatnonzero(rank == 0)
    number = np.empty_like(rank)
    number[heads] = np.arange(len(heads))
    return _Links(upright, mate, heads, number[seen >> 32], rank)


# Holes to objects


def _hole_owners(stack: _Stack, corners: _Corners, links: _Links, is_hole: np.ndarray) -> np.ndarray:
    """(R,) the outline of each ring's object.

    Above a hole's first edge lies its object; to the left that ends at its outline, or at a hole that began higher.
    """
    at, owner = 2 * links.heads[is_hole], np.arange(len(is_hole))
    owner[is_hole] = _ring_to_the_left(stack, corners, links, corners.y[at] - 1, corners.x[at])
    return _roots(owner)


def _outermost(stack: _Stack, corners: _Corners, links: _Links, is_hole: np.ndarray) -> np.ndarray:
    """(R,) the ring itself if it is an outline that lies in no hole, else -1.

    Left of an outline's first edge is the hole it lies in, or an outline in the same hole, or nothing.
    """
    outlines = np.flatnonzero(~is_hole)
    at = 2 * links.heads[outlines]
    left = _ring_to_the_left(stack, corners, links, corners.y[at], corners.x[at] - 1)
    in_hole = np.zeros(len(is_hole), bool)
    in_hole[outlines] = (left >= 0) & is_hole[left]
    beside = np.arange(len(is_hole))
    beside[outlines] = np.where((left >= 0) & ~is_hole[left], left, outlines)
    return np.where(is_hole | in_hole[_roots(beside)], -1, np.arange(len(is_hole)))


def _roots(parent: np.ndarray) -> np.ndarray:
    while not np.array_equal(further := parent[parent], parent):
        parent = further
    return parent


def _ring_to_the_left(stack: _Stack, corners: _Corners, links: _Links, row: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(K,) the ring of the nearest vertical edge at or left of x (K,) in a pixel row (K,); -1 if there is none."""
    height, width = stack.tops[-1], max(mask.shape[1] for mask in stack.masks)
    rows, line = np.unique(row, return_inverse=True)
    inside = np.zeros(len(rows) * (width + 1) + 1, bool)  # background left of the first pixel and right of the last
    lines, first = inside[:-1].reshape(len(rows), -1)[:, 1:], np.searchsorted(rows, stack.tops)
    for index, mask in enumerate(stack.masks):
        own = slice(first[index], first[index + 1])
        np.not_equal(mask[rows[own] - stack.tops[index]], 0, out=lines[own, : mask.shape[1]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    index = np.searchsorted(edges, line * (width + 1) + x, side="right") - 1
    column = edges[index] - line * (width + 1)
    upper = links.upright[::2]
    key = corners.x[upper] * (height + 1) + corners.y[upper]
    edge = np.searchsorted(key, column * (height + 1) + row, side="right") - 1
    return np.where((index < 0) | (column < 0), -1, links.ring[upper[edge] >> 1])

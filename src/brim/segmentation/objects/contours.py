"""Outlines of labelled objects, traced on the device where the labels are.

Axes: B images, H rows, W columns; E edges of pixels that lie between two labels, each once for the label on its inner
side; R rings; C corners.

An object's edges form rings: one around it and one around each hole. Each edge knows the next one from the three pixels
around its end, so all rings are followed at once, by doubling. Two objects that touch share their border's points.
Where an object touches itself in a corner, its ring is split there, so that every ring is a valid polygon. Points,
order and direction are those of `polygons`: pixel corners, from the upper left, downwards first.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from brim.errors import ConfigError

# Sides of a pixel in the order they are walked: left down, bottom right, right up, top left. For each, where the pixel
# ahead and the pixel diagonally outside lie (down, right), and where the side starts (right, down of the pixel).
_AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))
_OUTSIDE = ((1, -1), (1, 1), (-1, 1), (-1, -1))
_START = ((0, 0), (0, 1), (1, 1), (1, 0))
_NEIGHBOUR = ((0, -1), (1, 0), (0, 1), (-1, 0))  # the pixel across the side
_LEFT = 0  # an outline's first edge is the left side of its first pixel; a hole's is the bottom of the pixel above it


class LabelRings(NamedTuple):
    """Rings in the order of their first pixels, image by image; an outline comes before the holes in it."""

    points: Tensor  # (C, 2) int32, x and y
    first: Tensor  # (R + 1,) int64, where each ring starts in points, and where the last one ends
    image: Tensor  # (R,) int64
    label: Tensor  # (R,) int64
    hole: Tensor  # (R,) bool
    length: Tensor  # (R,) int64, sides of pixels along the ring


def contours(labels: NDArray[Any] | Tensor, *, holes: bool = False) -> list[Any]:
    """Outlines of labelled objects along the edges of their pixels: one (N, 2) float array of x and y for each label.

    labels  (H, W)  whole numbers, 0 is background; numbers may have gaps

    Outlines come in the order of the labels. Points are corners of pixels, x from 0 to W and y from 0 to H, downwards;
    an outline is not closed, and has no point on a straight line. Objects that touch share the points of their border.
    Of a label in several parts, 4-connected, the largest part counts.

    With `holes`, there is a list of rings for each label instead: every part's outline, and after it the holes of the
    label that begin below; outlines and holes run in opposite directions.
    """
    tensor = labels if isinstance(labels, Tensor) else torch.from_numpy(_whole(np.asarray(labels)))
    if tensor.ndim != 2:
        raise ConfigError(f"labels have shape {tuple(tensor.shape)}, expected (H, W): one label for each pixel")
    if tensor.is_floating_point() or tensor.is_complex():
        raise ConfigError(f"labels are {tensor.dtype}, expected whole numbers; 0 is background")
    if not tensor.numel():
        return []
    rings = LabelRings(*(part.cpu() for part in find_rings(tensor[None].long())))
    order = torch.argsort(rings.label, stable=True)
    points = rings.points.double().numpy()
    first = rings.first.tolist()
    number, is_hole, size = rings.label.tolist(), rings.hole.tolist(), _enclosed(rings).tolist()
    rings_of: dict[int, list[int]] = {}
    for ring in order.tolist():
        if holes or not is_hole[ring]:
            rings_of.setdefault(number[ring], []).append(ring)
    arrays = {ring: points[first[ring] : first[ring + 1]] for own in rings_of.values() for ring in own}
    if holes:
        return [[arrays[ring] for ring in own] for own in rings_of.values()]
    return [arrays[max(own, key=size.__getitem__)] for own in rings_of.values()]


def _whole(labels: NDArray[Any]) -> NDArray[Any]:
    """Labels in a type that torch has."""
    if labels.dtype.kind in "bui":
        return labels.astype(np.int64)
    return labels if labels.dtype.kind == "f" else np.zeros(labels.shape, np.complex64)


def _enclosed(rings: LabelRings) -> Tensor:
    """(R,) pixels that each ring encloses."""
    points, first = rings.points.long(), rings.first
    after = torch.arange(1, len(points) + 1)
    after[first[1:] - 1] = first[:-1]
    x, y = points.T
    ring = torch.repeat_interleave(torch.arange(len(rings.label)), first.diff())
    double = torch.zeros(len(rings.label), dtype=torch.int64).index_add_(0, ring, x * y[after] - x[after] * y)
    return double.abs() // 2


def find_rings(labels: Tensor) -> LabelRings:
    """labels (B, H, W) int, 0 background; the parts of an object are 4-connected."""
    height, width = labels.shape[1:]
    wide = F.pad(labels, (1, 1, 1, 1))
    shifted = {
        (down, right): wide[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]
        for down, right in (*_NEIGHBOUR, *_OUTSIDE)
    }
    border = torch.stack([(shifted[step] != labels) & (labels > 0) for step in _NEIGHBOUR], -1)  # (B, H, W, 4)
    edge = torch.nonzero(border.flatten())[:, 0]
    number = torch.zeros(border.numel(), dtype=torch.int32, device=labels.device)
    number[edge] = torch.arange(len(edge), dtype=torch.int32, device=labels.device)
    side, pixel = edge % 4, edge // 4
    after, across = _next(labels, shifted, pixel, side, width)
    following = number[after].long()
    head = _heads(following)
    touching = torch.nonzero(across >= 0)[:, 0]
    if len(touching):
        other = number[across[touching]].long()
        itself = head[touching] == head[other]
        following[touching[itself]] = other[itself]
        head = _heads(following)
    return _collect(labels, edge, head, *_corners(following, head, side != (after % 4)), width)


def _next(
    labels: Tensor, shifted: dict[tuple[int, int], Tensor], pixel: Tensor, side: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The edge after each edge, as pixel · 4 + side; and where the object touches itself, the one of the other pixel
    that begins there, else -1."""
    own = labels.flatten()[pixel]
    after, across = torch.empty_like(pixel), torch.full_like(pixel, -1)
    for number in range(4):
        mine = side == number
        at, label = pixel[mine], own[mine]
        ahead = shifted[_AHEAD[number]].flatten()[at] == label
        outside = shifted[_OUTSIDE[number]].flatten()[at] == label
        step, beyond = (down * width + right for down, right in (_AHEAD[number], _OUTSIDE[number]))
        turn_in, on, turn_out = (
            at * 4 + (number + 1) % 4,
            (at + step) * 4 + number,
            (at + beyond) * 4 + (number - 1) % 4,
        )
        after[mine] = torch.where(ahead, torch.where(outside, turn_out, on), turn_in)
        across[mine] = torch.where(outside & ~ahead, turn_out, -1)
    return after, across


def _heads(following: Tensor) -> Tensor:
    """The smallest edge of each edge's ring, found among twice as many edges each time."""
    head, jump = torch.arange(len(following), device=following.device), following
    for number in range(max(1, len(following).bit_length())):
        smaller, jump = torch.minimum(head, head[jump]), jump[jump]
        done = number % 4 == 3 and torch.equal(smaller, head)
        head = smaller
        if done:
            break
    return head


def _corners(following: Tensor, head: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Corners from the start of each edge to the end of its ring, and whether the edge starts in one.

    turns: whether the ring turns at the end of an edge.
    """
    count = len(following)
    starts = torch.zeros_like(turns)
    starts[following] = turns
    # one more edge without corners ends every ring
    left = F.pad(starts.long(), (0, 1))
    jump = F.pad(torch.where(following == head, count, following), (0, 1), value=count)
    for number in range(max(1, count.bit_length())):
        left, jump = left + left[jump], jump[jump]
        if number % 4 == 3 and bool((jump == count).all()):
            break
    return left[:-1], starts


def _collect(labels: Tensor, edge: Tensor, head: Tensor, left: Tensor, starts: Tensor, width: int) -> LabelRings:
    index = torch.arange(len(edge), device=edge.device)
    heads = torch.nonzero(head == index)[:, 0]
    first = F.pad(left[heads].cumsum(0), (1, 0))
    ring = torch.zeros_like(edge)
    ring[heads] = torch.arange(len(heads), device=edge.device)
    ring = ring[head]
    length = torch.zeros_like(heads).index_add_(0, ring, torch.ones_like(ring))
    corner = torch.nonzero(starts)[:, 0]
    place = first[ring[corner] + 1] - left[corner]
    pixels = labels.shape[1] * width
    pixel, side = edge[corner] // 4, edge[corner] % 4
    within = pixel % pixels
    start = torch.tensor(_START, dtype=torch.int32, device=edge.device)
    points = torch.empty((len(corner), 2), dtype=torch.int32, device=edge.device)
    points[place] = torch.stack([within % width, within // width], 1).int() + start[side]
    own = edge[heads] // 4
    return LabelRings(points, first, own // pixels, labels.flatten()[own].long(), edge[heads] % 4 != _LEFT, length)

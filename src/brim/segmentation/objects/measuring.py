"""Numbers, outlines and measurements of the objects in label images, on the device where the labels are.

Axes: B images, H rows, W columns, C channels; N objects of all images; M runs, each the pixels of one object that
follow each other in a row; R rings.

Sums over an object are sums over its runs: some tens of them instead of a thousand pixels. Those of coordinates have
closed forms; those of intensities are differences of sums along the row. All are whole numbers, the same on every
device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brim.segmentation.objects.contours import LabelRings, find_rings

SIZES = ("area", "x", "y", "perimeter", "eccentricity", "confidence")  # the columns before those of the channels
_UNIT = 2.0**16  # probabilities are summed as whole numbers of 1 / _UNIT
# The mean of two ways to walk: a side of a pixel straight on is 1 long, one before a turn half a diagonal. Of all
# directions alike, that is too long by this factor; see Freeman chain codes.
_LENGTHENED = 8 * (math.sqrt(2) - 1) / math.pi
_CUT = 1 - math.sqrt(0.5)  # what a corner is shorter


class LabelledObjects(NamedTuple):
    labels: Tensor  # (B, H, W) int32: objects numbered from 1 in each image, by the first pixels of their outlines
    rings: LabelRings
    owner: Tensor  # (R,) int64, the ring that is the outline of the ring's object
    ring_ends: Tensor  # (B + 1,) int64, the first ring of each image, and one past the last
    object_ends: Tensor  # (B + 1,) int64, likewise of the rows of the table
    table: Tensor  # (N, 6 + C) float64: SIZES in pixels, then the mean of each channel


def find_objects(labels: Tensor, foreground: Tensor | None = None, images: Tensor | None = None) -> LabelledObjects:
    """Renumber, trace and measure.

    labels      (B, H, W)     int32    4-connected objects, 0 background
    foreground  (B, H, W)     float32  in [0, 1]; none: every confidence is 1
    images      (B, C, H, W)  uint8
    """
    rings = find_rings(labels)
    batch, span = len(labels), (int(labels.max()) if labels.numel() else 0) + 1
    every = torch.arange(batch + 1, device=labels.device)
    key = rings.image * span + rings.label
    outlines = torch.nonzero(~rings.hole)[:, 0]
    number, outline_of = torch.zeros((2, batch * span), dtype=torch.int64, device=labels.device)
    number[key[outlines]] = torch.arange(len(outlines), device=labels.device)
    outline_of[key[outlines]] = outlines
    ends = torch.searchsorted(rings.image[outlines], every)
    pixel_key = labels + (every[:-1] * span).to(labels.dtype)[:, None, None]
    shifted = (number - ends[:-1].repeat_interleave(span) + 1).to(torch.int32)
    shifted[every[:-1] * span] = 0
    table = _measure(labels, pixel_key, number, len(outlines), foreground, images)
    _add_perimeters(table, rings, outlines)
    return LabelledObjects(
        shifted[pixel_key], rings, outline_of[key], torch.searchsorted(rings.image, every), ends, table
    )


def _measure(
    labels: Tensor, pixel_key: Tensor, number: Tensor, num: int, foreground: Tensor | None, images: Tensor | None
) -> Tensor:
    """The table without perimeters; number is the object of each key."""
    width = labels.shape[2]
    inside, change = labels > 0, labels[:, :, 1:] != labels[:, :, :-1]
    start = torch.nonzero((inside & F.pad(change, (1, 0), value=True)).flatten())[:, 0]
    end = torch.nonzero((inside & F.pad(change, (0, 1), value=True)).flatten())[:, 0]
    own = number[pixel_key.flatten()[start]]
    left, right, y = start % width, end % width, start // width % labels.shape[1]
    count = right - left + 1
    x = (left + right) * count  # twice the sum
    squares = _squares(right) - _squares(left - 1)
    columns = [count, x, y * count, squares, y * y * count, x * y]
    maps = [] if foreground is None else [(foreground * _UNIT).to(torch.int32)[:, None]]
    maps += [] if images is None else [images.to(torch.int32)]
    for values in torch.cat(maps, 1).unbind(1) if maps else ():
        sums = values.cumsum(2, dtype=torch.int32).flatten()  # 2³¹ is 32 768 pixels of probability 1
        columns.append(sums[end].long() - sums[start] + values.flatten()[start])
    total = torch.zeros((num, len(columns)), dtype=torch.int64, device=labels.device)
    total.index_add_(0, own, torch.stack(columns, 1))
    return _table(total.double(), with_confidence=foreground is not None)


def _squares(last: Tensor) -> Tensor:
    """0² + 1² + … + last²"""
    return last * (last + 1) * (2 * last + 1) // 6


def _table(total: Tensor, *, with_confidence: bool) -> Tensor:
    area, x, y, xx, yy, xy, *rest = total.unbind(1)
    x, y, xy = x / (2 * area), y / area, xy / (2 * area)
    across = xx / area - x * x + 1 / 12  # of squares, not points
    down = yy / area - y * y + 1 / 12
    mixed = xy - x * y
    spread = torch.sqrt((across - down) ** 2 + 4 * mixed**2)
    long, short = across + down + spread, across + down - spread
    eccentricity = torch.sqrt((1 - short / long).clamp(0, 1))
    confidence = torch.ones_like(area)
    if with_confidence:
        confidence = rest.pop(0) / area / _UNIT
    channels = [sums / area for sums in rest]
    return torch.stack([area, x + 0.5, y + 0.5, torch.zeros_like(area), eccentricity, confidence, *channels], 1)


def _add_perimeters(table: Tensor, rings: LabelRings, outlines: Tensor) -> None:
    corners = rings.first.diff()[outlines]
    table[:, SIZES.index("perimeter")] = (rings.length[outlines] - _CUT * corners) / _LENGTHENED

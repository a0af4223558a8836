"""From a network's two maps to one label per object, on the device, and back from labels to those maps.

Axes: B images, H rows, W columns.

    foreground  (B, H, W)  probability that a pixel belongs to an object
    height      (B, H, W)  0 at an object's edge, 1 at its innermost pixel

Every pixel of the foreground climbs to the highest of its four neighbours until none is higher: a basin for each peak.
A basin whose peak rises less than `depth` above the pass to a higher neighbour is part of that neighbour. What then
rises to less than `min_peak` is no object: the middle of one would be near 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

STANDARD_DIAMETER = 24.0  # pixels: images are brought to the scale at which the median object has it
MIN_AREA = 16  # pixels; fewer are noise
MIN_PEAK = 0.4  # height of an object's middle, at least
DEPTH = 0.12  # of a valley between two objects, in units of height
RADIUS = 48  # pixels: deeper inside an object height grows no more
_NEIGHBOURS = ((-1, 0), (0, -1), (0, 1), (1, 0))  # not diagonally: an object shall be 4-connected
_PAIRS = ((0, 1), (1, 0))


def heights(labels: Tensor, most: int, radius: int = RADIUS) -> Tensor:
    """labels (B, H, W) int32 of 0 to `most`, 0 background → distance to the nearest other label, over its maximum in
    the object: 1 at the innermost pixel."""
    distance = _edge_distance(labels, radius) * (labels > 0)
    number = _numbered(labels, most)
    furthest = torch.zeros(len(labels) * (most + 1), device=labels.device)
    furthest.scatter_reduce_(0, number.flatten(), distance.flatten(), "amax")
    return distance / furthest[number].clamp(min=1)


def _numbered(labels: Tensor, most: int) -> Tensor:
    """The labels as indices that no two images share."""
    return labels.long() + torch.arange(len(labels), device=labels.device)[:, None, None] * (most + 1)


def _edge_distance(labels: Tensor, radius: int) -> Tensor:
    """Euclidean distance in pixels, up to `radius`, to the nearest pixel of another label; the image's edge is none."""
    width = labels.shape[2]
    column = torch.arange(width, device=labels.device)
    change = F.pad(labels[:, :, 1:] != labels[:, :, :-1], (1, 0))  # an object begins at this column
    before = torch.where(change, column, -radius).cummax(2).values  # where mine begins
    after = torch.where(change, column, width + radius).flip(2).cummin(2).values.flip(2)
    after = F.pad(after[:, :, 1:], (0, 1), value=width + radius)
    across = torch.minimum(column - before + 1, after - column).clamp_(max=radius).float().square_()
    if labels.device.type == "cuda":
        from brim.segmentation.objects import kernels

        return kernels.edge_distance(labels, across, radius).sqrt_()
    best = across.clone()
    height = labels.shape[1]
    for step in range(1, min(radius, height)):
        near, far = slice(0, height - step), slice(step, height)
        for mine, other in ((near, far), (far, near)):
            same = labels[:, mine] == labels[:, other]
            reach = torch.where(same, across[:, other], 0) + step * step
            best[:, mine] = torch.minimum(best[:, mine], reach)
    return best.sqrt_()


def maps_to_labels(maps: Tensor, threshold: float = 0.5, min_area: int = MIN_AREA) -> Tensor:
    """A network's two maps (B, 2, H, W), as logits → labels (B, H, W) int32."""
    maps = maps.float()
    return to_labels(torch.sigmoid(maps[:, 0]), torch.sigmoid(maps[:, 1]), threshold=threshold, min_area=min_area)


def to_labels(
    foreground: Tensor,
    height: Tensor,
    *,
    threshold: float = 0.5,
    depth: float = DEPTH,
    min_area: int = MIN_AREA,
    min_peak: float = MIN_PEAK,
    rounds: int = 4,
) -> Tensor:
    """(B, H, W) int32: objects numbered from 1 in each image, in the order of their peaks."""
    return find_instances(
        foreground, height, threshold=threshold, depth=depth, min_area=min_area, min_peak=min_peak, rounds=rounds
    ).labels


class Instances(NamedTuple):
    """Objects of several images, and what their sizes and heights say about the scale."""

    labels: Tensor  # (B, H, W) int32, numbered from 1 in each image
    image: Tensor  # (N,) int64, of each object, in the order of their peaks
    area: Tensor  # (N,) int64, pixels
    peak: Tensor  # (N,) float32, height of its highest pixel


def find_instances(
    foreground: Tensor,
    height: Tensor,
    *,
    threshold: float = 0.5,
    depth: float = DEPTH,
    min_area: int = MIN_AREA,
    min_peak: float = MIN_PEAK,
    rounds: int = 4,
) -> Instances:
    """As to_labels, with what is known of each object."""
    batch, rows, columns = foreground.shape
    if foreground.device.type == "cuda":
        from brim.segmentation.objects import kernels

        root, level = kernels.climb(foreground.contiguous(), height.contiguous(), threshold)
    else:
        root, level = _climb(foreground, height, threshold)
    index = torch.arange(root.numel(), dtype=torch.int32, device=root.device)
    peaks = torch.nonzero(root.flatten() == index)[:, 0]
    if foreground.device.type == "cuda":
        area = kernels.merge(root, level, peaks, depth, rounds)
    else:
        area = _merge(root, level, peaks, depth, rounds)
    keep = (area >= max(1, min_area)) & (level.flatten()[peaks] >= min_peak)
    chosen = peaks[keep]
    image = chosen // (rows * columns)
    ends = torch.searchsorted(image, torch.arange(batch, device=root.device))
    number = torch.zeros(root.numel() + 1, dtype=torch.int32, device=root.device)  # the last one is of the background
    number[chosen] = (torch.arange(len(chosen), device=root.device) - ends[image] + 1).int()
    return Instances(number[root], image, area[keep].long(), level.flatten()[chosen])


def kinds_of(labels: Tensor, probabilities: Tensor, ends: Tensor) -> Tensor:
    """The most probable class of each object, (N,) int64.

    labels         (B, h, w)           numbers from 1 in each image
    probabilities  (B, classes, h, w)
    ends           (B + 1,)            the first object of each image, and one past the last
    """
    number = torch.where(labels > 0, labels.long() + ends[:-1, None, None], 0).flatten()
    sums = torch.zeros((int(ends[-1]) + 1, probabilities.shape[1]), device=labels.device)
    return sums.index_add_(0, number, probabilities.movedim(1, -1).flatten(0, -2).float())[1:].argmax(1)


def _climb(foreground: Tensor, height: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The basin of each pixel, (B, H, W) int32: its peak, as an index into the batch, -1 outside of objects; and the
    level, which is height inside and -1 outside.

    A pixel leads to the highest one around it, itself included; of equals to the later one.
    """
    inside = foreground > threshold
    level = torch.where(inside, height, -1.0)
    index = torch.arange(level.numel(), dtype=torch.int32).view(level.shape)
    best, parent = level, index
    wide, numbers = F.pad(level, (1, 1, 1, 1), value=-2.0), F.pad(index, (1, 1, 1, 1))
    rows, columns = level.shape[1:]
    for down, right in _NEIGHBOURS:
        there = wide[:, 1 + down : 1 + down + rows, 1 + right : 1 + right + columns]
        other = numbers[:, 1 + down : 1 + down + rows, 1 + right : 1 + right + columns]
        higher = (there > best) | ((there == best) & (other > parent))
        best, parent = torch.where(higher, there, best), torch.where(higher, other, parent)
    own = torch.nonzero(inside.flatten())[:, 0]
    place = torch.zeros(level.numel(), dtype=torch.int32)
    place[own] = torch.arange(len(own), dtype=torch.int32)
    jump = place[parent.flatten()[own]]  # among the pixels inside alone
    while not torch.equal(further := jump[jump], jump):
        jump = further
    root = torch.full((level.numel(),), -1, dtype=torch.int32)
    root[own] = own[jump].int()
    return root.view(level.shape), level


def _merge(root: Tensor, level: Tensor, peaks: Tensor, depth: float, rounds: int) -> Tensor:
    """Join basins that a shallow pass connects: replaces them in root by objects, and returns the areas, by peak."""
    place = torch.zeros(root.numel(), dtype=torch.int64)
    place[peaks] = torch.arange(len(peaks))
    peak = level.flatten()[peaks]
    ones, twos, passes = [], [], []
    rows, columns = root.shape[1:]
    for down, right in _PAIRS:
        a = (slice(None), slice(0, rows - down), slice(0, columns - right))
        b = (slice(None), slice(down, rows), slice(right, columns))
        border = (root[a] != root[b]) & (root[a] >= 0) & (root[b] >= 0)
        ones.append(place[root[a][border]])
        twos.append(place[root[b][border]])
        passes.append(torch.minimum(level[a][border], level[b][border]))
    one, two, saddle = torch.cat(ones), torch.cat(twos), torch.cat(passes)
    every = torch.arange(len(peaks))
    owner = every
    for _ in range(rounds):
        first, second = owner[one], owner[two]
        lower = torch.where(
            (peak[first] < peak[second]) | ((peak[first] == peak[second]) & (first < second)), first, second
        )
        upper = first + second - lower
        shallow = (first != second) & (peak[lower] - saddle < depth)
        choice = (saddle * 2**20).long() * 2**32 + upper
        best = torch.full_like(owner, -1).scatter_reduce_(0, lower[shallow], choice[shallow], "amax")
        link = torch.where(best >= 0, best & (2**32 - 1), every)
        for _ in range(6):
            link = link[link]
        owner = link[owner]
    inside = root.flatten() >= 0
    own = owner[place[root.flatten()[inside]]]
    root.view(-1)[inside] = peaks[own].int()
    return torch.bincount(own, minlength=len(peaks))

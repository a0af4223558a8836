"""Triton kernels for labelled objects; each does what the function named in its docstring does."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def edge_distance_kernel(labels, across, squared, height, width, RADIUS: tl.constexpr, BLOCK: tl.constexpr):
    """instances._edge_distance, after the rows"""
    start = tl.program_id(0).to(tl.int64) * height * width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < height * width
    row = at // width
    mine = tl.load(labels + start + at, mask=within, other=0)
    best = tl.load(across + start + at, mask=within, other=0.0)
    step = 1
    while (step < RADIUS) & (tl.max(tl.where(mine > 0, best, 0.0)) > step * step):
        for sign in tl.static_range(-1, 2, 2):
            there = within & (row + sign * step >= 0) & (row + sign * step < height)
            other = tl.load(labels + start + at + sign * step * width, mask=there, other=0)
            reach = tl.load(across + start + at + sign * step * width, mask=there, other=0.0)
            reach = tl.where(other == mine, reach, 0.0) + step * step
            best = tl.where(there, tl.minimum(best, reach), best)
        step += 1
    tl.store(squared + start + at, best, mask=within)


def edge_distance(labels: Tensor, across: Tensor, radius: int) -> Tensor:
    """Squared distances (B, H, W) float32 of the foreground."""
    batch, height, width = labels.shape
    squared = torch.empty_like(across)
    grid = (batch, triton.cdiv(height * width, _BLOCK))
    edge_distance_kernel[grid](labels.contiguous(), across, squared, height, width, RADIUS=radius, BLOCK=_BLOCK)
    return squared


# Labels from maps. A pixel is its index in the batch; a basin is its peak's pixel; pairs are 64-bit, height first.


@triton.jit
def climb_kernel(foreground, height, parent, level, threshold, rows, columns, BLOCK: tl.constexpr):
    """instances._climb: of each pixel the highest one around it; -1 outside of objects"""
    start = tl.program_id(0).to(tl.int64) * rows * columns
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < rows * columns
    row, column = at // columns, at % columns
    inside = within & (tl.load(foreground + start + at, mask=within, other=0.0) > threshold)
    best = tl.where(inside, tl.load(height + start + at, mask=within, other=0.0), -1.0)
    tl.store(level + start + at, best, mask=within)
    target = at
    for side in tl.static_range(4):
        down = (side == 3) - (side == 0)
        right = (side == 2) - (side == 1)
        there = within & (row + down >= 0) & (row + down < rows) & (column + right >= 0) & (column + right < columns)
        other = at + down * columns + right
        ground = tl.load(foreground + start + other, mask=there, other=0.0)
        value = tl.load(height + start + other, mask=there, other=0.0)
        value = tl.where(there & (ground > threshold), value, -1.0)
        higher = (value > best) | ((value == best) & (other > target) & there)
        best, target = tl.where(higher, value, best), tl.where(higher, other, target)
    tl.store(parent + start + at, tl.where(inside, start.to(tl.int32) + target, -1), mask=within)


@triton.jit
def follow_kernel(parent, root, count, BLOCK: tl.constexpr):
    """The end of each pixel's way along its parents"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = at < count
    own = tl.load(parent + at, mask=within, other=-1)
    last = own
    further = tl.load(parent + own, mask=own >= 0, other=-1)
    while tl.max((further != last).to(tl.int32)) > 0:
        last = further
        further = tl.load(parent + last, mask=last >= 0, other=-1)
    tl.store(root + at, last, mask=within)


@triton.jit
def pass_kernel(root, level, owner, best, depth, rows, columns, count, BLOCK: tl.constexpr):
    """instances._merge: of each basin the highest pass over which it is part of a neighbour"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = at < count
    one = tl.load(root + at, mask=within, other=-1)
    value = tl.load(level + at, mask=within, other=-1.0)
    for side in tl.static_range(2):
        far = at + 1 if side == 0 else at + columns
        there = (at % columns + 1 < columns) if side == 0 else ((at // columns) % rows + 1 < rows)
        there = there & within & (one >= 0)
        two = tl.load(root + far, mask=there, other=-1)
        border = there & (two >= 0) & (one != two)
        first = tl.load(owner + one, mask=border, other=0)
        second = tl.load(owner + two, mask=border, other=0)
        saddle = tl.minimum(value, tl.load(level + far, mask=border, other=0.0))
        a = tl.load(level + first, mask=border, other=0.0)
        b = tl.load(level + second, mask=border, other=0.0)
        is_lower = (a < b) | ((a == b) & (first < second))
        lower, upper = tl.where(is_lower, first, second), tl.where(is_lower, second, first)
        shallow = border & (first != second) & (tl.minimum(a, b) - saddle < depth)
        pair = ((saddle * 1048576.0).to(tl.int64) << 32) + upper.to(tl.int64)
        tl.atomic_max(best + lower, pair, mask=shallow)


@triton.jit
def join_kernel(peaks, owner, best, count, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """instances._merge: the basin that each basin is part of now"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = at < count
    peak = tl.load(peaks + at, mask=within, other=0)
    last = tl.load(owner + peak, mask=within, other=0)
    step = 0
    moving = within
    while (step < STEPS) & (tl.max(moving.to(tl.int32)) > 0):
        pair = tl.load(best + last, mask=moving, other=-1)
        moving = moving & (pair >= 0)
        last = tl.where(moving, (pair & 0xFFFFFFFF).to(last.dtype), last)
        step += 1
    tl.store(owner + peak, last, mask=within)


@triton.jit
def area_kernel(root, owner, area, count, BLOCK: tl.constexpr):
    """Replaces each pixel's basin by its object, and counts the object's pixels"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = at < count
    own = tl.load(root + at, mask=within, other=-1)
    own = tl.load(owner + own, mask=own >= 0, other=-1)
    tl.store(root + at, own, mask=within)
    tl.atomic_add(area + own, 1, mask=own >= 0)


def climb(foreground: Tensor, height: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The basin of each pixel, (B, H, W) int32, -1 outside; and the level, height inside and -1 outside."""
    batch, rows, columns = foreground.shape
    parent = torch.empty(foreground.shape, dtype=torch.int32, device=foreground.device)
    level, root = torch.empty_like(foreground), torch.empty_like(parent)
    grid = (batch, triton.cdiv(rows * columns, _BLOCK))
    climb_kernel[grid](foreground, height, parent, level, threshold, rows, columns, BLOCK=_BLOCK)
    count = parent.numel()
    follow_kernel[(triton.cdiv(count, 256),)](parent, root, count, BLOCK=256)
    return root, level


def merge(root: Tensor, level: Tensor, peaks: Tensor, depth: float, rounds: int) -> Tensor:
    """Join basins that a shallow pass connects: replaces them in root by objects, and returns the areas, by peak."""
    _, rows, columns = root.shape
    count = root.numel()
    owner = torch.empty(count, dtype=torch.int32, device=root.device)
    owner[peaks] = peaks.int()
    best = torch.empty(count, dtype=torch.int64, device=root.device)
    grid = (triton.cdiv(count, _BLOCK),)
    for _ in range(rounds):
        best[peaks] = -1
        pass_kernel[grid](root, level, owner, best, depth, rows, columns, count, BLOCK=_BLOCK)
        join_kernel[(triton.cdiv(max(1, len(peaks)), 256),)](peaks, owner, best, len(peaks), STEPS=64, BLOCK=256)
    area = torch.empty(count, dtype=torch.int32, device=root.device)
    area[peaks] = 0
    area_kernel[grid](root, owner, area, count, BLOCK=_BLOCK)
    return area[peaks]

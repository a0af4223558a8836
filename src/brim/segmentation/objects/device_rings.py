"""The rings along the pixel edges of masks, found by torch on the device of the masks.

The same rings as those of rings.py, to the last bit: areas and masses are integers, whose sums do not depend on the
order. On a CPU this module takes six times as long: there NumPy sorts 16-bit columns and finds non-zeros faster, OpenCV
sums in one pass, and one mask at a time fits the cache. On a GPU the number of kernels and of synchronisations counts.
So all masks are processed together, crossings appear twice in one list, flags per corner replace further lists, and
loops rarely test whether they are done: about ten synchronisations in all.

All of it is one TorchScript call, which needs no interpreter. Called from Python, each of the 250 operations releases
the interpreter lock and waits for it: 0.2 ms beside 16 decoding threads, 44 ms for 3 ms of device time. So the code
after find_rings is limited to what TorchScript supports: constants are arguments, and no error of ours is raised. If
torch has no TorchScript, the same functions run as Python.
"""

# Axes: B masks of a stack, h rows, w columns; C corners; E = C / 2 horizontal edges, edge e from corner 2e on its left
# to 2e + 1; R rings. Rows are those of the stack: mask b begins in row b * (h + 1), one row is free between two masks.

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import total_bytes
from brim.errors import OutOfMemory

UNIT = 2.0**23  # probabilities are integers in units of 1 / UNIT, as in rings.py
BAND_PIXELS = 2**27  # processed together, at 12 bytes each, on a device with enough memory
BAND_SHARE = 0.02  # of a device's memory, on others
MOST_CORNERS = 2**23  # linked together, at about 120 bytes each; noise has one or two per pixel
_SURE_ROUNDS = 5  # of doubling before the first test: outlines seldom have fewer than 32 horizontal edges
_ROUNDS = 3  # between two tests

log = logging.getLogger("brim")
_compiling = threading.Lock()

RingTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # the fields of DeviceRings


class DeviceRings(NamedTuple):
    """Rings in the order of their first points, from top to bottom, as in Rings."""

    points: Tensor  # (C, 2) int32, x and y
    first: Tensor  # (R + 1,) int64, where each ring starts in points, and where the last one ends
    area: Tensor  # (R,) int64, pixels; negative for a hole
    mass: Tensor  # (R,) int64, probabilities times UNIT
    owner: Tensor  # (R,) int64, the outline that the ring belongs to; -1 for none
    ends: Tensor  # (B + 1,) int64, the first ring of each mask, and one past the last


class _Stack(NamedTuple):
    mask: Tensor  # (B, h, w), non-zero is inside; h and w are those of the largest mask
    probability: Tensor  # (B, h, w) float32
    band: int  # pixels processed together


class _Corners(NamedTuple):
    """Corners in reading order; the two at a crossing follow each other."""

    x: Tensor  # (C,) int64
    y: Tensor  # (C,) int64
    above: Tensor  # (C,) bool, whether the pixel above and to the right is inside
    second: Tensor  # (C,) bool, whether this is the second one at a crossing
    mass: Tensor  # (C,) int64, sum of the probabilities above and to the left, times UNIT


class _Links(NamedTuple):
    upright: Tensor  # (C,) corners by column: 0 and 1, 2 and 3, … are the ends of vertical edges
    mate: Tensor  # (C,) the other end of a corner's vertical edge
    head: Tensor  # (E,) the first edge of each edge's ring, in reading order
    rank: Tensor  # (E,) its position in the ring; the first edge has 0


def band_pixels(device: torch.device) -> int:
    """Pixels processed together on the device; a stack of several masks may not have more.

    More is better: the numbers of kernels and synchronisations do not depend on it.
    """
    return min(BAND_PIXELS, int(BAND_SHARE * total_bytes(device)) // 12)


@torch.inference_mode()
def find_rings(mask: Tensor, probability: Tensor, sizes: Sequence[tuple[int, int]], detect_holes: bool) -> DeviceRings:
    """Rings of the 4-connected objects of masks on any device, queued on the current stream.

    mask         (B, H, W)  any      non-zero is inside
    probability  (B, H, W)  float32  NaN and Inf count as 0
    sizes        B × (rows, columns) of the masks, from the upper left; the rest counts as outside

    Without detect_holes the owner of holes, and of outlines inside holes, is -1. More than MOST_CORNERS corners raise
    OutOfMemory.
    """
    rings = prepare()(mask, probability, list(sizes), detect_holes, band_pixels(mask.device), MOST_CORNERS)
    if rings is None:
        height, width = (max(side) for side in zip(*sizes, strict=True))
        raise OutOfMemory(f"{len(mask)} masks of {height} × {width} have more than {MOST_CORNERS} corners; trace fewer")
    return DeviceRings(*rings)


def prepare() -> Callable[..., RingTensors | None]:
    """_find compiled by TorchScript, on the first call; best before other threads need the interpreter."""
    with _compiling:  # a cache alone would let several threads compile
        return _compiled()


@cache
def _compiled() -> Callable[..., RingTensors | None]:
    try:
        # Stays installed: restoring the filters would undo changes that other threads made meanwhile.
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is", DeprecationWarning)
        scripted = torch.jit.script(_find)
        unoptimized = torch.jit.optimized_execution  # type: ignore[attr-defined]
    except Exception as failure:  # broad on purpose: without TorchScript, Python runs
        log.debug("rings are found without TorchScript: %s", failure)
        return _find

    def run(*arguments: object) -> RingTensors | None:
        # The optimizer would compile kernels for the shapes of the first calls. The setting is per thread.
        with unoptimized(False):
            rings: RingTensors | None = scripted(*arguments)
        return rings

    return run


# From here on TorchScript


def _find(
    mask: Tensor, probability: Tensor, sizes: list[tuple[int, int]], detect_holes: bool, band: int, most_corners: int
) -> RingTensors | None:
    """The fields of DeviceRings; None if there are more than most_corners corners."""
    height = max([rows for rows, _ in sizes])
    width = max([columns for _, columns in sizes])
    mask = mask[:, :height, :width]
    if min([rows for rows, _ in sizes]) < height or min([columns for _, columns in sizes]) < width:
        mask = _cut(mask, sizes)
    stack = _Stack(mask, probability[:, :height, :width], band)
    corners = _corners(stack, most_corners)
    if corners is None:
        return None
    if len(corners.x) == 0:
        return _nothing(stack)
    links = _links(corners, width)
    is_head = links.rank == 0
    heads = is_head.nonzero()[:, 0]
    ring = (is_head.cumsum(0) - 1)[links.head]
    to_right = corners.above[::2]  # the inside is on the left
    sign = 2 * to_right.long() - 1
    # Green's theorem: a ring encloses what lies above its lower edges minus what lies above its upper edges.
    area = sign * (corners.x[1::2] - corners.x[::2]) * corners.y[::2]
    mass = sign * (corners.mass[1::2] - corners.mass[::2])
    sums = area.new_zeros([3, len(heads)])
    sums.index_add_(1, ring, torch.stack([torch.ones_like(area), area, mass]))  # integers: exact in any order
    length, area, mass = sums.unbind()
    first = torch.cat([length.new_zeros([1]), length.cumsum(0)])
    points = _in_order(corners, links.mate, first[ring] + links.rank)
    if detect_holes:
        owner = _hole_owners(stack, corners, links, ring, heads)
    else:
        owner = _outermost(stack, corners, links, ring, heads)
    tops = torch.arange(len(sizes) + 1, device=mask.device) * (height + 1)
    ends = torch.searchsorted(corners.y[2 * heads], tops)
    return points, 2 * first, area, mass, owner, ends


def _cut(mask: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """(B, h, w) bool: the masks, False beyond their sizes."""
    inside = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
    for index, (rows, columns) in enumerate(sizes):
        inside[index, :rows, :columns] = mask[index, :rows, :columns] != 0
    return inside


def _nothing(stack: _Stack) -> RingTensors:
    zeros = torch.zeros([len(stack.mask) + 1], dtype=torch.int64, device=stack.mask.device)
    none = zeros[:0]
    return none.int().view(0, 2), zeros[:1], none, none, none, zeros


def _in_order(corners: _Corners, mate: Tensor, position: Tensor) -> Tensor:
    """Points (C, 2) of horizontal edges by position (E,): the end of each, and of the vertical edge after it.

    The first edge of an outline is on top and runs to the left: it ends at the upper left corner.
    """
    end = _evens(mate) + corners.above[::2]
    order = end.new_empty([len(end), 2])
    order[position] = torch.stack([end, mate[end]], 1)
    return torch.stack([corners.x, corners.y], 1).int()[order.view(-1)]


# Corners


def _corners(stack: _Stack, most: int) -> _Corners | None:
    """Several masks at once, or one mask some rows at a time; None if there are more corners than most."""
    num, height, width = stack.mask.shape
    num_rows = height + 1 if num * height * width <= stack.band else max(1, stack.band // width)
    assert num == 1 or num_rows > height, "several masks are one band: cut the stack by band_pixels"
    bands: list[_Corners] = []
    sums = torch.zeros([width + 1], dtype=torch.int64, device=stack.mask.device)  # of the bands before
    num_corners = 0
    for top in range(0, height + 1, num_rows):
        bottom = min(top + num_rows, height + 1)
        at, y, above, second = _turns(stack, top, bottom)
        num_corners += len(at)
        if num_corners > most:
            return None
        table = _integral(stack.probability[:, top:bottom])  # indexed like the points of the band
        x, mass = at % (width + 1), table.view(-1)[at]
        if num_rows > height:
            return _Corners(x, y, above, second, mass)
        bands.append(_Corners(x, y + top, above, second, mass + sums[x]))
        sums = sums + table[0, -1]
    return _Corners(
        torch.cat([band.x for band in bands]),
        torch.cat([band.y for band in bands]),
        torch.cat([band.above for band in bands]),
        torch.cat([band.second for band in bands]),
        torch.cat([band.mass for band in bands]),
    )


def _turns(stack: _Stack, top: int, bottom: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Corners at the upper edges of the pixel rows from top to bottom: index among their points, row, above, second."""
    pixels = _framed(stack, top, bottom)
    # At a corner one vertical edge ends, above or below; at a crossing both do, and both horizontal ones.
    upright = pixels[:, :, :-1] ^ pixels[:, :, 1:]
    double = (pixels[:, :-1, :-1] ^ pixels[:, 1:, :-1]) & upright[:, :-1] & upright[:, 1:]
    turns = (upright[:, :-1] ^ upright[:, 1:]) | double
    slot = torch.stack([turns, double], -1).view(-1).nonzero()[:, 0]  # two for each point: a crossing fills both
    at = slot >> 1
    _, num_rows, width = turns.shape
    row = at // width
    # pixels have one more column, and one more row per mask
    before = torch.add(at + row, row // num_rows, alpha=width + 1)
    return at, row, pixels.view(-1)[1:][before], (slot & 1) == 1


def _framed(stack: _Stack, top: int, bottom: int) -> Tensor:
    """(B, bottom - top + 1, w + 2) bool: the pixel rows from top to bottom and the one above, in a background frame."""
    num, height, width = stack.mask.shape
    framed = torch.zeros([num, bottom - top + 1, width + 2], dtype=torch.bool, device=stack.mask.device)
    start = max(top - 1, 0)
    framed[:, start - top + 1 : min(bottom, height) - top + 1, 1:-1] = stack.mask[:, start:bottom] != 0
    return framed


def _integral(probability: Tensor, unit: float = UNIT) -> Tensor:
    """(B, h + 1, w + 1) int64 sums over all pixels above and to the left of each point, times UNIT."""
    num, height, width = probability.shape
    sums = torch.zeros([num, height + 1, width + 1], dtype=torch.int64, device=probability.device)
    sums[:, 1:, 1:] = (probability + 1).sub_(1).mul_(unit).nan_to_num_(0.0, 0.0, 0.0)  # + 1 rounds
    return sums.cumsum_(2).cumsum_(1)


# Edges to rings


def _links(corners: _Corners, width: int) -> _Links:
    """Separate the outlines that touch at crossings; then split every ring that still touches itself."""
    column = corners.x.to(torch.int16 if width < 1 << 15 else torch.int32)  # a radix sort: fewer bits are faster
    upright = column.argsort(stable=True)
    second = corners.second
    crossing = second.roll(-1)  # the first one of each
    links = _ranked(_swapped(upright, crossing & corners.above), corners)
    ring = links.head.repeat_interleave(2)
    itself = crossing & (ring == ring.roll(-1))
    if bool(itself.any()):
        return _ranked(_swapped(links.upright, itself), corners)
    return links


def _swapped(upright: Tensor, crossings: Tensor) -> Tensor:
    """Exchange the vertical edges of the corners where crossings (C,) is set and those after them."""
    step = crossings.long()
    other = torch.arange(len(upright), device=upright.device) + step - step.roll(1)
    return other[upright]


def _ranked(upright: Tensor, corners: _Corners, sure: int = _SURE_ROUNDS, between: int = _ROUNDS) -> _Links:
    """Find each edge's ring and position by pointer doubling along the rings, backwards.

    `seen` packs the first edge in reading order seen so far (high half) and the steps back to it (low half); the
    minimum wins. When nothing changes, every edge has seen its whole ring; further rounds do no harm.
    """
    mate = torch.empty_like(upright)
    mate[upright] = upright.view(-1, 2).flip([1]).view(-1)
    back = mate[_evens(mate) + ~corners.above[::2]] >> 1
    seen = torch.arange(len(back), device=back.device) << 32
    rounds = 0
    while True:
        further = seen[back] + (1 << rounds)
        look = rounds >= sure and (rounds - sure) % between == 0
        if look and not bool((further < seen).any()):
            break
        seen = torch.minimum(seen, further)
        back, rounds = back[back], rounds + 1
    return _Links(upright, mate, seen >> 32, seen & ((1 << 32) - 1))


def _evens(corners: Tensor) -> Tensor:
    """(E,) 0, 2, 4, …: the left ends of horizontal edges."""
    return torch.arange(0, len(corners), 2, device=corners.device)


# Holes to objects


def _hole_owners(stack: _Stack, corners: _Corners, links: _Links, ring: Tensor, heads: Tensor) -> Tensor:
    """(R,) the outline of each ring's object.

    Above a hole's first edge lies its object; to the left that ends at its outline, or at a hole that began higher.
    """
    owner = torch.arange(len(heads), device=heads.device)
    holes = corners.above[2 * heads].nonzero()[:, 0]
    if len(holes) == 0:
        return owner
    at = 2 * heads[holes]
    owner[holes] = _ring_to_the_left(stack, corners, links, ring, corners.y[at] - 1, corners.x[at])
    return _roots(owner)


def _outermost(stack: _Stack, corners: _Corners, links: _Links, ring: Tensor, heads: Tensor) -> Tensor:
    """(R,) the ring itself if it is an outline that lies in no hole, else -1.

    Left of an outline's first edge is the hole it lies in, or an outline in the same hole, or nothing.
    """
    at, every = 2 * heads, torch.arange(len(heads), device=heads.device)
    is_hole = corners.above[at]
    left = _ring_to_the_left(stack, corners, links, ring, corners.y[at], corners.x[at] - 1)  # not used for holes
    known, left = ~is_hole & (left >= 0), left.clamp(min=0)
    in_hole = known & is_hole[left]
    beside = torch.where(known & ~is_hole[left], left, every)
    return torch.where(is_hole | in_hole[_roots(beside)], -1, every)


def _roots(parent: Tensor, between: int = _ROUNDS) -> Tensor:
    done = False
    while not done:
        for _ in range(between):
            parent = parent[parent]
        further = parent[parent]
        done = torch.equal(further, parent)
        parent = further
    return parent


def _ring_to_the_left(stack: _Stack, corners: _Corners, links: _Links, ring: Tensor, row: Tensor, x: Tensor) -> Tensor:
    """(K,) the ring of the nearest vertical edge at or left of x (K,) in a pixel row (K,); -1 if there is none."""
    num, height, width = stack.mask.shape
    edges, start = _edges(stack), row * (width + 1)
    index = torch.searchsorted(edges, start + x, right=True) - 1
    column = edges[index.clamp(min=0)] - start
    upper, below = links.upright[::2], num * (height + 1) + 1
    key = corners.x[upper] * below + corners.y[upper]
    edge = torch.searchsorted(key, column * below + row, right=True) - 1
    return torch.where((index < 0) | (column < 0), -1, ring[upper[edge.clamp(min=0)] >> 1])


def _edges(stack: _Stack) -> Tensor:
    """row * (w + 1) + x of every place where a pixel and its left neighbour differ, in reading order."""
    num, height, width = stack.mask.shape
    num_rows = height + 1 if num > 1 else max(1, stack.band // width)
    places: list[Tensor] = []
    for top in range(0, height + 1, num_rows):
        pixels = _framed(stack, top, min(top + num_rows, height + 1))[:, 1:]
        differ = (pixels[:, :, :-1] ^ pixels[:, :, 1:]).reshape(-1)
        places.append(differ.nonzero()[:, 0] + top * (width + 1))
    return torch.cat(places)

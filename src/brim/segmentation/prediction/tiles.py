"""Windows of an image too large to run at once, and weights that blend their results without a seam.

Axes: H, W pixels of the image, h, w pixels of a window.

Windows form a grid, so the weight of a window is a product of one vector along each axis. Each vector is divided by the
sum over all windows of its axis beforehand: adding up the weighted results is then all there is to blending.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from brim.segmentation.config import DEFAULT_TILE, MIN_SIDE

STEP = 32  # sides are padded up to a multiple of this, so that images of like size share a batch


@dataclass(frozen=True, slots=True)
class Window:
    """Where a window lies in its image."""

    top: int
    left: int
    row: int  # of the grid
    column: int


class Axis:
    """Windows along one side of an image."""

    def __init__(self, length: int, tile: int, overlap: int) -> None:
        """Cut `length` pixels into windows of `tile` that share at least `overlap`; the last ends at the border."""
        self.length = length
        self.size = min(length, tile)
        steps = range(0, length - self.size, max(1, tile - overlap))
        self.starts = (*steps, length - self.size)
        self._overlap = min(overlap, self.size)

    def weights(self) -> Tensor:
        """(windows, size) float32: above 0 everywhere, summing to 1 over the windows that hold a pixel."""
        ramp = _ramp(self.size, self._overlap)
        total = torch.zeros(self.length, dtype=torch.float64)
        for start in self.starts:
            total[start : start + self.size] += ramp
        return torch.stack([ramp / total[start : start + self.size] for start in self.starts]).float()


class Grid:
    """The windows of one image, row by row."""

    def __init__(self, height: int, width: int, tile: int = DEFAULT_TILE, overlap: int | None = None) -> None:
        """Cut an image of height × width; the overlap is an eighth of the tile where it is not given."""
        shared = tile // 8 if overlap is None else overlap
        self.rows, self.columns = Axis(height, tile, shared), Axis(width, tile, shared)
        self.height, self.width = height, width

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.rows.starts) * len(self.columns.starts)

    def __iter__(self) -> Iterator[Window]:
        """Every window, row by row."""
        for row, top in enumerate(self.rows.starts):
            for column, left in enumerate(self.columns.starts):
                yield Window(top, left, row, column)


class Blend:
    """One image put together from the results of its windows, on the device of the weights.

    rows     (grid rows, h)     float32
    columns  (grid columns, w)  float32
    """

    def __init__(self, grid: Grid, rows: Tensor, columns: Tensor) -> None:
        """Start from zero."""
        self._rows, self._columns = rows, columns
        self.total = torch.zeros(grid.height, grid.width, device=rows.device)  # (H, W) float32

    def add(self, window: Window, values: Tensor) -> None:
        """Add the result of one window, (h, w) float32; after all of them total is the blended image."""
        rows, columns = self._rows[window.row], self._columns[window.column]
        place = self.total[window.top : window.top + len(rows), window.left : window.left + len(columns)]
        place.addcmul_(values, rows[:, None] * columns)


def padded(side: int) -> int:
    """The side an image is padded to: the next multiple of STEP, at least MIN_SIDE."""
    return max(MIN_SIDE, math.ceil(side / STEP) * STEP)


def usable_tile(tile: int) -> int:
    """The tile as it is used: rounded down to a multiple of STEP, so that no padded image is larger than a window."""
    return tile // STEP * STEP


def _ramp(size: int, overlap: int) -> Tensor:
    """(size,) float64: 1 inside, falling smoothly over `overlap` pixels towards both ends and never reaching 0."""
    position = torch.arange(size, dtype=torch.float64) + 0.5
    if overlap == 0:
        return torch.ones_like(position)
    # sin² and cos² sum to 1: where exactly two windows meet, the ramps are the weights
    rise = torch.sin((position / overlap).clamp(max=1) * (math.pi / 2)).square()
    return rise * rise.flip(0)

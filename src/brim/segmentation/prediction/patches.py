"""Images cut into patches, patches of one shape gathered into batches, and windows blended into an image again.

Axes: H, W pixels of the image, h, w pixels of a patch. A patch is what the network sees: a whole padded image, or one
window of an image larger than the tile. Patches of different images share a batch when their shapes are equal.

Windows form a grid, so the weight of a window is a product of one vector along each axis. Each vector is divided by the
sum over all windows of its axis beforehand: adding up the weighted results is then all there is to blending.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import cv2
import numpy as np
import torch
from torch import Tensor

from brim.errors import BrimError
from brim.segmentation.config import DEFAULT_TILE, MIN_SIDE

STEP = 32  # sides are padded up to a multiple of this, so that images of like size share a batch


@dataclass(frozen=True, slots=True)
class TileWindow:
    """Where a window lies in its image."""

    top: int
    left: int
    row: int  # of the grid
    column: int


class TileAxis:
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


class TileGrid:
    """The windows of one image, row by row."""

    def __init__(self, height: int, width: int, tile: int = DEFAULT_TILE, overlap: int | None = None) -> None:
        """Cut an image of height × width; the overlap is an eighth of the tile where it is not given."""
        shared = tile // 8 if overlap is None else overlap
        self.rows, self.columns = TileAxis(height, tile, shared), TileAxis(width, tile, shared)
        self.height, self.width = height, width

    def __len__(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    def __iter__(self) -> Iterator[TileWindow]:
        for row, top in enumerate(self.rows.starts):
            for column, left in enumerate(self.columns.starts):
                yield TileWindow(top, left, row, column)


class Blend:
    """One image put together from the results of its windows, on the device of the weights.

    rows     (grid rows, h)     float32
    columns  (grid columns, w)  float32
    """

    def __init__(self, grid: TileGrid, rows: Tensor, columns: Tensor) -> None:
        self._rows, self._columns = rows, columns
        self.total = torch.zeros(grid.height, grid.width, device=rows.device)  # (H, W) float32

    def add(self, window: TileWindow, values: Tensor) -> None:
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


LOOK_AHEAD = 4  # batches' worth of patches that may pass before a batch leaves unfilled

PatchShape = tuple[int, int]


@dataclass(eq=False, slots=True)
class ImageFrame:
    """One image on its way from pixels to polygons."""

    index: int  # in the input
    name: str
    height: int = 0
    width: int = 0
    failure: BrimError | None = None
    grid: TileGrid | None = None  # of an image in windows
    weights: tuple[Tensor, Tensor] | None = None  # of the grid's rows and columns
    patches: list["Patch"] = field(default_factory=list)  # taken away by group()
    missing: int = 1  # patches without a result
    blend: Blend | None = None  # results of the windows so far, on the device
    finite: Tensor | None = None  # () bool on the device: no window so far had a NaN or an infinity


@dataclass(eq=False, slots=True)
class Patch:
    """What the network sees at once."""

    frame: ImageFrame
    pixels: Tensor  # (h, w, 3) uint8, pinned for a GPU
    shape: PatchShape  # of the network's input; patches of one shape share a batch
    window: TileWindow | None = None
    number: int = 0  # counts patches in the order they came


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Patches of one shape, or one image that failed and passes by."""

    patches: list[Patch]
    failed: ImageFrame | None = None


def cut(
    frame: ImageFrame, image: np.ndarray, *, tile: int, overlap: int | None, resize: int | None, pinned: bool
) -> ImageFrame:
    """Give a frame the patches of its image, (H, W, 3) uint8."""
    frame.height, frame.width = image.shape[:2]
    if resize is not None:
        frame.patches = [Patch(frame, _moved(image, pinned), (resize, resize))]
        return frame
    shape = (padded(frame.height), padded(frame.width))
    if max(shape) <= tile:
        frame.patches = [Patch(frame, pad(image, shape, pinned=pinned), shape)]
        return frame
    frame.grid = grid = TileGrid(*shape, tile, overlap)
    weights = grid.rows.weights(), grid.columns.weights()
    frame.weights = (weights[0].pin_memory(), weights[1].pin_memory()) if pinned else weights
    frame.missing = len(grid)
    whole = pad(image, shape, pinned=False).numpy()
    size = (grid.rows.size, grid.columns.size)
    for window in grid:
        part = whole[window.top : window.top + size[0], window.left : window.left + size[1]]
        frame.patches.append(Patch(frame, _moved(part, pinned), size, window))
    return frame


def pad(image: np.ndarray, shape: PatchShape, *, pinned: bool) -> Tensor:
    """The image continued by its reflection to the right and below, (h, w, 3) uint8."""
    below, right = shape[0] - image.shape[0], shape[1] - image.shape[1]
    if not (below or right):
        return _moved(image, pinned)
    out = torch.empty((*shape, image.shape[2]), dtype=torch.uint8, pin_memory=pinned)
    view = out.numpy()
    made = cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REFLECT_101, dst=view)
    if made is not view:
        np.copyto(view, made)
    return out


def _moved(image: np.ndarray, pinned: bool) -> Tensor:
    """Pixels as a tensor of their own memory layout, in pinned memory where a GPU reads them."""
    if not pinned:
        # a read-only array cannot be a tensor without a warning; the tensor is only read
        return torch.from_numpy(image if image.flags.c_contiguous and image.flags.writeable else image.copy())
    out = torch.empty(image.shape, dtype=torch.uint8, pin_memory=True)
    np.copyto(out.numpy(), image)
    return out


def group(frames: Iterable[ImageFrame], size: Callable[[], int], look_ahead: int = LOOK_AHEAD) -> Iterator[PatchBatch]:
    """Batches of up to size() patches of one shape.

    A batch leaves when it is full, or unfilled when `look_ahead` batches' worth of patches came after its first: an
    image whose shape is rare waits no longer than that, and no more than that is held here.
    """
    groups: dict[PatchShape, list[Patch]] = {}  # in the order of their first patches
    number = 0
    for frame in frames:
        if frame.failure is not None:
            yield PatchBatch([], frame)
            continue
        patches, frame.patches = frame.patches, []
        for patch in patches:
            patch.number = number = number + 1
            groups.setdefault(patch.shape, []).append(patch)
            if len(groups[patch.shape]) >= size():
                yield PatchBatch(groups.pop(patch.shape))
            oldest = next(iter(groups.values()), None)
            if oldest is not None and number - oldest[0].number >= look_ahead * size():
                yield PatchBatch(groups.pop(oldest[0].shape))
    for patches in groups.values():
        yield PatchBatch(patches)

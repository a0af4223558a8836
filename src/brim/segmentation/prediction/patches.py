"""Images cut into patches, patches of one shape grouped into batches, and windows blended into an image again.

Axes: H, W pixels of the image, h, w pixels of a patch. A patch is one input of the network: a whole padded image, or a
window of an image larger than the tile. Patches of different images share a batch if their shapes are equal.

Windows form a grid, so the weights of a window are the outer product of one vector per axis. Each vector is normalised
over all windows of its axis, so that blending is a plain weighted sum.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from brim.errors import BrimError
from brim.segmentation.config import DEFAULT_TILE, MIN_SIDE
from brim.segmentation.images.contrast import as_grey, contrast_of
from brim.segmentation.images.stacks import StoredChannels
from brim.segmentation.networks import ModelTraits
from brim.segmentation.objects.instances import STANDARD_DIAMETER

STEP = 32  # sides are padded to a multiple of this, so that images of similar size share a batch
LOOK_AHEAD = 4  # a batch leaves unfilled once this many batches' worth of patches have come after its first

PatchShape = tuple[int, int]


class TileWindow(NamedTuple):
    top: int
    left: int
    row: int  # of the grid
    column: int


class TileAxis:
    """Windows along one side of an image."""

    def __init__(self, length: int, tile: int, overlap: int) -> None:
        """Windows of `tile` pixels that overlap by at least `overlap`; the last ends at the border."""
        self.length, self.size = length, min(length, tile)
        self.starts = (*range(0, length - self.size, max(1, tile - overlap)), length - self.size)
        self._overlap = min(overlap, self.size)

    def weights(self) -> Tensor:
        """(windows, size) float32, above 0; at each pixel the weights of all windows sum to 1."""
        ramp = torch.ones(self.size, dtype=torch.float64)
        if self._overlap:
            # sin² and cos² sum to 1: where exactly two windows meet, the ramps are the weights
            position = torch.arange(self.size, dtype=torch.float64) + 0.5
            rise = torch.sin((position / self._overlap).clamp(max=1) * (math.pi / 2)).square()
            ramp = rise * rise.flip(0)
        total = torch.zeros(self.length, dtype=torch.float64)
        for start in self.starts:
            total[start : start + self.size] += ramp
        return torch.stack([ramp / total[start : start + self.size] for start in self.starts]).float()


class TileGrid:
    """The windows of one image, row by row."""

    def __init__(self, height: int, width: int, tile: int = DEFAULT_TILE, overlap: int | None = None) -> None:
        """overlap None is an eighth of the tile."""
        overlap = tile // 8 if overlap is None else overlap
        self.rows, self.columns = TileAxis(height, tile, overlap), TileAxis(width, tile, overlap)
        self.height, self.width = height, width

    def __len__(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    def __iter__(self) -> Iterator[TileWindow]:
        for row, top in enumerate(self.rows.starts):
            for column, left in enumerate(self.columns.starts):
                yield TileWindow(top, left, row, column)


class Blend:
    """The weighted sum of an image's windows, on the device of the weights.

    rows     (grid rows, h)     float32
    columns  (grid columns, w)  float32
    """

    def __init__(self, grid: TileGrid, rows: Tensor, columns: Tensor, num_maps: int | None = None) -> None:
        """num_maps blended together; None: one, without an axis of its own."""
        self._rows, self._columns = rows, columns
        maps = () if num_maps is None else (num_maps,)
        self.total = torch.zeros(*maps, grid.height, grid.width, device=rows.device)  # (maps, H, W) float32

    def add(self, window: TileWindow, values: Tensor) -> None:
        """Add one window, (h, w) or (maps, h, w) float32; after the last one, `total` is the blended image."""
        rows, columns = self._rows[window.row], self._columns[window.column]
        place = self.total[..., window.top : window.top + len(rows), window.left : window.left + len(columns)]
        place.addcmul_(values, rows[:, None] * columns)


def padded(side: int) -> int:
    """The side an image is padded to: the next multiple of STEP, at least MIN_SIDE."""
    return max(MIN_SIDE, math.ceil(side / STEP) * STEP)


def usable_tile(tile: int) -> int:
    """The tile rounded down to a multiple of STEP, so that no padded image is larger than a window."""
    return tile // STEP * STEP


@dataclass(eq=False, slots=True)
class ImageFrame:
    """One image on its way from pixels to polygons."""

    index: int  # in the input
    name: str
    height: int = 0
    width: int = 0
    shown: tuple[int, int] | None = None  # rows and columns at the scale the network sees, if that is another
    pixels: np.ndarray | None = None  # (H, W, 3) uint8, if objects are measured or seen at several scales
    pixel_um: float | None = None  # side of a pixel, if the file says
    measured: StoredChannels | None = None  # where objects are measured, if not in pixels
    contrast: tuple[float, float] | None = None  # the values shown as black and as white
    failure: BrimError | None = None
    grid: TileGrid | None = None  # if the image is cut into windows
    weights: tuple[Tensor, Tensor] | None = None  # of the grid's rows and columns
    patches: list["Patch"] = field(default_factory=list)  # removed by group()
    missing: int = 1  # patches without a result
    blend: Blend | None = None  # results of the windows so far, on the device
    finite: Tensor | None = None  # () bool on the device: all logits so far are finite


@dataclass(eq=False, slots=True)
class Patch:
    """One input of the network."""

    frame: ImageFrame
    pixels: Tensor  # (h, w, 3) uint8, pinned for a GPU
    shape: PatchShape  # of the network's input; patches of one shape share a batch
    window: TileWindow | None = None
    number: int = 0  # position in the order of arrival


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Patches of one shape, or one failed image that is passed on."""

    patches: list[Patch]
    failed: ImageFrame | None = None


def prepare(
    frame: ImageFrame,
    image: np.ndarray,
    traits: ModelTraits,
    diameter: float | None = None,
    contrast: tuple[float, float] | None = None,
    *,
    tile: int,
    overlap: int | None,
    resize: int | None,
    pinned: bool,
) -> ImageFrame:
    """Add the patches of an image, (H, W, 3) uint8, as the weights with these traits expect it.

    diameter is that of the objects in pixels, contrast the values shown as black and white, if they are known.
    """
    scale = scale_of(traits, diameter)
    image = as_grey(image) if traits.stretches else image
    frame.contrast = (contrast or contrast_of(image)) if traits.stretches else None
    frame.pixels = image if traits.task == "instances" else None
    return cut(frame, image, tile=tile, overlap=overlap, resize=resize, pinned=pinned, scale=scale)


def scale_of(traits: ModelTraits, diameter: float | None) -> float:
    """The scale at which images are first shown; diameter as for prepare."""
    if diameter is not None and traits.task == "instances":
        return STANDARD_DIAMETER / diameter
    return 1.0 if traits.scale is None else traits.scale


def cut(
    frame: ImageFrame,
    image: np.ndarray,
    *,
    tile: int,
    overlap: int | None,
    resize: int | None,
    pinned: bool,
    scale: float = 1.0,
) -> ImageFrame:
    """Add the patches of an image, (H, W, 3) uint8, to its frame; scale is that at which the network sees it."""
    frame.height, frame.width = image.shape[:2]
    if scale != 1:
        frame.shown = scaled_size(image.shape[:2], scale)
        image = cv2.resize(image, frame.shown[::-1], interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    if resize is not None:
        frame.patches = [Patch(frame, _to_tensor(image, pinned), (resize, resize))]
        return frame
    shape = (padded(image.shape[0]), padded(image.shape[1]))
    if max(shape) <= tile:
        frame.patches = [Patch(frame, pad(image, shape, pinned=pinned), shape)]
        return frame
    frame.grid = grid = TileGrid(*shape, tile, overlap)
    rows, columns = grid.rows.weights(), grid.columns.weights()
    frame.weights = (rows.pin_memory(), columns.pin_memory()) if pinned else (rows, columns)
    frame.missing = len(grid)
    whole = pad(image, shape, pinned=False).numpy()
    height, width = grid.rows.size, grid.columns.size
    for window in grid:
        part = whole[window.top : window.top + height, window.left : window.left + width]
        frame.patches.append(Patch(frame, _to_tensor(part, pinned), (height, width), window))
    return frame


def scaled_size(size: tuple[int, ...], scale: float) -> tuple[int, int]:
    """Rows and columns of an image at another scale, at least 1."""
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def pad(image: np.ndarray, shape: PatchShape, *, pinned: bool) -> Tensor:
    """The image extended by reflection to the right and below, (h, w, 3) uint8."""
    below, right = shape[0] - image.shape[0], shape[1] - image.shape[1]
    if not (below or right):
        return _to_tensor(image, pinned)
    out = torch.empty((*shape, image.shape[2]), dtype=torch.uint8, pin_memory=pinned)
    view = out.numpy()
    bordered = cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REFLECT_101, dst=view)
    if bordered is not view:
        np.copyto(view, bordered)
    return out


def _to_tensor(image: np.ndarray, pinned: bool) -> Tensor:
    """Pixels as a contiguous tensor, in pinned memory for a GPU."""
    if not pinned:
        # torch warns about a read-only array, although the tensor is only read
        return torch.from_numpy(image if image.flags.c_contiguous and image.flags.writeable else image.copy())
    out = torch.empty(image.shape, dtype=torch.uint8, pin_memory=True)
    np.copyto(out.numpy(), image)
    return out


def group(frames: Iterable[ImageFrame], size: Callable[[], int]) -> Iterator[PatchBatch]:
    """Batches of up to size() patches of one shape.

    A batch leaves when it is full, or unfilled once LOOK_AHEAD batches' worth of patches have come after its first:
    this bounds both the wait of a rare shape and the patches held here. If `frames` fails, the batches of the frames
    before come first.
    """
    groups: dict[PatchShape, list[Patch]] = {}  # in the order of their first patches
    number, failure = 0, None
    try:
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
                if oldest is not None and number - oldest[0].number >= LOOK_AHEAD * size():
                    yield PatchBatch(groups.pop(oldest[0].shape))
    except Exception as error:
        failure = error
    for patches in groups.values():
        yield PatchBatch(patches)
    if failure is not None:
        raise failure

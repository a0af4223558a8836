"""Images cut into patches, and patches of one shape gathered into batches.

A patch is what the network sees: a whole padded image, or one window of an image larger than the tile. Patches of
different images share a batch when their shapes are equal. Nothing here touches a device.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import cv2
import numpy as np
import torch
from torch import Tensor

from brim.errors import BrimError
from brim.segmentation.prediction.tiles import Blend, Grid, Window, padded

LOOK_AHEAD = 4  # batches' worth of patches that may pass before a batch leaves unfilled

Shape = tuple[int, int]


@dataclass(eq=False, slots=True)
class Frame:
    """One image on its way from pixels to polygons."""

    index: int  # in the input
    name: str
    height: int = 0
    width: int = 0
    failure: BrimError | None = None
    grid: Grid | None = None  # of an image in windows
    weights: tuple[Tensor, Tensor] | None = None  # of the grid's rows and columns
    patches: list["Patch"] = field(default_factory=list)  # taken away by group()
    missing: int = 1  # patches without a result
    blend: Blend | None = None  # results of the windows so far, on the device
    finite: Tensor | None = None  # () bool on the device: no window so far had a NaN or an infinity


@dataclass(eq=False, slots=True)
class Patch:
    """What the network sees at once."""

    frame: Frame
    pixels: Tensor  # (h, w, 3) uint8, pinned for a GPU
    shape: Shape  # of the network's input; patches of one shape share a batch
    window: Window | None = None
    number: int = 0  # counts patches in the order they came


@dataclass(frozen=True, slots=True)
class Batch:
    """Patches of one shape, or one image that failed and passes by."""

    patches: list[Patch]
    failed: Frame | None = None


def cut(frame: Frame, image: np.ndarray, *, tile: int, overlap: int | None, resize: int | None, pinned: bool) -> Frame:
    """Give a frame the patches of its image, (H, W, 3) uint8."""
    frame.height, frame.width = image.shape[:2]
    if resize is not None:
        frame.patches = [Patch(frame, _moved(image, pinned), (resize, resize))]
        return frame
    shape = (padded(frame.height), padded(frame.width))
    if max(shape) <= tile:
        frame.patches = [Patch(frame, pad(image, shape, pinned=pinned), shape)]
        return frame
    frame.grid = grid = Grid(*shape, tile, overlap)
    weights = grid.rows.weights(), grid.columns.weights()
    frame.weights = (weights[0].pin_memory(), weights[1].pin_memory()) if pinned else weights
    frame.missing = len(grid)
    whole = pad(image, shape, pinned=False).numpy()
    size = (grid.rows.size, grid.columns.size)
    for window in grid:
        part = whole[window.top : window.top + size[0], window.left : window.left + size[1]]
        frame.patches.append(Patch(frame, _moved(part, pinned), size, window))
    return frame


def pad(image: np.ndarray, shape: Shape, *, pinned: bool) -> Tensor:
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


def group(frames: Iterable[Frame], size: Callable[[], int], look_ahead: int = LOOK_AHEAD) -> Iterator[Batch]:
    """Batches of up to size() patches of one shape.

    A batch leaves when it is full, or unfilled when `look_ahead` batches' worth of patches came after its first: an
    image whose shape is rare waits no longer than that, and no more than that is held here.
    """
    groups: dict[Shape, list[Patch]] = {}  # in the order of their first patches
    number = 0
    for frame in frames:
        if frame.failure is not None:
            yield Batch([], frame)
            continue
        patches, frame.patches = frame.patches, []
        for patch in patches:
            patch.number = number = number + 1
            groups.setdefault(patch.shape, []).append(patch)
            if len(groups[patch.shape]) >= size():
                yield Batch(groups.pop(patch.shape))
            oldest = next(iter(groups.values()), None)
            if oldest is not None and number - oldest[0].number >= look_ahead * size():
                yield Batch(groups.pop(oldest[0].shape))
    for patches in groups.values():
        yield Batch(patches)

"""Images of several channels, Z slices and times, and the choice of what the network sees of them.

    stack (file) ── choose: channels, z, t ──▶ planes ── reduce: maximum over Z, mean over channels ──▶ one image

Axes: T times, Z slices, C channels, H rows, W columns.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from brim.errors import ImageError
from brim.segmentation.config import ImagePlanes

log = logging.getLogger("brim")
RGB_NAMES = ("red", "green", "blue")
MEASURED_BYTES = 16  # of a pixel's channels; of more, only what the network sees is read and measured


class ImageWindow(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """What a file says about its planes."""

    height: int  # pixels
    width: int
    dtype: np.dtype
    channels: tuple[str, ...] = ("",)  # names; "": without a name
    num_z: int = 1
    num_t: int = 1
    is_rgb: bool = False  # the channels are red, green and blue
    has_axes: bool = True  # False: pages without a description, counted as Z slices
    pixel_um: float | None = None  # side of a pixel


class Stack:
    """Planes of an image that are read when they are asked for."""

    shape: StackShape

    def read(self, t: int, z: int, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
        """(h, w, number of channels) of one time and slice, in the file's own type."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the file."""

    @property
    def window(self) -> ImageWindow:
        """The whole image."""
        return ImageWindow(0, 0, self.shape.height, self.shape.width)


class PlaneChoice(NamedTuple):
    """The planes of a stack that are read."""

    channels: tuple[int, ...]
    slices: tuple[int, ...]  # of which the maximum is taken
    time: int
    as_rgb: bool


class StoredChannels(NamedTuple):
    """Channels in the values of their file, in which objects are measured."""

    names: tuple[str, ...]  # "": without a name
    values: np.ndarray  # (H, W, C)
    shown: tuple[int, ...] = ()  # those of whose mean the network sees; empty: a colour image


class LoadedImage(NamedTuple):
    """The planes of an image as its file stores them."""

    planes: np.ndarray  # (H, W, C)
    names: tuple[str, ...]  # of the channels
    shown: tuple[int, ...]  # channels that the network sees
    as_rgb: bool  # as colours, else their mean
    pixel_um: float | None

    @property
    def pixels(self) -> np.ndarray:
        """What the network sees: (H, W), or (H, W, 3) of a colour image."""
        is_whole = self.shown == tuple(range(self.planes.shape[2]))
        return _flat(self.planes if is_whole else self.planes[..., list(self.shown)], self.as_rgb)

    @property
    def measured(self) -> StoredChannels | None:
        """None where the pixels that the network sees have the same values: images of 8 bits, grey or in colour."""
        if self.planes.dtype in (np.uint8, np.bool_) and (self.as_rgb or len(self.names) == 1):
            return None
        return StoredChannels(self.names, self.planes, () if self.as_rgb else self.shown)


def choose(stack: Stack, planes: ImagePlanes, name: str = "") -> PlaneChoice:
    """What to read of a stack; says under `name` what was decided for the user, raises ImageError if it has no such
    channel, slice or time."""
    shape, notes = stack.shape, []
    channels = tuple(range(len(shape.channels)))
    if planes.channels is not None:
        channels = tuple(dict.fromkeys(_channel(shape, wanted) for wanted in planes.channels))
    elif len(channels) > 1 and not shape.is_rgb:
        notes.append(f"the mean of its {len(channels)} channels ({listed(shape)}) is used (see channels)")
    slices: tuple[int, ...] = tuple(range(shape.num_z)) if shape.has_axes else (0,)
    if planes.z == "max":
        slices = tuple(range(shape.num_z))
    elif planes.z is not None:
        _check_number("z", planes.z, shape.num_z, "slice")
        slices = (planes.z,)
    elif shape.num_z > 1:
        one = (
            "the maximum over its Z slices is used (see z)"
            if shape.has_axes
            else "has several pages; only the first is read"
        )
        notes.append(one)
    _check_number("t", planes.t or 0, shape.num_t, "time")
    if planes.t is None and shape.num_t > 1:
        notes.append(f"the first of its {shape.num_t} times is used (see t)")
    if notes and name:
        log.warning("%s: %s", name, "; ".join(notes))
    as_rgb = shape.is_rgb and planes.channels is None
    return PlaneChoice(channels[:3] if as_rgb else channels, slices, planes.t or 0, as_rgb)


def compose(stack: Stack, choice: PlaneChoice, window: ImageWindow) -> np.ndarray:
    """What the network sees of a window: (h, w), or (h, w, 3) of a colour image, in the file's own type."""
    return _flat(_planes(stack, choice, choice.channels, window), choice.as_rgb)


def load(stack: Stack, choice: PlaneChoice, window: ImageWindow) -> LoadedImage:
    """A window with all channels of the file, if they are few enough to be kept until objects are measured."""
    shape, every = stack.shape, tuple(range(len(stack.shape.channels)))
    if choice.as_rgb:
        planes = _planes(stack, choice, choice.channels, window)
        return LoadedImage(planes, RGB_NAMES, (0, 1, 2), True, shape.pixel_um)
    if len(every) * shape.dtype.itemsize > MEASURED_BYTES:
        return LoadedImage(compose(stack, choice, window)[..., None], ("",), (0,), False, shape.pixel_um)
    planes = _planes(stack, choice, every, window)
    return LoadedImage(planes, shape.channels, choice.channels, False, shape.pixel_um)


def _planes(stack: Stack, choice: PlaneChoice, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
    """(h, w, C), the maximum over the slices."""
    planes = stack.read(choice.time, choice.slices[0], channels, window)
    for z in choice.slices[1:]:
        planes = np.maximum(planes, stack.read(choice.time, z, channels, window))
    return planes


def _flat(planes: np.ndarray, as_rgb: bool) -> np.ndarray:
    """The mean over channels, (h, w); (h, w, 3) of a colour image."""
    if as_rgb:
        return planes
    if planes.shape[2] == 1:
        return planes[..., 0]
    if planes.dtype.kind == "f":
        return np.asarray(planes.mean(2))
    total = planes.sum(2, dtype=np.int64 if planes.dtype.kind == "i" else np.uint64)
    return np.asarray((total + planes.shape[2] // 2) // planes.shape[2]).astype(planes.dtype)


def listed(shape: StackShape) -> str:
    """The channels as a user may name them."""
    return ", ".join(f"{number} {name}".strip() for number, name in enumerate(shape.channels))


class ArrayStack(Stack):
    """An image in memory, (H, W) or (H, W, 3)."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array if array.ndim == 3 else array[..., None]
        is_rgb = self._array.shape[2] == 3
        self.shape = StackShape(
            height=len(array), width=array.shape[1], dtype=array.dtype, is_rgb=is_rgb,
            channels=RGB_NAMES if is_rgb else ("",) * self._array.shape[2],
        )  # fmt: skip

    def read(self, t: int, z: int, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
        part = self._array[window.top : window.bottom, window.left : window.right]
        return part if channels == tuple(range(part.shape[2])) else part[..., list(channels)]


def _channel(shape: StackShape, wanted: str) -> int:
    names = [name.casefold() for name in shape.channels]
    if wanted.casefold() in names:
        return names.index(wanted.casefold())
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(names):
        return int(wanted)
    raise ImageError(f'has no channel "{wanted}"; its channels are {listed(shape)}')


def _check_number(field: str, number: int, count: int, thing: str) -> None:
    if number >= count:
        last = f"{thing}s 0 to {count - 1}" if count > 1 else f"one {thing}, number 0"
        raise ImageError(f"has no {thing} {number} ({field}); it has {last}")

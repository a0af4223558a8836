"""Images as (H, W, 3) uint8 from files, bytes, PIL images and arrays, or an ImageError that says what is wrong.

Pixels are used as they are stored: the EXIF orientation is ignored on purpose, since masks and polygons refer to stored
pixels. Alpha is dropped. What is read of several channels, slices and times is an ImagePlanes (stacks.py).
"""

# Axes: H rows, W columns, 3 channels red, green, blue

import io
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from brim.errors import ImageError
from brim.segmentation.config import ImagePlanes
from brim.segmentation.images.containers import (
    JPEG,
    PNG,
    ImageHeader,
    check_png,
    png_size,
    read_jpeg,
    read_png,
)
from brim.segmentation.images.files import (
    KINDS,
    MAX_PIXELS,
    PILLOW_ERRORS,
    PILLOW_FORMATS,
    ImageInput,
    StoredImage,
    checked_file,
    is_tiff,
    read_bytes,
    unreadable_kind,
)
from brim.segmentation.images.stacks import ArrayStack, LoadedImage, Stack, StoredChannels, choose, load
from brim.segmentation.images.tiff import MAX_VALUE_BYTES, TIFFS, OtherColours, TiffFileStack, tiff_size, tiff_stack
from brim.segmentation.images.vendors import is_readable, vendor_stack
from brim.segmentation.images.zarrs import ZarrStack, is_zarr

log = logging.getLogger("brim")

_RAW = cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
_READERS: list[tuple[tuple[bytes, ...], Callable[[bytes], ImageHeader]]] = [
    ((PNG,), read_png), ((JPEG,), read_jpeg),
]  # fmt: skip
_ALL = ImagePlanes()
_BRIGHT, _SAMPLED_PIXELS = 0.999, 2**18
_NARROW = 1 / 8  # share of the full scale below which values are shown from the darkest on
_pillow_lock = threading.Lock()

_logging = cv2.utils.logging if hasattr(cv2.utils, "logging") else cv2  # OpenCV 5, OpenCV 4
_logging.setLogLevel(0)  # our ImageError says what OpenCV would print about a broken file


PixelLoader = Callable[[Path | bytes, int, str, ImagePlanes], LoadedImage]
_loader: PixelLoader | None = None  # instead of load_pixels


class Picture(NamedTuple):
    """An image as a network takes it, and what its file says about it."""

    pixels: np.ndarray  # (H, W, 3) uint8, contiguous
    pixel_um: float | None = None  # side of a pixel, if the file says
    measured: StoredChannels | None = None  # if they differ from the pixels


def read_image(
    image: ImageInput, *, max_pixels: int = MAX_PIXELS, name: str | None = None, planes: ImagePlanes = _ALL
) -> np.ndarray:
    """An image as (H, W, 3) uint8, contiguous; messages use the name.

    16-bit values are scaled from the smallest of 8, 10, 12, 14 and 16 bits that holds 99.9 % of the pixels: a few hot
    ones do not hide the others. Floats are 0 to 1, or scaled like 16-bit values. Values on an offset of which little of
    that range is left, and those below 0 or above 65535, are scaled from the darkest to the brightest, but for 0.1 % of
    the pixels each. An array may be (H, W), (H, W, 1), (H, W, 3) or (H, W, 4); one that is already right is returned
    itself, not a copy. `planes` chooses channels, slice and time.
    """
    return read_picture(image, max_pixels=max_pixels, name=name, planes=planes).pixels


def read_picture(
    image: ImageInput, *, max_pixels: int = MAX_PIXELS, name: str | None = None, planes: ImagePlanes = _ALL
) -> Picture:
    """What read_image reads, with the size of a pixel, and the channels to be measured."""
    name = name or _name(image)
    loaded = _load(image, max_pixels, name, planes)
    try:
        pixels = to_rgb(eight_bit(loaded.pixels))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    return Picture(pixels, loaded.pixel_um, loaded.measured)


def to_rgb(array: np.ndarray) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8 as (H, W, 3), contiguous."""
    array = np.ascontiguousarray(array)
    return np.asarray(cv2.cvtColor(array, cv2.COLOR_GRAY2RGB)) if array.ndim == 2 else array


def read_labels(path: ImageInput, *, as_objects: bool = True, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A label image as (H, W) int32, 0 background, numbers possibly with gaps.

    A mask of two values, or without as_objects any, has the label 1; as_objects gives its connected parts labels.
    """
    name = _name(path)
    values = _load(path, max_pixels, name, _ALL).pixels
    if not as_objects or values.ndim == 3 or not holds_objects(values):
        inside = values != 0 if values.ndim == 2 else (values != 0).any(2)
        return np.asarray(cv2.connectedComponents(inside.astype(np.uint8))[1] if as_objects else inside, np.int32)
    if not np.isfinite(values).all() or (values != np.rint(values)).any() or values.min() < 0 or values.max() >= 2**31:
        raise ImageError(f"{name}: labels must be whole numbers from 0 to 2³¹ − 1")
    return values.astype(np.int32)


def numbers_objects(path: ImageInput, *, max_pixels: int = MAX_PIXELS) -> bool:
    """Whether a mask is a label image, which gives each object a number."""
    values = _load(path, max_pixels, _name(path), _ALL).pixels
    return values.ndim == 2 and holds_objects(values)


def holds_objects(values: np.ndarray) -> bool:
    """Whether values number objects: there are more than two, and not a mask with softened edges."""
    numbers, counts = np.unique(values, return_counts=True)
    if len(numbers) <= 2:
        return False
    softened = values.dtype == np.uint8 and numbers[-1] == 255 and 2 * counts[-1] > counts[numbers > 0].sum()
    return not softened


@contextmanager
def loading_by(loader: PixelLoader) -> Iterator[None]:
    """Within the block, files and bytes are read by the loader, as in another process; by all threads."""
    global _loader
    before, _loader = _loader, loader
    try:
        yield
    finally:
        _loader = before


def is_confined() -> bool:
    """Whether files are read by a loader at this moment, which reads whole images only."""
    return _loader is not None


def _load(image: ImageInput, max_pixels: int, name: str, planes: ImagePlanes) -> LoadedImage:
    if _loader is None or isinstance(image, np.ndarray | Image.Image):
        return load_pixels(image, max_pixels, name, planes)
    if isinstance(image, StoredImage):
        image = read_bytes(image, max_pixels)
    return _loader(Path(image) if isinstance(image, str | Path) else bytes(image), max_pixels, name, planes)


def load_pixels(image: ImageInput, max_pixels: int, name: str, planes: ImagePlanes) -> LoadedImage:
    """The chosen planes as stored, of any dtype; messages use the name."""
    try:
        with closing(_open(image, name, max_pixels)) as stack:
            shape = stack.shape
            _check_size((shape.width, shape.height), max_pixels)
            if len(shape.channels) * shape.dtype.itemsize * shape.height * shape.width > MAX_VALUE_BYTES * max_pixels:
                raise ImageError(f"{len(shape.channels)} channels of {shape.dtype} are too many to be read")
            return load(stack, choose(stack, planes, name), stack.window)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error.__cause__


def _open(image: ImageInput, name: str, max_pixels: int) -> Stack:
    """The image as a stack; TIFF files on disk are read by part, others at once."""
    if isinstance(image, np.ndarray):
        if image.ndim not in (2, 3):
            raise ImageError(f"{image.ndim} dimensions; expected (H, W) or (H, W, channels)")
        _check_size(image.shape[1::-1], max_pixels)
        return ArrayStack(_without_alpha(image))
    if isinstance(image, Image.Image):
        with _quiet_pillow(max_pixels):
            return ArrayStack(_without_alpha(_from_pillow(image, max_pixels)))
    if isinstance(image, str | Path):
        if is_zarr(Path(image)):
            return ZarrStack(Path(image))
        path = checked_file(Path(image), max_pixels)
        if is_readable(path.name):
            return vendor_stack(path)
        if is_tiff(path):
            return _tiff(path, name, max_pixels)
    if isinstance(image, str | Path | StoredImage):
        image = read_bytes(image, max_pixels)
    if not isinstance(image, bytes | bytearray | memoryview):
        raise ImageError("not an image; expected a path, bytes, a PIL image or a NumPy array")
    data = bytes(image)
    if data.startswith(TIFFS):
        return _tiff(data, name, max_pixels)
    return ArrayStack(_without_alpha(_decode(data, name, max_pixels)))


def open_by_part(path: Path) -> Stack:
    """The planes of a file that is_read_by_part."""
    if is_zarr(path):
        return ZarrStack(path)
    return vendor_stack(path) if is_readable(path.name) else TiffFileStack(path)


def _tiff(source: Path | bytes, name: str, max_pixels: int) -> Stack:
    try:
        if isinstance(source, Path):
            return TiffFileStack(source)
        _check_size(tiff_size(source), max_pixels)
        return tiff_stack(source)
    except OtherColours:
        data = source if isinstance(source, bytes) else read_bytes(source, max_pixels)
        return ArrayStack(_without_alpha(_decode_with_pillow(data, name, max_pixels)))


def _name(image: object) -> str:
    if isinstance(image, str | Path | StoredImage):
        return str(image)
    if isinstance(image, np.ndarray):
        return f"array {image.dtype} {image.shape}"
    if isinstance(image, Image.Image):
        return str(getattr(image, "filename", "")) or f"PIL image {image.mode} {image.size}"
    if isinstance(image, bytes | bytearray | memoryview):
        return f"{len(image)} bytes"
    return f"{type(image).__name__} object"


# Decoding


def _decode(data: bytes, name: str, max_pixels: int) -> np.ndarray:
    """Pixels as stored, (H, W) or (H, W, channels), of a file that is no TIFF."""
    if not data:
        raise ImageError("no bytes")
    read = next((reader for starts, reader in _READERS if data.startswith(starts)), None)
    if read is None:
        return _decode_with_pillow(data, name, max_pixels)
    if read is read_png:
        _check_size(png_size(data), max_pixels)  # before its chunks: a bomb may have many
    header = read(data)
    _check_size((header.width, header.height), max_pixels)
    if not header.plain:
        return _decode_with_pillow(data, name, max_pixels)
    array = _decode_with_imagecodecs(data, header)
    if array is None:
        array = _decode_with_opencv(np.frombuffer(data, np.uint8) if header.data is None else header.data, header)
    if array is None:  # Pillow would fill the missing part of a PNG with black
        if read is read_png:
            check_png(data)
        raise ImageError("corrupt: its header is complete, but its pixels cannot be decoded")
    return array


def _decode_with_imagecodecs(data: bytes, header: ImageHeader) -> np.ndarray | None:
    """Pixels of a complete 8-bit RGB PNG or JPEG, equal to OpenCV's in 60 % of the time; None: leave it to OpenCV.

    A file without its end is left to OpenCV, which refuses it: here the missing part would be grey.
    """
    if header.data is not None or (header.bits, header.channels) != (8, 3):
        return None
    for start, end, decode in _fast_decoders():
        if data.startswith(start) and data.endswith(end):
            try:
                array = decode(data)
            except (RuntimeError, ValueError):  # its own errors are of these types
                return None
            fits = array.dtype == np.uint8 and array.shape == (header.height, header.width, 3)
            return array if fits else None
    return None


@cache
def _fast_decoders() -> tuple[tuple[bytes, bytes, Callable[[bytes], np.ndarray]], ...]:
    """First and last bytes of a kind of file, and its decoder; none where imagecodecs does not have them."""
    try:
        import imagecodecs

        png, jpeg = imagecodecs.png_decode, imagecodecs.jpeg8_decode
    except (ImportError, AttributeError):
        return ()
    return (b"\x89PNG", b"IEND\xaeB`\x82", png), (b"\xff\xd8", b"\xff\xd9", jpeg)


def _decode_with_opencv(data: np.ndarray, header: ImageHeader) -> np.ndarray | None:
    """Pixels of a file's bytes (N,) uint8, or None if OpenCV finds none that fit the header."""
    flags = _RAW | (cv2.IMREAD_GRAYSCALE if header.channels < 3 else cv2.IMREAD_COLOR)
    try:
        array = cv2.imdecode(data, flags if header.bits <= 16 else cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None
    if array is None or array.shape[:2] != (header.height, header.width):
        return None
    return array if array.ndim == 2 else cv2.cvtColor(array, cv2.COLOR_BGR2RGB)


def _decode_with_pillow(data: bytes, name: str, max_pixels: int) -> np.ndarray:
    if data[:2] in (b"P1", b"P2", b"P3"):  # Pillow takes quadratic time to remove the comments of plain PNM
        data = re.sub(rb"#[^\r\n]*[\r\n]?", b"", data)
    with _quiet_pillow(max_pixels):
        try:
            image = Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)
        except UnidentifiedImageError as error:
            kind = unreadable_kind(name) or f"not an image, or of a variant that cannot be read; expected {KINDS}"
            raise ImageError(kind) from error
        except PILLOW_ERRORS as error:
            raise ImageError(f"corrupt or truncated: {error}") from error
        array = _from_pillow(image, max_pixels)
        if getattr(image, "is_animated", False):
            log.warning("%s: has several pages; only the first is read", name)
        return array


@contextmanager
def _quiet_pillow(max_pixels: int) -> Iterator[None]:
    """Pillow without warnings and with our limit on pixels, one thread at a time: both settings are global."""
    with _pillow_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels  # Pillow rejects above twice this
        try:
            yield
        except Image.DecompressionBombError as error:
            raise ImageError(f"{error}; at most {max_pixels} pixels are read (see max_pixels)") from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _from_pillow(image: Image.Image, max_pixels: int) -> np.ndarray:
    _check_size(image.size, max_pixels)
    try:
        image.load()
        if image.mode in ("LA", "La"):
            return np.array(image.getchannel(0))
        if image.mode in ("1", "L", "RGB", "RGBA", "I", "F") or image.mode.startswith("I;16"):
            return np.array(image)
        return np.array(image.convert("RGB"))
    except PILLOW_ERRORS as error:
        raise ImageError(f"corrupt, truncated or not convertible from {image.mode} to RGB: {error}") from error


def _check_size(size: tuple[int, ...], max_pixels: int) -> None:
    if len(size) != 2 or 0 in size:
        raise ImageError(f"size {size} (width, height); expected two sides of at least 1 pixel")
    if size[0] * size[1] > max_pixels:
        raise ImageError(f"{size[0]} x {size[1]} pixels; at most {max_pixels} are read (see max_pixels)")


# Pixels to 8 bits


def _without_alpha(array: np.ndarray) -> np.ndarray:
    if array.ndim == 2 or array.shape[2] == 3:
        return array
    if array.shape[2] in (1, 4):
        return array[..., 0] if array.shape[2] == 1 else array[..., :3]
    raise ImageError(f"{array.shape[2]} channels; expected (H, W) or (H, W, 1, 3 or 4), channels last")


def eight_bit(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return np.where(array, np.uint8(255), np.uint8(0))  # not a view: Pillow's True may be any byte but 0
    if array.dtype.kind not in "iuf":
        raise ImageError(f"values of type {array.dtype}; expected whole numbers, floats or bool")
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ImageError("holds NaN or infinite values; expected finite ones")
    return scaled(array, value_range(array.dtype, float(low), float(high), *usual_values(array)))


class ValueRange(NamedTuple):
    """The values that become 0 and 255."""

    black: float
    white: float


def usual_values(array: np.ndarray) -> tuple[float, float]:
    """The values between which 99.8 % of the pixels lie, from a part of those of a large image."""
    step = max(1, int((array.shape[0] * array.shape[1] / _SAMPLED_PIXELS) ** 0.5))
    dark, bright = np.quantile(array[::step, ::step], (1 - _BRIGHT, _BRIGHT), method="higher")
    return float(dark), float(bright)


def value_range(dtype: np.dtype, low: float, high: float, dark: float, bright: float) -> ValueRange:
    """The range of an image with values from low to high, most of them from dark to bright.

    It is that of the values' type or bits, unless that leaves an image on an offset fewer than 32 levels.
    """
    if dtype == np.uint8:
        return ValueRange(0.0, 255.0)
    if low < 0 or high > 65535:
        black, white = (dark, bright) if dark < bright else (low, high)
        return ValueRange(black, white if white > black else black + 1)
    if dtype.kind == "f" and high <= 1:
        narrow = 0 < bright - dark < _NARROW
        return ValueRange(dark, dark + 4 * (bright - dark)) if narrow else ValueRange(0.0, 1.0)
    full = _full_scale(bright)
    narrow = 0 < bright - dark < _NARROW * full
    return ValueRange(dark, dark + _full_scale(bright - dark)) if narrow else ValueRange(0.0, full)


def _full_scale(bright: float) -> float:
    return float(next((1 << bits) - 1 for bits in (8, 10, 12, 14, 16) if bright <= (1 << bits) - 1))


def scaled(array: np.ndarray, values: ValueRange) -> np.ndarray:
    """Values of a range as uint8; those beyond it are its ends."""
    black, white = values
    whole = array.dtype.kind != "f" and black == int(black) >= 0 and white <= 65535
    if not whole:
        shown = (np.clip(array, black, white) - black) * (255 / (white - black))
        return np.asarray(np.rint(shown).astype(np.uint8))
    if black:
        array = np.maximum(array, array.dtype.type(black)) - array.dtype.type(black)
    full = white - black
    if full == 255:
        return np.asarray(np.minimum(array, 255).astype(np.uint8))
    return np.asarray(cv2.convertScaleAbs(np.ascontiguousarray(array, np.uint16), alpha=255 / full))

"""Images in: whatever people have, as (H, W, 3) uint8, or an ImageError that says what is wrong with it.

Pixels are taken as they are stored. The EXIF orientation is ignored on purpose: a mask or a polygon belongs to stored
pixels, whatever way up a viewer shows them. Alpha is dropped. Of several pages, the first is read, with a warning.
"""

# Axes: H rows, W columns, 3 channels red, green, blue

import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from brim.errors import ImageError
from brim.segmentation.images.containers import (
    JPEG,
    PNG,
    TIFFS,
    ImageHeader,
    check_deflated,
    check_png,
    png_size,
    read_jpeg,
    read_png,
    read_tiff,
    tiff_plane,
)
from brim.segmentation.images.files import (
    KINDS,
    MAX_PIXELS,
    PILLOW_ERRORS,
    PILLOW_FORMATS,
    ImageInput,
    StoredImage,
    read_bytes,
)

log = logging.getLogger("brim")

_RAW = cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
_pillow_lock = threading.Lock()

_logging = cv2.utils.logging if hasattr(cv2.utils, "logging") else cv2  # OpenCV 5, OpenCV 4
_logging.setLogLevel(0)  # what OpenCV would print about a broken file is in our ImageError


def read_image(image: ImageInput, *, max_pixels: int = MAX_PIXELS, name: str | None = None) -> np.ndarray:
    """An image as (H, W, 3) uint8, contiguous; name is what messages call it.

    16-bit values are scaled from the smallest of 8, 10, 12, 14 and 16 bits that holds the image's largest; floats are
    0 to 1, or 0 to 255. An array may be (H, W), (H, W, 1), (H, W, 3) or (H, W, 4); one that is right already is
    returned itself, not a copy.
    """
    name, array = _load(image, max_pixels, name)
    try:
        return _three_channels(_eight_bit(_without_alpha(array)))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None


def read_mask(path: ImageInput, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A mask as (H, W) bool: what is not zero, in any channel, is inside. Alpha is ignored, labels are welcome."""
    name, array = _load(path, max_pixels)
    try:
        colours = _without_alpha(array)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    return np.asarray(colours != 0 if colours.ndim == 2 else (colours != 0).any(2))


# Where an image comes from


def _load(image: ImageInput, max_pixels: int, name: str | None = None) -> tuple[str, np.ndarray]:
    """A name for messages, and pixels as they are: (H, W) or (H, W, channels), any dtype, red first."""
    name = name or _name(image)
    try:
        if isinstance(image, np.ndarray):
            return name, _checked_size(image, image.shape[1::-1], max_pixels)
        if isinstance(image, Image.Image):
            with _quiet_pillow():
                return name, _from_pillow(image, max_pixels)
        if isinstance(image, str | Path | StoredImage):
            image = read_bytes(image, max_pixels)
        if isinstance(image, bytes | bytearray | memoryview):
            return name, _decode(bytes(image), name, max_pixels)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error.__cause__
    raise ImageError(f"{name}: not an image; expected a path, bytes, a PIL image or a NumPy array")


def _name(image: object) -> str:
    if isinstance(image, str | Path | StoredImage):
        return str(image)
    if isinstance(image, np.ndarray):
        return f"array {image.dtype} {image.shape}"
    if isinstance(image, Image.Image):
        return str(getattr(image, "filename", "")) or f"PIL image {image.mode} {image.size}"
    return (
        f"{len(image)} bytes" if isinstance(image, bytes | bytearray | memoryview) else f"{type(image).__name__} object"
    )


# Decoding


def _decode(data: bytes, name: str, max_pixels: int) -> np.ndarray:
    if not data:
        raise ImageError("no bytes")
    readers: list[tuple[tuple[bytes, ...], Callable[[bytes], ImageHeader]]] = [
        ((PNG,), read_png), ((JPEG,), read_jpeg), (TIFFS, read_tiff),
    ]  # fmt: skip
    read = next((reader for starts, reader in readers if data.startswith(starts)), None)
    if read is None:
        return _decode_with_pillow(data, name, max_pixels)
    if read is read_png:
        _check_size(png_size(data), max_pixels)  # before its chunks: a bomb may have many
    header = read(data)
    _check_size((header.width, header.height), max_pixels)
    if header.several:
        log.warning("%s: has several pages; only the first is read", name)
    if header.plain:
        check_deflated(data, header)
        pixels = np.frombuffer(data, np.uint8) if header.data is None else header.data
        array = _decode_planes(data, header) if header.separate else _decode_with_opencv(pixels, header)
        if array is not None:
            return array
        if read is read_png:
            check_png(data)
        if read is not read_tiff:  # Pillow would fill what a PNG lacks with black; of TIFFs it reads some others
            raise ImageError("corrupt: its header is whole, but its pixels cannot be decoded")
    if header.bits > 8 and header.channels > 1:  # of these Pillow would keep 8 bits
        raise ImageError(
            f"{header.channels} channels of {header.bits} bits stored in a way that cannot be read, or corrupt; "
            "save it as PNG, or as TIFF with interleaved channels"
        )
    return _decode_with_pillow(data, name, max_pixels)


def _decode_planes(data: bytes, header: ImageHeader) -> np.ndarray | None:
    """Red, green and blue of a TIFF that keeps them apart, which OpenCV would read as if it did not."""
    grey, files = header._replace(channels=1), (tiff_plane(data, plane) for plane in range(3))
    planes = [_decode_with_opencv(np.frombuffer(file, np.uint8), grey) for file in files]
    return np.dstack([plane for plane in planes if plane is not None]) if all(p is not None for p in planes) else None


def _decode_with_opencv(data: np.ndarray, header: ImageHeader) -> np.ndarray | None:
    """Pixels of a file's bytes (N,) uint8, or None where OpenCV finds none that fit the header."""
    flags = _RAW | (cv2.IMREAD_GRAYSCALE if header.channels < 3 else cv2.IMREAD_COLOR)
    try:
        array = cv2.imdecode(data, flags if header.bits <= 16 else cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None
    if array is None or array.shape[:2] != (header.height, header.width):
        return None
    return array if array.ndim == 2 else cv2.cvtColor(array, cv2.COLOR_BGR2RGB)


def _decode_with_pillow(data: bytes, name: str, max_pixels: int) -> np.ndarray:
    with _quiet_pillow():
        try:
            image = Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)
        except UnidentifiedImageError as error:
            raise ImageError(f"not an image, or of a variant that cannot be read; expected {KINDS}") from error
        except PILLOW_ERRORS as error:
            raise ImageError(f"corrupt or truncated: {error}") from error
        array = _from_pillow(image, max_pixels)
        if getattr(image, "is_animated", False) and image.format != "TIFF":
            log.warning("%s: has several pages; only the first is read", name)
        return array


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Pillow without its warnings and its own limit on pixels, one thread at a time: both are global."""
    with _pillow_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
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
        raise ImageError(
            f"{size[0]} x {size[1]} pixels; at most {max_pixels} are read (raise max_pixels if it is no bomb)"
        )


def _checked_size(array: np.ndarray, size: tuple[int, ...], max_pixels: int) -> np.ndarray:
    if array.ndim not in (2, 3):
        raise ImageError(f"{array.ndim} dimensions; expected (H, W) or (H, W, channels)")
    _check_size(size, max_pixels)
    return array


# Pixels to 8-bit RGB


def _without_alpha(array: np.ndarray) -> np.ndarray:
    if array.ndim == 2 or array.shape[2] == 3:
        return array
    if array.shape[2] == 1:
        return array[..., 0]
    if array.shape[2] == 4:
        return array[..., :3]
    raise ImageError(f"{array.shape[2]} channels; expected (H, W) or (H, W, 1, 3 or 4), channels last")


def _eight_bit(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return np.where(array, np.uint8(255), np.uint8(0))  # Pillow's bool may be any byte but 0: no view
    if array.dtype.kind not in "iuf":
        raise ImageError(f"values of type {array.dtype}; expected whole numbers, floats or bool")
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ImageError("holds NaN or infinite values; expected finite ones")
    if array.dtype.kind == "f":
        if low < 0 or high > 255:
            raise ImageError(f"floats from {low:.6g} to {high:.6g}; expected 0 to 1, or 0 to 255")
        return np.asarray(np.rint(array * 255 if high <= 1 else array).astype(np.uint8))
    if low < 0 or high > 65535:
        raise ImageError(f"values from {low} to {high}; expected 0 to 65535")
    return _scaled(array, next(bits for bits in (8, 10, 12, 14, 16) if high < 1 << bits))


def _scaled(array: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers below 2^bits as uint8, rounded."""
    if bits == 8:
        return array.astype(np.uint8)
    values = np.ascontiguousarray(array, np.uint16)
    return np.asarray(cv2.convertScaleAbs(values, alpha=255 / ((1 << bits) - 1)))


def _three_channels(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return np.asarray(cv2.cvtColor(array, cv2.COLOR_GRAY2RGB)) if array.ndim == 2 else array

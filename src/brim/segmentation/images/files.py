"""Image files on disk or in an object store: which files are images, how large they are, and their bytes.

No pixel is decoded here, so a process that only lists or measures images loads no OpenCV.
"""

import io
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from brim.engine.storage import Place
from brim.errors import ImageError, TooLarge, UnsupportedType
from brim.segmentation.images.containers import JPEG, PNG, TIFFS, jpeg_size, png_size, tiff_size

MAX_PIXELS = 2**28  # of one image: 0.75 GiB of RGB
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".jp2", ".ppm", ".pgm"))
KINDS = "PNG, JPEG, TIFF, BMP, GIF, WebP, JPEG 2000 or PPM"
PILLOW_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "JPEG2000", "PPM")  # others start programs
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, EOFError, RuntimeError)
FIRST_BYTES = 2**23  # of an object, asked for at once: few images have more


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image in an object store."""

    place: Place
    key: str  # below the place

    def __str__(self) -> str:
        return self.place.at(self.key)

    def read(self, limit_bytes: int) -> bytes:
        """Its bytes: one request for most images; the size of a large one is checked before the rest is read."""
        try:
            data = self.place.read_bytes(self.key, 0, FIRST_BYTES)
            if len(data) < FIRST_BYTES:
                return data
            size = self.place.size(self.key)
            if size > limit_bytes:
                raise ImageError(f"{size} bytes are more than an image of its pixels needs")
            return data + self.place.read_bytes(self.key, FIRST_BYTES, size)
        except FileNotFoundError as failure:
            raise ImageError("cannot be read: no such object") from failure


ImageFile = Path | StoredImage
ImageInput = str | Path | StoredImage | bytes | Image.Image | np.ndarray


# Which files


def find_images(paths: Sequence[Path | str]) -> list[Path]:
    """Image files among the paths, and in directories among them at any depth, by suffix; sorted, without repeats."""
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            files |= dict.fromkeys(_walk(path))
        elif path.exists():
            files[path] = None
        else:
            raise ImageError(f"{path}: no such file or directory; name an image or a directory of images")
    return list(files)


def is_image_name(name: str) -> bool:
    """Whether a file in a directory is taken for an image: by its suffix, unless it is hidden."""
    return name[0] != "." and Path(name).suffix.lower() in SUFFIXES


def _walk(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ImageError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    files: list[Path] = []
    for folder, _, names in os.walk(directory, onerror=refuse):
        files += [Path(folder, name) for name in names if is_image_name(name)]
    yield from sorted(files)


# How large


def image_size(data: bytes | memoryview, name: str) -> tuple[int, int]:
    """Width and height of a file's bytes, from its header alone; bytes of no known kind raise UnsupportedType."""
    start = bytes(data[:8])
    try:
        if start.startswith(PNG):
            return png_size(data)
        if start.startswith(JPEG):
            return jpeg_size(data)
        if start.startswith(TIFFS):
            return tiff_size(data)
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as opened:
            return opened.size
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    except (UnidentifiedImageError, *PILLOW_ERRORS) as error:
        raise UnsupportedType(f"{name}: not an image; expected {KINDS}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"{name}: {error}") from error


def header_size(image: ImageInput) -> tuple[int, ...] | None:
    """Width and height without decoding; None if Pillow does not know the kind, or takes it for a bomb."""
    if isinstance(image, Image.Image):
        return image.size
    source = io.BytesIO(image) if isinstance(image, bytes) else image
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # read_image has a limit of its own
            with Image.open(source) as opened:  # type: ignore[arg-type]
                return opened.size
    except Exception:  # broad on purpose: Pillow raises anything for a broken file, which read_image then names
        return None


# Bytes


def image_bytes(image: ImageFile, *, name: str) -> bytes:
    """The bytes of an image file, for read_image; a file that cannot be read raises ImageError."""
    try:
        return read_bytes(image, MAX_PIXELS)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error.__cause__


def read_bytes(image: str | ImageFile, max_pixels: int) -> bytes:
    """The bytes of a file that is not larger than an image of max_pixels may be."""
    limit = 64 * max_pixels + 2**28  # 16 bytes a pixel, uncompressed, and pages we do not read
    data = image.read(limit) if isinstance(image, StoredImage) else _read_file(Path(image), limit, max_pixels)
    if not data:
        raise ImageError("the file is empty")
    return data


def _read_file(path: Path, limit_bytes: int, max_pixels: int) -> bytes:
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ImageError("a directory, not an image; its images are found with find_images")
        if not stat.S_ISREG(info.st_mode):
            raise ImageError("not a regular file")
        if info.st_size > limit_bytes:
            raise ImageError(f"{info.st_size} bytes are more than an image of {max_pixels} pixels needs")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error

"""Image files on disk or in an object store: which files are images, their sizes in pixels, and their bytes.

No pixel is decoded here, so that a process that only lists images does not load OpenCV.
"""

import io
import logging
import mmap
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from brim.engine.storage import Place
from brim.errors import ImageError, TooLarge, UnsupportedType
from brim.segmentation.images.containers import JPEG, PNG, WEBP, jpeg_size, png_size, webp_size
from brim.segmentation.images.tiff import TIFFS, tiff_size
from brim.segmentation.images.vendors import extra_of, is_readable, vendor_stack
from brim.segmentation.images.zarrs import SUFFIX as ZARR
from brim.segmentation.images.zarrs import ZarrStack, is_zarr

log = logging.getLogger("brim")

MAX_PIXELS = 2**28  # of one image: 0.75 GiB of RGB
_COMMON = frozenset((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".jp2", ".ppm", ".pgm"))
SUFFIXES = _COMMON | {".svs", ".ndpi", ".lsm"}  # which are TIFF inside
KINDS = "PNG, JPEG, TIFF, BMP, GIF, WebP, JPEG 2000 or PPM"
MICROSCOPES = {
    ".czi": "Zeiss CZI", ".nd2": "Nikon ND2", ".lif": "Leica LIF", ".oib": "Olympus OIB", ".oif": "Olympus OIF",
    ".vsi": "Olympus VSI", ".mrxs": "3DHISTECH MRXS", ".vms": "Hamamatsu VMS", ".vmu": "Hamamatsu VMU",
    ".ims": "Imaris IMS",
}  # fmt: skip
_CONVERT = "save it as OME-TIFF, in Fiji by File > Export > OME-TIFF, or with bfconvert"
PILLOW_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "JPEG2000", "PPM")  # some others run programs
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, EOFError, RuntimeError)
FIRST_BYTES = 2**23  # of an object, read by the first request; few images are larger


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image in an object store."""

    place: Place
    key: str  # below the place

    def __str__(self) -> str:
        return self.place.at(self.key)

    def read(self, limit_bytes: int) -> bytes:
        """Its bytes, by one request for most images; the size of a large one is checked before the rest is read."""
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


def find_images(paths: Sequence[Path | str]) -> list[Path]:
    """The given files, and image files at any depth in given directories, by suffix; sorted, without repeats."""
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir() and not is_zarr(path):
            files |= dict.fromkeys(_walk(path))
        elif path.exists():
            files[path] = None
        else:
            raise ImageError(f"{path}: no such file or directory; name an image or a directory of images")
    return list(files)


def unreadable_kind(name: str) -> str | None:
    """What to do about a microscope's own format that is not read; None for other names."""
    kind, extra = MICROSCOPES.get(Path(name).suffix.lower()), extra_of(name)
    install = "" if extra is None else f", or install its reader: pip install 'brim[{extra}]'"
    return None if kind is None else f"{kind} is not read; {_CONVERT}{install}"


def is_image_name(name: str) -> bool:
    """Whether a file in a directory counts as an image: by its suffix, unless it is hidden."""
    return name[0] != "." and (Path(name).suffix.lower() in SUFFIXES or is_readable(name))


def _walk(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ImageError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    files: list[Path] = []
    skipped: list[str] = []
    for folder, folders, names in os.walk(directory, onerror=refuse):
        files += [Path(folder, name) for name in folders if name.lower().endswith(ZARR) and name[0] != "."]
        folders[:] = [name for name in folders if not name.lower().endswith(ZARR)]
        files += [Path(folder, name) for name in names if is_image_name(name)]
        own = [name for name in names if Path(name).suffix.lower() in MICROSCOPES and name[0] != "."]
        skipped += [name for name in own if not is_readable(name)]
    if skipped and files:
        first = sorted(skipped)[0]
        others = f" and {len(skipped) - 1} more like it" if len(skipped) > 1 else ""
        log.warning("%s: %s%s left out: %s", directory, first, others, unreadable_kind(first))
    yield from sorted(files)


def image_size(data: bytes | memoryview, name: str) -> tuple[int, int]:
    """Width and height from the header of a file's bytes; an unknown kind raises UnsupportedType."""
    start = bytes(data[:8])
    try:
        if start.startswith(PNG):
            return png_size(data)
        if start.startswith(JPEG):
            return jpeg_size(data)
        if start.startswith(TIFFS):
            return tiff_size(data)
        if WEBP.match(data):
            return webp_size(data)
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as opened:
            return opened.size
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    except (UnidentifiedImageError, *PILLOW_ERRORS) as error:
        raise UnsupportedType(f"{name}: not an image; expected {KINDS}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"{name}: {error}") from error


def header_size(image: ImageInput) -> tuple[int, ...] | None:
    """Width and height without decoding; None if its kind is not known or its size rejected."""
    if isinstance(image, Image.Image):
        return image.size
    source = io.BytesIO(image) if isinstance(image, bytes) else image
    try:
        if isinstance(image, str | Path) and is_zarr(Path(image)):
            shape = ZarrStack(Path(image)).shape
            return shape.width, shape.height
        if isinstance(image, str | Path) and is_readable(str(image)):
            with closing(vendor_stack(Path(image))) as stack:
                return stack.shape.width, stack.shape.height
        if isinstance(image, str | Path) and is_tiff(Path(image)):
            with Path(image).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                return tiff_size(mapped, is_ndpi=Path(image).suffix.lower() == ".ndpi")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # read_image has its own limit
            with Image.open(source) as opened:  # type: ignore[arg-type]
                return opened.size
    except Exception:  # broad on purpose: Pillow raises anything for a broken file; read_image will say why
        return None


def image_bytes(image: ImageFile, *, name: str) -> bytes:
    """The bytes of an image file, for read_image; a file that cannot be read raises ImageError."""
    try:
        return read_bytes(image, MAX_PIXELS)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error.__cause__


def read_bytes(image: str | ImageFile, max_pixels: int) -> bytes:
    """The bytes of a file that is not larger than an image of max_pixels can be."""
    limit = 64 * max_pixels + 2**28  # 16 bytes per pixel, uncompressed, and further pages
    data = image.read(limit) if isinstance(image, StoredImage) else _read_file(Path(image), limit, max_pixels)
    if not data:
        raise ImageError("the file is empty")
    return data


def _read_file(path: Path, limit_bytes: int, max_pixels: int) -> bytes:
    try:
        return checked_file(path, max_pixels, limit_bytes).read_bytes()
    except (OSError, ValueError) as error:
        raise ImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def checked_file(path: Path, max_pixels: int, limit_bytes: int | None = None) -> Path:
    """The path of a regular file, of at most so many bytes."""
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ImageError("a directory, not an image; list its images with find_images")
        if not stat.S_ISREG(info.st_mode):
            raise ImageError("not a regular file")
        if limit_bytes is not None and info.st_size > limit_bytes:
            raise ImageError(f"{info.st_size} bytes are more than an image of {max_pixels} pixels needs")
        if info.st_size == 0:
            raise ImageError("the file is empty")
        return path
    except (OSError, ValueError) as error:
        raise ImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def is_read_by_part(path: Path) -> bool:
    """Whether a file's pixels need not be read at once."""
    return is_zarr(path) or (path.is_file() and (is_readable(path.name) or is_tiff(path)))


def is_tiff(path: Path) -> bool:
    """Whether the file's first bytes are those of a TIFF."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(TIFFS)
    except OSError as error:
        raise ImageError(f"cannot be read: {error.strerror or error}") from error

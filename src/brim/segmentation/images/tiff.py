"""TIFF files: a bounded walk over their directories, then pixels by tifffile and imagecodecs, strip by strip.

Files may be hostile. A page's directory is checked before tifffile sees it: its tags fit into the file, none that
decides about pixels occurs twice, and its strips or tiles lie in the file and cover the image once. A decoder is told
how many bytes to make, or its own header is read first; checksums are verified. Only codecs that keep to this are used.
Memory is that of the pixels asked for and one strip or tile.
"""

import io
import logging
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple

import numpy as np

from brim.errors import ImageError
from brim.segmentation.images.axes import PageAxes, TiffPage, page_axes
from brim.segmentation.images.containers import MAX_PARTS, jpeg_size
from brim.segmentation.images.stacks import RGB_NAMES, ImageWindow, Stack, StackShape

Buffer = bytes | memoryview | mmap.mmap

TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_PAGES = 2**17
MAX_VALUE_BYTES = 64  # per pixel, of all samples of a page

_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_TIFF_INTEGERS = {3: "u2", 4: "u4", 16: "u8"}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _CHANNELS, _ROWS, _PLANAR = 256, 257, 258, 259, 262, 277, 278, 284
_DESCRIPTION, _PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _FORMAT = 270, 317, 322, 323, 339
_STRIPS, _TILES = {273, 279}, {_TILE_WIDTH, _TILE_HEIGHT, 324, 325}  # with offsets and lengths in bytes
_PER_CHANNEL, _DATA = {_BITS, _FORMAT}, {273, 279, 324, 325}
_SINGLE = {_WIDTH, _HEIGHT, _COMPRESSION, _PHOTOMETRIC, _CHANNELS, _ROWS, _PLANAR}
_SINGLE |= {_PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, 32997, 32998}  # depth of an image and of its tiles
_MARGIN_PIXELS = 2**24  # by which tiles may exceed the image

_JPEG, _JPEG2000 = (7,), (33003, 33005, 34712)
_CODECS = (1, 2, 3, 4, 5, 8, 32946, 32773, 34925, 50000, *_JPEG, *_JPEG2000)  # fax, LZW, deflate, PackBits, LZMA, Zstd
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
_INSTALL = "reading TIFF needs tifffile and imagecodecs; pip install tifffile imagecodecs"
_DECODE_ERRORS = (ValueError, RuntimeError, TypeError, IndexError, KeyError, struct.error, OverflowError, OSError)


def tifffile() -> ModuleType:
    """The library, which a machine that only reads other formats may lack."""
    try:
        import imagecodecs  # noqa: F401
        import tifffile
    except ImportError as error:
        raise ImageError(_INSTALL) from error
    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # our ImageError says what it would log
    return tifffile


def load_codecs() -> None:
    """Load the libraries now: a process with limits forks from this one."""
    library = tifffile()
    for number in _CODECS[1:]:
        library.TIFF.DECOMPRESSORS[number]
    for number in (2, 3):
        library.TIFF.UNPREDICTORS[number]


# Directories


class TiffTags(dict[int, np.ndarray]):
    """Values of the tags that decide how a page is decoded; views of the file, at least one value each."""

    description: bytes = b""

    def one(self, tag: int, default: int) -> int:
        return int(self[tag][0]) if tag in self else default

    @property
    def size(self) -> tuple[int, int]:
        if _WIDTH not in self or _HEIGHT not in self:
            raise ImageError("corrupt: the TIFF's page has no width and height")
        return int(self[_WIDTH][0]), int(self[_HEIGHT][0])


class _Layout(NamedTuple):
    """How numbers are stored in this file."""

    order: str
    offset: str  # code of an offset
    length: str  # code of a directory's length
    entry_bytes: int
    is_ndpi: bool  # classic, with the high halves of offsets behind the directory

    @classmethod
    def of(cls, data: Buffer, is_ndpi: bool) -> "_Layout":
        order, big = "<" if data[:2] == b"II" else ">", data[2:4] in (b"+\0", b"\0+")
        is_ndpi = is_ndpi and not big and order == "<"
        return cls(order, "Q" if big or is_ndpi else "I", "Q" if big else "H", 20 if big else 12, is_ndpi)

    @property
    def inline(self) -> int:
        return 8 if self.entry_bytes == 20 else 4


def tiff_size(data: Buffer, *, is_ndpi: bool = False) -> tuple[int, int]:
    """Width and height of a TIFF's first page."""
    return tiff_tags(data, page_offsets(data, is_ndpi=is_ndpi, most=1)[0], is_ndpi=is_ndpi).size


def page_offsets(data: Buffer, *, is_ndpi: bool = False, most: int = MAX_PAGES) -> list[int]:
    """Where the directories of the pages start, in their order."""
    layout = _Layout.of(data, is_ndpi)
    offsets: dict[int, None] = {}
    with _directory_errors():
        (at,) = struct.unpack_from(layout.order + layout.offset, data, 8 if layout.entry_bytes == 20 else 4)
        while at and len(offsets) < most:
            if at in offsets:
                raise ImageError("corrupt: the TIFF's pages form a loop")
            offsets[at] = None
            (num_tags,) = struct.unpack_from(layout.order + layout.length, data, at)
            end = at + struct.calcsize("=" + layout.length) + num_tags * layout.entry_bytes
            if end == len(data) and len(offsets) > 1:
                break
            (at,) = struct.unpack_from(layout.order + layout.offset, data, end)
    if not offsets:
        raise ImageError("corrupt: the TIFF has no page")
    return list(offsets)


def tiff_tags(data: Buffer, start: int, *, is_ndpi: bool = False) -> TiffTags:
    """A page's tags that matter here; none of them occurs twice, and all tags together fit into the file."""
    layout = _Layout.of(data, is_ndpi)
    order, number = layout.order, "Q" if layout.entry_bytes == 20 else "I"
    tags, tag_bytes = TiffTags(), 0
    with _directory_errors():
        (num_tags,) = struct.unpack_from(order + layout.length, data, start)
        if num_tags > MAX_PARTS:
            raise ImageError(f"corrupt: the TIFF's page has {num_tags} tags")
        first = start + struct.calcsize("=" + layout.length)
        high = first + num_tags * layout.entry_bytes + 8  # where an NDPI keeps the high halves
        for index in range(num_tags):
            at = first + index * layout.entry_bytes
            tag, kind, count = struct.unpack_from(f"{order}HH{number}", data, at)
            place, size = at + layout.entry_bytes - layout.inline, _TIFF_BYTES.get(kind, 1) * count
            if size > layout.inline:
                (place,) = struct.unpack_from(order + number, data, place)
                place += struct.unpack_from("<I", data, high + 4 * index)[0] << 32 if layout.is_ndpi else 0
                tag_bytes += size
            if tag == _DESCRIPTION and kind == 2:
                tags.description = tags.description or bytes(data[place : place + count])
            if tag not in _SINGLE | _PER_CHANNEL | _DATA:
                continue
            most = 1 if tag in _SINGLE else MAX_PARTS if tag in _PER_CHANNEL else len(data)
            if tag in tags or kind not in _TIFF_INTEGERS or not 1 <= count <= most:
                raise ImageError(f"corrupt: the TIFF's tag {tag} occurs twice, or has type {kind} and {count} values")
            tags[tag] = np.frombuffer(data, order + _TIFF_INTEGERS[kind], count, place)
            if layout.is_ndpi and size <= 4 and tag in _DATA:
                tags[tag] = tags[tag].astype(np.uint64) + (struct.unpack_from("<I", data, high + 4 * index)[0] << 32)
    if tag_bytes > len(data):
        raise ImageError(f"corrupt: the TIFF's tags hold {tag_bytes} bytes, the file {len(data)}")
    return tags


@contextmanager
def _directory_errors() -> Iterator[None]:
    try:
        yield
    except (struct.error, ValueError, OverflowError) as error:
        raise ImageError(f"truncated or corrupt: the TIFF's directory cannot be read ({error})") from error


def check_page(data: Buffer, tags: TiffTags) -> None:
    """Raise unless the page's strips or tiles lie within the file and amount to one image."""
    size, channels = tags.size, tags.one(_CHANNELS, 1)
    if tags.one(32997, 1) != 1 or tags.one(32998, 1) != 1:
        raise ImageError("volumes in one TIFF page are not read; save one page for each slice")
    if tags.keys() & (_STRIPS | _TILES) not in (_STRIPS, _TILES):
        raise ImageError("corrupt: the TIFF's page lists neither strips nor tiles, or both")
    if _TILE_WIDTH in tags:
        starts, counts, part = tags[324], tags[325], (tags.one(_TILE_WIDTH, 0), tags.one(_TILE_HEIGHT, 0))
    else:
        rows = tags.one(_ROWS, 2**32 - 1)
        starts, counts, part = tags[273], tags[279], (size[0], size[1] if rows == 2**32 - 1 else rows)
    if 0 in size or 0 in part:
        raise ImageError(f"corrupt: a TIFF of {size[0]} x {size[1]} pixels in parts of {part[0]} x {part[1]}")
    across, down = -(-size[0] // part[0]), -(-size[1] // part[1])
    if across * down * part[0] * part[1] > 2 * size[0] * size[1] + _MARGIN_PIXELS:
        raise ImageError(f"corrupt: a TIFF of {size[0]} x {size[1]} pixels in tiles of {part[0]} x {part[1]}")
    num = across * down * (channels if tags.one(_PLANAR, 1) == 2 else 1)
    if not len(starts) == len(counts) == num:
        raise ImageError(
            f"corrupt: the TIFF lists {len(starts)} strips or tiles with {len(counts)} lengths, and has {num}"
        )
    end = max(int(starts.max()), int(counts.max()))  # alone at first: a sum of the two could overflow
    if end <= len(data):
        end = int((starts.astype(np.int64) + counts.astype(np.int64)).max())
    if end > len(data):
        raise ImageError(f"truncated: the TIFF's pixels end at byte {end}, the file at {len(data)}")
    if int(counts.sum(dtype=np.int64)) > 2 * len(data):
        raise ImageError("corrupt: the TIFF's strips or tiles overlap")


# Pixels


class TiffStack(Stack):
    """The planes of a TIFF at full resolution; smaller levels of a pyramid are not read."""

    def __init__(self, data: Buffer, file: BinaryIO, *, is_ndpi: bool = False) -> None:
        self._data, self._is_ndpi = data, is_ndpi
        self._offsets = page_offsets(data, is_ndpi=is_ndpi)
        tags = self._checked(0)
        library = tifffile()
        with _decoding("its first page"):
            # no vendor's layout but Hamamatsu's: each of them is another parser
            self._file = library.TiffFile(file, is_ndpi=is_ndpi, is_lsm=False, is_scanimage=False, is_stk=False)
            self._page_class: TiffPage = library.TiffPage
            self._pages: dict[int, TiffPage] = {}
            page = self._page(0)
            self.axes = page_axes(page, tags.description, self._num_like_first)
            self.shape = _stack_shape(page, self.axes)

    def read(self, t: int, z: int, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
        with _decoding(f"slice {z} at time {t}"):
            if self.axes.in_pages:
                parts = [self._samples(self.axes.page(t, z, channel), window) for channel in channels]
                return np.concatenate(parts, 2) if len(parts) > 1 else parts[0]
            samples = self._samples(self.axes.page(t, z, 0), window)
            return samples if channels == tuple(range(samples.shape[2])) else samples[..., list(channels)]

    def _num_like_first(self, most: int) -> int:
        """How many pages, from the first on, have the first one's size; no more than `most` are looked at."""
        size = self._page(0).shaped[2:4]
        for index in range(1, min(most, len(self._offsets))):
            width, height = tiff_tags(self._data, self._offsets[index], is_ndpi=self._is_ndpi).size
            if (height, width) != size:
                return index
        return min(most, len(self._offsets))

    def _checked(self, index: int) -> TiffTags:
        if index >= len(self._offsets):
            raise ImageError(f"truncated: page {index} of a TIFF of {len(self._offsets)} pages")
        tags = tiff_tags(self._data, self._offsets[index], is_ndpi=self._is_ndpi)
        check_page(self._data, tags)
        return tags

    def _page(self, index: int) -> TiffPage:
        if index not in self._pages:
            tags = self._checked(index)
            if len(self._pages) > 64:
                self._pages.pop(next(iter(self._pages)))
            with _decoding(f"page {index}"):
                if index == 0:
                    page = self._file.pages.first
                else:
                    self._file.filehandle.seek(self._offsets[index])
                    page = self._page_class(self._file, index)
                _check_page_kind(page, tags)
                first = self._pages.get(0, page)
                if page.dtype != first.dtype or page.shaped != first.shaped:
                    raise ImageError(f"page {index} differs from the first in size or type")
            self._pages[index] = page
        return self._pages[index]

    def _samples(self, index: int, window: ImageWindow) -> np.ndarray:
        """(h, w, samples) of a page, alpha left out."""
        if self.axes.is_contiguous:
            page, shift = self._page(0), index
        else:
            page, shift = self._page(index), 0
        planes = page.samplesperpixel if page.planarconfig == 2 else 1
        samples = page.samplesperpixel // planes
        if page.samplesperpixel * page.dtype.itemsize > MAX_VALUE_BYTES * 4:
            raise ImageError(f"{page.samplesperpixel} samples in a pixel of a TIFF; expected fewer")
        out = np.zeros((*window.shape, page.samplesperpixel), page.dtype)
        for plane in range(planes):
            mine = out[..., plane : plane + 1] if planes > 1 else out[..., :samples]
            self._fill(page, plane, shift, window, mine)
        return _colours(page, out)

    def _fill(self, page: TiffPage, plane: int, shift: int, window: ImageWindow, out: np.ndarray) -> None:
        """Copy what the strips or tiles hold of a window."""
        tall, wide = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, page.imagewidth)
        across, down = math.ceil(page.imagewidth / wide), math.ceil(page.imagelength / tall)
        for row in range(window.top // tall, math.ceil(window.bottom / tall)):
            for column in range(window.left // wide, math.ceil(window.right / wide)):
                part = self._decoded(page, (plane * down + row) * across + column, shift, (tall, wide))
                if part is None:
                    continue  # a part without bytes is empty
                top, left = row * tall, column * wide
                low, first = max(window.top, top), max(window.left, left)
                high = min(window.bottom, top + part.shape[0])
                last = min(window.right, left + part.shape[1])
                out[low - window.top : high - window.top, first - window.left : last - window.left] = part[
                    low - top : high - top, first - left : last - left
                ]

    def _decoded(self, page: TiffPage, number: int, shift: int, part: tuple[int, int]) -> np.ndarray | None:
        """(h, w, samples) of a strip or tile; shift counts whole images behind the first one's data."""
        start, count = int(page.dataoffsets[number]), int(page.databytecounts[number])
        if count == 0:
            return None
        if shift:
            start += shift * int(sum(page.databytecounts))
        data = bytes(self._data[start : start + count])
        if len(data) != count:
            raise ImageError(f"truncated: the TIFF's pixels end at byte {start + count}, the file at {len(self._data)}")
        jpegheader = getattr(page, "jpegheader", None)
        if page.compression in _JPEG and jpegheader is None:
            _check_coded(jpeg_size(data), part)
        if page.compression in _JPEG2000:
            _check_coded(_jpeg2000_size(data), part)
        with _decoding(f"the strip or tile at byte {start}"):
            array, *_ = page.decode(data, number, jpegtables=page.jpegtables, jpegheader=jpegheader)
        if array is None:
            return None
        decoded: np.ndarray = array[0]
        return decoded


class TiffFileStack(TiffStack):
    """A TIFF on disk, mapped: only the parts that are asked for are read."""

    def __init__(self, path: Path) -> None:
        try:
            self._opened = path.open("rb")
            self._mapped = mmap.mmap(self._opened.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
        try:
            super().__init__(self._mapped, self._opened, is_ndpi=path.suffix.lower() == ".ndpi")
        except BaseException:
            self._opened.close()
            raise

    def close(self) -> None:
        self._pages.clear()
        self._opened.close()  # the map ends with the last view of it


def tiff_stack(data: bytes) -> TiffStack:
    return TiffStack(data, io.BytesIO(data))


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except _DECODE_ERRORS as error:
        raise ImageError(f"corrupt: the TIFF's pixels cannot be decoded: {what}: {error}") from error


def _check_page_kind(page: TiffPage, tags: TiffTags) -> None:
    read = (page.imagewidth, page.imagelength, page.samplesperpixel, page.compression)
    if read != (*tags.size, tags.one(_CHANNELS, 1), tags.one(_COMPRESSION, 1)):
        raise ImageError("corrupt: the TIFF's page can be read in more than one way")
    if page.compression not in _CODECS:
        raise ImageError(f"a TIFF with compression {int(page.compression)}, which is not read; save it with deflate")
    if page.dtype is None or isinstance(page.bitspersample, tuple):
        raise ImageError(f"a TIFF with samples of {page.bitspersample} bits, which is not read; save it with 8 or 16")
    known = (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE)
    if page.photometric not in known and not (page.photometric == _YCBCR and page.compression in _JPEG + _JPEG2000):
        raise OtherColours(f"a TIFF with colours of kind {int(page.photometric)}, which is not read; save it as RGB")


class OtherColours(ImageError):
    """A colour space that another library may read."""


def _check_coded(size: tuple[int, int], part: tuple[int, int]) -> None:
    """Raise if a coded strip or tile, (width, height), is larger than it may be, (height, width)."""
    if size[0] > part[1] or size[1] > part[0]:
        raise ImageError(
            f"corrupt: a strip or tile of {size[0]} x {size[1]} pixels in a TIFF whose parts have {part[1]} x {part[0]}"
        )


def _jpeg2000_size(data: bytes) -> tuple[int, int]:
    at = data.find(b"\xff\x4f\xff\x51", 0, 1024)
    if at < 0 or at + 24 > len(data):
        raise ImageError("corrupt: a TIFF's tile without a JPEG 2000 header")
    right, bottom, left, top = struct.unpack_from(">IIII", data, at + 8)
    return max(0, right - left), max(0, bottom - top)


def _num_alpha(page: TiffPage) -> int:
    return [int(extra) in (1, 2) for extra in page.extrasamples].count(True)


def _num_channels(page: TiffPage) -> int:
    """Samples of a pixel, without alpha; a palette has three."""
    if page.photometric == _PALETTE:
        return 3
    if page.photometric in (_RGB, _YCBCR):
        return min(3, int(page.samplesperpixel))
    return max(1, int(page.samplesperpixel) - _num_alpha(page))


def _colours(page: TiffPage, samples: np.ndarray) -> np.ndarray:
    """Samples as channels: a palette looked up, alpha left out, black as zero."""
    if page.photometric == _PALETTE:
        colours = page.colormap
        if colours is None or colours.ndim != 2 or len(colours) != 3 or samples.dtype.kind not in "ub":
            raise ImageError("corrupt: the TIFF's palette cannot be read")
        index = samples[..., 0].astype(np.int64)
        if int(index.max(initial=0)) >= colours.shape[1]:
            raise ImageError("corrupt: the TIFF's palette has too few colours")
        return np.asarray(np.moveaxis(colours, 0, 1)[index] >> 8).astype(np.uint8)
    samples = samples[..., : _num_channels(page)]
    if page.photometric == _WHITE_IS_ZERO:
        if samples.dtype.kind == "b":
            return np.asarray(~samples)
        if samples.dtype.kind != "u":
            raise ImageError(f"white is zero in a TIFF of {samples.dtype}, which cannot be read; save black as zero")
        return np.asarray(((1 << page.bitspersample) - 1) - samples).astype(samples.dtype)
    return samples


def _stack_shape(page: TiffPage, axes: PageAxes) -> StackShape:
    in_page = _num_channels(page)
    is_rgb = in_page == 3 and page.photometric in (_RGB, _PALETTE, _YCBCR) and axes.num_c in (1, 3)
    channels: tuple[str, ...] = axes.names
    if not axes.in_pages:
        channels = RGB_NAMES if is_rgb else (axes.names + ("",) * in_page)[:in_page]
    elif in_page > 1:
        raise ImageError(f"{axes.num_c} channels in pages of {in_page} samples, which is not read")
    dtype = np.dtype(np.uint8) if page.photometric == _PALETTE else page.dtype
    return StackShape(
        height=page.imagelength, width=page.imagewidth, dtype=dtype, channels=channels, num_z=axes.num_z,
        num_t=axes.num_t, is_rgb=is_rgb, has_axes=axes.is_described, pixel_um=axes.pixel_um,
    )  # fmt: skip

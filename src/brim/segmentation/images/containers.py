"""What a PNG, JPEG or TIFF file says about itself, and whether all of it is there; no pixel is decoded here.

OpenCV decodes without the interpreter lock, but fills what a truncated file does not hold with grey and says nothing,
and has no limit of ours on the size. So the file's own structure is walked first: chunks (PNG), markers up to the end
of the image (JPEG), strips and tiles within the file (TIFF). This is a few percent of decoding.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from brim.errors import ImageError

PNG, JPEG, TIFFS = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)  # stuffed and restart bytes are data, not markers
_PNG_CHUNK = struct.Struct(">I4s")  # length and kind
_TIFF_TYPES = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}
_DEFLATE = (8, 32946)
_STREAM_BYTES = 2**22  # decompressed at a time, and dropped
_PIXEL_DATA = ((273, 279), (324, 325))  # offsets and lengths in bytes, of strips and of tiles


# Bits and kind of a sample (1 unsigned, 2 signed, 3 float) that both OpenCV 4 and 5 read, or refuse, in any byte order
_SAMPLES = [({8}, {1}), ({16}, {1}), ({16}, {2}), ({32}, {1}), ({32}, {2}), ({32}, {3}), ({64}, {3})]


class ImageHeader(NamedTuple):
    """What decides how an image is decoded."""

    width: int
    height: int
    bits: int  # of one sample
    channels: int  # as stored; a palette counts as 3
    plain: bool = True  # OpenCV decodes it right
    several: bool = False  # more pages follow
    separate: bool = False  # one channel after the other, instead of side by side
    data: np.ndarray | None = None  # (N,) uint8, what to decode, where that is not the file as it is
    deflated: tuple[tuple[int, int], ...] = ()  # where a TIFF's deflate streams lie: start and length in bytes


def read_png(data: bytes) -> ImageHeader:
    """ImageHeader of a PNG whose chunks are all there; `data` is left without what is not pixels.

    Profiles, gamma, transparency and animation change neither the pixels we use nor, once gone, anyone's mind about
    them; libpng would also complain about some on stderr. Checksums are left to libpng, which refuses the image:
    hundreds of chunks are hundreds of calls that take the interpreter's lock, where libpng takes none.
    """
    kept, start, size = [], 0, (0, 0, 0, 0)
    for position, end, kind in _png_chunks(data):
        if kind[0] & 0x20:  # lower case: a reader may skip it
            kept.append((start, position))
            start = end
        elif kind == b"IHDR" and end - position == 25:
            size = struct.unpack_from(">IIBB", data, position + 8)
    _check_png_chunk(data, position, end)  # the last one, which libpng does not look at
    width, height, bits, colour = size
    channels = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}.get(colour, 0)
    return ImageHeader(width, height, bits, channels, data=_cut_out(data, [*kept, (start, end)]) if kept else None)


def check_png(data: bytes) -> None:
    """Name the chunk of a PNG whose checksum is wrong, if there is one."""
    for position, end, kind in _png_chunks(data):
        if not kind[0] & 0x20:
            _check_png_chunk(data, position, end)


def _png_chunks(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and kind of every chunk up to the last, IEND."""
    position, kind, size = 8, b"", len(data)
    while kind != b"IEND":
        if position + 12 > size:
            raise ImageError(f"truncated: the PNG ends after {size} bytes, before its IEND chunk")
        length, kind = _PNG_CHUNK.unpack_from(data, position)
        end = position + 12 + length
        if end > size:
            raise ImageError(f"truncated: a PNG chunk ends at byte {end}, the file at {size}")
        yield position, end, kind
        position = end


def _check_png_chunk(data: bytes, position: int, end: int) -> None:
    if zlib.crc32(memoryview(data)[position + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
        raise ImageError(f"corrupt: the checksum of the PNG chunk at byte {position} differs")


def _cut_out(data: bytes, kept: list[tuple[int, int]]) -> np.ndarray:
    array = np.frombuffer(data, np.uint8)  # NumPy copies without the interpreter's lock, bytes do not
    return np.concatenate([array[start:end] for start, end in kept if end > start])


def png_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of a PNG, from its first bytes."""
    if len(data) < 24 or data[12:16] != b"IHDR":
        raise ImageError("corrupt: the PNG does not start with an IHDR chunk")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def read_jpeg(data: bytes) -> ImageHeader:
    """ImageHeader of a JPEG that has an end of image after its scans."""
    position, header = 2, None
    while match := _MARKER.search(data, position):
        marker, position = match[1][0], match.end()
        if marker == 0xD9 and header:  # end of image
            return header
        if marker == 0xD9 or position + 2 > len(data):
            break
        length = struct.unpack_from(">H", data, position)[0]
        if _is_frame(marker) and position + 8 <= len(data):
            bits, height, width, channels = struct.unpack_from(">BHHB", data, position + 2)
            header = ImageHeader(width, height, bits, channels, plain=channels in (1, 3) and bits == 8)
        position += length
        if marker == 0xDA:  # start of scan
            position = _scan_end(data, position)
    raise ImageError(f"truncated: the JPEG ends after {len(data)} bytes without an end-of-image marker")


def _scan_end(data: bytes, position: int) -> int:
    """Where the coded pixels that begin there end, in pieces that double.

    By NumPy, which lets other threads run: the search for a marker would read hundreds of kilobytes under the
    interpreter's lock, a fifth of all that a server that answers 180 images a second did under it.
    """
    array, size = np.frombuffer(data, np.uint8), 2**12
    while position < len(data) - 1:
        piece = array[position : position + size + 1]
        (at,) = np.nonzero(piece[:-1] == 0xFF)
        after = piece[at + 1]
        at = at[(after != 0) & (after != 0xFF) & ((after & 0xF8) != 0xD0)]  # as in _MARKER
        if len(at):
            return position + int(at[0])
        position, size = position + size, 2 * size
    return len(data)


def jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of a JPEG, from its first frame's header."""
    position = 2
    while match := _MARKER.search(data, position):
        marker, position = match[1][0], match.end()
        if position + 7 > len(data):
            break
        if _is_frame(marker):
            height, width = struct.unpack_from(">HH", data, position + 3)
            return width, height
        position += struct.unpack_from(">H", data, position)[0]
    raise ImageError(f"truncated: the JPEG ends after {len(data)} bytes, before it says how large it is")


def _is_frame(marker: int) -> bool:
    return 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)


def tiff_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of a TIFF's first page, from its directory."""
    tags, _ = _tiff_tags(data)
    if 256 not in tags or 257 not in tags:
        raise ImageError("corrupt: the TIFF's first page has no width and height")
    return int(tags[256][0]), int(tags[257][0])


def read_tiff(data: bytes) -> ImageHeader:
    """ImageHeader of the first page of a TIFF whose strips or tiles lie within the file."""
    tags, following = _tiff_tags(data)
    bits, channels = tags.get(258, [1]), int(tags.get(277, [1])[0])
    width, height = tiff_size(data)
    starts, counts = next(((tags[a], tags[b]) for a, b in _PIXEL_DATA if a in tags and b in tags), ([], []))
    if len(starts) != len(counts) or not len(starts):
        raise ImageError(f"corrupt: the TIFF lists {len(starts)} strips or tiles and the lengths of {len(counts)}")
    if (end := max(int(a) + int(b) for a, b in zip(starts, counts, strict=True))) > len(data):
        raise ImageError(f"truncated: the TIFF's pixels end at byte {end}, the file at {len(data)}")
    if tags.get(262, [1])[0] == 0 and bits[0] > 8:
        raise ImageError(f"white is zero in a TIFF of {bits[0]} bits, which cannot be read; save it with black as zero")
    packing, separate = tags.get(259, [1])[0], channels > 1 and tags.get(284, [1])[0] == 2
    plain = (
        tags.get(262, [1])[0] in (1, 2)  # black is zero, or RGB
        and (packing in (1, *_DEFLATE) or bits[0] > 8)  # of other 8-bit streams OpenCV ignores the errors
        and packing in (1, 5, 32773, *_DEFLATE)  # none, LZW, pack bits
        and (channels in (1, 3) or (channels == 4 and bits[0] == 16))  # libtiff multiplies 8-bit RGB with alpha
        and not (separate and bits[0] == 8)
        and (set(bits), set(tags.get(339, [1]))) in _SAMPLES
    )
    streams = tuple(zip(starts, counts, strict=True)) if packing in _DEFLATE else ()
    return ImageHeader(
        width, height, int(bits[0]), channels,
        plain=plain, several=bool(following), separate=separate, deflated=streams,
    )  # fmt: skip


def tiff_plane(data: bytes, plane: int) -> bytes:
    """One channel of a TIFF with separate channels, as a grey TIFF: the same bytes with another directory."""
    tags, _ = _tiff_tags(data)
    order, channels = "<" if data[:2] == b"II" else ">", int(tags[277][0])
    kept: dict[int, list[int]] = {tag: tags[tag] for tag in (256, 257, 259, 278, 317, 322, 323) if tag in tags}
    kept.update({262: [1], 277: [1]})
    kept.update((tag, tags[tag][:1]) for tag in (258, 339) if tag in tags)
    for tag in (tag for pair in _PIXEL_DATA for tag in pair if tag in tags):
        size = len(tags[tag]) // channels
        kept[tag] = tags[tag][plane * size : (plane + 1) * size]
    start = len(data) + len(data) % 2
    behind, entries, values = start + 2 + 12 * len(kept) + 4, b"", b""
    for tag, numbers in sorted(kept.items()):
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        place = packed if len(numbers) == 1 else struct.pack(order + "I", behind + len(values))
        values += b"" if len(numbers) == 1 else packed
        entries += struct.pack(order + "HHI", tag, 4, len(numbers)) + place
    head = data[:2] + struct.pack(order + "HI", 42, start)
    directory = struct.pack(order + "H", len(kept)) + entries + bytes(4) + values
    return head + data[8:] + bytes(start - len(data)) + directory


def check_deflated(data: bytes, header: ImageHeader) -> None:
    """Run through a TIFF's deflate streams: they carry checksums, whose failure OpenCV only mentions in its log."""
    view = memoryview(data)
    for start, length in header.deflated:
        stream, rest = zlib.decompressobj(), bytes(view[start : start + length])
        try:
            while rest and not stream.eof:
                stream.decompress(rest, _STREAM_BYTES)
                rest = stream.unconsumed_tail
        except zlib.error as error:
            raise ImageError(f"corrupt: the TIFF's strip or tile at byte {start}: {error}") from error


def _tiff_tags(data: bytes | memoryview) -> tuple[dict[int, Any], int]:
    """Whole-number tags of the first page, and the offset of the second (0: none)."""
    order, big = "<" if data[:2] == b"II" else ">", data[2:4] in (b"+\0", b"\0+")
    number, count_code, entry_size, inline = ("Q", "Q", 20, 8) if big else ("I", "H", 12, 4)
    tags: dict[int, Any] = {}
    try:
        (start,) = struct.unpack_from(order + number, data, 8 if big else 4)
        (num_tags,) = struct.unpack_from(order + count_code, data, start)
        position = start + struct.calcsize("=" + count_code)
        for _ in range(num_tags):
            tag, kind, count = struct.unpack_from(f"{order}HH{number}", data, position)
            at = position + entry_size - inline
            if dtype := _TIFF_TYPES.get(kind):
                if np.dtype(dtype).itemsize * count > inline:
                    (at,) = struct.unpack_from(order + number, data, at)
                tags[tag] = np.frombuffer(data, order + dtype, count, at).tolist() if count else []
            position += entry_size
        (following,) = struct.unpack_from(order + number, data, position)
    except (struct.error, ValueError, OverflowError) as error:
        raise ImageError(f"truncated or corrupt: the TIFF's directory cannot be read ({error})") from error
    return {tag: values for tag, values in tags.items() if values}, int(following)

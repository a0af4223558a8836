"""The structure of PNG, JPEG and the header of WebP files, checked before any pixel is decoded.

OpenCV decodes without the interpreter lock, but fills the missing part of a truncated file with grey, without an error,
and has no limit of ours on the size. So the structure is walked first: chunks (PNG), segments up to the end of the
image (JPEG). This takes a few percent of the time of decoding. `tiff.py` does the same for TIFF.

Files may be hostile. Every walk takes time in proportion to the file and memory that does not grow with it, follows the
rules of the decoder's own library, and rejects files that the two could read differently.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from brim.errors import ImageError

PNG, JPEG, WEBP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", re.compile(rb"RIFF.{4}WEBP", re.DOTALL)
MAX_PARTS = 4096  # chunks of a PNG beyond one per 256 bytes, segments of a JPEG, tags of a TIFF

_PNG_CHUNK = struct.Struct(">I4s")  # length and kind

# Markers of a JPEG as libjpeg finds them: stuffed, restart and TEM (01) bytes have no segment.
_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd7])", re.DOTALL)
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_END, _SCAN = 0xD9, 0xDA
_SEGMENTS = {0xC4, 0xCC, _SCAN, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE} | _FRAMES


class ImageHeader(NamedTuple):
    """What decides how an image is decoded."""

    width: int
    height: int
    bits: int  # per sample
    channels: int  # as stored; a palette counts as 3
    plain: bool = True  # OpenCV decodes it correctly
    data: np.ndarray | None = None  # (N,) uint8, what to decode instead of the file


def png_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of a PNG."""
    if len(data) < 29 or data[8:16] != b"\0\0\0\rIHDR":
        raise ImageError("corrupt: the PNG does not start with an IHDR chunk")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def webp_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of a WebP: Pillow would allocate all of its pixels for that."""
    kind, start = bytes(data[12:16]), bytes(data[20:30])
    if kind == b"VP8X" and len(start) == 10:
        return 1 + int.from_bytes(start[4:7], "little"), 1 + int.from_bytes(start[7:], "little")
    if kind == b"VP8L" and start[:1] == b"\x2f" and len(start) >= 5:
        bits = int.from_bytes(start[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and start[3:6] == b"\x9d\x01\x2a" and len(start) == 10:
        return int.from_bytes(start[6:8], "little") & 0x3FFF, int.from_bytes(start[8:], "little") & 0x3FFF
    raise ImageError("corrupt: the WebP has no header of a lossy, lossless or extended image")


def read_png(data: bytes) -> ImageHeader:
    """Header of a complete PNG; its `data` leaves out the ancillary chunks.

    Profiles, gamma, transparency and animation do not change the pixels we use, and libpng prints warnings about some.
    libpng verifies checksums without the interpreter lock, so this function does not.
    """
    (width, height), (bits, colour) = png_size(data), struct.unpack_from(">BB", data, 24)
    kept, start = [], 0
    for position, end, kind in _png_chunks(data):
        if kind[0] & 0x20:  # lower case: ancillary
            kept.append((start, position))
            start = end
        elif kind == b"IHDR" and position != 8:
            raise ImageError("corrupt: the PNG has two IHDR chunks")
    _check_png_chunk(data, position, end)  # the last one, which libpng does not verify
    array, pixels = np.frombuffer(data, np.uint8), None  # NumPy copies without the interpreter lock
    if kept:
        pixels = np.concatenate([array[first:last] for first, last in [*kept, (start, end)]])
    return ImageHeader(width, height, bits, {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}.get(colour, 0), data=pixels)


def check_png(data: bytes) -> None:
    """Raise an ImageError that names the first critical chunk with a wrong checksum, if there is one."""
    for position, end, kind in _png_chunks(data):
        if not kind[0] & 0x20:
            _check_png_chunk(data, position, end)


def _png_chunks(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and kind of every chunk up to the last, IEND."""
    position, size = 8, len(data)
    for _ in range(MAX_PARTS + size // 256):
        if position + 12 > size:
            raise ImageError(f"truncated: the PNG ends after {size} bytes, before its IEND chunk")
        length, kind = _PNG_CHUNK.unpack_from(data, position)
        end = position + 12 + length
        if end > size:
            raise ImageError(f"truncated: a PNG chunk ends at byte {end}, the file at {size}")
        yield position, end, kind
        if kind == b"IEND":
            return
        position = end
    raise ImageError(f"corrupt: the PNG of {size} bytes has more than {MAX_PARTS + size // 256} chunks")


def _check_png_chunk(data: bytes, position: int, end: int) -> None:
    if zlib.crc32(memoryview(data)[position + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
        raise ImageError(f"corrupt: wrong checksum of the PNG chunk at byte {position}")


# JPEG


def jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of a JPEG, from its frame header."""
    for marker, position in _jpeg_segments(data):
        if marker in _FRAMES:
            header = _jpeg_frame(data, position)
            return header.width, header.height
    raise ImageError("corrupt: the JPEG has no frame header")


def read_jpeg(data: bytes) -> ImageHeader:
    """Header of a JPEG with one frame and an end-of-image marker."""
    frames = [_jpeg_frame(data, position) for marker, position in _jpeg_segments(data) if marker in _FRAMES]
    if len(frames) != 1:
        raise ImageError(f"corrupt: the JPEG has {len(frames)} frame headers")
    return frames[0]


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Marker and position of every segment up to the end of the image, in libjpeg's order."""
    position = 2
    for _ in range(MAX_PARTS):
        match = _MARKER.search(data, position)
        if match is None:
            break
        marker, position = match[1][0], match.end()
        if marker == _END:
            return
        if position + 2 > len(data):
            break
        (length,) = struct.unpack_from(">H", data, position)
        if marker not in _SEGMENTS or length < 2:
            raise ImageError(f"corrupt: JPEG marker {marker:02X} with length {length} at byte {position - 2}")
        yield marker, position
        position += length
        if marker == _SCAN:
            position = _scan_end(data, position)
    else:
        raise ImageError(f"corrupt: the JPEG has more than {MAX_PARTS} segments")
    raise ImageError(f"truncated: the JPEG ends after {len(data)} bytes without an end-of-image marker")


def _jpeg_frame(data: bytes | memoryview, position: int) -> ImageHeader:
    if position + 8 > len(data):
        raise ImageError(f"truncated: the JPEG ends after {len(data)} bytes, in its frame header")
    length, bits, height, width, channels = struct.unpack_from(">HBHHB", data, position)
    if length != 8 + 3 * channels:
        raise ImageError(f"corrupt: the JPEG's frame header has length {length} for {channels} channels")
    return ImageHeader(width, height, bits, channels, plain=channels in (1, 3) and bits == 8)


def _scan_end(data: bytes | memoryview, position: int) -> int:
    """Where the coded pixels that begin at position end; searched in pieces that double in size.

    NumPy releases the interpreter lock. A regular expression would read hundreds of kilobytes under it, a fifth of all
    such time in a server that answers 180 images a second.
    """
    array, size = np.frombuffer(data, np.uint8), 2**12
    while position < len(data) - 1:
        piece = array[position : position + size + 1]
        (at,) = np.nonzero(piece[:-1] == 0xFF)
        after = piece[at + 1]
        at = at[(after != 0) & (after != 0xFF) & ((after & 0xF8) != 0xD0)]
        if len(at):
            return position + int(at[0])
        position, size = position + size, 2 * size
    return len(data)

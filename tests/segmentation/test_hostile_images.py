"""Small files made to cost much: memory, time, or more pixels than the limit."""

import mmap
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import cv2
import imagecodecs
import numpy as np
import pytest

from brim.errors import ImageError
from brim.segmentation.images import image_size
from brim.segmentation.images.reading import open_by_part, read_image
from brim.segmentation.images.stacks import ImageWindow
from brim.segmentation.images.tiff import TiffStack, page_offsets, tiff_tags

SHORT, LONG = 3, 4
GREY = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)


def tiff(entries: list[tuple[int, int, int, int]], data: bytes) -> bytes:
    """A little-endian TIFF: data from byte 8 on, then a directory of (tag, type, count, value or offset)."""
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory + bytes(4)


def grey_tiff(
    streams: list[tuple[int, int]], data: bytes, *, size: int = 64, rows: int = 1, extra: tuple[tuple, ...] = ()
) -> bytes:
    """A deflated grey TIFF whose strips are at these places (start, length) of data."""
    starts = np.array([8 + start for start, _ in streams], "<u4").tobytes()
    lengths = np.array([length for _, length in streams], "<u4").tobytes()
    at = 8 + len(data)
    entries = [
        (256, LONG, 1, size), (257, LONG, 1, size), (258, SHORT, 1, 8), (259, SHORT, 1, 8), (262, SHORT, 1, 1),
        (273, LONG, len(streams), at), (277, SHORT, 1, 1), (278, LONG, 1, rows),
        (279, LONG, len(streams), at + len(starts)),
    ]  # fmt: skip
    return tiff(sorted([*entries, *extra]), data + starts + lengths)


def strips(content: list[bytes]) -> tuple[list[tuple[int, int]], bytes]:
    streams, data = [], b""
    for part in content:
        packed = zlib.compress(part)
        streams.append((len(data), len(packed)))
        data += packed
    return streams, data


@pytest.fixture
def undecoded(monkeypatch):
    """No decoder may run."""

    def decode(*_, **__):
        raise AssertionError("the file was decoded")

    monkeypatch.setattr(cv2, "imdecode", decode)
    monkeypatch.setattr(TiffStack, "_decoded", decode)


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """No more memory is used."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


# TIFF


def test_the_tiff_of_these_tests_is_read():
    assert np.array_equal(read_image(grey_tiff(*strips([bytes(row) for row in GREY])))[..., 0], GREY)


@pytest.mark.parametrize(("rows", "far"), [(64, 2**32 + 4096), (32, 4096)])  # a far strip, or a far list of strips
def test_an_ndpi_is_read_beyond_4_gibibytes(rows, far, tmp_path):
    """Low halves of places stand in classic tags, high halves behind the directory; the file is sparse."""
    num, list_at, directory_at = 64 // rows, 2**32 + 1024, 2**32 + 65536
    starts, lengths = [far + 64 * rows * strip for strip in range(num)], [64 * rows] * num
    entries = [
        (256, LONG, 1, 64), (257, LONG, 1, 64), (258, SHORT, 1, 8), (259, SHORT, 1, 1), (262, SHORT, 1, 1),
        (273, LONG, num, starts[0] if num == 1 else list_at), (277, SHORT, 1, 1), (278, LONG, 1, rows),
        (279, LONG, num, lengths[0] if num == 1 else 512),
    ]  # fmt: skip
    with (tmp_path / "slide.ndpi").open("wb") as file:
        file.write(b"II*\0" + struct.pack("<Q", directory_at))
        for at, values in ((512, lengths), (list_at, [start % 2**32 for start in starts])):
            file.seek(at)
            file.write(struct.pack(f"<{num}I", *values))
        file.seek(far)
        file.write(GREY.tobytes())
        file.seek(directory_at)
        low = b"".join(struct.pack("<HHII", *entry[:3], entry[3] % 2**32) for entry in entries)
        high = struct.pack("<9I", *(entry[3] >> 32 for entry in entries))
        file.write(struct.pack("<H", len(entries)) + low + bytes(8) + high)

    with (tmp_path / "slide.ndpi").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert page_offsets(mapped, is_ndpi=True) == [directory_at]
        tags = {number: own.tolist() for number, own in tiff_tags(mapped, directory_at, is_ndpi=True).items()}
    assert (tags[273], tags[279]) == (starts, lengths)
    with closing(open_by_part(tmp_path / "slide.ndpi")) as stack:
        assert (stack.shape.height, stack.shape.width) == (64, 64)
        assert np.array_equal(stack.read(0, 0, (0,), ImageWindow(0, 0, 64, 64))[..., 0], GREY)


@pytest.mark.parametrize("first", [600, 258], ids=["unknown tags", "known tags too"])
def test_hundreds_of_tags_on_one_region_take_no_memory(first):
    region = bytes(2**17)
    data = tiff([(first + number, 1, len(region), 8) for number in range(300)], region)

    with at_most(2 * len(data) + 2**20):
        for read in (lambda: image_size(data, "a.tif"), lambda: read_image(data)):
            with pytest.raises(ImageError, match="corrupt"):
                read()


@pytest.mark.parametrize("tag", [256, 257, 258, 273, 279])
def test_a_tag_that_occurs_twice_is_refused(tag, undecoded):
    """libtiff takes the first of them, Pillow too; we took the last."""
    data = grey_tiff(*strips([bytes(row) for row in GREY]), extra=((tag, LONG, 1, 2),))

    with pytest.raises(ImageError, match=f"tag {tag} occurs twice"):
        read_image(data)


@pytest.mark.parametrize("packed", ["deflate", "zstd", "lzma", "lzw", "packbits"])
def test_a_bomb_is_inflated_no_further_than_its_strip(packed):
    zeros, written = (
        bytes(20 * 2**20),
        {"deflate": zlib.compress, "packbits": lambda zeros: b"\x81\0" * (len(zeros) // 128)},
    )
    bomb = written[packed](zeros) if packed in written else getattr(imagecodecs, f"{packed}_encode")(zeros)
    number = {"deflate": 8, "zstd": 50000, "lzma": 34925, "lzw": 5, "packbits": 32773}[packed]
    data = grey_tiff([(0, len(bomb))] * 64, bomb + bytes(64 * len(bomb)))
    data = data.replace(struct.pack("<HHII", 259, SHORT, 1, 8), struct.pack("<HHII", 259, SHORT, 1, number))

    with at_most(3 * len(bomb) + 2**22), suppress(ImageError):  # some codecs stop when their strip is full
        assert not read_image(data).any()


@pytest.mark.parametrize("kind", ["jpeg", "jpeg2k"])
def test_a_coded_tile_larger_than_its_place_is_refused_before_it_is_decoded(kind):
    tile = getattr(imagecodecs, f"{kind}_encode")(np.zeros((3000, 3000), np.uint8))
    file = grey_tiff([(0, len(tile))] * 2, tile, rows=32)
    number = {"jpeg": 7, "jpeg2k": 34712}[kind]
    file = file.replace(struct.pack("<HHII", 259, SHORT, 1, 8), struct.pack("<HHII", 259, SHORT, 1, number))

    with at_most(2**20 + 3 * len(file)), pytest.raises(ImageError, match="a strip or tile of 3000 x 3000"):
        read_image(file)


def test_pages_in_a_loop_are_refused():
    data = bytearray(grey_tiff(*strips([bytes(row) for row in GREY])))
    data[-4:] = data[4:8]

    with pytest.raises(ImageError, match="loop"):
        read_image(bytes(data))


@pytest.mark.parametrize(
    "xml",
    [
        '<!DOCTYPE x [<!ENTITY a "ha">]><OME><Image><Pixels SizeC="1"/></Image></OME>',
        '<OME><Image><Pixels SizeC="100000" SizeZ="100000" SizeT="9"/></Image></OME>',
        '<OME><Image><Pixels SizeC="-1"/></Image></OME>',
        '<OME><Image><Pixels SizeC="3"/></Image></OME>',
        '<OME><Image><Pixels><TiffData IFD="0" PlaneCount="99999999999"/></Pixels></Image></OME>',
        "<OME><Image></OME>",
        "ImageJ=1.53\nimages=99999999\n",
    ],
)
def test_a_description_of_planes_that_are_not_there_is_refused(xml):
    streams, data = strips([bytes(row) for row in GREY])
    text = xml.encode() + b"\0"

    with at_most(2**22), pytest.raises(ImageError, match=r"corrupt|truncated"):
        read_image(grey_tiff(streams, data + text, extra=((270, 2, len(text), 8 + len(data)),)))


@pytest.mark.parametrize("count", [63, 65, 5000])
def test_another_number_of_strips_than_the_image_has_is_refused(count, undecoded):
    row = zlib.compress(bytes(64))

    with pytest.raises(ImageError, match=f"lists {count} strips"):
        read_image(grey_tiff([(0, len(row))] * count, row))


def test_strips_that_overlap_are_refused(undecoded):
    """Empty blocks take time to inflate, and make nothing: the limit on what comes out does not see them."""
    block = b"\0\0\0\xff\xff"
    stream = b"\x78\x9c" + block * 2000

    with pytest.raises(ImageError, match="overlap"):
        read_image(grey_tiff([(0, len(stream))] * 64, stream))


def test_a_tile_much_larger_than_its_image_is_refused(undecoded):
    streams, data = strips([GREY.tobytes()])
    file = grey_tiff(streams, data, extra=((322, LONG, 1, 30000), (323, LONG, 1, 30000)))
    tiled = file.replace(struct.pack("<HH", 273, LONG), struct.pack("<HH", 324, LONG)).replace(
        struct.pack("<HH", 279, LONG), struct.pack("<HH", 325, LONG)
    )

    with pytest.raises(ImageError, match="tiles of 30000 x 30000"):
        read_image(tiled)


# JPEG


def jpeg(side: int = 256) -> bytes:
    return bytes(cv2.imencode(".jpg", np.zeros((side, side, 3), np.uint8))[1])


def fake_frame() -> bytes:
    """Frame header, scan header and end of an image of 16 × 16 pixels."""
    frame = struct.pack(">BHHB", 8, 16, 16, 3) + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    return b"\xff\xc0" + struct.pack(">H", 2 + len(frame)) + frame + b"\xff\xda\0\2\xff\xd9"


def test_a_marker_without_a_segment_does_not_hide_the_frame(undecoded):
    """FF01 has no length; read as one, the next marker leads to a second frame header behind the image."""
    image = b"\xff\xd8\xff\x01" + jpeg()[2:]
    (skipped,) = struct.unpack_from(">H", image, 4)
    data = image.ljust(4 + skipped, b"\0") + fake_frame()

    assert image_size(data, "a.jpg") == (256, 256)
    with pytest.raises(ImageError, match="256 x 256 pixels"):
        read_image(data, max_pixels=1000)


def test_two_frame_headers_are_refused(undecoded):
    data = jpeg()

    with pytest.raises(ImageError, match="2 frame headers"):
        read_image(data[:2] + fake_frame()[:19] + data[2:])


def test_a_flood_of_empty_segments_is_refused_after_the_first_4096(undecoded):
    data = jpeg()
    flood = data[:2] + b"\xff\xe0\0\2" * 2**14 + data[2:]

    for read in (lambda: image_size(flood, "a.jpg"), lambda: read_image(flood)):
        with pytest.raises(ImageError, match="more than 4096 segments"):
            read()


# PNG and others


def test_a_flood_of_chunks_is_refused_after_one_per_256_bytes(undecoded):
    data = bytes(cv2.imencode(".png", GREY)[1])
    chunk = struct.pack(">I4sI", 0, b"teXt", zlib.crc32(b"teXt"))
    flood = data[:33] + chunk * 2**14 + data[33:]

    with pytest.raises(ImageError, match=f"more than {4096 + len(flood) // 256} chunks"):
        read_image(flood)


def test_a_second_png_header_is_refused(undecoded):
    data = bytes(cv2.imencode(".png", GREY)[1])
    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0)
    second = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))

    with pytest.raises(ImageError, match="two IHDR chunks"):
        read_image(data[:33] + second + data[33:])


def test_the_canvas_of_a_webp_is_limited_before_it_is_allocated():
    canvas = (16383).to_bytes(3, "little") * 2  # less one
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + canvas
    data = b"RIFF" + struct.pack("<I", len(body)) + body

    with pytest.raises(ImageError):
        read_image(data, max_pixels=2**20)

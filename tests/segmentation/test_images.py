"""Every kind of image people have, and every way it can be broken."""

import io
import os
import struct
import zlib

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from brim.errors import ImageError, UnsupportedType
from brim.segmentation.images import MAX_PIXELS, find_images, image_size, reading
from brim.segmentation.images.contrast import as_grey, contrast_of, stretch, stretch_batch
from brim.segmentation.images.reading import read_image, read_labels

HEIGHT, WIDTH = 40, 57
Y, X = np.mgrid[:HEIGHT, :WIDTH]
RGB = np.stack([Y * 6, X * 4, Y * 3 + X * 2], 2).astype(np.uint8)
ALPHA = ((Y * 37 + X * 11) % 256).astype(np.uint8)
RGBA = np.dstack([RGB, ALPHA])
GREY = RGB[..., 2].copy()
GREY3 = np.dstack([GREY] * 3)
BITS = GREY > 80
PALETTE = Image.fromarray(RGB).quantize(50)
PALETTE3 = np.asarray(PALETTE.convert("RGB"))
LA = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])


def saved(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, kind, **options)
    return stream.getvalue()


def tiff(array: np.ndarray, **options: object) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **{"photometric": "rgb" if array.ndim == 3 else "minisblack", **options})
    return stream.getvalue()


def separate(array: np.ndarray, **options: object) -> bytes:
    alpha = {"extrasamples": ["unassalpha"]} if array.shape[2] == 4 else {}
    planes = np.moveaxis(array, 2, 0).astype(np.uint16) * 257
    return tiff(planes, planarconfig="separate", **options, **alpha)


def png16(array: np.ndarray) -> bytes:
    order = {2: ..., 3: (..., [2, 1, 0]), 4: (..., [2, 1, 0, 3])}
    wide = array.astype(np.uint16) * 257
    return cv2.imencode(".png", wide if array.ndim == 2 else wide[order[array.shape[2]]])[1].tobytes()


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def same(image: object, expected: np.ndarray) -> None:
    found = read_image(image)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)


# Kinds of files

EXACT = {
    "png rgb": (saved(RGB, "PNG"), RGB),
    "png rgba": (saved(RGBA, "PNG"), RGB),
    "png grey": (saved(GREY, "PNG"), GREY3),
    "png grey and alpha": (saved(LA, "PNG"), GREY3),
    "png palette": (saved(PALETTE, "PNG"), PALETTE3),
    "png palette, one colour clear": (saved(PALETTE, "PNG", transparency=3), PALETTE3),
    "png 1 bit": (saved(BITS, "PNG"), np.dstack([BITS] * 3) * np.uint8(255)),
    "png 16 bit grey": (png16(GREY), GREY3),
    "png 16 bit rgb": (png16(RGB), RGB),
    "png 16 bit rgba": (png16(RGBA), RGB),
    "png with a broken profile": (saved(RGB, "PNG", icc_profile=b"junk" * 50), RGB),
    "bmp rgb": (saved(RGB, "BMP"), RGB),
    "bmp grey": (saved(GREY, "BMP"), GREY3),
    "ppm": (saved(RGB, "PPM"), RGB),
    "gif": (saved(PALETTE, "GIF"), PALETTE3),
    "webp": (saved(RGB, "WEBP", lossless=True), RGB),
    "webp alpha": (saved(RGBA, "WEBP", lossless=True, exact=True), RGB),
    "jpeg 2000": (saved(RGB, "JPEG2000"), RGB),
    "tiff lzw": (saved(RGB, "TIFF", compression="tiff_lzw"), RGB),
    "tiff pack bits": (saved(RGB, "TIFF", compression="packbits"), RGB),
    "tiff palette": (saved(PALETTE, "TIFF"), PALETTE3),
    "tiff group 4": (saved(BITS, "TIFF", compression="group4"), np.dstack([BITS] * 3) * np.uint8(255)),
    "tiff 1 bit": (tiff(BITS), np.dstack([BITS] * 3) * np.uint8(255)),
    "tiff white is zero": (tiff(255 - GREY, photometric="miniswhite"), GREY3),
    "tiff grey and alpha": (tiff(np.dstack([GREY, ALPHA]), photometric="minisblack", extrasamples=[2]), GREY3),
    "tiff separate planes": (tiff(np.moveaxis(RGB, 2, 0).copy(), planarconfig="separate"), RGB),
    "tiff separate planes of 16 bits": (separate(RGBA, byteorder=">", tile=(16, 16)), RGB),
    "tiff separate strips of 16 bits": (separate(RGB, compression="deflate", rowsperstrip=7), RGB),
}


@pytest.mark.parametrize(("data", "expected"), EXACT.values(), ids=EXACT)
def test_a_lossless_file_is_read_exactly(data, expected, tmp_path):
    same(data, expected)
    (tmp_path / "image").write_bytes(data)  # what it is lies in its bytes, not in its name
    same(tmp_path / "image", expected)
    same(str(tmp_path / "image"), expected)


@pytest.mark.parametrize(("mode", "options"), [("RGB", {}), ("RGB", {"subsampling": 0}), ("L", {}), ("CMYK", {})])
def test_a_jpeg_is_read_as_pillow_reads_it(mode, options):
    data = saved(Image.fromarray(RGB).convert(mode), "JPEG", **options)

    same(data, pillow(data))


def test_the_exif_orientation_is_ignored():
    turned = Image.Exif()
    turned[0x0112] = 6
    for data in (saved(RGB, "JPEG", exif=turned), saved(RGB, "PNG", exif=turned)):
        assert read_image(data).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("tile", [None, (16, 32)])
@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize(
    "kind", ["grey", "rgb", "rgba", "grey16", "rgb16", "rgba16", "float", "int32", "uint32", "float64"]
)
def test_a_tiff_is_read_exactly_whatever_its_layout(kind, byteorder, compression, tile):
    array, expected = {
        "grey": (GREY, GREY3), "rgb": (RGB, RGB), "rgba": (RGBA, RGB),
        "grey16": (GREY.astype(np.uint16) * 257, GREY3), "rgb16": (RGB.astype(np.uint16) * 257, RGB),
        "rgba16": (RGBA.astype(np.uint16) * 257, RGB), "float": (GREY.astype(np.float32) / 255, GREY3),
        "int32": (GREY.astype(np.int32), GREY3), "uint32": (GREY.astype(np.uint32), GREY3),
        "float64": (GREY / 255, GREY3),
    }[kind]  # fmt: skip
    extra = {"extrasamples": ["unassalpha"]} if kind.startswith("rgba") else {}

    same(tiff(array, byteorder=byteorder, compression=compression, tile=tile, **extra), expected)


# Kinds of arrays and PIL images


def test_arrays_that_are_not_contiguous():
    same(np.asfortranarray(RGB), RGB)
    same(RGB[::-1, ::2], RGB[::-1, ::2].copy())
    same(RGBA[..., 2::-1], RGB[..., ::-1].copy())
    same(GREY.T, np.dstack([GREY.T] * 3))
    assert not np.shares_memory(read_image(RGB[::-1]), RGB)


def test_bool_and_float_arrays():
    same(BITS, np.dstack([BITS] * 3) * np.uint8(255))
    for dtype in (np.float16, np.float32, np.float64):
        np.testing.assert_allclose(read_image(RGB.astype(dtype) / dtype(255)), RGB, atol=1)
        same(RGB.astype(dtype), RGB)
    same(np.array([[0.0, 0.5, 1.0]]), np.array([[[0] * 3, [128] * 3, [255] * 3]], np.uint8))


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("dtype", [np.uint16, ">u2", np.int32, np.uint32, np.int64])
def test_16_bit_values_are_scaled_from_the_bits_they_need(bits, dtype):
    top = (1 << bits) - 1
    values = np.linspace(0, top, 2 * 3 * 700).round().astype(dtype).reshape(60, 70)

    found = read_image(values)[..., 0]

    np.testing.assert_array_equal(found, np.floor(values.astype(float) * 255 / top + 0.5))
    assert read_image(np.array([[top // 2 + 1]], dtype))[0, 0, 0] == round((top // 2 + 1) * 255 / top)


def test_hot_pixels_do_not_hide_a_faint_image():
    faint = np.random.default_rng(0).integers(100, 900, (200, 300), np.uint16)
    hot = faint.copy()
    hot[[3, 50, 120], [7, 90, 200]] = 65535

    expected, found = read_image(faint)[..., 0], read_image(hot)[..., 0]

    assert (found[hot == 65535] == 255).all()
    assert np.array_equal(found[hot != 65535], expected[hot != 65535])


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.astype(np.int32) * 900 - 50_000, lambda image: image * np.float32(700),
        lambda image: image / np.float32(255) - np.float32(0.5),
        lambda image: image * np.float64(1e-5), lambda image: image.astype(np.uint32) * 1_000_000,
        lambda image: image.astype(">u2") * 15 + 32_768,
    ],
)  # fmt: skip
def test_values_of_any_range_keep_their_contrast(change):
    image = np.random.default_rng(0).integers(0, 256, (200, 300), np.uint8)

    found = read_image(change(image))[..., 0].astype(float)

    assert np.corrcoef(found.ravel(), image.ravel())[0, 1] > 0.999
    assert np.ptp(found) > 60
    assert len(np.unique(found)) > 60


def test_alpha_does_not_decide_the_bits():
    wide = np.dstack([RGB.astype(np.uint16) * 16, np.full_like(GREY, 255, np.uint16) * 257])

    same(wide, np.floor(RGB.astype(float) * 16 * 255 / 4095 + 0.5).astype(np.uint8))


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "I", "F"]
)
def test_pil_images_of_every_mode(mode):
    source = PALETTE if mode == "PA" else Image.fromarray(RGBA if mode == "RGBa" else RGB)
    image = source.convert(mode)
    expected = {"I": "L", "F": "L", "LA": "L", "RGBa": "RGBA"}.get(mode, mode)

    found = read_image(image)

    np.testing.assert_allclose(found, np.asarray(image.convert(expected).convert("RGB")), atol=1)


# What is refused


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((0, 5, 3), np.uint8), "size"),
        (np.zeros((5, 5, 2), np.uint8), "2 channels"),
        (np.zeros((3, 40, 50), np.uint8), "50 channels; expected .* channels last"),
        (np.zeros(5, np.uint8), "1 dimensions"),
        (np.full((5, 5), np.nan), "NaN"),
        (np.array([[0.0, np.inf]]), "NaN or infinite"),
        (np.zeros((5, 5), complex), "complex128"),
    ],
)
def test_an_array_that_is_no_image_is_refused(array, words):
    with pytest.raises(ImageError, match=words):
        read_image(array)


WHOLE = {
    "png": saved(RGB, "PNG"), "png16": png16(RGB), "jpeg": saved(RGB, "JPEG"), "tiff": tiff(RGB),
    "progressive": saved(RGB, "JPEG", progressive=True), "deflate": tiff(RGB, compression="deflate"),
    "lzw": saved(RGB, "TIFF", compression="tiff_lzw"), "bmp": saved(RGB, "BMP"), "gif": saved(PALETTE, "GIF"),
    "webp": saved(RGB, "WEBP"), "jp2": saved(RGB, "JPEG2000"), "ppm": saved(RGB, "PPM"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_a_truncated_file_is_never_half_an_image(kind, tmp_path):
    data, path = WHOLE[kind], tmp_path / f"half.{kind}"
    for share in np.linspace(0.05, 0.95, 19):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ImageError, match=f"half.{kind}: "):
            read_image(path)


def chunks(data: bytes) -> list[tuple[int, int]]:
    """Where each chunk of a PNG starts and ends."""
    found, position = [], 8
    while position < len(data):
        found.append((position, position + 12 + struct.unpack_from(">I", data, position)[0]))
        position = found[-1][1]
    return found


def test_every_chunk_of_a_png_is_refused_for_one_wrong_byte_wherever_it_is():
    noise = np.random.default_rng(0).integers(0, 255, (90, 110, 3), np.uint8)
    data = cv2.imencode(".png", noise)[1].tobytes()
    assert len(chunks(data)) > 5
    for start, end in chunks(data):
        for place in {*range(start, start + 10), *range(end - 6, end), (start + end) // 2} & {*range(start, end)}:
            broken = bytearray(data)
            broken[place] ^= 0x11
            with pytest.raises(ImageError):
                read_image(bytes(broken))


@pytest.mark.parametrize("kind", ["png", "gif", "tiff", "bmp"])
def test_a_bomb_is_refused_by_its_header(kind):
    data = png_of(100_000, 100_000) if kind == "png" else WHOLE[kind]
    limit = MAX_PIXELS if kind == "png" else HEIGHT * WIDTH - 1

    with pytest.raises(ImageError, match=f"x .* pixels; at most {limit} are read"):
        read_image(data, max_pixels=limit)
    if kind != "png":
        assert read_image(data, max_pixels=limit + 1).shape == (HEIGHT, WIDTH, 3)


def test_paths_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    for name, reason in (
        ("no.png", "No such file"),
        (".", "a directory"),
        ("empty.png", "empty"),
        ("pipe.png", "regular"),
    ):
        with pytest.raises(ImageError, match=f"{name}: .*{reason}|a directory"):
            read_image(tmp_path / name)
    with pytest.raises(ImageError, match="null"):
        read_image("a\0b.png")


# Masks and directories


@pytest.mark.parametrize(
    "data",
    [
        saved(BITS, "PNG"),
        saved(BITS * np.uint8(1), "PNG"),
        tiff(BITS * np.uint16(40_000)),
        tiff(BITS * np.int32(100_000)),
        tiff(BITS * np.uint32(3_000_000_000)),
        tiff(BITS * np.float32(0.25)),
        saved(np.dstack([BITS * 0, BITS * 0, BITS * 7]).astype(np.uint8), "PNG"),
        saved(np.dstack([BITS * np.uint8(9)] * 3 + [ALPHA]), "PNG"),
    ],
)
def test_a_mask_is_what_is_not_zero(data, tmp_path):
    (tmp_path / "mask").write_bytes(data)

    np.testing.assert_array_equal(read_labels(tmp_path / "mask", as_objects=False), BITS)


@pytest.mark.parametrize("wrong", [1.5, -1, 2**31])
def test_labels_that_are_no_whole_numbers_are_refused(wrong, tmp_path):
    values = np.zeros((8, 8), np.float64)
    values[1, 1], values[2, 2], values[4:6, 4:6] = 1, 2, wrong
    (tmp_path / "labels.tif").write_bytes(tiff(values))

    with pytest.raises(ImageError, match="whole numbers from 0 to 2"):
        read_labels(tmp_path / "labels.tif")


@pytest.mark.parametrize(
    ("dark", "bright", "shown"),
    [
        (150, 50, (20, 250)),  # 1.5 % and 0.5 % of the pixels
        (50, 10, (120, 136)),  # too few to count; and 16 levels are the narrowest range
        (150, 10, (20, 120)),
    ],
)
def test_the_darkest_hundredth_is_black_and_the_brightest_fivehundredth_white(dark, bright, shown):
    values = np.full(10_000, 120, np.uint8)
    values[:dark], values[-bright:] = 20, 250
    image = np.repeat(np.random.default_rng(0).permutation(values).reshape(100, 100, 1), 3, 2)

    assert contrast_of(image) == shown
    low, high = shown
    expected = np.rint((image.astype(float) - low) * 255 / (high - low)).clip(0, 255)
    assert np.array_equal(stretch(image), expected)
    batch = torch.from_numpy(image).permute(2, 0, 1)[None]
    assert np.abs(stretch_batch(batch)[0, 0].numpy().astype(float) - expected[..., 0]).max() <= 1


def test_a_single_stain_becomes_grey_and_colours_stay():
    stain, none = RGB[..., 0], 0 * RGB[..., 0]
    for place in range(3):
        planes = [none, none, none]
        planes[place] = stain
        assert np.array_equal(as_grey(np.dstack(planes)), np.dstack([stain] * 3))
    assert np.array_equal(as_grey(RGB), RGB)


def test_images_are_found_below_directories_sorted_and_once(tmp_path):
    for name in ("b.PNG", "a.tif", "sub/deep/c.jpeg", "notes.txt", "._a.tif", "sub/x.npy", "odd.xyz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    found = find_images([tmp_path / "odd.xyz", tmp_path, str(tmp_path / "a.tif")])

    assert [p.relative_to(tmp_path).as_posix() for p in found] == ["odd.xyz", "a.tif", "b.PNG", "sub/deep/c.jpeg"]
    assert find_images([tmp_path / "sub" / "deep", tmp_path / "b.PNG"])[-1].name == "b.PNG"


def test_images_are_sorted_whatever_the_file_system_lists_first(tmp_path):
    names = [f"{folder}{number:02}.png" for folder in ("a/", "b", "c/") for number in range(20)]
    for name in np.random.default_rng(1).permutation(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert [path.relative_to(tmp_path).as_posix() for path in find_images([tmp_path])] == names


# The header alone


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "JPEG2000", "PPM"])
def test_the_size_is_known_from_the_header(kind):
    data = saved(np.zeros((40, 70, 3), np.uint8), kind)

    assert image_size(memoryview(data), "a") == (70, 40)
    if kind == "WEBP":  # which has a header for lossless images, and one for extended ones
        assert image_size(saved(np.zeros((40, 70, 3), np.uint8), kind, lossless=True), "a") == (70, 40)
        assert image_size(saved(np.zeros((40, 70, 4), np.uint8), kind, exif=b"Exif\0\0"), "a") == (70, 40)
    if kind in ("PNG", "TIFF", "BMP"):
        assert image_size(data[:120] if kind != "TIFF" else data, "a") == (70, 40)


@pytest.mark.parametrize("data", [b"", b"x", b"not an image at all", b"\x93NUMPY" + bytes(200), b"%!PS-Adobe"])
def test_bytes_of_no_image_have_no_type_we_read(data):
    with pytest.raises(UnsupportedType, match=r"^a\.bin: not an image; expected PNG"):
        image_size(data, "a.bin")


# Decoders


@pytest.mark.parametrize("options", [{"format": "PNG"}, {"format": "JPEG"}, {"format": "JPEG", "progressive": True}])
def test_the_fast_decoder_gives_the_pixels_of_opencv_and_refuses_what_it_refuses(options, monkeypatch):
    picture = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 255, (70, 90, 3), np.uint8), (0, 0), 2)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, **options)
    whole, used = file.getvalue(), []
    fast = reading._decode_with_imagecodecs
    monkeypatch.setattr(reading, "_decode_with_imagecodecs", lambda *a: used.append(fast(*a)) or used[-1])
    found = read_image(whole)
    assert used[0] is found or np.array_equal(used[0], found)
    with pytest.raises(ImageError):
        read_image(whole[:-2])
    assert used[1:] == [None] * (len(used) - 1)
    monkeypatch.setattr(reading, "_decode_with_imagecodecs", lambda *_: None)
    assert np.array_equal(read_image(whole), found)

"""Channels, slices, times and pixel sizes, in files that other programs' writers wrote."""

import io
import logging
import shutil

import numpy as np
import pytest
import tifffile
from PIL import Image

from brim.errors import ImageError
from brim.segmentation.config import ImagePlanes
from brim.segmentation.images import find_images, header_size
from brim.segmentation.images.reading import read_image, read_picture
from brim.segmentation.objects.label_files import label_tiff, zarr_files

RNG = np.random.default_rng(0)
TZCYX = RNG.integers(0, 256, (2, 3, 4, 40, 57), np.uint8)
NAMES = ["DAPI", "GFP", "RFP", "Cy5"]


def written(array: np.ndarray, **options: object) -> bytes:
    tifffile.imwrite(stream := io.BytesIO(), array, **{"photometric": "minisblack", **options})
    return stream.getvalue()


def ome(array: np.ndarray = TZCYX, axes: str = "TZCYX", unit: str = "µm", **options: object) -> bytes:
    about = {"axes": axes, "PhysicalSizeX": 0.325, "PhysicalSizeXUnit": unit}
    about |= {"Channel": {"Name": NAMES}} if "C" in axes else {}
    return written(array, ome=True, metadata=about, **options)


def imagej(unit: str = "um", pixels_per_unit: float = 2.5) -> bytes:
    about = {"axes": "TZCYX", "unit": unit, "Labels": NAMES * 6}
    return written(TZCYX, imagej=True, resolution=(pixels_per_unit,) * 2, metadata=about)


def shaped(array: np.ndarray = TZCYX, axes: str = "TZCYX", **about: object) -> bytes:
    return written(array, metadata={"axes": axes, **about})


def one_directory() -> bytes:
    """As ImageJ writes stacks of more than 4 GB: one directory, and all planes behind the first."""
    text = "ImageJ=1.53\nimages=24\nchannels=4\nslices=3\nframes=2\nhyperstack=true\n"
    data = written(TZCYX[0, 0, 0], description=text, metadata=None)
    place = data.rindex(TZCYX[0, 0, 0].tobytes())
    assert place + TZCYX[0, 0, 0].size == len(data)
    return data[:place] + TZCYX.tobytes()


FILES = {"ome": ome(), "imagej": imagej(), "shaped": shaped(), "one directory": one_directory(),
         "ome deflate": ome(compression="deflate"), "ome tiles": ome(tile=(16, 16), compression="lzw"),
         "big ome": ome(bigtiff=True, byteorder=">")}  # fmt: skip


def grey(image: np.ndarray) -> np.ndarray:
    assert (image == image[..., :1]).all()
    return image[..., 0]


@pytest.mark.parametrize("file", FILES)
def test_a_channel_a_slice_and_a_time_are_found(file, tmp_path):
    for t, z, c in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        planes = ImagePlanes(channels=(str(c),), z=z, t=t)
        assert (grey(read_image(FILES[file], planes=planes)) == TZCYX[t, z, c]).all()
    (tmp_path / "a.tif").write_bytes(FILES[file])
    assert (grey(read_image(tmp_path / "a.tif", planes=planes)) == TZCYX[0, 1, 2]).all()


@pytest.mark.parametrize("file", FILES)
def test_without_a_choice_the_rules_are_maximum_over_z_mean_over_channels_first_time(file, caplog):
    with caplog.at_level(logging.WARNING, "brim"):
        image = grey(read_image(FILES[file], name="a.tif"))

    np.testing.assert_array_equal(image, (TZCYX[0].max(0).sum(0, dtype=int) + 2) // 4)
    assert len(caplog.records) == 1
    for words in ("a.tif: ", "mean of its 4 channels", "maximum over its Z", "first of its 2"):
        assert words in caplog.text


@pytest.mark.parametrize(("wanted", "channels"), [(("dapi",), [0]), (("Cy5", "GFP"), [3, 1]), (("0", "RFP"), [0, 2])])
@pytest.mark.parametrize("file", ["ome", "imagej"])
def test_channels_have_names(file, wanted, channels):
    image = read_image(FILES[file], planes=ImagePlanes(channels=wanted, z=1, t=0))

    half = len(channels) // 2
    expected = (TZCYX[0, 1, channels].sum(0, dtype=int) + half) // len(channels)
    np.testing.assert_array_equal(grey(image), expected)


@pytest.mark.parametrize(
    ("planes", "words"),
    [
        (ImagePlanes(channels=("Hoechst",)), 'no channel "Hoechst"; its channels are 0 DAPI, 1 GFP, 2 RFP, 3 Cy5'),
        (ImagePlanes(channels=("4",)), 'no channel "4"; its channels are 0 DAPI'),
        (ImagePlanes(z=3), "no slice 3 .*; it has slices 0 to 2"),
        (ImagePlanes(t=2), "no time 2 .*; it has times 0 to 1"),
    ],
)
def test_what_is_not_there_is_listed(planes, words):
    with pytest.raises(ImageError, match=f"^a.tif: has {words}"):
        read_image(FILES["ome"], name="a.tif", planes=planes)


def test_a_flat_image_has_one_slice_one_time_and_its_colours():
    rgb = RNG.integers(0, 256, (40, 50, 3), np.uint8)
    for image in (rgb, written(rgb, photometric="rgb"), written(np.moveaxis(rgb, 2, 0), photometric="rgb")):
        assert (read_image(image, planes=ImagePlanes(z="max", t=0)) == rgb).all()
        assert (grey(read_image(image, planes=ImagePlanes(channels=("green",)))) == rgb[..., 1]).all()
        with pytest.raises(ImageError, match="one slice, number 0"):
            read_image(image, planes=ImagePlanes(z=1))
        with pytest.raises(ImageError, match="0 red, 1 green, 2 blue"):
            read_image(image, planes=ImagePlanes(channels=("DAPI",)))


def test_three_channels_in_pages_are_no_colours():
    data = ome(TZCYX[0, 0, :3], "CYX")

    np.testing.assert_array_equal(grey(read_image(data)), (TZCYX[0, 0, :3].sum(0, dtype=int) + 1) // 3)


def test_ome_colours_are_colours():
    rgb = RNG.integers(0, 256, (2, 40, 50, 3), np.uint8)
    data = written(rgb, ome=True, photometric="rgb", metadata={"axes": "ZYXS"})

    assert (read_image(data) == rgb.max(0)).all()


def test_objects_are_measured_in_every_channel_of_the_file_and_in_colours_as_shown():
    measured = read_picture(FILES["ome"], planes=ImagePlanes(channels=("GFP",))).measured

    assert measured is not None
    assert (measured.names, measured.shown) == (tuple(NAMES), (1,))
    assert np.array_equal(measured.values, np.moveaxis(TZCYX[0].max(0), 0, 2))
    for same in (TZCYX[0, 0, 0], TZCYX[0, 0, :3].transpose(1, 2, 0)):
        assert read_picture(same).measured is None
    assert read_picture(TZCYX[0, 0, 0].astype(np.uint16)).measured is not None


def test_channels_of_16_bits_are_averaged_before_they_are_scaled():
    wide = (TZCYX[0, 0].astype(np.uint16)) * 16

    image = grey(read_image(written(wide, ome=True, metadata={"axes": "CYX"})))

    mean = (wide.sum(0, dtype=int) + 2) // 4
    np.testing.assert_array_equal(image, np.floor(mean * 255 / 4095 + 0.5))


def test_pages_without_a_description_count_as_slices():
    pages = written(TZCYX[0, :, 0], metadata=None)

    assert (grey(read_image(pages)) == TZCYX[0, 0, 0]).all()
    assert (grey(read_image(pages, planes=ImagePlanes(z=2))) == TZCYX[0, 2, 0]).all()
    assert (grey(read_image(pages, planes=ImagePlanes(z="max"))) == TZCYX[0, :, 0].max(0)).all()


@pytest.mark.parametrize(
    ("blocks", "page_of_channel"),
    [
        ("".join(f'<TiffData IFD="{2 - c}" FirstC="{c}"/>' for c in range(3)), (2, 1, 0)),
        ('<TiffData IFD="1" FirstC="0" PlaneCount="2"/><TiffData IFD="0" FirstC="2"/>', (1, 2, 0)),
    ],
)
def test_planes_that_the_xml_lists_in_another_order_are_found(blocks, page_of_channel):
    xml = f'<OME><Image><Pixels SizeC="3" DimensionOrder="XYZCT">{blocks}</Pixels></Image></OME>'
    data = written(TZCYX[0, 0, :3], description=xml, metadata=None)

    for channel, page in enumerate(page_of_channel):
        assert (grey(read_image(data, planes=ImagePlanes(channels=(str(channel),)))) == TZCYX[0, 0, page]).all()


def test_an_imagej_stack_without_axes_is_a_stack_of_slices():
    data = written(TZCYX[0, :, 0], description="ImageJ=1.53\nimages=3\n", metadata=None)

    assert (grey(read_image(data, planes=ImagePlanes(z=2))) == TZCYX[0, 2, 0]).all()
    assert (grey(read_image(data)) == TZCYX[0, :, 0].max(0)).all()


def test_planes_in_other_files_are_a_sentence():
    blocks = "".join(f'<TiffData IFD="0" FirstC="{c}"><UUID FileName="{c}.tif"/></TiffData>' for c in range(2))
    xml = f'<OME><Image><Pixels SizeC="2">{blocks}</Pixels></Image></OME>'

    with pytest.raises(ImageError, match="spread over 2 files; save them as one OME-TIFF"):
        read_image(written(TZCYX[0, 0, 0], description=xml, metadata=None))


@pytest.mark.parametrize(
    ("data", "pixel_um"),
    [
        (ome(), 0.325),
        (imagej(), 0.4),
        (imagej("micron", 4), 0.25),
        (imagej("nm", 0.005), 0.2),
        (imagej("mm", 4000), 0.25),
        (imagej("cm", 40_000), 0.25),
        (imagej("inch", 50_800), 0.5),
        (imagej("pixel", 1), None),
        (shaped(TZCYX[0, 0, 0], "YX", PhysicalSizeX=650, PhysicalSizeXUnit="nm"), 0.65),
        (ome(TZCYX[0, 0, 0], "YX", unit="mm"), 325.0),
        (written(TZCYX[0, 0, 0], resolution=(20000, 20000), resolutionunit="CENTIMETER"), 0.5),
        (written(TZCYX[0, 0, 0], resolution=(300, 300), resolutionunit="INCH"), None),
        (written(TZCYX[0, 0, 0], description="Aperio Image Library|MPP = 0.4990|AppMag = 20", metadata=None), 0.499),
        (written(TZCYX[0, 0, 0], ome=True, metadata={"axes": "YX", "PhysicalSizeX": 650, "PhysicalSizeXUnit": "nm"}),
         0.65),
        (written(TZCYX[0, 0, 0]), None),
    ],
)  # fmt: skip
def test_the_size_of_a_pixel_is_kept(data, pixel_um):
    assert read_picture(data).pixel_um == pytest.approx(pixel_um)


# What is wrong with single images


def test_floats_beyond_8_bits_are_scaled_like_whole_numbers():
    values = np.linspace(0, 4000, 2000, dtype=np.float32).reshape(40, 50)

    assert np.abs(grey(read_image(written(values))).astype(float) - values * 255 / 4095).max() <= 0.51


def test_an_ome_file_with_too_few_pages_is_truncated():
    text = tifffile.TiffFile(io.BytesIO(ome())).pages[0].description

    with pytest.raises(ImageError, match="describes 24 planes, the TIFF has 2"):
        read_image(written(TZCYX[0, 0, :2], description=text.encode(), metadata=None))


@pytest.mark.parametrize("compression", ["jpeg", "jpeg2000", "zstd", "lzma", "packbits"])
@pytest.mark.parametrize("tile", [None, (32, 32)])
def test_compressions_of_imagecodecs_are_read(compression, tile):
    y, x = np.mgrid[:64, :96]
    rgb = np.stack([y * 3, x * 2, y + x], 2).astype(np.uint8)

    image = read_image(written(rgb, photometric="rgb", compression=compression, tile=tile))

    assert np.abs(image.astype(int) - rgb).max() <= (12 if compression == "jpeg" else 0)


# OME-Zarr


def ome_zarr(folder, array, axes, version="0.4", **options):
    """As the specification describes it, the arrays written by zarr."""
    zarr = pytest.importorskip("zarr")
    scale = [{"x": 650, "y": 700, "z": 2000}.get(axis, 1) for axis in axes]
    about = {
        "multiscales": [{
            "axes": [{"name": axis, **({"unit": "nanometer"} if axis in "zyx" else {})} for axis in axes],
            "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": scale}]},
                         {"path": "1", "coordinateTransformations": [{"type": "scale", "scale": [1300] * len(axes)}]}],
        }],
        "omero": {"channels": [{"label": name, "color": "FFFFFF"} for name in NAMES]},
    }  # fmt: skip
    number = 2 if version == "0.4" else 3
    group = zarr.open_group(str(folder), mode="w", zarr_format=number)
    group.attrs.update(about if number == 2 else {"ome": {**about, "version": version}})
    chunks = (*([1] * (array.ndim - 2)), 16, 32)
    separator = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if number == 2 else {}
    made = group.create_array("0", shape=array.shape, chunks=chunks, dtype=array.dtype, **separator, **options)
    made[:] = array
    return folder


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_an_ome_zarr_is_read_like_a_tiff(version, tmp_path):
    path = ome_zarr(tmp_path / "cells.ome.zarr", TZCYX, "tzcyx", version)

    for t, z, c in ((0, 0, 0), (1, 2, 3)):
        picture = read_picture(path, planes=ImagePlanes(channels=(NAMES[c],), z=z, t=t))
        assert (grey(picture.pixels) == TZCYX[t, z, c]).all()
    assert picture.pixel_um == pytest.approx(0.65)
    np.testing.assert_array_equal(grey(read_image(path)), (TZCYX[0].max(0).sum(0, dtype=int) + 2) // 4)
    assert find_images([tmp_path]) == [path] == find_images([path])
    assert header_size(path) == (57, 40)


def test_a_flat_ome_zarr_of_16_bits_with_its_axes_in_any_order(tmp_path):
    plane = TZCYX[0, 0, 0].astype(np.uint16) * 257
    for axes, array in (("yx", plane), ("xy", plane.T)):
        path = ome_zarr(tmp_path / f"{axes}.zarr", array, axes)

        assert (grey(read_image(str(path))) == TZCYX[0, 0, 0]).all()
        assert read_picture(path).pixel_um == pytest.approx(0.65)


@pytest.mark.parametrize(("most", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_written_labels_keep_their_numbers_and_the_size_of_a_pixel(most, dtype, tmp_path):
    """More than one strip and more than one chunk, read by tifffile, zarr and brim."""
    labels = np.zeros((1500, 1100), np.int64)
    labels[3, 4], labels[1400, 7], labels[5, 1090], labels[1499, 1099] = 1, 2, 3, most

    data, group = label_tiff(labels, 0.65), tmp_path / "labels.ome.zarr"
    for name, content in zarr_files(labels, 0.65).items():
        (group / name).parent.mkdir(parents=True, exist_ok=True)
        (group / name).write_bytes(content)

    with tifffile.TiffFile(io.BytesIO(data)) as file:
        assert file.asarray().dtype == dtype
        assert np.array_equal(file.asarray(), labels)
        pixels, centimetres = file.pages[0].tags["XResolution"].value
        assert (pixels / centimetres, file.pages[0].tags["ResolutionUnit"].value) == (pytest.approx(10_000 / 0.65), 3)
    assert np.array_equal(pytest.importorskip("zarr").open_array(group / "labels/cells/0", mode="r")[:], labels)
    assert read_picture(data).pixel_um == pytest.approx(0.65, rel=1e-5)
    assert read_picture(group).pixel_um == pytest.approx(0.65)


@pytest.mark.parametrize("harm", ["no description", "not json", "no level", "cut chunk", "odd axes", "outside"])
def test_a_broken_ome_zarr_is_a_sentence(harm, tmp_path):
    path = ome_zarr(tmp_path / "a.zarr", TZCYX[0, 0, 0], "yx", "0.5")
    about = path / "zarr.json"
    if harm == "no description":
        about.unlink()
    elif harm == "not json":
        about.write_text("{")
    elif harm == "no level":
        shutil.rmtree(path / "0")
    elif harm == "cut chunk":
        chunk = next(file for file in (path / "0" / "c").rglob("*") if file.is_file())
        chunk.write_bytes(chunk.read_bytes()[:-9])
    elif harm == "odd axes":
        about.write_text(about.read_text().replace('"y"', '"q"'))
    else:
        about.write_text(about.read_text().replace('"path": "0"', '"path": "../../secret"'))

    with pytest.raises(ImageError, match=r"a\.zarr: "):
        read_image(path)


@pytest.mark.parametrize("photometric", ["rgb", "ycbcr"])
def test_a_slide_like_those_of_scanners_is_read_at_full_resolution(photometric, tmp_path):
    """JPEG tiles, a thumbnail and levels as further pages, and the size of a pixel in the text."""
    y, x = np.mgrid[:300, :400]
    rgb = np.stack([y / 2, x / 2, (y + x) / 4 + 60], 2).astype(np.uint8)
    options = {"compression": "jpeg", "photometric": photometric, "tile": (240, 240), "metadata": None}
    options |= {"subsampling": (2, 2)} if photometric == "ycbcr" else {}
    stored = np.asarray(Image.fromarray(rgb).convert("YCbCr" if photometric == "ycbcr" else "RGB"))
    with tifffile.TiffWriter(tmp_path / "a.svs") as writer:
        writer.write(stored, description="Aperio Image Library v1\n400x300|MPP = 0.2500", **options)
        writer.write(rgb[::4, ::4], photometric="rgb", metadata=None, compression="jpeg")
        writer.write(stored[::2, ::2], **options)

    picture = read_picture(tmp_path / "a.svs")

    assert np.abs(picture.pixels.astype(int) - rgb).mean() < 3
    assert picture.pixel_um == 0.25
    assert find_images([tmp_path]) == [tmp_path / "a.svs"]

"""Microscopes' own formats, through packages that are installed apart; stand-ins for them have the same functions."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

import numpy as np
import pytest

from brim.errors import ImageError
from brim.segmentation.config import ImagePlanes
from brim.segmentation.images import find_images, header_size
from brim.segmentation.images.reading import load_pixels

TCZYX = np.arange(2 * 3 * 2 * 6 * 8, dtype=np.uint16).reshape(2, 3, 2, 6, 8)
CZI_XML = """<ImageDocument><Metadata><Information><Image><Dimensions><Channels><Channel Id="0" Name="DAPI"/>
<Channel Id="1" Name="GFP"/><Channel Id="2"/></Channels></Dimensions></Image></Information><Scaling><Items>
<Distance Id="X"><Value>5e-07</Value></Distance></Items></Scaling></Metadata></ImageDocument>"""


class Opened:
    """A file of czifile, liffile or nd2."""

    def __init__(self, path):
        if not Path(path).read_bytes().startswith(b"good"):
            raise ValueError("not one of my files")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        pass


class CziFile(Opened):
    axes, shape, dtype = "STCZYX0", (1, *TCZYX.shape, 1), TCZYX.dtype

    def asarray(self):
        return TCZYX[None, ..., None]

    def metadata(self):
        return CZI_XML


class LifFile(Opened):
    images = (
        SimpleNamespace(
            dims=("T", "C", "Z", "Y", "X"), shape=TCZYX.shape, dtype=TCZYX.dtype, coords={"X": np.arange(8) * 5e-7},
            asarray=lambda: TCZYX,
        ),
    )  # fmt: skip


class ND2File(Opened):
    sizes = MappingProxyType({"P": 2, "T": 2, "Z": 2, "C": 3, "Y": 6, "X": 8})
    metadata = SimpleNamespace(
        channels=[SimpleNamespace(channel=SimpleNamespace(name=name)) for name in ("DAPI", "GFP", "")]
    )

    def to_dask(self):
        return np.stack([TCZYX.swapaxes(1, 2)] * 2)

    def voxel_size(self):
        return SimpleNamespace(x=0.5)


class OpenSlide(Opened):
    dimensions = (8, 6)
    properties = MappingProxyType({"openslide.mpp-x": "0.5"})

    def read_region(self, place, level, size):
        (left, top), (width, height) = place, size
        rgba = np.full((6, 8, 4), 255, np.uint8)
        rgba[..., :3] = TCZYX[0, :, 0].transpose(1, 2, 0) % 256
        rgba[0] = 0  # not scanned
        assert level == 0
        return rgba[top : top + height, left : left + width]


@pytest.fixture
def packages(monkeypatch):
    for name, opener in {"czifile": CziFile, "liffile": LifFile, "nd2": ND2File, "openslide": OpenSlide}.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, opener.__name__, opener)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["a.czi", "a.lif", "a.ND2"])
def test_with_its_package_a_microscopes_format_is_read_by_its_axes(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"good")

    loaded = load_pixels(path, 2**20, name, ImagePlanes(channels=("2",), z=0, t=1))

    assert np.array_equal(loaded.pixels, TCZYX[1, 2, 0])
    assert loaded.pixel_um == pytest.approx(0.5)
    assert loaded.names == (("", "", "") if name == "a.lif" else ("DAPI", "GFP", ""))
    assert header_size(path) == (8, 6)
    assert find_images([tmp_path]) == [path]


@pytest.mark.usefixtures("packages")
def test_with_openslide_a_slide_is_read_and_what_was_not_scanned_is_white(tmp_path):
    path = tmp_path / "a.mrxs"
    path.write_bytes(b"good")

    loaded = load_pixels(path, 2**20, "a.mrxs", ImagePlanes())

    assert (loaded.pixels[0] == 255).all()
    assert np.array_equal(loaded.pixels[1:], TCZYX[0, :, 0, 1:].transpose(1, 2, 0) % 256)
    assert loaded.pixel_um == 0.5


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["a.czi", "a.lif"])
def test_a_file_that_is_read_at_once_may_not_be_larger_than_the_limit(name, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(b"good")
    monkeypatch.setattr("brim.segmentation.images.vendors._MOST_BYTES", TCZYX.nbytes)
    load_pixels(tmp_path / name, 2**20, name, ImagePlanes())
    monkeypatch.setattr("brim.segmentation.images.vendors._MOST_BYTES", TCZYX.nbytes - 1)

    with pytest.raises(ImageError, match=f"holds {TCZYX.nbytes} bytes of pixels"):
        load_pixels(tmp_path / name, 2**20, name, ImagePlanes())


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["a.czi", "a.lif", "a.nd2", "a.mrxs"])
def test_a_damaged_file_of_a_microscope_is_a_sentence(name, tmp_path):
    (tmp_path / name).write_bytes(b"bad")

    with pytest.raises(ImageError, match=rf"{name}: corrupt or truncated: .* \(ValueError: not one of my files\)"):
        load_pixels(tmp_path / name, 2**20, name, ImagePlanes())
    assert header_size(tmp_path / name) is None


@pytest.mark.parametrize(("name", "extra"), [("a.czi", "microscopes"), ("a.mrxs", "openslide")])
def test_without_its_package_the_sentence_says_how_to_convert_and_what_to_install(name, extra, monkeypatch, tmp_path):
    for package in ("czifile", "openslide"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"good")

    with pytest.raises(ImageError, match=rf"is not read; save it as OME-TIFF, .*pip install 'brim\[{extra}\]'"):
        load_pixels(tmp_path / name, 2**20, name, ImagePlanes())

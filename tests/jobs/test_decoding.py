"""Images of jobs, read in confined processes: the same pixels and the same words, and a bad file costs itself alone."""

import io
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from brim.errors import ImageError
from brim.jobs import decoding, sandbox
from brim.jobs.decoding import ConfinedReader, confined_images
from brim.segmentation.config import ImagePlanes
from brim.segmentation.images import reading
from brim.segmentation.images.reading import read_image, read_labels
from waiting import PATIENCE_S

RGB = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    contents = {"rgb.png": RGB, "deep.tif": RGB[..., 0].astype(np.uint16) * 16, "labels.png": RGB[..., 0] // 64}
    for name, pixels in contents.items():
        cv2.imwrite(str(tmp_path / name), pixels)
    return {name: tmp_path / name for name in contents}


def test_pixels_are_those_of_this_process_and_none_are_read_in_it(files, monkeypatch):
    expected = [read_image(path) for path in files.values()] + [read_labels(files["labels.png"])]
    with confined_images():
        monkeypatch.setattr(reading, "load_pixels", None)
        found = [read_image(path) for path in files.values()] + [read_labels(str(files["labels.png"]))]
        of_bytes = read_image(files["rgb.png"].read_bytes())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(of_bytes, expected[0])


@pytest.mark.parametrize("data", [b"no image", b"\x89PNG\r\n\x1a\n", cv2.imencode(".png", RGB)[1].tobytes()[:-500]])
def test_a_bad_file_is_rejected_in_the_same_words(data, tmp_path):
    (tmp_path / "bad.png").write_bytes(data)
    with pytest.raises(ImageError) as direct:
        read_image(tmp_path / "bad.png")
    with confined_images(), pytest.raises(ImageError) as confined:
        read_image(tmp_path / "bad.png")
    assert str(confined.value) == str(direct.value)


def test_readers_that_die_cost_their_image_or_nothing(files):
    with confined_images():
        reader = reading._loader.__self__
        assert isinstance(reader, ConfinedReader)
        read_image(files["rgb.png"])
        process = reader._prepared[0]
        process.send_signal(signal.SIGSTOP)  # the fork for the next image does not begin
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(read_image, files["rgb.png"])
            time.sleep(0.3)
            process.kill()
            with pytest.raises(ImageError, match="more time or memory"):
                waiting.result(PATIENCE_S)
        np.testing.assert_array_equal(read_image(files["rgb.png"]), RGB[..., ::-1])


def test_channels_and_the_size_of_a_pixel_arrive_too(tmp_path):
    planes = np.arange(3 * 4 * 5, dtype=np.uint16).reshape(3, 4, 5)
    about = {"axes": "CYX", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": "µm", "Channel": {"Name": ["dna", "er", "x"]}}
    tifffile.imwrite(tmp_path / "a.ome.tif", planes, ome=True, metadata=about)
    reader = ConfinedReader()

    loaded = reader.load(tmp_path / "a.ome.tif", 20, "a", ImagePlanes())

    np.testing.assert_array_equal(loaded.planes, planes.transpose(1, 2, 0))
    assert (loaded.names, loaded.pixel_um, loaded.as_rgb) == (("dna", "er", "x"), 0.25, False)
    with pytest.raises(ImageError):
        reader.load(tmp_path / "a.ome.tif", 19, "a", ImagePlanes())  # 20 pixels are too many
    reader.close()


def test_memory_and_time_are_in_proportion_to_what_the_header_says(files, tmp_path, monkeypatch):
    limits, size = [], files["rgb.png"].stat().st_size
    monkeypatch.setattr(sandbox, "limit", lambda memory_bytes, cpu_s: limits.append((memory_bytes - 2**29, cpu_s)))

    for image in (files["rgb.png"], files["rgb.png"].read_bytes()):
        decoding._read(image, 10**6, "a", ImagePlanes())
        decoding._read(image, 1000, "a", ImagePlanes())  # more are not allowed

    whole, part = (2 * size + 80 * 40 * 60, 10 + 2400e-6), (2 * size + 80 * 1000, 10 + 1000e-6)
    assert limits == [(2 * size, 10), whole, (2 * size, 10), part] * 2


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"shape": [1, 4, 2]}, True),
        ({"shape": [5, 1, 2]}, False),  # one pixel too many
        ({"shape": [4, 2]}, False),
        ({"shape": [0, 4, 2]}, False),
        ({"dtype": "|O"}, False),
        ({"names": ["a"]}, False),
        ({"shown": []}, False),
        ({"shown": [2]}, False),
        ({"shape": [2, 2, 20], "names": ["a"] * 20, "dtype": "<f8"}, False),  # 160 bytes a pixel
    ],
)
def test_what_a_process_says_of_an_image_is_not_believed_beyond_what_was_asked_for(change, taken):
    reply = {"shape": [2, 2, 2], "dtype": "|u1", "names": ["a", "b"], "shown": [0], "as_rgb": False, "pixel_um": None}

    def receive():
        return decoding._received(io.BytesIO(bytes(640)), reply | change, 4)

    if taken:
        assert receive().planes.shape == tuple((reply | change)["shape"])
    else:
        with pytest.raises((ValueError, TypeError)):
            receive()

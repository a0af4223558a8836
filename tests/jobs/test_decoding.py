"""Images of jobs, read in confined processes: the same pixels and the same words, and a bad file costs itself alone."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest

from brim.errors import ImageError
from brim.jobs.decoding import ConfinedReader, confined_images
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

"""Images are parsed in processes with limits: a bad file costs itself alone, and is over soon."""

import io
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brim.engine.batching import Payload
from brim.errors import ImageError
from brim.jobs import sandbox
from brim.segmentation.images.reading import read_image
from brim.service.prediction.process import decoders as module
from brim.service.prediction.process.decoders import Decoders

FEW, MANY = 2**20, 2**28  # pixels: 1.3 and 68 s of CPU time


@pytest.fixture(scope="module")
def toys() -> Iterator[Decoders]:
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{path}"
    made = Decoders(2, "toy_decoder")
    try:
        made.size(payload("nothing"))
        yield made
    finally:
        os.environ["PYTHONPATH"] = path
        made.close()


def payload(words: str) -> Payload:
    return Payload(words.encode(), "a.png")


def works(decoders: Decoders) -> bool:
    return decoders.size(payload("nothing")) == (2, 1) and decoders.read(payload("nothing"), FEW).tobytes() == b"abcdef"


@pytest.mark.parametrize("stage", ["size", "read"])
@pytest.mark.parametrize("words", ["kill", "eat", "fail", "refuse"])
def test_a_file_that_kills_or_exhausts_its_decoder_fails_alone_and_before_its_time_is_up(
    toys, words, stage, monkeypatch
):
    monkeypatch.setattr(module, "WALL_FACTOR", 1e6)
    with pytest.raises(ImageError) as failure:
        toys.size(payload(words)) if stage == "size" else toys.read(payload(words), FEW)

    assert "/secret" not in str(failure.value)
    assert works(toys)


def test_a_file_that_takes_too_long_is_stopped(toys):
    with pytest.raises(ImageError, match="more time or memory"):
        toys.read(payload("spin"), FEW)

    assert works(toys)


def test_others_pass_files_that_take_long(toys, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(toys.read, payload(f"spin {tmp_path / 'gate'}"), MANY) for _ in range(3)]
        time.sleep(0.05)  # they are likely first
        assert works(toys)
        assert not any(one.done() for one in long)
        (tmp_path / "gate").touch()

    assert [one.result().tobytes() for one in long] == [b"abcdef"] * 3


@pytest.mark.skipif(not sandbox.available(), reason="this kernel has no walls")
def test_a_file_can_neither_write_nor_connect_nor_start_programs(toys, tmp_path):
    walls = sandbox.available()
    listening = socket.create_server(("127.0.0.1", 0))
    if "read-only files" in walls:
        with pytest.raises(ImageError):
            toys.read(payload(f"write {tmp_path}/written"), FEW)
    if "no network" in walls:
        for words in (f"call {listening.getsockname()[1]}", "start", "signal", "ring"):
            with pytest.raises(ImageError):
                toys.read(payload(words), FEW)
    listening.close()
    assert list(tmp_path.iterdir()) == []
    assert works(toys)


# Real images


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    made = Decoders(2)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_pixels_are_those_of_this_process(decoders, kind):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 200, 3), np.uint8)).save(out, kind)
    image = Payload(out.getvalue(), f"a.{kind}")

    assert decoders.size(image) == (200, 300)
    np.testing.assert_array_equal(decoders.read(image, FEW), read_image(out.getvalue()))


def test_an_image_holds_what_its_header_says(monkeypatch):
    """Where the header would say less, more memory and time would be used than were allowed for it."""
    pixels = np.zeros((30, 40, 3), np.uint8)
    monkeypatch.setattr("brim.segmentation.images.reading.read_image", lambda data, **_: pixels)
    monkeypatch.setattr(module.sandbox, "limit", lambda *_: None)
    for size, is_right in (((40, 30), True), ((40, 31), True), ((39, 30), False)):
        monkeypatch.setattr("brim.segmentation.images.image_size", lambda data, name, size=size: size)
        message = {"do": "read", "name": "a.png", "max_pixels": FEW}
        if is_right:
            assert module.decode(message, memoryview(b""))[0] == {"shape": [30, 40]}
        else:
            with pytest.raises(ImageError, match="its header says 39 x 30 pixels, but it holds 40 x 30"):
                module.decode(message, memoryview(b""))


def test_what_decoding_may_take_goes_with_the_pixels_and_no_further_than_their_limit(monkeypatch):
    limits: list[tuple[int, float]] = []
    monkeypatch.setattr("brim.segmentation.images.image_size", lambda data, name: (4000, 2000))
    monkeypatch.setattr("brim.segmentation.images.reading.read_image", lambda data, **_: np.zeros((1, 1, 3), np.uint8))
    monkeypatch.setattr(module.sandbox, "limit", lambda memory_bytes, cpu_s: limits.append((memory_bytes, cpu_s)))
    for max_pixels in (2**26, 4_000_000):
        module.decode({"do": "read", "name": "a.png", "max_pixels": max_pixels}, memoryview(bytes(1000)))

    base = 256 * 2**20 + 2 * 1000
    assert limits == [(base + 48 * 8_000_000, 1 + 2.0), (base + 48 * 4_000_000, 1 + 1.0)]


@pytest.mark.parametrize(
    ("mode", "size", "options"),
    [("L", (9000, 7001), {"lossless": True}), ("L", (90, 71), {"quality": 1}), ("RGBA", (90, 71), {"quality": 1})],
)
def test_the_header_of_a_webp_says_its_size(decoders, mode, size, options):
    """Pillow would allocate all pixels to tell it, for a large image more than a header is allowed."""
    out = io.BytesIO()
    Image.new(mode, size).save(out, "WEBP", method=0, **options)

    assert decoders.size(Payload(out.getvalue(), "a.webp")) == size

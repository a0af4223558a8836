"""Requests for polygons: what `predict` finds, whatever else is in the batch, in bytes of any format."""

import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from entries import HERE, sizes_file
from torch import Tensor, nn

from brim.engine.batching.servable import Answer, DecodedRequest, Payload
from brim.engine.batching.warm_up import warm_up
from brim.engine.tuning import ProbeConfig
from brim.errors import ImageError, TooLarge
from brim.segmentation.config import REGISTERED
from brim.segmentation.images.reading import read_image
from brim.segmentation.images.writing import encoded
from brim.segmentation.networks import default_weights, save_weights
from brim.segmentation.objects import MEDIA_TYPES, RINGS, ImageObjects, Prediction, geojson, geojson_of
from brim.segmentation.prediction import ModelLoader, SegmentServable
from brim.segmentation.prediction import serving as module
from brim.segmentation.tuning import BatchSizes, tuner
from waiting import PATIENCE_S

CPU = torch.device("cpu")
TILE = 64


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(torch.relu(self.first(x))) * 8
        return torch.where(x.amin((1, 2, 3), keepdim=True) > 2.0, torch.nan, found)  # white images lead to NaN


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTERED, "tiny", Tiny)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Weights, and batch sizes as if tuned."""
    save_weights(Tiny(), tmp_path / "tiny.safetensors", {"model": "tiny"})
    sizes_file(tmp_path / "batch_sizes.json", "tiny", optimal_batch_size=4, max_safe_batch_size=9)
    return tmp_path


@pytest.fixture
def servable(made: Path) -> SegmentServable:
    return SegmentServable(
        "tiny", made / "tiny.safetensors", CPU, batch_sizes=made / "batch_sizes.json", tile=TILE
    )  # fmt: skip


@pytest.fixture
def loader(made: Path) -> ModelLoader:
    weights = {"tiny": made / "tiny.safetensors"}
    return ModelLoader(weights, "cpu", made / "batch_sizes.json", tile=TILE)


def png(height: int, width: int, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).random((height, width, 3)).astype(np.float32)
    smooth = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.5), None, 0, 250, cv2.NORM_MINMAX)
    return bytes(cv2.imencode(".png", smooth.astype(np.uint8))[1])


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is that large."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def run(servable: SegmentServable, payloads: list[Payload], size: int = 4) -> list[Answer | BaseException]:
    """Answers of requests whose parts share batches wherever they may."""
    items = [servable.decode(payload) for payload in payloads]
    waiting = [(item, number) for item in items for number in range(len(item.parts))]
    outputs: dict[int, dict[int, object]] = {id(item): {} for item in items}
    while waiting:
        key = waiting[0][0].key
        batch = [each for each in waiting if each[0].key == key][:size]
        waiting = [each for each in waiting if each not in batch]
        found = servable.collect(servable.forward([item.parts[number] for item, number in batch]))
        for (item, number), output in zip(batch, found, strict=True):
            outputs[id(item)][number] = output
    return [finish(servable, item, outputs[id(item)]) for item in items]


def finish(servable: SegmentServable, item: DecodedRequest, outputs: dict[int, object]) -> Answer | BaseException:
    ordered = [outputs[number] for number in range(len(item.parts))]
    failure = next((each for each in ordered if isinstance(each, BaseException)), None)
    if failure is not None:
        return failure
    try:
        return servable.finish(item, ordered)
    except ImageError as failure:
        return failure


def answer(servable: SegmentServable, data: bytes, **options: object) -> Answer:
    (found,) = run(servable, [Payload(data, "a.png", options)])
    assert isinstance(found, Answer)
    return found


def assert_like(found: bytes, expected: bytes) -> None:
    """The same outlines, and confidences up to the rounding of another batch size."""
    sides = [json.loads(body)["features"] for body in (found, expected)]
    assert len(sides[0]) == len(sides[1])
    for one, other in zip(*sides, strict=True):
        sure, surely = (each["properties"]["measurements"].pop("confidence") for each in (one, other))
        assert one == other
        assert sure == pytest.approx(surely, abs=3e-6)


# What is answered


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 57), (150, 70), (33, 200)])
def test_an_answer_is_what_predict_finds(servable, loader, height, width):
    data = png(height, width)

    found = answer(servable, data)

    expected = loader.predict(data, "tiny")
    assert found.body == geojson(expected.polygons)
    assert found.media_type == "application/geo+json"
    assert found.facts == {"polygons": len(expected.polygons), "width": width, "height": height}
    assert len(expected.polygons) > 3


@pytest.mark.parametrize("format", list(MEDIA_TYPES))
def test_every_format_is_that_of_files(servable, loader, format):
    data = png(60, 50)

    found = answer(servable, data, format=format)

    expected = loader.predict(data, "tiny")
    named = Prediction("a.png", expected.height, expected.width, expected.polygons, expected.mask)
    assert found.body == encoded(named, format, read_image(data))
    assert found.media_type == MEDIA_TYPES[format]


@pytest.mark.parametrize("holes", [True, False])
def test_rings_become_the_same_text_elsewhere(servable, holes):
    found = answer(servable, png(50, 60), as_rings=True, detect_holes=holes)
    expected = answer(servable, png(50, 60), detect_holes=holes)

    assert found.media_type == RINGS
    assert found.facts == expected.facts
    assert geojson_of(ImageObjects.from_bytes(found.body).rings) == expected.body
    assert answer(servable, png(50, 60), as_rings=True, format="mask").media_type == "image/png"


def test_threshold_and_holes_are_the_requests_own(servable, loader):
    payloads = [
        Payload(png(64, 64, seed), f"{seed}.png", {"threshold": threshold, "detect_holes": holes})
        for seed in range(3) for threshold, holes in ((0.5, True), (0.6, True), (0.6, False))
    ]  # fmt: skip

    found = run(servable, payloads)

    for one, payload in zip(found, payloads, strict=True):
        expected = loader.predict(bytes(payload.data), "tiny", **payload.options)
        assert_like(one.body, geojson(expected.polygons))


# What is told before an image is decoded


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (65, 64), (64, 129), (200, 300), (31, 1000)])
def test_the_header_tells_what_decoding_finds(servable, size):
    payload = Payload(png(*size), "a.png", {"threshold": 0.3})

    shape, item = servable.inspect(payload), servable.decode(payload)

    assert (shape.key, shape.parts) == (item.key, len(item.parts))
    hash(shape.key)


def test_requests_that_cannot_share_a_forward_have_different_keys(servable, made):
    other = SegmentServable("tiny", made / "tiny.safetensors", CPU, may_tune=False, tile=TILE)
    data = png(64, 64)
    keys = [
        servable.inspect(Payload(data, "a")).key,
        servable.inspect(Payload(data, "a", {"threshold": 0.6})).key,
        servable.inspect(Payload(data, "a", {"detect_holes": False})).key,
        servable.inspect(Payload(png(32, 64), "a")).key,
        other.inspect(Payload(data, "a")).key,
    ]

    assert len(set(keys)) == len(keys)
    assert servable.inspect(Payload(png(60, 64), "b", {"format": "mask"})).key == keys[0]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (bomb(60000, 60000), {}),
        (bomb(2**26, 1), {}),  # padded to 32 rows it is none that fits
        (bomb(1, 2**31 - 1), {}),
        (png(64, 64), {"max_pixels": 100}),
    ],
)
def test_a_bomb_is_refused_by_its_header(servable, data, options):
    with pytest.raises(TooLarge, match=r"a\.png.*pixels"):
        servable.inspect(Payload(data, "a.png", options))


# Failures of one among others


def test_an_image_without_finite_numbers_fails_alone(servable, loader):
    white = bytes(cv2.imencode(".png", np.full((64, 64, 3), 255, np.uint8))[1])
    payloads = [Payload(png(64, 64), "a.png"), Payload(white, "white.png"), Payload(png(64, 64, 1), "b.png")]

    first, bad, last = run(servable, payloads)

    assert isinstance(bad, ImageError)
    assert "white.png" in str(bad)
    assert_like(first.body, geojson(loader.predict(bytes(payloads[0].data), "tiny").polygons))
    assert_like(last.body, geojson(loader.predict(bytes(payloads[2].data), "tiny").polygons))


# Sizes and memory


def test_warming_up_times_every_size(servable):
    warmed = warm_up(servable, CPU, servable._lock)

    assert list(warmed.expected_s) == [1, 2, 3, 4]
    assert all(seconds > 0 for seconds in warmed.expected_s.values())
    assert warmed.memory_bytes >= servable.weight_bytes > 0
    whole, half = (servable.inspect(Payload(png(size, 64), "a")).expected_s for size in (64, 32))
    assert whole == pytest.approx(warmed.expected_s)
    assert half[2] == pytest.approx(whole[1])
    assert half[1] == pytest.approx(whole[1] / 2)


def test_a_size_tuned_for_smaller_images_is_not_used(made):
    for side, (tuned, most) in {TILE: (True, 9), TILE - 1: (False, module._UNTUNED["cpu"])}.items():
        sizes = sizes_file(made / f"{side}.json", "tiny", max_safe_batch_size=9, image_size=side)
        servable = SegmentServable("tiny", made / "tiny.safetensors", CPU, batch_sizes=sizes, tile=TILE)
        assert (servable.tuned, servable.max_batch_size) == (tuned, most)


def test_a_model_nobody_tuned_is_tuned_and_saved(made, monkeypatch):
    monkeypatch.setattr("brim.segmentation.prediction.serving.QUICK_SECONDS", 0.3)
    monkeypatch.setattr(tuner, "ProbeConfig", lambda **_: ProbeConfig(settle_s=0.0, block_s=0.001))
    monkeypatch.setitem(tuner._LIMITS, "cpu", 8)
    file = made / "new.json"

    servable = SegmentServable("tiny", made / "tiny.safetensors", CPU, batch_sizes=file, tile=TILE)

    entry = BatchSizes.read(file).entry(HERE, "tiny")
    assert entry is not None
    assert servable.sizes[-1] == entry.optimal_batch_size
    assert servable.max_batch_size == entry.max_safe_batch_size


def test_decoded_pixels_wait_within_bounds(servable, monkeypatch):
    room = module._Room(3 * 64 * 64 * 3)
    monkeypatch.setattr(module, "_room", room)
    payload = Payload(png(64, 64), "a.png")
    held = [servable.decode(payload) for _ in range(3)]
    assert room.held_bytes() == 3 * 64 * 64 * 3

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(servable.decode, payload)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        held.pop()
        held.append(waiting.result(PATIENCE_S))
    assert room.held_bytes() == 3 * 64 * 64 * 3
    held.clear()
    del waiting
    assert room.held_bytes() == 0


def test_a_cpu_serves_one_large_image_at_a_time_without_tuning():
    servable = SegmentServable("cells", default_weights(), torch.device("cpu"))
    rows, columns = np.mgrid[:120, :100]
    spots = sum(
        np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 60.0) for y, x in ((30, 30), (30, 70), (80, 30), (85, 75))
    )
    data = bytes(cv2.imencode(".png", (30 + 200 * spots).clip(0, 255).astype(np.uint8))[1])

    found = json.loads(answer(servable, data).body)["features"]

    assert (servable.tuned, servable.max_batch_size) == (False, 1)
    assert [feature["id"] for feature in found] == [1, 2, 3, 4]
    assert all(feature["properties"]["measurements"]["mean_intensity"] > 60 for feature in found)
    assert json.loads(answer(servable, data, min_area=10_000).body)["features"] == []
    with pytest.raises(TooLarge, match="100 x 120 pixels with objects of 4 are shown enlarged to 600 x 720"):
        servable.inspect(Payload(data, "a.png", {"diameter": 4, "max_pixels": 20_000}))

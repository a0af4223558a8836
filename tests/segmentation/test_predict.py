import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from brim.engine.device.memory import inject_oom
from brim.errors import ImageError, OutOfMemory
from brim.segmentation.config import PredictConfig
from brim.segmentation.networks import InferenceNetwork, ModelTraits
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.objects import Prediction
from brim.segmentation.prediction import ModelLoader, PredictProgress, PredictReport, predict_one, predict_stream
from brim.segmentation.prediction import stream as module
from brim.segmentation.prediction.patches import ImageFrame, Patch, group

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("threads_are_joined")
SIZES = [(32, 32), (64, 48), (20, 20), (33, 97), (128, 128), (300, 201), (1, 1), (47, 256), (64, 64), (128, 128)]


class Brightness(nn.Module):
    """Foreground is what is brighter than half: every pixel for itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) * 4


class Blur(nn.Module):
    """A few convolutions with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * 8


class Broken(Exception):
    pass


def network(layers: nn.Module | None = None) -> InferenceNetwork:
    return InferenceNetwork(layers or Brightness(), CPU, ComputeConfig())


def cells(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Bright discs on a dark ground."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    image = rng.integers(10, 60, (height, width, 3), dtype=np.uint8)
    for _ in range(max(1, height * width // 1500)):
        inside = (y - rng.integers(height)) ** 2 + (x - rng.integers(width)) ** 2 < rng.integers(3, 12) ** 2
        image[inside] = rng.integers(180, 255)
    return image


IMAGES = [cells(*size, seed) for seed, size in enumerate(SIZES)]


def predict_all(images: Any, net: InferenceNetwork | None = None, **options: Any) -> list[Prediction]:
    return list(predict_stream(net or network(), images, PredictConfig(**options)))


def same(one: Prediction, other: Prediction, tolerance: float = 0.0) -> bool:
    assert one.mask is not None
    assert other.mask is not None
    return (
        np.array_equal(one.mask, other.mask)
        and all(np.array_equal(a.points, b.points) for a, b in zip(one.polygons, other.polygons, strict=True))
        and all(
            abs(a.confidence - b.confidence) <= tolerance for a, b in zip(one.polygons, other.polygons, strict=True)
        )
    )


# What comes out


def test_a_square_becomes_a_polygon_of_its_size():
    image = np.zeros((50, 70, 3), np.uint8)
    image[10:30, 20:45] = 255
    found = predict_one(network(), image, PredictConfig())
    (polygon,) = found.polygons
    assert (found.height, found.width, found.name, found.error) == (50, 70, "image 0", None)
    assert sorted(map(tuple, polygon.points.tolist())) == [(20, 10), (20, 30), (45, 10), (45, 30)]
    assert polygon.area == 500
    assert polygon.confidence > 0.99
    assert found.mask is not None
    assert np.array_equal(found.mask, np.where(image[..., 0] > 0, 255, 0).astype(np.uint8))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_mixed_sizes_come_in_order_and_equal_single_images(batch_size):
    net = network(Blur())
    found = predict_all(IMAGES, net, batch_size=batch_size)
    assert [(p.height, p.width) for p in found] == SIZES
    for prediction, image in zip(found, IMAGES, strict=True):
        assert same(prediction, predict_one(net, image, PredictConfig()), 1e-4)


def test_threshold_and_holes_are_honoured():
    image = np.full((64, 64, 3), 140, np.uint8)
    image[20:40, 20:40] = 0
    assert predict_one(network(), image, PredictConfig(threshold=0.9)).polygons == ()
    (ring,) = predict_one(network(), image, PredictConfig()).polygons
    (full,) = predict_one(network(), image, PredictConfig(detect_holes=False)).polygons
    assert (ring.area, len(ring.holes)) == (64 * 64 - 400, 1)
    assert (full.area, full.holes) == (64 * 64, ())


class Channel(nn.Module):
    """The logit of a pixel is one of its normalised channels."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.number : self.number + 1]


@pytest.mark.parametrize(
    ("number", "value", "mean", "deviation"), [(0, 200, 0.485, 0.229), (1, 150, 0.456, 0.224), (2, 250, 0.406, 0.225)]
)
def test_a_confidence_is_the_probability_of_a_normalised_pixel(number, value, mean, deviation):
    """Mean and deviation of ImageNet's red, green and blue, as published."""
    image = np.full((40, 32, 3), (200, 150, 250), np.uint8)

    (polygon,) = predict_one(network(Channel(number)), image, PredictConfig()).polygons

    logit = (value / 255 - mean) / deviation
    assert polygon.confidence == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)


def test_a_pixel_at_the_threshold_is_background():
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x[:, :1]

    image = np.zeros((32, 32, 3), np.uint8)
    assert predict_one(network(Even()), image, PredictConfig(threshold=0.5)).polygons == ()
    assert len(predict_one(network(Even()), image, PredictConfig(threshold=0.4999)).polygons) == 1
    assert ModelLoader(device="cpu").postprocess_mask_batch(np.full((1, 4, 4), 0.5)) == [[]]


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize("tile", [64, 1024])
def test_what_is_found_at_another_scale_lies_where_it_is_in_the_image(scale, tile):
    image = np.zeros((64, 160, 3), np.uint8)
    image[20:40, 60:120] = 255
    net = InferenceNetwork(Brightness(), CPU, ComputeConfig(), traits=ModelTraits(scale=scale))

    found = predict_one(net, image, PredictConfig(tile=tile))

    (polygon,) = found.polygons
    assert np.abs(polygon.points.min(0) - (60, 20)).max() <= 1
    assert np.abs(polygon.points.max(0) - (120, 40)).max() <= 1
    assert (found.height, found.width) == (64, 160)


def test_objects_of_the_least_area_are_kept_and_smaller_ones_left_out():
    image = np.zeros((40, 40, 3), np.uint8)
    image[4:8, 4:8], image[20:23, 20:25] = 255, 255  # 16 and 15 pixels

    found = predict_one(network(), image, PredictConfig(min_area=16))

    assert [polygon.area for polygon in found.polygons] == [16]
    assert found.mask is not None
    assert (found.mask > 0).sum() == 16


class Maps(nn.Module):
    """Foreground is what is red, and as high as it is green."""

    def forward(self, x: Tensor) -> Tensor:
        return 8 * x[:, :2]


def instances_of(*images: np.ndarray, **options: Any) -> list[Prediction]:
    net = InferenceNetwork(Maps(), CPU, ComputeConfig(), traits=ModelTraits(task="instances"))
    return predict_all(list(images), net, **options)


def test_instances_have_holes_only_if_they_are_wanted():
    image = np.zeros((64, 64, 3), np.uint8)
    image[10:30, 12:32], image[16:24, 18:26] = 255, 0

    ((ring,),), ((full,),) = ([p.polygons for p in instances_of(image, detect_holes=holes)] for holes in (True, False))

    assert (ring.area, len(ring.holes)) == (400 - 64, 1)
    assert (full.area, full.holes) == (400, ())
    assert (full.points.min(0).tolist(), full.points.max(0).tolist()) == ([12, 10], [32, 30])


def test_instances_of_fewer_than_16_pixels_are_left_out_unless_another_number_is_given():
    image = np.zeros((64, 64, 3), np.uint8)
    image[5:8, 5:8], image[20:24, 20:24], image[40:50, 40:50] = 255, 255, 255

    areas = {least: [p.area for p in instances_of(image, min_area=least)[0].polygons] for least in (None, 0, 17)}

    assert areas == {None: [16, 100], 0: [9, 16, 100], 17: [100]}


def test_what_is_reflected_beyond_an_image_is_no_object_of_it():
    small, large = np.zeros((40, 40, 3), np.uint8), np.zeros((60, 60, 3), np.uint8)
    small[30:36, 30:36] = 255  # again at 43 in the padding

    first, second = instances_of(small, large, batch_size=2)

    assert [p.area for p in first.polygons] == [36]
    assert first.measurements is not None
    assert len(first.measurements.values) == 1
    assert second.polygons == ()


# Windows


def test_windows_of_a_large_image_give_what_the_whole_image_gives():
    image = cells(250, 331, 9)
    whole = predict_one(network(), image, PredictConfig())
    for tile in (64, 96, 100, 320):
        assert same(predict_one(network(), image, PredictConfig(tile=tile)), whole, 1e-5)
    assert same(predict_one(network(), image, PredictConfig(tile=64, overlap=0)), whole, 1e-5)


def test_resize_runs_at_another_side_and_gives_masks_of_the_image():
    image = np.zeros((100, 160, 3), np.uint8)
    image[20:60, 40:120] = 255
    for found in (
        predict_one(network(), image, PredictConfig(resize=64)),
        *predict_all([image, cells(33, 40), image], resize=64, batch_size=3)[::2],
    ):
        assert found.mask is not None
        assert found.mask.shape == (100, 160)
        (polygon,) = found.polygons
        assert polygon.area == pytest.approx(3200, rel=0.1)


# How patches are grouped


def frame_of(index: int, *shapes: tuple[int, int]) -> ImageFrame:
    frame = ImageFrame(index, str(index))
    frame.patches = [Patch(frame, torch.empty(0), shape) for shape in shapes]
    return frame


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.sampled_from([(1, 1), (2, 2), (3, 3)]), max_size=6), max_size=30),
    size=st.integers(1, 5),
)
def test_every_patch_is_in_one_batch_of_its_shape(shapes, size):
    frames = [frame_of(index, *those) for index, those in enumerate(shapes)]
    patches = [patch for frame in frames for patch in frame.patches]
    batches = list(group(frames, lambda: size))
    assert all(1 <= len(batch.patches) <= size for batch in batches)
    assert all(len({patch.shape for patch in batch.patches}) == 1 for batch in batches)
    assert sorted(p.number for b in batches for p in b.patches) == list(range(1, len(patches) + 1))


def test_a_rare_shape_waits_for_four_batches_and_no_longer():
    taken = itertools.count()

    def frames() -> Iterator[ImageFrame]:
        yield frame_of(next(taken), (9, 9))
        while True:
            yield frame_of(next(taken), (1, 1))

    shapes = [batch.patches[0].shape for batch in itertools.islice(group(frames(), lambda: 8), 5)]
    assert shapes == [(1, 1)] * 4 + [(9, 9)]
    assert next(taken) == 1 + 4 * 8


def test_a_failed_image_passes_at_once():
    failed = ImageFrame(1, "x", failure=ImageError("no"))
    batches = list(group([frame_of(0, (1, 1)), failed, frame_of(2, (1, 1))], lambda: 2))
    assert [batch.failed for batch in batches] == [failed, None]


# What goes wrong with one image


def test_bad_images_fail_in_their_own_place(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    bad = [b"no image", tmp_path / "missing.png", tmp_path / "broken.png", np.full((40, 40), np.nan), None]
    images = [item for pair in zip(bad, itertools.repeat(cells(64, 64)), strict=False) for item in pair]
    found = predict_all(images, batch_size=4)
    assert [p.error is not None for p in found] == [True, False] * len(bad)
    assert "missing.png" in str(found[2].error)
    assert all(not p.polygons and p.mask is None for p in found[::2])
    with pytest.raises(ImageError, match=r"missing\.png"):
        predict_one(network(), tmp_path / "missing.png", PredictConfig())


class Poisoned(Brightness):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return torch.where(x.amax((1, 2, 3), keepdim=True) < -1.75, torch.inf, logits)  # of a black image


@pytest.mark.parametrize("tile", [32, 1024])
def test_logits_that_are_not_finite_fail_in_their_own_place(tile):
    dark, net = np.zeros((64, 64, 3), np.uint8), network(Poisoned())
    found = predict_all([cells(64, 64), dark, np.full((64, 64, 3), 200, np.uint8)], net, batch_size=3, tile=tile)
    assert [p.error is not None for p in found] == [False, True, False]
    assert "not finite" in str(found[1].error)
    with pytest.raises(ImageError, match="not finite"):
        predict_one(net, dark, PredictConfig())


def test_one_window_that_is_not_finite_fails_its_image():
    image = np.full((64, 64, 3), 200, np.uint8)
    image[:32, :32] = 0
    (found,) = predict_all([image], network(Poisoned()), batch_size=1, tile=32)
    assert "not finite" in str(found.error)


# Out of memory


@pytest.mark.parametrize("tile", [32, 1024])
@pytest.mark.parametrize("above", [1, 3])
def test_a_batch_that_does_not_fit_is_halved(above, tile):
    images = [cells(64, 64, seed) for seed in range(10)]
    expected = predict_all(images, batch_size=1, tile=tile)
    reports: list[PredictReport] = []
    config = PredictConfig(batch_size=8, tile=tile)
    with inject_oom(above=above):
        found = list(predict_stream(network(), images, config, on_report=reports.append))
    assert all(same(one, other, 1e-5) for one, other in zip(found, expected, strict=True))
    assert reports[0].batch_size <= above


@pytest.mark.parametrize("tile", [32, 1024])
def test_images_of_which_not_one_fits_fail_in_their_own_places(tile, monkeypatch):
    monkeypatch.setenv("BRIM_INJECT_OOM_ABOVE", "0")
    found = predict_all([cells(64, 64, seed) for seed in range(5)], batch_size=4, tile=tile)
    assert [p.name in str(p.error) and "does not fit" in str(p.error) for p in found] == [True] * 5
    with pytest.raises(OutOfMemory):
        predict_one(network(), cells(64, 64), PredictConfig(tile=tile))


def is_low(image: np.ndarray | list[np.ndarray]) -> bool:
    """Whether the image, or one of the masks, has 40 rows."""
    return any(len(part) == 40 for part in (image if isinstance(image, list) else [image]))


@pytest.mark.parametrize("stage", ["read_picture", "find_rings"])
@pytest.mark.parametrize(("times", "fails"), [(1, False), (3, True)])
def test_memory_that_runs_out_beside_the_device_is_tried_again(stage, times, fails, monkeypatch):
    work, failures = getattr(module, stage), []

    def short_of_memory(image: Any, *rest: Any, **options: Any) -> Any:
        if is_low(image) and len(failures) < times:
            failures.append(1)
            raise MemoryError
        return work(image, *rest, **options)

    monkeypatch.setattr(module, stage, short_of_memory)
    found = predict_all([cells(40 if index == 2 else 64, 64, index) for index in range(5)], batch_size=2)
    assert [p.error is not None for p in found] == [False, False, fails, False, False]


# What goes wrong with the run


@pytest.mark.parametrize("stage", ["read_picture", "find_rings", "network"])
@pytest.mark.parametrize("failure", [Broken("bug"), StopIteration()])
def test_an_unexpected_failure_surfaces_after_what_precedes_it(stage, failure, monkeypatch):
    class Breaking(Brightness):
        def forward(self, x: Tensor) -> Tensor:
            if stage == "network" and bool((x.amin((1, 2, 3)) > 1.5).any()):
                raise failure
            return super().forward(x)

    def broken(image: Any, *rest: Any, **options: Any) -> Any:
        if is_low(image):
            raise failure
        return work(image, *rest, **options)

    if stage != "network":
        work = getattr(module, stage)
        monkeypatch.setattr(module, stage, broken)
    net = network(Breaking())
    images = [cells(64, 64) for _ in range(12)]
    images[6] = np.full((40, 64, 3), 255, np.uint8)
    got: list[Prediction] = []
    with pytest.raises(Broken if isinstance(failure, Broken) else RuntimeError):
        got.extend(predict_stream(net, images, PredictConfig(batch_size=2)))  # extend keeps what came before
    assert len(got) <= 6
    if stage == "read_picture":
        assert len(got) == 6


def test_a_stream_is_read_no_further_than_needed_and_stops_when_left():
    taken = itertools.count()
    endless = (cells(32, 32, next(taken)) for _ in itertools.count())
    stream = predict_stream(network(), endless, PredictConfig(batch_size=4))
    for _ in range(10):
        next(stream)
    time.sleep(0.2)
    assert next(taken) < 10 + 4 * 4 * 2 + 12 * module.worker_count()
    stream.close()  # type: ignore[attr-defined]


def test_opencv_gets_its_threads_back_when_the_last_run_ends():
    before = cv2.getNumThreads()
    first, second = (predict_stream(network(), [cells(64, 64)] * 9, PredictConfig()) for _ in range(2))
    next(first)
    next(second)
    assert cv2.getNumThreads() == 1
    first.close()  # type: ignore[attr-defined]
    assert cv2.getNumThreads() == 1
    second.close()  # type: ignore[attr-defined]
    assert cv2.getNumThreads() == before


def test_large_images_wait_for_room_and_none_for_ever(monkeypatch):
    monkeypatch.setattr(module, "DECODED_BYTES", 1)
    monkeypatch.setattr(module, "worker_count", lambda: 4)
    found = predict_all([cells(64, 64, seed) for seed in range(20)], batch_size=4)
    assert [p.error for p in found] == [None] * 20


# Telling


def test_the_report_has_the_names_of_the_contract(monkeypatch):
    monkeypatch.setattr(module, "CEILING_S", 3600.0)  # no time to measure it
    reports: list[PredictReport] = []
    heard: list[PredictProgress] = []
    images = [cells(64, 64, 1), b"no", cells(150, 64, 2)]
    found = list(
        predict_stream(
            network(), images, PredictConfig(batch_size=2, tile=64), progress=heard.append, on_report=reports.append
        )
    )
    report = reports[0].as_dict()
    assert list(report) == [
        "images", "failed", "polygons", "seconds", "images_per_s", "ceiling_share", "batch_size", "stages",
        "ceiling_spread",
    ]  # fmt: skip
    assert (report["images"], report["failed"], report["batch_size"]) == (3, 1, 2)
    assert report["polygons"] == sum(len(p.polygons) for p in found)
    assert report["ceiling_share"] is None
    assert list(report["stages"]) == ["source", "decode", "batch", "forward", "trace", "unbatch", "polygons"]
    assert all("busy_s" in stage for stage in report["stages"].values())
    assert (heard[-1].done, heard[-1].failed, heard[-1].total) == (3, 1, 3)

"""Tracing on a GPU: the rings of the CPU to the bit, the same from run to run, and images to polygons with it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from brim.engine.device.memory import guard
from brim.errors import OutOfMemory
from brim.segmentation.networks import create_model, save_weights
from brim.segmentation.objects import Prediction, device_rings, fill
from brim.segmentation.objects.device_rings import DeviceRings, find_rings
from brim.segmentation.prediction import ModelLoader
from brim.segmentation.prediction import scoring as tracing
from brim.segmentation.scenes import make_cells

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

SIZES = [(32, 32), (64, 48), (20, 20), (33, 97), (128, 128), (300, 201), (1, 1), (47, 256), (500, 700)]


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield torch.device("cuda", 0)
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LEAST_PIXELS", 0)


def noise(num: int, height: int, width: int) -> Tensor:
    """(B, H, W) from nearly empty to nearly full: every kind of crossing, hole and island."""
    share = torch.linspace(0.02, 0.98, num)[:, None, None]
    return torch.rand(num, height, width, generator=torch.Generator().manual_seed(num)) < share


def cells(num: int, side: int) -> Tensor:
    truths = [make_cells(seed=8, index=index, height=side, width=side)[1] > 0 for index in range(num)]
    return torch.from_numpy(np.stack(truths))


def chances(mask: Tensor) -> Tensor:
    return torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))


def assert_equal(found: DeviceRings, expected: DeviceRings) -> None:
    for name, values in found._asdict().items():
        assert torch.equal(values.cpu(), getattr(expected, name).cpu()), name


MASKS: dict[str, Callable[[], Tensor]] = {
    "noise": lambda: noise(9, 61, 45),
    "much noise": lambda: noise(4, 512, 512),
    "flat": lambda: noise(5, 1, 300),
    "narrow": lambda: noise(3, 400, 1),
    "cells": lambda: cells(4, 512),
    "empty": lambda: torch.zeros(3, 20, 30),
    "full": lambda: torch.ones(3, 20, 30),
    "pixel": lambda: torch.ones(1, 1, 1),
    "no pixel": lambda: torch.zeros(1, 1, 1),
}


@pytest.mark.parametrize("detect_holes", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_rings_are_those_of_the_cpu(device: torch.device, kind: str, detect_holes: bool) -> None:
    mask = MASKS[kind]()
    probability, sizes = chances(mask), [(mask.shape[1], mask.shape[2])] * len(mask)

    found = find_rings(mask.to(device), probability.to(device), sizes, detect_holes)

    assert_equal(found, find_rings(mask, probability, sizes, detect_holes))


def test_bands_leave_no_seam(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = noise(3, 200, 170)[1:2]
    whole = find_rings(mask, chances(mask), [(200, 170)], True)

    monkeypatch.setattr(device_rings, "BAND_PIXELS", 170 * 13)

    assert_equal(find_rings(mask.to(device), chances(mask).to(device), [(200, 170)], True), whole)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_host_waits_a_few_times_and_no_more(device: torch.device) -> None:
    mask = cells(8, 1024).to(device)
    probability = chances(mask.cpu()).to(device)
    find_rings(mask, probability, [(1024, 1024)] * 8, True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing CUDA operation") as seen:
            find_rings(mask, probability, [(1024, 1024)] * 8, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert len(seen) <= 20


def test_memory_that_runs_out_inside_is_recognised(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rings, "band_pixels", lambda _: 2**60)
    endless = torch.zeros(1, 1, 1, device=device).expand(1, 2**22, 2**22)

    with pytest.raises(OutOfMemory, match="out of memory: CUDA out of memory"), guard():
        find_rings(endless, endless, [(2**22, 2**22)], True)


@pytest.mark.parametrize("kind", ["cells", "much noise"])
def test_all_of_it_is_queued_on_the_current_stream(device: torch.device, kind: str) -> None:
    mask = MASKS[kind]()
    probability, sizes = chances(mask), [(mask.shape[1], mask.shape[2])] * len(mask)
    stream, busy = torch.cuda.Stream(device), torch.rand(4096, 4096, device=device)

    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = (busy @ busy).clamp(0, 1)
        found = find_rings(mask.to(device, copy=True) * 1, probability.to(device), sizes, True)
    stream.synchronize()

    assert_equal(found, find_rings(mask, probability, sizes, True))


# Images to polygons


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ModelLoader]:
    torch.manual_seed(3)
    save_weights(create_model("unet_tiny"), tmp_path / "unet_tiny.safetensors", {})

    def loader(**options: Any) -> ModelLoader:
        options = {"batch_sizes": tmp_path / "batch_sizes.json", "tune_seconds": 2.0, **options}
        return ModelLoader({"unet_tiny": tmp_path / "unet_tiny.safetensors"}, **options)

    return loader


def images(num: int, *sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 255, (*sizes[index % len(sizes)], 3), dtype=np.uint8) for index in range(num)]


def same(one: Prediction, other: Prediction) -> bool:
    assert one.mask is not None, one.error
    assert other.mask is not None, other.error
    pairs = list(zip(one.polygons, other.polygons, strict=True))
    return (
        np.array_equal(one.mask, other.mask)
        and all(np.array_equal(a.points, b.points) for a, b in pairs)
        and all(np.array_equal(a, b) for p, q in pairs for a, b in zip(p.holes, q.holes, strict=True))
        and all((a.area, a.confidence) == (b.area, b.confidence) for a, b in pairs)
    )


@pytest.mark.parametrize("tile", [128, 1024])
@pytest.mark.parametrize("detect_holes", [True, False])
def test_images_of_mixed_sizes_get_the_polygons_that_the_host_finds(
    make: Callable[..., ModelLoader], tile: int, detect_holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, some = make(tile=tile), images(27, *SIZES)
    found = loader.predict_batch(some, "unet_tiny", strict=True, detect_holes=detect_holes)
    monkeypatch.setattr(tracing, "TRACING_DEVICES", ())
    expected = loader.predict_batch(some, "unet_tiny", strict=True, detect_holes=detect_holes)

    assert all(map(same, found, expected))


def test_a_batch_is_the_same_from_run_to_run_and_strict_to_the_bit(make: Callable[..., ModelLoader]) -> None:
    loader, some = make(precision="fp32", tile=256), images(48, (256, 256), (250, 231), (225, 256))
    once, again = (loader.predict_batch(some, "unet_tiny", batch_size=8) for _ in range(2))
    strict = loader.predict_batch(some, "unet_tiny", strict=True)
    alone = [loader.predict(image, "unet_tiny", strict=True) for image in some[:9]]

    assert all(map(same, once, again))
    assert all(map(same, strict[:9], alone))
    for prediction in once:
        assert prediction.mask is not None
        assert np.array_equal(fill(prediction.polygons, *prediction.mask.shape), prediction.mask > 0)


def test_what_does_not_fit_on_the_device_is_traced_on_the_host(
    make: Callable[..., ModelLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, some = make(), images(24, (128, 128), (100, 90))
    expected = loader.predict_batch(some, "unet_tiny", strict=True)

    def full(*_: Any) -> None:
        torch.empty(2**46, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(device_rings, "find_rings", full)

    assert all(map(same, loader.predict_batch(some, "unet_tiny", strict=True), expected))


def test_runs_that_share_the_device_and_runs_that_are_left_disturb_nobody(make: Callable[..., ModelLoader]) -> None:
    loader, some = make(tile=256), images(40, (256, 256), (192, 256))
    expected = loader.predict_batch(some, "unet_tiny", strict=True)
    results: list[list[Prediction]] = []

    def leave_early() -> None:
        for _ in range(5):
            stream = loader.predict_stream(some, "unet_tiny", batch_size=8)
            next(stream)
            stream.close()  # type: ignore[attr-defined]

    def run() -> None:
        results.append(loader.predict_batch(some, "unet_tiny", strict=True))

    threads = [threading.Thread(target=work) for work in (run, leave_early, run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 2
    assert all(same(*pair) for found in results for pair in zip(found, expected, strict=True))

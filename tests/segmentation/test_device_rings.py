"""Rings by torch, here on the CPU: those of outlines.py to the bit, and what scipy and shapely say of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from brim.engine.device.memory import guard
from brim.engine.pipeline import HostCopy
from brim.errors import OutOfMemory
from brim.segmentation.objects import device_rings
from brim.segmentation.objects import rings as outlines
from brim.segmentation.objects.device_rings import find_rings
from brim.segmentation.prediction.scoring import TracedRings

Masks = Sequence[np.ndarray]
small_masks = st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(lambda shape: hnp.arrays(bool, shape))


def chances(masks: Masks) -> list[np.ndarray]:
    return [np.random.default_rng(mask.size).random(mask.shape, np.float32) for mask in masks]


def framed(parts: Masks, beyond: float, dtype: torch.dtype) -> torch.Tensor:
    """(B, H, W) of the parts, each at its upper left; what lies beyond them must not matter."""
    height, width = (max(part.shape[axis] for part in parts) + 2 for axis in (0, 1))
    out = torch.full((len(parts), height, width), beyond, dtype=dtype)
    for own, part in zip(out, parts, strict=True):
        own[: part.shape[0], : part.shape[1]] = torch.from_numpy(np.array(part)).to(dtype)
    return out


def trace(masks: Masks, probabilities: Masks, detect_holes: bool = True) -> list[outlines.Rings]:
    """The rings of each mask as the host gets them."""
    sizes = [mask.shape for mask in masks]
    rings = find_rings(
        framed(masks, 1, torch.uint8), framed(probabilities, torch.nan, torch.float32), sizes, detect_holes
    )
    found = TracedRings(HostCopy().start(rings._asdict()), max(len(mask) for mask in masks) + 1)
    return [found.of(place) for place in range(len(masks))]


def expect(masks: Masks, probabilities: Masks, detect_holes: bool = True) -> list[outlines.Rings]:
    """The same by outlines.py, one mask at a time."""
    pairs = zip(masks, probabilities, strict=True)
    return [outlines.find_rings([mask], [chance], detect_holes=detect_holes)[0] for mask, chance in pairs]


def assert_equal(found: list[outlines.Rings], expected: list[outlines.Rings]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name, values in one._asdict().items():
            np.testing.assert_array_equal(values, getattr(other, name), err_msg=name)


@given(st.lists(small_masks, min_size=1, max_size=5), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_masks_of_any_sizes_together_give_the_hosts_bits(masks, detect_holes):
    probabilities = chances(masks)

    found = trace(masks, probabilities, detect_holes)

    assert_equal(found, expect(masks, probabilities, detect_holes))


@pytest.mark.parametrize("band", [1, 60, 500])
@pytest.mark.parametrize("detect_holes", [True, False])
def test_bands_leave_no_seam(band, detect_holes, monkeypatch):
    mask = np.random.default_rng(2).random((33, 47)) < 0.6
    probabilities = chances([mask])

    monkeypatch.setattr(device_rings, "BAND_PIXELS", band)
    found = trace([mask], probabilities, detect_holes)

    assert_equal(found, expect([mask], probabilities, detect_holes))


@pytest.mark.parametrize("width", [40_000, 70_000])
def test_images_wider_than_16_bits_count(width):
    mask = np.zeros((3, width), bool)
    mask[:, 3::9], mask[1, width - 90 : width - 50] = True, True
    mask[:, width - 20 : width - 10], mask[1, width - 15] = True, False  # an object with a hole
    probabilities = [np.full(mask.shape, 0.25, np.float32)]

    assert_equal(trace([mask], probabilities), expect([mask], probabilities))


def test_masks_of_too_many_corners_are_refused(monkeypatch):
    masks = [np.pad(np.ones((2, 2), bool), 1)] * 2  # four corners each
    monkeypatch.setattr(device_rings, "MOST_CORNERS", 8)
    assert_equal(trace(masks, chances(masks)), expect(masks, chances(masks)))
    monkeypatch.setattr(device_rings, "MOST_CORNERS", 7)

    with pytest.raises(OutOfMemory, match="2 masks of 4 × 4 have more than 7 corners"):
        trace(masks, chances(masks))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_nothing(bad):
    mask, probability = np.ones((4, 4), bool), np.full((4, 4), 0.5, np.float32)
    probability[1, 1] = bad

    (rings,) = trace([mask], [probability])

    assert rings.mass.tolist() == [7.5]
    assert_equal([rings], expect([mask], [probability]))


# Without the interpreter


@pytest.fixture
def uncompiled() -> Iterator[None]:
    device_rings._compiled.cache_clear()
    yield
    device_rings._compiled.cache_clear()


@pytest.fixture
def without_torchscript(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: Any) -> None:
        raise NotImplementedError("torch.jit.script has been removed")

    monkeypatch.setattr(torch.jit, "script", gone)


@pytest.mark.parametrize("detect_holes", [True, False])
@pytest.mark.parametrize("density", [0, 0.1, 0.6, 0.9])
def test_without_torchscript_the_rings_are_the_same(without_torchscript, density, detect_holes):
    masks = [np.random.default_rng(seed).random((40 + seed, 50 - seed)) < density for seed in range(3)]
    probabilities = chances(masks)

    assert_equal(trace(masks, probabilities, detect_holes), expect(masks, probabilities, detect_holes))


def test_memory_that_runs_out_inside_is_recognised(monkeypatch):
    monkeypatch.setattr(device_rings, "band_pixels", lambda _: 2**60)
    endless = torch.zeros(1, 1, 1).expand(1, 2**24, 2**24)

    with pytest.raises(OutOfMemory, match="out of memory: DefaultCPUAllocator"), guard():
        find_rings(endless, endless, [(2**24, 2**24)], True)

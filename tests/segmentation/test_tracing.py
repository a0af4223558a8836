"""Images to polygons with the tracing on the device, here the CPU: the host's results, whatever does not fit."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brim.segmentation.config import PredictConfig
from brim.segmentation.networks import InferenceNetwork
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.objects import Prediction, device_rings
from brim.segmentation.prediction import predict_stream
from brim.segmentation.prediction import scoring as tracing

SIZES = [(64, 64), (50, 64), (64, 40), (64, 64), (33, 97), (150, 64), (1, 1), (64, 64), (128, 128), (60, 60)]


class Ripples(nn.Module):
    """Foreground where the image is bright, every pixel for itself; a black image has no finite logit."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x.mean(1, keepdim=True) * 3
        return torch.where(x.amax((1, 2, 3), keepdim=True) < -1.75, torch.inf, logits)


def network() -> InferenceNetwork:
    return InferenceNetwork(Ripples(), torch.device("cpu"), ComputeConfig())


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth enough for objects with holes and islands, rough enough for pixels that touch at corners."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((height // 4 + 1, width // 4 + 1)).repeat(4, 0).repeat(4, 1)[:height, :width]
    grey = 255 * (0.7 * coarse + 0.3 * rng.random((height, width)))
    return grey.astype(np.uint8)[:, :, None].repeat(3, 2)


IMAGES = [picture(*size, seed) for seed, size in enumerate(SIZES)]


def run(images: list[np.ndarray], **options: Any) -> list[Prediction]:
    return list(predict_stream(network(), images, PredictConfig(**options)))


def same(found: Prediction, expected: Prediction) -> bool:
    assert found.mask is not None
    pairs = list(zip(found.polygons, expected.polygons, strict=True))
    return (
        np.array_equal(found.mask, expected.mask)
        and found.mask.base is None
        and all(np.array_equal(one.points, other.points) for one, other in pairs)
        and all(np.array_equal(a, b) for p, q in pairs for a, b in zip(p.holes, q.holes, strict=True))
        and all((one.area, one.confidence) == (other.area, other.confidence) for one, other in pairs)
    )


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trace on the device, be it a CPU; returns how many images were traced at once each time."""
    monkeypatch.setattr(tracing, "TRACING_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(tracing, "LEAST_PIXELS", 0)
    work, calls = device_rings.find_rings, []

    def counted(mask: Tensor, *rest: Any) -> device_rings.DeviceRings:
        calls.append(len(mask))
        return work(mask, *rest)

    monkeypatch.setattr(device_rings, "find_rings", counted)
    return calls


def expected(**options: Any) -> list[Prediction]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "TRACING_DEVICES", ())
        return run(IMAGES, **options)


@pytest.mark.parametrize("detect_holes", [True, False])
@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 8, "tile": 64}, {"batch_size": 3, "resize": 48}])
def test_the_device_gives_the_bits_of_the_host(on_device, options, detect_holes):
    wanted = expected(detect_holes=detect_holes, **options)
    assert not on_device

    found = run(IMAGES, detect_holes=detect_holes, **options)

    assert all(map(same, found, wanted))
    assert sum(on_device) == len(IMAGES)
    assert any(polygon.holes for p in found for polygon in p.polygons) == detect_holes


# Out of memory


def test_what_does_not_fit_together_is_traced_in_halves(on_device, monkeypatch):
    wanted, work = expected(batch_size=4), device_rings.find_rings

    def one_fits(mask: Tensor, *rest: Any) -> device_rings.DeviceRings:
        if len(mask) > 1:
            raise MemoryError
        return work(mask, *rest)

    monkeypatch.setattr(device_rings, "find_rings", one_fits)

    assert all(map(same, run(IMAGES, batch_size=4), wanted))
    assert on_device == [1] * len(IMAGES)


def test_what_does_not_fit_alone_is_traced_on_the_host(on_device, monkeypatch):
    wanted = expected(batch_size=4)
    monkeypatch.setattr(device_rings, "MOST_CORNERS", 300)

    assert all(map(same, run(IMAGES, batch_size=4), wanted))

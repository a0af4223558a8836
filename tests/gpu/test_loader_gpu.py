"""Images to polygons on a GPU: the CPU's results, the same bits in strict mode, and no wait between batches."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.engine.device.memory import inject_oom
from brim.segmentation.networks import InferenceNetwork, create_model, save_weights
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.objects import Prediction
from brim.segmentation.prediction import ModelLoader
from brim.segmentation.prediction.patches import ImageFrame, PatchBatch, cut
from brim.segmentation.prediction.scoring import Scorer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

SIZES = [(32, 32), (64, 48), (20, 20), (33, 97), (128, 128), (300, 201), (1, 1), (47, 256), (500, 700)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "unet_tiny.safetensors"
    save_weights(create_model("unet_tiny"), path, {})
    return path


@pytest.fixture
def make(weights: Path, tmp_path: Path) -> Callable[..., ModelLoader]:
    def loader(**options: object) -> ModelLoader:
        options = {"batch_sizes": tmp_path / "batch_sizes.json", "tune_seconds": 2.0, **options}
        return ModelLoader({"unet_tiny": weights}, **options)  # type: ignore[arg-type]

    return loader


def images(num: int, *sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in itertools.islice(itertools.cycle(sizes), num)]


def differing(one: Prediction, other: Prediction) -> float:
    assert one.mask is not None, one.error
    assert other.mask is not None, other.error
    return float((one.mask != other.mask).mean())


@pytest.mark.parametrize("tile", [128, 1024])
def test_mixed_sizes_equal_the_cpu_in_fp32(make: Callable[..., ModelLoader], tile: int) -> None:
    some = images(18, *SIZES)
    found = make(precision="fp32", tile=tile).predict_batch(some, "unet_tiny", batch_size=4)
    expected = make(device="cpu", precision="fp32", tile=tile).predict_batch(some, "unet_tiny", strict=True)
    assert [(p.height, p.width) for p in found] == [image.shape[:2] for image in some]
    assert max(map(differing, found, expected)) < 0.01  # pixels within the rounding of the threshold


def test_decoding_and_capturing_at_the_same_time_disturb_nobody(make: Callable[..., ModelLoader]) -> None:
    loader, some = make(), images(120, (256, 256), (192, 256), (256, 192))
    found = loader.predict_batch(some, "unet_tiny", batch_size=8)
    assert [p.error for p in found] == [None] * 120
    alone = loader.predict_batch(some[-3:], "unet_tiny", strict=True)
    assert max(map(differing, found[-3:], alone)) < 0.02


@pytest.mark.parametrize("resize", [None, 96])
def test_a_batch_that_does_not_fit_is_halved(make: Callable[..., ModelLoader], resize: int | None) -> None:
    loader, some = make(resize=resize, tune_seconds=6.0), images(20, (128, 128), (100, 90))
    expected = loader.predict_batch(some, "unet_tiny", strict=True)
    assert loader.get_max_safe_batch_size("unet_tiny") >= 4  # tuned now, and not to what is injected
    with inject_oom(above=2):
        found = loader.predict_batch(some, "unet_tiny", batch_size=4)
    assert max(map(differing, found, expected)) < 0.02


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_host_never_waits_for_the_batch_it_starts() -> None:
    network = InferenceNetwork(create_model("unet_tiny"), torch.device("cuda", 0), ComputeConfig(precision="bf16"))
    scorer = Scorer(network, threading.Lock(), batch_size=4, threshold=0.5, resize=None)

    def batch() -> PatchBatch:
        frames = [ImageFrame(index, "") for index in range(4)]
        image = np.zeros((256, 256, 3), np.uint8)
        cuts = [cut(frame, image, tile=256, overlap=None, resize=None, pinned=True) for frame in frames]
        return PatchBatch([frame.patches[0] for frame in cuts])

    for _ in range(3):  # the third is captured
        scorer.forward(batch())
    waiting = [batch() for _ in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = [image for each in waiting for image in scorer.forward(each)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(image.scores is not None and image.scores.host.wait()["mask"].is_pinned() for image in done)

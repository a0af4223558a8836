"""Tuning on a GPU: what is called safe is safe, memory is the true peak, compilation counts apart."""

import pytest
import torch
from torch import nn

from brim.segmentation.config import TuneConfig
from brim.segmentation.networks import InferenceNetwork, create_model
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.tuning import Tuned, tune_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

GPU = torch.device("cuda:0")


def run_steps(module: nn.Module, tuned: Tuned, num_steps: int) -> None:
    """As many forwards at the safe size as a run would make."""
    network = InferenceNetwork(module, GPU, tuned.setting)
    shape = (tuned.entry.max_safe_batch_size, 3, tuned.entry.image_size, tuned.entry.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=GPU)
    for _ in range(num_steps):
        masks = torch.sigmoid(network(images)) > 0.5
    assert masks.shape == (shape[0], 1, *shape[2:])
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.cuda.empty_cache()


def test_a_network_is_tuned_and_the_safe_size_holds():
    module = create_model("hrnet")
    tuned = tune_model("hrnet", module, GPU, TuneConfig(size=512, seconds=15.0))
    entry = tuned.entry
    swept = [trial for trial in tuned.trials if trial["kind"] == "sweep"]

    assert tuned.seconds < 20
    assert entry.max_safe_batch_size >= entry.optimal_batch_size
    assert (entry.precision, entry.layout) == ("fp16", "channels_last")
    ok = [trial for trial in swept if trial["status"] == "ok"]
    assert max(trial["peak_bytes"] for trial in ok) <= entry.memory_limit_mb * 1e6
    assert entry.expected_throughput >= min(trial["throughput"] for trial in ok if trial["batch"] == 1)
    run_steps(module, tuned, 20)


def test_the_peak_counts_what_a_captured_graph_holds():
    tuned = tune_model("tiny", create_model("unet_tiny"), GPU, TuneConfig(size=256, seconds=5.0))
    peaks = {trial["batch"]: trial["peak_bytes"] for trial in tuned.trials if trial.get("peak_bytes")}
    largest = max(peaks)
    activations = largest * 16 * 256 * 256 * 2  # one 16-bit tensor of the first level

    assert peaks[largest] > 2 * activations
    assert peaks[largest] > peaks[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when the compiler is first imported
def test_a_search_with_compilation_counts_it_apart():
    module = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 1, 3, padding=1))
    config = TuneConfig(search=("layout", "compile"), size=256, seconds=3.0)
    tuned = tune_model("plain", module, GPU, config, trained=False)
    compared = [trial for trial in tuned.trials if trial["kind"] == "search"]

    assert len(compared) == 4, tuned.messages
    assert all(trial["status"] == "ok" for trial in compared)
    assert tuned.compile_s > 0.5
    best = max(trial["throughput"] for trial in compared)
    chosen = next(
        trial for trial in compared if ComputeConfig(**{k: trial[k] for k in ComputeConfig.__slots__}) == tuned.setting
    )
    assert chosen["throughput"] >= 0.98 * best


def test_what_overflows_in_fp16_runs_in_bf16():
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 1)

        def forward(self, images):
            return self.conv(images * 2.0**17) * 2.0**-17

    tuned = tune_model("large", Large(), GPU, TuneConfig(size=128, seconds=3.0))

    assert tuned.setting == ComputeConfig(precision="bf16", layout="channels_last")
    assert any("refused fp16/channels_last: its logits are not finite" in text for text in tuned.messages)


def test_half_precision_that_differs_falls_back_to_fp32():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 1)

        def forward(self, images):
            logits = self.conv(images)
            return logits if images.dtype == torch.float32 else -logits

    tuned = tune_model("wrong", Wrong(), GPU, TuneConfig(size=128, seconds=3.0))

    assert tuned.setting == ComputeConfig()
    assert all(any(f"refused {name}/" in text for text in tuned.messages) for name in ("fp16", "bf16"))

"""The batch-size search on a GPU: real out-of-memory, a neighbour that holds memory, steps at the safe size."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from brim.engine.config import SweepConfig
from brim.engine.tuning.prober import Prober, budget_bytes, tune
from brim.errors import OutOfMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

GPU = torch.device("cuda", 0)
GIB = 1024**3
HOLD = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(total // 5, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def neighbour() -> Iterator[None]:
    """Another process that holds a fifth of the memory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    yield
    process.communicate(timeout=60)
    assert process.returncode == 0


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 1)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(GPU).eval()


def inference(size: int = 256) -> Callable[[int], Callable[[], Tensor]]:
    net = network()

    def make(batch: int) -> Callable[[], Tensor]:
        images = torch.rand(batch, 3, size, size, device=GPU)

        def step() -> Tensor:
            with torch.inference_mode():
                return net(images)

        return step

    return make


def hungry(batch: int) -> Callable[[], Tensor]:
    """A gigabyte per item, briefly."""
    return lambda: torch.zeros(batch, GIB // 8, device=GPU).add_(1) * 2


def test_a_real_out_of_memory_is_caught_and_the_next_trial_runs():
    prober = Prober(hungry, GPU)
    total_items = torch.cuda.get_device_properties(GPU).total_memory // GIB
    with pytest.raises(OutOfMemory):
        prober(2 * total_items)
    assert torch.cuda.memory_reserved(GPU) < GIB
    trial = prober(4)
    assert trial.peak_bytes is not None
    assert 3.9 * GIB < trial.peak_bytes < 5.5 * GIB


def test_the_search_goes_on_below_a_real_out_of_memory():
    # A budget far above what there is: nothing but the allocator stops it.
    config = SweepConfig(seconds=20, limit=1024, budget_bytes=10**13)
    found = tune(hungry, GPU, config)
    assert any(trial.status == "oom" for trial in found.trials)
    assert found.batch <= found.max_safe <= torch.cuda.get_device_properties(GPU).total_memory // GIB


def test_200_steps_run_at_the_safe_size_beside_a_process_that_holds_a_fifth(neighbour):
    total = torch.cuda.get_device_properties(GPU).total_memory
    assert budget_bytes(GPU) < 0.82 * total
    make = inference(512)
    began_s = time.perf_counter()
    found = tune(make, GPU, SweepConfig(seconds=30))
    took_s = time.perf_counter() - began_s
    safe = next(trial for trial in reversed(found.trials) if trial.batch == found.max_safe)
    assert safe.peak_bytes is not None
    print(found.batch, found.max_safe, f"{took_s:.1f} s, proof {found.proof_s:.1f} s", found.verdict, found.skipped)  # noqa: T201
    assert took_s < 36 + found.warmup_s
    assert 0.80 * budget_bytes(GPU) < safe.peak_bytes <= 0.9 * budget_bytes(GPU)
    step = make(found.max_safe)
    for _ in range(200):
        step()
    torch.cuda.synchronize()


def test_a_step_that_waits_for_the_host_says_so():
    rows = torch.rand(256, 256, device=GPU)

    def make(batch: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            time.sleep(0.002 * batch)
            return rows @ rows

        return step

    found = tune(make, GPU, SweepConfig(limit=8, seconds=10))
    assert found.chosen.device_share is not None
    assert found.chosen.device_share < 0.2
    assert "not limited by the device" in found.verdict

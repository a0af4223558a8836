"""Sequences in VRAM, in RAM and where they are stored: the same batches from the GPU, and a graph for each shape."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brim.engine.config import TIERS, BucketConfig, TrainConfig
from brim.engine.rows.ragged import RaggedResident
from brim.engine.rows.ragged_tiers import RaggedTensors
from brim.engine.training import step as module
from brim.engine.training.trainer import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def source_of(num: int = 2000, dim: int = 64, dtype: torch.dtype = torch.float16) -> RaggedTensors:
    """Frames that say whose they are: the item, then which frame."""
    lengths = np.random.default_rng(0).lognormal(4, 0.5, num).clip(1, 200).astype(int).tolist()
    found = [torch.zeros(length, dim, dtype=dtype) for length in lengths]
    for item, frames in enumerate(found):
        frames[:, 0], frames[:, 1] = item % 2000 + 1, torch.arange(1, len(frames) + 1)
    return RaggedTensors(found, {"label": torch.arange(num) % 5, "even": torch.arange(num) % 2 == 0})


@pytest.fixture(scope="module")
def source() -> RaggedTensors:
    return source_of()


def make(source: RaggedTensors, device: torch.device = GPU, **options: Any) -> RaggedResident:
    return RaggedResident(source, device=device, **{"buckets": BucketConfig(batch_size=32), "seed": 5, **options})


def wrong(batch: dict[str, Tensor]) -> Tensor:
    """Values that are not those of the items the batch names, counted on the device."""
    frames, length, item = batch["frames"].float(), batch["length"][:, None], batch["item"][:, None]
    place = torch.arange(frames.shape[1], device=frames.device)
    there = place < length
    bad = (frames[..., 0] != torch.where(there, item + 1, 0)).sum()
    return bad + (frames[..., 1] != torch.where(there, place + 1, 0)).sum() + (batch["label"] != item[:, 0] % 5).sum()


@pytest.mark.parametrize("sizes", [{"batch_size": 32}, {"batch_size": None, "max_frames": 4096}])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_batches_equal_those_on_the_cpu(source: RaggedTensors, tier: str, dtype: Any, sizes: dict[str, Any]) -> None:
    options = {"rows": torch.arange(0, 2000, 3), "dtype": dtype, "buckets": BucketConfig(**sizes)}
    with make(source, tier=tier, **options) as fast, make(source, CPU, tier="ram", **options) as plain:
        for epoch, start in ((0, 0), (1, 0), (1, 7)):
            found, expected = list(fast.epoch(epoch, start)), list(plain.epoch(epoch, start))
            assert len(found) == len(expected) == fast.num_batches - start
            for ours, theirs in zip(found, expected, strict=True):
                assert list(ours) == list(theirs)
                for name, tensor in theirs.items():
                    assert ours[name].device == GPU
                    assert torch.equal(ours[name].cpu(), tensor), name


@pytest.mark.parametrize("tier", TIERS)
def test_slow_consumers_never_see_a_batch_overwritten(source: RaggedTensors, tier: str) -> None:
    with make(source, tier=tier) as resident:
        for epoch in range(2):
            total = torch.zeros((), dtype=torch.int64, device=GPU)
            for batch in resident.epoch(epoch):
                torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]  # the host runs ahead
                total += wrong(batch)
            assert total.item() == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_vram_needs_no_host_sync(source: RaggedTensors) -> None:
    with make(source, tier="vram") as resident:
        next(resident.epoch(0))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in resident.epoch(1):
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Training


class Pooled(nn.Module):
    """Mean over the frames there are, then a small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        return self.layers(frames.float().sum(1) / length[:, None] / 100)  # type: ignore[no-any-return]


def loss_fn(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(network(batch["frames"], batch["length"]), batch["label"])


def run(out: Path, source: RaggedTensors, tier: str, **changes: Any) -> tuple[nn.Module, Any, RaggedResident]:
    network = Pooled().to(GPU)
    recipe = {"epochs": 4, "precision": "fp32", "log_every": 10, "tensorboard": False, "measure_ceiling": False}
    with make(source, tier=tier, buckets=BucketConfig(batch_size=32, max_waste=0.02)) as resident:
        report = train(network, loss_fn, resident, config=TrainConfig(**{**recipe, **changes}), out=out, device=GPU)
    return network, report, resident


def test_every_shape_is_captured(tmp_path: Path, source: RaggedTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    record = module.Stepper._record

    def counting(self: module.Stepper, batch: dict[str, Tensor]) -> Any:
        captured.append(tuple(batch["frames"].shape[:2]))
        return record(self, batch)

    monkeypatch.setattr(module.Stepper, "_record", counting)
    _, report, resident = run(tmp_path, source, "vram")
    assert report.step_kind == "graph"
    assert len(resident.buckets.shapes) > 8
    assert sorted(captured) == sorted(resident.buckets.shapes)


@pytest.mark.parametrize("tier", TIERS)
def test_graphs_train_as_eager_steps_do(tmp_path: Path, source: RaggedTensors, tier: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager, _, _ = run(tmp_path / "eager", source, "vram", compile="none")
        graphs, report, _ = run(tmp_path / "graphs", source, tier)
    assert report.tier == tier
    for ours, theirs in zip(graphs.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)

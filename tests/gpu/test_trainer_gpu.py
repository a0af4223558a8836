"""The step on a GPU: precision, captured graphs, fallbacks, and what is said of a device that waits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brim.engine.config import TrainConfig
from brim.engine.device.devices import stream
from brim.engine.rows.resident import Resident
from brim.engine.training import trainer
from brim.engine.training.checkpoint import load_checkpoint
from brim.engine.training.report import TrainReport
from brim.engine.training.source import BatchSource, InputsFor
from brim.engine.training.step import Stepper
from brim.engine.training.trainer import train
from brim.errors import TrainingDiverged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

GPU = torch.device("cuda:0")


class Rows(BatchSource):
    """A source on the device; the last batch of an epoch is short."""

    tier = "vram"

    def __init__(self, num_items: int = 1000, batch_size: int = 128, width: int = 64) -> None:
        self.num_items, self.batch_size = num_items, batch_size
        self.num_batches = -(-num_items // batch_size)
        self.x = torch.randn(num_items, width, generator=stream(1, "x", device=GPU), device=GPU)
        self.y = self.x.sum(-1) / width**0.5

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.num_items, generator=stream(2, number, device=GPU), device=GPU)
        for part in order.split(self.batch_size)[start_batch:]:
            yield {"x": self.x[part], "y": self.y[part]}


class FilledRows(Rows):
    """The same rows, written into the inputs of a captured step."""

    filled = 0

    def epoch_into(self, number: int, start_batch: int, inputs: InputsFor) -> Iterator[dict[str, Tensor]]:
        for batch in self.epoch(number, start_batch):
            out = inputs("x", (self.batch_size, *batch["x"].shape[1:]))
            if out is None or len(batch["x"]) < self.batch_size:
                yield batch
                continue
            self.filled += 1
            for name, tensor in out.items():
                tensor.copy_(batch[name])
            yield out


def network(width: int = 64, layers: int = 3, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    body: list[nn.Module] = []
    for _ in range(layers):
        body += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*body, nn.Linear(width, 1)).to(GPU)


def loss_fn(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]).squeeze(-1).float() - batch["y"]).square().mean()


def noisy(batch: dict[str, Tensor], generator: torch.Generator) -> None:
    batch["x"] += 0.01 * torch.randn(batch["x"].shape, generator=generator, device=GPU)


def config(**changes: Any) -> TrainConfig:
    few = TrainConfig(epochs=4, learning_rate=0.01, log_every=4, tensorboard=False, measure_ceiling=False)
    return replace(few, **changes)


def run(
    out: Path, module: nn.Module, source: Rows | None = None, *, loss: Any = loss_fn, **changes: Any
) -> TrainReport:
    transform = changes.pop("transform", None)
    stop = changes.pop("stop", None)
    return train(
        module, loss, source or Rows(), config=config(**changes), out=out, device="cuda", transform=transform, stop=stop
    )


def losses_of(out: Path) -> list[float]:
    lines = (out / "train/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["none", "graph"])
def test_learns_in_every_precision(tmp_path: Path, precision: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    report = run(tmp_path, network(dropout=0.0), precision=precision, compile=kind, epochs=20)
    assert report.step_kind == {"none": "eager", "graph": "graph"}[kind]
    assert "cannot be captured" not in caplog.text
    assert losses_of(tmp_path)[-1] < 0.3 * losses_of(tmp_path)[0]
    if precision == "fp16":
        assert load_checkpoint(tmp_path / "train/last")[1]["scaler"]["scale"] > 0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_captured_run_follows_the_eager_one(tmp_path: Path, dropout: float) -> None:
    eager, graph = network(dropout=dropout), network(dropout=dropout)
    run(tmp_path / "eager", eager, compile="none", precision="fp32", transform=noisy)
    run(tmp_path / "graph", graph, compile="graph", precision="fp32", transform=noisy)
    assert losses_of(tmp_path / "graph") == pytest.approx(losses_of(tmp_path / "eager"), rel=2e-2)


def test_a_source_that_fills_the_inputs_gives_the_same_run(tmp_path: Path) -> None:
    yielded, filled = network(), network()
    source = FilledRows()
    run(tmp_path / "yielded", yielded, Rows())
    run(tmp_path / "filled", filled, source)
    assert source.filled == 4 * 7 - 1  # all full batches but the first
    assert same(yielded, filled)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_that_fetches_its_own_batches_gives_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    given, fetched, data = network(), network(), Rows()
    steppers: list[Stepper] = []
    prepare = Stepper.prepare_fetching
    monkeypatch.setattr(Stepper, "prepare_fetching", lambda *args: steppers.append(args[0]) or prepare(*args))
    with Resident({"x": data.x, "y": data.y}, batch_size=128, tier="vram", device=GPU) as rows:
        for out, module, least in ((tmp_path / "given", given, 10**6), (tmp_path / "fetched", fetched, 1)):
            monkeypatch.setattr(trainer, "FETCH_STEPS", least)
            options: Any = {"config": config(precision=precision, measure_ceiling=True), "device": "cuda"}
            report = train(module, loss_fn, rows, out=out, transform=noisy, **options)
            assert report.step_kind == "graph"
    assert [stepper.fetcher is None for stepper in steppers] == [False]
    assert same(given, fetched)
    assert losses_of(tmp_path / "given") == losses_of(tmp_path / "fetched")


def test_measuring_the_ceiling_changes_no_bit(tmp_path: Path) -> None:
    for kind in ("graph", "none"):
        measured, plain = network(), network()
        report = run(tmp_path / kind / "a", measured, compile=kind, measure_ceiling=True, transform=noisy)
        run(tmp_path / kind / "b", plain, compile=kind, transform=noisy)
        assert same(measured, plain)
        assert 0 < report.busy_share <= 1


@pytest.mark.parametrize("kind", ["none", "graph"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, kind: str, precision: str) -> None:
    straight, first, second = network(), network(), network()
    run(tmp_path / "straight", straight, compile=kind, precision=precision)
    asked = iter(range(1, 1000))
    run(tmp_path / "cut", first, compile=kind, precision=precision, stop=lambda: next(asked) >= 13)
    run(tmp_path / "cut", second, compile=kind, precision=precision)
    # the short batch is captured on its second sight, so after a resume it may run eagerly once more
    assert losses_of(tmp_path / "cut") == pytest.approx(losses_of(tmp_path / "straight"), rel=2e-2)


@pytest.mark.parametrize("wait", [lambda loss: loss.item(), lambda loss: torch.cuda.synchronize()])
def test_a_step_that_waits_falls_back_to_eager_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait: Any
) -> None:
    def waiting(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_fn(module, batch)
        wait(loss)
        return loss

    report = run(tmp_path, network(layers=20), loss=waiting, measure_ceiling=True)
    assert report.step_kind == "eager"
    assert caplog.text.count("cannot be captured") == 1
    assert any(text.startswith("host_sync:") for text in report.diagnosis)


def test_a_tiny_kernel_is_launch_bound(tmp_path: Path) -> None:
    source = Rows(512, batch_size=8, width=16)
    report = run(tmp_path, network(width=16, layers=10), source, compile="none", measure_ceiling=True, log_every=50)
    assert any(text.startswith("launch-bound") for text in report.diagnosis)
    assert report.busy_share < 0.6


def test_a_slow_copy_is_named(tmp_path: Path) -> None:
    class SlowCopy(Rows):
        """The host runs ahead; the stream waits for something that takes 10 ms, as a copy would."""

        def epoch(self, number: int, start_batch: int = 0) -> Iterator[dict[str, Tensor]]:
            for batch in super().epoch(number, start_batch):
                torch.cuda._sleep(20_000_000)
                yield batch

    report = run(tmp_path, network(), SlowCopy())
    assert report.diagnosis[0].startswith("copy:")


def test_nan_is_found_at_its_step_without_a_sync_per_step(tmp_path: Path) -> None:
    class Broken(Rows):
        def epoch(self, number: int, start_batch: int = 0) -> Iterator[dict[str, Tensor]]:
            for index, batch in enumerate(super().epoch(number, start_batch), start_batch):
                if (number, index) == (1, 2):
                    batch["y"][3] = torch.inf
                yield batch

    with pytest.raises(TrainingDiverged, match=r'step 10 \(epoch 1, batch 2\): field "y"'):
        run(tmp_path, network(), Broken(), checkpoint_every_steps=5, log_every=100)
    assert load_checkpoint(tmp_path / "train/last")[1]["step"] == 10


def test_a_real_out_of_memory_is_halved(tmp_path: Path) -> None:
    free = torch.cuda.mem_get_info(GPU)[0]

    def greedy(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        room = torch.empty(len(batch["x"]) * (free // 100), dtype=torch.uint8, device=GPU)
        return loss_fn(module, batch) + 0 * room[0].float()

    report = run(tmp_path, network(), loss=greedy, compile="none", epochs=1)
    assert report.micro_batch == 64

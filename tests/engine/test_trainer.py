import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_time import FakeTime
from torch import Tensor, nn

from brim.engine.config import TrainConfig
from brim.engine.device.devices import stream
from brim.engine.device.memory import inject_oom
from brim.engine.meter.spent import Account, accounting
from brim.engine.training import trainer
from brim.engine.training.checkpoint import load_checkpoint, load_weights
from brim.engine.training.report import TrainProgress
from brim.engine.training.source import BatchSource
from brim.engine.training.step import Stepper
from brim.engine.training.trainer import train
from brim.errors import CheckpointError, ConfigError, TrainingDiverged
from brim.loggers import TensorBoard

CPU = torch.device("cpu")
TRUTH = torch.tensor([1.0, -2.0, 3.0, 0.5])
KEYS = {
    "run", "epochs", "samples_per_s", "epoch_seconds", "tier", "ceiling_share", "busy_share", "waiting",
    "best_val_loss", "peak_bytes", "joules_per_sample", "ceiling_spread", "wall_s", "startup_s", "work_s", "overhead",
}  # fmt: skip


class Lines(BatchSource):
    """A source of points on a plane, in an order of (seed, epoch)."""

    sleep = staticmethod(time.sleep)

    def __init__(self, num_items: int = 100, batch_size: int = 16, wait_s: float = 0.0) -> None:
        self.num_items, self.batch_size, self.wait_s = num_items, min(batch_size, num_items), wait_s
        self.num_batches = -(-num_items // self.batch_size)
        self.x = torch.randn(num_items, 4, generator=stream(1, "x", device=CPU))
        self.y = self.x @ TRUTH + 0.25

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.num_items, generator=stream(2, number, device=CPU))
        for part in order.split(self.batch_size)[start_batch:]:
            self.sleep(self.wait_s)
            yield {"x": self.x[part], "y": self.y[part]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The source's waiting takes time, and checkpoints half a second; all the rest takes none."""
    clock, save = FakeTime(), trainer.PhaseState.save

    def slow_save(state: trainer.PhaseState, log_bytes: Any) -> None:
        clock.sleep(0.5)
        save(state, log_bytes)

    for module in ("training.trainer", "training.checkpoint", "meter.stalls"):
        monkeypatch.setattr(f"brim.engine.{module}.time", clock)
    monkeypatch.setattr(trainer.PhaseState, "save", slow_save)
    monkeypatch.setattr(Lines, "sleep", clock.sleep)
    return clock


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))


def loss_fn(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]).squeeze(-1) - batch["y"]).square().mean()


def noisy(batch: dict[str, Tensor], generator: torch.Generator) -> None:
    batch["x"] += 0.01 * torch.randn(batch["x"].shape, generator=generator, device=batch["x"].device)


def config(**changes: Any) -> TrainConfig:
    few = TrainConfig(epochs=3, learning_rate=0.02, log_every=1, tensorboard=False, measure_ceiling=False)
    return replace(few, **changes)


def run_for(
    module: nn.Module, source: Lines, out: Path, *, transform: Any = None, evaluate: Any = None, **changes: Any
) -> Any:
    return train(module, loss_fn, source, config=config(**changes), out=out, transform=transform, evaluate=evaluate)


def lines_of(out: Path, phase: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / phase / "metrics.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines_of(out) if "loss" in line]


def weights_of(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, weights_of(first), weights_of(second)))


def val_loss(module: nn.Module) -> dict[str, float]:
    source = Lines()
    return {"val_loss": float(loss_fn(module, {"x": source.x, "y": source.y}))}


# Training


def test_recovers_a_linear_regression(tmp_path: Path) -> None:
    module = linear()
    recipe = config(epochs=60, learning_rate=0.1, weight_decay=0.0, log_every=10)
    report = train(module, loss_fn, Lines(), config=recipe, out=tmp_path, evaluate=val_loss)
    assert torch.allclose(module.weight.squeeze(), TRUTH, atol=1e-3)
    assert report.best_val_loss is not None
    assert report.best_val_loss < 1e-5
    assert (report.epochs, report.steps, report.tier, report.stopped) == (60, 420, "custom", False)
    assert set(report.as_dict()) == KEYS
    json.dumps(report.as_dict())


def test_adamw_takes_the_steps_of_its_formula(tmp_path: Path) -> None:
    """Where every gradient is alike, Adam moves by the learning rate, after the decay; 20 steps, 4 of them warm-up."""
    module, weight = linear(), linear().weight[0, 0].item()
    recipe = config(epochs=4, learning_rate=0.02, weight_decay=0.5, warmup=0.2, clip_norm=None)
    train(module, lambda model, batch: model.weight.sum(), Lines(100, 20), config=recipe, out=tmp_path)
    rates = [0.005, 0.01, 0.015, 0.02, *(0.01 * (1 + math.cos(math.pi * done / 16)) for done in range(16))]
    for rate in rates:
        weight += -0.5 * rate * weight - rate
    assert module.weight[0, 0].item() == pytest.approx(weight, abs=1e-6)
    assert [line["lr"] for line in lines_of(tmp_path)] == pytest.approx(rates)


def test_a_logged_line_has_the_means_since_the_line_before(tmp_path: Path, clock: FakeTime) -> None:
    """Six batches of 16 items and one of 4, each after a wait of 0.125 s; the loss of a batch is its size."""

    def size(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return module(batch["x"]).sum() * 0 + len(batch["x"])

    train(linear(), size, Lines(wait_s=0.125), config=config(epochs=2, log_every=7), out=tmp_path, evaluate=val_loss)
    logged = [line for line in lines_of(tmp_path) if "loss" in line]
    assert [(line["step"], line["epoch"]) for line in logged] == [(7, 0), (14, 1)]
    assert [line["loss"] for line in logged] == pytest.approx([(6 * 16 * 16 + 4 * 4) / 100] * 2)
    assert [line["samples_per_s"] for line in logged] == pytest.approx([100 / (7 * 0.125)] * 2)
    assert [line["step"] for line in lines_of(tmp_path) if "val_loss" in line] == [7, 14]


def test_tensorboard_reads_its_events(tmp_path: Path) -> None:
    """In a process of its own: the package is heavy. A resumed run replaces the steps after its checkpoint."""
    first, second = TensorBoard(tmp_path), TensorBoard(tmp_path)
    first.begin(tmp_path / "unused", 0)
    for step in (1, 200, 70_000):
        first.log({"loss": 1 / step, "lr": 0.1 * step}, step)
    first.end()
    second.begin(tmp_path / "unused", 200)
    second.log({"loss": float("nan"), "Verlust/größter": 1e300}, 300)
    second.end()
    code = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]).Reload()\n"
        "tags = events.Tags()['scalars']\n"
        "print(json.dumps({tag: [[e.step, str(e.value)] for e in events.Scalars(tag)] for tag in tags}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    scalars = json.loads(done.stdout.splitlines()[-1])
    assert [step for step, _ in scalars["loss"]] == [1, 200, 300]
    assert [float(value) for _, value in scalars["loss"][:2]] == pytest.approx([1, 1 / 200])
    assert scalars["loss"][2][1] == "nan"
    assert [float(value) for _, value in scalars["lr"]] == pytest.approx([0.1, 20.0])
    assert scalars["Verlust/größter"] == [[300, "inf"]]


def test_gradients_are_clipped_over_all_parameters() -> None:
    module = linear()
    stepper = Stepper(module, loss_fn, config=config(clip_norm=0.5), device=CPU)
    source = Lines()
    stepper.step({"x": source.x, "y": source.y}, 0, 1e-3)
    norm = torch.stack([param.grad.norm() for param in module.parameters() if param.grad is not None]).norm()
    assert norm == pytest.approx(0.5, rel=1e-4)


def test_early_stopping_waits_for_its_patience(tmp_path: Path) -> None:
    values = iter([3.0, 2.0, 2.5, 2.1, 9.0, 1.0])
    recipe = config(epochs=6, early_stopping_patience=2)
    report = train(
        linear(), loss_fn, Lines(), config=recipe, out=tmp_path, evaluate=lambda _: {"val_loss": next(values)}
    )
    assert (report.epochs, report.best_val_loss, report.stopped_early) == (4, 2.0, True)


def test_best_weights_are_those_of_the_lowest_val_loss(tmp_path: Path) -> None:
    seen: list[list[Tensor]] = []
    values = iter([3.0, 1.0, 2.0])

    def evaluate(module: nn.Module) -> dict[str, float]:
        assert not module.training
        assert not torch.is_grad_enabled()
        seen.append(weights_of(module))
        return {"val_loss": next(values)}

    def training_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert module.training
        return loss_fn(module, batch)

    train(linear(), training_loss, Lines(), config=config(), out=tmp_path, evaluate=evaluate)
    module = linear()
    assert load_weights(module, tmp_path)["epoch"] == 1
    assert all(map(torch.equal, weights_of(module), seen[1]))
    load_weights(module, tmp_path, which="last")
    assert all(map(torch.equal, weights_of(module), seen[2]))


def test_a_val_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    values = iter([math.nan, 2.0, -math.inf, 1.5])
    report = run_for(linear(), Lines(), tmp_path, epochs=4, evaluate=lambda _: {"val_loss": next(values)})
    assert report.best_val_loss == 1.5
    assert load_weights(linear(), tmp_path)["epoch"] == 3


def test_a_checkpoint_is_written_when_its_time_has_come(tmp_path: Path, clock: FakeTime) -> None:
    saved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        save = trainer.PhaseState.save
        patch.setattr(
            trainer.PhaseState, "save", lambda state, log_bytes: saved.append(state.step) or save(state, log_bytes)
        )
        run_for(linear(), Lines(96, wait_s=0.25), tmp_path, epochs=2, checkpoint_every_s=1.25)
    assert saved == [5, 10, 12]  # the last one at the end


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("auto", torch.float32)])
def test_a_cpu_computes_in_the_precision_that_was_asked_for(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = module(batch["x"])
        seen.add(outputs.dtype)
        return (outputs.squeeze(-1).float() - batch["y"]).square().mean()

    train(linear(), loss, Lines(), config=config(precision=precision), out=tmp_path)
    assert seen == {dtype}


def test_a_step_draws_numbers_of_its_own_by_seed_and_phase(tmp_path: Path) -> None:
    def drawn(seed: int, phase: str) -> list[float]:
        seen: list[float] = []
        train(
            linear(), loss_fn, Lines(), config=config(epochs=1, seed=seed), out=tmp_path / str(seed), phase=phase,
            transform=lambda batch, generator: seen.append(torch.rand((), generator=generator).item()),
        )  # fmt: skip
        return seen

    first = drawn(3, "train")
    assert first == [torch.rand((), generator=stream(3, "train", step, device=CPU)).item() for step in range(7)]
    assert len({*first, *drawn(4, "train"), *drawn(3, "other")}) == 3 * 7


def test_the_callers_random_stream_is_left_alone(tmp_path: Path) -> None:
    module = with_dropout()
    before = torch.get_rng_state()
    train(module, loss_fn, Lines(), config=config(), out=tmp_path, transform=noisy)
    assert torch.equal(before, torch.get_rng_state())


# Stop, kill, resume


@pytest.mark.parametrize("stop_at", [4, 7, 10])
def test_a_stopped_run_ends_with_the_same_bits_and_lines(tmp_path: Path, stop_at: int) -> None:
    straight, first, second = with_dropout(), with_dropout(), with_dropout()
    options: dict[str, Any] = {"config": config(log_every=5), "evaluate": val_loss, "transform": noisy}
    train(straight, loss_fn, Lines(), out=tmp_path / "straight", **options)
    asked = iter(range(1, 100))
    report = train(first, loss_fn, Lines(), out=tmp_path / "cut", stop=lambda: next(asked) >= stop_at, **options)
    assert (report.stopped, report.steps) == (True, stop_at)
    report = train(second, loss_fn, Lines(), out=tmp_path / "cut", **options)
    assert (report.stopped, report.steps) == (False, 21)
    assert same(straight, second)
    assert losses_of(tmp_path / "straight") == losses_of(tmp_path / "cut")


def test_after_a_crash_the_lines_behind_the_checkpoint_are_written_anew(tmp_path: Path) -> None:
    recipe = config(epochs=4, checkpoint_every_steps=5)
    straight, resumed, steps = with_dropout(), with_dropout(), iter(range(100))
    train(straight, loss_fn, Lines(), config=recipe, out=tmp_path / "straight", evaluate=val_loss)

    def crash() -> bool:
        return next(steps) == 23 and bool(1 / 0)

    with pytest.raises(ZeroDivisionError):
        train(with_dropout(), loss_fn, Lines(), config=recipe, out=tmp_path / "cut", evaluate=val_loss, stop=crash)
    assert load_checkpoint(tmp_path / "cut/train/last")[1]["step"] == 20
    assert losses_of(tmp_path / "cut")[-1][0] == 24
    train(resumed, loss_fn, Lines(), config=recipe, out=tmp_path / "cut", evaluate=val_loss)
    assert same(straight, resumed)
    assert losses_of(tmp_path / "straight") == losses_of(tmp_path / "cut")


def test_patience_and_the_best_go_on_after_a_stop(tmp_path: Path) -> None:
    values, steps = iter([1.0, 2.0, 1.5, 1.2]), iter(range(1, 100))
    options: dict[str, Any] = {"config": config(epochs=6, early_stopping_patience=2), "out": tmp_path}
    options["evaluate"] = lambda _: {"val_loss": next(values)}
    train(linear(), loss_fn, Lines(), stop=lambda: next(steps) == 17, **options)  # in the third epoch
    report = train(linear(), loss_fn, Lines(), **options)
    assert (report.epochs, report.best_val_loss, report.stopped_early) == (3, 1.0, True)
    assert load_weights(linear(), tmp_path)["epoch"] == 0


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first, again = linear(), linear()
    train(first, loss_fn, Lines(), config=config(), out=tmp_path, evaluate=val_loss)
    report = train(again, loss_fn, Lines(), config=config(), out=tmp_path, evaluate=val_loss)
    assert (report.steps, len(losses_of(tmp_path))) == (21, 21)
    assert report.samples_per_s > 0
    assert same(first, again)


def test_without_resume_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(linear(), loss_fn, Lines(), config=config(), out=tmp_path)
    with pytest.raises(CheckpointError, match="holds a checkpoint") as failure:
        train(linear(), loss_fn, Lines(), config=config(), out=tmp_path, resume=False)
    assert failure.value.code == "occupied"


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (Lines(), {"learning_rate": 0.5}, "learning_rate was 0.02 and is 0.5"),
        (Lines(), {"weight_decay": 0.5}, "weight_decay was 0.01 and is 0.5"),
        (Lines(), {"warmup": 0.2}, "warmup was 0.05 and is 0.2"),
        (Lines(), {"clip_norm": None}, "clip_norm was 1.0 and is None"),
        (Lines(), {"precision": "bf16"}, "precision was auto and is bf16"),
        (Lines(), {"seed": 9}, "seed was 0 and is 9"),
        (Lines(90), {}, "num_items was 100 and is 90"),
        (Lines(100, 15), {}, "batch_size was 16 and is 15"),
    ],
)
def test_resume_refuses_another_recipe_or_source(
    tmp_path: Path, source: Lines, changes: dict[str, Any], message: str
) -> None:
    train(linear(), loss_fn, Lines(), config=config(epochs=1), out=tmp_path)
    with pytest.raises(CheckpointError, match=message):
        train(linear(), loss_fn, source, config=config(epochs=1, **changes), out=tmp_path)


def test_progress_is_told_twice_a_second_with_the_time_that_is_left(tmp_path: Path, clock: FakeTime) -> None:
    told: list[tuple[float, TrainProgress]] = []
    train(
        linear(), loss_fn, Lines(96, wait_s=0.125), config=config(epochs=2), out=tmp_path,
        progress=lambda at: told.append((clock(), at)),
    )  # fmt: skip
    assert [at_s - 100 for at_s, _ in told] == [0, 0.5, 1, 1.5, 2]  # the last after a checkpoint
    assert [(at.step, at.steps) for _, at in told] == [(0, 12), (4, 12), (8, 12), (12, 12), (12, 12)]
    assert [at.eta_s for _, at in told] == pytest.approx([math.inf, 1.0, 0.5, 0.0, 0.0])
    assert [at.samples_per_s for _, at in told[1:]] == pytest.approx([128] * 4)
    assert told[-1][1].seconds == 12 * 0.125


# What goes wrong


def broken_at(step: int, field: str | None = None) -> Any:
    class Broken(Lines):
        def epoch(self, number: int, start_batch: int = 0) -> Iterator[dict[str, Tensor]]:
            for index, batch in enumerate(super().epoch(number, start_batch), start_batch):
                if field and number * self.num_batches + index == step:
                    batch[field][0] = torch.nan
                yield batch

    return Broken()


def test_nan_in_the_data_names_step_and_field_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    recipe = config(checkpoint_every_steps=5)
    with pytest.raises(TrainingDiverged, match=r'step 8 \(epoch 1, batch 1\): field "y".*checkpoint of step 5 stays'):
        train(linear(), loss_fn, broken_at(8, "y"), config=recipe, out=tmp_path)
    groups, state = load_checkpoint(tmp_path / "train/last")
    assert state["step"] == 5
    assert all(bool(tensor.isfinite().all()) for tensor in groups["model"].values())


def test_a_transform_that_makes_nan_is_named(tmp_path: Path) -> None:
    def spoil(batch: dict[str, Tensor], generator: torch.Generator) -> None:
        batch["x"].log_()

    with pytest.raises(TrainingDiverged, match='transform makes NaN or Inf of field "x"'):
        train(linear(), loss_fn, Lines(), config=config(), out=tmp_path, transform=spoil)


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    def explode(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_fn(module, batch)
        if module.training and state["step"] == 6:  # a finite loss with an infinite gradient
            loss = loss + (next(module.parameters()).sum() * 0).sqrt().nan_to_num()
        state["step"] += 1
        return loss

    state = {"step": 0}
    with pytest.raises(TrainingDiverged, match="a weight is NaN or Inf at step 6"):
        train(linear(), explode, Lines(), config=config(checkpoint_every_steps=1, clip_norm=None), out=tmp_path)
    assert load_checkpoint(tmp_path / "train/last")[1]["step"] == 6


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_effective_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = linear(), linear()
    train(whole, loss_fn, Lines(), config=config(), out=tmp_path / "whole")
    with inject_oom(above=5):
        report = train(parts, loss_fn, Lines(), config=config(), out=tmp_path / "parts")
    assert report.micro_batch == 4
    assert caplog.text.count("did not fit") == 1
    for mine, other in zip(weights_of(whole), weights_of(parts), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)
    pairs = zip(losses_of(tmp_path / "whole"), losses_of(tmp_path / "parts"), strict=True)
    assert all(mine[1] == pytest.approx(other[1], rel=1e-4) for mine, other in pairs)


def test_misuse_is_a_clear_error(tmp_path: Path) -> None:
    recipe = config(early_stopping_patience=1)
    with pytest.raises(ConfigError, match="needs evaluate"):
        train(linear(), loss_fn, Lines(), config=recipe, out=tmp_path)
    with pytest.raises(ConfigError, match="without val_loss"):
        train(linear(), loss_fn, Lines(), config=recipe, out=tmp_path, evaluate=lambda _: {"loss": 1.0})
    with pytest.raises(ConfigError, match="fp16"):
        train(linear(), loss_fn, Lines(), config=config(precision="fp16"), out=tmp_path)


# Measuring


def test_the_share_of_the_ceiling_is_known_and_measuring_it_changes_no_bit(tmp_path: Path, clock: FakeTime) -> None:
    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        clock.sleep(0.005)
        return loss_fn(module, batch)

    measured, plain, lines = with_dropout(), with_dropout(), Lines(96, wait_s=0.015)
    recipe = config(epochs=40, log_every=50, measure_ceiling=True)
    report = train(measured, loss, lines, config=recipe, out=tmp_path / "a", transform=noisy)
    unmeasured = replace(recipe, measure_ceiling=False)
    train(plain, loss, lines, config=unmeasured, out=tmp_path / "b", transform=noisy)
    assert report.ceiling_share == pytest.approx(0.25)  # a step takes 5 ms, a batch with its wait 20
    assert report.ceiling_spread == pytest.approx(0, abs=1e-6)
    assert report.busy_share == pytest.approx(0.25)
    assert report.samples_per_s == pytest.approx(16 / 0.02)
    assert report.epoch_seconds == pytest.approx(6 * 0.02)
    assert report.as_dict()["overhead"]["ceiling"] > 0
    assert same(measured, plain)


def test_a_report_accounts_for_every_second(tmp_path: Path, clock: FakeTime) -> None:
    def evaluate(module: nn.Module) -> dict[str, float]:
        clock.sleep(1)
        return {"val_loss": 1.0}

    with accounting(Account(clock=clock)):
        report = run_for(linear(), Lines(wait_s=0.25), tmp_path, checkpoint_every_steps=2, evaluate=evaluate)
    spent = report.as_dict()
    assert spent["wall_s"] == clock() - 100 == 21 * 0.25 + 3 + 11 * 0.5
    assert spent["work_s"] == 21 * 0.25
    assert spent["overhead"] == {"checkpoint": 11 * 0.5, "validation": 3}
    assert spent["startup_s"] == 0  # a call from Python: nothing was started for it


def test_a_starved_loader_is_named(tmp_path: Path, clock: FakeTime) -> None:
    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        clock.sleep(0.005)
        return loss_fn(module, batch)

    report = train(linear(), loss, Lines(wait_s=0.02), config=config(measure_ceiling=True), out=tmp_path)
    assert report.diagnosis[0].startswith("data: 80%")
    assert report.waiting["data"] == pytest.approx(21 * 0.02)
    assert report.busy_share == pytest.approx(0.2)
    assert report.ceiling_share is None

"""A phase of a run: one call of the trainer, or, where that is done already, its weights and what was reported."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brim.engine.device import stream
from brim.engine.training import Evaluate, LossFn, Ranks, TrainProgress, Transform, load_weights
from brim.engine.training import train as run_trainer
from brim.errors import CheckpointError
from brim.sequences.config import SequenceTraining
from brim.sequences.evaluation.encode import Statistics
from brim.sequences.evaluation.load import REPORT, read_json, write_json
from brim.sequences.training.data import Batches, SequenceData, Source
from brim.sequences.training.splits import Split

log = logging.getLogger("brim")

Told = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all phases of a run share."""

    run: Path
    data: SequenceData
    split: Split
    config: SequenceTraining
    device: torch.device
    batches: Batches
    statistics: Statistics
    ranks: Ranks
    progress: Told | None = None
    stop: Callable[[], bool] | None = None

    def seed(self, *name: str | int) -> int:
        """A number of its own for each purpose."""
        return stream(self.config.seed, *name, device=torch.device("cpu")).initial_seed() % 2**31

    def view(self, rows: Tensor, phase: str, label: Tensor | None = None) -> Source:
        """Shuffled batches for a phase."""
        return self.batches.view(rows, label=label, seed=self.seed(phase, "order"))

    def plain(self, rows: Tensor) -> Source | None:
        """Batches in a fixed order of what this rank holds of these rows; None where that is nothing."""
        return self.batches.plain(rows)

    def new(self, make: Callable[[], nn.Module], *name: str | int) -> Any:
        """A module with first weights that depend on the seed and the name alone, on the device."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed(*name, "weights"))
            return make().to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """What a phase came to."""

    phase: str
    epochs: int
    samples: int  # trained on
    seconds: float  # of training alone
    tier: str
    padding_share: float
    ceiling_share: float | None
    busy_share: float
    peak_bytes: int
    val_loss: float | None
    stopped: bool = False


def run_phase(
    job: Job,
    name: str,
    module: nn.Module,
    loss_fn: LossFn,
    source: Source,
    *,
    epochs: int,
    transform: Transform | None = None,
    evaluate: Evaluate | None = None,
) -> PhaseReport:
    """Train the module in place; it ends with the best weights where it was evaluated, else with the last."""
    which: Literal["best", "last"] = "last" if evaluate is None else "best"
    file = job.run / name / REPORT
    done = job.ranks.from_main(lambda: _read_report(file) if file.is_file() else None)
    if done is not None:
        _take_weights(job, module, name, which)
        return done
    log.info("%s: %d sequences, %d epochs", name, source.num_items, epochs)
    with _autotuner(job.config.autotune):
        report = run_trainer(
            module, loss_fn, source, config=job.config.recipe(epochs), out=job.run, phase=name, device=job.device,
            transform=transform, evaluate=evaluate, progress=job.progress, stop=job.stop, ranks=job.ranks,
        )  # fmt: skip
    samples = round(report.steps * source.num_items / source.num_batches)
    seconds = samples / report.samples_per_s if report.samples_per_s > 0 else 0.0
    found = PhaseReport(
        phase=name, epochs=report.epochs, samples=samples, seconds=seconds, tier=report.tier,
        padding_share=source.padding_share, ceiling_share=report.ceiling_share, busy_share=report.busy_share,
        peak_bytes=report.peak_bytes, val_loss=report.best_val_loss, stopped=report.stopped,
    )  # fmt: skip
    if not found.stopped:
        _take_weights(job, module, name, which)
        if job.ranks.main:
            write_json(file, asdict(found))
    return found


def _take_weights(job: Job, module: nn.Module, name: str, which: Literal["best", "last"]) -> None:
    """Put the weights of a phase into the module; rank 0 reads them for all."""
    if job.ranks.main:
        load_weights(module, job.run, name, which)
    if not job.ranks.alone:
        weights = job.ranks.from_main(lambda: {key: value.cpu() for key, value in module.state_dict().items()})
        module.load_state_dict(weights)


@contextmanager
def _autotuner(enabled: bool) -> Iterator[None]:
    """Let cuDNN try its algorithms, or not; afterwards as before. A CPU does not notice."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _read_report(file: Path) -> PhaseReport:
    values = read_json(file)
    try:
        return PhaseReport(**values)
    except TypeError as failure:
        raise CheckpointError(f"{file} was altered ({failure}); restore it, or choose another --out") from failure


def together(phases: Sequence[PhaseReport], share: str) -> float | None:
    """A share over all phases, each by its time; phases that did not measure it do not count."""
    known = [(getattr(phase, share), phase.seconds) for phase in phases if getattr(phase, share) is not None]
    total = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / total if total > 0 else None

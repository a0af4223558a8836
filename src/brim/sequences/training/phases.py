"""A phase of a run: one call of the trainer, or, if it is done already, its weights and its report."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brim.engine.device import stream
from brim.engine.training import Batch, BatchSource, Evaluate, LossFn, Ranks, TrainProgress, Transform, load_weights
from brim.engine.training import train as run_trainer
from brim.errors import CheckpointError
from brim.sequences.batches import SequenceBatches, augment
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import Sequences, SequenceSplit
from brim.sequences.evaluation import REPORT, FeatureStatistics, read_json, write_json
from brim.sequences.model import Encoder

log = logging.getLogger("brim")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRun:
    """What all phases of a run share."""

    out: Path
    data: Sequences
    split: SequenceSplit
    config: SequenceTraining
    batches: SequenceBatches
    statistics: FeatureStatistics  # on the device
    ranks: Ranks
    progress: Callable[[TrainProgress], None] | None = None
    stop: Callable[[], bool] | None = None

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def seed(self, *name: str | int) -> int:
        """A separate seed for each purpose."""
        return stream(self.config.seed, *name, device=torch.device("cpu")).initial_seed() % 2**31

    def view(self, rows: Tensor, phase: str, label: Tensor | None = None) -> BatchSource:
        """Shuffled batches for a phase."""
        return self.batches.view(rows, label=label, seed=self.seed(phase, "order"))

    def new(self, make: Callable[[], nn.Module], *name: str | int) -> Any:
        """A module on the device whose initial weights depend only on the seed and the name."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed(*name, "weights"))
            return make().to(self.device)

    def new_encoder(self, *name: str | int) -> Encoder:
        """An encoder that normalises by the statistics of the training items."""
        encoder: Encoder = self.new(lambda: Encoder(self.config.shape(self.data.dim)), *name)
        encoder.set_statistics(*self.statistics)
        return encoder

    def augmented(self) -> Transform | None:
        """Augments a batch in place; None if the settings ask for no augmentation."""
        config, (mean, std) = self.config.augmentation, self.statistics
        if config is None:
            return None

        def change(batch: Batch, rng: torch.Generator) -> Batch:
            length = augment(batch["frames"], batch["length"], rng, config, mean=mean, std=std)
            return {**batch, "length": length}

        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
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
    run: SequenceRun,
    name: str,
    module: nn.Module,
    loss_fn: LossFn,
    source: BatchSource,
    *,
    epochs: int,
    transform: Transform | None = None,
    evaluate: Evaluate | None = None,
) -> PhaseReport:
    """Train the module in place; it ends with the best weights if it was evaluated, else with the last."""
    which: Literal["best", "last"] = "last" if evaluate is None else "best"
    file = run.out / name / REPORT
    done = run.ranks.from_main(lambda: _read_report(file) if file.is_file() else None)
    if done is not None:
        _take_weights(run, module, name, which)
        return done
    log.info("%s: %d sequences, %d epochs", name, source.num_items, epochs)
    with cudnn_autotune(run.config.autotune):
        report = run_trainer(
            module, loss_fn, source, config=run.config.recipe(epochs), out=run.out, phase=name, device=run.device,
            transform=transform, evaluate=evaluate, progress=run.progress, stop=run.stop, ranks=run.ranks,
        )  # fmt: skip
    samples = round(report.steps * source.num_items / source.num_batches)
    phase = PhaseReport(
        phase=name, epochs=report.epochs, samples=samples, tier=report.tier, padding_share=source.padding_share,
        seconds=samples / report.samples_per_s if report.samples_per_s > 0 else 0.0,
        ceiling_share=report.ceiling_share, busy_share=report.busy_share, peak_bytes=report.peak_bytes,
        val_loss=report.best_val_loss, stopped=report.stopped,
    )  # fmt: skip
    if not phase.stopped:
        _take_weights(run, module, name, which)
        if run.ranks.main:
            write_json(file, asdict(phase))
    return phase


def _take_weights(run: SequenceRun, module: nn.Module, name: str, which: Literal["best", "last"]) -> None:
    """Load the weights of a phase into the module; rank 0 reads them for all."""
    if run.ranks.main:
        load_weights(module, run.out, name, which)
    if not run.ranks.alone:
        weights = run.ranks.from_main(lambda: {key: value.cpu() for key, value in module.state_dict().items()})
        module.load_state_dict(weights)


@contextmanager
def cudnn_autotune(enabled: bool) -> Iterator[None]:
    """Let cuDNN benchmark its algorithms for every new shape, or not; the previous setting is restored."""
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
        raise CheckpointError(
            f"{file} was altered ({failure})", hint="restore it, or choose another {out}"
        ) from failure

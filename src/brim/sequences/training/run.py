"""Training on sequences: split, measure, train with or without labels, score on the items held out.

A run is a directory, described in evaluation/runs.py; every phase of it is a call of the trainer. A killed or stopped
run continues from its last checkpoint, and on a CPU ends with the same bits.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.rows import Buckets
from brim.engine.training import BatchSource, Ranks, TrainProgress, check_enough, joined, locked, resolve_precision
from brim.errors import CheckpointError, ConfigError
from brim.sequences.batches import open_batches
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import CountProgress, Sequences, SequenceSplit, check_labels, open_sequences, split
from brim.sequences.evaluation import (
    REPORT,
    RUN,
    STATISTICS,
    WEIGHTS,
    FeatureStatistics,
    ScoresByName,
    check_free,
    describe,
    measure,
    read_json,
    read_tensors,
    score,
    write_json,
    write_tensors,
)
from brim.sequences.model import Network
from brim.sequences.training.phases import PhaseReport, SequenceRun
from brim.sequences.training.self_supervised import train_self_supervised
from brim.sequences.training.supervised import InitialEncoder, load_initial_encoder, train_supervised

log = logging.getLogger("brim")

_KEYS = (
    "run", "mode", "samples_per_s", "padding_share", "tier", "ceiling_share", "busy_share", "scores", "peak_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReport:
    """Report of a run; its rates are over all phases together.

    samples_per_s is all samples over all time in training; a sample of an encoder phase is one sequence, of which two
    views go through the network. ceiling_share and busy_share are means over the phases weighted by time, tier and
    padding_share are those of the last phase, peak_bytes is the largest. Scores are on labelled items held out.
    """

    run: str
    mode: str
    samples_per_s: float
    padding_share: float | None  # None: stopped before the first phase
    tier: str
    ceiling_share: float | None  # None: not measured
    busy_share: float | None
    scores: ScoresByName | None  # None: no labelled item was held out, or training is not done
    peak_bytes: int
    phases: tuple[PhaseReport, ...] = ()
    stopped: bool = False  # by request; resume continues

    def as_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _KEYS}


def train(
    corpus: Path | str,
    out: Path | str,
    config: SequenceTraining | None = None,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Callable[[TrainProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> SequenceReport:
    """Train on a packed corpus, or on a folder of .npy files, and leave the run in `out`.

    resume continues the run in `out`, begun with the same corpus and config. Everything is checked before anything is
    written. Under torchrun all its ranks train as one.
    """
    config, out = config or SequenceTraining(), Path(out)
    with joined(device) as ranks, ExitStack() as stack:
        resolve_precision(config.precision, ranks.device)
        data = open_sequences(corpus)
        parts = split(data.labels, data.split, config, name=str(data.path))
        check_labels(data.labels, data.classes, parts, config, str(data.path))
        check_enough(len(parts.train), ranks, "sequences")
        if config.variants and not ranks.alone:
            raise ConfigError(
                f"needs a single rank, there are {ranks.size}", field="variants", value=config.variants, code="conflict"
            )
        Buckets(data.lengths, config.buckets())  # raises if the longest sequence exceeds max_frames
        initial = load_initial_encoder(config, data, parts)
        about = describe(data, config, parts, initial and initial.identity)
        if not ranks.main:
            progress = None
        again = resume or ranks.restarted
        done = ranks.from_main(lambda: _begin(stack, out, about, data, again, progress))
        if done is not None:
            return done
        if ranks.main and bool((data.labels >= 0).any()) and not bool((data.labels[parts.held_out] >= 0).any()):
            log.warning("%s: no labelled sequence is held out, so there are no scores", data.path)
        return _train(data, parts, config, initial, out, ranks, progress, stop)


def _begin(
    stack: ExitStack,
    out: Path,
    about: Mapping[str, Any],
    data: Sequences,
    resume: bool,
    progress: Callable[[TrainProgress], None] | None,
) -> SequenceReport | None:
    """Lock `out` until the stack ends; returns the report if the run is done already."""
    check_free(out, about, resume)
    data.verify(_preparing(progress))
    stack.enter_context(locked(out))
    check_free(out, about, resume)  # another process may have been first
    if (out / REPORT).is_file():
        return _read_report(out)
    if not (out / RUN).is_file():
        write_json(out / RUN, about)
    return None


def _train(
    data: Sequences,
    parts: SequenceSplit,
    config: SequenceTraining,
    initial: InitialEncoder | None,
    out: Path,
    ranks: Ranks,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> SequenceReport:
    several = None if ranks.alone else ranks
    with open_batches(data, config, ranks.device, None, several, _own(data, parts, ranks)) as batches:
        mean, std = _statistics(out, batches.plain(parts.train), ranks)
        run = SequenceRun(
            out=out, data=data, split=parts, config=config, batches=batches, ranks=ranks, progress=progress, stop=stop,
            statistics=FeatureStatistics(mean.to(ranks.device), std.to(ranks.device)),
        )  # fmt: skip
        module: Network
        if config.mode == "supervised":
            module, phases = train_supervised(run, initial)
        else:
            module, phases = train_self_supervised(run)
        if phases[-1].stopped:
            return _report(run, phases, None)
        if ranks.main:
            write_tensors(out / WEIGHTS, module.state_dict(), {"mode": config.mode})
        report = _report(run, phases, score(module, batches, data, parts, several))
    if ranks.main:
        write_json(out / REPORT, asdict(report))
    return report


def _own(data: Sequences, parts: SequenceSplit, ranks: Ranks) -> Tensor | None:
    """(n,) bool: every N-th sequence of each part of the split, which this rank holds; None: all of them."""
    if ranks.alone:
        return None
    own = torch.zeros(len(data), dtype=torch.bool)
    for part in parts:
        own[part[ranks.rank :: ranks.size]] = True
    return own


def _statistics(out: Path, source: BatchSource | None, ranks: Ranks) -> FeatureStatistics:
    """Feature statistics of the training items; stored, so that a resumed run has exactly the same."""
    file = out / STATISTICS
    stored = ranks.from_main(lambda: _read_statistics(file))
    if stored is not None:
        return stored
    statistics = measure(source, ranks.device, ranks)
    if ranks.main:
        write_tensors(file, statistics._asdict())
    return statistics


def _read_statistics(file: Path) -> FeatureStatistics | None:
    if not file.is_file():
        return None
    tensors = read_tensors(file)
    if set(tensors) != set(FeatureStatistics._fields):
        raise CheckpointError(f"{file} holds {sorted(tensors)}, expected mean and std", hint="choose another {out}")
    return FeatureStatistics(**tensors)


# Report


def _report(run: SequenceRun, phases: Sequence[PhaseReport], scores: ScoresByName | None) -> SequenceReport:
    seconds = sum(phase.seconds for phase in phases)
    return SequenceReport(
        run=str(run.out), mode=run.config.mode, scores=scores, phases=tuple(phases), stopped=phases[-1].stopped,
        samples_per_s=sum(phase.samples for phase in phases) / seconds if seconds > 0 else 0.0,
        padding_share=phases[-1].padding_share, tier=phases[-1].tier,
        ceiling_share=_mean_share(phases, "ceiling_share"), busy_share=_mean_share(phases, "busy_share"),
        peak_bytes=max(phase.peak_bytes for phase in phases),
    )  # fmt: skip


def _mean_share(phases: Sequence[PhaseReport], share: str) -> float | None:
    """Mean over the phases that measured it, weighted by time."""
    known = [(getattr(phase, share), phase.seconds) for phase in phases if getattr(phase, share) is not None]
    total = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / total if total > 0 else None


def _read_report(out: Path) -> SequenceReport:
    values = read_json(out / REPORT)
    try:
        phases = tuple(PhaseReport(**phase) for phase in values.pop("phases"))
        return SequenceReport(**{**values, "run": str(out)}, phases=phases)
    except (KeyError, TypeError) as failure:
        raise CheckpointError(f"{out / REPORT} was altered ({failure}); restore it, or train again") from failure


def _preparing(progress: Callable[[TrainProgress], None] | None) -> CountProgress | None:
    """Reports verification as progress of a phase "prepare"."""
    if progress is None:
        return None
    began_s = time.perf_counter()

    def report(done: int, total: int) -> None:
        rate = done / max(time.perf_counter() - began_s, 1e-9)
        progress(
            TrainProgress(
                phase="prepare", epoch=0, epochs=0, step=done, steps=total, loss=None, samples_per_s=0.0,
                eta_s=(total - done) / rate,
            )
        )  # fmt: skip

    return report

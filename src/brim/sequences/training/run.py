"""Training on sequences: split, measure, train with or without labels, score on the items held out.

A run is a directory, described in evaluation/runs.py; every phase of it is a call of the trainer. A killed or stopped
run continues from its last checkpoint, and on a CPU ends with the same bits.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from brim.engine.meter import CeilingShare, Spent, accounting, within
from brim.engine.networks import find_source
from brim.engine.rows import Buckets
from brim.engine.training import (
    BatchSource,
    Ranks,
    TrainProgress,
    check_enough,
    joined,
    locked,
    read_json,
    resolve_precision,
    write_hub,
    write_json,
)
from brim.errors import CheckpointError, ConfigError
from brim.sequences.batches import SequenceBatches
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import (
    CountProgress,
    PackingStopped,
    PackProgress,
    Sequences,
    SequenceSplit,
    check_labels,
    open_sequences,
    split_sequences,
)
from brim.sequences.evaluation import (
    REPORT,
    RUN,
    STATISTICS,
    WEIGHTS,
    FeatureStatistics,
    FoldPrediction,
    ScoresByName,
    check_folds,
    check_free,
    cross_validate,
    describe,
    measure,
    predict,
    read_tensors,
    score,
    tensors_of,
    write_tables,
    write_tensors,
)
from brim.sequences.model import make_classifier
from brim.sequences.training.methods import (
    Candidate,
    check_learned,
    for_comparison,
    prepare,
    train_by_method,
)
from brim.sequences.training.phases import (
    InitialEncoder,
    PhaseReport,
    PhaseStopped,
    SequenceRun,
    load_initial_encoder,
)
from brim.sequences.training.unlabelled import train_without_labels

log = logging.getLogger("brim")

_KEYS = (
    "run", "mode", "samples_per_s", "padding_share", "tier", "ceiling_share", "busy_share", "scores",
    "cross_validation", "peak_bytes", "model", "ceiling_spread", "comparison", "warnings",
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
    cross_validation: dict[str, Any] | None = None  # with folds: a FoldReport; scores are its means
    model: str = "cnn_lstm"  # what was kept
    comparison: tuple[Candidate, ...] = ()  # the models that were compared
    warnings: tuple[str, ...] = ()  # about what was learned
    ceiling_spread: float | None = None  # standard deviation of ceiling_share between measurements
    spent: Spent | None = field(
        default=None, compare=False
    )  # of the whole call, or of the command that it is part of; not stored

    def as_dict(self) -> dict[str, Any]:
        """The report for other programs; cross_validation only where there was one."""
        values = {key: getattr(self, key) for key in _KEYS}
        values |= {"comparison": [asdict(row) for row in self.comparison], "warnings": list(self.warnings)}
        if values["cross_validation"] is None:
            del values["cross_validation"]
        return values | (self.spent.as_dict() if self.spent is not None else {})

    @property
    def ceiling_words(self) -> str:
        return CeilingShare(share=self.ceiling_share, spread=self.ceiling_spread).words()


def train(
    corpus: Path | str | Sequences,
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
    with accounting() as account:
        if config.folds is not None:
            report = train_folds(corpus, out, config, device=device, resume=resume, progress=progress, stop=stop)
        else:
            report, _ = _train_one(corpus, out, config, device, resume, progress, stop)
        return replace(report, spent=account.spent())


def _train_one(
    corpus: Path | str | Sequences,
    out: Path,
    config: SequenceTraining,
    device: str,
    resume: bool,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> tuple[SequenceReport, FoldPrediction | None]:
    """The report, and what the sequences held out were scored by, if that was done by this call."""
    with joined(device) as ranks, ExitStack() as stack:
        resolve_precision(config.precision, ranks.device)
        try:
            with within("reading"):
                data = open_sequences(corpus, _packing(progress), stop).with_labels(config.label, config.task)
        except PackingStopped:
            return _merge([], out, config, None), None
        parts = split_sequences(data, for_comparison(config, data))
        check_labels(data.labels, data.classes, parts, config, str(data.path), is_regression=data.targets is not None)
        check_enough(len(parts.train), ranks, "sequences")
        if config.variants and not ranks.alone:
            raise ConfigError(
                f"needs a single rank, there are {ranks.size}", field="variants", value=config.variants, code="conflict"
            )
        if config.network is not None and data.targets is not None:
            raise ConfigError("learns classes, and these labels are numbers", field="network", code="conflict")
        if config.network is not None:
            make_classifier(
                find_source(config.network), data.dim, max(2, len(data.classes))
            )  # before anything is written
        Buckets(data.lengths, config.buckets())  # raises if the longest sequence exceeds max_frames
        used = prepare(config, data, len(parts.train))
        initial = load_initial_encoder(used, data, parts)
        about = describe(data, config, parts, initial and initial.identity, used)
        if not ranks.main:
            progress = None
        again = resume or ranks.restarted
        done = ranks.from_main(lambda: _begin(stack, out, about, data, again, progress))
        if done is not None:
            return done, None
        if ranks.main and bool((data.labels >= 0).any()) and not bool((data.labels[parts.held_out] >= 0).any()):
            log.warning("%s: no labelled sequence is held out, so there are no scores", data.path)
        return _train(data, parts, used, initial, out, ranks, progress, stop)


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
    with within("reading"):
        data.verify(_preparing(progress))
    stack.enter_context(locked(out))
    check_free(out, about, resume)  # another process may have been first
    if (out / REPORT).is_file():
        return _read_report(out)
    if not (out / RUN.name).is_file():
        RUN.write(out, about)
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
) -> tuple[SequenceReport, FoldPrediction | None]:
    began_s = time.perf_counter()
    several, own = None if ranks.alone else ranks, None
    if several is not None:  # every N-th sequence of each part of the split
        own = torch.zeros(len(data), dtype=torch.bool)
        for part in parts:
            own[part[ranks.rank :: ranks.size]] = True
    with SequenceBatches(data, config, ranks.device, None, several, own) as batches:
        with within("reading"):
            mean, std = _statistics(out, batches.plain(parts.train), ranks)
        if ranks.main and bool((std == 0).any()):
            constant = (std == 0).nonzero().flatten().tolist()
            text = "%s: %d of %d features are constant in the training part and tell nothing, such as feature %d"
            log.warning(text, data.path, len(constant), data.dim, constant[0])
        run = SequenceRun(
            out=out, data=data, split=parts, config=config, batches=batches, ranks=ranks, progress=progress, stop=stop,
            statistics=FeatureStatistics(mean.to(ranks.device), std.to(ranks.device)),
        )  # fmt: skip
        try:
            if config.mode == "supervised":
                outcome = train_by_method(run, initial, began_s)
            else:
                outcome = train_without_labels(run)
        except PhaseStopped:
            return _report(run, None), None
        module = outcome.module.to(ranks.device)
        with within("validation"):
            scores, held_out = score(module, batches, data, parts, several)
        warnings = check_learned(run, outcome, scores) if config.mode == "supervised" and ranks.main else []
        for sentence in warnings:
            log.warning("%s: %s", out, sentence)
        if ranks.main:
            write_tensors(out / WEIGHTS, tensors_of(module), {"mode": config.mode})
        report = replace(
            _report(run, scores),
            model=outcome.model, comparison=tuple(outcome.comparison), warnings=tuple(warnings),
        )  # fmt: skip
    if ranks.main:
        title = f"brim sequences, {report.model}"
        write_hub(out, out / WEIGHTS, title=title, metrics=scores or {}, about=read_json(out / RUN.name))
        write_json(out / REPORT, _stored(report))
    return report, held_out


def _statistics(out: Path, source: BatchSource | None, ranks: Ranks) -> FeatureStatistics:
    """Feature statistics of the training items; stored, so that a resumed run has exactly the same."""
    file = out / STATISTICS
    stored = ranks.from_main(lambda: read_tensors(file) if file.is_file() else None)
    if stored is None:
        statistics = measure(source, ranks.device, ranks)
        if ranks.main:
            write_tensors(file, statistics._asdict())
        return statistics
    if set(stored) != set(FeatureStatistics._fields):
        raise CheckpointError(f"{file} holds {sorted(stored)}, expected mean and std", hint="choose another {out}")
    return FeatureStatistics(**stored)


# Folds


def train_folds(
    corpus: Path | str | Sequences,
    out: Path,
    config: SequenceTraining,
    *,
    device: str,
    resume: bool,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> SequenceReport:
    """Cross-validate: a run in out/folds for each fold and seed, and a report of them all."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ConfigError(
            f"needs a single process, there are {ranks}", field="folds", value=config.folds, code="conflict",
            hint="start it without torchrun",
        )  # fmt: skip
    try:
        data = open_sequences(corpus, _packing(progress), stop).with_labels(config.label, config.task)
    except PackingStopped:
        return _merge([], out, config, None)
    plan = check_folds(data, config)
    rows = (data.labels >= 0).nonzero().flatten()
    none = torch.empty(0, dtype=torch.int64)
    about = describe(data, config, SequenceSplit(rows, none, none)) | {"folds": [fold.name for fold in plan.folds]}
    check_free(out, about, resume)
    if (out / REPORT).is_file():
        return _read_report(out)
    reports: list[SequenceReport] = []

    def train_one(fold: Sequences, path: Path, single: SequenceTraining, words: str) -> FoldPrediction | None:
        log.info("%s", words)
        told = None if progress is None else _within(progress, words)
        report, held_out = _train_one(fold, path, single, device, True, told, stop)
        reports.append(report)
        if report.stopped or held_out is not None:
            return held_out
        held = torch.tensor([row for row, part in enumerate(fold.split) if part == "test"])
        return predict(path, fold, held, device=device)

    with locked(out):
        if not (out / RUN.name).is_file():
            RUN.write(out, about)
        result = cross_validate(data, out, config, train_one)
        report = _merge(reports, out, config, None if result is None else result.report.as_dict())
        if result is not None:
            report = replace(report, scores=result.report.means)
            write_tables(out, data, result)
            write_json(out / REPORT, _stored(report))
    return report


def _within(progress: Callable[[TrainProgress], None], words: str) -> Callable[[TrainProgress], None]:
    return lambda one: progress(one if one.phase == "prepare" else replace(one, phase=f"{words}, {one.phase}"))


def _merge(
    reports: Sequence[SequenceReport], out: Path, config: SequenceTraining, result: dict[str, Any] | None
) -> SequenceReport:
    """One report of all folds that this call trained; their rates weighted equally."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return SequenceReport(
        run=str(out), mode=config.mode, scores=None, stopped=result is None, cross_validation=result,
        samples_per_s=mean([report.samples_per_s for report in reports]) or 0.0,
        padding_share=mean([report.padding_share for report in reports]),
        tier=reports[-1].tier if reports else "none",
        ceiling_share=mean([report.ceiling_share for report in reports]),
        busy_share=mean([report.busy_share for report in reports]),
        peak_bytes=max((report.peak_bytes for report in reports), default=0),
        model=", ".join(dict.fromkeys(report.model for report in reports)) or "none",
        comparison=_mean_comparison(reports),
        warnings=tuple(f"{Path(report.run).name}: {text}" for report in reports for text in report.warnings),
    )  # fmt: skip


def _mean_comparison(reports: Sequence[SequenceReport]) -> tuple[Candidate, ...]:
    """Each model's mean over the folds in which it was tried; one that was not tried has no weight there."""
    rows: dict[str, list[Candidate]] = {}
    for report in reports:
        for row in report.comparison:
            rows.setdefault(row.model, []).append(row)

    def mean(own: list[Candidate]) -> Candidate:
        losses = [row.loss for row in own if row.loss is not None]
        return replace(
            own[0],
            score=sum(row.score for row in own) / len(own),
            loss=sum(losses) / len(losses) if losses else None,
            weight=sum(row.weight for row in own) / len(reports),
        )

    return tuple(map(mean, rows.values()))


# Report


def _report(run: SequenceRun, scores: ScoresByName | None) -> SequenceReport:
    phases = [phase for phase in run.reports if phase.phase != "rocket"] or run.reports
    seconds = sum(phase.seconds for phase in phases)
    return SequenceReport(
        run=str(run.out), mode=run.config.mode, scores=scores, phases=tuple(phases), stopped=phases[-1].stopped,
        samples_per_s=sum(phase.samples for phase in phases) / seconds if seconds > 0 else 0.0,
        padding_share=phases[-1].padding_share, tier=phases[-1].tier,
        ceiling_share=_mean_share(phases, "ceiling_share"), busy_share=_mean_share(phases, "busy_share"),
        ceiling_spread=max((p.ceiling_spread for p in phases if p.ceiling_spread is not None), default=None),
        peak_bytes=max(phase.peak_bytes for phase in phases),
    )  # fmt: skip


def _mean_share(phases: Sequence[PhaseReport], share: str) -> float | None:
    """Mean over the phases that measured it, weighted by time."""
    known = [(getattr(phase, share), phase.seconds) for phase in phases if getattr(phase, share) is not None]
    total = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / total if total > 0 else None


def _stored(report: SequenceReport) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name != "spent"}


def _read_report(out: Path) -> SequenceReport:
    values = read_json(out / REPORT)
    try:
        phases = tuple(PhaseReport(**phase) for phase in values.pop("phases"))
        values |= {
            "run": str(out),
            "comparison": tuple(Candidate(**row) for row in values.get("comparison", ())),
            "warnings": tuple(values.get("warnings", ())),
        }
        return SequenceReport(**values, phases=phases)
    except (KeyError, TypeError) as failure:
        raise CheckpointError(f"{out / REPORT} was altered ({failure}); restore it, or train again") from failure


def _packing(progress: Callable[[TrainProgress], None] | None) -> Callable[[PackProgress], None] | None:
    """Reports packing as progress of a phase "pack"; a step is a megabyte."""
    if progress is None:
        return None

    def report(packed: PackProgress) -> None:
        done, total = packed.done_bytes >> 20, packed.total_bytes >> 20
        progress(
            TrainProgress(
                phase="pack",
                epoch=0,
                epochs=0,
                step=done,
                steps=total,
                loss=None,
                samples_per_s=0.0,
                eta_s=packed.eta_s,
            )
        )

    return report


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

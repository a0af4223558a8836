"""From sequences to a network: split, measure, train without labels or on them, score on what was held out.

A run is a directory, which run.py describes; every phase of it is a call of the trainer. Killed or stopped in any of
them it goes on from there, and on a CPU ends with the same bits.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brim.engine.rows import Buckets
from brim.engine.training import Evaluate, Ranks, TrainProgress, check_enough, joined, locked, resolve_precision
from brim.errors import CheckpointError, ConfigError
from brim.sequences.config import SequenceTraining
from brim.sequences.evaluation.encode import Statistics, measure
from brim.sequences.evaluation.load import (
    REPORT,
    RUN,
    STATISTICS,
    WEIGHTS,
    as_one,
    check_free,
    describe,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from brim.sequences.evaluation.run import Scores, score
from brim.sequences.model.network import Classifier, Encoder, Network
from brim.sequences.training.data import Counted, SequenceData, Source, open_data
from brim.sequences.training.phases import Job, PhaseReport, Told, run_phase, together
from brim.sequences.training.selftrain import augmented, classification, self_train
from brim.sequences.training.splits import Split, check_labels, split
from brim.sequences.training.start import Start, find_start
from brim.sequences.training.variants import with_variants

__all__ = ["SequenceReport", "SequenceTraining", "train"]

log = logging.getLogger("brim")

_KEYS = (
    "run", "mode", "samples_per_s", "padding_share", "tier", "ceiling_share", "busy_share", "scores", "peak_bytes",
)  # fmt: skip
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReport:
    """What a run did; its rates are over all phases together.

    samples_per_s is all samples over all time in training; a sample of an encoder phase is one sequence, of which two
    views go through the network. ceiling_share and busy_share are means over the phases by their time, tier and
    padding_share are those of the last phase, peak_bytes is the largest. Scores are on labelled items held out.
    """

    run: str
    mode: str
    samples_per_s: float
    padding_share: float | None  # None: stopped before the first phase
    tier: str
    ceiling_share: float | None  # None: not measured
    busy_share: float | None
    scores: Scores | None  # None: no labelled item was held out, or training is not done
    peak_bytes: int
    phases: tuple[PhaseReport, ...] = ()
    stopped: bool = False  # by request; resume goes on

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        return {key: getattr(self, key) for key in _KEYS}


def train(
    corpus: Path | str,
    out: Path | str,
    config: SequenceTraining | None = None,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Told | None = None,
    stop: Callable[[], bool] | None = None,
) -> SequenceReport:
    """Train on a packed corpus, or on a folder of .npy files, and leave the run in `out`.

    resume continues the run that is there, begun with the same corpus and config. Everything that can be refused is
    refused before anything is written. Under torchrun all its ranks train as one.
    """
    config, out = config or SequenceTraining(), Path(out)
    with joined(device) as ranks, ExitStack() as stack:
        resolve_precision(config.precision, ranks.device)
        data = open_data(corpus)
        found = split(data.labels, data.split, config, name=str(data.path))
        check_labels(data.labels, data.classes, found, config, str(data.path))
        _check_ranks(ranks, found, config)
        Buckets(data.lengths, config.buckets())  # refuses a budget that the longest sequence does not fit
        start = find_start(config, data, found)
        about = describe(data, config, found, start and start.identity)
        tell, again = progress if ranks.main else None, resume or ranks.restarted
        done = ranks.from_main(lambda: _begin(stack, out, about, data, again, tell))
        if done is not None:
            return done
        if ranks.main and bool((data.labels >= 0).any()) and not bool((data.labels[found.held_out] >= 0).any()):
            log.warning("%s: no labelled sequence is held out, so there are no scores", data.path)
        return _train(data, found, config, start, out, ranks, tell, stop)


def _begin(
    stack: ExitStack, out: Path, about: Mapping[str, Any], data: SequenceData, resume: bool, progress: Told | None
) -> SequenceReport | None:
    """Take `out` until the stack ends; the report of the run there, if that is done already."""
    check_free(out, about, resume)
    data.verify(_preparing(progress))
    stack.enter_context(locked(out))
    check_free(out, about, resume)  # another may have been first
    if (out / REPORT).is_file():
        return _read_report(out)
    if not (out / RUN).is_file():
        write_json(out / RUN, about)
    return None


def _check_ranks(ranks: Ranks, found: Split, config: SequenceTraining) -> None:
    check_enough(len(found.train), ranks, "sequences")
    if config.variants and not ranks.alone:
        raise ConfigError(f"variants={config.variants} are made by one process; with {ranks.size} ranks leave them out")


def _own(data: SequenceData, found: Split, ranks: Ranks) -> Tensor | None:
    """(n,) bool: every N-th sequence of each part of the split, which this rank holds; None: all of them."""
    if ranks.alone:
        return None
    own = torch.zeros(len(data.ids), dtype=torch.bool)
    for part in found:
        own[part[ranks.rank :: ranks.size]] = True
    return own


def _train(
    data: SequenceData,
    found: Split,
    config: SequenceTraining,
    start: Start | None,
    out: Path,
    ranks: Ranks,
    progress: Told | None,
    stop: Callable[[], bool] | None,
) -> SequenceReport:
    device = ranks.device
    several = None if ranks.alone else ranks
    with data.batches(config, device, None, several, _own(data, found, ranks)) as batches:
        statistics = _statistics(out, batches.plain(found.train), ranks)
        job = Job(
            run=out, data=data, split=found, config=config, device=device, batches=batches, statistics=statistics,
            ranks=ranks, progress=progress, stop=stop,
        )  # fmt: skip
        module: Network
        if config.mode == "supervised":
            module, phases = _supervise(job, start)
        else:
            module, phases = self_train(job, _new_encoder(job, "encoder"))
        if phases[-1].stopped:
            return _report(job, phases, None)
        if ranks.main:
            write_tensors(out / WEIGHTS, module.state_dict(), {"mode": config.mode})
        report = _report(job, phases, score(module, job.batches, data, found, config.mode, device, several))
    if ranks.main:
        write_json(out / REPORT, asdict(report))
    return report


def _statistics(out: Path, source: Source | None, ranks: Ranks) -> Statistics:
    """Mean and spread of the training items; kept, so that a run that goes on has the very same."""
    file = out / STATISTICS
    kept = ranks.from_main(lambda: _read_statistics(file))
    if kept is not None:
        return kept
    found = measure(source, ranks.device, ranks)
    if ranks.main:
        write_tensors(file, found._asdict())
    return found


def _read_statistics(file: Path) -> Statistics | None:
    if not file.is_file():
        return None
    tensors = read_tensors(file)
    if set(tensors) != set(Statistics._fields):
        raise CheckpointError(f"{file} holds {sorted(tensors)}, expected mean and std; choose another --out")
    return Statistics(**tensors)


def _new_encoder(job: Job, *name: str | int) -> Encoder:
    encoder: Encoder = job.new(lambda: Encoder(job.config.shape(job.data.dim)), *name)
    encoder.set_statistics(*(part.to(job.device) for part in job.statistics))
    return encoder


# Supervised


def _supervise(job: Job, start: Start | None) -> tuple[Network, list[PhaseReport]]:
    """Train the members one after the other; where the last report says stopped, there is more to do."""
    members: list[Classifier] = []
    phases: list[PhaseReport] = []
    for number in range(1, job.config.members + 1):
        encoder = _new_encoder(job, "encoder", *([number] if number > 1 else []))
        if start is not None:
            encoder.load_state_dict(start.encoder.state_dict())
        name = "supervised" if job.config.members == 1 else f"supervised-{number}"
        module, report = _learn_classes(job, encoder, name)
        members.append(module)
        phases.append(report)
        if report.stopped:
            break
    return as_one(members), phases


def _learn_classes(job: Job, encoder: Encoder, name: str) -> tuple[Classifier, PhaseReport]:
    config = job.config
    module: Classifier = job.new(lambda: Classifier(encoder, len(job.data.classes)), name)
    loss = partial(classification, smoothing=config.label_smoothing)
    evaluate = _judge(job) if len(job.split.validation) else None
    change = augmented(job)
    with with_variants(job, job.view(job.split.train, name), change) as (source, transform):
        report = run_phase(
            job, name, module, loss, source, epochs=config.classifier_epochs, transform=transform, evaluate=evaluate
        )
    return module, report


def _judge(job: Job) -> Evaluate:
    """Loss and accuracy on the validation items, which are training items that are not trained on."""
    source = job.plain(job.split.validation)  # what this rank holds of them
    dtype = _DTYPES[resolve_precision(job.config.precision, job.device)]

    def judge(module: nn.Module) -> dict[str, float]:
        losses: list[Tensor] = []
        right: list[Tensor] = []
        for batch in source.epoch(0) if source is not None else ():
            with torch.autocast(job.device.type, dtype, enabled=dtype != torch.float32):
                logits = module(batch["frames"], batch["length"]).float()
            losses.append(nn.functional.cross_entropy(logits, batch["label"], reduction="none"))
            right.append(logits.argmax(-1) == batch["label"])
        if not job.ranks.alone:
            found = job.ranks.all_of([(loss.cpu(), hit.cpu()) for loss, hit in zip(losses, right, strict=True)])
            losses, right = ([pair[side] for part in found for pair in part] for side in (0, 1))
        return {"val_loss": float(torch.cat(losses).mean()), "val_accuracy": float(torch.cat(right).float().mean())}

    return judge


# Report


def _report(job: Job, phases: list[PhaseReport], scores: Scores | None) -> SequenceReport:
    seconds = sum(phase.seconds for phase in phases)
    return SequenceReport(
        run=str(job.run), mode=job.config.mode, scores=scores, phases=tuple(phases), stopped=phases[-1].stopped,
        samples_per_s=sum(phase.samples for phase in phases) / seconds if seconds > 0 else 0.0,
        padding_share=phases[-1].padding_share, tier=phases[-1].tier,
        ceiling_share=together(phases, "ceiling_share"), busy_share=together(phases, "busy_share"),
        peak_bytes=max(phase.peak_bytes for phase in phases),
    )  # fmt: skip


def _read_report(out: Path) -> SequenceReport:
    """That of a run that is done already."""
    values = read_json(out / REPORT)
    try:
        phases = tuple(PhaseReport(**phase) for phase in values.pop("phases"))
        return SequenceReport(**{**values, "run": str(out)}, phases=phases)
    except (KeyError, TypeError) as failure:
        raise CheckpointError(f"{out / REPORT} was altered ({failure}); restore it, or train again") from failure


def _preparing(progress: Told | None) -> Counted | None:
    if progress is None:
        return None
    began_s = time.perf_counter()

    def tell(done: int, total: int) -> None:
        rate = done / max(time.perf_counter() - began_s, 1e-9)
        progress(
            TrainProgress(
                phase="prepare", epoch=0, epochs=0, step=done, steps=total, loss=None, samples_per_s=0.0,
                eta_s=(total - done) / rate,
            )
        )  # fmt: skip

    return tell

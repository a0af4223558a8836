"""Progress, final report and logs of a training run."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from brim.engine.device import format_size
from brim.engine.meter import StepTimes, Times, diagnose
from brim.engine.training.checkpoint import PhaseState
from brim.engine.training.step import Stepper

log = logging.getLogger("brim")

METRICS = "metrics.jsonl"
_KEYS = (
    "run", "epochs", "samples_per_s", "epoch_seconds", "tier", "ceiling_share", "busy_share", "waiting",
    "best_val_loss", "peak_bytes", "joules_per_sample",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """Progress of a run, reported at least once a second."""

    phase: str
    epoch: int  # counted from 0
    epochs: int
    step: int  # done, over all epochs
    steps: int
    loss: float | None  # at the last log point
    samples_per_s: float
    eta_s: float
    seconds: float = 0.0  # of training so far
    waiting: Mapping[str, float] | None = None  # seconds of it lost, by cause; None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Result of a run; times count training only, not evaluation, compilation or capture."""

    run: str
    phase: str
    epochs: int  # trained
    steps: int
    samples_per_s: float
    epoch_seconds: float  # mean
    tier: str  # of the source
    ceiling_share: float | None  # throughput relative to the step on one fixed batch; None: not measured
    busy_share: float  # share of the time in which the device was busy
    waiting: dict[str, float]  # seconds by cause
    best_val_loss: float | None
    peak_bytes: int
    joules_per_sample: float | None  # of the GPU, evaluation included
    step_kind: str  # eager, compiled or graph
    micro_batch: int | None  # items at once, where a whole batch did not fit
    diagnosis: tuple[str, ...]  # what kept the device from working, worst first
    stopped: bool  # by request, before the last epoch
    stopped_early: bool  # because val_loss no longer improved

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        return {key: getattr(self, key) for key in _KEYS}


def summary_line(report: TrainReport) -> str:
    """The last line of a run."""
    waiting = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in report.waiting.items())
    joules = report.joules_per_sample
    parts = [
        f"{report.samples_per_s:,.0f} samples/s".replace(",", " "),
        f"busy {report.busy_share:.1%}",
        "ceiling not measured" if report.ceiling_share is None else f"{report.ceiling_share:.1%} of the ceiling",
        f"waiting: {waiting}",
        f"peak {format_size(report.peak_bytes)}",
        "energy not measured" if joules is None else f"{joules:.3g} J/sample",
    ]
    return " · ".join(parts)


def make_report(
    out: Path,
    stopped: bool,
    stepper: Stepper,
    num_items: int,
    tier: str,
    state: PhaseState,
    static: StepTimes | None,
    peak_bytes: int,
    energy_j: float | None,
) -> TrainReport:
    clock, times = state.clock, _times(stepper, state, static)
    rate = clock.samples / times.seconds if times.seconds > 0 else 0.0
    busy_s = clock.step_s if times.device_s is None else times.device_s * clock.steps
    num_here = clock.samples - clock.samples_before
    unfinished = state.epoch < stepper.config.epochs
    return TrainReport(
        run=str(out),
        phase=stepper.phase,
        epochs=state.epoch,
        steps=state.step,
        samples_per_s=rate,
        epoch_seconds=num_items / rate if rate > 0 else 0.0,
        tier=tier,
        ceiling_share=None if static is None or times.step_s is None else rate * times.step_s / static.items,
        busy_share=min(1.0, busy_s / times.seconds) if times.seconds > 0 else 0.0,
        waiting=dict(times.waiting),
        best_val_loss=None if state.best is None else state.best["val_loss"],
        peak_bytes=peak_bytes,
        joules_per_sample=energy_j / num_here if energy_j is not None and num_here else None,
        step_kind=stepper.kind,
        micro_batch=stepper.micro,
        diagnosis=tuple(diagnose(times)),
        stopped=stopped and unfinished,
        stopped_early=not stopped and unfinished,
    )


def _times(stepper: Stepper, state: PhaseState, static: StepTimes | None) -> Times:
    waiting = state.clock.waiting
    static = static or StepTimes(step_s=None)
    if static.syncs and static.step_s is not None and static.device_s is not None:
        waiting["host_sync"] += state.clock.steps * max(0.0, static.step_s - static.device_s)
    return Times(
        seconds=state.clock.seconds,
        steps=state.clock.steps,
        waiting=waiting,
        step_s=static.step_s,
        device_s=static.device_s,
        captured=stepper.kind == "graph",
        syncs=static.syncs,
    )


class RunLog:
    """Metrics of a phase, as JSON lines and as TensorBoard events; anything logged after `log_bytes` is removed."""

    def __init__(self, directory: Path, *, tensorboard: bool, log_bytes: int = 0, step: int = 0) -> None:
        """log_bytes and step come from the checkpoint that is resumed."""
        self._file = directory / METRICS
        self._events = directory / "tensorboard"
        self._tensorboard = tensorboard
        self._start = (log_bytes, step)
        self._lines: Any = None
        self._writer: Any = None

    def __enter__(self) -> Self:
        """Open the logs where the checkpoint left them."""
        log_bytes, step = self._start
        self._lines = self._file.open("ab")
        if self._lines.tell() > log_bytes:  # lines of steps that will be repeated
            self._lines.truncate(log_bytes)
            self._lines.seek(0, os.SEEK_END)
        if self._tensorboard:
            self._writer = _open_tensorboard(self._events, step)
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        if self._writer is not None:
            self._writer.close()

    @property
    def size_bytes(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return int(self._lines.tell())

    def write(self, *, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add one line, and one point per value."""
        self._lines.write(json.dumps({"step": step, "epoch": epoch, **values}).encode() + b"\n")
        self._lines.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


class NoLog:
    """Replaces RunLog on ranks that write nothing."""

    size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, *, step: int, epoch: int, values: Mapping[str, float]) -> None: ...


def _open_tensorboard(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and an optional dependency
    except ImportError as failure:
        log.warning("no TensorBoard events (%s); install tensorboard, or set tensorboard=False", failure)
        return None
    return SummaryWriter(str(directory), purge_step=step + 1 if step else None)

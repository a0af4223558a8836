"""Progress, final report and logs of a training run."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from brim.engine.device import format_size
from brim.engine.meter import Spent
from brim.loggers import Logger, LogsValues
from brim.report.summary import Summarised

log = logging.getLogger("brim")

METRICS = "metrics.jsonl"
_KEYS = (
    "run", "epochs", "samples_per_s", "epoch_seconds", "tier", "ceiling_share", "busy_share", "waiting",
    "best_val_loss", "peak_bytes", "joules_per_sample", "ceiling_spread",
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainReport(Summarised):
    """Result of a run; times count training only, not evaluation, compilation or capture."""

    run: str
    phase: str
    epochs: int  # trained
    steps: int
    samples_per_s: float
    epoch_seconds: float  # mean
    tier: str  # of the source
    ceiling_share: float | None  # throughput relative to the step on fixed batches, timed in between; None: not known
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
    ceiling_spread: float | None = None  # standard deviation of ceiling_share between measurements
    ceiling_words: str = "ceiling not measured"
    spent: Spent | None = field(default=None, compare=False)  # of the whole call, or of the command that it is part of

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by their public names."""
        return {key: getattr(self, key) for key in _KEYS} | (self.spent.as_dict() if self.spent is not None else {})

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        ended = "stopped early" if self.stopped_early else "stopped" if self.stopped else "done"
        facts = {
            "run": self.run,
            "speed": f"{self.samples_per_s:,.0f} samples/s".replace(",", " "),
            "ceiling": self.ceiling_words,
            "busy": f"{self.busy_share:.1%} of the time",
            "tier": f"{self.tier}, steps {self.step_kind}",
            "best val_loss": "not evaluated" if self.best_val_loss is None else f"{self.best_val_loss:.4g}",
            "peak memory": format_size(self.peak_bytes),
        }
        if self.diagnosis:
            facts["lost time"] = self.diagnosis[0]
        return f"TrainReport: {ended} after {self.epochs} epochs, {self.steps} steps", facts


def summary_line(report: TrainReport) -> str:
    waiting = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in report.waiting.items())
    joules = report.joules_per_sample
    parts = [
        f"{report.samples_per_s:,.0f} samples/s".replace(",", " "),
        f"busy {report.busy_share:.1%}",
        report.ceiling_words,
        f"waiting: {waiting}",
        f"peak {format_size(report.peak_bytes)}",
        "energy not measured" if joules is None else f"{joules:.3g} J/sample",
    ]
    return " · ".join(parts)


class RunLog:
    """Metrics of a phase, as JSON lines and with loggers; without a directory nothing is written."""

    def __init__(
        self,
        directory: Path | None,
        loggers: Sequence[LogsValues] = (),
        *,
        others: Sequence[LogsValues] = (),
        log_bytes: int = 0,
        step: int = 0,
    ) -> None:
        """Other loggers are those of a setting: where one cannot begin, the training goes on without it.

        log_bytes and step come from the checkpoint that is resumed; anything logged after log_bytes is removed.
        """
        self._directory, self._loggers, self._start = directory, list(loggers), (log_bytes, step)
        self._others = list(others)
        self._lines: Any = None

    def __enter__(self) -> Self:
        if self._directory is None:
            self._loggers = []
            return self
        log_bytes, step = self._start
        for logger in self._loggers:
            if isinstance(logger, Logger):
                logger.begin(self._directory, step)
        wanted, self._loggers = self._loggers, self._others
        folder = self._directory
        self._tell("begin", lambda logger: logger.begin(folder, step) if isinstance(logger, Logger) else None)
        self._loggers = [*wanted, *self._loggers]
        self._lines = (self._directory / METRICS).open("ab")
        if self._lines.tell() > log_bytes:  # lines of steps that will be repeated
            self._lines.truncate(log_bytes)
            self._lines.seek(0, os.SEEK_END)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()
        self._tell("end", lambda logger: logger.end() if isinstance(logger, Logger) else None)

    @property
    def size_bytes(self) -> int:
        return 0 if self._lines is None else int(self._lines.tell())

    def write(self, *, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add one line, and one point per value."""
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, "epoch": epoch, **values}).encode() + b"\n")
            self._lines.flush()
        self._tell("log", lambda logger: logger.log(values, step))

    def keep(self, file: Path) -> None:
        """Give a file to the loggers."""
        if file.exists():
            self._tell("artifact", lambda logger: logger.artifact(file))

    def _tell(self, what: str, call: Callable[[LogsValues], None]) -> None:
        """Call a method of every logger; one that fails is left out from here on: the training is worth more."""
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception as failure:  # a tracking server that is gone, a full disk, the caller's own code
                self._loggers.remove(logger)
                log.warning("%s failed in %s (%s); going on without it", type(logger).__name__, what, failure)

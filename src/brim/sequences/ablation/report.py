"""Results of an ablation: its steps, whether each made a difference, and their JSON and table."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from brim.engine.device import format_size

LEAST_DIFFERENCE = 0.02  # share; smaller changes count as no difference, whatever the noise

Verdict = Literal["start", "faster", "slower", "no difference", "did not fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationStep:
    """One training loop, with all earlier optimisations switched on."""

    name: str
    samples_per_s: float | None  # None: it did not fit in memory
    busy_share: float | None  # GPU: of the time; CPU: of all cores' time, in the training process
    ceiling_share: float | None  # rate relative to the same step on batches already on the device
    peak_bytes: int | None  # GPU: of tensors; CPU: of the training process
    verdict: Verdict  # compared to the previous step
    change: float | None = None  # rate relative to the previous step
    noise: float = 0.0  # relative standard error of the rate
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationProgress:
    """Progress of an ablation, reported about twice a second while a loop runs."""

    step: int  # counted from 0
    steps: int
    name: str
    share: float  # of this step, in [0, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    steps: tuple[AblationStep, ...]
    device: str  # its name
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        keys = ("name", "samples_per_s", "busy_share", "ceiling_share", "peak_bytes")
        return {"steps": [{key: getattr(step, key) for key in keys} for step in self.steps]}

    def table(self) -> str:
        """As text for a terminal."""
        rows: list[tuple[str, ...]] = [("switched on", "samples/s", "×", "busy", "ceiling", "memory", "")]
        rows += [_row(step) for step in self.steps]
        columns = list(zip(*rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        aligned = [
            [cell.ljust(width) if k in (0, 6) else cell.rjust(width) for cell in column]
            for k, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        lines = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        return "\n".join(lines + [f"· {note}" for note in self.notes])


def _row(step: AblationStep) -> tuple[str, ...]:
    remark = ", ".join(filter(None, [step.verdict.replace("start", ""), step.note]))
    if step.samples_per_s is None:
        return (step.name, "–", "–", "–", "–", "–", remark)
    rate = f"{step.samples_per_s:,.0f}".replace(",", " ") if step.samples_per_s >= 100 else f"{step.samples_per_s:.3g}"
    return (
        step.name,
        rate,
        "" if step.change is None else f"{step.change:.2f}",
        f"{step.busy_share:.0%}",
        f"{step.ceiling_share:.0%}",
        format_size(step.peak_bytes or 0),
        remark,
    )


def unfitting(name: str) -> AblationStep:
    """A step that did not fit in memory."""
    return AblationStep(
        name=name, samples_per_s=None, busy_share=None, ceiling_share=None, peak_bytes=None, verdict="did not fit",
        note="left switched off",
    )  # fmt: skip


# Judging


def judge(before: Sequence[float], after: Sequence[float], drift: float = 0.0) -> Verdict:
    """Whether one loop is faster than another beyond the noise of their blocks.

    drift  relative difference between two measurements of the same loop
    """
    change = statistics.median(after) / statistics.median(before) - 1
    bound = max(LEAST_DIFFERENCE, drift, 2 * math.hypot(relative_noise(before), relative_noise(after)))
    if abs(change) <= bound:
        return "no difference"
    return "faster" if change > 0 else "slower"


def relative_noise(rates: Sequence[float]) -> float:
    """Relative standard error of the median, from the median deviation; with fewer than four rates, half the range."""
    middle = statistics.median(rates)
    if len(rates) < 4:
        return (max(rates) - min(rates)) / 2 / middle
    deviation = 1.4826 * statistics.median(abs(rate - middle) for rate in rates)
    return 1.2533 * deviation / math.sqrt(len(rates)) / middle

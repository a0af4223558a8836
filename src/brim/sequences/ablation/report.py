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
    verdict: Verdict  # compared to the previous step
    samples_per_s: float | None = None  # None: it did not fit in memory
    busy_share: float | None = None  # GPU: of the time; CPU: of all cores' time, in the training process
    ceiling_share: float | None = None  # rate relative to the same step on batches already on the device
    peak_bytes: int | None = None  # GPU: of tensors; CPU: of the training process
    change: float | None = None  # rate relative to the previous step
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
        rows: list[tuple[str, ...]] = [("switched on", "samples/s", "×", "busy", "ceiling", "memory", "")]
        for step in self.steps:
            remark = ", ".join(filter(None, [step.verdict.replace("start", ""), step.note]))
            numbers = ["–"] * 5
            if step.samples_per_s is not None:
                change = "" if step.change is None else f"{step.change:.2f}"
                shares = [f"{share:.0%}" for share in (step.busy_share, step.ceiling_share)]
                numbers = [format_rate(step.samples_per_s), change, *shares, format_size(step.peak_bytes or 0)]
            rows.append((step.name, *numbers, remark))
        name, *columns, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = ["  ".join([row[0].ljust(name), *map(str.rjust, row[1:-1], columns), row[-1]]).rstrip() for row in rows]
        return "\n".join(lines + [f"· {note}" for note in self.notes])


def format_rate(per_s: float) -> str:
    return f"{per_s:,.0f}".replace(",", " ") if per_s >= 100 else f"{per_s:.3g}"


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

"""Measurements of a batch size search: trials, their noise, memory per item, and a summary in words.

Pure arithmetic: no device, no clock, no search.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from brim.report.page import number

TrialStatus = Literal["ok", "oom", "over budget", "failed", "slow"]

PRIOR_NOISE = 0.005  # relative noise of a trial before it is repeated, typical of a quiet GPU
PRIOR_WEIGHT = 2  # number of repeats the prior counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measurement of one batch size."""

    batch: int  # items in a step
    seconds: float  # median of one step
    spread: float = 0.0  # half-width of the spread of block rates, relative to their median
    p50_ms: float | None = None  # of single steps, each waited for
    p95_ms: float | None = None
    peak_bytes: int | None = None  # most memory in use at any moment, weights included
    steps: int = 1  # steps that ran, warm-up included: they prove that the batch fits
    device_share: float | None = None  # of the wall time, the device was busy; None: not measured
    warmup_s: float = 0.0  # what the first call took above a normal one: compilation, plan search, capture
    status: TrialStatus = "ok"  # "slow": above the latency limit; "over budget": ran, but took too much memory
    detail: str = ""  # why, when not ok

    @property
    def throughput(self) -> float:
        """Items per second; 0 for a step that did not run."""
        return self.batch / self.seconds if self.seconds > 0 else 0.0

    @property
    def latency_ms(self) -> float:
        """The latency compared with the limit: p95, or the median step if that is unknown."""
        return self.seconds * 1e3 if self.p95_ms is None else self.p95_ms


def merge(trials: Sequence[Trial]) -> Trial:
    """Repeated trials of a size as one: the median step, the highest peak, the last latencies."""
    last = trials[-1]
    seconds = [trial.seconds for trial in trials]
    peaks = [trial.peak_bytes for trial in trials if trial.peak_bytes is not None]
    shares = [trial.device_share for trial in trials if trial.device_share is not None]
    middle = statistics.median(seconds)
    half_width = (max(seconds) - min(seconds)) / 2 / middle if middle > 0 else 0.0
    return replace(
        last, seconds=middle, spread=max(half_width, statistics.median(trial.spread for trial in trials)),
        peak_bytes=max(peaks, default=None), steps=sum(trial.steps for trial in trials),
        device_share=statistics.median(shares) if shares else None, warmup_s=sum(trial.warmup_s for trial in trials),
    )  # fmt: skip


class TrialBook:
    """All trials in order, and their statistics per batch size."""

    def __init__(self, top: int) -> None:
        """Start empty; top is the largest size not known to be too large for the device."""
        self.top = top
        self.trials: list[Trial] = []
        self._ran: dict[int, list[Trial]] = {}
        self._merged: dict[int, Trial] = {}
        self._noise: float | None = None

    def add(self, trial: Trial) -> None:
        """Add a trial; one that did not run removes its size, whatever ran before."""
        self.trials.append(trial)
        self._merged.pop(trial.batch, None)
        self._noise = None
        if trial.status in ("oom", "failed", "over budget"):
            self.top = min(self.top, max(1, trial.batch - 1))
        if trial.status in ("oom", "failed"):
            self._ran.pop(trial.batch, None)
        else:
            self._ran.setdefault(trial.batch, []).append(trial)

    def sizes(self) -> list[int]:
        """Sizes that may be chosen: they ran, within memory and latency, and no smaller one failed."""
        return sorted(size for size in self._ran if size <= self.top and self.merged(size).status == "ok")

    def merged(self, batch: int) -> Trial:
        """All trials of a size as one; the last one's status holds."""
        if batch not in self._merged:
            self._merged[batch] = merge(self._ran[batch])
        return self._merged[batch]

    def ran(self, batch: int) -> bool:
        return batch in self._ran

    def count(self, batch: int) -> int:
        return len(self._ran.get(batch, ()))

    def rate(self, batch: int) -> float:
        """Items per second of a size: from its median step."""
        return self.merged(batch).throughput

    def best(self) -> int:
        """The size with the highest rate among those that may be chosen, the smallest of equals; 0 if there is none."""
        return max(self.sizes(), key=lambda size: (self.rate(size), -size), default=0)

    def noise(self) -> float:
        """Relative noise of one trial, pooled over the sizes that were repeated."""
        if self._noise is None:
            self._noise = self._pooled_noise()
        return self._noise

    def _pooled_noise(self) -> float:
        spreads = [trial.spread for trials in self._ran.values() for trial in trials]
        prior = max(PRIOR_NOISE, statistics.median(spreads)) if spreads else PRIOR_NOISE
        squares, degrees = PRIOR_WEIGHT * prior**2, PRIOR_WEIGHT
        for trials in self._ran.values():
            # Around the median, and each deviation capped: one stall of the machine is no noise.
            middle = statistics.median(trial.seconds for trial in trials)
            if len(trials) > 1 and middle > 0:
                squares += sum(min(0.1, abs(trial.seconds / middle - 1)) ** 2 for trial in trials)
                degrees += len(trials) - 1
        return math.sqrt(squares / degrees)

    def error(self, batch: int) -> float:
        """Relative standard error of a size's rate."""
        return 1.25 * self.noise() / math.sqrt(max(1, self.count(batch)))  # 1.25: a median, not a mean

    # Memory

    def predict_bytes(self, batch: int) -> float | None:
        """Peak memory expected of a size; None before two sizes ran with their memory known."""
        fit = self._memory_fit()
        if fit is None:
            return None
        largest, peak, slope = fit
        return peak + slope * (batch - largest)

    def largest_within(self, limit_bytes: float) -> int | None:
        """The largest size expected to stay within a limit; None if memory sets no limit."""
        fit = self._memory_fit()
        if fit is None or fit[2] <= 0:
            return None
        largest, peak, slope = fit
        return max(1, largest + math.floor((limit_bytes - peak) / slope))

    def _memory_fit(self) -> tuple[int, float, float] | None:
        """Largest size, its peak, bytes per item: a line through it with the slope of them all."""
        points = [(size, self.merged(size).peak_bytes) for size in sorted(self._ran)]
        known = [(size, float(peak)) for size, peak in points if peak is not None]
        if len(known) < 2:
            return None
        # Weighted by size: at small ones the allocator's rounding hides what an item takes.
        weight = sum(size for size, _ in known)
        mean_size = sum(size * size for size, _ in known) / weight
        mean_peak = sum(size * peak for size, peak in known) / weight
        across = sum(size * (size - mean_size) * (peak - mean_peak) for size, peak in known)
        along = sum(size * (size - mean_size) ** 2 for size, _ in known)
        return known[-1][0], known[-1][1], max(0.0, across / along)


STALLED = 0.8  # a device busy for less of the time is not what limits the step


def verdict(book: TrialBook, chosen: int) -> str:
    """What batching gains here and what limits the step, in a sentence or two."""
    trial, best = book.merged(chosen), book.merged(book.best() or chosen)
    if trial.status != "ok":
        return f"no batch keeps the limits: even batch {chosen} is {trial.status}, {trial.detail}"
    host = _not_the_device(trial)
    if book.sizes() == [1]:
        return f"only batch 1 was measured: {number(trial.throughput)}/s" + f"; {host}" * bool(host)
    single = book.rate(1)
    share = single / best.throughput
    if chosen == 1:
        why = host or "one item keeps the device as busy as many"
        return f"batching does not matter: batch 1 reaches {min(1.0, share):.0%} of the best; {why}"
    gain = f"batch {chosen} gives {number(trial.throughput)}/s, {trial.throughput / single:.3g} times batch 1"
    return f"{gain}; {host}" if host else gain


def _not_the_device(trial: Trial) -> str:
    """A sentence if the step waits for something other than the device, else nothing."""
    if trial.device_share is None or trial.device_share >= STALLED:
        return ""
    return f"not limited by the device: it is busy for {trial.device_share:.0%} of the time and waits for the host"

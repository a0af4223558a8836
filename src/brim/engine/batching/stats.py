"""What the batch runner counts as it runs, for metrics: histograms by stage, batch sizes, refusals, busy time."""

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STAGES = ("wait", "decode", "forward", "finish", "total")
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """Times by bucket; counts[i] holds those up to BOUNDS_S[i], the last one those beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class BatchStats:
    """Counters with a lock of their own: metrics are read while everything runs."""

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._stages = {stage: Histogram() for stage in STAGES}
        self._sizes: Counter[int] = Counter()
        self._rejected: Counter[str] = Counter()
        self._answered = self._failed = self._cancelled = 0
        self._began_s = now_s
        self._busy_s = 0.0
        self._on_device = 0
        self._since_s = now_s

    def reject(self, reason: str) -> None:
        """A request was not taken, or given up: overloaded, deadline, ending."""
        with self._lock:
            self._rejected[reason] += 1

    def answer(self, seconds: dict[str, float]) -> None:
        """A request was answered, after so long in each stage."""
        with self._lock:
            self._answered += 1
            for stage, took_s in seconds.items():
                self._stages[stage].add(took_s)

    def fail(self) -> None:
        """A request got an error of its own."""
        with self._lock:
            self._failed += 1

    def cancel(self) -> None:
        """A client left."""
        with self._lock:
            self._cancelled += 1

    def start(self, size: int, now_s: float) -> None:
        """A batch was handed to the device."""
        with self._lock:
            self._sizes[size] += 1
            if not self._on_device:
                self._since_s = now_s
            self._on_device += 1

    def end(self, now_s: float) -> None:
        """A batch left the device."""
        with self._lock:
            self._on_device -= 1
            if not self._on_device:
                self._busy_s += now_s - self._since_s

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """All of it, as plain values that fit in JSON."""
        with self._lock:
            return {
                "batch_sizes": {str(size): count for size, count in sorted(self._sizes.items())},
                "bounds_s": list(BOUNDS_S),
                "seconds": {
                    stage: {"counts": list(times.counts), "sum_s": times.sum_s} for stage, times in self._stages.items()
                },
                "rejected": dict(self._rejected),
                "answered": self._answered,
                "failed": self._failed,
                "cancelled": self._cancelled,
                "busy_s": self._busy_s + (now_s - self._since_s if self._on_device else 0.0),
                "up_s": now_s - self._began_s,
            }

"""Requests and batches while they are being processed, and the counters the runner keeps for metrics."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from brim.engine.batching.policy import RequestPart
from brim.engine.batching.servable import Answer, DecodedRequest, Payload, Servable


class Reply(Future[Answer]):
    """The future answer of a request, and the number that on_start gets when its batch is launched."""

    def __init__(self, request: int) -> None:
        super().__init__()
        self.request = request


@dataclass(slots=True, eq=False)
class OpenRequest:
    reply: Reply
    servable: Servable
    token: int  # of the servable
    key: Hashable
    payload: Payload | None
    deadline_s: float
    submitted_s: float
    item: DecodedRequest | None = None
    outputs: list[Any] = field(default_factory=list)
    left: int = 0  # parts without an output
    done: bool = False
    decode_s: float = 0.0
    ready_s: float = 0.0
    started_s: float = 0.0
    collected_s: float = 0.0


@dataclass(slots=True, eq=False)
class DeviceBatch:
    """A batch that the policy started; after a failure it runs in pieces."""

    parts: list[RequestPart]
    started_s: float
    pieces: int = 1
    failed: bool = False


@dataclass(slots=True, eq=False)
class Piece:
    """A batch, or a part of one that failed."""

    batch: DeviceBatch
    places: list[tuple[OpenRequest, int]]  # a request and the number of its part
    since_s: float = 0.0
    launch_s: float | None = None  # host time of launching it


@dataclass(frozen=True, slots=True)
class Failed:
    """Replaces the handle for collect if the forward pass failed."""

    failure: BaseException


def forward(piece: Piece) -> Any:
    """Launch a piece on the device; returns the handle for collect, or a Failed."""
    try:
        parts = [request.item.parts[number] for request, number in piece.places if request.item is not None]
        return piece.places[0][0].servable.forward(parts)
    except BaseException as failure:
        return Failed(failure)


def halves(places: list[tuple[OpenRequest, int]], sizes: Sequence[int]) -> list[list[tuple[OpenRequest, int]]]:
    """A batch in two parts, or more if half of it is not a batch size."""
    if len(places) < 2:
        return []
    size = max(size for size in sizes if size <= max(1, len(places) // 2))
    return [places[start : start + size] for start in range(0, len(places), size)]


def too_late(request: OpenRequest, now_s: float) -> str:
    """Message for a request that was accepted but could not be answered in time."""
    limit_s, waited_s = request.deadline_s - request.submitted_s, now_s - request.submitted_s
    return (
        f"accepted with {limit_s * 1e3:.0f} ms to its deadline, but {waited_s * 1e3:.0f} ms later it "
        "could no longer be answered in time; send it again, or allow more time"
    )


STAGES = ("wait", "decode", "forward", "finish", "total")
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class TimeHistogram:
    """Times by bucket; counts[i] holds those up to BOUNDS_S[i], the last one those beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class BatchStats:
    """Counters with their own lock: metrics are read while requests are served."""

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._stages = {stage: TimeHistogram() for stage in STAGES}
        self._sizes: Counter[int] = Counter()
        self._rejected: Counter[str] = Counter()
        self._answered = self._failed = self._cancelled = 0
        self._began_s = now_s
        self._busy_s = 0.0
        self._on_device = 0
        self._since_s = now_s

    def reject(self, reason: str) -> None:
        """A request was rejected or dropped: overloaded, deadline, ending."""
        with self._lock:
            self._rejected[reason] += 1

    def answer(self, seconds: dict[str, float]) -> None:
        """A request was answered; seconds by stage."""
        with self._lock:
            self._answered += 1
            for stage, took_s in seconds.items():
                self._stages[stage].add(took_s)

    def fail(self) -> None:
        with self._lock:
            self._failed += 1

    def cancel(self) -> None:
        with self._lock:
            self._cancelled += 1

    def start(self, size: int, now_s: float) -> None:
        with self._lock:
            self._sizes[size] += 1
            if not self._on_device:
                self._since_s = now_s
            self._on_device += 1

    def end(self, now_s: float) -> None:
        with self._lock:
            self._on_device -= 1
            if not self._on_device:
                self._busy_s += now_s - self._since_s

    def snapshot(self, now_s: float) -> dict[str, Any]:
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

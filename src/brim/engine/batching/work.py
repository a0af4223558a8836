"""Requests and batches while they are being processed, and the counters the runner keeps for metrics."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

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


STAGES = ("wait", "decode", "forward", "finish", "total")
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class BatchStats:
    """Counters with their own lock: metrics are read while requests are served."""

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        # by stage: how many took up to each of BOUNDS_S, the last one beyond; and their sum
        self._counts = {stage: [0] * (len(BOUNDS_S) + 1) for stage in STAGES}
        self._sums_s = dict.fromkeys(STAGES, 0.0)
        self._sizes: Counter[int] = Counter()
        self._rejected: Counter[str] = Counter()
        self._resolved: Counter[str] = Counter()
        self._began_s = self._since_s = now_s
        self._busy_s = 0.0
        self._on_device = 0

    def reject(self, reason: str) -> None:
        """A request was rejected or dropped: overloaded, deadline, ending."""
        with self._lock:
            self._rejected[reason] += 1

    def resolve(self, how: Literal["answered", "failed", "cancelled"], seconds: Mapping[str, float]) -> None:
        """A request was answered, with seconds by stage, failed or was cancelled."""
        with self._lock:
            self._resolved[how] += 1
            for stage, took_s in seconds.items():
                self._counts[stage][bisect_left(BOUNDS_S, took_s)] += 1
                self._sums_s[stage] += took_s

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
                    stage: {"counts": list(counts), "sum_s": self._sums_s[stage]}
                    for stage, counts in self._counts.items()
                },
                "rejected": dict(self._rejected),
                **{how: self._resolved[how] for how in ("answered", "failed", "cancelled")},
                "busy_s": self._busy_s + (now_s - self._since_s if self._on_device else 0.0),
                "up_s": now_s - self._began_s,
            }

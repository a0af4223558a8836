"""A simulated server: Poisson arrivals, a decode pool, one device, a finish pool, and a virtual clock.

Runs the policy that serves (`brim.engine.batching`), or a simpler one to compare it with, through minutes of load in
seconds. There are no threads and no models; a device is the step time by batch size.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Protocol

from brim.engine.batching import BatcherConfig, BatchPolicy, PoolTimes, RequestPart, StartBatch, Wait
from brim.errors import Overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device with its pools, as measured or as imagined."""

    seconds: dict[int, float]  # of a batch by its size; these are the sizes that may run
    decode_s: float = 0.0
    finish_s: float = 0.0
    decoders: int = 1
    finishers: int = 1
    noise: float = 0.0  # spread of every time, as a share of it
    spikes: float = 0.0  # share of batches that take half as long again
    overlap: bool = True  # a batch can be queued behind the one that runs, as on a GPU

    @property
    def single_s(self) -> float:
        """Latency of one request on the idle device."""
        return self.decode_s + self.seconds[1] + self.finish_s

    def capacity(self) -> float:
        """Requests a second at the best batch size, whatever they wait."""
        return max(size / seconds for size, seconds in self.seconds.items())


H200 = Bench(
    seconds={1: 0.0049, 2: 0.0078, 4: 0.0122, 8: 0.0203, 16: 0.038},
    decode_s=0.010,
    finish_s=0.003,
    decoders=16,
    finishers=8,
    noise=0.03,
    spikes=0.005,
)  # HRNet at 1024², decoding JPEG on 16 threads
CPU = Bench(
    seconds={1: 0.030, 2: 0.060, 4: 0.120, 8: 0.240},
    decode_s=0.004,
    finish_s=0.002,
    noise=0.05,
    spikes=0.005,
    overlap=False,
)  # a network of 30 ms an image on one core: batching buys nothing


class Policy(Protocol):
    """What the simulation asks of a policy; BatchPolicy says what each means, and those it is compared with have it."""

    def admit(
        self, key: Hashable, parts: int, deadline_s: float, now_s: float, *, before_s: float = ..., after_s: float = ...
    ) -> int: ...
    def ready(self, request: int, now_s: float) -> None: ...
    def next(self, now_s: float) -> StartBatch | Wait: ...
    def started(self, batch: Sequence[RequestPart], now_s: float) -> None: ...
    def finished(self, batch: Sequence[RequestPart], now_s: float) -> None: ...
    def expire(self, now_s: float) -> list[int]: ...


class Greedy:
    """What most servers do: everything is let in; what waits, in order of arrival, is the next batch.

    window_s: how long the first of a batch waits for it to fill (0: not at all).
    """

    def __init__(self, largest: int, window_s: float = 0.0) -> None:
        self._largest, self._window_s = largest, window_s
        self._ready: deque[tuple[float, RequestPart]] = deque()
        self._parts: dict[int, RequestPart] = {}
        self._busy = False

    def admit(
        self, key: Hashable, parts: int, deadline_s: float, now_s: float, *, before_s: float = 0, after_s: float = 0
    ) -> int:
        """Always."""
        number = len(self._parts)
        self._parts[number] = RequestPart(number, 0, key, deadline_s)
        return number

    def ready(self, request: int, now_s: float) -> None:
        """It joins the end of the queue."""
        self._ready.append((now_s, self._parts[request]))

    def next(self, now_s: float) -> StartBatch | Wait:
        """The queue's first ones, once the device is free and the window is over or the batch full."""
        if self._busy or not self._ready:
            return Wait(None)
        until_s = self._ready[0][0] + self._window_s
        if len(self._ready) < self._largest and now_s < until_s:
            return Wait(until_s)
        return StartBatch([part for _, part in list(self._ready)[: self._largest]])

    def started(self, batch: Sequence[RequestPart], now_s: float) -> None:
        """They leave the queue."""
        for _ in batch:
            self._ready.popleft()
        self._busy = True

    def finished(self, batch: Sequence[RequestPart], now_s: float) -> None:
        """The device is free."""
        self._busy = False

    def expire(self, now_s: float) -> list[int]:
        """Never."""
        return []


@dataclass(slots=True)
class Outcome:
    """What came of the requests of one run."""

    seconds: float
    offered: int = 0
    refused: int = 0
    expired: int = 0
    limit_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)  # of all that were answered
    batches: dict[int, int] = field(default_factory=dict)
    busy_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Answers within the limit a second."""
        return sum(latency <= self.limit_s for latency in self.latencies_s) / self.seconds

    @property
    def late(self) -> int:
        """Answers beyond the limit."""
        return sum(latency > self.limit_s for latency in self.latencies_s)

    @property
    def worst(self) -> float:
        """The longest latency, as a share of the limit."""
        return max(self.latencies_s, default=0.0) / self.limit_s

    def percentile_s(self, share: float) -> float:
        """Latency that so large a share of the answers keeps."""
        if len(self.latencies_s) < 2:
            return sum(self.latencies_s)
        return quantiles(self.latencies_s, n=1000)[round(share * 1000) - 1]


def brim_policy(bench: Bench, config: BatcherConfig | None = None) -> BatchPolicy:
    """The policy that serves, told what warm-up would have told it."""
    policy = BatchPolicy(lambda key: sorted(bench.seconds), config)
    for size, seconds in bench.seconds.items():
        policy.expect("model", size, seconds)
    return policy


def simulate(
    bench: Bench, policy: Policy, *, rate: float, seconds: float, limit_s: float, seed: int, warmup_s: float = 0.5
) -> Outcome:
    """Offer `rate` requests a second, as Poisson, and count what becomes of them after the warm-up."""
    return _Run(bench, policy, limit_s, random.Random(seed), warmup_s, warmup_s + seconds).go(rate)


class _Run:
    """One run: a heap of events and the four stages they pass."""

    def __init__(
        self, bench: Bench, policy: Policy, limit_s: float, chance: random.Random, begin_s: float, end_s: float
    ) -> None:
        self.bench, self.policy, self.limit_s, self.chance = bench, policy, limit_s, chance
        self.begin_s, self.end_s = begin_s, end_s
        self.outcome = Outcome(end_s - begin_s, limit_s=limit_s)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.now_s = 0.0
        self.arrived: dict[int, float] = {}
        self.decoding = _Pool(self, bench.decoders, bench.decode_s)
        self.finishing = _Pool(self, bench.finishers, bench.finish_s, self.too_late)
        self.device_free_s = 0.0
        self.wake_s = math.inf
        self.grace = policy.config.grace if isinstance(policy, BatchPolicy) else math.inf

    def go(self, rate: float) -> Outcome:
        self.at(self.chance.expovariate(rate), self.arrive, rate)
        while self.events:
            self.now_s, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
            self.pump()
        return self.outcome

    def at(self, when_s: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when_s, self.count, action, arguments))
        self.count += 1

    def noisy(self, seconds: float) -> float:
        return seconds * math.exp(self.chance.gauss(0.0, self.bench.noise)) if self.bench.noise else seconds

    def counts(self, arrived_s: float) -> bool:
        return self.begin_s <= arrived_s < self.end_s

    def arrive(self, rate: float) -> None:
        if self.now_s >= self.end_s:
            return
        self.at(self.now_s + self.chance.expovariate(rate), self.arrive, rate)
        self.outcome.offered += self.counts(self.now_s)
        try:
            request = self.policy.admit(
                "model",
                1,
                self.now_s + self.limit_s,
                self.now_s,
                before_s=self.decoding.times.expected_s("model"),
                after_s=self.finishing.times.expected_s("model"),
            )
        except Overloaded:
            self.outcome.refused += self.counts(self.now_s)
            return
        self.arrived[request] = self.now_s
        self.decoding.join(self.decoded, request)

    def decoded(self, request: int) -> None:
        if request in self.arrived:
            self.policy.ready(request, self.now_s)

    def pump(self) -> None:
        for request in self.policy.expire(self.now_s):
            self.outcome.expired += self.counts(self.arrived.pop(request))
        while isinstance(told := self.policy.next(self.now_s), StartBatch):
            if not self.bench.overlap and self.device_free_s > self.now_s:
                return  # its thread computes: nobody can hand it a batch
            self.policy.started(told.batch, self.now_s)
            self.start(told.batch)
        if told.until_s is not None and not self.now_s < self.wake_s <= told.until_s:
            self.wake_s = max(told.until_s, self.now_s + 1e-6)
            self.at(self.wake_s, lambda: None)

    def start(self, batch: list[RequestPart]) -> None:
        spike = 1.5 if self.chance.random() < self.bench.spikes else 1.0
        took_s = self.noisy(_between(self.bench.seconds, len(batch))) * spike
        self.device_free_s = max(self.device_free_s, self.now_s) + took_s
        self.outcome.batches[len(batch)] = self.outcome.batches.get(len(batch), 0) + 1
        self.outcome.busy_s += took_s
        self.at(self.device_free_s, self.ran, batch)

    def ran(self, batch: list[RequestPart]) -> None:
        self.policy.finished(batch, self.now_s)
        for part in batch:
            self.finishing.join(self.answered, part.request)

    def too_late(self, request: int) -> bool:
        """As the runner does: what would be too late to be of use is not finished."""
        end_s = self.now_s + self.finishing.times.work_s("model")
        if end_s <= self.arrived[request] + (1 + self.grace) * self.limit_s:
            return False
        self.outcome.expired += self.counts(self.arrived.pop(request))
        return True

    def answered(self, request: int) -> None:
        arrived_s = self.arrived.pop(request)
        if self.counts(arrived_s):
            self.outcome.latencies_s.append(self.now_s - arrived_s)


class _Pool:
    """Threads that work down one queue, in order of arrival."""

    def __init__(self, run: _Run, workers: int, seconds: float, too_late: Callable[[int], bool] | None = None) -> None:
        self.run, self.seconds, self.too_late = run, seconds, too_late
        self.times = PoolTimes(workers)
        self.free = workers
        self.queue: deque[tuple[Callable[[int], None], int, float]] = deque()

    def join(self, then: Callable[[int], None], request: int) -> None:
        self.times.enter()
        self.queue.append((then, request, self.run.now_s))
        self.work()

    def work(self) -> None:
        while self.free and self.queue:
            then, request, joined_s = self.queue.popleft()
            if self.too_late is not None and self.too_late(request):
                self.times.leave("model", None)
                continue
            self.free -= 1
            took_s = self.run.noisy(self.seconds)
            self.run.at(self.run.now_s + took_s, self.done, then, request, took_s, joined_s)

    def done(self, then: Callable[[int], None], request: int, took_s: float, joined_s: float) -> None:
        self.free += 1
        self.times.leave("model", took_s, stay_s=self.run.now_s - joined_s if self.too_late else None)
        then(request)
        self.work()


def _between(seconds: dict[int, float], size: int) -> float:
    """Seconds of a size that is not in the table: on the line between its neighbours."""
    if size in seconds:
        return seconds[size]
    low = max(other for other in seconds if other < size)
    high = min(other for other in seconds if other > size)
    return seconds[low] + (seconds[high] - seconds[low]) * (size - low) / (high - low)

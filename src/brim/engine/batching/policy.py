"""Decides which waiting requests run next in one batch, and whether one more can be answered in time.

Pure policy: no threads, no torch, no clock. Every method gets the time as an argument, so that tests simulate hours in
seconds.

Both decisions use the same forecast (queue.py), which runs the queue in order of deadline with the measured step times.
A request is admitted if nobody is late in the forecast that includes it. A batch starts if nobody behind it is late in
the forecast of the rest. So the queue can keep every promise made on admission.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from brim.config import Range, check
from brim.engine.batching.queue import Lane, Request, RequestQueue, WaitingPart, forecast
from brim.engine.batching.service_times import GAIN, MAX_KEYS, QUANTILE, ServiceTimes, StepTable, Windows
from brim.errors import Overloaded, TooLarge

RATE_WINDOW_S = 0.25  # for the arrival rate: longer than a batch, shorter than a change of load
IN_FLIGHT = 2  # batches on the device: one running and one queued behind it
QUEUED = 0.6  # a launch that took less than this share of the batch's time returned before the device was done
MAX_LEAD_S = 0.01
RETRY = 20  # least time between tries of work that is later than max_late_s, in multiples of its lateness


@dataclass(frozen=True, slots=True)
class RequestPart:
    """One part of a request; it takes one place in a batch."""

    request: int
    number: int  # 0 … parts − 1 of its request
    key: Hashable  # only parts of one key share a batch
    deadline_s: float
    alone: bool = False  # never shares a batch: strict mode, or retried after a crash


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Run these parts now, as one batch."""

    batch: list[RequestPart]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run before until_s; None: until something changes."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """When a batch starts, and which deadlines may be promised."""

    # How long an idle device waits at most for a fuller batch, and only if waiting pays.
    max_queue_delay_ms: Annotated[float, Range(0)] = 5.0
    # The next batch is formed this long before the running one is expected to end (or as long as launching one takes,
    # if that is longer), so that the device has no gap.
    lead_ms: Annotated[float, Range(0)] = 2.0
    margin: Annotated[float, Range(0, below=1)] = 0.05  # added to an estimate before a deadline is promised
    # Share of a request's time limit: a request expected to be later than that is dropped before it runs.
    grace: Annotated[float, Range(0, below=1)] = 0.05
    max_waiting: Annotated[int, Range(1)] = 4096  # parts in the queue
    # Least time between requests that an idle device tries although they should be late: only running a batch
    # corrects an estimate, and one above a deadline would otherwise reject its requests forever. None: it never tries.
    probe_s: Annotated[float | None, Range(0)] = 1.0
    # Requests expected to be later than this are not tried: those behind them would wait as long. Where the estimate
    # was measured, one slow batch may be the reason; then they are tried, but rarely (RETRY).
    max_late_s: Annotated[float, Range(0)] = 1.0
    # Longest time one part may be expected to take: it cannot be divided, and the device runs nothing else meanwhile.
    max_part_s: Annotated[float, Range(above=0)] = 30.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(slots=True)
class _Running:
    batch: Sequence[RequestPart]
    started_s: float
    seconds: float  # expected


@dataclass(slots=True)
class _Rate:
    """Arrival rate of parts, over an exponentially decaying window."""

    count: float = 0.0
    at_s: float = 0.0

    def add(self, parts: int, now_s: float) -> None:
        self.count = self.count * math.exp(min(0.0, self.at_s - now_s) / RATE_WINDOW_S) + parts
        self.at_s = now_s

    def per_s(self, now_s: float) -> float:
        return self.count * math.exp(min(0.0, self.at_s - now_s) / RATE_WINDOW_S) / RATE_WINDOW_S


class BatchPolicy:
    """Admits requests, forms batches in order of deadline, and learns how long batches take."""

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]], config: BatcherConfig | None = None) -> None:
        """sizes(key): batch sizes that may run, ascending from 1 to the tuned one."""
        self.config = config or BatcherConfig()
        self._times = ServiceTimes(sizes)
        self._requests: dict[int, Request] = {}
        self._rates: dict[Hashable, _Rate] = {}
        self._running: list[_Running] = []
        self._tried_s = -math.inf  # when a request expected to be late was last admitted
        self._freed_s = -math.inf  # when the last batch left the device
        self._queue = RequestQueue(self._times.table)
        self._launches = Windows(QUANTILE)
        self._count = 0

    # Step times

    def expect(self, key: Hashable, size: int, seconds: float) -> None:
        """Set a first guess of a step time, from tuning or warm-up; measurements replace it."""
        self._times.expect(key, size, seconds)

    def knows(self, key: Hashable) -> bool:
        """Whether a step time of this key was measured or guessed."""
        return self._times.knows(key)

    def seconds(self, key: Hashable, size: int) -> float:
        """Expected time of a batch; 0 if nothing is known."""
        return self._times.table(key).seconds[size]

    # Requests

    def admit(
        self,
        key: Hashable,
        parts: int,
        deadline_s: float,
        now_s: float,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        alone: bool = False,
    ) -> int:
        """Queue a request and return its id, or raise Overloaded or TooLarge; its parts run only after `ready`.

        before_s and after_s: expected time of decoding before the device, and of finishing after it.
        """
        self._times.table(key)  # raises if the batch sizes are invalid, before anything is queued
        self._rates.setdefault(key, _Rate()).add(parts, now_s)
        if len(self._rates) > MAX_KEYS:
            self._rates = {key: rate for key, rate in self._rates.items() if rate.per_s(now_s) * RATE_WINDOW_S > 0.5}
        due_s = deadline_s - after_s
        give_up_s = due_s + self.config.grace * (deadline_s - now_s)
        request = Request(self._count, key, alone, parts, deadline_s, due_s, now_s, now_s + before_s, give_up_s)
        if self._queue.parts + parts > self.config.max_waiting:
            raise Overloaded(
                f"the queue holds {self._queue.parts} parts and this request has {parts}, "
                f"but at most {self.config.max_waiting} may wait; try again later",
                max(0.001, self._drained_s(now_s) - now_s),
            )
        self._queue.insert(request)
        late_s, part_s = self._late_by(request, now_s), self._times.table(key).seconds[1]
        is_too_long = part_s > self.config.max_part_s
        if late_s > 0 or is_too_long:
            if not self._may_try(now_s, key, max(late_s, part_s) if is_too_long else late_s, besides=parts):
                self._queue.remove(request)
                raise self._too_long(part_s) if is_too_long else self._rejection(request, late_s, now_s)
            self._tried_s, request.give_up_s = now_s, math.inf
        self._requests[request.number] = request
        self._count += 1
        return request.number

    def ready(self, request: int, now_s: float, *, key: Hashable | None = None, parts: int | None = None) -> None:
        """The request is decoded, its parts may run; give key and parts if they differ from the admitted ones."""
        known = self._requests.get(request)
        if known is None:  # it left while it was being decoded
            return
        self._queue.remove(known)
        known.key = known.key if key is None else key
        known.parts = known.parts if parts is None else parts
        known.decoded, known.ready_s = True, now_s
        self._queue.insert(known)

    def leave(self, request: int) -> None:
        """The request was cancelled or failed: remove its waiting parts; those on the device finish."""
        known = self._requests.get(request)
        if known is not None:
            self._queue.remove(known)
            self._forget_if_done(known)

    def expire(self, now_s: float) -> list[int]:
        """Remove the requests that can no longer be answered in time and return their ids."""
        free_s = self._free_s(now_s)
        gone = []
        for lane in list(self._queue.lanes.values()):
            while lane.parts and self._hopeless(lane.parts[0].request, free_s, now_s):
                known = lane.parts[0].request
                self._queue.remove(known)
                self._forget_if_done(known)
                gone.append(known.number)
        return gone

    def _hopeless(self, request: Request, free_s: float, now_s: float) -> bool:
        least_s = self._times.table(request.key).seconds[1]
        if request.give_up_s == math.inf:  # admitted to measure how long it takes
            return False
        return now_s > request.deadline_s or max(free_s, now_s) + least_s > request.give_up_s

    # Batches

    def next(self, now_s: float) -> StartBatch | Wait:
        """What to do now; a Start counts as waiting until `started`."""
        if len(self._running) >= IN_FLIGHT:
            return Wait(None)
        free_s = self._free_s(now_s)
        lane = self._queue.first_lane()
        lead_s = self._lead_s(lane)
        if self._running and free_s - lead_s > now_s:
            return Wait(free_s - lead_s if lane else None)
        if lane is None:
            return Wait(None)
        steps = self._times.table(lane.key)
        decoded = self._queue.decoded(lane, steps)
        chosen, late = self._choose(lane, decoded, steps, free_s)
        until_s = self._better_later(lane, len(chosen), late, steps, now_s, free_s)
        if until_s is not None:
            return Wait(until_s)
        return StartBatch(
            [RequestPart(number, part, lane.key, of.deadline_s, of.alone) for _, number, part, of in chosen]
        )

    def started(self, batch: Sequence[RequestPart], now_s: float) -> None:
        """The batch was launched on the device."""
        for part in batch:
            request = self._requests[part.request]
            self._queue.take(request, part.number)
            request.running += 1
        self._running.append(_Running(batch, now_s, self.seconds(batch[0].key, len(batch))))

    def finished(
        self, batch: Sequence[RequestPart], now_s: float, *, learn: bool = True, launch_s: float | None = None
    ) -> None:
        """The batch left the device; learn=False: it failed, so its time is not used.

        launch_s: host time spent launching it.
        """
        place = next(place for place, run in enumerate(self._running) if run.batch is batch)
        run = self._running.pop(place)
        if learn:
            took_s = now_s - max(run.started_s, self._freed_s)
            self._times.note(batch[0].key, len(batch), took_s)
            if took_s > self.config.max_late_s:
                self._tried_s = now_s
            if launch_s is not None and launch_s < QUEUED * (now_s - run.started_s):
                self._launches.note(batch[0].key, launch_s)
        self._freed_s = now_s
        for part in batch:
            request = self._requests[part.request]
            request.running -= 1
            self._forget_if_done(request)

    # State

    def wait_s(self, key: Hashable, now_s: float, *, within_s: float = math.inf) -> float:
        """Seconds until a request of this key, due within within_s, would leave the device if it arrived now."""
        if self._may_try(now_s, key):
            return 0.0
        return self._drained_s(now_s, now_s + within_s) + self._times.table(key).seconds[1] - now_s

    @property
    def depth(self) -> int:
        return self._queue.parts

    @property
    def running(self) -> int:
        return sum(len(run.batch) for run in self._running)

    # Admission

    def _may_try(self, now_s: float, key: Hashable, late_s: float = 0.0, *, besides: int = 0) -> bool:
        """Whether a request expected to be late_s late is still admitted, because the device is idle."""
        probe_s = self.config.probe_s
        if self._running or self._queue.parts != besides or probe_s is None:
            return False
        if late_s > self.config.max_late_s:
            return self._times.is_measured(key) and now_s - self._tried_s > max(probe_s, RETRY * late_s)
        return now_s - self._tried_s > probe_s

    def _too_long(self, part_s: float) -> TooLarge:
        limit_s = self.config.max_part_s
        return TooLarge(
            f"it would keep the device from other requests for {part_s:.1f} s, at most {limit_s:g} s are allowed",
            code="too_long",
            hint="send it in smaller pieces",
        )

    def _rate(self, key: Hashable, now_s: float) -> float:
        return self._rates[key].per_s(now_s) if key in self._rates else 0.0

    def _late_by(self, newcomer: Request, now_s: float) -> float:
        """Seconds by which the newcomer, or another request because of it, would be late; 0 or less if in time."""
        plan = forecast(self._queue.views(), self._free_s(now_s), newcomer, self._full_size(newcomer, now_s))
        promised_s = now_s + (plan.newcomer_s - now_s) * (1 + self.config.margin)
        late_s = promised_s - newcomer.due_s
        if late_s > 0 or not plan.late:
            return late_s
        self._queue.remove(newcomer)  # were the others late without it?
        before = forecast(self._queue.views(), self._free_s(now_s))
        self._queue.insert(newcomer)
        return plan.late_s if plan.late > before.late else 0.0

    def _full_size(self, request: Request, now_s: float) -> int:
        """The size its batch may grow to before it starts: the one with the highest throughput at the arrival rate."""
        steps = self._times.table(request.key)
        rate = self._rate(request.key, now_s)
        full, most = 1, 0.0
        for size in (1,) if request.alone else steps.useful:
            seconds = steps.seconds[size]
            window_s = (request.due_s - now_s) / (1 + self.config.margin) - (request.ready_s - now_s) - seconds
            served = min(size, rate * min(window_s, seconds)) / seconds if seconds else 0.0
            if served > most * (1 + GAIN):
                full, most = size, served
        return full

    def _rejection(self, request: Request, late_s: float, now_s: float) -> Overloaded:
        """The error for a rejected request; it says when an identical one would be admitted if nothing else arrived."""
        limit_s = request.deadline_s - now_s
        steps = self._times.table(request.key)
        alone_s = steps.work_s(1) * request.parts if request.alone else steps.work_s(request.parts)
        own_s = (request.ready_s - now_s + alone_s) * (1 + self.config.margin) + request.deadline_s - request.due_s
        drained_s = max(0.001, self._drained_s(now_s) - now_s)
        if own_s > limit_s:
            return Overloaded(
                f"a deadline of {limit_s * 1e3:.0f} ms is shorter than the {own_s * 1e3:.0f} ms that an answer takes "
                "even when nothing else runs; allow more time",
                drained_s,
            )
        after_s = next((s for s in (late_s, 2 * late_s) if s < drained_s and self._fits_after(request, s, now_s)), None)
        return Overloaded(
            f"the queue holds {self._queue.parts} parts: an answer within {limit_s * 1e3:.0f} ms would be "
            f"{late_s * 1e3:.0f} ms late; try again later, or allow more time",
            drained_s if after_s is None else max(0.001, after_s),
        )

    def _fits_after(self, request: Request, seconds: float, now_s: float) -> bool:
        """Whether the request would be admitted if it arrived that much later and nothing else arrived."""
        later = replace(
            request,
            deadline_s=request.deadline_s + seconds,
            due_s=request.due_s + seconds,
            admitted_s=now_s + seconds,
            ready_s=request.ready_s + seconds,
        )
        self._queue.insert(later)
        plan = forecast(self._queue.views(), self._free_s(now_s), later, self._full_size(later, now_s + seconds))
        self._queue.remove(later)
        then_s = now_s + seconds
        return not plan.late and then_s + (plan.newcomer_s - then_s) * (1 + self.config.margin) <= later.due_s

    # Forming a batch

    def _lead_s(self, lane: Lane | None) -> float:
        """How long before the device becomes free the next batch is formed."""
        least_s = self.config.lead_ms / 1e3
        return min(MAX_LEAD_S, max(least_s, self._launches.get(lane.key))) if lane and least_s else least_s

    def _choose(
        self, lane: Lane, decoded: list[WaitingPart], steps: StepTable, free_s: float
    ) -> tuple[list[WaitingPart], int]:
        """The largest batch with which no part is late, in it or behind it; else the one with the fewest late."""
        chosen, fewest = decoded[:1], -1
        for size in reversed(steps.useful):
            if size > len(decoded):
                continue
            batch = decoded[:size]
            end_s = free_s + steps.seconds[size]
            if size > 1 and any(end_s > part.request.give_up_s for part in batch):
                continue
            late = sum(part.due_s < end_s for part in batch) + forecast(self._queue.views(lane, batch), end_s).late
            if fewest < 0 or late < fewest:
                chosen, fewest = batch, late
            if late == 0:
                break
        return chosen, fewest

    def _better_later(
        self, lane: Lane, size: int, late: int, steps: StepTable, now_s: float, free_s: float
    ) -> float | None:
        """Until when to hold the batch back: for a more urgent request about to be decoded, or for a fuller batch."""
        if late:
            coming_s = self._queue.coming_s(now_s, self.config.lead_ms / 1e3)
            waits = coming_s is not None and forecast(self._queue.views(), free_s).late < late
            return coming_s if waits else None
        if lane.alone or size == steps.useful[-1] or not self.config.max_queue_delay_ms:
            return None
        return self._fuller_at(lane, size, steps, now_s, free_s)

    def _fuller_at(self, lane: Lane, size: int, steps: StepTable, now_s: float, free_s: float) -> float | None:
        """When the next larger batch is full, if the wait is short, makes nobody late and raises throughput."""
        decoded = len(lane.parts) - lane.undecoded
        rate = self._rate(lane.key, now_s)
        larger = next(other for other in steps.useful if other > size)
        if decoded >= larger or rate * steps.seconds[size] <= size:  # limited by deadlines, or already keeping up
            return None
        coming = sorted(part.request.ready_s for part in lane.parts if not part.request.decoded)
        need = larger - decoded
        full_s = coming[need - 1] if need <= len(coming) else now_s + (need - len(coming)) / rate
        first_s = min(part.request.ready_s for part in lane.parts if part.request.decoded)
        limit_s = (
            max(first_s, self._freed_s, free_s if self._running else first_s) + self.config.max_queue_delay_ms / 1e3
        )
        if not now_s < full_s <= limit_s:
            return None
        gap_s = max(0.0, full_s - free_s)
        if larger / (gap_s + steps.seconds[larger]) <= size / steps.seconds[size]:
            return None
        end_s = max(full_s, free_s) + steps.seconds[larger]
        return None if lane.parts[0].due_s < end_s or forecast(self._queue.views(), full_s).late else full_s

    def _drained_s(self, now_s: float, before_s: float = math.inf) -> float:
        """When all waiting parts, or those due before before_s, would have left the device."""
        return forecast(self._queue.views(before_s=before_s), self._free_s(now_s)).end_s

    def _free_s(self, now_s: float) -> float:
        """When the device is expected to be free."""
        free_s = self._freed_s  # a batch queued behind another has been running since then
        for run in self._running:
            free_s = max(free_s, run.started_s) + run.seconds
        return max(free_s, now_s)

    def _forget_if_done(self, request: Request) -> None:
        if not request.waiting and not request.running:
            self._requests.pop(request.number, None)

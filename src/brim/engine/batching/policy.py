"""Which waiting requests run next, in one batch; and whether one more can still be answered in time.

Pure policy: no threads, no torch, no clock. Every method is told the time, so that tests run hours in seconds.

Both questions are answered by one thing, the plan: what waits, run in order of deadline, in batches as large as pays
and as the earliest deadline of each allows. A request is admitted if the plan with it keeps every deadline. A batch may
start if the plan of what it leaves behind does. So a promise made at the door is one that the queue can keep.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from brim.config import Range, check
from brim.engine.batching.queue import Entry, Lane, Request, Waiting, make_plan, work_s
from brim.engine.batching.service_times import GAIN, MAX_KEYS, QUANTILE, Ladder, ServiceTimes, Windows
from brim.errors import Overloaded

RATE_WINDOW_S = 0.25  # over which arrivals are counted: long beside a batch, short beside a change of load
IN_FLIGHT = 2  # batches on a device: one that runs and one behind it
QUEUED = 0.6  # of a batch's time: queueing it took less than that where the device works by itself
MAX_LEAD_S = 0.01


@dataclass(frozen=True, slots=True)
class RequestPart:
    """What runs in one place of a batch."""

    request: int
    number: int  # 0 … parts − 1 of its request
    key: Hashable  # only parts of one key share a batch
    deadline_s: float
    alone: bool = False  # strict, or retried after a death: never shares a batch


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Run these now, as one batch."""

    batch: list[RequestPart]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run before until_s; None: before something happens."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """When a batch starts and what may be promised."""

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

    def __post_init__(self) -> None:
        check(self)


@dataclass(slots=True)
class _Running:
    batch: Sequence[RequestPart]
    started_s: float
    seconds: float  # expected


@dataclass(slots=True)
class _Rate:
    """Parts a second that arrive, over a window that forgets."""

    count: float = 0.0
    at_s: float = 0.0

    def add(self, parts: int, now_s: float) -> None:
        self.count = self.count * math.exp(min(0.0, self.at_s - now_s) / RATE_WINDOW_S) + parts
        self.at_s = now_s

    def per_s(self, now_s: float) -> float:
        return self.count * math.exp(min(0.0, self.at_s - now_s) / RATE_WINDOW_S) / RATE_WINDOW_S


class BatchPolicy:
    """Admits requests, forms batches in order of deadline, learns how long they take."""

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]], config: BatcherConfig | None = None) -> None:
        """sizes(key): batch sizes that may run, ascending from 1 to the tuned one."""
        self.config = config or BatcherConfig()
        self._times = ServiceTimes(sizes)
        self._requests: dict[int, Request] = {}
        self._rates: dict[Hashable, _Rate] = {}
        self._running: list[_Running] = []
        self._tried_s = -math.inf  # when one was let in that should be late
        self._freed_s = -math.inf  # when the last batch left the device
        self._waiting = Waiting(self._times.ladder)
        self._launches = Windows(QUANTILE)
        self._count = 0

    # What takes how long

    def expect(self, key: Hashable, size: int, seconds: float) -> None:
        """A first guess of a batch's time, from tuning or warm-up; what is measured later replaces it."""
        self._times.expect(key, size, seconds)

    def knows(self, key: Hashable) -> bool:
        """Whether anything was measured or expected of this key."""
        return self._times.knows(key)

    def seconds(self, key: Hashable, size: int) -> float:
        """What a batch takes, as far as is known now; 0 when nothing is."""
        return self._times.ladder(key).seconds[size]

    # Requests come and go

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
        """Queue a request and return its id, or raise Overloaded; its parts run only after `ready`.

        before_s and after_s: what decoding before and finishing after the device take.
        """
        self._times.ladder(key)  # batch sizes that cannot work are told before anything is queued
        self._arrive(key, parts, now_s)
        due_s = deadline_s - after_s
        give_up_s = due_s + self.config.grace * (deadline_s - now_s)
        request = Request(self._count, key, alone, parts, deadline_s, due_s, now_s, now_s + before_s, give_up_s)
        if self._waiting.parts + parts > self.config.max_waiting:
            raise Overloaded(
                f"{self._waiting.parts} parts wait and this request has {parts}, "
                f"where at most {self.config.max_waiting} may wait; come again later",
                max(0.001, self._drained_s(now_s) - now_s),
            )
        self._waiting.insert(request)
        late_s = self._late_by(request, now_s)
        if late_s > 0:
            if not self._may_try(now_s, besides=parts):
                self._waiting.remove(request)
                raise self._refusal(request, late_s, now_s)
            self._tried_s, request.give_up_s = now_s, math.inf
        self._requests[request.number] = request
        self._count += 1
        return request.number

    def ready(self, request: int, now_s: float, *, key: Hashable | None = None, parts: int | None = None) -> None:
        """It is decoded: its parts may run; key and parts where they differ from what was admitted."""
        known = self._requests.get(request)
        if known is None:  # it left while it was decoded
            return
        self._waiting.remove(known)
        known.key = known.key if key is None else key
        known.parts = known.parts if parts is None else parts
        known.decoded, known.ready_s = True, now_s
        self._waiting.insert(known)

    def leave(self, request: int) -> None:
        """Cancelled, or failed: its waiting parts go; those on the device end there."""
        known = self._requests.get(request)
        if known is not None:
            self._waiting.remove(known)
            self._forget_if_done(known)

    def expire(self, now_s: float) -> list[int]:
        """Take out the requests that can no longer be answered in time, and name them."""
        free_s = self._free_s(now_s)
        gone = []
        for lane in list(self._waiting.lanes.values()):
            while lane.entries and self._hopeless(lane.entries[0][3], free_s, now_s):
                known = lane.entries[0][3]
                self._waiting.remove(known)
                self._forget_if_done(known)
                gone.append(known.number)
        return gone

    def _hopeless(self, request: Request, free_s: float, now_s: float) -> bool:
        least_s = self._times.ladder(request.key).seconds[1]
        if request.give_up_s == math.inf:  # it is to tell how long it takes
            return False
        return now_s > request.deadline_s or max(free_s, now_s) + least_s > request.give_up_s

    # Batches

    def next(self, now_s: float) -> StartBatch | Wait:
        """What to do now; a Start counts as waiting until `started`."""
        if len(self._running) >= IN_FLIGHT:
            return Wait(None)
        free_s = self._free_s(now_s)
        lane = self._waiting.first_lane()
        lead_s = self._lead_s(lane)
        if self._running and free_s - lead_s > now_s:
            return Wait(free_s - lead_s if lane else None)
        if lane is None:
            return Wait(None)
        ladder = self._times.ladder(lane.key)
        decoded = self._waiting.decoded(lane, ladder)
        chosen, late = self._choose(lane, decoded, ladder, free_s)
        until_s = self._better_later(lane, len(chosen), late, ladder, now_s, free_s)
        if until_s is not None:
            return Wait(until_s)
        return StartBatch(
            [RequestPart(number, part, lane.key, of.deadline_s, of.alone) for _, number, part, of in chosen]
        )

    def started(self, batch: Sequence[RequestPart], now_s: float) -> None:
        """The batch was handed to the device."""
        for part in batch:
            request = self._requests[part.request]
            self._waiting.take(request, part.number)
            request.running += 1
        self._running.append(_Running(batch, now_s, self.seconds(batch[0].key, len(batch))))

    def finished(
        self, batch: Sequence[RequestPart], now_s: float, *, learn: bool = True, launch_s: float | None = None
    ) -> None:
        """The batch left the device; learn=False: it failed, its time says nothing.

        launch_s: what queueing it took the host.
        """
        place = next(place for place, run in enumerate(self._running) if run.batch is batch)
        run = self._running.pop(place)
        if learn:
            self._times.note(batch[0].key, len(batch), now_s - max(run.started_s, self._freed_s))
            if launch_s is not None and launch_s < QUEUED * (now_s - run.started_s):
                self._launches.note(batch[0].key, launch_s)
        self._freed_s = now_s
        for part in batch:
            request = self._requests[part.request]
            request.running -= 1
            self._forget_if_done(request)

    # What others want to know

    def wait_s(self, key: Hashable, now_s: float, *, within_s: float = math.inf) -> float:
        """Seconds until a request of this key, due so soon, would leave the device if it arrived now."""
        if self._may_try(now_s):
            return 0.0
        return self._drained_s(now_s, now_s + within_s) + self._times.ladder(key).seconds[1] - now_s

    @property
    def depth(self) -> int:
        """Parts that wait, decoded or not."""
        return self._waiting.parts

    @property
    def running(self) -> int:
        """Parts on the device."""
        return sum(len(run.batch) for run in self._running)

    # Admission

    def _arrive(self, key: Hashable, parts: int, now_s: float) -> None:
        self._rates.setdefault(key, _Rate()).add(parts, now_s)
        if len(self._rates) > MAX_KEYS:
            self._rates = {key: rate for key, rate in self._rates.items() if rate.per_s(now_s) * RATE_WINDOW_S > 0.5}

    def _may_try(self, now_s: float, *, besides: int = 0) -> bool:
        """Whether a request is let in that will be late by all that is known: nobody else suffers if it is."""
        is_idle = not self._running and self._waiting.parts == besides
        probe_s = self.config.probe_s
        return is_idle and probe_s is not None and now_s - self._tried_s > probe_s

    def _rate(self, key: Hashable, now_s: float) -> float:
        return self._rates[key].per_s(now_s) if key in self._rates else 0.0

    def _late_by(self, newcomer: Request, now_s: float) -> float:
        """Seconds by which the newcomer, or another because of it, would be late; what is in time is not above 0."""
        plan = make_plan(self._waiting.queues(), self._free_s(now_s), newcomer, self._full_size(newcomer, now_s))
        promised_s = now_s + (plan.watched_s - now_s) * (1 + self.config.margin)
        late_s = promised_s - newcomer.due_s
        if late_s > 0 or not plan.late:
            return late_s
        self._waiting.remove(newcomer)  # were they late without it?
        before = make_plan(self._waiting.queues(), self._free_s(now_s))
        self._waiting.insert(newcomer)
        return plan.late_s if plan.late > before.late else 0.0

    def _full_size(self, request: Request, now_s: float) -> int:
        """The size its batch may grow to until it starts: that which serves most at the present rate of arrival.

        A promise must leave room for that. Otherwise a queue that is full to its deadlines admits no batch but small
        ones, which are slow, so that it stays full: see the simulation.
        """
        ladder = self._times.ladder(request.key)
        rate = self._rate(request.key, now_s)
        full, most = 1, 0.0
        for size in (1,) if request.alone else ladder.useful:
            seconds = ladder.seconds[size]
            window_s = (request.due_s - now_s) / (1 + self.config.margin) - (request.ready_s - now_s) - seconds
            served = min(size, rate * min(window_s, seconds)) / seconds if seconds else 0.0
            if served > most * (1 + GAIN):
                full, most = size, served
        return full

    def _refusal(self, request: Request, late_s: float, now_s: float) -> Overloaded:
        """Says when an identical request would be let in if nothing else came."""
        limit_s = request.deadline_s - now_s
        ladder = self._times.ladder(request.key)
        alone_s = work_s(1 if request.alone else request.parts, ladder) * (request.parts if request.alone else 1)
        own_s = (request.ready_s - now_s + alone_s) * (1 + self.config.margin) + request.deadline_s - request.due_s
        drained_s = max(0.001, self._drained_s(now_s) - now_s)
        if own_s > limit_s:
            return Overloaded(
                f"a deadline of {limit_s * 1e3:.0f} ms is shorter than the {own_s * 1e3:.0f} ms that an answer takes "
                "even when nothing else runs; give it more time",
                drained_s,
            )
        after_s = next((s for s in (late_s, 2 * late_s) if s < drained_s and self._fits_after(request, s, now_s)), None)
        return Overloaded(
            f"{self._waiting.parts} parts wait: an answer within {limit_s * 1e3:.0f} ms would be "
            f"{late_s * 1e3:.0f} ms late; come again later, or give it more time",
            drained_s if after_s is None else max(0.001, after_s),
        )

    def _fits_after(self, request: Request, seconds: float, now_s: float) -> bool:
        """Whether the request would be admitted if it came so much later and nothing else came."""
        later = replace(
            request,
            deadline_s=request.deadline_s + seconds,
            due_s=request.due_s + seconds,
            admitted_s=now_s + seconds,
            ready_s=request.ready_s + seconds,
        )
        self._waiting.insert(later)
        plan = make_plan(self._waiting.queues(), self._free_s(now_s), later, self._full_size(later, now_s + seconds))
        self._waiting.remove(later)
        then_s = now_s + seconds
        return not plan.late and then_s + (plan.watched_s - then_s) * (1 + self.config.margin) <= later.due_s

    # Forming a batch

    def _lead_s(self, lane: Lane | None) -> float:
        """How long before the device is free the next batch is formed."""
        least_s = self.config.lead_ms / 1e3
        return min(MAX_LEAD_S, max(least_s, self._launches.get(lane.key))) if lane and least_s else least_s

    def _choose(self, lane: Lane, decoded: list[Entry], ladder: Ladder, free_s: float) -> tuple[list[Entry], int]:
        """The largest batch that keeps every deadline, of its own parts and of those behind it; else fewest late."""
        chosen, fewest = decoded[:1], -1
        for size in reversed(ladder.useful):
            if size > len(decoded):
                continue
            batch = decoded[:size]
            end_s = free_s + ladder.seconds[size]
            if size > 1 and any(end_s > entry[3].give_up_s for entry in batch):
                continue
            late = sum(entry[0] < end_s for entry in batch) + make_plan(self._waiting.queues(lane, batch), end_s).late
            if fewest < 0 or late < fewest:
                chosen, fewest = batch, late
            if late == 0:
                break
        return chosen, fewest

    def _better_later(
        self, lane: Lane, size: int, late: int, ladder: Ladder, now_s: float, free_s: float
    ) -> float | None:
        """Until when to hold the batch back: for one that is due before it and about to come, or for a fuller one."""
        if late:
            coming_s = self._waiting.coming_s(now_s, self.config.lead_ms / 1e3)
            waits = coming_s is not None and make_plan(self._waiting.queues(), free_s).late < late
            return coming_s if waits else None
        if lane.alone or size == ladder.useful[-1] or not self.config.max_queue_delay_ms:
            return None
        return self._fuller_at(lane, size, ladder, now_s, free_s)

    def _fuller_at(self, lane: Lane, size: int, ladder: Ladder, now_s: float, free_s: float) -> float | None:
        """When the next larger size will be there, if the wait is short, costs no deadline and raises the rate."""
        decoded = len(lane.entries) - lane.undecoded
        rate = self._rate(lane.key, now_s)
        larger = next(other for other in ladder.useful if other > size)
        if decoded >= larger or rate * ladder.seconds[size] <= size:  # held back by deadlines, or keeps up as it is
            return None
        coming = sorted(entry[3].ready_s for entry in lane.entries if not entry[3].decoded)
        need = larger - decoded
        there_s = coming[need - 1] if need <= len(coming) else now_s + (need - len(coming)) / rate
        first_s = min(entry[3].ready_s for entry in lane.entries if entry[3].decoded)
        limit_s = (
            max(first_s, self._freed_s, free_s if self._running else first_s) + self.config.max_queue_delay_ms / 1e3
        )
        if not now_s < there_s <= limit_s:
            return None
        gap_s = max(0.0, there_s - free_s)
        if larger / (gap_s + ladder.seconds[larger]) <= size / ladder.seconds[size]:
            return None
        end_s = max(there_s, free_s) + ladder.seconds[larger]
        return None if lane.entries[0][0] < end_s or make_plan(self._waiting.queues(), there_s).late else there_s

    def _drained_s(self, now_s: float, before_s: float = math.inf) -> float:
        """When all that waits, or is due before then, would have left the device."""
        return make_plan(self._waiting.queues(before_s=before_s), self._free_s(now_s)).end_s

    def _free_s(self, now_s: float) -> float:
        """When the device should be free."""
        free_s = self._freed_s  # a batch that was queued behind another runs since then
        for run in self._running:
            free_s = max(free_s, run.started_s) + run.seconds
        return max(free_s, now_s)

    def _forget_if_done(self, request: Request) -> None:
        if not request.waiting and not request.running:
            self._requests.pop(request.number, None)

"""Which waiting requests run next, in one batch; and whether one more can still be answered in time.

Pure policy: no threads, no torch, no clock. Every method is told the time, so that tests run hours in seconds.

Both questions are answered by one thing, the plan: what waits, run in order of deadline, in batches as large as pays
and as the earliest deadline of each allows. A request is admitted if the plan with it keeps every deadline. A batch may
start if the plan of what it leaves behind does. So a promise made at the door is one that the queue can keep.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from brim.engine.service_times import GAIN, MAX_KEYS, Ladder, ServiceTimes
from brim.errors import ConfigError, Overloaded

RATE_WINDOW_S = 0.25  # over which arrivals are counted: long beside a batch, short beside a change of load
MOMENT_S = 0.0005  # between looks for one that should have been decoded by now
IN_FLIGHT = 2  # batches on a device: one that runs and one behind it


@dataclass(frozen=True, slots=True)
class Part:
    """What runs in one place of a batch."""

    request: int
    number: int  # 0 … parts − 1 of its request
    key: Hashable  # only parts of one key share a batch
    deadline_s: float
    alone: bool = False  # strict, or retried after a death: never shares a batch


@dataclass(frozen=True, slots=True)
class Start:
    """Run these now, as one batch."""

    batch: list[Part]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run before until_s; None: before something happens."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """When a batch starts and what may be promised."""

    max_queue_delay_ms: float = 5.0  # longest an idle device waits for a fuller batch, and only where that pays
    lead_ms: float = 2.0  # the next batch is formed this long before the running one should end: no gap on a device
    margin: float = 0.05  # of an estimate, kept back when promising
    grace: float = 0.05  # of a request's limit: expected to be later than that, it is given up before it runs
    max_waiting: int = 4096  # parts

    def __post_init__(self) -> None:
        if self.max_queue_delay_ms < 0 or self.lead_ms < 0:
            raise ConfigError(
                f"max_queue_delay_ms={self.max_queue_delay_ms} and lead_ms={self.lead_ms} must not be negative; "
                "0 turns each of them off"
            )
        if not (0 <= self.margin < 1 and 0 <= self.grace < 1):
            raise ConfigError(f"margin={self.margin} and grace={self.grace} must be in [0, 1); 0.05 is 5 %")
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting={self.max_waiting} must be at least 1 part")


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    key: Hashable
    alone: bool
    parts: int
    deadline_s: float
    due_s: float  # when it must leave the device, so that what comes after fits
    admitted_s: float
    ready_s: float  # when it is decoded, as expected; as it was once it is
    give_up_s: float  # expected to leave the device later than this, it does not run
    decoded: bool = False
    waiting: int = 0
    running: int = 0


_Entry = tuple[float, int, int, _Request]  # due_s, request, part, the request: sorts by due


@dataclass(slots=True)
class _Lane:
    """Parts that may share a batch, in order of due; of a request that runs alone, only its own."""

    key: Hashable
    alone: bool
    entries: list[_Entry] = field(default_factory=list)
    undecoded: int = 0  # parts
    latest_s: float = -math.inf  # when the last one should be decoded; not before that, at any rate


@dataclass(slots=True)
class _Running:
    batch: Sequence[Part]
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
        self._requests: dict[int, _Request] = {}
        self._lanes: dict[tuple[Hashable, bool], _Lane] = {}
        self._rates: dict[Hashable, _Rate] = {}
        self._running: list[_Running] = []
        self._freed_s = -math.inf  # when the last batch left the device
        self._waiting = 0
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
        request = _Request(self._count, key, alone, parts, deadline_s, due_s, now_s, now_s + before_s, give_up_s)
        if self._waiting + parts > self.config.max_waiting:
            raise Overloaded(
                f"{self._waiting} parts wait and this request has {parts}, where at most {self.config.max_waiting} "
                "may wait; come again later",
                max(0.001, self._drained_s(now_s) - now_s),
            )
        self._insert(request)
        late_s = self._late_by(request, now_s)
        if late_s > 0:
            self._remove(request)
            raise self._refusal(request, late_s, now_s)
        self._requests[request.number] = request
        self._count += 1
        return request.number

    def ready(self, request: int, now_s: float, *, key: Hashable | None = None, parts: int | None = None) -> None:
        """It is decoded: its parts may run; key and parts where they differ from what was admitted."""
        known = self._requests.get(request)
        if known is None:  # it left while it was decoded
            return
        self._remove(known)
        known.key = known.key if key is None else key
        known.parts = known.parts if parts is None else parts
        known.decoded, known.ready_s = True, now_s
        self._insert(known)

    def leave(self, request: int) -> None:
        """Cancelled, or failed: its waiting parts go; those on the device end there."""
        known = self._requests.get(request)
        if known is not None:
            self._remove(known)
            self._forget_if_done(known)

    def expire(self, now_s: float) -> list[int]:
        """Take out the requests that can no longer be answered in time, and name them."""
        free_s = self._free_s(now_s)
        gone = []
        for lane in list(self._lanes.values()):
            while lane.entries and self._hopeless(lane.entries[0][3], free_s, now_s):
                known = lane.entries[0][3]
                self._remove(known)
                self._forget_if_done(known)
                gone.append(known.number)
        return gone

    def _hopeless(self, request: _Request, free_s: float, now_s: float) -> bool:
        least_s = self._times.ladder(request.key).seconds[1]
        return now_s > request.deadline_s or max(free_s, now_s) + least_s > request.give_up_s

    # Batches

    def next(self, now_s: float) -> Start | Wait:
        """What to do now; a Start counts as waiting until `started`."""
        if len(self._running) >= IN_FLIGHT:
            return Wait(None)
        free_s = self._free_s(now_s)
        lane = self._first_lane()
        if self._running and free_s - self.config.lead_ms / 1e3 > now_s:
            return Wait(free_s - self.config.lead_ms / 1e3 if lane else None)
        if lane is None:
            return Wait(None)
        ladder = self._times.ladder(lane.key)
        decoded = self._decoded(lane, ladder)
        chosen, late = self._choose(lane, decoded, ladder, free_s)
        until_s = self._better_later(lane, len(chosen), late, ladder, now_s, free_s)
        if until_s is not None:
            return Wait(until_s)
        return Start([Part(number, part, lane.key, of.deadline_s, of.alone) for _, number, part, of in chosen])

    def started(self, batch: Sequence[Part], now_s: float) -> None:
        """The batch was handed to the device."""
        for part in batch:
            request = self._requests[part.request]
            self._take(request, part.number)
            request.running += 1
        self._running.append(_Running(batch, now_s, self.seconds(batch[0].key, len(batch))))

    def finished(self, batch: Sequence[Part], now_s: float, *, learn: bool = True) -> None:
        """The batch left the device; learn=False: it failed, its time says nothing."""
        place = next(place for place, run in enumerate(self._running) if run.batch is batch)
        run = self._running.pop(place)
        if learn:
            self._times.note(batch[0].key, len(batch), now_s - max(run.started_s, self._freed_s))
        self._freed_s = now_s
        for part in batch:
            request = self._requests[part.request]
            request.running -= 1
            self._forget_if_done(request)

    # What others want to know

    def wait_s(self, key: Hashable, now_s: float) -> float:
        """Seconds until a request of this key that arrives now would leave the device."""
        return self._drained_s(now_s) + self._times.ladder(key).seconds[1] - now_s

    @property
    def depth(self) -> int:
        """Parts that wait, decoded or not."""
        return self._waiting

    @property
    def running(self) -> int:
        """Parts on the device."""
        return sum(len(run.batch) for run in self._running)

    # Admission

    def _arrive(self, key: Hashable, parts: int, now_s: float) -> None:
        self._rates.setdefault(key, _Rate()).add(parts, now_s)
        if len(self._rates) > MAX_KEYS:
            self._rates = {key: rate for key, rate in self._rates.items() if rate.per_s(now_s) * RATE_WINDOW_S > 0.5}

    def _rate(self, key: Hashable, now_s: float) -> float:
        return self._rates[key].per_s(now_s) if key in self._rates else 0.0

    def _late_by(self, newcomer: _Request, now_s: float) -> float:
        """Seconds by which the newcomer, or another because of it, would be late; what is in time is not above 0."""
        plan = make_plan(self._queues(), self._free_s(now_s), newcomer, self._full_size(newcomer, now_s))
        promised_s = now_s + (plan.watched_s - now_s) * (1 + self.config.margin)
        late_s = promised_s - newcomer.due_s
        if late_s > 0 or not plan.late:
            return late_s
        self._remove(newcomer)  # were they late without it?
        before = make_plan(self._queues(), self._free_s(now_s))
        self._insert(newcomer)
        return plan.late_s if plan.late > before.late else 0.0

    def _full_size(self, request: _Request, now_s: float) -> int:
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

    def _refusal(self, request: _Request, late_s: float, now_s: float) -> Overloaded:
        """Says when an identical request would be let in if nothing else came."""
        limit_s = request.deadline_s - now_s
        ladder = self._times.ladder(request.key)
        work_s = _work_s(1 if request.alone else request.parts, ladder) * (request.parts if request.alone else 1)
        own_s = (request.ready_s - now_s + work_s) * (1 + self.config.margin) + request.deadline_s - request.due_s
        drained_s = max(0.001, self._drained_s(now_s) - now_s)
        if own_s > limit_s:
            return Overloaded(
                f"a deadline of {limit_s * 1e3:.0f} ms is shorter than the {own_s * 1e3:.0f} ms that an answer takes "
                "even when nothing else runs; give it more time",
                drained_s,
            )
        after_s = next((s for s in (late_s, 2 * late_s) if s < drained_s and self._fits_after(request, s, now_s)), None)
        return Overloaded(
            f"{self._waiting} parts wait; an answer within {limit_s * 1e3:.0f} ms would be {late_s * 1e3:.0f} ms late",
            drained_s if after_s is None else max(0.001, after_s),
        )

    def _fits_after(self, request: _Request, seconds: float, now_s: float) -> bool:
        """Whether the request would be admitted if it came so much later and nothing else came."""
        later = replace(
            request,
            deadline_s=request.deadline_s + seconds,
            due_s=request.due_s + seconds,
            admitted_s=now_s + seconds,
            ready_s=request.ready_s + seconds,
        )
        self._insert(later)
        plan = make_plan(self._queues(), self._free_s(now_s), later, self._full_size(later, now_s + seconds))
        self._remove(later)
        then_s = now_s + seconds
        return not plan.late and then_s + (plan.watched_s - then_s) * (1 + self.config.margin) <= later.due_s

    # Forming a batch

    def _first_lane(self) -> _Lane | None:
        """The lane of the decoded part that is due first."""
        first, due_s = None, math.inf
        for lane in self._lanes.values():
            if len(lane.entries) == lane.undecoded:
                continue
            head = next(entry for entry in lane.entries if entry[3].decoded)
            if head[0] < due_s or first is None:
                first, due_s = lane, head[0]
        return first

    @staticmethod
    def _decoded(lane: _Lane, ladder: Ladder) -> list[_Entry]:
        """The decoded parts that are due first, as many as a batch may hold."""
        most = 1 if lane.alone else ladder.useful[-1]
        if not lane.undecoded:
            return lane.entries[:most]
        found = []
        for entry in lane.entries:
            if entry[3].decoded:
                found.append(entry)
                if len(found) == most:
                    break
        return found

    def _choose(self, lane: _Lane, decoded: list[_Entry], ladder: Ladder, free_s: float) -> tuple[list[_Entry], int]:
        """The largest batch that keeps every deadline, of its own parts and of those behind it; else fewest late."""
        chosen, fewest = decoded[:1], -1
        for size in reversed(ladder.useful):
            if size > len(decoded):
                continue
            batch = decoded[:size]
            end_s = free_s + ladder.seconds[size]
            if size > 1 and any(end_s > entry[3].give_up_s for entry in batch):
                continue
            late = sum(entry[0] < end_s for entry in batch) + make_plan(self._queues(lane, batch), end_s).late
            if fewest < 0 or late < fewest:
                chosen, fewest = batch, late
            if late == 0:
                break
        return chosen, fewest

    def _better_later(
        self, lane: _Lane, size: int, late: int, ladder: Ladder, now_s: float, free_s: float
    ) -> float | None:
        """Until when to hold the batch back: for one that is due before it and about to come, or for a fuller one."""
        if late:
            coming_s = self._coming_s(now_s)
            return coming_s if coming_s and make_plan(self._queues(), free_s).late < late else None
        if lane.alone or size == ladder.useful[-1] or not self.config.max_queue_delay_ms:
            return None
        return self._fuller_at(lane, size, ladder, now_s, free_s)

    def _coming_s(self, now_s: float) -> float | None:
        """When the next one should be decoded; those that are overdue by more than the lead are not waited for."""
        oldest_s = now_s - self.config.lead_ms / 1e3
        times_s = (
            entry[3].ready_s
            for lane in self._lanes.values()
            if lane.undecoded
            for entry in lane.entries
            if not entry[3].decoded and entry[3].ready_s >= oldest_s
        )
        soonest_s = min(times_s, default=None)
        return None if soonest_s is None else max(soonest_s, now_s + MOMENT_S)

    def _fuller_at(self, lane: _Lane, size: int, ladder: Ladder, now_s: float, free_s: float) -> float | None:
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
        return None if lane.entries[0][0] < end_s or make_plan(self._queues(), there_s).late else there_s

    # The plan

    def _queues(self, without: _Lane | None = None, batch: Sequence[_Entry] = ()) -> "list[_Queue]":
        """The lanes as the plan reads them; without the batch, the first decoded ones of its lane."""
        queues = []
        for lane in self._lanes.values():
            entries = lane.entries
            if lane is without:
                if lane.undecoded:
                    taken = {entry[:3] for entry in batch}
                    entries = [entry for entry in entries if entry[:3] not in taken]
                else:
                    entries = entries[len(batch) :]
            if entries:
                latest_s = lane.latest_s if lane.undecoded else -math.inf
                queues.append(_Queue(entries, self._times.ladder(lane.key), lane.alone, latest_s))
        return queues

    def _drained_s(self, now_s: float) -> float:
        """When all that waits would have left the device."""
        return make_plan(self._queues(), self._free_s(now_s)).end_s

    def _free_s(self, now_s: float) -> float:
        """When the device should be free."""
        free_s = self._freed_s  # a batch that was queued behind another runs since then
        for run in self._running:
            free_s = max(free_s, run.started_s) + run.seconds
        return max(free_s, now_s)

    # Book-keeping

    def _insert(self, request: _Request) -> None:
        lane = self._lanes.setdefault((request.key, request.alone), _Lane(request.key, request.alone))
        for part in range(request.parts):
            insort(lane.entries, (request.due_s, request.number, part, request))
        request.waiting = request.parts
        self._waiting += request.parts
        if not request.decoded:
            lane.undecoded += request.parts
            lane.latest_s = max(lane.latest_s, request.ready_s)

    def _take(self, request: _Request, part: int) -> None:
        lane = self._lanes[request.key, request.alone]
        place = bisect_left(lane.entries, (request.due_s, request.number, part))
        assert lane.entries[place][1:3] == (request.number, part), "a part that does not wait was started"
        del lane.entries[place]
        request.waiting -= 1
        self._waiting -= 1
        if not lane.entries:
            del self._lanes[request.key, request.alone]

    def _remove(self, request: _Request) -> None:
        """Take out all that waits of a request."""
        lane = self._lanes.get((request.key, request.alone))
        if lane is None or not request.waiting:
            return
        place = bisect_left(lane.entries, (request.due_s, request.number))
        assert lane.entries[place][1] == request.number, "what waits of a request stands together"
        del lane.entries[place : place + request.waiting]
        self._waiting -= request.waiting
        if not request.decoded:
            lane.undecoded -= request.waiting
        request.waiting = 0
        if not lane.entries:
            del self._lanes[request.key, request.alone]

    def _forget_if_done(self, request: _Request) -> None:
        if not request.waiting and not request.running:
            self._requests.pop(request.number, None)


@dataclass(frozen=True, slots=True)
class _Queue:
    entries: list[_Entry]
    ladder: Ladder
    alone: bool
    latest_s: float  # when all are decoded


@dataclass(slots=True)
class _Plan:
    late: int = 0  # parts
    late_s: float = 0.0  # the most
    end_s: float = 0.0
    watched_s: float = -math.inf  # when the last part of the request watched ends


def make_plan(queues: Iterable[_Queue], free_s: float, watched: _Request | None = None, full: int = 1) -> _Plan:
    """Run what waits on paper: lanes by earliest due, each batch as large as pays and as its first part allows.

    full: the size that the batch of the request watched may have grown to when it starts.
    """
    plan = _Plan()
    heads = [(queue.entries[0][0], number, 0, queue) for number, queue in enumerate(queues)]
    heapq.heapify(heads)
    end_s = free_s
    while heads:
        due_s, number, place, queue = heads[0]
        entries, ladder = queue.entries, queue.ladder
        seconds = ladder.seconds
        ready_s = entries[place][3].ready_s
        start_s = ready_s if ready_s > end_s else end_s
        there = 1 if queue.alone else len(entries) - place
        if start_s < queue.latest_s and there > 1:
            there = _there(entries, place, start_s, min(there, ladder.useful[-1]))
        size = ladder.size_for(there)
        end_s = start_s + seconds[size]
        if end_s > due_s and size > 1:
            size = next((s for s in reversed(ladder.sizes) if s < size and start_s + seconds[s] <= due_s), size)
            end_s = start_s + seconds[size]
        stop = place + size
        if end_s > due_s:
            plan.late += sum(entry[0] < end_s for entry in entries[place:stop])
            plan.late_s = max(plan.late_s, end_s - due_s)
        watches = watched is not None and entries[place][3].key == watched.key and queue.alone == watched.alone
        if watched is not None and watches:
            # Those before it that fill no batch will run with it, if they can wait for a full one.
            grown_s = start_s + seconds[max(size, full)]
            reach = max(size, min(there, full)) if grown_s <= due_s else size
            if plan.watched_s < free_s and _ends(watched, entries, place, reach):
                plan.watched_s = grown_s
            if _ends(watched, entries, place, size):
                plan.watched_s = max(plan.watched_s, end_s)
        if len(heads) == 1 and end_s >= queue.latest_s and size == (1 if queue.alone else ladder.useful[-1]):
            until = len(entries)
            if watched is not None and watches:
                last = bisect_left(entries, (watched.due_s, watched.number, watched.parts - 1))
                until = last + size - max(size, full)
            stop, end_s = _skip(entries, stop, end_s, size, seconds[size], until)
        if stop < len(entries):
            heapq.heapreplace(heads, (entries[stop][0], number, stop, queue))
        else:
            heapq.heappop(heads)
    plan.end_s = end_s
    return plan


def _skip(entries: list[_Entry], place: int, end_s: float, size: int, took_s: float, until: int) -> tuple[int, float]:
    """Full batches one after the other as long as each is in time: a long queue costs little more than a short one."""
    while place + size <= until and entries[place][0] >= end_s + took_s:
        place += size
        end_s += took_s
    return place, end_s


def _ends(watched: _Request, entries: list[_Entry], place: int, size: int) -> bool:
    """Whether the last part of the request is in a batch of this size that begins here."""
    last = (watched.due_s, watched.number, watched.parts - 1)
    return entries[place][:3] <= last <= entries[min(place + size, len(entries)) - 1][:3]


def _there(entries: list[_Entry], place: int, start_s: float, most: int) -> int:
    """How many from here on will be decoded when a batch starts."""
    for count in range(1, most):
        if entries[place + count][3].ready_s > start_s:
            return count
    return most


def _work_s(parts: int, ladder: Ladder) -> float:
    """Seconds of device time of so many parts by themselves."""
    seconds = 0.0
    while parts > 0:
        size = ladder.size_for(parts)
        seconds += ladder.seconds[size]
        parts -= size
    return seconds

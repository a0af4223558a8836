"""Requests waiting for the device, in order of deadline, and a forecast of when they would finish."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from brim.engine.batching.service_times import Ladder


@dataclass(slots=True, eq=False)
class Request:
    """A request as the policy knows it."""

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


Entry = tuple[float, int, int, Request]  # due_s, request, part, the request: sorts by due


@dataclass(frozen=True, slots=True)
class Queue:
    """Parts that may share a batch, in order of due, and the batches they may share."""

    entries: list[Entry]
    ladder: Ladder
    alone: bool
    latest_s: float  # when all are decoded


@dataclass(slots=True)
class Plan:
    """How it went."""

    late: int = 0  # parts
    late_s: float = 0.0  # the most
    end_s: float = 0.0
    watched_s: float = -math.inf  # when the last part of the request watched ends


def make_plan(queues: Iterable[Queue], free_s: float, watched: Request | None = None, full: int = 1) -> Plan:
    """Run what waits on paper: lanes by earliest due, each batch as large as pays and as its first part allows.

    full: the size that the batch of the request watched may have grown to when it starts.
    """
    plan = Plan()
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


def _skip(entries: list[Entry], place: int, end_s: float, size: int, took_s: float, until: int) -> tuple[int, float]:
    """Full batches one after the other as long as each is in time: a long queue costs little more than a short one."""
    while place + size <= until and entries[place][0] >= end_s + took_s:
        place += size
        end_s += took_s
    return place, end_s


def _ends(watched: Request, entries: list[Entry], place: int, size: int) -> bool:
    """Whether the last part of the request is in a batch of this size that begins here."""
    last = (watched.due_s, watched.number, watched.parts - 1)
    return entries[place][:3] <= last <= entries[min(place + size, len(entries)) - 1][:3]


def _there(entries: list[Entry], place: int, start_s: float, most: int) -> int:
    """How many from here on will be decoded when a batch starts."""
    for count in range(1, most):
        if entries[place + count][3].ready_s > start_s:
            return count
    return most


def work_s(parts: int, ladder: Ladder) -> float:
    """Seconds of device time of so many parts by themselves."""
    seconds = 0.0
    while parts > 0:
        size = ladder.size_for(parts)
        seconds += ladder.seconds[size]
        parts -= size
    return seconds


MOMENT_S = 0.0005  # between looks for one that should have been decoded by now


@dataclass(slots=True)
class Lane:
    """Parts that may share a batch, in order of due; of a request that runs alone, only its own."""

    key: Hashable
    alone: bool
    entries: list[Entry] = field(default_factory=list)
    undecoded: int = 0  # parts
    latest_s: float = -math.inf  # when the last one should be decoded; not before that, at any rate


class Waiting:
    """The lanes, and how many parts wait in them."""

    def __init__(self, ladder: Callable[[Hashable], Ladder]) -> None:
        self._ladder = ladder
        self.lanes: dict[tuple[Hashable, bool], Lane] = {}
        self.parts = 0

    # In and out

    def insert(self, request: Request) -> None:
        """Its parts wait from now on."""
        lane = self.lanes.setdefault((request.key, request.alone), Lane(request.key, request.alone))
        for part in range(request.parts):
            insort(lane.entries, (request.due_s, request.number, part, request))
        request.waiting = request.parts
        self.parts += request.parts
        if not request.decoded:
            lane.undecoded += request.parts
            lane.latest_s = max(lane.latest_s, request.ready_s)

    def take(self, request: Request, part: int) -> None:
        """One of its parts goes to the device."""
        lane = self.lanes[request.key, request.alone]
        place = bisect_left(lane.entries, (request.due_s, request.number, part))
        assert lane.entries[place][1:3] == (request.number, part), "a part that does not wait was started"
        del lane.entries[place]
        request.waiting -= 1
        self.parts -= 1
        if not lane.entries:
            del self.lanes[request.key, request.alone]

    def remove(self, request: Request) -> None:
        """Take out all that waits of a request."""
        lane = self.lanes.get((request.key, request.alone))
        if lane is None or not request.waiting:
            return
        place = bisect_left(lane.entries, (request.due_s, request.number))
        assert lane.entries[place][1] == request.number, "what waits of a request stands together"
        del lane.entries[place : place + request.waiting]
        self.parts -= request.waiting
        if not request.decoded:
            lane.undecoded -= request.waiting
        request.waiting = 0
        if not lane.entries:
            del self.lanes[request.key, request.alone]

    # What there is

    def queues(
        self, without: Lane | None = None, batch: Sequence[Entry] = (), *, before_s: float = math.inf
    ) -> list[Queue]:
        """The lanes as the plan reads them; without the batch, the first decoded ones of its lane; due before then."""
        queues = []
        for lane in self.lanes.values():
            entries = lane.entries
            if lane is without:
                if lane.undecoded:
                    taken = {entry[:3] for entry in batch}
                    entries = [entry for entry in entries if entry[:3] not in taken]
                else:
                    entries = entries[len(batch) :]
            if before_s < math.inf:
                entries = entries[: bisect_left(entries, (before_s,))]
            if entries:
                latest_s = lane.latest_s if lane.undecoded else -math.inf
                queues.append(Queue(entries, self._ladder(lane.key), lane.alone, latest_s))
        return queues

    def first_lane(self) -> Lane | None:
        """The lane of the decoded part that is due first."""
        first, due_s = None, math.inf
        for lane in self.lanes.values():
            if len(lane.entries) == lane.undecoded:
                continue
            head = next(entry for entry in lane.entries if entry[3].decoded)
            if head[0] < due_s or first is None:
                first, due_s = lane, head[0]
        return first

    @staticmethod
    def decoded(lane: Lane, ladder: Ladder) -> list[Entry]:
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

    def coming_s(self, now_s: float, patience_s: float) -> float | None:
        """When the next one should be decoded; None for those that are overdue by more than one is patient."""
        oldest_s = now_s - patience_s
        times_s = (
            entry[3].ready_s
            for lane in self.lanes.values()
            if lane.undecoded
            for entry in lane.entries
            if not entry[3].decoded and entry[3].ready_s >= oldest_s
        )
        soonest_s = min(times_s, default=None)
        return None if soonest_s is None else max(soonest_s, now_s + MOMENT_S)

"""The plan: what waits, run on paper. Whether it is all in time is what admits a request and lets a batch start."""

import heapq
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

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

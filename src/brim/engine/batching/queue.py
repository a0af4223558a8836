"""Requests waiting for the device, in order of deadline, and a forecast of when they would finish.

Parts that may share a batch wait in one lane. `forecast` runs all lanes through the device, earliest deadline first,
with the step times measured so far. Admission and batch forming both ask it one question: is anybody late?
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from brim.engine.batching.service_times import StepTable

MOMENT_S = 0.0005  # between two checks for a request that should have been decoded by now


@dataclass(slots=True, eq=False)
class Request:
    """A request as the policy knows it."""

    number: int
    key: Hashable
    alone: bool
    parts: int
    deadline_s: float
    due_s: float  # when it must leave the device, so that finishing fits before the deadline
    admitted_s: float
    ready_s: float  # expected decode time until decoded, then the actual one
    give_up_s: float  # not run if it is expected to leave the device later than this
    decoded: bool = False
    waiting: int = 0  # parts
    running: int = 0  # parts


class WaitingPart(NamedTuple):
    """One part in a lane; sorts by deadline, then by arrival."""

    due_s: float
    number: int  # of the request
    part: int
    request: Request


@dataclass(slots=True)
class Lane:
    """Parts that may share a batch, in order of deadline; a request that runs alone has a lane of its own kind."""

    key: Hashable
    alone: bool
    parts: list[WaitingPart] = field(default_factory=list)
    undecoded: int = 0  # parts
    latest_s: float = -math.inf  # when the last part is expected to be decoded


class LaneView(NamedTuple):
    """A lane, or what is left of it, as the forecast reads it."""

    parts: list[WaitingPart]
    steps: StepTable
    alone: bool
    latest_s: float  # from then on every part is decoded

    def count_ready(self, place: int, start_s: float) -> int:
        """How many parts from place on, without a gap, are decoded when a batch starts; at most the largest batch."""
        most = 1 if self.alone else min(len(self.parts) - place, self.steps.useful[-1])
        if start_s >= self.latest_s:
            return most
        undecoded = (n for n in range(1, most) if self.parts[place + n].request.ready_s > start_s)
        return next(undecoded, most)


@dataclass(slots=True)
class Forecast:
    """When the device would be done with all waiting parts, and how many of them would be late."""

    end_s: float
    late: int = 0  # parts
    late_s: float = 0.0  # the largest delay
    newcomer_s: float = -math.inf  # when the last part of the newcomer leaves the device


def forecast(lanes: Sequence[LaneView], free_s: float, newcomer: Request | None = None, full: int = 1) -> Forecast:
    """Simulate the waiting parts on the device: earliest deadline first, one batch after the other.

    A batch takes the decoded parts of the lane whose first part is due first: the largest useful size they fill, or
    the largest that still ends in time for that first part. `full` is the size the newcomer's batch may grow to before
    it starts, because more requests arrive while it waits; its promise must leave room for that.

    Example. Step times are 5 ms for one part, 8 ms for two, 12 ms for four; the device is free at t = 10 ms. Parts a,
    b and c of one lane are due at 30, 40 and 50 ms and all decoded.

        batch (a, b)   three parts fill a batch of two    10 → 18 ms, in time for a (30)
        batch (c)      one part left                      18 → 23 ms, in time for c (50)

    So nothing is late and end_s is 23 ms. Now d arrives, due at 21 ms. It is first in order, and (d, a, b, c) fill a
    batch of four: 10 → 22 ms is too late for d, so the batch shrinks to (d, a): 10 → 18 ms; (b, c) follow: 18 → 26 ms.
    If d arrives with `full` = 4, its batch must be expected to grow to four parts and to end at 22 ms: newcomer_s is
    22 ms and d is rejected. Without that allowance a full queue admits only small, slow batches and stays full:
    simulated at 1.2 times the capacity of an H200, goodput is 67 % of capacity instead of 85 %
    (benchmarks/simulate_batcher.py).
    """
    result = Forecast(free_s)
    heads = [(lane.parts[0].due_s, number, 0, lane) for number, lane in enumerate(lanes)]
    heapq.heapify(heads)
    while heads:
        due_s, number, place, lane = heads[0]
        seconds = lane.steps.seconds
        start_s = max(result.end_s, lane.parts[place].request.ready_s)
        ready = lane.count_ready(place, start_s)
        size = lane.steps.size_for(ready)
        if size > 1 and start_s + seconds[size] > due_s:
            in_time = (s for s in reversed(lane.steps.sizes) if s < size and start_s + seconds[s] <= due_s)
            size = next(in_time, size)
        end_s = start_s + seconds[size]
        if end_s > due_s:
            result.late += sum(part.due_s < end_s for part in lane.parts[place : place + size])
            result.late_s = max(result.late_s, end_s - due_s)
        if newcomer is not None and lane.parts[place].request.key == newcomer.key and lane.alone == newcomer.alone:
            grown_s = start_s + seconds[max(size, full)]
            # Parts before the newcomer that do not fill a batch run with it, if the first can wait for a full one.
            reach = max(size, min(ready, full)) if grown_s <= due_s else size
            if result.newcomer_s < free_s and _ends_in(newcomer, lane.parts, place, reach):
                result.newcomer_s = grown_s
            if _ends_in(newcomer, lane.parts, place, size):
                result.newcomer_s = max(result.newcomer_s, end_s)
        result.end_s = end_s
        if place + size < len(lane.parts):
            heapq.heapreplace(heads, (lane.parts[place + size].due_s, number, place + size, lane))
        else:
            heapq.heappop(heads)
    return result


def _ends_in(request: Request, parts: list[WaitingPart], place: int, size: int) -> bool:
    """Whether the last part of the request is in a batch of this size that begins at place."""
    last = (request.due_s, request.number, request.parts - 1)
    return parts[place][:3] <= last <= parts[min(place + size, len(parts)) - 1][:3]


class RequestQueue:
    """All lanes, and how many parts wait in them."""

    def __init__(self, steps: Callable[[Hashable], StepTable]) -> None:
        self._steps = steps
        self.lanes: dict[tuple[Hashable, bool], Lane] = {}
        self.parts = 0

    # In and out

    def insert(self, request: Request) -> None:
        lane = self.lanes.setdefault((request.key, request.alone), Lane(request.key, request.alone))
        for part in range(request.parts):
            insort(lane.parts, WaitingPart(request.due_s, request.number, part, request))
        request.waiting = request.parts
        self.parts += request.parts
        if not request.decoded:
            lane.undecoded += request.parts
            lane.latest_s = max(lane.latest_s, request.ready_s)

    def take(self, request: Request, part: int) -> None:
        """Remove one part, which goes to the device."""
        lane = self.lanes[request.key, request.alone]
        place = bisect_left(lane.parts, (request.due_s, request.number, part))
        assert lane.parts[place][1:3] == (request.number, part), "a part was started that is not in the queue"
        del lane.parts[place]
        request.waiting -= 1
        self.parts -= 1
        if not lane.parts:
            del self.lanes[request.key, request.alone]

    def remove(self, request: Request) -> None:
        """Remove all waiting parts of a request."""
        lane = self.lanes.get((request.key, request.alone))
        if lane is None or not request.waiting:
            return
        place = bisect_left(lane.parts, (request.due_s, request.number))
        assert lane.parts[place].number == request.number, "the waiting parts of a request are neighbours"
        del lane.parts[place : place + request.waiting]
        self.parts -= request.waiting
        if not request.decoded:
            lane.undecoded -= request.waiting
        request.waiting = 0
        if not lane.parts:
            del self.lanes[request.key, request.alone]

    # Views

    def views(
        self, without: Lane | None = None, batch: Sequence[WaitingPart] = (), *, before_s: float = math.inf
    ) -> list[LaneView]:
        """The lanes for a forecast, without a batch taken from one of them; only parts due before before_s."""
        views = []
        for lane in self.lanes.values():
            parts = lane.parts
            if lane is without:
                if lane.undecoded:
                    taken = {part[:3] for part in batch}
                    parts = [part for part in parts if part[:3] not in taken]
                else:
                    parts = parts[len(batch) :]
            if before_s < math.inf:
                parts = parts[: bisect_left(parts, (before_s,))]
            if parts:
                latest_s = lane.latest_s if lane.undecoded else -math.inf
                views.append(LaneView(parts, self._steps(lane.key), lane.alone, latest_s))
        return views

    def first_lane(self) -> Lane | None:
        """The lane of the decoded part that is due first."""
        first, due_s = None, math.inf
        for lane in self.lanes.values():
            if len(lane.parts) == lane.undecoded:
                continue
            head = next(part for part in lane.parts if part.request.decoded)
            if head.due_s < due_s or first is None:
                first, due_s = lane, head.due_s
        return first

    @staticmethod
    def decoded(lane: Lane, steps: StepTable) -> list[WaitingPart]:
        """The decoded parts that are due first, as many as a batch may hold."""
        most = 1 if lane.alone else steps.useful[-1]
        if not lane.undecoded:
            return lane.parts[:most]
        return [part for part in lane.parts if part.request.decoded][:most]

    def coming_s(self, now_s: float, patience_s: float) -> float | None:
        """When the next request should be decoded; None if all of them are overdue by more than patience_s."""
        oldest_s = now_s - patience_s
        times_s = (
            part.request.ready_s
            for lane in self.lanes.values()
            if lane.undecoded
            for part in lane.parts
            if not part.request.decoded and part.request.ready_s >= oldest_s
        )
        soonest_s = min(times_s, default=None)
        return None if soonest_s is None else max(soonest_s, now_s + MOMENT_S)

"""Who waits: requests and their parts, in lanes that may share a batch, each in order of when it is due."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from brim.engine.batching.plan import Entry, Queue, Request
from brim.engine.batching.service_times import Ladder

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

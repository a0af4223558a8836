"""What a request is while it is under way: decoded, in a batch or a piece of one, answered.

Without threads or a lock: whoever changes one holds the runner's.
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from brim.engine.batching.policy import Part
from brim.engine.batching.servable import Answer, Item, Payload, Servable


class Reply(Future[Answer]):
    """The answer to come of one request, and the number that on_start gets when its batch is handed to the device."""

    def __init__(self, request: int) -> None:
        super().__init__()
        self.request = request


@dataclass(slots=True, eq=False)
class Job:
    """A request under way."""

    reply: Reply
    servable: Servable
    token: int  # of the servable
    key: Hashable
    payload: Payload | None
    deadline_s: float
    submitted_s: float
    item: Item | None = None
    outputs: list[Any] = field(default_factory=list)
    left: int = 0  # parts without an output
    done: bool = False
    decode_s: float = 0.0
    ready_s: float = 0.0
    started_s: float = 0.0
    collected_s: float = 0.0


@dataclass(slots=True, eq=False)
class Batch:
    """What the policy started; it may run in pieces once it has failed as a whole."""

    parts: list[Part]
    started_s: float
    pieces: int = 1
    failed: bool = False


@dataclass(slots=True, eq=False)
class Piece:
    """A batch, or a part of one that failed as a whole."""

    batch: Batch
    places: list[tuple[Job, int]]  # a request and the number of its part
    since_s: float = 0.0
    launch_s: float | None = None  # what queueing it took


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of what collect takes: why a forward failed."""

    failure: BaseException


def forward(piece: Piece) -> Any:
    """Queue a piece on the device; what collect takes, or why it failed."""
    try:
        parts = [job.item.parts[number] for job, number in piece.places if job.item is not None]
        return piece.places[0][0].servable.forward(parts)
    except BaseException as failure:
        return Failed(failure)


def halves(places: list[tuple[Job, int]], sizes: Sequence[int]) -> list[list[tuple[Job, int]]]:
    """A batch in two, or more where half of it is no batch size."""
    if len(places) < 2:
        return []
    size = max(size for size in sizes if size <= max(1, len(places) // 2))
    return [places[start : start + size] for start in range(0, len(places), size)]


def too_late(job: Job, now_s: float) -> str:
    """What a request is told that was accepted and then could not be answered in time."""
    limit_s = job.deadline_s - job.submitted_s
    return (
        f"accepted with {limit_s * 1e3:.0f} ms to its deadline, but {(now_s - job.submitted_s) * 1e3:.0f} ms later it "
        "could no longer be answered in time; send it again, or give it more time"
    )

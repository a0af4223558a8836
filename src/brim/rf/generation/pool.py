"""A pool of workers, each a process with one device: start them, submit tasks, wait for events.

A pool opens the same `Assignment` in every worker and passes tasks and results. It never runs a task twice and reports
every death: its user decides what runs again. `brim.cluster` has the pools of processes and of Ray.
"""

import itertools
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from brim import errors
from brim.errors import BrimError, ClusterError

START_S = 180.0  # for workers to be ready: they import, compile and fit their batch
TICK_S = 0.2
LEAVE_S = 3.0  # for workers to end what they write
RESTARTS = 5  # of a worker that ends no task in between: what dies more often dies of something that stays


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker reports about itself when it is ready."""

    device: str  # as torch names it there
    device_name: str  # as a manifest has it
    kind: str  # workers of one kind produce equal bytes
    batch_size: int
    batch_sizes: str | None = None  # content of a file of batch sizes, tuned there


class Assignment(Protocol):
    """What a worker does, as it is sent to it."""

    def open(self, device: str, threads: int | None) -> AbstractContextManager[Any]:
        """Open it on a device, with this many CPU cores: a server with `facts`, whose submit returns a Future."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker accepts tasks from now on."""

    worker: int
    name: str
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class TaskDone:
    worker: int
    ticket: int
    value: Any


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task raised; the worker continues."""

    worker: int
    ticket: int
    error: BrimError


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone, or could not be opened, and all its tasks with it."""

    worker: int
    name: str
    error: BrimError
    was_ready: bool


PoolEvent = WorkerReady | TaskDone | TaskFailed | WorkerLost


@dataclass(slots=True, kw_only=True)
class PooledWorker:
    number: int
    name: str  # for people: its device, and its node where there are several
    restarts: int = 0  # since a task was done
    is_ready: bool = False


class Pool(ABC):
    """Workers, numbered from 0; one that replaces a lost worker has a new number."""

    def __init__(self) -> None:
        self._workers: dict[int, Any] = {}  # PooledWorker, each pool its own
        self._numbers = itertools.count()
        self._tickets = itertools.count(1)

    @abstractmethod
    def start(self, assignment: Assignment) -> int:
        """Begin to start the workers and return their number; each is reported as WorkerReady or WorkerLost."""

    def submit(self, worker: int, task: Any) -> int:
        """Give a ready worker a task and return its ticket; a lost worker ignores it."""
        ticket = next(self._tickets)
        if worker in self._workers:
            self._send(self._workers[worker], ticket, task)
        return ticket

    @abstractmethod
    def wait(self, timeout_s: float) -> list[PoolEvent]:
        """Events as soon as there are any, or an empty list after the timeout."""

    def expects(self) -> int:
        """Workers that are starting, including replacements of lost ones."""
        return sum(not worker.is_ready for worker in self._workers.values())

    @abstractmethod
    def close(self) -> None:
        """End all workers; their tasks are dropped, but no file is left half-written."""

    @abstractmethod
    def _send(self, worker: Any, ticket: int, task: Any) -> None: ...

    @abstractmethod
    def _end(self, worker: Any) -> None:
        """Kill a worker; again changes nothing."""

    @abstractmethod
    def _replace(self, worker: Any) -> None: ...

    def _event(self, worker: Any, kind: str, ticket: int, value: Any) -> PoolEvent:
        """The event of what a worker sent: "ready", "refused", "done" or "failed"."""
        if kind == "ready":
            worker.is_ready = True
            return WorkerReady(worker.number, worker.name, value)
        if kind == "done":
            worker.restarts = 0
            return TaskDone(worker.number, ticket, value)
        error = value.error(worker.name)
        return TaskFailed(worker.number, ticket, error) if kind == "failed" else self._lose(worker, error)

    def _lose(self, worker: Any, error: BrimError) -> WorkerLost:
        del self._workers[worker.number]
        self._end(worker)
        if worker.is_ready and worker.restarts < RESTARTS:
            self._replace(worker)
        return WorkerLost(worker.number, worker.name, error, worker.is_ready)


class WorkerHost:
    """Within a worker: opens the assignment; its server takes the tasks."""

    def __init__(self) -> None:
        self._opened: Any = None
        self.server: Any = None

    def enter(self, assignment: Assignment, device: str, threads: int | None) -> tuple[str, Any]:
        opened = assignment.open(device, threads)
        try:
            self.server = opened.__enter__()
        except Exception as failure:  # whatever it is, the head must hear it
            return "refused", PackedError.of(failure)
        self._opened = opened
        return "ready", self.server.facts

    def leave(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.__exit__(None, None, None)


def start_workers(
    pool: Pool, assignment: Assignment, *, allow_mixed: bool, stop: Callable[[], bool], tick: Callable[[], None]
) -> list[WorkerReady]:
    """Start a pool and wait until all its workers are ready, or fewer if stopped; one that cannot open is an error.

    So are devices of several types, unless allow_mixed.
    """
    num_workers, deadline_s = pool.start(assignment), time.monotonic() + START_S
    ready: list[WorkerReady] = []
    while len(ready) < num_workers and not stop():
        for event in pool.wait(TICK_S):
            if isinstance(event, WorkerLost):
                raise event.error
            if isinstance(event, WorkerReady):
                ready.append(event)
        tick()
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"{len(ready)} of {num_workers} workers were ready after {START_S:.0f} s",
                code="timeout",
                hint="check that the nodes have free CPUs and GPUs: ray status",
            )
    kinds: dict[str, list[str]] = {}
    for event in ready:
        kinds.setdefault(event.facts.kind, []).append(event.name)
    if len(kinds) > 1 and not allow_mixed:
        named = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in sorted(kinds.items()))
        raise ClusterError(
            f"devices are of {len(kinds)} types ({named}), whose results differ in their last bits",
            code="mixed_devices",
            hint="use devices of one type, or accept the difference with {allow_mixed}",
        )
    return ready


@dataclass(frozen=True, slots=True)
class PackedError:
    """An exception on its way between processes."""

    family: str
    message: str
    code: str = ""
    hint: str = ""
    last_lines: str = ""  # of the traceback

    @classmethod
    def of(cls, failure: BaseException) -> Self:
        family = type(failure).__name__
        if isinstance(failure, BrimError):
            hint, failure.hint = failure.hint, ""
            return cls(family, str(failure), failure.code, hint)
        lines = "".join(traceback.format_exception(failure)).strip().split("\n")[-3:]
        return cls(family, str(failure), last_lines=" ".join(line.strip() for line in lines))

    def error(self, worker: str = "") -> BrimError:
        """One of brim's errors by its family, any other as ClusterError with the last lines of its traceback."""
        prefix = f"worker {worker}: " if worker else ""
        family = getattr(errors, self.family, None)
        if isinstance(family, type) and issubclass(family, BrimError):
            options = {"code": self.code, "hint": self.hint}
            try:
                error: BrimError = family(f"{prefix}{self.message}", **options)
            except TypeError:  # a family with further arguments
                error = BrimError(f"{prefix}{self.message}", **options)
            return error
        return ClusterError(f"{prefix}failed with {self.family}: {self.message} ({self.last_lines})")

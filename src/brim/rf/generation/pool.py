"""The protocol between a run and its workers: start them, submit tasks, wait for events.

A pool opens the same `Assignment` in every worker, a process with one device, and passes tasks and results. It never
runs a task twice and reports every death: its user decides what runs again. `brim.cluster` has the pools.
"""

import traceback
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from brim import errors
from brim.errors import BrimError, ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker reports about itself when it is ready."""

    device: str  # as torch names it there
    device_name: str  # as a manifest has it
    kind: str  # workers of one kind produce equal bytes
    batch_size: int


class TaskServer(Protocol):
    """Serves tasks within a worker; submit is called from one thread and does not block."""

    facts: WorkerFacts

    def submit(self, task: Any) -> "Future[Any]": ...


class Assignment(Protocol):
    """What a worker does, as it is sent to it."""

    def open(self, device: str, threads: int | None) -> AbstractContextManager[TaskServer]:
        """Open it on a device, with this many CPU cores."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker accepts tasks from now on."""

    worker: int
    name: str  # for people: its device, and its node where there are several
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class TaskDone:
    worker: int
    ticket: int
    value: Any


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task raised; the worker goes on."""

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


class Pool(Protocol):
    """Workers, numbered from 0; one that replaces a lost worker has a new number."""

    def start(self, assignment: Assignment) -> int:
        """Begin to start the workers and return their number; each is reported as WorkerReady or WorkerLost."""
        ...

    def submit(self, worker: int, task: Any) -> int:
        """Give a ready worker a task and return its ticket; a lost worker ignores it."""
        ...

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        """Events as soon as there are any, or an empty list after the timeout."""
        ...

    def expects(self) -> int:
        """Workers that are starting, including replacements of lost ones."""
        ...

    def close(self) -> None:
        """End all workers; their tasks are dropped, but no file is left half-written."""
        ...


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

"""Workers behind one interface: start them, give them tasks, hear what came of it.

A pool knows neither radio nor images: it opens the same `Work` in every worker, a process with one device, and passes
tasks and results. It never runs a task twice and never hides a death: who runs what again is decided by its user.
"""

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from brim import errors
from brim.errors import BrimError, ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a worker says of itself when it is ready."""

    device: str  # as torch names it there
    device_name: str  # as a manifest has it
    kind: str  # workers of one kind make equal bytes
    batch_size: int


class Server(Protocol):
    """What serves tasks within a worker; submit is called from one thread and does not wait."""

    facts: Facts

    def submit(self, task: Any) -> "Future[Any]":
        """Begin a task; several may be under way."""
        ...


class Work(Protocol):
    """What a worker does, as it travels to it."""

    def open(self, device: str, threads: int | None) -> AbstractContextManager[Server]:
        """Open it on a device, with so many cores of the CPU."""
        ...


# What happened


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker takes tasks from now on."""

    worker: int
    name: str  # for people: its device, and its node where there are several
    facts: Facts


@dataclass(frozen=True, slots=True)
class Done:
    """A task ended."""

    worker: int
    ticket: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A task raised; the worker goes on."""

    worker: int
    ticket: int
    error: BrimError


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, or could not be opened, and all its tasks with it."""

    worker: int
    name: str
    error: BrimError
    was_ready: bool


Event = Ready | Done | Failed | Lost


class Pool(Protocol):
    """Workers, numbered from 0; one that takes the place of a lost one has a new number."""

    def start(self, work: Work) -> int:
        """Begin to start the workers; returns how many there are to be. Each is told as Ready or Lost."""
        ...

    def submit(self, worker: int, task: Any) -> int:
        """Give a ready worker a task; returns the number its end is told by. Nothing comes of it for a lost worker."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """What happened, as soon as something did, or nothing after some time."""
        ...

    def expects(self) -> int:
        """Workers that are starting: those that are to replace lost ones included."""
        ...

    def close(self) -> None:
        """End all workers; what they have under way is dropped, but no file is left half-written."""
        ...


# Failures on their way between processes


def pack(failure: BaseException) -> tuple[str, str, str]:
    """An exception as what any process can read: family, message, traceback."""
    detail = "".join(traceback.format_exception(failure))
    return type(failure).__name__, str(failure), detail


def unpack(packed: tuple[str, str, str], name: str) -> BrimError:
    """The failure of a worker: one of ours by its family, any other as ClusterError with its last lines."""
    family, message, detail = packed
    ours: Callable[..., BrimError] | None = getattr(errors, family, None)
    if isinstance(ours, type) and issubclass(ours, BrimError):
        try:
            return ours(f"worker {name}: {message}")
        except TypeError:  # one with more to say than a message
            return BrimError(f"worker {name}: {message}")
    where = detail.strip().split("\n")[-3:]
    return ClusterError(f"worker {name} failed: {family}: {message} ({' '.join(line.strip() for line in where)})")

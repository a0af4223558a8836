"""What the processes of a service share: settings from the supervisor, a lifeline to it, heartbeats and file locks.

The supervisor gives each child one JSON object on standard input (not in arguments or environment, which others can
read: it contains a token and a database password), a pipe whose end means that the supervisor is gone, and a worker a
second pipe for its heartbeats. Used by workers and by the API.
"""

import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from brim.errors import Conflict

_PR_SET_PDEATHSIG = 1
LOCK_POLL_S = 0.1
GIVE_UP = b"!"


def read_settings() -> dict[str, Any]:
    """The supervisor's settings for this process, from standard input."""
    settings: dict[str, Any] = json.load(sys.stdin)
    return settings


def urls(data: Path, database: str | None) -> tuple[str, str]:
    """URLs of queue and catalogue: one PostgreSQL database, or two SQLite files, the given one for the queue."""
    if database is not None and not database.startswith("sqlite:"):
        return database, database
    queue = data / "jobs.sqlite" if database is None else Path(database.removeprefix("sqlite:///")).absolute()
    return f"sqlite:///{queue}", f"sqlite:///{data / 'catalogue.sqlite'}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_supervisor(lifeline: int) -> None:
    """End this process when the supervisor ends, however that does: the only writer of the pipe is the supervisor.

    A thread waits for the pipe's end. On Linux the kernel kills us besides, also where Python cannot run a thread.
    """
    die_with_parent()
    threading.Thread(target=_end_with, args=[lifeline], name="lifeline", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(1)


def give_way_to_others() -> None:
    """Give the API priority for the processor, and let the kernel kill this process first when memory runs out."""
    os.nice(5)
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError:
        return  # another system, or not allowed: then it chooses by size


class Heartbeat:
    """One byte to the supervisor for each sign of progress; if the pipe is full, another byte would add nothing."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe

    def __call__(self) -> None:
        self._say(b".")

    def give_up(self) -> None:
        """Ask the supervisor to kill this process: something in it does not end."""
        self._say(GIVE_UP)

    def _say(self, byte: bytes) -> None:
        try:
            os.write(self._pipe, byte)
        except (BlockingIOError, BrokenPipeError):
            return


class FileLock:
    """A file lock that ends with its process; the file contains the holder's process id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def take(self) -> bool:
        """Try to take the lock; whether it is held now."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        os.ftruncate(file, 0)
        os.write(file, b"%d\n" % os.getpid())
        self._file = file
        return True

    def wait(self, seconds: float, *, idle: Callable[[], None] = lambda: None) -> Self:
        """Take the lock as soon as its holder ends; Conflict after so many seconds."""
        end = time.monotonic() + seconds
        while not self.take():
            if time.monotonic() > end:
                raise Conflict(f"{self.path.name} is held by process {self.holder()}; stop it first")
            idle()
            time.sleep(LOCK_POLL_S)
        return self

    def holder(self) -> str:
        """Id of the process that took it last, or "unknown"."""
        try:
            return self.path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

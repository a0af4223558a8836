"""Work that a pool can be tested with: tasks are words."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from brim.errors import ConfigError
from brim.rf.generation.pool import WorkerFacts


@dataclass(frozen=True)
class ToyWork:
    """Opens a ToyServer, or raises what it is told to."""

    refuse: str = ""

    @contextmanager
    def open(self, device: str, threads: int | None) -> Iterator["ToyServer"]:
        if self.refuse:
            raise ConfigError(self.refuse)
        yield ToyServer(device, threads)


class ToyServer:
    """Answers, meets another, sleeps, fails or dies."""

    def __init__(self, device: str, threads: int | None) -> None:
        self.facts = WorkerFacts(device=device, device_name=device, kind=f"{device} {threads}", batch_size=1)
        self.pool = ThreadPoolExecutor(4)

    def submit(self, task: tuple[Any, ...]) -> "Future[Any]":
        return self.pool.submit(self.run, *task)

    def run(self, what: str, value: Any = None) -> Any:
        if what == "meet":
            os.close(os.open(*value))  # of a FIFO, that waits for its other end
        if what == "sleep":
            time.sleep(value)
        if what == "wrong":
            raise ConfigError(f"{value} is wrong")
        if what == "bug":
            raise KeyError(value)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

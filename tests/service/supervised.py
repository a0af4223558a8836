"""A supervisor at work in a thread of the test."""

import threading
from typing import Self

from brim.service.run.supervisor import Oversee, Programs, Supervisor
from waiting import PATIENCE_S


class Supervised:
    """Runs from the beginning of the block, and ends as the service does."""

    def __init__(self, made: Programs, oversee: Oversee = lambda deaths: []) -> None:
        self.supervisor = Supervisor(made, oversee)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.supervisor.run, args=[self._stop.is_set])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

"""Requests → batches → futures: the threads around the batch policy, the same for every kind of model."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from brim.engine.batcher import BatcherConfig
from brim.engine.servable import Answer, Item, Payload, Servable, Shape

__all__ = ["Answer", "BatchRunner", "Item", "Payload", "Reply", "Servable", "Shape"]


def _nothing(requests: list[int]) -> None:
    """Nobody wants to know."""


class Reply(Future[Answer]):
    """The answer to come of one request, and the number that on_start gets when its batch is handed to the device."""

    def __init__(self, request: int) -> None:
        super().__init__()
        self.request = request


class BatchRunner:
    """Decodes, batches, runs, finishes; a context manager that owns its threads."""

    def __init__(
        self,
        find: Callable[[str], Servable],
        *,
        config: BatcherConfig | None = None,
        decoders: int = 2,
        finishers: int = 2,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[list[int]], None] = _nothing,
    ) -> None:
        raise NotImplementedError

    def submit(self, model: str, payload: Payload, deadline_s: float, *, alone: bool = False) -> Reply:
        """Queue a request, deadline_s by the runner's clock; raises Overloaded, or what inspect refuses, at once."""
        raise NotImplementedError

    def cancel(self, future: Future[Answer]) -> None:
        """The client is gone: what waits of its request leaves the queue; the future is cancelled or already done."""
        raise NotImplementedError

    def wait_s(self, model: str) -> float:
        """Seconds until a request for this model that arrives now would be answered; for a page that APIs read."""
        raise NotImplementedError

    def running_s(self) -> tuple[float, float]:
        """How long the forward under way has run and how long it should; zeros when none runs: to notice a hang."""
        raise NotImplementedError

    def drain(self, seconds: float) -> bool:
        """Refuse what comes; wait until all that was accepted is answered; False when that took longer."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads; what is not answered fails in words."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, Any]:
        """For metrics: depth, running, batch_sizes, seconds by stage, rejected by reason, busy_s, up_s."""
        raise NotImplementedError

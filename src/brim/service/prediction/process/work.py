"""A request inside a prediction process: its payload, its current stage, and how it ends.

Its end is sent only when nobody reads its payload any more, since the API then reuses that memory. Requests being
worked on are marked in memory that the API has mapped too, where it can read them after this process has died.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from brim.engine.batching import Answer, DecodedRequest, Payload, RequestShape, Servable
from brim.errors import Unavailable
from brim.service.prediction.protocol import Message, StatusPage

DECODE: Final = 1
FORWARD: Final = 2
FINISH: Final = 3
STAGES: Final = {DECODE: "decode", FORWARD: "forward", FINISH: "finish"}

Tell = Callable[["RequestWork", Message, bytes], None]


class RequestWork:
    """One request of one API process."""

    def __init__(self, message: Message, page: StatusPage, tell: "Tell") -> None:
        """tell sends its end."""
        self.id: int = message["id"]
        self.model: str = message["model"]["name"]
        self.deadline_s: float = message["deadline_s"]
        self.alone: bool = message["alone"]
        self.payload: Incoming | None = None
        self.reply: Any = None  # of the runner, once it is submitted
        self.began_s: float | None = None  # since when a thread works on it
        self._ticket: int = message["ticket"]
        self._page, self._tell = page, tell
        self._lock = threading.Lock()
        self._end: tuple[Message, bytes] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its end is sent, or will be as soon as nobody reads its payload."""
        return self._end is not None

    def mark(self, stage: int) -> None:
        with self._lock:
            if self._end is None:
                self._page.mark(self._ticket, stage)

    @contextmanager
    def doing(self, stage: int) -> Iterator[None]:
        """Mark it within the block; its end is sent after the block."""
        with self._lock:
            if self._end is not None:
                raise Unavailable("nobody waits for this request any more")
            self.began_s = time.monotonic()
            self._page.mark(self._ticket, stage)
        try:
            yield
        finally:
            with self._lock:
                self.began_s = None
                self._page.mark(self._ticket, 0)
                end = self._end
            if end is not None:
                self._tell(self, *end)

    def end(self, message: Message, body: bytes = b"") -> None:
        """Send its end, once."""
        with self._lock:
            if self._end is not None:
                return
            self._end, self.payload = (message, body), None
            if self.began_s is not None:
                return  # sent when the stage ends
            self._page.mark(self._ticket, 0)
        self._tell(self, message, body)


@dataclass(frozen=True, slots=True)
class Incoming(Payload):
    """A payload that knows its request."""

    work: RequestWork | None = None


class _Noted(NamedTuple):
    """An item's context, and its request."""

    work: RequestWork
    context: Any


class Watched:
    """A model that marks the requests it decodes and finishes; otherwise the same."""

    def __init__(self, inner: Servable) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def sizes(self) -> Sequence[int]:
        return self.inner.sizes

    def inspect(self, payload: Payload) -> RequestShape:
        return self.inner.inspect(payload)

    def decode(self, payload: Payload) -> DecodedRequest:
        work = payload.work if isinstance(payload, Incoming) else None
        if work is None:
            return self.inner.decode(payload)
        with work.doing(DECODE):
            item = self.inner.decode(payload)
        item.context = _Noted(work, item.context)
        return item

    def forward(self, parts: list[Any]) -> Any:
        return self.inner.forward(parts)

    def collect(self, running: Any) -> list[Any]:
        return self.inner.collect(running)

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        noted = item.context
        if not isinstance(noted, _Noted):
            return self.inner.finish(item, outputs)
        item.context = noted.context
        with noted.work.doing(FINISH):
            return self.inner.finish(item, outputs)

    def close(self) -> None:
        self.inner.close()


class Started:
    """Marks requests that run on the device, by the runner's numbers; one may start before submit returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, RequestWork] = {}
        self._early: set[int] | None = None  # numbers started while a request is being submitted

    def expect(self) -> None:
        """A request is about to be submitted."""
        with self._lock:
            self._early = set()

    def note(self, number: int, work: RequestWork) -> None:
        """The runner's number of the submitted request."""
        with self._lock:
            early, self._early = self._early, None
            self._works[number] = work
        if early and number in early:
            work.mark(FORWARD)

    def mark(self, numbers: list[int]) -> None:
        with self._lock:
            if self._early is not None:
                self._early.update(numbers)
            works = [self._works[number] for number in numbers if number in self._works]
        for work in works:
            work.mark(FORWARD)

    def forget(self, number: int) -> None:
        with self._lock:
            self._works.pop(number, None)

"""A request inside a prediction process: which bytes it reads, what is being done to it, and its one end.

Its end is told only when nobody reads its bytes any more: the API takes their place for other bytes then. What is
being worked on is marked in memory that the API has mapped too, where it can be read after we have died.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from brim.engine.batching import Answer, DecodedRequest, Payload, RequestShape, Servable
from brim.errors import Unavailable
from brim.service.prediction.process.protocol import Message, Page

DECODE: Final = 1
FORWARD: Final = 2
FINISH: Final = 3
STAGES: Final = {DECODE: "decode", FORWARD: "forward", FINISH: "finish"}

Tell = Callable[["Work", Message, bytes], None]


class Work:
    """One request of one API process."""

    def __init__(self, message: Message, page: Page, tell: "Tell") -> None:
        """Take the request, where its marks go, and whom to tell its end."""
        self.id: int = message["id"]
        self.model: str = message["model"]["name"]
        self.deadline_s: float = message["deadline_s"]
        self.alone: bool = message["alone"]
        self.payload: Incoming | None = None
        self.reply: Any = None  # of the runner, once it is submitted
        self.began_s: float | None = None  # since when a thread of a pool is at it
        self._ticket: int = message["ticket"]
        self._page, self._tell = page, tell
        self._lock = threading.Lock()
        self._end: tuple[Message, bytes] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its end is told, or will be as soon as nobody reads its bytes."""
        return self._end is not None

    def mark(self, stage: int) -> None:
        """Note what is being done to it."""
        with self._lock:
            if self._end is None:
                self._page.mark(self._ticket, stage)

    @contextmanager
    def doing(self, stage: int) -> Iterator[None]:
        """Mark it within the block; its end waits for that of the block."""
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
        """Tell its end, once."""
        with self._lock:
            if self._end is not None:
                return
            self._end, self.payload = (message, body), None
            if self.began_s is not None:
                return  # whoever is at it tells it
            self._page.mark(self._ticket, 0)
        self._tell(self, message, body)


@dataclass(frozen=True, slots=True)
class Incoming(Payload):
    """A payload that knows its request."""

    work: Work | None = None


class _Noted(NamedTuple):
    """An item's context, and whose it is."""

    work: Work
    context: Any


class Watched:
    """A model whose work on requests is marked; otherwise as it is."""

    def __init__(self, inner: Servable) -> None:
        """Take the model."""
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """What else the model says of itself."""
        return getattr(self.inner, name)

    @property
    def sizes(self) -> Sequence[int]:
        """Of the model."""
        return self.inner.sizes

    def inspect(self, payload: Payload) -> RequestShape:
        """Of the model."""
        return self.inner.inspect(payload)

    def decode(self, payload: Payload) -> DecodedRequest:
        """Decode, marked."""
        work = payload.work if isinstance(payload, Incoming) else None
        if work is None:
            return self.inner.decode(payload)
        with work.doing(DECODE):
            item = self.inner.decode(payload)
        item.context = _Noted(work, item.context)
        return item

    def forward(self, parts: list[Any]) -> Any:
        """Of the model."""
        return self.inner.forward(parts)

    def collect(self, running: Any) -> list[Any]:
        """Of the model."""
        return self.inner.collect(running)

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        """Finish, marked."""
        noted = item.context
        if not isinstance(noted, _Noted):
            return self.inner.finish(item, outputs)
        item.context = noted.context
        with noted.work.doing(FINISH):
            return self.inner.finish(item, outputs)

    def close(self) -> None:
        """Of the model."""
        self.inner.close()


class Started:
    """Which requests the runner hands to the device, by its numbers; one may start before its submission returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, Work] = {}
        self._early: set[int] | None = None  # numbers nobody has noted yet, while a request is submitted

    def expect(self) -> None:
        """A request is about to be submitted."""
        with self._lock:
            self._early = set()

    def note(self, number: int, work: Work) -> None:
        """The runner's number of the request that was submitted."""
        with self._lock:
            early, self._early = self._early, None
            self._works[number] = work
        if early and number in early:
            work.mark(FORWARD)

    def mark(self, numbers: list[int]) -> None:
        """These run now."""
        with self._lock:
            if self._early is not None:
                self._early.update(numbers)
            works = [self._works[number] for number in numbers if number in self._works]
        for work in works:
            work.mark(FORWARD)

    def forget(self, number: int) -> None:
        """It has ended."""
        with self._lock:
            self._works.pop(number, None)

"""The API's side of prediction: requests go to the predictor that will answer first, and survive its death.

All of it runs in the API's event loop. A request costs one copy into shared memory, one small message, and one read
of its answer. When a predictor dies, what it held is sent again: that which it was working on alone and one after the
other, because one of those may be the cause, and is given up when it is being worked on in a second death.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from brim.engine.batching import Answer
from brim.errors import DeadlinePassed, TooMany, Unavailable
from brim.service.prediction.process.arena import Arena, Shared
from brim.service.prediction.process.link import Link
from brim.service.prediction.process.protocol import Message, Page, error_of

if TYPE_CHECKING:
    from brim.service.settings import Settings

log = logging.getLogger(__name__)

ARENA_BYTES: Final = 512 * 1024**2  # of addresses; memory is taken only where bytes are written
GRACE_S: Final = 1.0  # past its deadline a request is given up here, should the predictor not have said so
AWAY_S: Final = 3.0  # what starting a predictor again takes, about
COLD_S: Final = 10.0  # what loading a model takes, about: another predictor that has it may have a queue as long
RETRY_S: Final = 0.05  # between attempts to connect: as soon as it is back, what waits is sent
ASK_S: Final = 5.0  # for an answer about models or metrics
OFF: Final = "prediction is turned off (--predict-memory 0); start the service with a share of the memory for it"
AWAY: Final = "the prediction process is being started again; try again soon"
TWICE: Final = "the prediction process ended twice while it worked on this request; it is not tried again"

Model = Mapping[str, Any]  # {"name", "kind", "network", "path", "version"} as the catalogue has it


@dataclass(slots=True, eq=False)
class _Request:
    """One that is under way; its bytes stay in the arena until no predictor can read them."""

    message: Message
    offset: int
    future: "asyncio.Future[Answer]"
    link: Link | None = None  # that has it; None: waits to be sent
    timer: asyncio.TimerHandle | None = None
    strikes: int = 0  # deaths in which it was being worked on


class Predictions:
    """The predictors of a service, as one."""

    def __init__(self, sockets: Sequence[Path], *, arena_bytes: int = ARENA_BYTES) -> None:
        """Take where they listen; none: prediction is turned off. Connects only when entered."""
        self._sockets, self._arena_bytes = list(sockets), arena_bytes
        self._links: list[Link] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._arena: Arena | None = None
        self._under_way: dict[int, _Request] = {}  # by id, sent or not, until no predictor can read its bytes
        self._waiting: deque[_Request] = deque()
        self._suspects: deque[_Request] = deque()
        self._tried: _Request | None = None  # the suspect that is under way
        self._asked: dict[int, tuple[Link, asyncio.Future[Any]]] = {}
        self._models: list[dict[str, Any]] | None = None
        self._ids, self._tickets = itertools.count(1), list(range(Page.TICKETS))

    @classmethod
    def of(cls, settings: "Settings") -> "Predictions":
        """Those of a service with these settings."""
        return cls(settings.predict_sockets, arena_bytes=max(ARENA_BYTES, 4 * settings.max_predict_bytes))

    async def __aenter__(self) -> Self:
        """Begin to connect; nobody waits for that."""
        if self._sockets:
            self._arena = Arena(Shared.make(self._arena_bytes))
            self._keepers = [asyncio.create_task(self._keep(path)) for path in self._sockets]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go: what waits for an answer gets Unavailable."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for one in list(self._under_way.values()):
            _fail(one, Unavailable("the service is going down; try again soon"))
        for link in list(self._links):
            link.close()
            await link.ended.wait()
        for one in list(self._under_way.values()):
            self._release(one)
        if self._arena is not None:
            self._arena.shared.close()

    @property
    def is_on(self) -> bool:
        """Whether the service predicts at all."""
        return bool(self._sockets)

    @property
    def is_up(self) -> bool:
        """Whether a predictor is connected now."""
        return bool(self._links)

    async def request(
        self,
        model: Model,
        payload: bytes | bytearray | memoryview,
        *,
        deadline_s: float,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        alone: bool = False,
    ) -> Answer:
        """The answer of one request. Cancel the task that awaits it, and it leaves the queue.

        payload     the file's bytes; copied before this returns control to the loop, so it may change thereafter
        deadline_s  of time.monotonic()
        alone       strict: never in one batch with others

        The answer's facts have "seconds" by stage, and what the workload adds, such as polygons.
        Overloaded when it cannot be answered in time, DeadlinePassed when it could not after all, TooMany and
        Unavailable as they say, and whatever error of brim.errors the model's side raised.
        """
        one = self._accept(model, payload, deadline_s, {"name": name, "options": dict(options or {}), "alone": alone})
        del payload  # it is copied; many requests wait at a time
        self._waiting.append(one)
        self._pump()
        try:
            return await one.future
        finally:
            self._leave(one)

    def estimate(self, model: str, within_s: float) -> float:
        """Seconds until a request with so much time would be answered by this model; needs no round trip."""
        return min((link.wait_s(model, within_s) for link in self._links), default=AWAY_S)

    def register(self, models: Sequence[Model]) -> None:
        """Say which models there are: predictors load and warm them, and forget others. Again when they change."""
        self._models = [dict(model) for model in models]
        for link in self._links:
            link.send({"type": "register", "models": self._models})

    async def models(self) -> list[dict[str, Any]]:
        """What each predictor says of its models, for GET /api/models: rows of name, state, memory_bytes, …"""
        return [row for rows in await self._ask("models") for row in rows]

    async def snapshot(self) -> list[dict[str, Any]]:
        """What each predictor has counted (`BatchRunner.snapshot`), for metrics.

        These counters are the predictors' own, so every API process reads the same ones: /metrics renders them as
        they are. The HTTP counters are each API process's own. With more than one (settings.api_processes > 1) the
        supervisor gives the API processes PROMETHEUS_MULTIPROC_DIR, a folder in DATA that it empties at each start:
        metrics.py then renders a registry with `prometheus_client.multiprocess.MultiProcessCollector`, which sums
        them over processes, those that have died included; gauges need a multiprocess_mode ("mostrecent").
        """
        return await self._ask("snapshot")

    # A request's way

    def _accept(self, model: Model, payload: Any, deadline_s: float, others: Message) -> _Request:
        if self._arena is None:
            raise Unavailable(OFF)
        if not self._tickets:
            raise TooMany(f"{Page.TICKETS} requests are under way; wait for some to end")
        offset = self._arena.put(payload)
        loop, ticket = asyncio.get_running_loop(), self._tickets.pop()
        message = {"type": "request", "id": next(self._ids), "ticket": ticket, "model": dict(model),
                   "at": [offset, len(payload)], "deadline_s": deadline_s, **others}  # fmt: skip
        one = _Request(message, offset, loop.create_future())
        one.timer = loop.call_at(deadline_s + GRACE_S, self._late, one)
        self._under_way[message["id"]] = one
        return one

    def _pump(self) -> None:
        """Send what waits, to whom answers first; of suspects one at a time."""
        while self._waiting and self._links:
            self._send(self._waiting.popleft())
        if self._tried is None and self._suspects and self._links:
            self._tried = self._suspects.popleft()
            self._send(self._tried)

    def _send(self, one: _Request) -> None:
        name = one.message["model"]["name"]
        one.link = min(self._links, key=lambda link: link.rank(name, COLD_S)) if self._links[1:] else self._links[0]
        one.link.send(one.message)

    def _leave(self, one: _Request) -> None:
        """Nobody waits for it any more: take it back where it was not answered."""
        if one.message["id"] not in self._under_way:
            return
        if one.link is not None:
            one.link.send({"type": "cancel", "id": one.message["id"]})
            return
        (self._suspects if one.strikes else self._waiting).remove(one)
        self._release(one)

    def _late(self, one: _Request) -> None:
        away = one.link is None
        _fail(one, Unavailable(AWAY) if away else DeadlinePassed("the answer was not there by its deadline"))

    def _release(self, one: _Request) -> None:
        """No predictor can read its bytes now."""
        assert self._arena is not None
        if one.timer is not None:
            one.timer.cancel()
        del self._under_way[one.message["id"]]
        self._tickets.append(one.message["ticket"])
        self._arena.free(one.offset)
        if self._tried is one:
            self._tried = None

    # What links tell

    def heard(self, link: Link, message: Message, body: bytes) -> None:
        """A predictor says how a request ended, or what it was asked."""
        if message["type"] == "told":
            _, asked = self._asked.pop(message["id"], (None, None))
            if asked is not None and not asked.done():
                asked.set_result(message["value"])
            return
        if (at := message.get("at")) is not None:
            body = link.read(at)
        one = self._under_way[message["id"]]
        self._release(one)
        if one.future.done():
            pass  # cancelled, or given up
        elif message["type"] == "answer":
            one.future.set_result(Answer(body, message["media_type"], message["facts"]))
        elif message["type"] == "gone":
            one.future.cancel()
        else:
            one.future.set_exception(error_of(message))
        self._pump()

    def lost(self, link: Link) -> None:
        """A predictor has died: send again what it held."""
        if link in self._links:
            self._links.remove(link)
        for id in [id for id, (asked, _) in self._asked.items() if asked is link]:
            _, future = self._asked.pop(id)
            if not future.done():
                future.set_exception(Unavailable(AWAY))
        for one in [one for one in self._under_way.values() if one.link is link]:
            self._again(one, link)
        self._pump()

    def _again(self, one: _Request, dead: Link) -> None:
        one.link = None
        if self._tried is one:
            self._tried = None
        if dead.page.marked(one.message["ticket"]):
            one.strikes += 1
        if one.strikes > 1:
            _fail(one, Unavailable(TWICE))
        if one.future.done():
            self._release(one)
        elif one.strikes:
            one.message["alone"] = True
            self._suspects.append(one)
        else:
            self._waiting.append(one)

    async def _keep(self, path: Path) -> None:
        """A link to the predictor there, and another one when that ends."""
        assert self._arena is not None
        while True:
            try:
                link = await Link.open(path, self._arena.shared, self)
            except (OSError, Unavailable, TimeoutError):
                await asyncio.sleep(RETRY_S)
                continue
            self._links.append(link)
            if self._models is not None:
                link.send({"type": "register", "models": self._models})
            self._pump()
            await link.ended.wait()

    async def _ask(self, what: str) -> list[Any]:
        """What each predictor that is there answers; those that do not are left out."""
        futures: list[asyncio.Future[Any]] = []
        for link in self._links:
            id, future = next(self._ids), asyncio.get_running_loop().create_future()
            self._asked[id] = link, future
            link.send({"type": what, "id": id})
            futures.append(future)
        if futures:
            await asyncio.wait(futures, timeout=ASK_S)
        return [future.result() for future in futures if future.done() and future.exception() is None]


def _fail(one: _Request, failure: Exception) -> None:
    if not one.future.done():
        one.future.set_exception(failure)

"""The API's side of prediction: requests go to the predictor that will answer first, and survive its death.

All of it runs in the API's event loop. A request costs one copy into shared memory, one small message, and one read
of its answer. When a predictor dies, its requests are sent again. Those it was working on are sent one at a time, since
one of them may be the cause; a request that is being worked on in a second death is given up.
"""

import asyncio
import itertools
import logging
import math
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from brim.errors import DeadlinePassed, TooMany, Unavailable
from brim.service.prediction.arena import Arena, Shared
from brim.service.prediction.protocol import (
    Frames,
    Message,
    PredictionAnswer,
    StatusPage,
    error_of,
    frame,
    receive_hello,
    send_hello,
)
from brim.service.run.unix_socket import short_name

if TYPE_CHECKING:
    from brim.service.settings import Settings

log = logging.getLogger(__name__)

ARENA_BYTES: Final = 512 * 1024**2  # of address space; memory is used only where bytes are written
HELLO_S: Final = 5.0
GRACE_S: Final = 1.0  # after its deadline a request is given up here if the predictor has not answered
AWAY_S: Final = 3.0  # about what restarting a predictor takes
COLD_S: Final = 10.0  # about what loading a model takes: a predictor that has it is preferred up to such a queue
RETRY_S: Final = 0.05  # between attempts to connect
ASK_S: Final = 5.0  # for a report on models or metrics
OFF: Final = "this service makes no predictions; it was started without memory for them"
AWAY: Final = "the prediction process is being restarted; try again soon"
TWICE: Final = "the prediction process died twice while it worked on this request; it is not tried again"

Model = Mapping[str, Any]  # {"name", "kind", "network", "path", "version"} as in the catalogue


@dataclass(slots=True, eq=False)
class _Request:
    """A request in progress; its payload stays in the arena until no predictor can read it."""

    message: Message
    offset: int
    future: "asyncio.Future[PredictionAnswer]"
    link: "Link | None" = None  # it was sent to; None: waiting to be sent
    timer: asyncio.TimerHandle | None = None
    strikes: int = 0  # deaths of predictors that were working on it


class Predictions:
    """The predictors of a service, as one."""

    def __init__(self, sockets: Sequence[Path], *, arena_bytes: int = ARENA_BYTES) -> None:
        """Sockets of the predictors; none: prediction is off. Connects when entered."""
        self._sockets, self._arena_bytes = list(sockets), arena_bytes
        self._links: list[Link] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._arena: Arena | None = None
        self._under_way: dict[int, _Request] = {}  # by id, until no predictor can read its payload
        self._waiting: deque[_Request] = deque()
        self._suspects: deque[_Request] = deque()
        self._tried: _Request | None = None  # the suspect that was sent
        self._reports: dict[int, tuple[Link, asyncio.Future[Any]]] = {}
        self._models: list[dict[str, Any]] | None = None
        self._ids, self._tickets = itertools.count(1), list(range(StatusPage.TICKETS))

    @classmethod
    def of(cls, settings: "Settings") -> "Predictions":
        return cls(settings.predict_sockets, arena_bytes=max(ARENA_BYTES, 4 * settings.max_predict_bytes))

    async def __aenter__(self) -> Self:
        if self._sockets:
            self._arena = Arena(Shared.make(self._arena_bytes))
            self._keepers = [asyncio.create_task(self._keep(path)) for path in self._sockets]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect; requests in progress get Unavailable."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for one in list(self._under_way.values()):
            _fail(one, Unavailable("the service is stopping; try again soon"))
        for link in list(self._links):
            link.close()
            await link.ended.wait()
        for one in list(self._under_way.values()):
            self._release(one)
        if self._arena is not None:
            self._arena.shared.close()

    @property
    def is_on(self) -> bool:
        """Whether the service makes predictions at all."""
        return bool(self._sockets)

    @property
    def is_up(self) -> bool:
        """Whether a predictor is connected."""
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
    ) -> PredictionAnswer:
        """The answer to one request; cancelling it takes it out of the queue.

        payload     the file's bytes; copied before the first await
        deadline_s  of time.monotonic()
        alone       never in one batch with others

        Overloaded if it cannot be answered in time, DeadlinePassed if it could not after all, TooMany, Unavailable,
        and any error of brim.errors that the model raised.
        """
        one = self._accept(model, payload, deadline_s, {"name": name, "options": dict(options or {}), "alone": alone})
        del payload  # copied; many requests wait at a time
        self._waiting.append(one)
        self._pump()
        try:
            return await one.future
        finally:
            self._leave(one)

    def estimate(self, model: str, within_s: float) -> float:
        """Seconds until this model would answer a request with so much time; needs no round trip."""
        return min((link.wait_s(model, within_s) for link in self._links), default=AWAY_S)

    def register(self, models: Sequence[Model]) -> None:
        """Tell predictors which models exist: they load and warm them up, and forget others."""
        self._models = [dict(model) for model in models]
        for link in self._links:
            link.send({"type": "register", "models": self._models})

    async def models(self) -> list[dict[str, Any]]:
        """Reports of all predictors on their models, for GET /api/models: name, state, memory_bytes, …"""
        return [row for rows in await self._ask("models") for row in rows]

    async def snapshot(self) -> list[dict[str, Any]]:
        """The counters of every predictor (`BatchRunner.snapshot`), for metrics; the same in every API process."""
        return await self._ask("snapshot")

    # One request

    def _accept(self, model: Model, payload: Any, deadline_s: float, others: Message) -> _Request:
        if self._arena is None:
            raise Unavailable(OFF)
        if not self._tickets:
            raise TooMany(f"{StatusPage.TICKETS} requests are under way; wait for some to end")
        offset = self._arena.put(payload)
        loop, ticket = asyncio.get_running_loop(), self._tickets.pop()
        message = {"type": "request", "id": next(self._ids), "ticket": ticket, "model": dict(model),
                   "at": [offset, len(payload)], "deadline_s": deadline_s, **others}  # fmt: skip
        one = _Request(message, offset, loop.create_future())
        one.timer = loop.call_at(deadline_s + GRACE_S, self._late, one)
        self._under_way[message["id"]] = one
        return one

    def _pump(self) -> None:
        """Send waiting requests to the predictor that answers first; suspects one at a time."""
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
        """Nobody waits for it any more: take it back if it was not answered."""
        if one.message["id"] not in self._under_way:
            return
        if one.link is not None:
            one.link.send({"type": "cancel", "id": one.message["id"]})
            return
        (self._suspects if one.strikes else self._waiting).remove(one)
        self._release(one)

    def _late(self, one: _Request) -> None:
        away = one.link is None
        _fail(one, Unavailable(AWAY) if away else DeadlinePassed("the answer was not ready by its deadline"))

    def _release(self, one: _Request) -> None:
        """No predictor can read its payload any more."""
        assert self._arena is not None
        if one.timer is not None:
            one.timer.cancel()
        del self._under_way[one.message["id"]]
        self._tickets.append(one.message["ticket"])
        self._arena.free(one.offset)
        if self._tried is one:
            self._tried = None

    # Called by links

    def received(self, link: "Link", message: Message, body: bytes) -> None:
        """A predictor ended a request, or sent a report."""
        if message["type"] == "report":
            _, report = self._reports.pop(message["id"], (None, None))
            if report is not None and not report.done():
                report.set_result(message["value"])
            return
        if (at := message.get("at")) is not None:
            body = link.read(at)
        one = self._under_way[message["id"]]
        self._release(one)
        if one.future.done():
            pass  # cancelled, or given up
        elif message["type"] == "answer":
            one.future.set_result(PredictionAnswer(body, message["media_type"], message["facts"]))
        elif message["type"] == "gone":
            one.future.cancel()
        else:
            one.future.set_exception(error_of(message))
        self._pump()

    def lost(self, link: "Link") -> None:
        """A predictor has died: send its requests again."""
        if link in self._links:
            self._links.remove(link)
        for id in [id for id, (sent_to, _) in self._reports.items() if sent_to is link]:
            _, future = self._reports.pop(id)
            if not future.done():
                future.set_exception(Unavailable(AWAY))
        for one in [one for one in self._under_way.values() if one.link is link]:
            self._again(one, link)
        self._pump()

    def _again(self, one: _Request, dead: "Link") -> None:
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
        """Keep a link to the predictor at this socket."""
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

    async def _ask(self, report: str) -> list[Any]:
        """A report from each predictor that answers in time."""
        futures: list[asyncio.Future[Any]] = []
        for link in self._links:
            id, future = next(self._ids), asyncio.get_running_loop().create_future()
            self._reports[id] = link, future
            link.send({"type": report, "id": id})
            futures.append(future)
        if futures:
            await asyncio.wait(futures, timeout=ASK_S)
        return [future.result() for future in futures if future.done() and future.exception() is None]


def _fail(one: _Request, failure: Exception) -> None:
    if not one.future.done():
        one.future.set_exception(failure)


class Link(asyncio.Protocol):
    """A connection to one predictor. The next process gets another, so that answers cannot be mixed up."""

    def __init__(self, owner: "Predictions", shared: Shared) -> None:
        self.page = StatusPage(shared)
        self.is_up = False
        self.ended = asyncio.Event()
        self._owner, self._shared = owner, shared
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._counted = self._since = 0  # requests sent since the page had this number

    @classmethod
    async def open(cls, path: Path, arena: Shared, owner: "Predictions") -> "Link":
        """Connect and exchange hellos; OSError if no predictor is listening."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            with short_name(path) as name:
                await loop.sock_connect(connection, name)
            async with asyncio.timeout(HELLO_S):
                shared = await _exchange(connection, arena)
            _, link = await loop.create_unix_connection(lambda: cls(owner, shared), sock=connection)
        except BaseException:
            connection.close()
            raise
        return link

    def wait_s(self, model: str, within_s: float, cold_s: float = 0.0) -> float:
        """The predictor's estimate for a request with so much time; cold_s if it has not loaded that model."""
        wait_s = self.page.estimate(model, within_s)
        return cold_s if wait_s is None else wait_s

    def rank(self, model: str, cold_s: float) -> float:
        """How long an answer from here would take, counting requests sent since the last estimate."""
        wait_s = self.wait_s(model, math.inf, cold_s)
        if self.page.number != self._counted:
            self._counted, self._since = self.page.number, 0
        return (1 + self._since) * max(wait_s, 1e-3)

    def send(self, message: Message) -> None:
        """Send a message; it is lost if the connection is."""
        if self.is_up and self._transport is not None:
            self._since += message["type"] == "request"
            self._transport.write(frame(message))

    def read(self, at: list[int]) -> bytes:
        """An answer in the predictor's memory, whose slot is then free again."""
        body = bytes(self._shared.view(*at))
        self.send({"type": "taken", "at": at[0]})
        return body

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_up = transport, True

    def data_received(self, data: bytes) -> None:
        for message, body in self._frames.feed(data):
            self._owner.received(self, message, body)

    def connection_lost(self, exc: Exception | None) -> None:
        """The owner reads from the page what was being worked on, before the memory is released."""
        self.is_up = False
        self._owner.lost(self)
        self.page.close()
        self._shared.close()
        self.ended.set()


async def _exchange(connection: socket.socket, arena: Shared) -> Shared:
    loop = asyncio.get_running_loop()
    send_hello(connection, arena)
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    return receive_hello(connection)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

"""The API's side of prediction: requests go to the predictor that will answer first, and survive its death.

All of it runs in the API's event loop. When a predictor dies, its requests are sent again. Those it was working on are
sent one at a time, since one of them may be the cause; a request that is being worked on in a second death is given up.
`KnownModels` has the registered models in memory, so that a prediction needs no database and works while that does not
answer.
"""

import asyncio
import itertools
import json
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from starlette.concurrency import run_in_threadpool

from brim import __version__
from brim.errors import ConfigError, DeadlinePassed, NotFound, TooMany, Unavailable
from brim.jobs.registry.models import check_trained
from brim.jobs.store import ModelKind, ModelRow, ModelTable, RunTable, is_id
from brim.segmentation.config import DEFAULT_MODEL, DEFAULT_NETWORK, DEFAULT_WEIGHTS
from brim.service.prediction.channel import Body, Channel, Message, PredictionAnswer, StatusPage, error_of, view_of
from brim.service.run.unix_socket import short_name

log = logging.getLogger(__name__)
_T = TypeVar("_T")

HELLO_S: Final = 5.0
GRACE_S: Final = 1.0  # after its deadline a request is given up here if the predictor has not answered
AWAY_S: Final = 3.0  # about what restarting a predictor takes
COLD_S: Final = 10.0  # about what loading a model takes: a predictor that has it is preferred up to such a queue
RETRY_S: Final = 0.05  # between attempts to connect
ASK_S: Final = 5.0  # for a report on models or metrics
REFRESH_S: Final = 1.0  # between two queries for the registered models
OFF: Final = "this service makes no predictions; it was started without memory for them"
AWAY: Final = "the prediction process is being restarted; try again soon"
TWICE: Final = "the prediction process died twice while it worked on this request; it is not tried again"

Model = Mapping[str, Any]  # {"name", "kind", "network", "path", "version"} as in the catalogue


@dataclass(slots=True, eq=False)
class _Request:
    """A request in progress."""

    message: Message
    payload: Body
    future: "asyncio.Future[PredictionAnswer]"
    timer: asyncio.TimerHandle
    link: "Link | None" = None  # it was sent to; None: waiting to be sent
    strikes: int = 0  # deaths of predictors that were working on it


class Predictions:
    """The predictors of a service, as one."""

    def __init__(self, sockets: Sequence[Path]) -> None:
        """Sockets of the predictors; none: prediction is off. Connects when entered."""
        self._sockets = list(sockets)
        self._links: list[Link] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._under_way: dict[int, _Request] = {}  # by id
        self._waiting: deque[_Request] = deque()
        self._suspects: deque[_Request] = deque()
        self._tried: _Request | None = None  # the suspect that was sent
        self._models: bytes | None = None
        self._ids, self._tickets = itertools.count(1), list(range(StatusPage.TICKETS))

    async def __aenter__(self) -> Self:
        self._keepers = [asyncio.create_task(self._keep(path)) for path in self._sockets]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for request in list(self._under_way.values()):
            self._end(request, Unavailable("the service is stopping; try again soon"))
        for link in self._links:
            link.close()

    @property
    def is_on(self) -> bool:
        """Whether the service makes predictions at all."""
        return bool(self._sockets)

    @property
    def is_up(self) -> bool:
        return bool(self._links)

    async def request(
        self,
        model: Model,
        payload: Body,
        *,
        deadline_s: float,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        alone: bool = False,
    ) -> PredictionAnswer:
        """The answer to one request; cancelling it takes it out of the queue.

        payload     the file's bytes
        deadline_s  of time.monotonic()
        alone       never in one batch with others

        Overloaded if it cannot be answered in time, DeadlinePassed if it could not after all, TooMany, Unavailable,
        and any error of brim.errors that the model raised.
        """
        if not self.is_on:
            raise Unavailable(OFF)
        if not self._tickets:
            raise TooMany(f"{StatusPage.TICKETS} requests are under way; wait for some to end")
        loop, id = asyncio.get_running_loop(), next(self._ids)
        message = {"type": "request", "id": id, "ticket": self._tickets.pop(), "model": dict(model), "name": name,
                   "options": dict(options or {}), "deadline_s": deadline_s, "alone": alone}  # fmt: skip
        timer = loop.call_at(deadline_s + GRACE_S, self._late, id)
        request = self._under_way[id] = _Request(message, payload, loop.create_future(), timer)
        self._waiting.append(request)
        self._pump()
        try:
            return await request.future
        finally:
            self._leave(request)

    def estimate(self, model: str, within_s: float) -> float:
        """Seconds until this model would answer a request with so much time; needs no round trip."""
        return min((link.page.estimate(model, within_s) or 0.0 for link in self._links), default=AWAY_S)

    def register(self, models: Sequence[Model]) -> None:
        """Tell predictors which models exist: they load and warm them up, and forget others."""
        self._models = json.dumps([dict(model) for model in models]).encode()
        for link in self._links:
            link.channel.send({"type": "register"}, self._models)

    async def models(self) -> list[dict[str, Any]]:
        """Reports of all predictors on their models, for GET /api/models: name, state, memory_bytes, …"""
        return [row for rows in await self._ask("models") for row in rows]

    async def snapshot(self) -> list[dict[str, Any]]:
        """The counters of every predictor (`BatchRunner.snapshot`), for metrics; the same in every API process."""
        return await self._ask("snapshot")

    # One request

    def _pump(self) -> None:
        """Send waiting requests to the predictor that answers first; suspects one at a time."""
        while self._waiting and self._links:
            self._send(self._waiting.popleft())
        if self._tried is None and self._suspects and self._links:
            self._tried = self._suspects.popleft()
            self._send(self._tried)

    def _send(self, request: _Request) -> None:
        name = request.message["model"]["name"]
        request.link = min(self._links, key=lambda link: link.rank(name)) if self._links[1:] else self._links[0]
        request.link.num_since += 1
        request.link.channel.send(request.message, request.payload)

    def _leave(self, request: _Request) -> None:
        """Nobody waits for it any more: take it back if it was not answered."""
        id = request.message["id"]
        if id not in self._under_way:
            return
        if request.link is None:
            (self._suspects if request.strikes else self._waiting).remove(request)
        else:
            request.link.channel.send({"type": "cancel", "id": id})
        if request is not self._tried or request.timer.when() <= asyncio.get_running_loop().time():
            self._end(request)  # a suspect may still kill the predictor: no other is tried until its deadline

    def _late(self, id: int) -> None:
        if (request := self._under_way.get(id)) is None:
            return
        if request.future.done():  # a suspect that was cancelled
            self._end(request)
        elif request.link is None:
            request.future.set_exception(Unavailable(AWAY))
        else:
            request.future.set_exception(DeadlinePassed("the answer was not ready by its deadline"))

    def _end(self, request: _Request, result: PredictionAnswer | Exception | None = None) -> None:
        """Forget a request, and give its result to whoever still waits for it."""
        request.timer.cancel()
        del self._under_way[request.message["id"]]
        self._tickets.append(request.message["ticket"])
        if self._tried is request:
            self._tried = None
        if request.future.done():
            pass
        elif isinstance(result, Exception):
            request.future.set_exception(result)
        elif result is not None:
            request.future.set_result(result)

    # Called by links

    def received(self, message: Message, body: Body) -> None:
        if (request := self._under_way.get(message["id"])) is not None:
            is_answer = message["type"] == "answer"
            answer = (
                PredictionAnswer(bytes(view_of(body)), message["media_type"], message["facts"]) if is_answer else None
            )
            self._end(request, answer or error_of(message))
            self._pump()

    def lost(self, link: "Link") -> None:
        """A predictor has died: send its requests again."""
        if link in self._links:
            self._links.remove(link)
        for request in [request for request in self._under_way.values() if request.link is link]:
            request.link = None
            if self._tried is request:
                self._tried = None
            request.strikes += link.page.is_marked(request.message["ticket"])
            if request.future.done() or request.strikes > 1:
                self._end(request, Unavailable(TWICE))
            elif request.strikes:
                request.message["alone"] = True
                self._suspects.append(request)
            else:
                self._waiting.append(request)
        self._pump()

    async def _keep(self, path: Path) -> None:
        """Keep a link to the predictor at this socket."""
        while True:
            try:
                link = await Link.open(path, self)
            except (OSError, EOFError, ValueError):  # TimeoutError is an OSError
                await asyncio.sleep(RETRY_S)
                continue
            self._links.append(link)
            if self._models is not None:
                link.channel.send({"type": "register"}, self._models)
            self._pump()
            await link.ended.wait()

    async def _ask(self, report: str) -> list[Any]:
        """A report from each predictor that answers in time."""
        futures: list[asyncio.Future[Any]] = []
        for link in self._links:
            id, future = next(self._ids), asyncio.get_running_loop().create_future()
            link.reports[id] = future
            link.channel.send({"type": report, "id": id})
            futures.append(future)
        if futures:
            await asyncio.wait(futures, timeout=ASK_S)
        return [future.result() for future in futures if future.done() and not future.cancelled()]


class Link:
    """A connection to one predictor. The next process gets another, so that answers cannot be mixed up."""

    def __init__(self, owner: Predictions, connection: socket.socket, page: StatusPage) -> None:
        self._owner, self._loop = owner, asyncio.get_running_loop()
        self.page, self.channel = page, Channel(connection, self._wait_to_write)
        self.ended = asyncio.Event()
        self.reports: dict[int, asyncio.Future[Any]] = {}
        self.num_since, self._number = 0, 0  # requests sent since the page had this number
        self._loop.add_reader(connection, self._read)

    @classmethod
    async def open(cls, path: Path, owner: Predictions) -> "Link":
        """Connect and wait for the hello; OSError or EOFError if no predictor is there."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        readable = asyncio.Event()
        try:
            connection.setblocking(False)
            with short_name(path) as name:
                await loop.sock_connect(connection, name)
            loop.add_reader(connection, readable.set)
            try:
                async with asyncio.timeout(HELLO_S):
                    await readable.wait()
            finally:
                loop.remove_reader(connection)
            hello = Channel(connection, lambda: None).receive()
            if hello is None or hello[0]["type"] != "hello":
                raise EOFError
            page = StatusPage(view_of(hello[1]))
        except BaseException:
            connection.close()
            raise
        return cls(owner, connection, page)

    def rank(self, model: str) -> float:
        """How long an answer from here would take, counting requests sent since the last estimate."""
        wait_s = self.page.estimate(model, math.inf)
        if self.page.number != self._number:
            self._number, self.num_since = self.page.number, 0
        return (1 + self.num_since) * max(COLD_S if wait_s is None else wait_s, 1e-3)

    def close(self) -> None:
        self._loop.remove_reader(self.channel.connection)
        self._loop.remove_writer(self.channel.connection)
        self.channel.close()
        for future in self.reports.values():
            future.cancel()
        self.ended.set()

    def _read(self) -> None:
        try:
            while (received := self.channel.receive()) is not None:
                message, body = received
                if message["type"] != "report":
                    self._owner.received(message, body)
                elif not (future := self.reports.pop(message["id"])).done():
                    future.set_result(json.loads(bytes(view_of(body))))
        except (EOFError, ValueError):
            self.close()
            self._owner.lost(self)

    def _wait_to_write(self) -> None:
        self._loop.add_writer(self.channel.connection, self._write)

    def _write(self) -> None:
        self._loop.remove_writer(self.channel.connection)
        self.channel.flush()


_DEFAULT: Final = ModelRow(
    number=0,
    name=DEFAULT_MODEL,
    kind="segment",
    network=DEFAULT_NETWORK,
    path=str(DEFAULT_WEIGHTS),
    version=__version__,
    about={},
    added_at=0.0,
)


RUN_MODELS: Final[Mapping[str, ModelKind]] = {
    "segment.train": "segment", "rf.train": "locate", "sequence.train": "classify",
}  # fmt: skip


class KnownModels:
    """The models registered in the catalogue, read once a second inside `async with`; predictors get the changes.

    The model that comes with brim is there too, to be named, and the one of its kind where none is registered. The id
    of a run names what that run trained. Both are loaded with their first request.
    """

    def __init__(self, table: ModelTable, predictions: Predictions, runs: RunTable, data: Path) -> None:
        """Runs have paths relative to data."""
        self._table, self._predictions = table, predictions
        self._runs, self._data = runs, data
        self._rows: dict[str, ModelRow] | None = None
        self._read_s = -math.inf
        self._reading = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._refreshing = asyncio.create_task(self._keep_fresh())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._refreshing is not None
        self._refreshing.cancel()
        with suppress(asyncio.CancelledError):
            await self._refreshing

    async def all(self) -> list[ModelRow]:
        rows = list((await self._sure(self._known)).values())
        if self._predictions.is_on and not any(row.kind == _DEFAULT.kind for row in rows):
            rows.append(_DEFAULT)
        return rows

    async def of_kind(self, kind: ModelKind) -> list[str]:
        """Names of the models of one kind; at least one."""

        def names() -> list[str]:
            names = [name for name, row in self._known().items() if row.kind == kind]
            if not names and kind == _DEFAULT.kind:
                return [_DEFAULT.name]
            if not names:
                hint = "name a finished run by its id, or let an administrator add a model"
                raise NotFound(f"no model is registered to {kind}", field="model", hint=hint)
            return names

        return await self._sure(names)

    async def find(self, name: str, kind: ModelKind) -> ModelRow:
        """The model that a request names, or the only one of that kind."""
        if not name:
            name, *others = await self.of_kind(kind)
            if others:
                text = f"model is missing, and there are {1 + len(others)}: {', '.join((name, *others))}; name one"
                raise ConfigError(text, field="model")

        def named() -> ModelRow:
            if name == _DEFAULT.name and name not in self._known():
                return _DEFAULT
            if name not in self._known():
                raise NotFound(f'no model is named "{name}"; "GET /api/models" lists them', field="model")
            return self._known()[name]

        row = await self._run_model(name) if is_id(name) and name not in self._known() else await self._sure(named)
        if row.kind != kind:
            text = f'model="{name}" is registered to {row.kind}, not to {kind}; name another'
            raise ConfigError(text, field="model")
        return row

    async def _run_model(self, id: str) -> ModelRow:
        """What a run trained, as a model whose name is the run's id."""
        run = await run_in_threadpool(self._runs.get, id)
        if run is None:
            raise NotFound(f'no model and no run is named "{id}"; "GET /api/models" lists models', field="model")
        check_trained(run)
        network = str(run.config.get("model", "")) if run.kind == "segment.train" else run.kind
        return ModelRow(
            number=0, name=run.id, kind=RUN_MODELS[run.kind], network=network, path=str(self._data / run.path),
            version=f"{run.state}-{run.summary.get('step', 0)}", about={}, added_at=run.created_at,
        )  # fmt: skip

    async def _sure(self, find: Callable[[], _T]) -> _T:
        """The result of find; after a fresh query if there is none, since the model may have been added just now."""
        try:
            return find()
        except (NotFound, Unavailable):
            await self.refresh()
        return find()

    def _known(self) -> dict[str, ModelRow]:
        if self._rows is None:
            raise Unavailable("the catalogue's database does not answer; try again soon")
        return self._rows

    async def _keep_fresh(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """One query that begins after this call, shared by all that wait for one."""
        called_s = time.monotonic()
        async with self._reading:
            if self._read_s > called_s:
                return
            self._read_s = time.monotonic()
            try:
                rows = {row.name: row for row in await run_in_threadpool(self._table.all)}
            except Unavailable:
                return  # the known ones stay
            except Exception:
                log.exception("the catalogue's models cannot be read")
                return
            if rows != self._rows:
                self._rows = rows
                self._predictions.register([as_message(row) for row in rows.values()])


def as_message(row: ModelRow) -> dict[str, Any]:
    """A model as predictors are told about it."""
    return {name: getattr(row, name) for name in ("name", "kind", "network", "path", "version")}

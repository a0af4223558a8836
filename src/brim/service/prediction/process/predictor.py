"""The main loop of a prediction process: requests from API processes go to the batch runner, answers go back.

The main thread handles messages and the heartbeat and notices work that hangs; everything else runs in the threads of
`Models`, `BatchRunner` and a pool that submits to it. torch is imported with the first model. Requests that are being
worked on are marked in memory that the API has mapped too, where it reads them after this process has died.
"""

import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from brim.engine.batching import Answer, BatcherConfig, BatchRunner, DecodedRequest, Payload, RequestShape, Servable
from brim.errors import BrimError, Overloaded, Unavailable
from brim.jobs.worker.process import Heartbeat
from brim.service.prediction.channel import LIMITS_S, Body, Channel, Message, StatusPage, failure, view_of
from brim.service.prediction.process.models import Models
from brim.service.run.unix_socket import listen

log = logging.getLogger("brim.prediction")

BUSY_TICK_S, IDLE_TICK_S = 0.01, 0.25  # the age of estimates
BEAT_S: Final = 0.25
DRAIN_S: Final = 10.0
HANG_FACTOR: Final = 20  # a forward pass may take so many times its expected time
STAGE_FACTOR: Final = 6  # decoding and finishing have no expected time: so many times the floor
LOADING_FACTOR: Final = 12  # while a model warms up, others may wait for the device


class RequestWork:
    """One request of one API process."""

    def __init__(self, message: Message, peer: "Peer", busy: "set[RequestWork]") -> None:
        self.id: int = message["id"]
        self.model: str = message["model"]["name"]
        self.deadline_s: float = message["deadline_s"]
        self.alone: bool = message["alone"]
        self.reply: Future[Answer] | None = None  # of the runner, once it is submitted
        self.is_loading = True  # its model
        self.is_over = False
        self.began_s = 0.0  # of the stage it is in
        self._ticket: int = message["ticket"]
        self._peer, self._busy = peer, busy
        self._lock = threading.Lock()

    def mark(self, is_worked_on: bool = True) -> None:
        with self._lock:
            if not self.is_over:  # otherwise another request may have its ticket
                self._peer.page.mark(self._ticket, is_worked_on)

    @contextmanager
    def stage(self) -> Iterator[None]:
        if self.is_over:
            raise Unavailable("nobody waits for this request any more")
        self.began_s = time.monotonic()
        self.mark()
        self._busy.add(self)
        try:
            yield
        finally:
            self._busy.discard(self)
            self.mark(False)

    def end(self, message: Message | None = None, body: bytes = b"") -> None:
        """Send its end, once; nothing if nobody waits."""
        with self._lock:
            if self.is_over:
                return
            self._peer.page.mark(self._ticket, False)
            self.is_over = True
        self._peer.works.pop(self.id, None)
        if message is not None:
            self._peer.channel.send(message, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming(Payload):
    """A payload that knows its request, and can be sent on."""

    body: Body
    work: RequestWork


class Watched:
    """A model that marks the requests it works on; otherwise the same."""

    def __init__(self, inner: Servable) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def inspect(self, payload: Payload) -> RequestShape:
        assert isinstance(payload, Incoming)
        with payload.work.stage():
            return self.inner.inspect(payload)

    def decode(self, payload: Payload) -> DecodedRequest:
        assert isinstance(payload, Incoming)
        work = payload.work
        with work.stage():
            item = self.inner.decode(payload)
        item.parts = [(work, part) for part in item.parts]
        item.context = work, item.context
        return item

    def forward(self, parts: list[Any]) -> Any:
        for work, _ in parts:
            work.mark()
        return self.inner.forward([part for _, part in parts])

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        work, item.context = item.context
        with work.stage():
            return self.inner.finish(item, outputs)


class Peer:
    """One API process: its connection, the page it reads, its requests."""

    def __init__(self, connection: socket.socket, is_full: Callable[[], None]) -> None:
        self.works: dict[int, RequestWork] = {}
        self.registered: set[str] = set()  # models that this API process has registered
        self.channel, self.page = Channel(connection, is_full), StatusPage()
        assert self.page.shared is not None
        self.channel.send({"type": "hello"}, self.page.shared)


class Predictor:
    """Answers the requests of the API processes that connect."""

    def __init__(
        self,
        path: Path,
        models: Models,
        beat: Heartbeat,
        *,
        config: BatcherConfig,
        hang_s: float,
        decoders: int,
        finishers: int,
    ) -> None:
        self._path, self._models, self._beat, self._config = path, models, beat, config
        self._hang_s, self._decoders, self._finishers = hang_s, decoders, finishers
        self._runner: BatchRunner | None = None
        self._starting = threading.Lock()  # of the runner
        self._submitting = ThreadPoolExecutor(decoders, thread_name_prefix="brim-submit")
        self._peers: list[Peer] = []
        self._busy: set[RequestWork] = set()  # in a stage of their own
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._is_leaving = False
        self._beat_s = self._publish_s = 0.0
        self._was_busy = False

    def run(self) -> None:
        """Answer requests until told to leave, then those still in progress."""
        listening = listen(self._path, socket.SOCK_SEQPACKET)
        for end in (self._woken, self._waker, listening):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wakened)
        self._selector.register(listening, selectors.EVENT_READ, partial(self._accept, listening))
        while not self._is_leaving:
            for key, events in self._selector.select(BUSY_TICK_S if self._is_busy else IDLE_TICK_S):
                key.data(events)
            self._tick(time.monotonic())
        listening.close()
        end_s = time.monotonic() + DRAIN_S
        while self._is_busy and time.monotonic() < end_s:  # the API sends everything else to the next process
            for peer in self._peers:
                peer.channel.flush()
            self._tick(time.monotonic())
            time.sleep(BUSY_TICK_S)

    def leave(self, *_: object) -> None:
        """Accept nothing more, and end when all accepted requests are answered."""
        self._is_leaving = True
        self._wake()

    @property
    def _is_busy(self) -> bool:
        for peer in self._peers:
            if peer.channel.has_unsent or any(not work.is_loading for work in list(peer.works.values())):
                return True
        return False

    # Connections

    def _accept(self, listening: socket.socket, _: int) -> None:
        try:
            connection, _address = listening.accept()
        except BlockingIOError:
            return
        peer = Peer(connection, self._wake)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._serve, peer))

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.channel.flush()
            if not peer.channel.has_unsent:
                self._selector.modify(peer.channel.connection, selectors.EVENT_READ, partial(self._serve, peer))
        if not events & selectors.EVENT_READ or self._is_leaving:
            return
        try:
            while (received := peer.channel.receive()) is not None:
                self._handle(peer, *received)
        except EOFError:
            self._drop(peer)
        except Exception:
            log.exception("an API process sent an invalid message; its connection is closed")
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """An API process is gone, and with it everybody who waited."""
        self._selector.unregister(peer.channel.connection)
        self._peers.remove(peer)
        peer.channel.close()
        for work in list(peer.works.values()):
            self._cancel(work)

    def _wake(self) -> None:
        try:
            self._waker.send(b".")
        except BlockingIOError:
            return  # it will wake anyway

    def _wakened(self, _: int) -> None:
        self._woken.recv(4096)
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        for peer in self._peers:
            if peer.channel.has_unsent:
                self._selector.modify(peer.channel.connection, both, partial(self._serve, peer))

    # Messages

    def _handle(self, peer: Peer, message: Message, body: Body) -> None:
        kind = message["type"]
        if message.get("is_cut"):
            error = Overloaded("the prediction process has too many files open; try again soon", 1.0)
            peer.channel.send(failure(message["id"], error))
        elif kind == "request":
            self._take(peer, message, body)
        elif kind == "cancel":
            if (work := peer.works.get(message["id"])) is not None:
                self._cancel(work)
        elif kind == "register":
            models = json.loads(bytes(view_of(body)))
            self._models.register(models)
            peer.registered = {model["name"] for model in models}
        else:
            snapshot = {} if self._runner is None else self._runner.snapshot()
            report = self._models.describe() if kind == "models" else snapshot
            peer.channel.send({"type": "report", "id": message["id"]}, json.dumps(report).encode())

    def _take(self, peer: Peer, message: Message, body: Body) -> None:
        work = peer.works[message["id"]] = RequestWork(message, peer, self._busy)
        payload = Incoming(view_of(body), message["name"], message["options"], body=body, work=work)
        if work.model not in peer.registered:  # registered a moment ago: the API's next list will have it
            self._models.see(message["model"])
        loading = self._models.ask(work.model)
        loading.add_done_callback(lambda _: self._submitting.submit(self._submit, payload))
        work.is_loading = not loading.done()

    def _submit(self, payload: Incoming) -> None:
        """In a thread of its own: inspecting a file takes a while, and may wait for its model."""
        work = payload.work
        work.is_loading = False
        if work.is_over:
            return
        try:
            with self._starting:
                if self._runner is None:
                    self._runner = BatchRunner(
                        self._models.find, config=self._config, decoders=self._decoders, finishers=self._finishers
                    )
            reply = self._runner.submit(work.model, payload, work.deadline_s, alone=work.alone)
        except Exception as error:
            self._fail(work, error)
            return
        work.reply = reply
        reply.add_done_callback(partial(self._answered, work))
        if work.is_over:  # cancelled meanwhile
            reply.cancel()

    def _answered(self, work: RequestWork, reply: "Future[Answer]") -> None:
        """Runs in the thread that ended the request."""
        work.reply = None  # it refers to this work: a cycle would keep its memory
        if reply.cancelled():
            work.end()
        elif (error := reply.exception()) is not None:
            self._fail(work, error)
        else:
            answer = reply.result()
            message = {"type": "answer", "id": work.id, "media_type": answer.media_type, "facts": dict(answer.facts)}
            work.end(message, answer.body)
        self._wake()  # the estimates have changed

    def _fail(self, work: RequestWork, error: BaseException) -> None:
        if not isinstance(error, BrimError):
            log.error("model %s failed", work.model, exc_info=error)
        work.end(failure(work.id, error))

    def _cancel(self, work: RequestWork) -> None:
        work.end()
        if (reply := work.reply) is not None:
            reply.cancel()

    # Every tick

    def _tick(self, now_s: float) -> None:
        works = [work for peer in self._peers for work in list(peer.works.values())] if self._models.loading else []
        for work in works:
            if work.is_loading and work.deadline_s <= now_s:
                self._fail(work, Unavailable(f'model "{work.model}" is still being loaded; try again soon'))
        was_busy, self._was_busy = self._was_busy, self._is_busy
        # immediately when nothing is left to do: an idle predictor must not look busy until its next tick
        if now_s - self._publish_s >= BUSY_TICK_S or (was_busy and not self._was_busy):
            self._publish_s = now_s
            self._publish()
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            reason = self._hung(now_s)
            if reason is None:
                self._beat()
            else:
                log.error("%s: asking to be killed", reason)
                self._beat.give_up()

    def _publish(self) -> None:
        """Publish the estimates of all warm models."""
        if self._runner is not None and self._peers:
            warm = [row["name"] for row in self._models.describe() if row["state"] == "warm"]
            estimates = {name: [self._runner.wait_s(name, within_s) for within_s in LIMITS_S] for name in warm}
            for peer in self._peers:
                peer.page.publish(estimates)

    def _hung(self, now_s: float) -> str | None:
        """What has run for so long that it will not end; None if nothing has."""
        floor_s = self._hang_s * (LOADING_FACTOR if self._models.loading else 1)
        if self._runner is not None:
            running_s, expected_s = self._runner.running_s()
            limit_s = max(floor_s, HANG_FACTOR * expected_s)
            if running_s > limit_s:
                return f"a forward pass has run for {running_s:.1f} s, more than {limit_s:.1f}"
        limit_s = STAGE_FACTOR * floor_s
        for work in list(self._busy):
            if now_s - work.began_s > limit_s:
                return f"{work.model} has been at one file for {now_s - work.began_s:.1f} s, more than {limit_s:.1f}"
        return None

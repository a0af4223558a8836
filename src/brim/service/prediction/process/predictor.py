"""The main loop of a prediction process: requests from API processes go to the batch runner, answers go back.

The main thread handles messages and the heartbeat and notices work that hangs; everything else runs in the threads of
`Models` and `BatchRunner`. torch is imported with the first model.
"""

import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import BrimError, Unavailable
from brim.jobs.worker.process import Heartbeat
from brim.service.prediction.arena import Arena, Shared
from brim.service.prediction.process.models import Models
from brim.service.prediction.process.work import Incoming, RequestWork, Started
from brim.service.prediction.protocol import (
    INLINE_BYTES,
    LIMITS_S,
    Frames,
    Message,
    StatusPage,
    failure,
    frame,
    receive_hello,
    send_hello,
)
from brim.service.run.unix_socket import listen

if TYPE_CHECKING:
    from brim.engine.batching import BatchRunner, Servable

log = logging.getLogger("brim.prediction")

BUSY_TICK_S, IDLE_TICK_S = 0.01, 0.25  # the age of estimates
BEAT_S: Final = 0.25
DRAIN_S: Final = 10.0
HANG_FACTOR: Final = 20  # a forward pass may take so many times its expected time
STAGE_FACTOR: Final = 6  # decoding and finishing have no expected time: so many times the floor
LOADING_FACTOR: Final = 12  # while a model warms up, others may wait for the device
ANSWER_BYTES: Final = 256 * 1024**2  # of address space, for long answers that the API has not read yet
READ_BYTES: Final = 256 * 1024


class Predictor:
    """Answers the requests of the API processes that connect."""

    def __init__(
        self, path: Path, models: Models, beat: Heartbeat, *, hang_s: float, decoders: int, finishers: int
    ) -> None:
        """Listens on path once it runs."""
        self._path, self._models, self._beat = path, models, beat
        self._hang_s, self._decoders, self._finishers = hang_s, decoders, finishers
        self._runner: BatchRunner | None = None
        self._peers: list[Peer] = []
        self._loading: list[RequestWork] = []  # waiting for their model
        self._started = Started()
        self._submitting: Servable | None = None  # the model of the request that is being submitted
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # calls for the main thread
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._is_leaving = False
        self._beat_s = self._publish_s = 0.0
        self._was_busy = False

    def run(self) -> None:
        """Answer requests until told to leave, then those still in progress."""
        listening = listen(self._path)
        for end in (self._woken, self._waker, listening):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wakened)
        self._selector.register(listening, selectors.EVENT_READ, partial(self._accept, listening))
        while not self._is_leaving:
            for key, events in self._selector.select(BUSY_TICK_S if self._is_busy else IDLE_TICK_S):
                key.data(events)
            self._tick(time.monotonic())
        listening.close()
        self._drain()

    def leave(self, *_: object) -> None:
        """Accept nothing more, and end when all accepted requests are answered."""
        self._is_leaving = True
        self._wake()

    def _drain(self) -> None:
        """Answer what the runner has. The API sends everything else to the next process."""
        end_s = time.monotonic() + DRAIN_S
        while self._is_busy and time.monotonic() < end_s:
            for peer in self._peers:
                peer.flush()
            self._tick(time.monotonic())
            time.sleep(BUSY_TICK_S)

    @property
    def _is_busy(self) -> bool:
        num_works = sum(len(peer.works) for peer in self._peers) - len(self._loading)
        return num_works > 0 or any(peer.has_unsent for peer in self._peers)

    # Connections

    def _accept(self, listening: socket.socket, _: int) -> None:
        try:
            connection, _address = listening.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._greet, connection))

    def _greet(self, connection: socket.socket, _: int) -> None:
        self._selector.unregister(connection)
        try:
            peer = Peer(connection, self._wake)
        except (OSError, BrimError, ValueError):
            connection.close()
            return
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._serve, peer))

    def _serve(self, peer: "Peer", events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.flush()
            if not peer.has_unsent:
                self._selector.modify(peer.connection, selectors.EVENT_READ, partial(self._serve, peer))
        if events & selectors.EVENT_READ and not self._is_leaving:
            try:
                messages = peer.read()
                for message, _ in messages or ():
                    self._handle(peer, message)
            except Exception:
                log.exception("an API process sent an invalid message; its connection is closed")
                messages = None
            if messages is None:
                self._drop(peer)

    def _drop(self, peer: "Peer") -> None:
        """An API process is gone, and with it everybody who waited."""
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        peer.close()
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
            if peer.has_unsent:
                self._selector.modify(peer.connection, both, partial(self._serve, peer))
        while not self._posted.empty():
            self._posted.get()()

    # Messages

    def _handle(self, peer: "Peer", message: Message) -> None:
        kind = message["type"]
        if kind == "request":
            self._take(peer, message)
        elif kind == "cancel":
            if (work := peer.works.get(message["id"])) is not None:
                self._cancel(work)
        elif kind == "taken":
            peer.taken(message["at"])
        elif kind == "register":
            self._models.register(message["models"])
            peer.registered = {model["name"] for model in message["models"]}
        elif kind == "models":
            peer.send({"type": "report", "id": message["id"], "value": self._models.describe()})
        elif kind == "snapshot":
            peer.send({"type": "report", "id": message["id"], "value": self._snapshot()})

    def _take(self, peer: "Peer", message: Message) -> None:
        work = peer.works[message["id"]] = RequestWork(message, peer.page, peer.end)
        work.payload = Incoming(peer.payload(message["at"]), message["name"], message["options"], work)
        if work.model not in peer.registered:  # registered a moment ago: the API's next list will have it
            self._models.see(message["model"])
        loading = self._models.ask(work.model)
        if loading.done():
            self._submit(work, loading)
        else:
            self._loading.append(work)
            loading.add_done_callback(lambda loaded: self._post(partial(self._loaded, work, loaded)))

    def _post(self, task: Callable[[], None]) -> None:
        self._posted.put(task)
        self._wake()

    def _loaded(self, work: RequestWork, loaded: "Future[Servable]") -> None:
        if work in self._loading:
            self._loading.remove(work)
            self._submit(work, loaded)

    def _submit(self, work: RequestWork, loaded: "Future[Servable]") -> None:
        if work.payload is None:
            return  # it has ended
        try:
            self._submitting = loaded.result()
            self._started.expect()
            reply = self._begun.submit(work.model, work.payload, work.deadline_s, alone=work.alone)
            self._started.note(reply.request, work)
        except Exception as error:
            self._fail(work, error)
            return
        finally:
            self._submitting = None
        work.reply = reply
        reply.add_done_callback(partial(self._answered, work))

    @property
    def _begun(self) -> "BatchRunner":
        """The runner, created with the first loaded model."""
        if self._runner is None:
            from brim.engine.batching import BatchRunner

            self._runner = BatchRunner(
                self._find, decoders=self._decoders, finishers=self._finishers, on_start=self._started.mark
            )
        return self._runner

    def _find(self, name: str) -> "Servable":
        if self._submitting is None:
            return self._models.find(name)
        return self._submitting

    def _answered(self, work: RequestWork, reply: "Future[Any]") -> None:
        """Runs in the thread that ended the request."""
        self._started.forget(work.reply.request)
        work.reply = None  # it refers to this work: a cycle would keep its memory
        if reply.cancelled():
            work.end({"type": "gone", "id": work.id})
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
        if work in self._loading:
            self._loading.remove(work)
        if work.reply is not None:
            self._begun.cancel(work.reply)
        work.end({"type": "gone", "id": work.id})

    def _snapshot(self) -> dict[str, Any]:
        return {} if self._runner is None else self._runner.snapshot()

    # Every tick

    def _tick(self, now_s: float) -> None:
        for work in [work for work in self._loading if work.deadline_s <= now_s]:
            self._loading.remove(work)
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
        for work in [work for peer in self._peers for work in list(peer.works.values())]:
            if (began_s := work.began_s) is not None and now_s - began_s > limit_s:
                return f"{work.model} has been at one file for {now_s - began_s:.1f} s, more than {limit_s:.1f}"
        return None


class Peer:
    """One API process: its connection, both sides' shared memory, its requests.

    Messages are read by one thread, answers are sent by any: immediately if the socket takes them, otherwise when it
    does, so that an API process which does not read blocks no thread.
    """

    def __init__(self, connection: socket.socket, wake: Callable[[], None]) -> None:
        """Answer the hello that can be read from the connection; wake is called when there is something to flush."""
        self.works: dict[int, RequestWork] = {}
        self.registered: set[str] = set()  # models that this API process has registered
        self.connection, self._wake = connection, wake
        self._theirs = receive_hello(connection)
        self._mine = Shared.make(StatusPage.BYTES + ANSWER_BYTES)
        self.page = StatusPage(self._mine)
        self._answers = Arena(self._mine, StatusPage.BYTES)
        self._frames = Frames()
        self._lock = threading.Lock()  # of the following, and the answers
        self._unsent = bytearray()
        self._is_gone = False
        send_hello(connection, self._mine)

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._unsent)

    def read(self) -> list[tuple[Message, bytes]] | None:
        """Messages that have arrived; None if the API process is gone."""
        try:
            data = self.connection.recv(READ_BYTES)
            return list(self._frames.feed(data)) if data else None
        except BlockingIOError:
            return []
        except (OSError, BrimError, ValueError):
            return None

    def payload(self, at: list[int]) -> memoryview:
        """The payload of a request, in shared memory."""
        return self._theirs.view(*at)

    def send(self, message: Message, body: bytes = b"") -> None:
        """Send from any thread; a long body goes through shared memory."""
        with self._lock:
            if self._is_gone:
                return
            if len(body) >= INLINE_BYTES:
                with suppress(BrimError):  # no room for it: the socket takes it too
                    message, body = {**message, "at": [self._answers.put(body), len(body)]}, b""
            self._send(frame(message, body))

    def taken(self, offset: int) -> None:
        """The API has read the answer there."""
        with self._lock:
            self._answers.free(offset)

    def end(self, work: RequestWork, message: Message, body: bytes) -> None:
        self.works.pop(work.id, None)
        self.send(message, body)

    def flush(self) -> None:
        """Send what the socket did not take before."""
        with self._lock:
            if self._unsent and not self._is_gone:
                del self._unsent[: self._try(self._unsent)]

    def close(self) -> None:
        """Disconnect; payloads that are being read keep their memory until then."""
        with self._lock:
            self._is_gone = True
            self.connection.close()
            self._theirs.close()
            self._mine.close()

    def _send(self, data: bytes) -> None:
        sent = 0 if self._unsent else self._try(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._wake()

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it is gone, which the reading side notices

"""What a prediction process does: hears API processes, hands requests to the runner, gives their answers back.

One thread, the main one, talks, beats, and notices work that hangs; everything else runs in the threads of `Models` and
`BatchRunner`. torch comes with the first model.
"""

import logging
import queue
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import BrimError, Unavailable
from brim.jobs.worker.process import Heartbeat
from brim.service.prediction.process.models import Models
from brim.service.prediction.process.peer import Peer
from brim.service.prediction.process.protocol import LIMITS_S, Message, failure
from brim.service.prediction.process.work import Incoming, Started, Work
from brim.service.run.unix_socket import listen

if TYPE_CHECKING:
    from brim.engine.batching import BatchRunner, Servable

log = logging.getLogger("brim.prediction")

BUSY_TICK_S, IDLE_TICK_S = 0.01, 0.25  # estimates are that old at most
BEAT_S: Final = 0.25
DRAIN_S: Final = 10.0
HANG_FACTOR: Final = 20  # a forward may take that many times what is expected of it
STAGE_FACTOR: Final = 6  # nothing is expected of decoding and finishing: that many times the floor
LOADING_FACTOR: Final = 12  # a model that warms up may keep the device from others


class Predictor:
    """Answers the API processes that connect."""

    def __init__(
        self, path: Path, models: Models, beat: Heartbeat, *, hang_s: float, decoders: int, finishers: int
    ) -> None:
        """Take where to listen, the models, and whom to tell that we are well; listens only when it runs."""
        self._path, self._models, self._beat = path, models, beat
        self._hang_s, self._decoders, self._finishers = hang_s, decoders, finishers
        self._runner: BatchRunner | None = None
        self._peers: list[Peer] = []
        self._loading: list[Work] = []  # that wait for their model
        self._started = Started()
        self._found: Servable | None = None  # what the runner finds, while a request is submitted
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the main thread to do
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._is_leaving = False
        self._beat_s = self._publish_s = 0.0
        self._was_busy = False

    def run(self) -> None:
        """Answer until told to leave, then until what is under way is answered."""
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
        """Take nothing more, and end when what was taken is answered."""
        self._is_leaving = True
        self._wake()

    def _drain(self) -> None:
        """Answer what the runner has. What is not read yet, or waits for its model, is sent to the next of us."""
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

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.flush()
            if not peer.has_unsent:
                self._selector.modify(peer.connection, selectors.EVENT_READ, partial(self._serve, peer))
        if events & selectors.EVENT_READ and not self._is_leaving:
            try:
                messages = peer.read()
                for message, _ in messages or ():
                    self._hear(peer, message)
            except Exception:
                log.exception("an API process says what cannot be; its connection is closed")
                messages = None
            if messages is None:
                self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """An API process is gone, and with it whoever waited."""
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        peer.close()
        for work in list(peer.works.values()):
            self._cancel(work)

    def _wake(self) -> None:
        try:
            self._waker.send(b".")
        except BlockingIOError:
            return  # it will wake as it is

    def _wakened(self, _: int) -> None:
        self._woken.recv(4096)
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        for peer in self._peers:
            if peer.has_unsent:
                self._selector.modify(peer.connection, both, partial(self._serve, peer))
        while not self._posted.empty():
            self._posted.get()()

    # Messages

    def _hear(self, peer: Peer, message: Message) -> None:
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
            peer.send({"type": "told", "id": message["id"], "value": self._models.describe()})
        elif kind == "snapshot":
            peer.send({"type": "told", "id": message["id"], "value": self._snapshot()})

    def _take(self, peer: Peer, message: Message) -> None:
        work = peer.works[message["id"]] = Work(message, peer.page, peer.end)
        work.payload = Incoming(peer.payload(message["at"]), message["name"], message["options"], work)
        if work.model not in peer.registered:  # it was registered a moment ago: the API's next list will have it
            self._models.see(message["model"])
        asked = self._models.ask(work.model)
        if asked.done():
            self._submit(work, asked)
        else:
            self._loading.append(work)
            asked.add_done_callback(lambda loaded: self._post(partial(self._loaded, work, loaded)))

    def _post(self, task: Callable[[], None]) -> None:
        self._posted.put(task)
        self._wake()

    def _loaded(self, work: Work, asked: "Future[Servable]") -> None:
        if work in self._loading:
            self._loading.remove(work)
            self._submit(work, asked)

    def _submit(self, work: Work, asked: "Future[Servable]") -> None:
        if work.payload is None:
            return  # it has ended
        try:
            self._found = asked.result()
            self._started.expect()
            reply = self._begun.submit(work.model, work.payload, work.deadline_s, alone=work.alone)
            self._started.note(reply.request, work)
        except Exception as error:
            self._fail(work, error)
            return
        finally:
            self._found = None
        work.reply = reply
        reply.add_done_callback(partial(self._answered, work))

    @property
    def _begun(self) -> "BatchRunner":
        """The runner, made with the first model that is loaded."""
        if self._runner is None:
            from brim.engine.batching import BatchRunner

            self._runner = BatchRunner(
                self._find, decoders=self._decoders, finishers=self._finishers, on_start=self._started.mark
            )
        return self._runner

    def _find(self, name: str) -> "Servable":
        if self._found is None:
            return self._models.find(name)
        return self._found

    def _answered(self, work: Work, reply: "Future[Any]") -> None:
        """In whatever thread ended it."""
        self._started.forget(work.reply.request)
        work.reply = None  # which holds this call, and so the work: its memory goes when it does
        if reply.cancelled():
            work.end({"type": "gone", "id": work.id})
        elif (error := reply.exception()) is not None:
            self._fail(work, error)
        else:
            answer = reply.result()
            message = {"type": "answer", "id": work.id, "media_type": answer.media_type, "facts": dict(answer.facts)}
            work.end(message, answer.body)
        self._wake()  # what was estimated with it under way no longer holds

    def _fail(self, work: Work, error: BaseException) -> None:
        if not isinstance(error, BrimError):
            log.error("model %s failed", work.model, exc_info=error)
        work.end(failure(work.id, error))

    def _cancel(self, work: Work) -> None:
        if work in self._loading:
            self._loading.remove(work)
        if work.reply is not None:
            self._begun.cancel(work.reply)
        work.end({"type": "gone", "id": work.id})

    def _snapshot(self) -> dict[str, Any]:
        return {} if self._runner is None else self._runner.snapshot()

    # Now and then

    def _tick(self, now_s: float) -> None:
        for work in [work for work in self._loading if work.deadline_s <= now_s]:
            self._loading.remove(work)
            self._fail(work, Unavailable(f'model "{work.model}" is still being loaded; try again soon'))
        was_busy, self._was_busy = self._was_busy, self._is_busy
        # at once when nothing is left to do: an idle predictor must not look busy until its next tick
        if now_s - self._publish_s >= BUSY_TICK_S or (was_busy and not self._was_busy):
            self._publish_s = now_s
            self._publish()
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            reason = self._hung(now_s)
            if reason is None:
                self._beat()
            else:
                log.error("%s: asks to be killed", reason)
                self._beat.give_up()

    def _publish(self) -> None:
        """Estimates of the models that are warm; of others nothing is known."""
        if self._runner is not None and self._peers:
            warm = [row["name"] for row in self._models.describe() if row["state"] == "warm"]
            estimates = {name: [self._runner.wait_s(name, within_s) for within_s in LIMITS_S] for name in warm}
            for peer in self._peers:
                peer.page.publish(estimates)

    def _hung(self, now_s: float) -> str | None:
        """What takes so long that it will not end."""
        floor_s = self._hang_s * (LOADING_FACTOR if self._models.loading else 1)
        if self._runner is not None:
            running_s, expected_s = self._runner.running_s()
            limit_s = max(floor_s, HANG_FACTOR * expected_s)
            if running_s > limit_s:
                return f"a forward has run for {running_s:.1f} s, more than {limit_s:.1f}"
        limit_s = STAGE_FACTOR * floor_s
        for work in [work for peer in self._peers for work in list(peer.works.values())]:
            if (began_s := work.began_s) is not None and now_s - began_s > limit_s:
                return f"{work.model} has been at one file for {now_s - began_s:.1f} s, more than {limit_s:.1f}"
        return None

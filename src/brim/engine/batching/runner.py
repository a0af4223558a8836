"""Requests → batches → futures: the threads around the batch policy, the same for every kind of model.

    submit ─▶ decode ×W ─▶ device ×1 ─▶ collect ×1 ─▶ finish ×W ─▶ the request's future
              by deadline   asks the     waits for     by deadline
                            policy       the device

One lock guards the policy and the requests; models and futures are called without it. A request is resolved exactly
once, whatever its model, its client or the device do.
"""

import heapq
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

from brim.engine.batching.policy import BatcherConfig, BatchPolicy, StartBatch
from brim.engine.batching.servable import Answer, DecodedRequest, Payload, RequestShape, Servable
from brim.engine.batching.service_times import MAX_KEYS, PoolTimes
from brim.engine.batching.work import BatchStats, DeviceBatch, OpenRequest, Piece, Reply
from brim.errors import BrimError, DeadlinePassed, Overloaded

log = logging.getLogger("brim")

LOOK_S = 0.02  # how often waiting requests are checked against their deadlines while nothing else happens
JOIN_S = 5.0  # for a thread to end; one in a hung forward pass ends with the process


class BatchRunner:
    """Decodes, batches, runs and finishes requests; a context manager that owns its threads."""

    def __init__(
        self,
        find: Callable[[str], Servable],
        *,
        config: BatcherConfig | None = None,
        decoders: int = 2,
        finishers: int = 2,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[list[int]], None] = lambda requests: None,
    ) -> None:
        """submit calls find(model); the device thread calls on_start, perhaps before submit returns."""
        self._find, self._clock, self._on_start = find, clock, on_start
        self._config = config or BatcherConfig()
        self._policy = BatchPolicy(self._sizes_of, self._config)
        self._stats = BatchStats(clock())
        self._decode_times, self._finish_times = PoolTimes(decoders), PoolTimes(finishers)
        self._lock = threading.Lock()
        self._for_device = threading.Condition(self._lock)
        self._for_decoders = threading.Condition(self._lock)
        self._for_finishers = threading.Condition(self._lock)
        self._empty = threading.Condition(self._lock)
        self._open: dict[int, OpenRequest] = {}
        self._to_decode: list[tuple[float, int, OpenRequest]] = []
        self._to_finish: list[tuple[float, int, OpenRequest]] = []
        self._again: deque[Piece] = deque()  # halves of batches that failed
        self._to_collect: queue.SimpleQueue[tuple[Piece, Any] | None] = queue.SimpleQueue()
        self._on_device: list[Piece] = []
        self._freed_s = 0.0
        self._sizes: dict[Hashable, tuple[int, ...]] = {}
        self._served: dict[str, tuple[weakref.ref[Servable], int]] = {}  # latest servable and its token, per model
        self._latest: dict[int, tuple[Hashable, float]] = {}  # latest key and its cost, per token
        self._tokens = itertools.count()
        self._ending = self._closed = self._broken = False
        work = [("device", self._run_device), ("collect", self._run_collect)]
        work += [(f"decode-{n}", self._run_decoder) for n in range(decoders)]
        work += [(f"finish-{n}", self._run_finisher) for n in range(finishers)]
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"brim-{name}", daemon=True) for name, run in work
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests

    def submit(self, model: str, payload: Payload, deadline_s: float, *, alone: bool = False) -> Reply:
        """Queue a request, deadline_s by the runner's clock; raises Overloaded, or what inspect raises, immediately."""
        self._refuse_if_ending()
        servable = self._find(model)
        shape = servable.inspect(payload)
        now_s = self._clock()
        with self._lock:
            self._refuse_if_ending()
            token = self._token(model, servable)
            key = (token, shape.key)
            self._introduce(key, token, shape, servable.sizes)
            try:
                number = self._policy.admit(
                    key,
                    shape.parts,
                    deadline_s,
                    now_s,
                    before_s=self._decode_times.expected_s(key, token),
                    after_s=self._finish_times.expected_s(key, token),
                    alone=alone,
                )
            except Overloaded:
                self._stats.reject("overloaded")
                raise
            request = OpenRequest(Reply(number), servable, token, key, payload, deadline_s, now_s)
            self._open[number] = request
            self._decode_times.enter()
            heapq.heappush(self._to_decode, (deadline_s, number, request))
            self._for_decoders.notify()
        request.reply.add_done_callback(self._left)
        return request.reply

    def cancel(self, future: Future[Answer]) -> None:
        """The client is gone: cancel its future, and remove its waiting parts from the queue."""
        future.cancel()  # calls _left

    def drain(self, seconds: float) -> bool:
        """Reject new requests and wait until all accepted ones are answered; False if that takes longer."""
        with self._lock:
            self._ending = True
            return self._empty.wait_for(lambda: not self._open, seconds)

    def close(self) -> None:
        """End the threads; unanswered requests fail with an error that says so."""
        for request in self._end():
            self._stats.reject("ending")
            self._resolve(request, Overloaded("the service ended before this request was answered; send it again", 1.0))
        self._to_collect.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)

    def _end(self) -> list[OpenRequest]:
        """Wake the threads to end; returns the unanswered requests."""
        with self._lock:
            self._ending = self._closed = True
            for condition in (self._for_device, self._for_decoders, self._for_finishers):
                condition.notify_all()
            return list(self._open.values())

    # State

    def wait_s(self, model: str, within_s: float = math.inf) -> float:
        """Seconds until a request for this model, due within within_s, would be answered if it arrived now."""
        with self._lock:
            token = self._served[model][1] if model in self._served else None
            if token is None or token not in self._latest:
                return 0.0
            key = self._latest[token][0]
            before_s = self._decode_times.expected_s(key, token)
            wait_s = self._policy.wait_s(key, self._clock(), within_s=within_s)
            return max(wait_s, before_s) + self._finish_times.expected_s(key, token)

    def running_s(self) -> tuple[float, float]:
        """How long the current forward pass has run and how long it should; zeros if none runs. Detects hangs."""
        with self._lock:
            if self._broken:
                return math.inf, 0.0
            if not self._on_device:
                return 0.0, 0.0
            piece = self._on_device[0]
            sizes = self._sizes_of(piece.batch.parts[0].key)
            size = next((size for size in sizes if size >= len(piece.places)), sizes[-1])
            elapsed_s = self._clock() - max(piece.since_s, self._freed_s)
            return elapsed_s, self._policy.seconds(piece.batch.parts[0].key, size)

    def snapshot(self) -> dict[str, Any]:
        """For metrics: depth, running, batch_sizes, seconds by stage, rejected by reason, busy_s, up_s."""
        with self._lock:
            now = {"depth": self._policy.depth, "running": self._policy.running, "requests": len(self._open)}
        return now | self._stats.snapshot(self._clock())

    # The threads

    def _guarded(self, run: Callable[[], None]) -> None:
        """A failing thread ends the runner, so that requests fail instead of waiting for ever."""
        try:
            run()
        except BaseException as failure:
            log.exception("the batch runner failed")
            self._broken = True
            for request in self._end():
                self._fail(
                    request, BrimError(f"the batch runner failed: {type(failure).__name__}: {failure}; send it again")
                )

    def _run_decoder(self) -> None:
        while (request := self._pop(self._to_decode, self._for_decoders)) is not None:
            began_s = self._clock()
            took_s = None
            try:
                if not request.done and request.payload is not None:
                    self._decoded(request, request.servable.decode(request.payload))
                    took_s = request.decode_s = self._clock() - began_s
            except BaseException as failure:
                self._fail(request, failure)
            request.payload = None
            with self._lock:
                self._decode_times.leave(request.key, took_s, request.token)
                if took_s is not None and not request.done:
                    request.ready_s = self._clock()
                    self._policy.ready(request.reply.request, request.ready_s, key=request.key, parts=request.left)
                    self._for_device.notify()
            if took_s is not None and not request.left:
                self._to_finisher(request)
            del request  # its model may be closed while this thread waits, and its memory must be released

    def _decoded(self, request: OpenRequest, item: DecodedRequest) -> None:
        request.item, request.left = item, len(item.parts)
        request.outputs = [None] * request.left
        key = (request.token, item.key)
        if key != request.key:
            with self._lock:
                self._sizes.setdefault(key, self._sizes_of(request.key))
            request.key = key

    def _run_device(self) -> None:
        while (piece := self._next_piece()) is not None:
            if piece.places:
                running: Any  # the handle for collect, or the error of the forward pass
                try:
                    running = piece.places[0][0].servable.forward(
                        [request.item.parts[number] for request, number in piece.places if request.item is not None]
                    )
                except BaseException as failure:
                    running = failure
                piece.launch_s = self._clock() - piece.since_s
                self._to_collect.put((piece, running))
                del running
            del piece
        self._to_collect.put(None)

    def _next_piece(self) -> Piece | None:
        """What runs next; None when the runner is closed."""
        while True:
            piece, expired = self._look()
            for request in expired:
                self._give_up(request)
            if self._closed:
                return None
            if piece is None:
                continue
            for request, _ in piece.places:
                request.started_s = request.started_s or piece.since_s
            if piece.places:
                try:
                    self._on_start(sorted({request.reply.request for request, _ in piece.places}))
                except BaseException:
                    log.exception("on_start failed; the batch runs all the same")
            return piece

    def _look(self) -> tuple[Piece | None, list[OpenRequest]]:
        """Wait until there is something to run, or a request that is too late."""
        with self._lock:
            while not self._closed:
                now_s = self._clock()
                expired = [self._open[number] for number in self._policy.expire(now_s) if number in self._open]
                if expired:
                    return None, expired
                if self._again:
                    return self._hand_over(self._again.popleft(), now_s), []
                decision = self._policy.next(now_s)
                if isinstance(decision, StartBatch):
                    self._policy.started(decision.batch, now_s)
                    batch = DeviceBatch(decision.batch, now_s)
                    places = [(self._open[part.request], part.number) for part in decision.batch]
                    self._stats.start(len(places), now_s)
                    return self._hand_over(Piece(batch, places), now_s), []
                timeout = None if decision.until_s is None else max(0.0, decision.until_s - now_s)
                if self._policy.depth:
                    timeout = LOOK_S if timeout is None else min(timeout, LOOK_S)
                self._for_device.wait(timeout)
            return None, []

    def _hand_over(self, piece: Piece, now_s: float) -> Piece:
        """Mark a piece as being on the device; requests that left in the meantime do not run."""
        alive = [place for place in piece.places if not place[0].done]
        sizes = self._sizes_of(piece.batch.parts[0].key)
        if alive and len(alive) not in sizes:
            size = max(size for size in sizes if size <= len(alive))
            self._again.appendleft(Piece(piece.batch, alive[size:]))
            piece.batch.pieces += 1
            alive = alive[:size]
        piece.places, piece.since_s = alive, now_s
        if alive:
            self._on_device.append(piece)
        else:
            self._end_piece(piece, now_s)
        return piece

    def _run_collect(self) -> None:
        while (launched := self._to_collect.get()) is not None:
            self._collect(*launched)
            del launched  # release its device memory while this thread waits

    def _collect(self, piece: Piece, running: Any) -> None:
        try:
            if isinstance(running, BaseException):
                raise running
            outputs: Sequence[Any] = piece.places[0][0].servable.collect(running)
            if len(outputs) != len(piece.places):
                raise BrimError(f"a batch of {len(piece.places)} gave {len(outputs)} outputs; expected one for each")
        except BaseException as failure:
            self._bisect(piece, failure)
        else:
            self._spread(piece, outputs)

    def _bisect(self, piece: Piece, failure: BaseException) -> None:
        """Run the halves of a batch that failed; a part that fails alone is the cause."""
        with self._lock:
            piece.batch.failed = True
            num = len(piece.places)
            if num > 1:
                size = max(size for size in self._sizes_of(piece.batch.parts[0].key) if size <= num // 2)
                parts = [piece.places[start : start + size] for start in range(0, num, size)]
                piece.batch.pieces += len(parts)
                self._again.extend(Piece(piece.batch, part) for part in parts)
            self._end_piece(piece, self._clock())
        if num == 1:
            self._fail(piece.places[0][0], failure)

    def _spread(self, piece: Piece, outputs: Sequence[Any]) -> None:
        now_s = self._clock()
        with self._lock:
            self._end_piece(piece, now_s)
            for (request, number), output in zip(piece.places, outputs, strict=True):
                if not isinstance(output, BaseException):
                    request.outputs[number] = output
                    request.left -= 1
                    request.collected_s = now_s
        for (request, _), output in zip(piece.places, outputs, strict=True):
            if isinstance(output, BaseException):
                self._fail(request, output)
        for request in {id(request): request for request, _ in piece.places}.values():
            if not request.left:
                self._to_finisher(request)

    def _end_piece(self, piece: Piece, now_s: float) -> None:
        """A piece left the device; the last one ends its batch. Called with the lock held."""
        if piece in self._on_device:
            self._on_device.remove(piece)
        self._freed_s = now_s
        piece.batch.pieces -= 1
        if not piece.batch.pieces:
            self._policy.finished(piece.batch.parts, now_s, learn=not piece.batch.failed, launch_s=piece.launch_s)
            self._stats.end(now_s)
        self._for_device.notify()

    def _to_finisher(self, request: OpenRequest) -> None:
        with self._lock:
            if not request.done:
                self._finish_times.enter()
                heapq.heappush(self._to_finish, (request.deadline_s, request.reply.request, request))
                self._for_finishers.notify()

    def _run_finisher(self) -> None:
        while (request := self._pop(self._to_finish, self._for_finishers)) is not None:
            took_s = None
            try:
                took_s = self._finish(request)
            except BaseException as failure:
                self._fail(request, failure)
            with self._lock:
                stay_s = None if took_s is None or not request.collected_s else self._clock() - request.collected_s
                self._finish_times.leave(request.key, took_s, request.token, stay_s=stay_s)
            del request

    def _finish(self, request: OpenRequest) -> float | None:
        """Finish and resolve the request, unless it is too late; returns how long that took."""
        began_s = self._clock()
        if request.done or request.item is None:
            return None
        grace_s = self._config.grace * (request.deadline_s - request.submitted_s)
        # If others wait, do not start to finish a request that would be late.
        expected_s = self._finish_times.work_s(request.key, request.token) if self._to_finish else 0.0
        if began_s + expected_s > request.deadline_s + grace_s:
            self._give_up(request)
            return None
        answer = request.servable.finish(request.item, request.outputs)
        now_s = self._clock()
        if now_s > request.deadline_s + 2 * grace_s:
            self._give_up(request)
            return now_s - began_s
        seconds = {
            "wait": max(0.0, request.started_s - request.ready_s),
            "decode": request.decode_s,
            "forward": max(0.0, request.collected_s - request.started_s),
            "finish": now_s - began_s,
            "total": now_s - request.submitted_s,
        }
        if self._resolve(request, replace(answer, facts={**answer.facts, "seconds": seconds})):
            self._stats.resolve("answered", seconds)
        return now_s - began_s

    def _pop(self, heap: list[tuple[float, int, OpenRequest]], condition: threading.Condition) -> OpenRequest | None:
        """The request that is due first; None when the runner is closed."""
        with self._lock:
            condition.wait_for(lambda: bool(heap) or self._closed)
            return None if self._closed else heapq.heappop(heap)[2]

    # Resolving a request

    def _fail(self, request: OpenRequest, failure: BaseException) -> None:
        if self._resolve(request, failure):
            self._stats.resolve("failed", {})

    def _give_up(self, request: OpenRequest) -> None:
        limit_s, waited_s = request.deadline_s - request.submitted_s, self._clock() - request.submitted_s
        message = (
            f"accepted with {limit_s * 1e3:.0f} ms to its deadline, but {waited_s * 1e3:.0f} ms later it could no "
            "longer be answered in time; send it again, or allow more time"
        )
        if self._resolve(request, DeadlinePassed(message)):
            self._stats.reject("deadline")

    def _resolve(self, request: OpenRequest, result: Answer | BaseException) -> bool:
        """Resolve a request with its answer or error; returns False if it was resolved before."""
        if not self._forget(request):
            return False
        with suppress(InvalidStateError):  # its client cancelled it at this moment
            if isinstance(result, BaseException):
                request.reply.set_exception(result)
            else:
                request.reply.set_result(result)
        return True

    def _left(self, reply: Future[Answer]) -> None:
        """A future is done; if its client cancelled it, its parts leave the queue."""
        if reply.cancelled() and isinstance(reply, Reply):
            request = self._open.get(reply.request)
            if request is not None and self._forget(request):
                self._stats.resolve("cancelled", {})

    def _forget(self, request: OpenRequest) -> bool:
        """Remove a request everywhere; False if it was removed before."""
        with self._lock:
            if request.done:
                return False
            request.done = True
            request.payload = None
            self._policy.leave(request.reply.request)
            self._open.pop(request.reply.request, None)
            if not self._open:
                self._empty.notify_all()
            self._for_device.notify()
            return True

    def _refuse_if_ending(self) -> None:
        if self._ending:
            self._stats.reject("ending")
            raise Overloaded("the service is ending and takes no new requests; send it again in a moment", 1.0)

    # Models

    def _token(self, model: str, servable: Servable) -> int:
        """A number for this servable: after a reload, old and new requests of a model share no batch."""
        held, token = self._served.get(model, (None, -1))
        if held is None or held() is not servable:
            self._latest.pop(token, None)
            token = next(self._tokens)
            self._served[model] = (weakref.ref(servable), token)
        return token

    def _introduce(self, key: Hashable, token: int, shape: RequestShape, sizes: Sequence[int]) -> None:
        """Tell the policy the batch sizes of a key and the expected step times."""
        if key not in self._sizes:
            self._sizes[key] = tuple(shape.sizes or sizes)
            while len(self._sizes) > 2 * MAX_KEYS:
                del self._sizes[next(iter(self._sizes))]
        if not self._policy.knows(key):
            guesses = dict(shape.expected_s)
            like, cost = self._latest.get(token, (None, 0.0))
            if not guesses and cost and self._policy.knows(like):
                common = set(self._sizes[key]) & set(self._sizes_of(like))
                guesses = {size: self._policy.seconds(like, size) * shape.cost / cost for size in common}
            for size, seconds in guesses.items():
                self._policy.expect(key, size, seconds)
        self._latest[token] = (key, shape.cost)

    def _sizes_of(self, key: Hashable) -> tuple[int, ...]:
        return self._sizes.get(key, (1,))

"""Overlapped stages: a thread or more each, bounded queues between them, results in order.

    source ──queue──▶ stage ──queue──▶ stage ──queue──▶ the caller's for loop

Every item carries its index. A queue takes an index only when it is among the next `depth` to be
handed on, and hands on strictly by index; this orders the results of a stage with several workers
and bounds what is in flight with one rule. The end of the run and every failure are an index too:
the run ends for the caller when all items before it have arrived, and in no other way.

torch's current device, current stream and gradient mode belong to a thread: a stage sets its own.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from brim.engine.meter import BUSY, INPUT, ROOM, Meter
from brim.errors import ConfigError

In = TypeVar("In")
Out = TypeVar("Out")

_SLICE_S = 0.1  # longest uninterrupted wait of the caller; two stay below the promised 0.25 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[In, Out]):
    """One step of a pipeline; work is called from the stage's own threads."""

    name: str  # in the meter, in thread names and in errors
    work: Callable[[In], Out]
    workers: int = 1  # threads; each holds one more item than the queue
    depth: int = 2  # items waiting in the output queue; 2 hides jitter of about one item

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"stage {self.name!r}: workers={self.workers} must be at least 1")
        _check_depth(self.name, self.depth)


class Pipeline(Iterator[Any]):
    """Results of the last stage in the order of the source, computed while the caller uses earlier ones.

    A failure in the source or in a stage is raised by next() as the original exception, after the
    results that precede it. Leaving the with block stops and joins every thread; it waits for the
    running calls of work and of the source.
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: Sequence[Stage[Any, Any]],
        *,
        meter: Meter | None = None,
        source_name: str = "source",
        depth: int = 2,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """depth is that of the source's queue; tick is called at least every 0.25 s while waiting."""
        _check_depth(source_name, depth)
        names = [source_name, *(stage.name for stage in stages)]
        if len(set(names)) < len(names):
            raise ConfigError(f"stages {names}: names must differ; the meter accounts by name")
        self._source = source
        self._stages = tuple(stages)
        self._names = names
        self._meter = meter if meter is not None else Meter()
        self._tick = tick
        self._ticked_s = 0.0
        self._channels = [_Channel(depth), *(_Channel(stage.depth) for stage in stages)]
        self._threads: list[threading.Thread] = []
        self._settled: set[threading.Thread] = set()  # threads that have ended or were told to

    def __enter__(self) -> Self:
        if self._threads:
            raise RuntimeError("pipeline was entered before; make a new one for a second run")
        for name in self._names:
            self._meter.add(name, 0.0, BUSY)  # the summary lists the stages in the order data flows
        self._threads = self._make_threads()
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop and join the threads; results not yet taken are dropped."""
        self._close()

    def __next__(self) -> Any:
        """Wait for the next result; after a failure every call raises it, until the block is left."""
        try:
            entry = self._take()
        except _Stopped:
            raise RuntimeError("pipeline has stopped: left, interrupted, or never entered") from None
        except BaseException as failure:
            self._stop()  # an item may be lost between queue and caller, so this run cannot continue
            if isinstance(failure, StopIteration):
                raise RuntimeError("tick raised StopIteration") from failure
            raise
        if not isinstance(entry, _End):
            return entry[1]
        if entry.failure is None:
            raise StopIteration
        try:
            raise entry.failure
        finally:
            del entry  # else failure → traceback → this frame → failure keeps device memory alive

    def _take(self) -> "tuple[int, Any] | _End":
        if not self._threads:
            raise _Stopped
        lost = ""
        while True:
            self._tick_when_due()
            entry = self._channels[-1].get(_SLICE_S)
            if entry is not None:
                return entry
            if lost:  # dead since the last slice: anything that thread posted would have arrived
                raise RuntimeError(f"pipeline thread {lost} died without handing over its end; results are missing")
            lost = self._find_lost()

    def _tick_when_due(self) -> None:
        now_s = time.monotonic()
        if self._tick is not None and now_s - self._ticked_s >= _SLICE_S:
            self._ticked_s = now_s
            self._tick()

    def _find_lost(self) -> str:
        dead = [thread for thread in self._threads if not thread.is_alive()]
        lost = [thread for thread in dead if thread not in self._settled]
        if not lost and len(dead) == len(self._threads):
            lost = dead[-1:]
        return ", ".join(thread.name for thread in lost)

    def _make_threads(self) -> list[threading.Thread]:
        threads = [self._thread(self._names[0], self._feed, None, self._channels[0])]
        for stage, inbox, outbox in zip(self._stages, self._channels, self._channels[1:], strict=False):
            for worker in range(stage.workers):
                name = stage.name if stage.workers == 1 else f"{stage.name}-{worker}"
                threads.append(self._thread(name, partial(self._work, stage, inbox, outbox), inbox, outbox))
        return threads

    def _thread(
        self, name: str, body: Callable[[], None], inbox: "_Channel | None", outbox: "_Channel"
    ) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except _Stopped:
                if inbox is not None:
                    inbox.stop()
            except BaseException as failure:
                outbox.close_now(failure)
            self._settled.add(thread)

        thread = threading.Thread(target=run, name=f"pipeline-{name}", daemon=True)
        return thread

    def _feed(self) -> None:
        """The source's thread: waits for room first, so that it never runs more than the depth ahead."""
        name, outbox, index = self._names[0], self._channels[0], 0
        iterator: Iterator[Any] | None = None
        while True:
            with self._meter.waiting(name, ROOM):
                outbox.wait_for_room(index)
            try:
                if iterator is None:
                    iterator = self._begin()
                with self._meter.busy(name):
                    item = next(iterator)
            except StopIteration:
                outbox.close(_End(index, None))
                return
            except BaseException as failure:
                outbox.close(_End(index, failure))
                return
            outbox.put(index, item)
            del item  # not kept alive while the thread waits
            index += 1

    def _begin(self) -> Iterator[Any]:
        try:
            return iter(self._source)
        except StopIteration as failure:
            raise RuntimeError(f"{self._names[0]!r} raised StopIteration in __iter__") from failure

    def _work(self, stage: Stage[Any, Any], inbox: "_Channel", outbox: "_Channel") -> None:
        """One thread of a stage."""
        while True:
            with self._meter.waiting(stage.name, INPUT):
                entry = inbox.get()
            assert entry is not None
            if isinstance(entry, _End):
                outbox.close(entry)
                return
            index, item = entry
            try:
                with self._meter.busy(stage.name):
                    result = stage.work(item)
            except BaseException as failure:
                outbox.close(_End(index, _surfaced(failure, stage.name)))
                inbox.stop()  # items before this one are already with other workers
                return
            del entry, item  # not kept alive while the thread waits
            with self._meter.waiting(stage.name, ROOM):
                outbox.put(index, result)
            del result

    def _stop(self) -> None:
        for channel in self._channels:
            channel.stop()

    def _close(self) -> None:
        self._stop()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_SLICE_S)  # in slices, so that a second Ctrl-C is noticed on every system


class HostCopy:
    """Copies device tensors into pinned host memory without stopping the device.

    The buffers come from torch's caching pinned allocator, which takes one back when its last
    reference is gone and its copy has finished; a list of our own could hand one out too early.
    """

    def start(self, tensors: Mapping[str, Tensor]) -> "Pending":
        """Queue the copies on the current stream; tensors already on the host pass through."""
        host = {}
        for name, tensor in tensors.items():
            host[name] = tensor
            if tensor.is_cuda:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        events = []
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            # blocking: the waiting thread sleeps rather than spins
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return Pending(host, tuple(tensors.values()), events)


class Pending:
    """Host copies in progress; holds the device tensors until they are finished."""

    def __init__(self, host: dict[str, Tensor], sources: Sequence[Tensor], events: Sequence[torch.cuda.Event]) -> None:
        self._host = host
        self._sources = sources
        self._events = events

    def wait(self) -> dict[str, Tensor]:
        """Return the host tensors once they are copied; waits for these copies only."""
        for event in self._events:
            event.synchronize()
        self._events = self._sources = ()
        return self._host


@dataclass(frozen=True, slots=True)
class _End:
    """The run has no items from this index on, because of the failure if there is one."""

    index: int
    failure: BaseException | None


class _Stopped(Exception):
    """The consumer has left; this thread should end."""


class _Channel:
    """Bounded queue between stages, strictly by index."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._slots: dict[int, Any] = {}
        self._next = 0  # next index to hand on
        self._end: _End | None = None
        self._stopped = False
        # entered as a plain lock: a signal between acquire and body cannot leave it locked
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        # One condition per waiting index: with sixteen workers, waking all of them for every item takes 0.2 ms.
        self._rooms: dict[int, threading.Condition] = {}

    def wait_for_room(self, index: int) -> None:
        """Return when put would not wait; free room stays free."""
        with self._lock:
            if not self._admits(index):
                self._rooms[index] = threading.Condition(self._lock)
                try:
                    self._rooms[index].wait_for(lambda: self._admits(index))
                finally:
                    del self._rooms[index]
            if self._refuses(index):
                raise _Stopped

    def put(self, index: int, item: Any) -> None:
        self.wait_for_room(index)
        with self._lock:
            if self._refuses(index):
                raise _Stopped
            self._slots[index] = item
            if index == self._next:
                self._filled.notify()

    def get(self, timeout_s: float | None = None) -> tuple[int, Any] | _End | None:
        """Return the next item, the end every time once reached, or None after the timeout."""
        with self._lock:
            if not self._ready():
                self._filled.wait_for(self._ready, timeout_s)
            index = self._next
            if index in self._slots:
                self._next += 1
                self._wake_next()
                return index, self._slots.pop(index)
            if self._end is not None and index >= self._end.index:
                return self._end
            if self._stopped:
                raise _Stopped
            return None

    def close(self, end: _End) -> None:
        """End the run at this index; of several ends the first in order counts."""
        with self._lock:
            if self._end is None or end.index < self._end.index:
                self._end = end
                self._slots = {index: item for index, item in self._slots.items() if index < end.index}
                self._wake_all()

    def close_now(self, failure: BaseException) -> None:
        """End the run before the next item."""
        self.close(_End(self._next, failure))

    def stop(self) -> None:
        """Drop the items and wake all waiting threads, which end."""
        with self._lock:
            dropped, self._slots = self._slots, {}
            if self._end is not None and self._end.failure is not None:
                self._end = None
            self._stopped = True
            self._wake_all()
        dropped.clear()  # after the lock: items may have finalisers

    def _wake_next(self) -> None:
        """After an item was taken: wake the thread whose index has room now, and the one that takes the next item."""
        room = self._rooms.get(self._next + self._depth - 1)
        if room is not None:
            room.notify()
        if self._next in self._slots:
            self._filled.notify()
        elif self._ready():  # at the end, which concerns all threads
            self._filled.notify_all()

    def _wake_all(self) -> None:
        for room in self._rooms.values():
            room.notify()
        self._filled.notify_all()

    def _admits(self, index: int) -> bool:
        return self._refuses(index) or index < self._next + self._depth

    def _refuses(self, index: int) -> bool:
        return self._stopped or (self._end is not None and index >= self._end.index)

    def _ready(self) -> bool:
        at_end = self._end is not None and self._next >= self._end.index
        return self._next in self._slots or at_end or self._stopped


def _surfaced(failure: BaseException, stage: str) -> BaseException:
    if not isinstance(failure, StopIteration):
        return failure
    # raised by next() as it is, it would silently end the caller's loop
    error = RuntimeError(f"stage {stage!r} raised StopIteration")
    error.__cause__ = failure
    return error


def _check_depth(name: str, depth: int) -> None:
    if depth < 1:
        raise ConfigError(f"{name!r}: depth={depth} must be at least 1", hint="2 lets two items wait")

"""The three tiers that feed rows to a device (VRAM, pinned RAM, a rotating window) and how each is filled.

A store yields chunks of several batches each, in the order of an epoch. It does not know what a row means.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from brim.engine.config import Tier
from brim.engine.device import format_size, free_bytes, worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.rows.order import HOST, Blocks, RowLayout, Turns, gather
from brim.engine.rows.source import RowSplit, TensorSource, row_bytes
from brim.engine.training import Batch
from brim.errors import OutOfMemory

log = logging.getLogger("brim")

ReadRows = Callable[[int, int, Batch], None]  # reads rows from start to stop into tensors that hold that many
_IN_FLIGHT_BYTES = 2**30  # most bytes gathered by all threads together, unless one chunk is larger

Copied = tuple[Batch, tuple[Tensor, ...], Any]  # a batch, the device memory it lies in, the event after its copy


class Loaded(ABC):
    """Data in one tier, until it is closed."""

    tier: Tier

    @abstractmethod
    def close(self) -> None: ...


class Store(Loaded):
    """Rows in one tier; a chunk is a dict of matrices on the device."""

    exclusive = False  # only one epoch at a time
    pinned = False
    held_items: int  # in this tier's memory

    def chunk_batches(self, preferred: int, batch_size: int) -> int:
        """Batches of a chunk; any rows can be gathered, so there is no limit."""
        return preferred

    @abstractmethod
    def chunks(self, order: Tensor, spans: list[tuple[int, int]], in_order: bool) -> Iterator[Batch]:
        """The rows at these spans of an epoch's order; in_order: the order is 0, 1, 2, …"""


class DeviceStore(Store):
    """Tier vram: all rows on the device, a chunk is an index-select there."""

    tier: Tier = "vram"

    def __init__(self, rows: Batch, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.held_items = len(next(iter(rows.values())))

    def chunks(self, order: Tensor, spans: list[tuple[int, int]], in_order: bool) -> Iterator[Batch]:
        index = to_device(order, self.device)
        for start, stop in spans:
            yield gather(self.rows, index[start:stop])

    def close(self) -> None:
        self.rows = {}


class HostStore(Store):
    """Tier ram: all rows in host memory, pinned for a GPU; threads gather and a side stream copies."""

    tier: Tier = "ram"

    def __init__(self, rows: Batch, layout: RowLayout, device: torch.device, *, pin: bool) -> None:
        self.rows, self.device = rows, device
        self.held_items = len(next(iter(rows.values())))
        self._layout = layout
        self._registered: list[int] = []
        self._side = side_stream(device)
        self.pinned = pin and device.type == "cuda" and self._register()

    def chunks(self, order: Tensor, spans: list[tuple[int, int]], in_order: bool) -> Iterator[Batch]:
        """Chunks gathered ahead by threads and copied on a side stream."""
        chunk_bytes = max((self._layout.flat_bytes(stop - start) for start, stop in spans[:1]), default=1)
        workers = max(1, min(4, worker_count() // 4, _IN_FLIGHT_BYTES // chunk_bytes))
        make = partial(self._make, order, in_order and self.pinned)
        stage: Stage[tuple[int, int], Copied] = Stage(name="gather", work=make, workers=workers, depth=2)
        return copied_ahead(spans, stage, self.device, lag=4)

    def _make(self, order: Tensor, in_order: bool, span: tuple[int, int]) -> Copied:
        start, stop = span
        if self._side is None:
            return gather(self.rows, order[start:stop]), (), None
        if in_order:
            with torch.cuda.stream(self._side):
                parts = {name: matrix[start:stop] for name, matrix in self.rows.items()}
                chunk = {name: part.to(self.device, non_blocking=True) for name, part in parts.items()}
                return chunk, tuple(chunk.values()), mark(self.device)
        host = pinned(self._layout.flat_bytes(stop - start))
        gather(self.rows, order[start:stop], self._layout.carve(host, stop - start))
        with torch.cuda.stream(self._side):
            flat = host.to(self.device, non_blocking=True)
            return self._layout.carve(flat, stop - start), (flat,), mark(self.device)

    def _register(self) -> bool:
        """Pin the memory where it is: torch's pinned allocator would round it up to a power of two."""
        with torch.cuda.device(self.device):
            for matrix in self.rows.values():
                code = int(torch.cuda.cudart().cudaHostRegister(matrix.data_ptr(), matrix.nbytes, 1))  # type: ignore[no-untyped-call]
                if code:
                    self._unregister()
                    with suppress(RuntimeError):
                        torch.zeros(1, device=self.device)  # CUDA would report the error again from the next launch
                    log.warning("host memory cannot be pinned (CUDA error %d); copies go through small buffers", code)
                    return False
                self._registered.append(matrix.data_ptr())
        return True

    def _unregister(self) -> None:
        registered, self._registered = self._registered, []
        if registered:
            torch.cuda.synchronize(self.device)  # copies may still read it
            for pointer in registered:
                torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._unregister()
        self.rows = {}


# Host and device


_warned_pageable = False


def pinned(num_bytes: int) -> Tensor:
    """Pinned host memory for asynchronous copies; torch reuses it when the copy is done."""
    global _warned_pageable
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as failure:
        if not _warned_pageable:
            log.warning("host memory cannot be pinned (%s); copies will wait", str(failure).splitlines()[0])
        _warned_pageable = True
        return torch.empty(num_bytes, dtype=torch.uint8)


def side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def to_device(index: Tensor, device: torch.device) -> Tensor:
    """The index on the device; does not wait for the copy."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def mark(device: torch.device) -> Any:
    """An event on the current stream; blocking, so that a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def copied_ahead(plan: Iterable[Any], stage: Stage[Any, Copied], device: torch.device, *, lag: int) -> Iterator[Batch]:
    """Batches that the threads of a stage make and copy ahead, in order; the GPU lags at most `lag` of them behind."""
    done: deque[Any] = deque()
    with Pipeline(plan, [stage], source_name="order") as ready:
        for batch, memory, copied in ready:
            if copied is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(copied)
                for tensor in memory:
                    tensor.record_stream(current)
            del memory
            yield batch
            del batch
            if copied is not None:
                done.append(mark(device))
                if len(done) > lag:
                    done.popleft().synchronize()  # the GPU still has the last few batches to work on


def read_into(
    read: ReadRows, start: int, place: Batch, layout: RowLayout, side: Any, wait: Callable[[], None] = lambda: None
) -> Any:
    """Read rows into matrices, through pinned memory if they are on a GPU; returns the event after the copy.

    wait() returns when the matrices may be overwritten.
    """
    matrix = next(iter(place.values()))
    num = len(matrix)
    if side is None:
        wait()
        read(start, start + num, layout.unpack(place))
        return None
    host = layout.carve(pinned(layout.flat_bytes(num)), num)
    read(start, start + num, layout.unpack(host))
    wait()
    with torch.cuda.stream(side):
        for name, part in host.items():
            place[name].copy_(part, non_blocking=True)
        return mark(matrix.device)


class WindowStore(Store):
    """Tier window: block k of an epoch lies in slot k modulo the number of slots, so any batch is one gather."""

    tier: Tier = "window"
    exclusive = True

    def __init__(
        self, layout: RowLayout, rows: RowSplit, device: torch.device, blocks: Blocks, held_items: int
    ) -> None:
        self.device, self.held_items, self.pinned = device, held_items, device.type == "cuda"
        self._rows, self._layout, self._blocks = rows, layout, blocks
        self._num_slots = held_items // blocks.items
        self._ring = layout.allocate(held_items, device)
        self._last_read: Any = None  # event after the latest gather from the ring
        self._side = side_stream(device)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))  # the ring's memory may be in use until now

    def chunk_batches(self, preferred: int, batch_size: int) -> int:
        """At most a block, so that a chunk touches two of them; num_slots allows for longer batches."""
        return max(1, min(preferred, self._blocks.items // batch_size))

    def chunks(self, order: Tensor, spans: list[tuple[int, int]], in_order: bool) -> Iterator[Batch]:
        """Chunks gathered from the ring, while threads load the next blocks into slots that are no longer needed."""
        if not spans:
            return
        turns = Turns(order, self._blocks, self._num_slots)
        first, last = turns.block_at(spans[0][0]), turns.block_at(spans[-1][1] - 1)
        index = to_device(turns.ring_index, self.device)
        # the device may still be reading for the previous epoch
        slots = _Slots(first, self._num_slots, self._last_read)

        def load(turn: int) -> Any:
            block = turns.blocks[turn]
            start = self._blocks.start(block)
            num = min(self._blocks.start(block + 1), len(self._rows)) - start
            at = (turn % self._num_slots) * self._blocks.items
            slot = {name: matrix[at : at + num] for name, matrix in self._ring.items()}
            return read_into(self._rows.read, start, slot, self._layout, self._side, lambda: slots.wait(turn))

        workers = max(1, min(4, worker_count() // 2))
        stage: Stage[int, Any] = Stage(name="load", work=load, workers=workers, depth=self._num_slots)
        with Pipeline(range(first, last + 1), [stage], source_name="blocks") as ready, slots:
            here = first
            for start, stop in spans:
                for _ in range(here, turns.block_at(stop - 1) + 1):
                    event = next(ready)
                    if event is not None:
                        torch.cuda.current_stream(self.device).wait_event(event)
                here = max(here, turns.block_at(stop - 1) + 1)
                chunk = gather(self._ring, index[start:stop])
                self._last_read = mark(self.device) if self._side is not None else None
                slots.free(turns.block_at(stop), self._last_read)
                yield chunk
                del chunk

    def close(self) -> None:
        if self._side is not None:
            self._side.synchronize()
        self._ring = {}


def num_slots(
    *, num_items: int, batch_size: int, block_items: int, item_bytes: int, window_bytes: int, room_bytes: int
) -> int:
    """Blocks in the window: as many as fit, but at least those that one batch or chunk can touch."""
    touched = -(-(batch_size - 1) // block_items) + 1
    # one more than touched: the last block of the data is short and may lie between two others
    slots = max(3, touched + 1, min(window_bytes, room_bytes) // (block_items * item_bytes))
    return int(min(slots, -(-num_items // block_items)))


class _Slots:
    """Tracks which slots are free: loading threads wait for a slot, the consumer releases them."""

    def __init__(self, first: int, num_slots: int, event: Any) -> None:
        self._num_slots = num_slots
        self._below = first  # slots of turns before this one are free
        self._event = event  # after this event the device no longer reads those slots
        self._stopped = False
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, turn: int) -> None:
        """Wait, in the loading thread, until the slot of this turn may be overwritten."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or turn < self._below + self._num_slots)
            if self._stopped:
                raise RuntimeError("the window was closed")
            last_read = self._event
        if last_read is not None:
            last_read.synchronize()  # each thread keeps one block ready in pinned memory meanwhile

    def free(self, below: int, event: Any) -> None:
        with self._changed:
            self._below, self._event = below, event
            self._changed.notify_all()


_PIECE_BYTES = 4 * 2**20  # read by one thread at once while loading; pinning more takes longer than it saves


def fill_memory(rows: RowSplit, layout: RowLayout, where: torch.device) -> tuple[Batch, bool]:
    """All rows as matrices, and whether they are our own: tensors already on that device are used without a copy."""
    source = rows.source
    if isinstance(source, TensorSource) and rows.all:
        tensors = {name: source.tensors[name] for name in layout.fields}
        if all(tensor.device == where and tensor.storage_offset() == 0 for tensor in tensors.values()):
            return layout.pack(tensors), False
    return load_rows(rows.read, len(rows), layout, where), True


def load_rows(read: ReadRows, num_rows: int, layout: RowLayout, device: torch.device, extra: int = 0) -> Batch:
    """All rows as matrices on the device, read by several threads; `extra` uninitialised rows at the end."""
    item_bytes = row_bytes(layout.fields)
    size = (num_rows + extra) * item_bytes
    if device.type == "cpu" and size > free_bytes(HOST):  # Linux would grant it, and kill the process later
        raise OutOfMemory(f"{format_size(size)} of data, {format_size(free_bytes(HOST))} free on the host")
    into = layout.allocate(num_rows + extra, device)
    piece = max(1, _PIECE_BYTES // max(1, item_bytes))
    side = side_stream(device)

    def load(start: int) -> None:
        place = {name: matrix[start : min(start + piece, num_rows)] for name, matrix in into.items()}
        copied = read_into(read, start, place, layout, side)
        if copied is not None:
            copied.synchronize()

    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))  # the memory may be in use there until now
    pool = ThreadPoolExecutor(min(8, worker_count()), thread_name_prefix="brim-load")
    try:
        for done in [pool.submit(load, start) for start in range(0, num_rows, piece)]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return into

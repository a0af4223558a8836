"""The three tiers that feed rows to a device (VRAM, pinned RAM, a rotating window) and how each is filled.

A store yields chunks of several batches each, in the order of an epoch. It does not know what a row means.
"""

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from brim.engine.config import TIERS, Tier
from brim.engine.device import format_size, free_bytes, guard, worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.rows.order import HOST, Blocks, Choice, RowLayout, Turns, gather
from brim.engine.rows.source import RowSplit, TensorSource, row_bytes
from brim.engine.storage import RowFields
from brim.engine.training import Batch, Ranks
from brim.errors import OutOfMemory

log = logging.getLogger("brim")

_IN_FLIGHT_BYTES = 2**30  # most bytes gathered by all threads together, unless one chunk is larger
_AHEAD = 4  # chunks the GPU may lag behind the host; bounds the memory in flight


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The chunks that an epoch needs from a store."""

    epoch: int
    positions: Callable[[int], Tensor]
    in_order: bool
    spans: list[tuple[int, int]]  # ranges of the order, one per chunk


class Store(Protocol):
    """Rows in one tier; a chunk is a dict of matrices on the device."""

    tier: Tier
    exclusive: bool  # only one epoch at a time
    pinned: bool
    held_items: int  # in this tier's memory

    def chunk_items(self, chunk_batches: int, batch_size: int) -> int:
        """Rows of a chunk, given the preferred number of batches."""

    def chunks(self, plan: EpochPlan) -> Iterator[Batch]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """All rows, as matrices; not owned when they are the caller's own tensors."""

    rows: Batch
    owned: bool


class DeviceStore:
    """Tier vram: all rows on the device, a chunk is an index-select there."""

    tier: Tier = "vram"
    exclusive = False
    pinned = False

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self.rows = memory.rows
        self.device = device
        self.held_items = len(next(iter(memory.rows.values())))
        self._order: tuple[int, Tensor] | None = None

    def chunk_items(self, chunk_batches: int, batch_size: int) -> int:
        """Any rows can be gathered, so there is no limit."""
        return chunk_batches * batch_size

    def order(self, epoch: int, positions: Callable[[int], Tensor]) -> Tensor:
        """The order of an epoch on the device, copied there once."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, to_device(positions(epoch), self.device))
        return self._order[1]

    def chunks(self, plan: EpochPlan) -> Iterator[Batch]:
        index = self.order(plan.epoch, plan.positions)
        for start, stop in plan.spans:
            yield gather(self.rows, index[start:stop])

    def close(self) -> None:
        self.rows, self._order = {}, None


class HostStore:
    """Tier ram: all rows in host memory, pinned for a GPU; threads gather and a side stream copies."""

    tier: Tier = "ram"
    exclusive = False

    def __init__(self, memory: Memory, layout: RowLayout, device: torch.device) -> None:
        self.rows = memory.rows
        self.device = device
        self.held_items = len(next(iter(memory.rows.values())))
        self._layout = layout
        self._registered: list[int] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pinned = device.type == "cuda" and memory.owned and self._register()

    def chunk_items(self, chunk_batches: int, batch_size: int) -> int:
        """Any rows can be gathered, so there is no limit."""
        return chunk_batches * batch_size

    def chunks(self, plan: EpochPlan) -> Iterator[Batch]:
        """Chunks gathered ahead by threads and copied on a side stream, in order."""
        order = plan.positions(plan.epoch)

        def work(span: tuple[int, int]) -> tuple[Batch, Tensor | None, Any]:
            return self._make(order, span, plan.in_order)

        chunk_bytes = max((self._layout.flat_bytes(stop - start) for start, stop in plan.spans[:1]), default=1)
        workers = max(1, min(4, worker_count() // 4, _IN_FLIGHT_BYTES // chunk_bytes))
        stage: Stage[Any, Any] = Stage(name="gather", work=work, workers=workers, depth=2)
        done: deque[Any] = deque()
        with Pipeline(plan.spans, [stage], source_name="order") as ready:
            for chunk, flat, event in ready:
                if event is not None:
                    current = torch.cuda.current_stream(self.device)
                    current.wait_event(event)
                    for tensor in chunk.values() if flat is None else (flat,):
                        tensor.record_stream(current)
                del flat
                yield chunk
                del chunk
                if event is not None:
                    done.append(mark(self.device))
                    if len(done) > _AHEAD:
                        done.popleft().synchronize()  # the GPU still has the last few chunks to work on

    def _make(self, order: Tensor, span: tuple[int, int], in_order: bool) -> tuple[Batch, Tensor | None, Any]:
        start, stop = span
        if self._side is None:
            return gather(self.rows, order[start:stop]), None, None
        if in_order and self.pinned:
            with torch.cuda.stream(self._side):
                parts = {name: matrix[start:stop] for name, matrix in self.rows.items()}
                chunk = {name: part.to(self.device, non_blocking=True) for name, part in parts.items()}
                return chunk, None, mark(self.device)
        host = pinned(self._layout.flat_bytes(stop - start))
        gather(self.rows, order[start:stop], self._layout.carve(host, stop - start))
        with torch.cuda.stream(self._side):
            flat = host.to(self.device, non_blocking=True)
            return self._layout.carve(flat, stop - start), flat, mark(self.device)

    def _register(self) -> bool:
        """Pin the memory where it is: torch's pinned allocator would round it up to a power of two."""
        with torch.cuda.device(self.device):
            for matrix in self.rows.values():
                code = int(torch.cuda.cudart().cudaHostRegister(matrix.data_ptr(), matrix.nbytes, 1))  # type: ignore[no-untyped-call]
                if code:
                    self._unregister()
                    _forget_error(self.device)
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
        """Unpin the rows and release them."""
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


def _forget_error(device: torch.device) -> None:
    """Clear the error that CUDA would report again from the next launch."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def to_device(index: Tensor, device: torch.device) -> Tensor:
    """The index on the device; does not wait for the copy."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def mark(device: torch.device) -> Any:
    """An event on the current stream; blocking, so that a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class WindowStore:
    """Tier window: block k of an epoch lies in slot k modulo the number of slots, so any batch is one gather."""

    tier: Tier = "window"
    exclusive = True

    def __init__(
        self, layout: RowLayout, rows: RowSplit, device: torch.device, blocks: Blocks, held_items: int
    ) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.held_items = held_items
        self._rows = rows
        self._layout = layout
        self._blocks = blocks
        self._num_slots = held_items // blocks.items
        self._ring = layout.allocate(held_items, device)
        self._last_read: Any = None  # event after the latest gather from the ring
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))  # the ring's memory may be in use until now

    def chunk_items(self, chunk_batches: int, batch_size: int) -> int:
        """At most a block, so that a chunk touches two of them; num_slots allows for longer batches."""
        return max(1, min(chunk_batches, self._blocks.items // batch_size)) * batch_size

    def chunks(self, plan: EpochPlan) -> Iterator[Batch]:
        """Chunks gathered from the ring, while threads load the next blocks into slots that are no longer needed."""
        if not plan.spans:
            return
        turns = Turns(plan.positions(plan.epoch), self._blocks, self._num_slots)
        first, last = turns.block_at(plan.spans[0][0]), turns.block_at(plan.spans[-1][1] - 1)
        index = to_device(turns.ring_index, self.device)
        # the device may still be reading for the previous epoch
        slots = _Slots(first, self._num_slots, self._last_read)

        def work(turn: int) -> Any:
            return self._load_block(turn, turns.blocks[turn], slots)

        workers = max(1, min(4, worker_count() // 2))
        stage: Stage[Any, Any] = Stage(name="load", work=work, workers=workers, depth=self._num_slots)
        with Pipeline(range(first, last + 1), [stage], source_name="blocks") as ready, slots:
            here = first
            for start, stop in plan.spans:
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

    def _load_block(self, turn: int, block: int, slots: "_Slots") -> Any:
        """Read a block into its slot; returns the event after its copy."""
        start = self._blocks.start(block)
        num = min(self._blocks.start(block + 1), len(self._rows)) - start
        at = (turn % self._num_slots) * self._blocks.items
        slot = {name: matrix[at : at + num] for name, matrix in self._ring.items()}
        if self._side is None:
            slots.wait(turn)
            self._rows.read(start, start + num, self._layout.unpack(slot))
            return None
        host = self._layout.carve(pinned(self._layout.flat_bytes(num)), num)
        self._rows.read(start, start + num, self._layout.unpack(host))
        last_read = slots.wait(turn)
        if last_read is not None:
            last_read.synchronize()  # in this thread, so that each thread keeps one block ready in pinned memory
        with torch.cuda.stream(self._side):
            for name, matrix in host.items():
                slot[name].copy_(matrix, non_blocking=True)
            return mark(self.device)

    def close(self) -> None:
        """Wait for running copies and release the ring."""
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

    def wait(self, turn: int) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or turn < self._below + self._num_slots)
            if self._stopped:
                raise RuntimeError("the window was closed")
            return self._event

    def free(self, below: int, event: Any) -> None:
        with self._changed:
            self._below, self._event = below, event
            self._changed.notify_all()


_PIECE_BYTES = 4 * 2**20  # read by one thread at once while loading; pinning more takes longer than it saves


class Closable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closable)


def first_that_fits(
    choice: Choice,
    make: Callable[[Tier], Kept],
    say_order: Callable[[Tier], str],
    device: torch.device,
    ranks: Ranks | None = None,
) -> tuple[Choice, Kept]:
    """Load the chosen tier, or the next lower one that fits; say_order describes how it changes the order of rows.

    Several ranks take the same tier, the highest that has room on all of them: the order of rows may depend on it.
    """
    if ranks is not None:
        choice = _agreed(choice, ranks)
    for tier in TIERS[TIERS.index(choice.tier) :]:
        store = _try(make, tier)
        # only here, outside the except block, is the traceback that kept the tensors alive gone
        if ranks is not None and ranks.greatest(int(isinstance(store, str)))[0] and not isinstance(store, str):
            store.close()
            store = "no room on another rank"
        if not isinstance(store, str):
            return choice, store
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if tier == TIERS[-1]:
            raise OutOfMemory(f"not even a window of the data fits on {device} ({store}); lower window_bytes")
        below = TIERS[TIERS.index(tier) + 1]
        log.warning("tier %s did not fit (%s); using tier %s%s", tier, store, below, say_order(below))
        choice = Choice(below, f"tier {tier} did not fit")
    raise AssertionError("the last tier is either loaded or raises")


def _agreed(choice: Choice, ranks: Ranks) -> Choice:
    lowest = TIERS[ranks.greatest(TIERS.index(choice.tier))[0]]
    return choice if lowest == choice.tier else Choice(lowest, "another rank has no room for more")


def _try(make: Callable[[Tier], Kept], tier: Tier) -> Kept | str:
    """The tier, or why it did not fit."""
    try:
        with guard():
            return make(tier)
    except OutOfMemory as failure:
        return str(failure)


def fill_memory(rows: RowSplit, layout: RowLayout, where: torch.device) -> Memory:
    """Load all rows; tensors that are already on that device are used without a copy."""
    source = rows.source
    if isinstance(source, TensorSource) and rows.all and _adoptable(source, layout.fields, where):
        return Memory(layout.pack({name: source.tensors[name] for name in layout.fields}), owned=False)
    return Memory(load_rows(rows.read, len(rows), layout, where), owned=True)


def _adoptable(source: TensorSource, fields: RowFields, where: torch.device) -> bool:
    """Whether the tensors can be used where they are."""
    tensors = [source.tensors[name] for name in fields]
    return all(tensor.device == where and tensor.storage_offset() == 0 for tensor in tensors)


def load_rows(
    read: Callable[[int, int, Batch], None], num_rows: int, layout: RowLayout, device: torch.device, extra: int = 0
) -> Batch:
    """All rows as matrices on the device, with `extra` uninitialised rows at the end.

    Several threads call read(start, stop, out), straight into place or through pinned memory.
    """
    item_bytes = row_bytes(layout.fields)
    size = (num_rows + extra) * item_bytes
    if device.type == "cpu" and size > free_bytes(HOST):  # Linux would grant it, and kill the process later
        raise OutOfMemory(f"{format_size(size)} of data, {format_size(free_bytes(HOST))} free on the host")
    into = layout.allocate(num_rows + extra, device)
    piece = max(1, _PIECE_BYTES // max(1, item_bytes))
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load(start: int) -> None:
        num = min(piece, num_rows - start)
        place = {name: matrix[start : start + num] for name, matrix in into.items()}
        if side is None:
            read(start, start + num, layout.unpack(place))
            return
        host = layout.carve(pinned(layout.flat_bytes(num)), num)
        read(start, start + num, layout.unpack(host))
        with torch.cuda.stream(side):
            for name, matrix in host.items():
                place[name].copy_(matrix, non_blocking=True)
            copied = mark(device)
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

"""What a tier is, and the two that hold all rows: in VRAM and in pinned RAM. window.py is the third.

A store feeds chunks, several batches each, in the order of a plan. What a row means is not known here.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from brim.engine.config import Tier
from brim.engine.device.devices import worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.rows.layout import Batch, Layout, gather

log = logging.getLogger("brim")

_IN_FLIGHT_BYTES = 2**30  # gathered by all threads at once, at most, unless one chunk is more
_AHEAD = 4  # chunks a GPU may lag behind the host, which bounds what is in flight


@dataclass(frozen=True, slots=True)
class Plan:
    """What an epoch asks of a store."""

    epoch: int
    positions: Callable[[int], Tensor]
    in_order: bool
    spans: list[tuple[int, int]]  # places in the order that make a chunk each


class Store(Protocol):
    """Rows in one tier; a chunk is a dict of matrices on the device."""

    tier: Tier
    exclusive: bool  # only one epoch at a time
    pinned: bool
    held_items: int  # in this tier's memory

    def chunk_items(self, chunk_batches: int, batch_size: int) -> int:
        """Rows of a chunk, given how many batches it would best have."""

    def chunks(self, plan: Plan) -> Iterator[Batch]:
        """The chunks of a plan, one for each span."""

    def close(self) -> None:
        """Give the memory back."""


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
        """As many as wanted: any rows can be gathered."""
        return chunk_batches * batch_size

    def order(self, epoch: int, positions: Callable[[int], Tensor]) -> Tensor:
        """The order of an epoch on the device, copied there once."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, to_device(positions(epoch), self.device))
        return self._order[1]

    def chunks(self, plan: Plan) -> Iterator[Batch]:
        """One gather on the device for each span."""
        index = self.order(plan.epoch, plan.positions)
        for start, stop in plan.spans:
            yield gather(self.rows, index[start:stop])

    def close(self) -> None:
        """Let go of the rows."""
        self.rows, self._order = {}, None


class HostStore:
    """Tier ram: all rows in host memory, pinned for a GPU; threads gather and a side stream copies."""

    tier: Tier = "ram"
    exclusive = False

    def __init__(self, memory: Memory, layout: Layout, device: torch.device) -> None:
        self.rows = memory.rows
        self.device = device
        self.held_items = len(next(iter(memory.rows.values())))
        self._layout = layout
        self._registered: list[int] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pinned = device.type == "cuda" and memory.owned and self._register()

    def chunk_items(self, chunk_batches: int, batch_size: int) -> int:
        """As many as wanted: any rows can be gathered."""
        return chunk_batches * batch_size

    def chunks(self, plan: Plan) -> Iterator[Batch]:
        """Gathered ahead by threads, copied on a side stream, handed on in order."""
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
        """Unpin the rows and let go of them."""
        self._unregister()
        self.rows = {}


# Host and device


_warned_pageable = False


def pinned(num_bytes: int) -> Tensor:
    """Host memory that a GPU can copy from while others work; torch takes it back when that is done."""
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
    """The index there, without waiting for the copy."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def mark(device: torch.device) -> Any:
    """An event after what the current stream has been given; blocking, so that a thread sleeps on it."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event

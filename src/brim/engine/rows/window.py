"""Tier window: a ring of blocks on the device, read ahead by threads while the current ones train."""

import threading
from collections.abc import Iterator
from typing import Any, Self

import torch

from brim.engine.config import Tier
from brim.engine.device.devices import worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.rows.layout import Batch, Layout, gather
from brim.engine.rows.order import Blocks, Turns
from brim.engine.rows.split import Rows
from brim.engine.rows.tiers import Plan, mark, pinned, to_device


class WindowStore:
    """Tier window: block k of an epoch lies in slot k modulo the number of slots, so any batch is one gather."""

    tier: Tier = "window"
    exclusive = True

    def __init__(self, layout: Layout, rows: Rows, device: torch.device, blocks: Blocks, held_items: int) -> None:
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
        """At most a block, so that a chunk touches two of them; a batch that is longer touches what was planned for."""
        return max(1, min(chunk_batches, self._blocks.items // batch_size)) * batch_size

    def chunks(self, plan: Plan) -> Iterator[Batch]:
        """Gathered from the ring, while threads bring the next blocks into slots that are used up."""
        if not plan.spans:
            return
        turns = Turns(plan.positions(plan.epoch), self._blocks, self._num_slots)
        first, last = turns.block_at(plan.spans[0][0]), turns.block_at(plan.spans[-1][1] - 1)
        index = to_device(turns.ring_index, self.device)
        # the device may still be reading for the epoch before
        slots = _Slots(first, self._num_slots, self._last_read)

        def work(turn: int) -> Any:
            return self._bring(turn, turns.blocks[turn], slots)

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

    def _bring(self, turn: int, block: int, slots: "_Slots") -> Any:
        """Read a block into its slot; the event says when it is there."""
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
            last_read.synchronize()  # in this thread, so that each keeps one block waiting in pinned memory
        with torch.cuda.stream(self._side):
            for name, matrix in host.items():
                slot[name].copy_(matrix, non_blocking=True)
            return mark(self.device)

    def close(self) -> None:
        """Wait for copies under way and let go of the ring."""
        if self._side is not None:
            self._side.synchronize()
        self._ring = {}


def num_slots(
    *, num_items: int, batch_size: int, block_items: int, item_bytes: int, window_bytes: int, room_bytes: int
) -> int:
    """Blocks the window holds: what it may, but at least those that one batch or chunk can touch."""
    touched = -(-(batch_size - 1) // block_items) + 1
    # one more than touched: the last block of the data is short and may lie between two others
    slots = max(3, touched + 1, min(window_bytes, room_bytes) // (block_items * item_bytes))
    return int(min(slots, -(-num_items // block_items)))


class _Slots:
    """Which turns have their slot free: a thread waits for its turn, the consumer gives back."""

    def __init__(self, first: int, num_slots: int, event: Any) -> None:
        self._num_slots = num_slots
        self._below = first  # turns before this one are used up
        self._event = event  # after it the device no longer reads them
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
                raise RuntimeError("window was left")
            return self._event

    def free(self, below: int, event: Any) -> None:
        with self._changed:
            self._below, self._event = below, event
            self._changed.notify_all()

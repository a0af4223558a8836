"""Bringing rows into a tier: the first one that fits, filled by several threads."""

import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from brim.engine.config import TIERS, Tier
from brim.engine.device.devices import worker_count
from brim.engine.device.memory import format_size, free_bytes, guard
from brim.engine.rows.files import TensorSource, row_bytes
from brim.engine.rows.layout import Batch, Layout
from brim.engine.rows.order import HOST, Choice
from brim.engine.rows.split import Rows
from brim.engine.rows.tiers import Memory, mark, pinned
from brim.engine.storage.dataset import Fields
from brim.engine.training.ranks import Ranks
from brim.errors import OutOfMemory

log = logging.getLogger("brim")

_PIECE_BYTES = 4 * 2**20  # read by one thread at once while loading; pinning more takes longer than it saves


class Closable(Protocol):
    """Something held in a tier."""

    def close(self) -> None:
        """Give the memory back."""


Kept = TypeVar("Kept", bound=Closable)


def first_that_fits(
    choice: Choice,
    make: Callable[[Tier], Kept],
    say_order: Callable[[Tier], str],
    device: torch.device,
    ranks: Ranks | None = None,
) -> tuple[Choice, Kept]:
    """The chosen tier loaded, or the next one below that has room; say_order tells what it changes.

    Several ranks take the same tier, the highest that has room on all of them: the order of rows may depend on it.
    """
    if ranks is not None:
        choice = _agreed(choice, ranks)
    for tier in TIERS[TIERS.index(choice.tier) :]:
        made = _try(make, tier)
        # only now, outside the except block, is the traceback gone that kept the tensors alive
        if ranks is not None and ranks.greatest(int(isinstance(made, str)))[0] and not isinstance(made, str):
            made.close()
            made = "no room on another rank"
        if not isinstance(made, str):
            return choice, made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if tier == TIERS[-1]:
            raise OutOfMemory(f"not even a window of the data fits on {device} ({made}); lower window_bytes")
        below = TIERS[TIERS.index(tier) + 1]
        log.warning("tier %s did not fit (%s); using tier %s%s", tier, made, below, say_order(below))
        choice = Choice(below, f"tier {tier} did not fit")
    raise AssertionError("the last tier was made or raised")


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


def fill_memory(rows: Rows, layout: Layout, where: torch.device) -> Memory:
    """All rows there; tensors that are already there are used as they are."""
    source = rows.source
    if isinstance(source, TensorSource) and rows.all and _adoptable(source, layout.fields, where):
        return Memory(layout.pack({name: source.tensors[name] for name in layout.fields}), owned=False)
    data_bytes = len(rows) * row_bytes(layout.fields)
    if where.type == "cpu" and data_bytes > free_bytes(HOST):  # Linux would promise it, and kill us later
        raise OutOfMemory(f"{format_size(data_bytes)} of data, {format_size(free_bytes(HOST))} free on the host")
    matrices = layout.allocate(len(rows), where)
    load_rows(rows, layout, matrices, where)
    return Memory(matrices, owned=True)


def _adoptable(source: TensorSource, fields: Fields, where: torch.device) -> bool:
    """Whether the tensors can be used where they are."""
    tensors = [source.tensors[name] for name in fields]
    return all(tensor.device == where and tensor.storage_offset() == 0 for tensor in tensors)


def load_rows(rows: Rows, layout: Layout, into: Batch, device: torch.device) -> None:
    """Read all rows with several threads, straight into place or through pinned memory."""
    piece_items = max(1, _PIECE_BYTES // max(1, row_bytes(layout.fields)))
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load(start: int) -> None:
        num = min(piece_items, len(rows) - start)
        place = {name: matrix[start : start + num] for name, matrix in into.items()}
        if side is None:
            rows.read(start, start + num, layout.unpack(place))
            return
        host = layout.carve(pinned(layout.flat_bytes(num)), num)
        rows.read(start, start + num, layout.unpack(host))
        with torch.cuda.stream(side):
            for name, matrix in host.items():
                place[name].copy_(matrix, non_blocking=True)
            copied = mark(device)
        copied.synchronize()

    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))  # the memory may be in use there until now
    with _pool(min(8, worker_count())) as pool:
        for done in [pool.submit(load, start) for start in range(0, len(rows), piece_items)]:
            done.result()


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose waiting work is dropped when one piece fails."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="brim-load")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)

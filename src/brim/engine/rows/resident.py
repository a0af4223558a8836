"""A dataset in VRAM, in pinned RAM or in a rotating window; batches by indexing.

    vram    all rows on the device            a batch is an index-select there
    ram     all rows in pinned host memory    threads gather the next batches, a side stream copies them
    window  a part of the rows on the device  blocks rotate through it, read ahead while the current ones train

The order of rows depends on (seed, epoch) alone, and is the same in every tier. On a CPU all three live in host
memory: "vram" gathers in the caller's thread, "ram" in another, "window" holds a part. The meaning of a row is not
known here.

With several ranks each holds every N-th row and its part of the same batches, which share() describes.

Threads of "ram" and "window" allocate pinned memory and wait for events while an epoch is open: capture a CUDA graph
before the epoch, or with capture_error_mode="thread_local".
"""

import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, Literal, Self, cast

import torch
from torch import Tensor

from brim.engine.config import Tier
from brim.engine.device import check_injected, describe, format_size, free_bytes, with_index
from brim.engine.rows.order import (
    HOST,
    Blocks,
    Choice,
    RowLayout,
    Shuffle,
    Target,
    check_options,
    check_out,
    choose_tier,
    default_block,
    epoch_order,
    gather,
)
from brim.engine.rows.source import RowSplit, Source, chosen_fields, row_bytes
from brim.engine.rows.tiers import (
    DeviceStore,
    EpochPlan,
    HostStore,
    Kept,
    Store,
    WindowStore,
    fill_memory,
    first_that_fits,
    num_slots,
)
from brim.engine.training import Batch, BatchSource, Cut, Ranks, Share, StepInputs, check_enough, cut
from brim.errors import ConfigError


class Epoch(Iterator[Batch]):
    """Batches of one epoch; ends after the number it promised or with an exception, never silently early."""

    def __init__(self, batches: Generator[Batch], num_batches: int) -> None:
        """Nothing is gathered before the first batch is requested."""
        self._batches = batches
        self._left = num_batches
        self._cut = ""

    def __next__(self) -> Batch:
        """The next batch; its tensors stay valid for as long as the caller keeps them, unless out was given."""
        if self._cut and self._left:
            raise RuntimeError(f"epoch ended {self._left} batches early: {self._cut}")
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._left:
                self._cut = "no more batches came"
                raise RuntimeError(f"epoch ended {self._left} batches early; results are missing") from None
            raise
        except BaseException as failure:
            self._cut = f"{type(failure).__name__}: {failure}"
            raise
        self._left -= 1
        return batch

    def __len__(self) -> int:
        return self._left

    def cut(self, why: str) -> None:
        """Stop the threads of this epoch; requesting more batches raises."""
        self._cut = self._cut or why
        self._batches.close()

    def close(self) -> None:
        self.cut("it was closed")


class OpenEpochs:
    """The epochs of one source that are still referenced."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Epoch] = weakref.WeakSet()

    def begin(self, batches: Generator[Batch], start_batch: int, num_batches: int, *, alone: str = "") -> Epoch:
        """Open an epoch from start_batch on; a non-empty `alone` is the reason why all other open epochs end."""
        if not 0 <= start_batch <= num_batches:
            raise ConfigError(f"start_batch={start_batch} must be from 0 to {num_batches}, the batches of an epoch")
        if alone:
            self.cut(alone)
        epoch = Epoch(batches, num_batches - start_batch)
        self._all.add(epoch)
        return epoch

    def cut(self, why: str) -> None:
        for epoch in list(self._all):
            epoch.cut(why)


class ResidentLoader:
    """A Resident with the interface of a DataLoader: every iteration is the next epoch."""

    def __init__(self, resident: "Resident", epochs: Iterator[int]) -> None:
        self.dataset = resident
        self.batch_size = resident.batch_size
        self.drop_last = resident.drop_last
        self._epochs = epochs

    def __iter__(self) -> Iterator[Batch]:
        return self.dataset.epoch(next(self._epochs))

    def __len__(self) -> int:
        return self.dataset.num_batches


def as_dataloader(resident: "Resident", epoch_counter: Iterator[int] | int = 0) -> ResidentLoader:
    """Adapter for loops that want a DataLoader; epoch_counter is the first epoch, or an iterator of their numbers."""
    counter = itertools.count(epoch_counter) if isinstance(epoch_counter, int) else epoch_counter
    return ResidentLoader(resident, counter)


log = logging.getLogger("brim")


class Held(ABC, Generic[Kept]):
    """Common part of Resident and RaggedResident: chooses a tier, loads it, and releases it."""

    def __init__(
        self,
        device: torch.device,
        tier: Tier | Literal["auto"],
        data_bytes: int,
        beside_bytes: int,
        reserve_bytes: int,
        ranks: Ranks | None = None,
    ) -> None:
        """beside_bytes are needed besides the data in its tier; reserve_bytes stay free on the device."""
        self._ranks = ranks
        self.device, self.bytes, self.load_s = with_index(device), data_bytes, 0.0
        self.opened = OpenEpochs()
        self._asked, self._beside_bytes, self._reserve_bytes = tier, beside_bytes, reserve_bytes
        self._preload_to_gpu: bool | None = None  # in tier "auto": True takes vram whenever it fits, False never
        self._held: tuple[Choice, Kept] | None = None

    def __enter__(self) -> Self:
        if self._held is None:
            choice = self._choose()
            log.info("tier %s: %s%s%s", choice.tier, choice.why, self._say_order(choice.tier), self._say_more())
            began_s = time.perf_counter()
            self._held = first_that_fits(choice, self._make, self._say_order, self.device, self._ranks)
            self.load_s = time.perf_counter() - began_s
        return self

    def __exit__(self, *_: object) -> None:
        """End all open epochs and release the memory."""
        self.opened.cut(f"its {type(self).__name__} was closed")
        held, self._held = self._held, None
        if held is not None:
            held[1].close()

    def loaded(self) -> Kept:
        """The data in its tier; raises outside the with block."""
        return self._entered()[1]

    def _entered(self) -> tuple[Choice, Kept]:
        if self._held is None:
            raise RuntimeError(f"{type(self).__name__} holds its data inside its with block only")
        return self._held

    def _choose(self) -> Choice:
        if self._asked != "auto":
            return Choice(self._asked, f"{format_size(self.bytes)} of data, as asked for")
        return choose_tier(
            self.device,
            data_bytes=self.bytes + self._beside_bytes,
            reserve_bytes=self._reserve_bytes,
            device_free_bytes=free_bytes(self.device),
            host_free_bytes=free_bytes(HOST),
            preload_to_gpu=self._preload_to_gpu,
            device_name=str(describe(self.device)["name"]),
        )

    @abstractmethod
    def _make(self, tier: Tier) -> Kept:
        """The data in this tier, or OutOfMemory."""

    def _say_order(self, tier: Tier) -> str:
        """How this tier changes the order of rows, for the log."""
        return ""

    def _say_more(self) -> str:
        """Further facts for the log when loading begins."""
        return ""


# Several batches are gathered at once and cut afterwards: on a GPU a launch costs as much as a small batch.
_CHUNK_BYTES = {"cuda": 8 * 2**20, "cpu": 2**20}
_CHUNK_BATCHES = 32


class Resident(Held[Store], BatchSource):
    """Rows of a source where a device can index them; inside its with block epoch() gives batches."""

    divides_batches = True

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        device: torch.device,
        tier: Tier | Literal["auto"] = "auto",
        preload_to_gpu: bool | None = None,
        seed: int = 0,
        shuffle: Shuffle = True,
        drop_last: bool = False,
        rows: slice | range | Sequence[int] | Tensor | None = None,
        reserve_bytes: int = 0,
        window_share: float = 0.25,
        window_bytes: int | None = None,
        block_items: int | None = None,
        names: Sequence[str] | None = None,
        ranks: Ranks | None = None,
        total: int | None = None,
    ) -> None:
        """Store and check; nothing is read before the with block.

        preload_to_gpu   in tier "auto": True takes vram whenever it fits, False never
        shuffle          True over all rows, False in order, "blocks" by blocks and within them
        rows             a split: a slice, row numbers or a mask; shuffled by blocks it is sorted first
        reserve_bytes    memory that model and optimiser will need on the device
        window_share     part of the data that tier "window" holds on the device; window_bytes instead, in bytes
        block_items      rows of a block; by default from the number and size of the rows, never from the tier
        ranks            among which the rows are divided; num_items and batch_size count those of all ranks
        total            rows of all ranks, if the given rows are already this rank's own, sorted
        """
        check_options(tier, preload_to_gpu, shuffle, batch_size, window_share, window_bytes, block_items)
        self.source = source
        self.seed = seed
        self.shuffle: Shuffle = shuffle  # becomes "blocks" if only tier "window" fits
        self.drop_last = drop_last
        self.fields = chosen_fields(source.fields, names)
        several = ranks if ranks is not None and not ranks.alone else None
        self._all_rows = RowSplit(source, rows, sort=shuffle == "blocks")
        self.num_items = len(self._all_rows) if total is None else total
        if several is not None:
            check_enough(self.num_items, several)
        self._is_cut = total is not None
        self._part = several
        self.rows = self._own()  # rows held by this rank
        self.batch_size = min(batch_size, self.num_items)  # a batch larger than the split is the whole split
        whole, rest = divmod(self.num_items, self.batch_size)
        self.num_batches = whole + (rest > 0 and not drop_last)
        data_bytes, order_bytes = len(self.rows) * row_bytes(self.fields), 8 * len(self.rows)
        super().__init__(device, tier, data_bytes, order_bytes, reserve_bytes, several)
        self._preload_to_gpu = preload_to_gpu
        self.block_items = block_items or default_block(self.num_items, self.bytes // len(self.rows))
        self._layout = RowLayout(self.fields)
        self._window_bytes = window_bytes if window_bytes is not None else int(window_share * self.bytes)
        self._cut: tuple[int, Cut] | None = None  # of the epoch last asked for

    def __len__(self) -> int:
        return self.num_items

    @property
    def tier(self) -> Tier:
        """Where the rows are; known inside the with block."""
        return self.loaded().tier

    @property
    def chunk_batches(self) -> int:
        """Batches gathered at once."""
        batch_bytes = max(1, self.batch_size * row_bytes(self.fields))
        return max(1, min(_CHUNK_BATCHES, self.num_batches, _CHUNK_BYTES[self.device.type] // batch_bytes))

    def order(self, epoch: int) -> Tensor:
        """Rows of the source in the order of an epoch, as it is cut into batches; int64 on the host.

        With several ranks those of this one; a batch without any has a stand-in.
        """
        return self.rows.index(self._positions(epoch))

    def epoch(self, number: int, start_batch: int = 0, *, out: Batch | None = None) -> Epoch:
        """Batches of an epoch from start_batch on, each a dict of tensors on the device.

        With out, every batch is written into these tensors, the static inputs of a captured graph for instance, on
        the current stream; a short last batch uses their first rows.
        """
        store = self.loaded()
        if out is not None:
            check_out(out, self.fields, self.batch_size, self.device)
        alone = "another epoch was begun on the same window" if store.exclusive else ""
        batches = self._batches(store, number, start_batch, out)
        return self.opened.begin(batches, start_batch, self.num_batches, alone=alone)

    def epoch_into(self, number: int, start_batch: int, step: StepInputs) -> Generator[Batch]:
        """As epoch; once a step for full batches is captured, batches are written into its inputs."""
        opened: Epoch | None = None
        filled: Batch | None = None
        try:
            for batch in range(start_batch, self.num_batches):
                inputs = step.inputs(self.batch_size)
                if opened is None or inputs is not filled:
                    if opened is not None:
                        opened.close()
                    opened, filled = self.epoch(number, batch, out=inputs), inputs
                yield next(opened)
        finally:
            if opened is not None:
                opened.close()

    def share(self, epoch: int, batch: int) -> Share | None:
        """The items of a batch that this rank has; None: all of them."""
        return None if self._part is None else self._cut_of(epoch).share(self._part, batch)

    def fill(self, out: Batch, epoch: int, batch: int) -> Batch:
        """Write one batch of an epoch into out, in any order of batches; only tier vram can do that.

        The order of the latest epoch stays on the device, so that a call only queues kernels.
        """
        store = self.loaded()
        if not isinstance(store, DeviceStore):
            raise ConfigError(f"fill needs tier vram, this is {store.tier}; iterate over epoch(…, out=…)")
        if self._part is not None:
            raise ConfigError("fill is for one process; with several ranks iterate over epoch()")
        index = store.order(epoch, self._positions)
        start = batch * self.batch_size
        rows = min(self.batch_size, self.num_items - start)
        if not (0 <= batch < self.num_batches):
            raise ConfigError(f"batch={batch} must be from 0 to {self.num_batches - 1}")
        part = out if rows == self.batch_size else {name: tensor[:rows] for name, tensor in out.items()}
        gather(store.rows, index[start : start + rows], self._layout.pack(part))
        return part

    def static_batch(self) -> Batch:
        """Zeroed tensors on the device that hold one full batch, for epoch(…, out=…) and fill."""
        return {
            name: torch.zeros((self.batch_size, *shape), dtype=dtype, device=self.device)
            for name, (dtype, shape) in self.fields.items()
        }

    def describe(self) -> dict[str, object]:
        """Facts for a report: tier and reason, sizes, order, loading speed."""
        choice, store = self._entered()
        return {
            "tier": store.tier,
            "why": choice.why,
            "source": self.source.description,
            "items": self.num_items,
            "bytes": self.bytes,
            "batch_size": self.batch_size,
            "num_batches": self.num_batches,
            "shuffle": self.shuffle,
            "block_items": self.block_items,
            "held_items": store.held_items,
            "pinned": store.pinned,
            "load_s": self.load_s,
            "load_bytes_per_s": self.bytes / self.load_s
            if self.load_s and store.held_items == len(self.rows)
            else None,
        }

    def _positions(self, epoch: int) -> Tensor:
        """Positions among the rows held, in the order of an epoch."""
        return self._order(epoch) if self._part is None else self._cut_of(epoch).items

    def _order(self, epoch: int) -> Tensor:
        return epoch_order(
            self.num_items, seed=self.seed, epoch=epoch, shuffle=self.shuffle, block_items=self.block_items
        )

    def _cut_of(self, epoch: int) -> Cut:
        assert self._part is not None
        if self._cut is None or self._cut[0] != epoch:
            self._cut = (epoch, cut(self._order(epoch), torch.tensor(self._sizes()), self._part))
        return self._cut[1]

    def _sizes(self) -> list[int]:
        """Items of the batches of an epoch, on all ranks together."""
        last = min(self.num_items, self.num_batches * self.batch_size) - (self.num_batches - 1) * self.batch_size
        return [self.batch_size] * (self.num_batches - 1) + [last]

    def _stops(self, epoch: int) -> list[int]:
        """Where the batches of an epoch end in the order of this rank."""
        if self._part is not None:
            return cast(list[int], self._cut_of(epoch).stops.tolist())
        stop = min(self.num_items, self.num_batches * self.batch_size)
        return [min(end, stop) for end in range(self.batch_size, stop + self.batch_size, self.batch_size)]

    def _own(self) -> RowSplit:
        if self._part is None or self._is_cut:
            return self._all_rows
        return self._all_rows.every(self._part.size, self._part.rank)

    def _batches(self, store: Store, number: int, start_batch: int, out: Batch | None) -> Generator[Batch]:
        if out is not None and isinstance(store, DeviceStore) and self.chunk_batches == 1:
            for batch in range(start_batch, self.num_batches):
                yield self.fill(out, number, batch)
            return
        per_chunk = store.chunk_items(self.chunk_batches, self.batch_size) // self.batch_size
        ends = [0, *self._stops(number)]  # of batches, in the order
        firsts = range(start_batch, self.num_batches, per_chunk)  # batches that begin a chunk
        lasts = [min(first + per_chunk, self.num_batches) for first in firsts]
        spans = [(ends[first], ends[last]) for first, last in zip(firsts, lasts, strict=True)]
        target = Target(self._layout, out) if out is not None else None
        in_order = self.shuffle is False and self._part is None
        chunks = store.chunks(EpochPlan(number, self._positions, in_order, spans))
        for first, last, chunk in zip(firsts, lasts, chunks, strict=False):
            fields = self._layout.unpack(chunk)
            for batch in range(first, last):
                rows = slice(ends[batch] - ends[first], ends[batch + 1] - ends[first])
                yield target.take(chunk, rows) if target else {name: tensor[rows] for name, tensor in fields.items()}

    # Loading

    def _say_order(self, tier: Tier) -> str:
        changes = tier == "window" and self.shuffle is True
        return f"; rows are shuffled by blocks of {self.block_items}, not over all" if changes else ""

    def _make(self, tier: Tier) -> Store:
        if tier == "window":
            if self.shuffle is True:
                self.shuffle, self._all_rows, self._cut = "blocks", self._all_rows.sorted(), None
                self.rows = self._own()
            blocks = self._blocks()
            held_items = self._slots(blocks) * blocks.items
            check_injected(held_items)
            return WindowStore(self._layout, self.rows, self.device, blocks, held_items)
        if tier == "vram":
            check_injected(self.num_items)
            return DeviceStore(fill_memory(self.rows, self._layout, self.device), self.device)
        check_injected(self.batch_size)
        return HostStore(fill_memory(self.rows, self._layout, HOST), self._layout, self.device)

    def _blocks(self) -> Blocks:
        """The part of each block that this rank holds; blocks are the same however many ranks there are."""
        if self._part is None:
            return Blocks(self.block_items)
        if self.block_items < self._part.size:
            raise ConfigError(
                f"block_items={self.block_items} are fewer than the {self._part.size} ranks, and tier window divides "
                "each block among them; give a larger block, or fewer ranks"
            )
        return Blocks(self.block_items, self._part.size, self._part.rank)

    def _slots(self, blocks: Blocks) -> int:
        # a stand-in may come from the next block
        reach = 0 if self._part is None else self.block_items
        return num_slots(
            num_items=self.num_items,
            batch_size=self.batch_size + reach,
            block_items=self.block_items,
            item_bytes=max(1, row_bytes(self.fields) * blocks.items // self.block_items),
            window_bytes=self._window_bytes,
            room_bytes=max(0, int(0.9 * free_bytes(self.device)) - self._reserve_bytes),
        )

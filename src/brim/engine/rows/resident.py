"""A dataset in VRAM, in pinned RAM or in a rotating window; batches by indexing.

    vram    all rows on the device            a batch is an index-select there
    ram     all rows in pinned host memory    threads gather the next batches, a side stream copies them
    window  a part of the rows on the device  blocks rotate through it, read ahead while the current ones train

The order of rows depends on (seed, epoch) alone, and is the same in every tier. On a CPU all three live in host
memory: "vram" gathers in the caller's thread, "ram" in another, "window" holds a part. What a row means is not known
here.

Of several ranks each holds every N-th row and makes its part of the same batches, which share() tells.

Threads of "ram" and "window" allocate pinned memory and wait for events while an epoch is open: capture a CUDA graph
before the epoch, or with capture_error_mode="thread_local".
"""

from collections.abc import Generator, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from brim.engine.config import TIERS, Tier
from brim.engine.device.memory import check_injected, free_bytes
from brim.engine.rows.epoch import Epoch, ResidentLoader, as_dataloader
from brim.engine.rows.files import Source, row_bytes
from brim.engine.rows.held import Held
from brim.engine.rows.layout import Batch, Layout, Target, check_out, gather
from brim.engine.rows.loading import fill_memory
from brim.engine.rows.order import HOST, Blocks, Choice, Shuffle, check_options, choose_tier, default_block, epoch_order
from brim.engine.rows.split import Rows, chosen_fields
from brim.engine.rows.tiers import DeviceStore, HostStore, Plan, Store
from brim.engine.rows.window import WindowStore, num_slots
from brim.engine.training.rank_share import Cut, Share, check_enough, cut
from brim.engine.training.ranks import Ranks
from brim.errors import ConfigError

__all__ = [
    "TIERS",
    "Batch",
    "Choice",
    "Epoch",
    "Resident",
    "ResidentLoader",
    "Shuffle",
    "Tier",
    "as_dataloader",
    "choose_tier",
    "epoch_order",
]

# Several batches are gathered at once and cut afterwards: on a GPU a launch costs as much as a small batch.
_CHUNK_BYTES = {"cuda": 8 * 2**20, "cpu": 2**20}
_CHUNK_BATCHES = 32


class Resident(Held[Store]):
    """Rows of a source where a device can index them; inside its with block epoch() gives batches."""

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
        reserve_bytes    what model and optimiser will need on the device
        window_share     part of the data that tier "window" holds on the device; window_bytes instead, in bytes
        block_items      rows of a block; by default from the number and size of the rows, never from the tier
        ranks            among which the rows are divided; what is said of rows and batches here is of all of them
        total            rows of all ranks, where those given are already this rank's own, sorted
        """
        check_options(tier, preload_to_gpu, shuffle, batch_size, window_share, window_bytes, block_items)
        self.source = source
        self.seed = seed
        self.shuffle: Shuffle = shuffle  # becomes "blocks" when tier "window" had to be taken
        self.drop_last = drop_last
        self.fields = chosen_fields(source.fields, names)
        several = ranks if ranks is not None and not ranks.alone else None
        self._all_rows = Rows(source, rows, sort=shuffle == "blocks")
        self.num_items = len(self._all_rows) if total is None else total
        if several is not None:
            check_enough(self.num_items, several)
        self._is_cut = total is not None
        self._part = several
        self.rows = self._own()  # those that are held here
        self.batch_size = min(batch_size, self.num_items)  # a batch larger than the split is the whole split
        whole, rest = divmod(self.num_items, self.batch_size)
        self.num_batches = whole + (rest > 0 and not drop_last)
        data_bytes, order_bytes = len(self.rows) * row_bytes(self.fields), 8 * len(self.rows)
        super().__init__(device, tier, data_bytes, order_bytes, reserve_bytes, several)
        self._preload_to_gpu = preload_to_gpu
        self.block_items = block_items or default_block(self.num_items, self.bytes // len(self.rows))
        self._layout = Layout(self.fields)
        self._window_bytes = window_bytes if window_bytes is not None else int(window_share * self.bytes)
        self._cut: tuple[int, Cut] | None = None  # of the epoch last asked for

    def __len__(self) -> int:
        """Items of an epoch."""
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

        Of several ranks those of this one, with what stands in where a batch has none of them.
        """
        return self.rows.index(self._positions(epoch))

    def epoch(self, number: int, start_batch: int = 0, *, out: Batch | None = None) -> Epoch:
        """Batches of an epoch from start_batch on, each a dict of tensors on the device.

        With out, every batch is written into these tensors, the static inputs of a captured graph for instance, on
        the current stream; a short last batch is the first rows of them.
        """
        store = self.loaded()
        if out is not None:
            check_out(out, self.fields, self.batch_size, self.device)
        alone = "another epoch was begun on the same window" if store.exclusive else ""
        batches = self._batches(store, number, start_batch, out)
        return self.opened.begin(batches, start_batch, self.num_batches, alone=alone)

    def share(self, epoch: int, batch: int) -> Share | None:
        """Which items of a batch are here; None: all of them."""
        return None if self._part is None else self._cut_of(epoch).share(self._part, batch)

    def fill(self, out: Batch, epoch: int, batch: int) -> Batch:
        """Write one batch of an epoch into out, in any order of batches; tier vram alone can do that.

        The order of the epoch last asked for stays on the device, so that a call only queues kernels.
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
        """Facts for a report: tier and why, sizes, order, speed of loading."""
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
        """Places among the rows held, in the order of an epoch."""
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
        """Where the batches of an epoch end in its order, here."""
        if self._part is not None:
            return cast(list[int], self._cut_of(epoch).stops.tolist())
        stop = min(self.num_items, self.num_batches * self.batch_size)
        return [min(end, stop) for end in range(self.batch_size, stop + self.batch_size, self.batch_size)]

    def _own(self) -> Rows:
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
        chunks = store.chunks(Plan(number, self._positions, in_order, spans))
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
        """What of each block is held here: the order mixes blocks of the whole, however many ranks there are."""
        if self._part is None:
            return Blocks(self.block_items)
        if self.block_items < self._part.size:
            raise ConfigError(
                f"block_items={self.block_items} are fewer than the {self._part.size} ranks, and tier window divides "
                "each block among them; give a larger block, or fewer ranks"
            )
        return Blocks(self.block_items, self._part.size, self._part.rank)

    def _slots(self, blocks: Blocks) -> int:
        # what stands in for a batch may be of the block after it
        reach = 0 if self._part is None else self.block_items
        return num_slots(
            num_items=self.num_items,
            batch_size=self.batch_size + reach,
            block_items=self.block_items,
            item_bytes=max(1, row_bytes(self.fields) * blocks.items // self.block_items),
            window_bytes=self._window_bytes,
            room_bytes=max(0, int(0.9 * free_bytes(self.device)) - self._reserve_bytes),
        )

"""Sequences of variable length as padded batches on a device, from VRAM, from RAM or from where they are stored.

    vram    all frames on the device           a batch is a gather there
    ram     all frames in host memory          threads pad the next batches, a side stream copies them
    window  nothing held                       the same, read from the source

Batches come from buckets of similar length, in an order fixed by (seed, epoch): the same bits in every tier. On a CPU
all three are in host memory: "vram" gathers in the caller's thread, "ram" and "window" pad in others.

With several ranks each holds its own items and its part of the same batches, which share() describes.

Axes: B sequences, T frames they are padded to, D features.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from brim.engine.config import BucketConfig, Tier
from brim.engine.device import check_injected
from brim.engine.rows.buckets import Bucketed, Buckets
from brim.engine.rows.order import check_tier
from brim.engine.rows.ragged_tiers import (
    DeviceFrames,
    FrameRuns,
    FrameStore,
    HostFrames,
    RaggedItems,
    RaggedSource,
    SourceFrames,
    check_columns,
    check_source,
)
from brim.engine.rows.resident import Epoch, Held
from brim.engine.rows.source import RowSplit
from brim.engine.training import Batch, BatchSource, InputsFor, Ranks, Share
from brim.errors import ConfigError

RowChoice = slice | range | Sequence[int] | Tensor | None


class RaggedView(BatchSource):
    """An order of batches over frames that a RaggedResident holds."""

    divides_batches = True

    def __init__(
        self,
        resident: "RaggedResident",
        rows: Tensor,
        columns: Batch,
        buckets: BucketConfig,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self.rows, self.columns, self.seed, self.shuffle = rows, columns, seed, shuffle
        lengths = resident.source.lengths[rows]
        self.buckets = Buckets(lengths, buckets, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self.num_items, self.num_batches = self.buckets.num_items, self.buckets.num_batches
        self.batch_size = self.buckets.batch_size  # of the largest batch
        self.padding_share = self.buckets.padding_share
        self._mine = None if resident.own is None else resident.own[rows]  # (n,) bool
        self._planned: tuple[int, list[Bucketed]] | None = None  # of the epoch last asked for
        self._resident = resident
        self._items: tuple[FrameStore, RaggedItems] | None = None

    def __len__(self) -> int:
        return self.num_items

    @property
    def tier(self) -> Tier:
        """Where the frames are; known inside the with block."""
        return self._store()[0].tier

    def epoch(self, number: int, start_batch: int = 0, inputs: InputsFor | None = None) -> Epoch:
        """Batches of an epoch from start_batch on, each a dict of tensors on the device.

        A batch gathered on the device is written into the tensors that inputs("frames", shape) returns, if any, and
        yielded as that dict: the inputs of a step captured for the shape.

        frames  (B, T, D)  in the stored or the requested dtype; zeros after the end of an item
        length  (B,)       int64  frames of each item, at most T
        item    (B,)       int64  its row in the source
        …       (B, …)     the columns of the source
        """
        self._store()
        return self._resident.opened.begin(self._batches(number, start_batch, inputs), start_batch, self.num_batches)

    def epoch_into(self, number: int, start_batch: int, inputs: InputsFor) -> Generator[Batch]:
        yield from self.epoch(number, start_batch, inputs)

    def share(self, epoch: int, batch: int) -> Share | None:
        """The items of a batch that this rank has; None: all of them."""
        ranks = self._resident.ranks
        if self._mine is None or ranks is None:
            return None
        items = self._plan(epoch)[batch].items
        return Share(ranks, len(items), self._mine[items].nonzero().flatten())

    def order(self, epoch: int) -> list[Bucketed]:
        """The batches of an epoch: how long they are padded, and the rows of the source in them."""
        return [Bucketed(batch.length, self.rows[batch.items]) for batch in self.buckets.epoch(epoch)]

    def _batches(self, number: int, start_batch: int, inputs: InputsFor | None) -> Generator[Batch]:
        store, items = self._store()
        plan = self._plan(number)[start_batch:]
        if self._mine is not None:
            lengths = self._resident.source.lengths[self.rows]
            plan = [part_of(batch, self._mine, lengths) for batch in plan]
        yield from store.batches(items, plan, inputs)

    def _plan(self, number: int) -> list[Bucketed]:
        if self._planned is None or self._planned[0] != number:
            self._planned = (number, self.buckets.epoch(number))
        return self._planned[1]

    def _store(self) -> tuple[FrameStore, RaggedItems]:
        resident = self._resident
        store = resident.loaded()
        if self._items is None or self._items[0] is not store:
            starts = store.start[resident.positions(self.rows if self._mine is None else self.rows[self._mine])]
            if self._mine is not None:
                starts = torch.zeros(len(self.rows), dtype=torch.int64).masked_scatter_(self._mine, starts)
            columns = {name: column[self.rows].contiguous() for name, column in self.columns.items()}
            lengths = resident.source.lengths[self.rows]
            self._items = (store, RaggedItems(starts, lengths, self.rows, columns))
        return store, self._items[1]


class RaggedResident(RaggedView, Held[FrameStore]):
    """Sequences of a source where a device can gather them; inside its with block epoch() gives batches."""

    def __init__(
        self,
        source: RaggedSource,
        *,
        buckets: BucketConfig,
        device: torch.device,
        tier: Tier | Literal["auto"] = "auto",
        seed: int = 0,
        rows: RowChoice = None,
        dtype: torch.dtype | None = None,
        reserve_bytes: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        fields: Mapping[str, Tensor] | None = None,
        ranks: Ranks | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Store and check; no frame is read before the with block.

        tier           "auto": the fastest that has room beside reserve_bytes, what the model will need on the device
        rows           a split: a slice, row numbers or a mask
        dtype          of the frames in batches; by default as stored
        shuffle        False: a fixed order, from long to short, for evaluation
        fields         columns with a row for each item of the source, instead of the source's own
        ranks, own     among whom the items are divided, and (n,) bool which items of the source this rank holds
        """
        self.ranks = ranks if ranks is not None and not ranks.alone else None
        self.own = None if self.ranks is None else own
        check_tier(tier)
        check_source(source)
        self.source = source
        self.dtype = dtype or source.dtype
        chosen = _chosen(source, rows)
        columns = check_columns(source.fields if fields is None else fields, source.num_items)
        RaggedView.__init__(self, self, chosen, columns, buckets, seed, shuffle, drop_last)
        self._held_rows = chosen if self._mine is None else chosen[self._mine]
        num_frames = int(source.lengths[self._held_rows].sum())
        data_bytes = num_frames * source.dim * self.dtype.itemsize
        index_bytes = 32 * self.num_items  # starts, lengths, rows and the order of an epoch
        Held.__init__(self, device, tier, data_bytes, index_bytes, reserve_bytes, self.ranks)
        self._sorted = self._held_rows.sort()

    def view(
        self,
        *,
        buckets: BucketConfig | None = None,
        seed: int | None = None,
        rows: RowChoice = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        fields: Mapping[str, Tensor] | None = None,
    ) -> RaggedView:
        """Other batches of the same frames, which are not loaded again: a part of the rows, other columns.

        Defaults are those of this one; rows must be among its own, fields have a row for each item of the source.
        """
        chosen = self.rows if rows is None else _chosen(self.source, rows)
        self.positions(chosen if self.own is None else chosen[self.own[chosen]])
        return RaggedView(
            self, chosen, self.columns if fields is None else check_columns(fields, self.source.num_items),
            buckets or self.buckets.config, self.seed if seed is None else seed,
            self.shuffle if shuffle is None else shuffle, drop_last,
        )  # fmt: skip

    def describe(self) -> dict[str, object]:
        """Facts for a report: tier and reason, sizes, buckets, loading speed."""
        choice, held = self._entered()
        return {
            "tier": held.tier,
            "why": choice.why,
            "source": self.source.description,
            "items": self.num_items,
            "frames": self.buckets.num_frames,
            "bytes": self.bytes,
            "held_bytes": held.held_bytes,
            "batch_size": self.batch_size,
            "num_batches": self.num_batches,
            "edges": list(self.buckets.edges),
            "padding_share": self.padding_share,
            "load_s": self.load_s,
        }

    def positions(self, rows: Tensor) -> Tensor:
        """Positions of these rows of the source among the rows held."""
        ordered, place = self._sorted
        places = torch.searchsorted(ordered, rows).clamp(max=len(ordered) - 1)
        missing = (ordered[places] != rows).nonzero()
        if len(missing):
            raise ConfigError(f"rows={int(rows[missing[0]])} is not loaded here", hint="load it, or choose other rows")
        return place[places]

    # Loading

    def _say_more(self) -> str:
        edges, config = self.buckets.edges, self.buckets.config
        text = f"; {len(edges)} buckets of {edges[0]} to {edges[-1]} frames, {self.padding_share:.1%} padding"
        if self.padding_share <= config.max_waste:
            return text
        return f"{text}, more than {config.max_waste:.1%}: a smaller batch pads less"

    def _make(self, tier: Tier) -> FrameStore:
        check_injected(self.num_items if tier == "vram" else self.batch_size)
        if tier == "window":
            return SourceFrames(self.source, self._held_rows, self.dtype, self.device)
        runs = FrameRuns(self.source, self._held_rows)
        if tier == "vram":
            return DeviceFrames(runs, self.dtype, self.device)
        return HostFrames(runs, self._held_rows, self.dtype, self.device)


def part_of(batch: Bucketed, mine: Tensor, lengths: Tensor) -> Bucketed:
    """The items of a batch that this rank holds; if it has none, its shortest item stands in.

    mine     (n,)  bool   which items are its own
    lengths  (n,)  int64  frames of all items
    """
    items = batch.items[mine[batch.items]]
    if len(items):
        return Bucketed(batch.length, items)
    own = mine.nonzero().flatten()
    shortest = own[lengths[own].argmin()]
    return Bucketed(max(batch.length, int(lengths[shortest])), shortest[None])


def _chosen(source: RaggedSource, rows: RowChoice) -> Tensor:
    split = RowSplit(cast(Any, source), rows, sort=False)  # only the number of items is used
    return split.index(torch.arange(len(split)))

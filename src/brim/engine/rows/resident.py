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

import gc
import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Generic, Literal, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor

from brim.engine.config import TIERS, Tier
from brim.engine.device import check_injected, describe, format_size, free_bytes, guard, named_device, with_index
from brim.engine.rows.opening import as_given, open_rows
from brim.engine.rows.order import (
    HOST,
    Blocks,
    Choice,
    RowFetcher,
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
from brim.engine.rows.source import RowSplit, choose, row_bytes
from brim.engine.rows.tiers import (
    DeviceStore,
    HostStore,
    Loaded,
    Store,
    WindowStore,
    fill_memory,
    num_slots,
    to_device,
)
from brim.engine.training import Batch, BatchSource, Cut, Fetcher, InputsFor, Ranks, Share, check_enough, cut
from brim.errors import ConfigError, OutOfMemory
from brim.report.summary import Summarised, counted

Kept = TypeVar("Kept", bound=Loaded)


class Epoch(Iterator[Any]):
    """Batches of one epoch; ends after the number it promised or with an exception, never silently early."""

    def __init__(self, batches: Generator[Any], num_batches: int) -> None:
        """Nothing is gathered before the first batch is requested."""
        self._batches = batches
        self._left = num_batches
        self._cut = ""

    def __next__(self) -> Any:
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

    def begin(self, batches: Generator[Any], start_batch: int, num_batches: int, *, alone: str = "") -> Epoch:
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

    def __iter__(self) -> Iterator[Any]:
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
        self._closed = False

    def __enter__(self) -> Self:
        if self._held is None:
            choice = self._choose()
            log.info("tier %s: %s%s%s", choice.tier, choice.why, self._say_order(choice.tier), self._say_more())
            began_s = time.perf_counter()
            self._held = self._load(choice)
            self.load_s = time.perf_counter() - began_s
            self._closed = False
            weakref.finalize(self, self._held[1].close).atexit = False  # for those who use no with block
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.opened.cut(f"its {type(self).__name__} was closed")
        held, self._held = self._held, None
        if held is not None:
            held[1].close()

    def close(self) -> None:
        """Release the data; what a with block does at its end."""
        self.__exit__()

    def loaded(self) -> Kept:
        """The data in its tier, loaded at the first use; raises after the with block."""
        return self._entered()[1]

    def _entered(self) -> tuple[Choice, Kept]:
        if self._held is None and self._closed:
            raise RuntimeError(f"{type(self).__name__} was closed: it holds its data inside its with block only")
        self.__enter__()
        assert self._held is not None
        return self._held

    def _choose(self) -> Choice:
        if self._asked != "auto":
            return Choice(self._asked, f"{format_size(self.bytes)} of data, as asked for")
        return choose_tier(
            self.device, data_bytes=self.bytes + self._beside_bytes, reserve_bytes=self._reserve_bytes,
            device_free_bytes=free_bytes(self.device), host_free_bytes=free_bytes(HOST),
            preload_to_gpu=self._preload_to_gpu, device_name=str(describe(self.device)["name"]),
        )  # fmt: skip

    def _load(self, choice: Choice) -> tuple[Choice, Kept]:
        """Load the chosen tier, or the next lower one that fits.

        Several ranks take the same tier, the highest that has room on all of them: the order of rows may depend on it.
        """
        if self._ranks is not None:
            lowest = TIERS[self._ranks.greatest(TIERS.index(choice.tier))[0]]
            choice = choice if lowest == choice.tier else Choice(lowest, "another rank has no room for more")
        for tier in TIERS[TIERS.index(choice.tier) :]:
            data, fault = self._try(tier)
            # only here, outside the except block, is the traceback that kept the tensors alive gone
            if self._ranks is not None and self._ranks.greatest(int(data is None))[0] and data is not None:
                data.close()
                data, fault = None, "no room on another rank"
            if data is not None:
                return choice, data
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if tier == TIERS[-1]:
                raise OutOfMemory(
                    f"not even a window of the data fits on {self.device} ({fault})", hint="lower {window_bytes}"
                )
            below = TIERS[TIERS.index(tier) + 1]
            log.warning("tier %s did not fit (%s); using tier %s%s", tier, fault, below, self._say_order(below))
            choice = Choice(below, f"tier {tier} did not fit")
        raise AssertionError("the last tier is either loaded or raises")

    def _try(self, tier: Tier) -> tuple[Kept | None, str]:
        try:
            with guard():
                return self._make(tier), ""
        except OutOfMemory as failure:
            return None, str(failure)

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


class Resident(Summarised, Held[Store], BatchSource):
    """Rows where a device can index them; epoch() gives batches on that device.

    The data is a dict of tensors or NumPy arrays, a tuple (X, y), a TensorDataset or any map-style Dataset, a Hugging
    Face dataset, a pandas or Arrow table, the path of a brim dataset, of a folder of .npy or of a .safetensors file, or
    brim.sql(url, query). It is loaded when the first epoch begins, or by a with block, which also releases it.
    """

    divides_batches = True

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int = 256,
        device: torch.device | str = "auto",
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
        """Store and check; nothing is loaded yet.

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
        self._options: dict[str, Any] = {
            "batch_size": batch_size, "device": device, "tier": tier, "preload_to_gpu": preload_to_gpu, "seed": seed,
            "shuffle": shuffle, "drop_last": drop_last, "rows": rows, "reserve_bytes": reserve_bytes,
            "window_share": window_share, "window_bytes": window_bytes, "block_items": block_items, "names": names,
            "total": total,
        }  # fmt: skip
        device = named_device(device)
        source, self.form = open_rows(data)
        self.source = source
        self.seed = seed
        self.shuffle: Shuffle = shuffle  # becomes "blocks" if only tier "window" fits
        self.drop_last = drop_last
        self.fields = choose(source.fields, names, "the source")
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
        self._ordered: tuple[int, Tensor, Cut | None] | None = None  # of the latest epoch

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> NoReturn:
        raise ConfigError("a Resident is read in epochs", hint="write: for batch in data.epoch(0)")

    def __getitem__(self, key: Any) -> NoReturn:
        raise ConfigError("a Resident gives batches, not rows", hint="write: for batch in data.epoch(0)")

    @property
    def tier(self) -> Tier:
        """Where the rows are; known inside the with block."""
        return self.loaded().tier

    @property
    def chunk_batches(self) -> int:
        batch_bytes = max(1, self.batch_size * row_bytes(self.fields))
        return max(1, min(_CHUNK_BATCHES, self.num_batches, _CHUNK_BYTES[self.device.type] // batch_bytes))

    def order(self, epoch: int) -> Tensor:
        """Rows of the source in the order of an epoch, as it is cut into batches; int64 on the host.

        With several ranks those of this one; a batch without any has a stand-in.
        """
        return self.rows.index(self._plan(epoch)[0])

    @property
    def asked_device(self) -> Any:
        """The device as it was given, perhaps without a number."""
        return self._options["device"]

    def divided(self, ranks: Ranks) -> "Resident":
        """The same rows, divided among ranks, on the device of this one; what is loaded here is released."""
        self.close()
        divided = Resident(self.source, **(self._options | {"device": ranks.device, "ranks": ranks}))
        divided.form = self.form
        return divided

    def as_given(self, batch: Batch) -> Any:
        """A batch in the form in which the data went in: a dict, a tuple or a single tensor."""
        return as_given(batch, self.form)

    def epoch(self, number: int, start_batch: int = 0, *, out: Batch | None = None) -> Epoch:
        """Batches of an epoch from start_batch on: dicts of tensors on the device; tuples, if tuples went in.

        With out, every batch is written into these tensors, the static inputs of a captured graph for instance, on
        the current stream; a short last batch uses their first rows.
        """
        opened = self._open(number, start_batch, out)
        return opened if self.form == "dict" else Epoch(self._given(opened), len(opened))

    def _open(self, number: int, start_batch: int, out: Batch | None) -> Epoch:
        """An epoch of dicts, whatever form the data has."""
        store = self.loaded()
        if out is not None:
            check_out(out, self.fields, self.batch_size, self.device)
        alone = "another epoch was begun on the same window" if store.exclusive else ""
        batches = self._batches(store, number, start_batch, out)
        return self.opened.begin(batches, start_batch, self.num_batches, alone=alone)

    def _given(self, opened: Epoch) -> Generator[Any]:
        with closing(opened):
            for batch in opened:
                yield self.as_given(batch)

    def epoch_into(self, number: int, start_batch: int, inputs: InputsFor) -> Generator[Batch]:
        """As epoch; once a step for full batches is captured, batches are written into its inputs."""
        name, (_, shape) = next(iter(self.fields.items()))
        opened: Epoch | None = None
        filled: Batch | None = None
        try:
            for batch in range(start_batch, self.num_batches):
                out = inputs(name, (self.batch_size, *shape))
                if opened is None or out is not filled:
                    if opened is not None:
                        opened.close()
                    opened, filled = self._open(number, batch, out), out
                yield next(opened)
        finally:
            if opened is not None:
                opened.close()

    def fetcher(self) -> Fetcher | None:
        """For rows that are all on the device of this process."""
        store = self.loaded()
        if self._part is not None or not isinstance(store, DeviceStore):
            return None
        return RowFetcher(
            store.rows, self._layout, self.batch_size, self.num_batches, lambda epoch: self._plan(epoch)[0]
        )

    @property
    def opens_ahead(self) -> bool:
        """Not from a window: it holds one epoch at a time."""
        return not self.loaded().exclusive

    def share(self, epoch: int, batch: int) -> Share | None:
        """The items of a batch that this rank has; None: all of them."""
        plan = self._plan(epoch)[1]
        return None if self._part is None or plan is None else plan.share(self._part, batch)

    def static_batch(self) -> Batch:
        """Zeroed tensors on the device that hold one full batch, for epoch(…, out=…)."""
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

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        batches = f"{self.num_batches} in an epoch"
        where = f"tier {self._held[1].tier} on {self.device}" if self._held else f"not loaded yet, for {self.device}"
        facts = {
            name: " ".join(filter(None, (str(dtype).removeprefix("torch."), str(list(shape)) if shape else "")))
            for name, (dtype, shape) in self.fields.items()
        }
        size = f"{counted(self.num_items, 'row')}, {format_size(self.bytes)}"
        return f"Resident: {size}, batches of {self.batch_size}, {batches}, {where}", facts

    def _plan(self, epoch: int) -> tuple[Tensor, Cut | None]:
        """Positions among the rows held, in the order of an epoch; with several ranks this one's part of it."""
        if self._ordered is None or self._ordered[0] != epoch:
            positions = epoch_order(
                self.num_items, seed=self.seed, epoch=epoch, shuffle=self.shuffle, block_items=self.block_items
            )
            part = None if self._part is None else cut(positions, torch.tensor(self._stops()).diff(), self._part)
            self._ordered = (epoch, positions if part is None else part.items, part)
        return self._ordered[1:]

    def _stops(self) -> list[int]:
        """0, then where each batch of an epoch ends, on all ranks together."""
        stop = min(self.num_items, self.num_batches * self.batch_size)
        return [*range(0, stop, self.batch_size), stop]

    def _own(self) -> RowSplit:
        if self._part is None or self._is_cut:
            return self._all_rows
        return self._all_rows.every(self._part.size, self._part.rank)

    def _batches(self, store: Store, number: int, start_batch: int, out: Batch | None) -> Generator[Batch]:
        order, part = self._plan(number)
        ends = self._stops() if part is None else [0, *cast(list[int], part.stops.tolist())]
        if out is not None and isinstance(store, DeviceStore) and self.chunk_batches == 1:
            index, matrices = to_device(order, self.device), self._layout.pack(out)
            for batch in range(start_batch, self.num_batches):  # straight into place
                num = ends[batch + 1] - ends[batch]
                into = {name: matrix[:num] for name, matrix in matrices.items()}
                gather(store.rows, index[ends[batch] : ends[batch + 1]], into)
                yield out if num == self.batch_size else {name: tensor[:num] for name, tensor in out.items()}
            return
        per_chunk = store.chunk_batches(self.chunk_batches, self.batch_size)
        firsts = range(start_batch, self.num_batches, per_chunk)  # batches that begin a chunk
        lasts = [min(first + per_chunk, self.num_batches) for first in firsts]
        spans = [(ends[first], ends[last]) for first, last in zip(firsts, lasts, strict=True)]
        target = Target(self._layout, out) if out is not None else None
        chunks = store.chunks(order, spans, self.shuffle is False and part is None)
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
                self.shuffle, self._all_rows, self._ordered = "blocks", self._all_rows.sorted(), None
                self.rows = self._own()
            blocks = self._blocks()
            held_items = self._slots(blocks) * blocks.items
            check_injected(held_items)
            return WindowStore(self._layout, self.rows, self.device, blocks, held_items)
        if tier == "vram":
            check_injected(self.num_items)
            return DeviceStore(fill_memory(self.rows, self._layout, self.device)[0], self.device)
        check_injected(self.batch_size)
        rows, owned = fill_memory(self.rows, self._layout, HOST)
        return HostStore(rows, self._layout, self.device, pin=owned)

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
            num_items=self.num_items, batch_size=self.batch_size + reach, block_items=self.block_items,
            item_bytes=max(1, row_bytes(self.fields) * blocks.items // self.block_items),
            window_bytes=self._window_bytes,
            room_bytes=max(0, int(0.9 * free_bytes(self.device)) - self._reserve_bytes),
        )  # fmt: skip

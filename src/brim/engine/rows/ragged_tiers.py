"""Sources of sequences, their frames in each tier, and padded batches of them: the same bits from every tier.

    vram    all frames on the device, and one of zeros   row numbers computed there, one gather
    ram     all frames in host memory                    threads copy sequences, a side stream the padded batch
    window  no frames held                               the same, read from the source

Axes: B sequences of a batch, T frames they are padded to, D features, n items, N frames held.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from brim.engine.config import Tier
from brim.engine.device import worker_count
from brim.engine.pipeline import Stage
from brim.engine.rows.buckets import Bucketed
from brim.engine.rows.order import HOST, RowLayout, gather
from brim.engine.rows.tiers import Copied, Loaded, copied_ahead, load_rows, mark, pinned, side_stream, to_device
from brim.engine.storage import RowFields
from brim.engine.training import Batch, InputsFor
from brim.errors import DatasetError

OWN_FIELDS = ("frames", "length", "item")  # fields of a batch besides the columns of its source


class RaggedSource(Protocol):
    """Sequences of frames that can be read by position, from any thread.

    lengths  (n,)  int64  frames of each item
    starts   (n,)  int64  first frame of each item, in any order, with gaps where frames belong to no item
    fields   (n, …) each  further columns, such as a label
    """

    @property
    def num_items(self) -> int: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def fields(self) -> Mapping[str, Tensor]: ...
    @property
    def description(self) -> str: ...

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Read the frames from start to stop into out, (stop - start, D), contiguous, of the source's dtype."""


class RaggedTensors:
    def __init__(self, sequences: Sequence[Tensor], fields: Mapping[str, Tensor] | None = None) -> None:
        """Join the sequences, (T, D) each, all of one D and dtype; fields are (n, …) each."""
        if not sequences or any(one.ndim != 2 or one.shape[1] != sequences[0].shape[1] for one in sequences):
            shapes = sorted({str(list(one.shape)) for one in sequences})[:4]
            raise DatasetError(
                f"sequences are {', '.join(shapes) or 'none'}, expected (frames, features), equally wide"
            )
        self.frames = torch.cat(list(sequences)).contiguous()
        self.lengths = torch.tensor([len(one) for one in sequences])
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.fields = dict(fields or {})
        self.num_items, (self.num_frames, self.dim) = len(sequences), self.frames.shape
        self.dtype = self.frames.dtype
        self.description = f"{self.num_items} sequences in memory"

    def read(self, start: int, stop: int, out: Tensor) -> None:
        out.copy_(self.frames[start:stop])


class FrameRuns:
    """The frames of some items, concatenated without gaps and read in few calls: neighbours are read together."""

    def __init__(self, source: RaggedSource, rows: Tensor) -> None:
        """Lay the items out in the order of the source.

        rows   (n,)  int64  items of the source
        start  (n,)  int64  where each of them begins here
        """
        self.source = source
        starts, lengths = source.starts[rows], source.lengths[rows]
        order = torch.argsort(starts, stable=True)
        ends = lengths[order].cumsum(0)
        self.num_frames = int(ends[-1])
        self.start = torch.empty_like(starts)
        self.start[order] = ends - lengths[order]
        begins = torch.ones(len(rows), dtype=torch.bool)  # where an item does not follow the one before
        begins[1:] = starts[order][1:] != (starts + lengths)[order][:-1]
        self._there: list[int] = starts[order][begins].tolist()
        self._here: list[int] = [*self.start[order][begins].tolist(), self.num_frames]

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Read frames from start to stop, as they are numbered here."""
        run = bisect_right(self._here, start) - 1
        first = start
        while start < stop:
            end, shift = min(stop, self._here[run + 1]), self._there[run] - self._here[run]
            self.source.read(start + shift, end + shift, out[start - first : end - first])
            start, run = end, run + 1


def check_source(source: RaggedSource) -> None:
    """Raise DatasetError if starts and lengths of a source are inconsistent."""
    num, where = source.num_items, source.description
    for name in ("lengths", "starts"):
        tensor = getattr(source, name)
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (num,):
            raise DatasetError(f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}, expected int64 [{num}]")
    outside = (source.lengths < 1) | (source.starts < 0) | (source.starts + source.lengths > source.num_frames)
    if outside.any():
        item = int(outside.nonzero()[0])
        raise DatasetError(
            f"{where}: item {item} has {int(source.lengths[item])} frames from {int(source.starts[item])} on, expected "
            f"at least 1 among {source.num_frames}",
            hint="pack it again",
        )


def check_columns(columns: Mapping[str, Tensor], num_items: int) -> Batch:
    """The columns on the host, contiguous; DatasetError unless they have a row for every item of the source."""
    for name, column in columns.items():
        if name in OWN_FIELDS:
            raise DatasetError(f'field "{name}" has a name that every batch already uses', hint="rename it")
        if column.ndim < 1 or len(column) != num_items:
            raise DatasetError(f'field "{name}" is {list(column.shape)}, expected a row for each of {num_items} items')
    return {name: column.to(HOST).contiguous() for name, column in columns.items()}


def batch_fields(length: int, dim: int, dtype: torch.dtype, columns: Batch) -> RowFields:
    """Fields of an item that is padded to this length."""
    return {
        "frames": (dtype, (length, dim)),
        "length": (torch.int64, ()),
        "item": (torch.int64, ()),
        **{name: (column.dtype, tuple(column.shape[1:])) for name, column in columns.items()},
    }


_SHARED_BYTES = 2**20  # a smaller batch is copied by one thread: waking others takes longer
_IN_FLIGHT_BYTES = 2**30  # bytes of batches made ahead, unless the minimum number needs more


@dataclass(frozen=True, slots=True)
class RaggedItems:
    """Position, length and columns of each item.

    start, length, row  (n,)  int64  first frame in the store; frames; item of the source
    columns             (n, …) each
    """

    start: Tensor
    length: Tensor
    row: Tensor
    columns: Batch
    _there: dict[torch.device, tuple[Tensor, RowLayout, Batch]] = field(default_factory=dict, compare=False)

    def on(self, device: torch.device) -> tuple[Tensor, RowLayout, Batch]:
        """(3, n) start, length and row, and the columns as matrices, on the device, copied there once."""
        if device not in self._there:
            layout = RowLayout({name: (column.dtype, tuple(column.shape[1:])) for name, column in self.columns.items()})
            table = torch.stack([self.start, self.length, self.row]).to(device)
            columns = {name: matrix.to(device) for name, matrix in layout.pack(self.columns).items()}
            self._there[device] = (table, layout, columns)
        return self._there[device]


class FrameStore(Loaded):
    start: Tensor  # (n,) int64, where each item begins
    held_bytes: int

    @abstractmethod
    def batches(self, items: RaggedItems, plan: list[Bucketed], inputs: InputsFor | None = None) -> Iterator[Batch]:
        """The batches of a plan, padded with zeros, on the device; written into inputs where the store can."""


class DeviceFrames(FrameStore):
    """Tier vram: a batch is one gather on the device; positions after the end of an item gather a frame of zeros."""

    tier: Tier = "vram"

    def __init__(self, runs: FrameRuns, dtype: torch.dtype, device: torch.device) -> None:
        self.start, self.device = runs.start, device
        self._layout = RowLayout({"frames": (dtype, (runs.source.dim,))})
        self._frames = _load(runs, dtype, device, extra=1)
        self._frames["frames"][-1].zero_()
        self._zeros = runs.num_frames
        self.held_bytes = self._frames["frames"].nbytes

    def batches(self, items: RaggedItems, plan: list[Bucketed], inputs: InputsFor | None = None) -> Iterator[Batch]:
        """A few kernels per batch, queued without waiting; the order of the epoch is copied to the device once."""
        if not plan:
            return
        order = to_device(torch.cat([batch.items for batch in plan]), self.device)
        ramp = torch.arange(max(batch.length for batch in plan), device=self.device)
        start = 0
        for batch in plan:
            stop = start + len(batch.items)
            shape = (len(batch.items), batch.length, self._layout.fields["frames"][1][0])
            out = inputs("frames", shape) if inputs is not None else None
            yield self._batch(items, order[start:stop], ramp[: batch.length], out)
            start = stop

    def _batch(self, items: RaggedItems, chosen: Tensor, ramp: Tensor, out: Batch | None) -> Batch:
        table, layout, columns = items.on(self.device)
        start, length, row = table.index_select(1, chosen).unbind()
        index = (start[:, None] + ramp).masked_fill_(ramp >= length[:, None], self._zeros)  # (B, T)
        columns = layout.unpack(gather(columns, chosen)) if columns else {}
        small = {"length": length, "item": row, **columns}
        if out is None:
            frames = self._layout.unpack(gather(self._frames, index.view(-1)))["frames"]
            return {"frames": frames.view(len(chosen), len(ramp), -1), **small}
        gather(self._frames, index.view(-1), self._layout.pack({"frames": out["frames"].flatten(0, 1)}))
        for name, tensor in small.items():
            out[name].copy_(tensor)
        return out

    def close(self) -> None:
        self._frames = {}


class SourceFrames(FrameStore):
    """Tier window: sequences are read from the source when they are needed, ahead and in threads."""

    tier: Tier = "window"

    def __init__(self, source: RaggedSource, rows: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.start, self.device, self.held_bytes = source.starts[rows], device, 0
        self._source, self._dtype, self._dim = source, dtype, source.dim
        self._copiers = max(1, min(8, worker_count() - 1))  # the caller's thread launches kernels meanwhile
        self._side = side_stream(device)

    def batches(self, items: RaggedItems, plan: list[Bucketed], inputs: InputsFor | None = None) -> Iterator[Batch]:
        """Batches padded ahead by threads and copied on a side stream, in order."""
        largest = max((len(batch.items) * batch.length for batch in plan), default=0)
        few = 8 * largest * self._dim * self._dtype.itemsize > _IN_FLIGHT_BYTES
        with ThreadPoolExecutor(self._copiers, thread_name_prefix="brim-pad") as pool:
            make = partial(self._make, items, pool)
            # two workers: one pads while the other's copy is queued; more would only share the same copiers
            stage: Stage[Any, Copied] = Stage(name="pad", work=make, workers=1 if few else 2, depth=1 if few else 3)
            yield from copied_ahead(plan, stage, self.device, lag=1 if few else 3)

    def close(self) -> None: ...

    def _make(self, items: RaggedItems, pool: Executor, batch: Bucketed) -> Copied:
        layout = RowLayout(batch_fields(batch.length, self._dim, self._dtype, items.columns))
        num = len(batch.items)
        size = layout.flat_bytes(num)
        flat = pinned(size) if self._side is not None else torch.empty(size, dtype=torch.uint8)
        out = layout.unpack(layout.carve(flat, num))
        self._pad(items.start[batch.items].tolist(), items.length[batch.items].tolist(), out["frames"], pool)
        out["length"].copy_(items.length[batch.items])
        out["item"].copy_(items.row[batch.items])
        for name, column in items.columns.items():
            out[name].copy_(column[batch.items])
        if self._side is None:
            return out, (), None
        with torch.cuda.stream(self._side):
            on_device = flat.to(self.device, non_blocking=True)
            return layout.unpack(layout.carve(on_device, num)), (on_device,), mark(self.device)

    def _pad(self, starts: list[int], lengths: list[int], out: Tensor, pool: Executor) -> None:
        """Copy every sequence into its row and fill the rest with zeros."""
        shares = min(len(starts), self._copiers if out.nbytes > _SHARED_BYTES else 1)
        as_bytes = _bytes(out)

        def copy(first: int) -> None:
            for place in range(first, len(starts), shares):
                start, num = starts[place], lengths[place]
                self._copy(start, start + num, out[place, :num])
                as_bytes[place, num:] = 0  # NumPy writes without torch's threads and without the interpreter's lock

        if shares == 1:
            copy(0)
            return
        for part in [pool.submit(copy, first) for first in range(shares)]:
            part.result()

    def _copy(self, start: int, stop: int, out: Tensor) -> None:
        _read_as(self._source.read, start, stop, out, self._source.dtype)


class HostFrames(SourceFrames):
    """Tier ram: all frames in host memory; not pinned themselves, as threads pad them into memory that is."""

    tier: Tier = "ram"

    def __init__(self, runs: FrameRuns, rows: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(runs.source, rows, dtype, device)
        layout = RowLayout({"frames": (dtype, (runs.source.dim,))})
        self._frames = _bytes(layout.unpack(_load(runs, dtype, HOST))["frames"])
        self.start, self.held_bytes = runs.start, self._frames.nbytes

    def _copy(self, start: int, stop: int, out: Tensor) -> None:
        np.copyto(_bytes(out), self._frames[start:stop])

    def close(self) -> None:
        self._frames = self._frames[:0].copy()


def _load(runs: FrameRuns, dtype: torch.dtype, where: torch.device, extra: int = 0) -> Batch:
    """All frames as a matrix of integers, read and converted by several threads; `extra` rows at its end."""

    def read(start: int, stop: int, out: Batch) -> None:
        _read_as(runs.read, start, stop, out["frames"], runs.source.dtype)

    layout = RowLayout({"frames": (dtype, (runs.source.dim,))})
    return load_rows(read, runs.num_frames, layout, where, extra)


def _read_as(read: Callable[[int, int, Tensor], None], start: int, stop: int, out: Tensor, stored: torch.dtype) -> None:
    """Read in the stored dtype, then convert: always on the host, so that every tier rounds alike."""
    if out.dtype == stored:
        read(start, stop, out)
        return
    part = torch.empty(out.shape, dtype=stored)
    read(start, stop, part)
    out.copy_(part)


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The same memory as bytes; NumPy has no bfloat16."""
    return tensor.view(torch.uint8).numpy()

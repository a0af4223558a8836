"""What a source of sequences is: frames behind each other, and where each item begins; and one in memory.

Axes: N frames of a source, D features, n items.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from brim.engine.rows.layout import Batch
from brim.engine.rows.order import HOST
from brim.engine.storage.dataset import Fields
from brim.errors import DatasetError

OWN_FIELDS = ("frames", "length", "item")  # what a batch holds besides the columns of its source


class RaggedSource(Protocol):
    """Sequences of frames that can be read by their place; any thread may read."""

    @property
    def num_items(self) -> int:
        """Sequences."""

    @property
    def lengths(self) -> Tensor:
        """(n,) int64, frames of each item."""

    @property
    def starts(self) -> Tensor:
        """(n,) int64, first frame of each item; in any order, with gaps where frames belong to no item."""

    @property
    def num_frames(self) -> int:
        """Frames that can be read, those of no item included."""

    @property
    def dim(self) -> int:
        """Features of a frame."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Further columns, (n, …) each: a label, for instance."""

    @property
    def description(self) -> str:
        """What it is, for a person."""

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Read the frames from start to stop into out, (stop - start, D), contiguous, of the source's dtype."""


class RaggedTensors:
    """Sequences in memory."""

    def __init__(self, sequences: Sequence[Tensor], fields: Mapping[str, Tensor] | None = None) -> None:
        """Join the sequences, (T, D) each, all of one D and dtype; fields are (n, …) each."""
        if not sequences or any(one.ndim != 2 or one.shape[1] != sequences[0].shape[1] for one in sequences):
            found = sorted({str(list(one.shape)) for one in sequences})[:4]
            raise DatasetError(f"sequences are {', '.join(found) or 'none'}, expected (frames, features), equally wide")
        self.frames = torch.cat(list(sequences)).contiguous()
        self.lengths = torch.tensor([len(one) for one in sequences])
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.fields = dict(fields or {})
        self.num_items, (self.num_frames, self.dim) = len(sequences), self.frames.shape
        self.dtype = self.frames.dtype
        self.description = f"{self.num_items} sequences in memory"

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy the frames."""
        out.copy_(self.frames[start:stop])


class Runs:
    """The frames of some items behind each other, without gaps, read with few calls: neighbours go together."""

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
    """Raise DatasetError when what a source says of its items cannot be so."""
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
            f"at least 1 among {source.num_frames}; pack it again"
        )


def check_columns(columns: Mapping[str, Tensor], num_items: int) -> Batch:
    """The columns on the host, contiguous; DatasetError unless they have a row for every item of the source."""
    for name, column in columns.items():
        if name in OWN_FIELDS:
            raise DatasetError(f'field "{name}" is the name of what every batch holds; call it otherwise')
        if column.ndim < 1 or len(column) != num_items:
            raise DatasetError(f'field "{name}" is {list(column.shape)}, expected a row for each of {num_items} items')
    return {name: column.to(HOST).contiguous() for name, column in columns.items()}


def batch_fields(length: int, dim: int, dtype: torch.dtype, columns: Batch) -> Fields:
    """What an item of a batch holds when it is padded to this length."""
    return {
        "frames": (dtype, (length, dim)),
        "length": (torch.int64, ()),
        "item": (torch.int64, ()),
        **{name: (column.dtype, tuple(column.shape[1:])) for name, column in columns.items()},
    }

"""The contract of a row source, tensors in memory as the simplest one, and splits: which rows of a source are used.

A source describes its fields and reads any range of rows in bulk into memory that its caller owns, from several
threads at once. It keeps nothing on a device and chooses no order.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import guard
from brim.engine.rows.order import HOST
from brim.engine.storage import RowFields, allocate
from brim.errors import ConfigError, DatasetError

_SPAN_BYTES = 64 * 1024  # skipping less than this costs more than reading it


class Source(Protocol):
    """Rows that can be read in bulk."""

    @property
    def num_items(self) -> int: ...
    @property
    def fields(self) -> RowFields: ...
    @property
    def description(self) -> str: ...

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        """Read the rows from start to stop of the fields in out, whose tensors hold exactly that many rows."""


def row_bytes(fields: RowFields) -> int:
    return sum(dtype.itemsize * prod(shape) for dtype, shape in fields.values())


def read_rows(source: Source, index: Tensor, out: dict[str, Tensor]) -> None:
    """Read the rows named by index, in its order; neighbours are read together.

    index  (N,)  int64  rows of the source, on the host
    """
    if len(index) == 0:
        return
    start, num = int(index[0]), len(index)
    if num == 1 or (int(index[-1]) - start == num - 1 and bool((index.diff() == 1).all())):
        source.read(start, start + num, out)
        return
    fields = {name: source.fields[name] for name in out}
    wanted, place = index.sort()
    reach = max(1, _SPAN_BYTES // max(1, row_bytes(fields)))
    cuts = (torch.nonzero(wanted.diff() > reach).flatten() + 1).tolist()
    for low, high in zip([0, *cuts], [*cuts, num], strict=True):
        first, last = int(wanted[low]), int(wanted[high - 1])
        with guard():
            rows = allocate(fields, last + 1 - first)
        source.read(first, last + 1, rows)
        for name, tensor in rows.items():
            _bytes(out[name])[place[low:high].numpy()] = _bytes(tensor)[(wanted[low:high] - first).numpy()]


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Rows as bytes, (N, bytes of a row): NumPy moves any dtype this way, torch does not."""
    return tensor.view(len(tensor), prod(tensor.shape[1:])).view(torch.uint8).numpy()


class TensorSource:
    """Tensors already in memory, all with the same leading length."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str] | None = None) -> None:
        chosen = choose(tensors, names, "these tensors")
        for name, tensor in chosen.items():
            first_name, first = next(iter(chosen.items()))
            if tensor.ndim < 1 or len(tensor) != len(first):
                raise DatasetError(
                    f'tensor "{name}" has shape {list(tensor.shape)}, "{first_name}" has {list(first.shape)}; '
                    "the first axis is the items and must be equally long"
                )
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in chosen.items()}
        self.fields: RowFields = {
            name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in self.tensors.items()
        }
        self.num_items = len(next(iter(self.tensors.values())))
        self.description = f"{self.num_items} items in memory"
        check_some(self.num_items, self.fields, "these tensors")

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        for name, target in out.items():
            target.copy_(self.tensors[name][start:stop])


class SideBySide:
    """The fields of several sources of equally many rows."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources, self.num_items = sources, sources[0].num_items
        counts = [source.num_items for source in sources]
        if len(set(counts)) > 1:
            raise DatasetError(f"sources side by side have {', '.join(map(str, counts))} items, expected equally many")
        self.fields: RowFields = {name: field for source in sources for name, field in source.fields.items()}
        self.description = ", beside ".join(source.description for source in sources)

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        for source in self.sources:
            part = {name: tensor for name, tensor in out.items() if name in source.fields}
            if part:
                source.read(start, stop, part)


def choose(known: Mapping[str, Any], names: Iterable[str] | None, where: str) -> dict[str, Any]:
    wanted = list(known) if names is None else list(names)
    for name in wanted:
        if name not in known:
            raise DatasetError(f'{where} has no field "{name}"', hint=f"it has {', '.join(known)}")
    if not wanted:
        raise DatasetError(f"{where}: no field left to read", hint="name at least one")
    return {name: known[name] for name in wanted}


def check_some(num_items: int, fields: RowFields, where: str) -> None:
    """Raise DatasetError when there are no rows, or a row has no values."""
    if num_items < 1:
        raise DatasetError(f"{where}: no items; nothing to train on")
    for name, (_, shape) in fields.items():
        if not prod(shape):
            raise DatasetError(
                f'{where}: a row of "{name}" has shape {list(shape)} and so no values', hint="leave it out"
            )


class RowSplit:
    """The rows of a source that are used, addressed by position 0 … N-1."""

    def __init__(self, source: Source, rows: slice | range | Sequence[int] | Tensor | None, *, sort: bool) -> None:
        """Check that all rows exist and there is at least one; sort them when asked to."""
        self.source = source
        num = source.num_items
        if rows is None:
            rows = slice(None)
        if isinstance(rows, slice):
            rows = range(*rows.indices(num))
        self._first = rows.start if isinstance(rows, range) and rows.step == 1 else None
        self._index = _as_index(rows, num)
        if not len(self._index):
            raise ConfigError(
                f"the split is empty: no rows chosen of {num}", hint="make the split or the dataset larger"
            )
        low, high = int(self._index.min()), int(self._index.max())
        if low < 0 or high >= num:
            raise ConfigError(f"rows={low if low < 0 else high} is not in the source, which has rows 0 to {num - 1}")
        if sort and self._first is None:
            self._index = self._index.sort().values

    @property
    def all(self) -> bool:
        """Whether this is the whole source, in order."""
        return self._first == 0 and len(self) == self.source.num_items

    def __len__(self) -> int:
        return len(self._index)

    def index(self, positions: Tensor) -> Tensor:
        """Rows of the source at these positions."""
        return self._index[positions]

    def sorted(self) -> "RowSplit":
        """The same rows in the order of the source."""
        return RowSplit(self.source, self._index, sort=True) if self._first is None else self

    def every(self, step: int, first: int) -> "RowSplit":
        """Positions first, first + step, first + 2·step, …"""
        return self if step == 1 else RowSplit(self.source, self._index[first::step], sort=False)

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        """Read the rows at positions start to stop."""
        if self._first is not None:
            self.source.read(self._first + start, self._first + stop, out)
        else:
            read_rows(self.source, self._index[start:stop], out)


def _as_index(rows: range | Sequence[int] | Tensor, num: int) -> Tensor:
    if isinstance(rows, range):
        return torch.arange(rows.start, rows.stop, rows.step)
    index = torch.as_tensor(rows, device=HOST)
    if index.dtype == torch.bool and tuple(index.shape) == (num,):
        return torch.nonzero(index).flatten()
    if index.ndim != 1 or index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        if index.numel() == 0:
            return torch.empty(0, dtype=torch.int64)
        raise ConfigError(f"rows has {index.dtype} {list(index.shape)}, expected row numbers or a mask of {num}")
    return index.to(torch.int64)

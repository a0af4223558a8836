"""What a source of rows is, how rows are picked from one, and the plainest one: tensors in memory.

A source says what a row holds and reads any range of rows in bulk into memory that its caller owns, from several
threads at once. It keeps nothing on a device and chooses no order.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from brim.engine.device.memory import guard
from brim.engine.storage.dataset import Fields, allocate
from brim.errors import DatasetError

_SPAN_BYTES = 64 * 1024  # skipping less than this costs more than reading it


class Source(Protocol):
    """Rows that can be read in bulk."""

    @property
    def num_items(self) -> int:
        """Rows in all."""

    @property
    def fields(self) -> Fields:
        """Name → (dtype, shape of one row)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory."""

    @property
    def blocks(self) -> Sequence[int]:
        """Rows where the storage starts a new piece, then num_items; just (0, num_items) when it is in one."""

    @property
    def description(self) -> str:
        """What it is, for a person."""

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        """Read the rows from start to stop of the fields in out, whose tensors hold just so many rows."""


def row_bytes(fields: Fields) -> int:
    """Bytes of one row."""
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
    """Rows as bytes, (N, bytes of a row): NumPy moves any dtype so, torch not all of them."""
    return tensor.view(len(tensor), prod(tensor.shape[1:])).view(torch.uint8).numpy()


class TensorSource:
    """Tensors already in memory, all with the same leading length."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str] | None = None) -> None:
        """Store, without a copy where the tensors are contiguous."""
        chosen = choose(tensors, names, "these tensors")
        for name, tensor in chosen.items():
            first_name, first = next(iter(chosen.items()))
            if tensor.ndim < 1 or len(tensor) != len(first):
                raise DatasetError(
                    f'tensor "{name}" has shape {list(tensor.shape)}, "{first_name}" has {list(first.shape)}; '
                    "the first axis is the items and must be equally long"
                )
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in chosen.items()}
        self.fields: Fields = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in self.tensors.items()}
        self.num_items = len(next(iter(self.tensors.values())))
        self.nbytes = self.num_items * row_bytes(self.fields)
        self.blocks: Sequence[int] = (0, self.num_items)
        self.description = f"{self.num_items} items in memory"
        check_some(self.num_items, self.fields, "these tensors")

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        """Copy the rows."""
        for name, target in out.items():
            target.copy_(self.tensors[name][start:stop])


def choose(known: Mapping[str, Any], names: Iterable[str] | None, where: str) -> dict[str, Any]:
    """The named part, by default all of it."""
    wanted = list(known) if names is None else list(names)
    for name in wanted:
        if name not in known:
            raise DatasetError(f'{where} has no field "{name}"; it has {", ".join(known)}')
    if not wanted:
        raise DatasetError(f"{where}: no field left to read; name at least one")
    return {name: known[name] for name in wanted}


def check_some(num_items: int, fields: Fields, where: str) -> None:
    """Raise DatasetError when there are no rows, or a row has no values."""
    if num_items < 1:
        raise DatasetError(f"{where}: no items; nothing to train on")
    for name, (_, shape) in fields.items():
        if not prod(shape):
            raise DatasetError(f'{where}: a row of "{name}" has shape {list(shape)} and so no values; leave it out')

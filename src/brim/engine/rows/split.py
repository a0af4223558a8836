"""A split: which rows of a source are used, read by their position in it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from brim.engine.rows.files import Source, read_rows
from brim.engine.rows.order import HOST
from brim.engine.storage.dataset import Fields
from brim.errors import ConfigError


class Rows:
    """Which rows of the source are used; position 0 … N-1 → row."""

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
            raise ConfigError(f"the split is empty: no rows chosen of {num}; make the split or the dataset larger")
        low, high = int(self._index.min()), int(self._index.max())
        if low < 0 or high >= num:
            raise ConfigError(f"rows={low if low < 0 else high} is not in the source, which has rows 0 to {num - 1}")
        if sort and self._first is None:
            self._index = self._index.sort().values

    @property
    def all(self) -> bool:
        """Whether it is the whole source, in order."""
        return self._first == 0 and len(self) == self.source.num_items

    def __len__(self) -> int:
        """Rows in the split."""
        return len(self._index)

    def index(self, positions: Tensor) -> Tensor:
        """Rows of the source at these positions."""
        return self._index[positions]

    def sorted(self) -> "Rows":
        """The same rows in the order of the source."""
        return Rows(self.source, self._index, sort=True) if self._first is None else self

    def every(self, step: int, first: int) -> "Rows":
        """Every step-th of them, from one of the first on."""
        return self if step == 1 else Rows(self.source, self._index[first::step], sort=False)

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


def chosen_fields(fields: Fields, names: Sequence[str] | None) -> Fields:
    """The named fields, by default all."""
    for name in names or ():
        if name not in fields:
            raise ConfigError(f'the source has no field "{name}"; it has {", ".join(fields)}')
    return {name: fields[name] for name in (fields if names is None else names)}

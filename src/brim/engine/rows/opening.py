"""Anything that holds rows → a source of rows, and the form its batches take: dicts, tuples or single tensors.

dict, pandas, Arrow, Hugging Face dataset, files    named columns; batches are dicts
(X, y), a TensorDataset                             batches are tuples, as they went in
any map-style Dataset                               what its items are: dicts, tuples or single tensors
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from brim.engine.rows.columns import (
    arrow_columns,
    arrow_tensor,
    frame_columns,
    from_array,
    need_arrow,
    to_columns,
    to_tensor,
)
from brim.engine.rows.files import DatasetSource, NpyFolderSource
from brim.engine.rows.source import Source, TensorSource, check_some
from brim.engine.storage import MANIFEST, RowFields, is_url
from brim.engine.training import Batch
from brim.errors import BrimError, ConfigError, DatasetError, StorageError, with_article

Form = Literal["dict", "tuple", "single"]
_ACCEPTED = (
    "give a dict of arrays, a tuple (X, y), a Dataset, a table, the path of a dataset, of a folder of .npy or of a "
    ".safetensors file, or brim.sql(url, query)"
)
_DATABASES = ("postgresql://", "postgres://", "sqlite://")


def open_rows(data: Any) -> tuple[Source, Form]:
    """The source behind data, and the form of its batches; an error for other types says what to give instead."""
    if isinstance(data, str | Path):
        return open_path(data), "dict"
    if all(hasattr(data, name) for name in ("num_items", "fields", "read", "description")):
        return data, "dict"
    if isinstance(data, Tensor | np.ndarray):
        return TensorSource(to_columns({"0": data})), "single"
    if _is_huggingface(data):
        return _arrow_source(data.with_format("arrow")[:]), "dict"
    if isinstance(data, Mapping):
        return TensorSource(to_columns(data)), "dict"
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return TensorSource(to_columns(frame_columns(data))), "dict"
    if hasattr(data, "num_rows") and hasattr(data, "schema"):
        return _arrow_source(data), "dict"
    if callable(getattr(data, "to_arrow", None)):  # Polars and others
        return _arrow_source(data.to_arrow()), "dict"
    if isinstance(data, torch.utils.data.TensorDataset):
        return _tuple_source(data.tensors), "tuple"
    if isinstance(data, torch.utils.data.Subset) and isinstance(data.dataset, torch.utils.data.TensorDataset):
        index = torch.as_tensor(list(data.indices), dtype=torch.int64)
        return _tuple_source([tensor[index.to(tensor.device)] for tensor in data.dataset.tensors]), "tuple"
    if isinstance(data, tuple):
        return _tuple_source(data), "tuple"
    _refuse(data)
    source = MapSource(data)
    return source, source.form


def as_given(batch: Batch, form: Form) -> Any:
    """A batch in the form in which the data went in."""
    if form == "dict":
        return batch
    values = tuple(batch.values())
    return values if form == "tuple" else values[0]


def _tuple_source(parts: Sequence[Any]) -> TensorSource:
    return TensorSource(to_columns({str(position): part for position, part in enumerate(parts)}))


def _is_huggingface(data: Any) -> bool:
    return callable(getattr(data, "with_format", None)) and hasattr(data, "column_names") and hasattr(data, "__len__")


def _arrow_source(table: Any) -> TensorSource:
    if not hasattr(table, "column_names"):  # a record batch of an older Arrow
        table = need_arrow("an Arrow table").Table.from_batches([table])
    columns = {name: _chunked(column) for name, column in arrow_columns(table).items()}
    return TensorSource({name: arrow_tensor(name, column) for name, column in columns.items()})


def _chunked(column: Any) -> Any:
    """A column of a table; that of a record batch is one chunk."""
    return column if hasattr(column, "chunks") else need_arrow("an Arrow table").chunked_array([column])


def _refuse(data: Any) -> None:
    """Raise what is wrong with data that has no rows which can be read by number."""
    given = with_article(data)
    if isinstance(data, torch.utils.data.DataLoader):
        raise ConfigError(f"{given} makes batches of its own", hint="give what it reads: loader.dataset")
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__getitem__"):
        raise ConfigError(f"{given} has no rows that can be read by number", field="data", hint=_ACCEPTED)
    try:
        len(data)
    except Exception as failure:
        raise ConfigError(f"{given} has no length ({failure})", field="data", hint=_ACCEPTED) from failure


# Paths


def open_path(path: str | Path) -> Source:
    """Rows of a file, a folder or a URL, by what it is."""
    text = str(path)
    if text.startswith(_DATABASES):
        raise ConfigError(
            "a database needs a query", field="query", code="missing", hint="give {query}, as in brim.sql(url, query)"
        )
    if is_url(text):
        return DatasetSource(text)
    here = Path(path)
    if not here.exists():
        raise DatasetError(f"{here} does not exist", code="missing", hint="check the path")
    if here.is_dir():
        if (here / MANIFEST).exists():
            return DatasetSource(here)
        if any(here.glob("*.npy")):
            return NpyFolderSource(here)
        raise DatasetError(f"{here} holds neither a {MANIFEST} nor .npy files", code="empty", hint=_ACCEPTED)
    read = _FILES.get(here.suffix.lower())
    if read is None:
        raise DatasetError(
            f"{here} is a {here.suffix or 'file without an extension'}, which has no rows that can be read",
            code="unsupported",
            hint=f"give one of {', '.join(_FILES)}, or a folder",
        )
    try:
        source = TensorSource(read(here))
    except BrimError as failure:
        raise type(failure)(f"{here}: {failure.message}", code=failure.code, hint=failure.hint) from failure
    except OSError as failure:
        raise StorageError(f"{here} cannot be read: {failure.strerror or failure}") from failure
    source.description = f"{source.num_items} rows of {here}"
    return source


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return to_columns(load_file(file))
    except SafetensorError as failure:
        raise DatasetError(f"is no safetensors file ({failure})", code="damaged") from failure


def _read_npy(file: Path) -> dict[str, Tensor]:
    try:
        return to_columns({file.stem: np.load(file, allow_pickle=False)})
    except ValueError as failure:
        raise DatasetError(
            f"holds no plain array ({str(failure).splitlines()[0]})", code="objects", hint="Python objects are not read"
        ) from failure


def _read_npz(file: Path) -> dict[str, Tensor]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return to_columns({name: from_array(name, arrays[name]) for name in arrays.files})
    except (ValueError, EOFError) as failure:
        raise DatasetError(
            f"holds no plain arrays ({str(failure).splitlines()[0]})",
            code="objects",
            hint="Python objects are not read",
        ) from failure


def _read_table(file: Path) -> dict[str, Tensor]:
    arrow = need_arrow(str(file))
    try:
        if file.suffix.lower() == ".csv":
            from pyarrow import csv

            table = csv.read_csv(file)
        else:
            from pyarrow import parquet

            table = parquet.read_table(file)
    except arrow.ArrowException as failure:
        raise DatasetError(
            f"is no table that can be read ({str(failure).splitlines()[0]})", code="damaged"
        ) from failure
    return to_columns({name: arrow_tensor(name, column) for name, column in arrow_columns(table).items()})


_FILES: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".parquet": _read_table,
    ".csv": _read_table,
}


# Map-style datasets


class MapSource:
    """Rows of any object with a length and items by number; each item is read once for every load of the data.

    Random changes that a dataset makes to its items are therefore made once, not in every epoch: make them in the
    training's transform, on the device.
    """

    def __init__(self, dataset: Any) -> None:
        """Read the first item, which decides the fields."""
        self.dataset = dataset
        self.num_items = len(dataset)
        self._what = type(dataset).__name__
        check_some(self.num_items, {}, f"the {self._what}")
        first, self.form = self._item(0)
        self.fields: RowFields = {name: (value.dtype, tuple(value.shape)) for name, value in first.items()}
        check_some(self.num_items, self.fields, f"the {self._what}")
        self.description = f"{self.num_items} items of a {self._what}"
        self._lock = threading.Lock()  # datasets are rarely safe to read from several threads

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        with self._lock:
            for row in range(start, stop):
                item, _ = self._item(row)
                self._check(row, item)
                for name, target in out.items():
                    target[row - start] = item[name]

    def _item(self, row: int) -> tuple[dict[str, Tensor], Form]:
        try:
            item = self.dataset[row]
        except Exception as failure:  # the dataset is the user's own code
            raise DatasetError(
                f"item {row} of the {self._what} cannot be read ({type(failure).__name__}: {failure})",
                hint="its items must be readable by number, from 0 on",
            ) from failure
        if isinstance(item, Mapping):
            return {str(name): to_tensor(str(name), value) for name, value in item.items()}, "dict"
        if isinstance(item, tuple | list) and not all(isinstance(value, int | float) for value in item):
            return {str(place): to_tensor(str(place), value) for place, value in enumerate(item)}, "tuple"
        if isinstance(item, tuple):
            return {str(place): torch.as_tensor(value) for place, value in enumerate(item)}, "tuple"
        return {"0": to_tensor("0", item)}, "single"

    def _check(self, row: int, item: Mapping[str, Tensor]) -> None:
        if item.keys() != self.fields.keys():
            raise DatasetError(
                f"item {row} of the {self._what} has {', '.join(item)}; item 0 has {', '.join(self.fields)}",
                code="ragged",
            )
        for name, value in item.items():
            dtype, shape = self.fields[name]
            if tuple(value.shape) != shape:
                raise DatasetError(
                    f'"{name}" has shape {list(value.shape)} in item {row} of the {self._what} and {list(shape)} in '
                    "item 0",
                    code="ragged",
                    hint="all items need one shape: pad or cut them; columns are given as a dict or a tuple",
                )
            if value.dtype != dtype and not torch.can_cast(value.dtype, dtype):
                raise DatasetError(
                    f'"{name}" is {value.dtype} in item {row} of the {self._what} and {dtype} in item 0', code="ragged"
                )

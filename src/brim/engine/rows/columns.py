"""Columns as people have them (tensors, NumPy, lists, pandas, Arrow) → tensors with one row per item.

Values that are not numbers, or have no common shape, raise DatasetError with the column's name. Columns on several
devices, or of different lengths, are found here too, before anything is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from brim.errors import ConfigError, DatasetError, with_article

_NUMBERS = "biufc"  # kinds of NumPy dtypes that torch has
_PLAIN = "give numbers, such as a tensor, a NumPy array or a list of equally long lists"


def to_columns(columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of all columns, on the device they are on, equally long."""
    tensors = {str(name): to_tensor(str(name), values) for name, values in columns.items()}
    if not tensors:
        raise DatasetError("there is no column", hint='give at least one, as in {"x": X, "y": y}')
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.ndim < 1:
            raise DatasetError(f'column "{name}" is a single number', hint="the first axis must be the rows")
        if tensor.device != first.device:
            raise DatasetError(
                f'column "{name}" is on {tensor.device}, "{first_name}" is on {first.device}',
                code="devices",
                hint="move them to one device",
            )
        if len(tensor) != len(first):
            raise DatasetError(
                f'column "{name}" has {len(tensor)} rows, "{first_name}" has {len(first)}',
                code="ragged",
                hint="the first axis is the rows, and must be equally long",
            )
    if first.device.type == "meta":
        raise DatasetError(f'column "{first_name}" is on the meta device and has no values', hint="give real tensors")
    return tensors


def to_tensor(name: str, values: Any) -> Tensor:
    """One column, or one value of it, as a tensor; shares memory where it can."""
    if isinstance(values, Tensor):
        if values.is_quantized:
            raise DatasetError(f'column "{name}" is quantised', hint="give numbers, with .dequantize()")
        if values.layout != torch.strided or values.is_nested:
            raise DatasetError(f'column "{name}" is a {values.layout} tensor', hint="make it dense, with .to_dense()")
        return values.detach()
    if isinstance(values, Mapping) or callable(getattr(values, "with_format", None)):
        raise DatasetError(
            f'column "{name}" is {with_article(values)}, not an array',
            hint=f'if it is one of several splits, give that split: data["{name}"]',
        )
    if hasattr(values, "chunks") and hasattr(values, "type"):
        return arrow_tensor(name, values)
    try:
        array = np.asarray(values)
    except Exception as failure:
        raise _inhomogeneous(name, values, failure) from failure
    return from_array(name, array)


def from_array(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind == "O":
        array = _stacked(name, array)
    if array.dtype.kind not in _NUMBERS:
        raise DatasetError(
            f'column "{name}" holds {_say_kind(array.dtype)}, not numbers',
            code="not_numbers",
            hint="leave it out, or turn it into numbers",
        )
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if array.ndim == 0:
        native = native.reshape(())
    try:
        return torch.from_numpy(native if native.flags.writeable else native.copy())
    except TypeError as failure:
        raise DatasetError(f'column "{name}" is {array.dtype}, which torch does not have', hint="cast it") from failure


def _stacked(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An object array whose elements are numbers or equally shaped arrays, as one array."""
    if not array.size:
        return array.astype(np.float32)
    parts = [np.asarray(value) for value in array.ravel()]
    for row, part in enumerate(parts):
        if part.dtype.kind not in _NUMBERS:
            shown = type(array.ravel()[row]).__name__
            raise DatasetError(
                f'column "{name}" is an array of Python objects: {shown} in row {row}, counted from 0',
                code="objects",
                hint=_PLAIN,
            )
        if part.shape != parts[0].shape:
            raise _ragged(name, row, part.shape, parts[0].shape)
    return np.stack(parts).reshape(*array.shape, *parts[0].shape)


def _inhomogeneous(name: str, values: Any, failure: Exception) -> DatasetError:
    shapes = [np.shape(value) for value in values] if isinstance(values, Sequence) and not _nested(values) else []
    row = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
    if row is not None:
        return _ragged(name, row, shapes[row], shapes[0])
    return DatasetError(
        f'column "{name}" is {with_article(values)} that makes no array ({str(failure).splitlines()[0]})',
        code="ragged",
        hint=_PLAIN,
    )


def _nested(values: Sequence[Any]) -> bool:
    """Whether not even the shapes of the elements can be had."""
    try:
        [np.shape(value) for value in values]
    except ValueError:
        return True
    return False


def _ragged(name: str, row: int, shape: Any, first: Any) -> DatasetError:
    return DatasetError(
        f'column "{name}" has shape {list(shape)} in row {row}, counted from 0, and {list(first)} in row 0',
        code="ragged",
        hint="all rows need one shape: pad or cut them",
    )


def _say_kind(dtype: np.dtype[Any]) -> str:
    return {"U": "text", "S": "bytes", "T": "text", "M": "dates", "m": "durations", "V": "records"}.get(
        dtype.kind, str(dtype)
    )


# pandas and Arrow


def frame_columns(frame: Any) -> dict[str, Any]:
    """Columns of a pandas DataFrame as NumPy arrays."""
    names = [str(name) for name in frame.columns]
    for name in names:
        if names.count(name) > 1:
            raise DatasetError(f'the table has two columns "{name}"', hint="rename one")
    columns = {}
    for position, name in enumerate(names):
        series = frame.iloc[:, position]
        if bool(series.isna().any()) and not (hasattr(series.dtype, "kind") and series.dtype.kind == "f"):
            row = int(np.nonzero(series.isna().to_numpy())[0][0])
            raise DatasetError(
                f'column "{name}" is empty in row {row}, counted from 0', hint="drop such rows or fill them"
            )
        if isinstance(series.dtype, np.dtype):
            columns[name] = series.to_numpy()
        else:  # pandas' own dtypes: nullable numbers become NumPy's, categories and text stay objects
            kind = getattr(series.dtype, "numpy_dtype", None)
            columns[name] = series.to_numpy(dtype=kind if isinstance(kind, np.dtype) else None)
    return columns


def arrow_columns(table: Any) -> dict[str, Any]:
    """Columns of an Arrow table by name."""
    names = list(table.column_names)
    for name in names:
        if names.count(name) > 1:
            raise DatasetError(f'the table has two columns "{name}"', hint="rename one")
    if not table.num_rows:
        raise DatasetError("the table has no rows; nothing to train on")
    return {name: table.column(position) for position, name in enumerate(names)}


def arrow_tensor(name: str, column: Any, *, cast: str = "leave it out, or cast it to a number") -> Tensor:
    """A column of an Arrow table as a tensor; lists of equal length become an axis."""
    out: Tensor | None = None
    row = 0
    for chunk in column.chunks:
        if not len(chunk):
            continue
        values = torch.from_numpy(_to_numpy(name, chunk, row, 1, cast))
        if out is None:
            out = torch.empty((len(column), *values.shape[1:]), dtype=values.dtype)
        if out.shape[1:] != values.shape[1:]:
            _odd_list(name, row)
        out[row : row + len(chunk)] = values
        row += len(chunk)
    if out is None:
        raise DatasetError(f'column "{name}" has no rows; nothing to train on')
    return out


def _to_numpy(name: str, array: Any, row: int, per_row: int, cast: str) -> np.ndarray[Any, Any]:
    """Values of an Arrow array whose first value belongs to this row, per_row values to each."""
    from pyarrow import types

    kind = array.type
    if hasattr(array, "storage") and types.is_nested(array.storage.type):  # a tensor type: lists underneath
        return _to_numpy(name, array.storage, row, per_row, cast)
    if array.null_count:
        null = int(np.nonzero(array.is_null().to_numpy(zero_copy_only=False))[0][0])
        fault = f'column "{name}" is null in row {row + null // per_row}'
        raise DatasetError(f"{fault}, counted from 0", hint="leave such rows out or fill them, as COALESCE does")
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        width = int(lengths[0])
        odd = np.nonzero(lengths != width)[0]
        if len(odd) or not width:
            _odd_list(name, row + (int(odd[0]) // per_row if len(odd) else 0))
        values = _to_numpy(name, array.flatten(), row, per_row * width, cast)
        return values.reshape(len(array), width, *values.shape[1:])
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        fault = f'column "{name}" is {getattr(kind, "type_name", kind)} from row {row} on'
        raise DatasetError(f"{fault}, not a number", code="not_numbers", hint=cast)
    return np.array(array.to_numpy(zero_copy_only=False))  # a copy: Arrow's memory is read-only


def _odd_list(name: str, row: int) -> NoReturn:
    raise DatasetError(
        f'column "{name}" has a list of another length, or an empty one, in row {row}, counted from 0; '
        "all rows need equally many values",
        code="ragged",
    )


def need_arrow(what: str) -> Any:
    """pyarrow, or the sentence that says how to get it."""
    try:
        import pyarrow
    except ImportError as failure:
        raise ConfigError(f"pyarrow is missing to read {what}", hint="pip install 'brim[export]'") from failure
    return pyarrow

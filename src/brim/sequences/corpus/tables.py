"""Sequences in .npz, .csv and .parquet files: one in a file, or many.

.npz      arrays (T, D), one sequence each; or X (N, T, D) with y, speaker, … (N,), as a whole or as X_train and X_test
.csv      a line per frame, features in columns; with a column of ids, all lines of an id are a sequence
.parquet  the same

In a table, columns of text, and those with names such as label, split or speaker, describe the sequence and are the
same in all its lines. A column of times orders the frames and is no feature.
"""

# Axes: N sequences, T frames, D features

import io
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brim.engine.rows import read_npy_header
from brim.errors import ConfigError, DatasetError
from brim.sequences.corpus.source import Frames

ID_COLUMNS = (
    "id",
    "sequence",
    "sequence_id",
    "series",
    "series_id",
    "case",
    "case_id",
    "sample_id",
    "recording",
    "uid",
)
TIME_COLUMNS = ("time", "t", "timestamp", "frame", "step", "time_s", "time_ms", "seconds", "datetime")
LABEL_COLUMNS = ("label", "class", "target")
ABOUT_COLUMNS = (
    *LABEL_COLUMNS, "split", "fold", "speaker", "subject", "participant", "group", "session", "user", "patient",
)  # fmt: skip

_MAX_BYTES = 2**36  # of an array in an .npz file, as its header says
_STACKS = ("x", "data", "features", "frames")


class TableSequence(NamedTuple):
    name: str  # within the file; empty if it is the only one
    frames: Frames | str  # (T, D), or the fault
    about: dict[str, str]  # label, split, speaker …


# .npz


def read_npz(file: Path | io.BytesIO, name: str) -> list[TableSequence]:
    """All sequences of an .npz file; nothing is unpickled."""
    arrays: dict[str, Frames] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".npy"):
                    arrays[entry.filename.removesuffix(".npy")] = _read_member(archive, entry, name)
    except (
        OSError,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,
        zlib.error,
    ) as failure:
        raise DatasetError(
            f"{name} is not a readable .npz file ({failure}); save it again with numpy.savez"
        ) from failure
    if not arrays:
        raise DatasetError(f"{name} holds no array; save sequences with numpy.savez")
    stacks = {key: array for key, array in arrays.items() if array.ndim == 3}
    if stacks:
        return [one for key, stack in stacks.items() for one in _unstack(key, stack, arrays, len(stacks) > 1)]
    flat = {key: array for key, array in arrays.items() if array.ndim == 2}
    if not flat:
        shapes = ", ".join(f"{key} {list(array.shape)}" for key, array in list(arrays.items())[:4])
        raise DatasetError(f"{name} holds no array of frames, only {shapes}; give arrays [frames, features]")
    scalars = {key: str(array.reshape(-1)[0]) for key, array in arrays.items() if array.ndim < 2 and array.size == 1}
    return [TableSequence(key if len(flat) > 1 else "", array, scalars) for key, array in flat.items()]


def _read_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> Frames:
    """An array of numbers or text; a header that promises more than the archive says is rejected before reading."""
    if entry.file_size > _MAX_BYTES:
        raise DatasetError(f"{name}: {entry.filename} is larger than 64 GiB; split it up")
    with archive.open(entry) as opened:
        version = np.lib.format.read_magic(opened)
        try:
            shape, fortran, dtype = read_npy_header(opened, version)
        except Exception as failure:  # the header is a Python literal; its parser raises anything
            raise DatasetError(f"{name}: {entry.filename} is not an array ({failure})") from failure
        if dtype.hasobject or dtype.kind not in "fiubU":
            raise DatasetError(f"{name}: {entry.filename} holds {dtype}; expected numbers or text, no Python objects")
        count = 1
        for side in shape:
            count *= int(side)
        if count * dtype.itemsize > entry.file_size:
            raise DatasetError(f"{name}: {entry.filename} is truncated; save it again with numpy.savez")
        data = opened.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
        raise DatasetError(f"{name}: {entry.filename} is truncated; save it again with numpy.savez")
    array: Frames = np.frombuffer(bytearray(data), dtype, count).reshape(shape, order="F" if fortran else "C")
    return array


def _unstack(key: str, stack: Frames, arrays: dict[str, Frames], several: bool) -> Iterable[TableSequence]:
    """The sequences of X (N, T, D), or of X_train, with the arrays (N,) that belong to it."""
    start, _, part = key.lower().partition("_")
    split = {"train": "train", "test": "test", "val": "validation", "valid": "validation"}.get(part, "")
    lengths = None
    about: dict[str, list[str]] = {}
    for other, values in arrays.items():
        other_start, _, other_part = other.lower().partition("_")
        if values.ndim != 1 or len(values) != len(stack) or (several and other_part != part):
            continue
        if (other_start if several else other.lower()) in ("lengths", "length"):
            lengths = values
            continue
        column = other_start if several or split else other.lower()
        about["label" if column in (*LABEL_COLUMNS, "y", "labels", "classes") else column.rstrip("s")] = [
            str(value) for value in values.tolist()
        ]
    if start not in _STACKS and not about:
        split = ""
    for row, frames in enumerate(stack):
        values_of = {column: values[row] for column, values in about.items()} | ({"split": split} if split else {})
        cut = frames if lengths is None else frames[: int(lengths[row])]
        yield TableSequence(f"{key}/{row:06d}" if several else f"{row:06d}", cut, values_of)


# Tables


def read_table(
    file: Path | bytes, name: str, suffix: str, id_column: str | None = None, time_column: str | None = None
) -> list[TableSequence]:
    """The sequences of a .csv or .parquet file."""
    columns = _read_columns(file, name, suffix)
    lower = {column.lower(): column for column in columns}
    keys = [_named(column, lower, name, field) for column, field in ((id_column, "id"), (time_column, "time"))]
    id_of = keys[0] or next((lower[known] for known in ID_COLUMNS if known in lower), None)
    time_of = keys[1] or next((lower[known] for known in TIME_COLUMNS if known in lower), None)
    features = [
        column
        for column, values in columns.items()
        if column not in (id_of, time_of) and values.dtype.kind in "fiub" and column.lower() not in ABOUT_COLUMNS
    ]
    if not features:
        raise DatasetError(f"{name} has no column of numbers besides ids and labels; give a column per feature")
    about = [column for column in columns if column not in (id_of, time_of, *features)]
    num_rows = len(columns[features[0]])
    if not num_rows:
        raise DatasetError(f"{name} has no lines; give a line per frame")
    frames = np.stack([columns[column].astype(np.float64) for column in features], 1)
    if id_of is None:
        return [_sequence("", frames, columns, about, time_of, np.arange(num_rows))]
    ids, numbers = np.unique(columns[id_of].astype(str), return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(len(ids) + 1))
    return [
        _sequence(str(one), frames, columns, about, time_of, order[bounds[number] : bounds[number + 1]])
        for number, one in enumerate(ids)
    ]


def _sequence(
    name: str, frames: Frames, columns: dict[str, Frames], about: list[str], time_of: str | None, rows: Frames
) -> TableSequence:
    if time_of is not None:
        times = columns[time_of][rows]
        rows = rows[np.argsort(times, kind="stable")]
    values: dict[str, str] = {}
    for column in about:
        known = {str(value) for value in columns[column][rows].tolist()}
        if len(known) > 1:
            shown = ", ".join(sorted(known)[:2])
            return TableSequence(
                name, f"has several values in the column {column}, such as {shown}; one is expected", {}
            )
        values["label" if column.lower() in LABEL_COLUMNS else column.lower()] = known.pop()
    return TableSequence(name, frames[rows], values)


def _named(column: str | None, lower: dict[str, str], name: str, field: str) -> str | None:
    if column is None:
        return None
    if column.lower() not in lower:
        raise ConfigError(f"{name} has no column {column!r}; its columns are {', '.join(lower.values())}", field=field)
    return lower[column.lower()]


def _read_columns(file: Path | bytes, name: str, suffix: str) -> dict[str, Frames]:
    """The columns as arrays of numbers or text."""
    try:
        import pyarrow
        from pyarrow import csv, parquet
    except ModuleNotFoundError as failure:
        raise ConfigError(f"pyarrow is not installed; {name} needs: pip install 'brim[export]'") from failure
    try:
        if suffix == ".parquet":
            table = parquet.read_table(pyarrow.BufferReader(file) if isinstance(file, bytes) else file)
        else:
            table = csv.read_csv(pyarrow.BufferReader(file) if isinstance(file, bytes) else file, **_csv_options(file))
        return _to_arrays(table)
    except (pyarrow.ArrowException, OSError, ValueError) as failure:
        words = str(failure).splitlines()[0][:200] if str(failure) else type(failure).__name__
        raise DatasetError(f"{name} is not a readable {suffix} file ({words})", hint="save it again") from failure


def _to_arrays(table: Any) -> dict[str, Frames]:
    """Numbers as they are or, with gaps, as floats; anything else as text."""
    from pyarrow import float64, types

    columns: dict[str, Frames] = {}
    for column, values in zip(table.column_names, table.columns, strict=True):
        kind = values.type
        if types.is_integer(kind) and not values.null_count:
            columns[column] = values.to_numpy()
        elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            columns[column] = values.cast(float64()).to_numpy()
        else:
            columns[column] = np.array(["" if value is None else str(value) for value in values.to_pylist()])
    return columns


def _csv_options(file: Path | bytes) -> dict[str, Any]:
    """Delimiter, and whether the first line names the columns."""
    from pyarrow import csv

    if isinstance(file, bytes):
        first = file.split(b"\n", 1)[0][:65536]
    else:
        with file.open("rb") as opened:
            first = opened.readline(65536)
    text = first.decode("utf-8-sig", "replace").strip()
    delimiter = max(",;\t", key=text.count)
    is_header = not all(_is_number(cell) for cell in text.split(delimiter))
    return {
        "read_options": csv.ReadOptions(autogenerate_column_names=not is_header, use_threads=False),
        "parse_options": csv.ParseOptions(delimiter=delimiter),
    }


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

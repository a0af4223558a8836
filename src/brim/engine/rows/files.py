"""Sources of rows in files: brim datasets and folders of .npy."""

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from io import RawIOBase
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from brim.engine.rows.npy import VERSIONS, read_npy_header
from brim.engine.rows.source import check_some, choose, row_bytes
from brim.engine.storage import Dataset, RowFields, ShardPath, Stored, corrupt, unreadable
from brim.errors import ConfigError, DatasetError, StorageError

# Shards of an object store kept in memory: readers take neighbouring rows, and one request per read would be slow.
_KEPT = 4
_DESCRIBING = ("kind", "features", "truth")  # keys of a manifest that describe the columns of its fields


# brim datasets


class DatasetSource:
    """One brim dataset, or several concatenated."""

    def __init__(self, paths: Path | str | Sequence[Path | str], names: Sequence[str] | None = None) -> None:
        """Read the manifests at once, so that a wrong path or a dataset that does not match fails here."""
        paths = [paths] if isinstance(paths, str | Path) else list(paths)
        if not paths:
            raise ConfigError("no dataset given", hint="name at least one directory")
        self.datasets = [Dataset(path) for path in paths]
        for dataset in self.datasets:
            check_some(len(dataset), dataset.fields, str(dataset.place))
            _check_alike(dataset, self.datasets[0])
        self.fields: RowFields = choose(self.datasets[0].fields, names, str(self.datasets[0].place))
        self._shards = [(dataset, index) for dataset in self.datasets for index in range(len(dataset.shards))]
        items = (dataset.shards[index].items for dataset, index in self._shards)
        self.blocks: Sequence[int] = [0, *accumulate(items)]
        self.num_items = int(self.blocks[-1])
        self.description = f"{self.num_items} items in {len(self._shards)} shards of " + ", ".join(map(str, paths))
        self._offsets: dict[int, dict[str, int]] = {}  # shard → field → where its bytes begin
        self._fetched: dict[int, Future[dict[str, Tensor]]] = {}  # shards of a store, the last used last
        self._lock = threading.Lock()
        self._is_verified = False

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        """Read straight into out: mapping a file costs a page fault for every 64 KiB, and an extra copy.

        The first read verifies all shards, at once: by themselves the readers would wait for one after the other.
        """
        with self._lock:
            if not self._is_verified:
                for dataset in self.datasets:
                    dataset.verify(again=False)
            self._is_verified = True
        shard = bisect_right(self.blocks, start) - 1
        while start < stop:
            first, end = self.blocks[shard], min(stop, self.blocks[shard + 1])
            self._read_shard(shard, start - first, {name: tensor[: end - start] for name, tensor in out.items()})
            out = {name: tensor[end - start :] for name, tensor in out.items()}
            start, shard = end, shard + 1

    def _read_shard(self, shard: int, row: int, out: dict[str, Tensor]) -> None:
        dataset, index = self._shards[shard]
        file = dataset.file(dataset.shards[index])
        if isinstance(file, Stored):
            for name, rows in self._fetch(shard, file).items():
                if name in out:
                    out[name].copy_(rows[row : row + len(out[name])])
            return
        offsets = self._offsets.get(shard)
        if offsets is None:
            spans = {name: span for name, span in dataset.header(index).items() if name in self.fields}
            self._check({name: (span.dtype, span.shape[1:]) for name, span in spans.items()}, file)
            offsets = self._offsets[shard] = {name: span.bytes[0] for name, span in spans.items()}
        try:
            with file.open("rb", buffering=0) as opened:
                for name, tensor in out.items():
                    offset = offsets[name] + row * row_bytes({name: self.fields[name]})
                    _read_into(opened, offset, tensor, partial(corrupt, file, "is shorter than its header says"))
        except OSError as failure:
            unreadable(file, failure)

    def _fetch(self, shard: int, file: Stored) -> dict[str, Tensor]:
        """The fields of a shard in an object store: fetched once for all threads, and kept for later reads."""
        with self._lock:
            rows = self._fetched.pop(shard, None)
            ours = rows is None
            if rows is None:
                rows = Future()
            self._fetched[shard] = rows
            for old in list(self._fetched)[:-_KEPT]:
                del self._fetched[old]
        if ours:
            dataset, index = self._shards[shard]
            try:
                fetched = dataset.shard(index, tuple(self.fields))
                self._check({name: (part.dtype, tuple(part.shape[1:])) for name, part in fetched.items()}, file)
                rows.set_result(fetched)
            except BaseException as failure:
                with self._lock:
                    self._fetched.pop(shard, None)
                rows.set_exception(failure)
        return rows.result()

    def _check(self, fields: RowFields, file: ShardPath) -> None:
        for name, expected in self.fields.items():
            actual = fields.get(name)
            if actual != expected:
                what = "missing" if actual is None else _say(actual)
                corrupt(file, f'"{name}" is {what}, in the first shard it is {_say(expected)}')


def _check_alike(dataset: Dataset, first: Dataset) -> None:
    """Raise DatasetError unless rows of both may stand in one batch."""
    if dataset is first:
        return
    where, fields, expected = f"{dataset.place} and {first.place}", dataset.fields, first.fields
    for name in sorted(fields.keys() ^ expected.keys()):
        owner = dataset if name in fields else first
        raise DatasetError(
            f'{where} differ: only {owner.place} has the field "{name}"', hint="choose names that both have"
        )
    for name, field in fields.items():
        if field != expected[name]:
            raise DatasetError(f'{where} differ: "{name}" is {_say(field)} and {_say(expected[name])}', hint=_APART)
    for key in _DESCRIBING:
        ours, theirs = dataset.manifest.get(key), first.manifest.get(key)
        if ours != theirs:
            raise DatasetError(f'{where} differ in "{key}": {_difference(ours, theirs)}', hint=_APART)


_APART = "train on them separately, or make them again with equal settings"


def _difference(ours: Any, theirs: Any) -> str:
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return f"{ours!r} and {theirs!r}"
    named = [[item.get("name", item) if isinstance(item, dict) else item for item in side] for side in (ours, theirs)]
    only = [", ".join(str(item) for item in named[i] if item not in named[1 - i]) or "nothing" for i in (0, 1)]
    if only == ["nothing", "nothing"]:
        return "another order or other units"
    return f"only the first has {only[0]}, only the second has {only[1]}"


# A folder of .npy


@dataclass(frozen=True, slots=True)
class _Npy:
    """The header of an .npy file."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    plain: bool  # C order and this machine's byte order: bytes can be read as they are
    offset: int  # of the first value


class NpyFolderSource:
    """A folder of .npy files: one array per field, equally long, or one array per item, all alike."""

    def __init__(
        self,
        path: Path | str,
        names: Sequence[str] | None = None,
        *,
        layout: Literal["auto", "items", "fields"] = "auto",
    ) -> None:
        """Check every header; no pickled objects are ever loaded. Layout "auto" decides by the headers."""
        self.path = Path(path)
        if not self.path.is_dir():
            raise DatasetError(f"{self.path} is not a directory", hint="give a folder of .npy files")
        parsed: dict[bytes, tuple[np.dtype[Any], tuple[int, ...], bool]] = {}
        files = [_read_header(file, parsed) for file in sorted(self.path.glob("*.npy"), key=_natural)]
        if not files:
            raise DatasetError(f"{self.path} holds no .npy file", hint="give a folder of .npy files")
        first = files[0]
        self.layout = _layout(files) if layout == "auto" else layout
        if self.layout == "items":
            for npy in files:
                if (npy.dtype, npy.shape) != (first.dtype, first.shape):
                    fault = f"is {npy.dtype} {list(npy.shape)}, {first.file.name} is {first.dtype} {list(first.shape)}"
                    _bad_npy(npy.file, f"{fault}; items must be alike")
            fields = {"data": (_torch_dtype(files[0]), files[0].shape)}
            self._files = {"data": files}
        else:
            for npy in files:
                if not npy.shape or not first.shape or npy.shape[0] != first.shape[0]:
                    fault = f"has shape {list(npy.shape)}, {first.file.name} has {list(first.shape)}"
                    _bad_npy(npy.file, f"{fault}; arrays of fields must be equally long, arrays of items alike")
            fields = {npy.file.stem: (_torch_dtype(npy), npy.shape[1:]) for npy in files}
            self._files = {npy.file.stem: [npy] for npy in files}
        self.fields: RowFields = choose(fields, names, str(self.path))
        self.num_items = len(files) if self.layout == "items" else files[0].shape[0]
        kind = "one array per item" if self.layout == "items" else f"one array per field: {', '.join(fields)}"
        self.description = f"{self.num_items} items in {self.path}, {kind}"
        check_some(self.num_items, self.fields, str(self.path))

    def read(self, start: int, stop: int, out: dict[str, Tensor]) -> None:
        """Read straight into out; arrays in another order or byte order go through NumPy."""
        for name, tensor in out.items():
            if self.layout == "fields":
                npy = self._files[name][0]
                _read_npy(npy, slice(start, stop), start * row_bytes({name: self.fields[name]}), tensor)
            else:
                for row, npy in enumerate(self._files[name][start:stop]):
                    _read_npy(npy, ..., 0, tensor[row])


def _read_npy(npy: _Npy, part: Any, offset: int, out: Tensor) -> None:
    try:
        if npy.plain:
            with npy.file.open("rb", buffering=0) as opened:
                _read_into(opened, npy.offset + offset, out, partial(_bad_npy, npy.file, "is truncated"))
        else:
            array = np.load(npy.file, mmap_mode="r", allow_pickle=False)[part]
            out.copy_(torch.from_numpy(np.array(array, dtype=npy.dtype.newbyteorder("="), order="C")))
    except OSError as failure:
        raise StorageError(f"{npy.file} cannot be read: {failure.strerror or failure}") from failure
    except ValueError as failure:
        _bad_npy(npy.file, f"is not as it was when opened ({failure})")


def _read_header(file: Path, parsed: dict[bytes, tuple[np.dtype[Any], tuple[int, ...], bool]]) -> _Npy:
    """The header, and whether the file is as long as it says; equal headers are parsed once."""
    try:
        with file.open("rb") as opened:
            version = np.lib.format.read_magic(opened)
            if version not in VERSIONS:
                _bad_npy(file, f"has format version {version}, expected 1.0 or 2.0")
            start = opened.tell()
            width = 2 if version == (1, 0) else 4
            length = int.from_bytes(opened.read(width), "little")
            offset = start + width + length
            header = opened.read(length)
            if header not in parsed:
                opened.seek(start)
                shape, fortran, dtype = read_npy_header(opened, version)
                parsed[header] = (dtype, shape, dtype.isnative and not (fortran and len(shape) > 1))
            size = opened.seek(0, 2)
    except ValueError as failure:
        _bad_npy(file, f"is no .npy file ({str(failure).splitlines()[0]})", failure)
    except OSError as failure:
        raise StorageError(
            f"{file} cannot be read: {failure.strerror or failure}", hint="check its permissions"
        ) from failure
    dtype, shape, plain = parsed[header]
    npy = _Npy(file, dtype, shape, plain, offset)
    _torch_dtype(npy)
    if size < offset + prod(shape) * dtype.itemsize:
        _bad_npy(file, f"is truncated: {size} bytes, its header says {offset + prod(shape) * dtype.itemsize}")
    return npy


def _torch_dtype(npy: _Npy) -> torch.dtype:
    if npy.dtype.hasobject:
        _bad_npy(npy.file, "holds Python objects, which are never loaded")
    try:
        return torch.from_numpy(np.empty(0, npy.dtype.newbyteorder("="))).dtype
    except TypeError:
        _bad_npy(npy.file, f"holds {npy.dtype}, which is not a number")


def _layout(files: list[_Npy]) -> Literal["items", "fields"]:
    """Fields differ in shape or dtype, items do not; equal files are fields when few, long and not numbered."""
    if len({(npy.dtype, npy.shape) for npy in files}) > 1:
        # one odd file in a row of numbered ones is a ragged item, not a field
        return "items" if len(files) > 2 and all(npy.file.stem[-1:].isdigit() for npy in files) else "fields"
    numbered = any(npy.file.stem[-1:].isdigit() for npy in files)
    shape = files[0].shape
    if shape and (len(files) == 1 or (not numbered and len(files) < shape[0])):
        return "fields"
    return "items"


def _bad_npy(file: Path, fault: str, cause: BaseException | None = None) -> NoReturn:
    raise DatasetError(f"{file} {fault}", hint="write plain numeric arrays with numpy.save") from cause


def _natural(file: Path) -> list[str | int]:
    """item_2 before item_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", file.name)]


# Common


def _say(field: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{str(field[0]).removeprefix('torch.')} {list(field[1])}"


def _read_into(opened: RawIOBase, offset: int, out: Tensor, missing: Callable[[], NoReturn]) -> None:
    """Fill a contiguous host tensor from a file, without the interpreter's lock."""
    left = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    opened.seek(offset)
    while left:
        num = opened.readinto(left)
        if not num:
            missing()
        left = left[num:]

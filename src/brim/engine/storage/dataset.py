"""Reading datasets: `manifest.json` beside `shards/000000.safetensors`, `shards/000001.safetensors`, …

A reader trusts what the manifest lists and nothing else, and the manifest lists only whole, synced shards:
after a crash a shard is complete or absent. Rows have a leading axis of items; their meaning is not known here.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import accumulate
from operator import index as as_number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.device import format_size, guard, worker_count
from brim.engine.storage.places import Place, place_of
from brim.engine.storage.shard_file import (
    REMAKE,
    RowFields,
    ShardEntry,
    ShardPath,
    Span,
    check_bytes,
    check_names,
    corrupt,
    read_header,
    read_shard,
    shard_path,
    unreadable,
)
from brim.errors import ConfigError, DatasetError, with_article
from brim.report.frames import data_frame
from brim.report.summary import Summarised, counted

FORMAT_VERSION = 1
READABLE_VERSIONS = (1, 2)  # files are the same; workloads count what their rows mean
MANIFEST = "manifest.json"


class Dataset(Summarised):
    """A dataset opened for reading, in a directory or under a URL; a wrong or damaged one raises with the reason.

    dataset[0] is a row, dataset[10:20] are rows, dataset["x"] is a field; it can be given to torch's DataLoader.
    """

    def __init__(self, path: Path | str | Place) -> None:
        """Read the manifest at once, so that a wrong path fails where it is named."""
        if not isinstance(path, str | Path | Place):
            raise ConfigError(f"{with_article(path)} is no dataset", hint="give its directory or URL")
        self.place = place_of(path)
        self.manifest, self.shards = _read_manifest(self.place)
        self._mapped: tuple[int, dict[str, Tensor]] | None = None  # the shard that the last row was read from

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped shard: a DataLoader's worker maps its own."""
        return self.__dict__ | {"_mapped": None}

    @property
    def path(self) -> Path:
        """The directory; a dataset in an object store has none."""
        if self.place.path is None:
            raise ConfigError(
                f"{self.place} is a URL, this needs a directory of this machine", hint="copy the dataset first"
            )
        return self.place.path

    def __len__(self) -> int:
        return sum(entry.items for entry in self.shards)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Rows in order."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        """A row by its number, rows by a slice or a list of numbers, or a field by its name."""
        if isinstance(key, str):
            return self.load([key])[key]
        if isinstance(key, slice):
            if key.step in (None, 1):
                return self.rows(*key.indices(len(self))[:2])
            return self.__getitem__(range(*key.indices(len(self))))
        if isinstance(key, Tensor) and not key.ndim:
            key = key.item()
        if isinstance(key, Sequence | Tensor) or (hasattr(key, "__len__") and hasattr(key, "__getitem__")):
            rows = self.__getitems__([int(row) for row in key])
            return {name: torch.stack([row[name] for row in rows]) for name in self.fields}
        try:
            row = as_number(key)
        except TypeError as failure:
            raise ConfigError(
                f"{key!r} is no row of {self.place}", hint="give a number, a slice, or the name of a field"
            ) from failure
        return self._row(row)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        """Rows by their numbers, in that order; what torch's DataLoader asks for."""
        return [self._row(row) for row in rows]

    def _row(self, row: int) -> dict[str, Tensor]:
        num_rows = len(self)
        if not -num_rows <= row < num_rows:
            raise IndexError(f"row {row} is not in {self.place}, which has rows 0 to {num_rows - 1}")
        row %= num_rows
        shard = bisect_right(self._starts, row) - 1
        if self._mapped is None or self._mapped[0] != shard:
            self._mapped = (shard, self.shard(shard))
        return {name: tensor[row - self._starts[shard]].clone() for name, tensor in self._mapped[1].items()}

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each shard."""
        return list(accumulate((entry.items for entry in self.shards[:-1]), initial=0))

    def to_pandas(self, names: Sequence[str] | None = None) -> Any:
        """A DataFrame with a column for each field; a field with axes of its own has an array in each cell."""
        rows = self.load(names)
        rows |= {name: tensor.float() for name, tensor in rows.items() if tensor.dtype == torch.bfloat16}
        return data_frame(
            {name: tensor.numpy() if tensor.ndim == 1 else list(tensor.numpy()) for name, tensor in rows.items()}
        )

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        state = "" if self.manifest["complete"] else ", not complete"
        size = format_size(sum(entry.bytes for entry in self.shards))
        shards = counted(len(self.shards), "shard")
        fields = {
            name: f"{str(dtype).removeprefix('torch.')} {list(shape) if shape else ''}".rstrip()
            for name, (dtype, shape) in self.fields.items()
        }
        return f"Dataset {self.place}: {counted(len(self), 'row')} in {shards}, {size}{state}", fields

    @property
    def fields(self) -> RowFields:
        """Name → (dtype, shape of one row); empty while there is no shard."""
        if not self.shards:
            return {}
        return {name: (span.dtype, span.shape[1:]) for name, span in sorted(self.header(0).items())}

    def header(self, index: int) -> dict[str, Span]:
        """Where the fields of a shard are in its file."""
        return read_header(self.file(self.shards[index]), self.shards[index])

    def shard(self, index: int, names: Sequence[str] | None = None, verify: bool | None = None) -> dict[str, Tensor]:
        """Rows of one shard, mapped from a local file until touched.

        verify compares the checksum first; None: at the first use of the file.
        """
        entry = self.shards[index]
        return read_shard(self.file(entry), entry, names, verify=verify)

    def load(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        return self.rows(0, len(self), names)

    def rows(self, start: int, stop: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Rows start to stop in memory, with the bounds of a slice; reads only the shards that hold them."""
        start, stop, _ = slice(start, stop).indices(len(self))
        fields = self.fields
        fields = {name: fields[name] for name in check_names(names, fields, self.place)}
        with guard():
            out = allocate(fields, max(0, stop - start))
        first = 0
        for index, entry in enumerate(self.shards):
            low, high = max(start, first), min(stop, first + entry.items)
            if low < high:
                self._copy(index, slice(low - first, high - first), out, low - start)
            first += entry.items
        return out

    def verify(self, progress: Callable[[int, int], None] | None = None, *, again: bool = True) -> None:
        """Compare every shard's size and checksum; progress gets (shards done, shards in total).

        again=False: only files that were not verified before.
        """
        with ThreadPoolExecutor(worker_count()) as pool:  # hashing releases the interpreter lock
            files = [self.file(entry) for entry in self.shards]
            checks = pool.map(partial(check_bytes, checksum=True if again else None), files, self.shards)
            for done, _ in enumerate(checks, 1):
                if progress is not None:
                    progress(done, len(self.shards))

    def file(self, entry: ShardEntry) -> ShardPath:
        return shard_path(self.place, entry.name)

    def _copy(self, index: int, part: slice, out: dict[str, Tensor], at: int) -> None:
        for name, tensor in self.shard(index, tuple(out)).items():
            target = out[name]
            if tensor.dtype != target.dtype or tensor.shape[1:] != target.shape[1:]:
                actual, first = (f"{rows.dtype} {list(rows.shape[1:])}" for rows in (tensor, target))
                file = self.file(self.shards[index])
                corrupt(file, f'"{name}" is {actual}, in the first shard it is {first}')
            target[at : at + part.stop - part.start] = tensor[part]


# Manifest


def _read_manifest(place: Place) -> tuple[dict[str, Any], list[ShardEntry]]:
    file = place.at(MANIFEST)
    try:
        manifest = json.loads(_manifest_text(place))
        config = manifest.get("config") if isinstance(manifest, dict) else None
        json.dumps(config, ensure_ascii=False).encode()  # shown and copied: text that cannot be is found now
    except (ValueError, RecursionError) as failure:
        raise DatasetError(f"{file} is not valid JSON ({failure})", code="damaged", hint=REMAKE) from failure
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version not in READABLE_VERSIONS or isinstance(version, bool):
        raise DatasetError(
            f"{file}: format_version is {version!r}, expected {' or '.join(map(str, READABLE_VERSIONS))}",
            code="unsupported",
            hint="use the version of brim that made it",
        )
    _check_types(manifest, _MANIFEST_TYPES | ({} if config is None else {"config": dict}), file, "the manifest")
    entries = [_read_entry(entry, index, file) for index, entry in enumerate(manifest["shards"])]
    if manifest["items"] != sum(entry.items for entry in entries):
        raise DatasetError(
            f"{file}: items is {manifest['items']}, its shards hold another number", code="damaged", hint=REMAKE
        )
    return manifest, entries


def _manifest_text(place: Place) -> str:
    if place.path is None:
        try:
            return place.read_bytes(MANIFEST).decode()
        except FileNotFoundError as failure:
            raise DatasetError(
                f"{place} has no {MANIFEST}", code="missing", hint="give the URL of a dataset"
            ) from failure
    try:
        return (place.path / MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as failure:
        fault = f"has no {MANIFEST}" if place.path.is_dir() else "is not a directory"
        raise DatasetError(f"{place} {fault}", code="missing", hint="give the directory of a dataset") from failure
    except OSError as failure:
        unreadable(place.path / MANIFEST, failure)


_MANIFEST_TYPES = {
    "created": str, "items": int, "items_per_shard": int, "totals": dict, "complete": bool, "shards": list,
}  # fmt: skip
_ENTRY_TYPES = {"name": str, "items": int, "bytes": int, "sha256": str, "totals": dict}


def _read_entry(entry: Any, index: int, file: str) -> ShardEntry:
    _check_types(entry, _ENTRY_TYPES, file, f"shard {index}")
    expected = f"{index:06d}.safetensors"
    if entry["name"] != expected:  # also keeps paths out of the directory, like ../../x, from being opened
        raise DatasetError(
            f"{file}: shard {index} is {entry['name']!r}, expected {expected}", code="damaged", hint=REMAKE
        )
    if entry["items"] < 1:
        raise DatasetError(f"{file}: {expected} has {entry['items']} items, expected some", code="damaged", hint=REMAKE)
    return ShardEntry(**{key: entry[key] for key in _ENTRY_TYPES})


def _check_types(values: Any, types: dict[str, type], file: str, what: str) -> None:
    for key, kind in types.items():
        value = values.get(key) if isinstance(values, dict) else None
        if not isinstance(value, kind):
            raise DatasetError(
                f"{file}: {what} has {key}={value!r}, expected {kind.__name__}", code="damaged", hint=REMAKE
            )


def allocate(fields: RowFields, num_rows: int) -> dict[str, Tensor]:
    """Uninitialised tensors for rows of these fields."""
    return {name: torch.empty((num_rows, *shape), dtype=dtype) for name, (dtype, shape) in fields.items()}

"""Reading datasets: `manifest.json` beside `shards/000000.safetensors`, `shards/000001.safetensors`, …

A reader trusts what the manifest lists and nothing else, and the manifest lists only whole, synced shards:
after a crash a shard is complete or absent. Rows have a leading axis of items; their meaning is not known here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.device import guard, worker_count
from brim.engine.storage.places import Place, place_of
from brim.engine.storage.shard_file import (
    REMAKE,
    RowFields,
    ShardEntry,
    ShardPath,
    Stored,
    check_bytes,
    check_names,
    corrupt,
    read_header,
    read_shard,
    shard_path,
    unreadable,
)
from brim.errors import ConfigError, DatasetError

__all__ = ["FORMAT_VERSION", "MANIFEST", "Dataset", "RowFields", "ShardEntry", "allocate", "check_bytes"]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


class Dataset:
    """A dataset opened for reading, in a directory or under a URL; a wrong or damaged one raises with the reason."""

    def __init__(self, path: Path | str | Place) -> None:
        """Read the manifest at once, so that a wrong path fails where it is named."""
        self.place = place_of(path)
        self.manifest, self.shards = _read_manifest(self.place)

    @property
    def path(self) -> Path:
        """The directory; a dataset in an object store has none."""
        if self.place.path is None:
            raise ConfigError(f"{self.place} is a URL, this needs a directory of this machine; copy the dataset first")
        return self.place.path

    def __len__(self) -> int:
        return sum(entry.items for entry in self.shards)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Shards in order, each as shard() gives it."""
        return (self.shard(index) for index in range(len(self.shards)))

    @property
    def fields(self) -> RowFields:
        """Name → (dtype, shape of one row); empty while there is no shard."""
        if not self.shards:
            return {}
        file = self.file(self.shards[0])
        if isinstance(file, Stored):
            return {name: (span.dtype, span.shape[1:]) for name, span in read_header(file, self.shards[0]).items()}
        rows = self.shard(0)
        return {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.items()}

    def shard(self, index: int, names: Sequence[str] | None = None, verify: bool = False) -> dict[str, Tensor]:
        """Rows of one shard, mapped from a local file until touched; verify compares the checksum first."""
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

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare every shard's size and checksum; progress gets (shards done, shards in total)."""
        with ThreadPoolExecutor(worker_count()) as pool:  # hashing releases the interpreter lock
            files = [self.file(entry) for entry in self.shards]
            checks = pool.map(partial(check_bytes, checksum=True), files, self.shards)
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
    except (ValueError, RecursionError) as failure:
        raise DatasetError(f"{file} is not valid JSON ({failure})", code="damaged", hint=REMAKE) from failure
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{file}: format_version is {version!r}, expected {FORMAT_VERSION}",
            code="unsupported",
            hint="use the version of brim that made it",
        )
    _check_types(manifest, _MANIFEST_TYPES, file, "the manifest")
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
    "created": str,
    "items": int,
    "items_per_shard": int,
    "totals": dict,
    "complete": bool,
    "shards": list,
}
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

"""Tensors on disk, the reading half: `manifest.json` beside `shards/000000.safetensors`, `shards/000001.safetensors`, …

A reader trusts what the manifest lists and nothing else, and the manifest lists only whole, synced shards:
after a crash a shard is there entirely or not at all. Rows have a leading axis of items; their meaning is not
known here.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from brim.engine.device import worker_count
from brim.engine.memory import guard
from brim.errors import DatasetError, ShardCorrupt, StorageError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name → (dtype, shape of one row)

_REMAKE = "restore it from a copy, or make the dataset again in another --out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What the manifest says of one shard."""

    name: str  # NNNNNN.safetensors
    items: int
    bytes: int  # of the file
    sha256: str  # of the file
    totals: dict[str, int]  # running totals after the shard's last row


class Dataset:
    """A dataset directory opened for reading; a wrong or damaged one fails here with its reason."""

    def __init__(self, path: Path | str) -> None:
        """Read the manifest at once, so that a wrong path fails where it is named."""
        self.path = Path(path)
        self.manifest, self.shards = _read_manifest(self.path)

    def __len__(self) -> int:
        """Items in all shards."""
        return sum(entry.items for entry in self.shards)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Shards in order, each as shard() gives it."""
        return (self.shard(index) for index in range(len(self.shards)))

    @property
    def fields(self) -> Fields:
        """Name → (dtype, shape of one row); empty while there is no shard."""
        rows = self.shard(0) if self.shards else {}
        return {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.items()}

    def shard(self, index: int, names: Sequence[str] | None = None, verify: bool = False) -> dict[str, Tensor]:
        """Rows of one shard, mapped from the file until touched; verify compares the checksum first."""
        entry = self.shards[index]
        file = self._file(entry)
        check_bytes(file, entry, checksum=verify)
        try:
            with safe_open(file, "pt") as opened:
                wanted = _check_names(names, opened.keys(), file)
                rows = {name: opened.get_tensor(name) for name in wanted}
        except SafetensorError as failure:
            _corrupt(file, f"is no safetensors file ({failure})", failure)
        except OSError as failure:
            _unreadable(file, failure)
        for name, tensor in rows.items():
            if tensor.ndim < 1 or len(tensor) != entry.items:
                _corrupt(file, f'"{name}" has shape {list(tensor.shape)}, the manifest says {entry.items} items')
        return rows

    def load(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """All rows in memory."""
        return self.rows(0, len(self), names)

    def rows(self, start: int, stop: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Rows start to stop in memory, with the bounds of a slice; reads only the shards that hold them."""
        start, stop, _ = slice(start, stop).indices(len(self))
        fields = self.fields
        fields = {name: fields[name] for name in _check_names(names, fields, self.path)}
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
        """Compare every shard's size and checksum; progress is told (shards done, shards in all)."""
        with ThreadPoolExecutor(worker_count()) as pool:  # hashing lets other threads run
            files = [self._file(entry) for entry in self.shards]
            checks = pool.map(partial(check_bytes, checksum=True), files, self.shards)
            for done, _ in enumerate(checks, 1):
                if progress is not None:
                    progress(done, len(self.shards))

    def _file(self, entry: ShardEntry) -> Path:
        return self.path / "shards" / entry.name

    def _copy(self, index: int, part: slice, out: dict[str, Tensor], at: int) -> None:
        for name, tensor in self.shard(index, tuple(out)).items():
            target = out[name]
            if tensor.dtype != target.dtype or tensor.shape[1:] != target.shape[1:]:
                found, first = (f"{rows.dtype} {list(rows.shape[1:])}" for rows in (tensor, target))
                file = self._file(self.shards[index])
                _corrupt(file, f'"{name}" is {found}, in the first shard it is {first}')
            target[at : at + part.stop - part.start] = tensor[part]


# Manifest


def _read_manifest(path: Path) -> tuple[dict[str, Any], list[ShardEntry]]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as failure:
        fault = f"has no {MANIFEST}" if path.is_dir() else "is not a directory"
        raise DatasetError(f"{path} {fault}; give the directory of a dataset") from failure
    except OSError as failure:
        _unreadable(file, failure)
    except (ValueError, RecursionError) as failure:
        raise DatasetError(f"{file} is not valid JSON ({failure}); {_REMAKE}") from failure
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{file}: format_version is {version!r}, expected {FORMAT_VERSION}; use the brim that made it"
        )
    _check_types(manifest, _MANIFEST_TYPES, file, "the manifest")
    entries = [_read_entry(entry, index, file) for index, entry in enumerate(manifest["shards"])]
    if manifest["items"] != sum(entry.items for entry in entries):
        raise DatasetError(f"{file}: items is {manifest['items']}, its shards hold another number; {_REMAKE}")
    return manifest, entries


_MANIFEST_TYPES = {
    "created": str,
    "items": int,
    "items_per_shard": int,
    "totals": dict,
    "complete": bool,
    "shards": list,
}
_ENTRY_TYPES = {"name": str, "items": int, "bytes": int, "sha256": str, "totals": dict}


def _read_entry(entry: Any, index: int, file: Path) -> ShardEntry:
    _check_types(entry, _ENTRY_TYPES, file, f"shard {index}")
    expected = f"{index:06d}.safetensors"
    if entry["name"] != expected:  # also keeps paths out of the directory, like ../../x, from being opened
        raise DatasetError(f"{file}: shard {index} is {entry['name']!r}, expected {expected}; {_REMAKE}")
    if entry["items"] < 1:
        raise DatasetError(f"{file}: {expected} has {entry['items']} items, expected some; {_REMAKE}")
    return ShardEntry(**{key: entry[key] for key in _ENTRY_TYPES})


def _check_types(found: Any, types: dict[str, type], file: Path, what: str) -> None:
    for key, kind in types.items():
        value = found.get(key) if isinstance(found, dict) else None
        if not isinstance(value, kind):
            raise DatasetError(f"{file}: {what} has {key}={value!r}, expected {kind.__name__}; {_REMAKE}")


# Shard files


def allocate(fields: Fields, num_rows: int) -> dict[str, Tensor]:
    """Room for rows of these fields."""
    return {name: torch.empty((num_rows, *shape), dtype=dtype) for name, (dtype, shape) in fields.items()}


def check_bytes(file: Path, entry: ShardEntry, *, checksum: bool) -> None:
    """Raise ShardCorrupt when a shard's file is not what the manifest says."""
    try:
        size = file.stat().st_size
        if size != entry.bytes:
            _corrupt(file, f"has {size} bytes, the manifest says {entry.bytes}")
        if checksum:
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != entry.sha256:
                    _corrupt(file, "checksum differs from the manifest")
    except OSError as failure:
        _unreadable(file, failure)


def _check_names(names: Sequence[str] | None, known: Iterable[str], where: Path) -> Sequence[str]:
    """The names asked for, by default all that are known."""
    known = list(known)
    for name in names or ():
        if name not in known:
            raise DatasetError(f'{where} has no field "{name}"; it has {", ".join(known) or "no items yet"}')
    return known if names is None else names


def _corrupt(file: Path, fault: str, cause: BaseException | None = None) -> NoReturn:
    raise ShardCorrupt(f"shard {file.name}: {fault}; {_REMAKE} ({file})") from cause


def _unreadable(file: Path, failure: OSError) -> NoReturn:
    if isinstance(failure, FileNotFoundError):
        _corrupt(file, "is missing", failure)
    reason = failure.strerror or failure
    raise StorageError(f"{file} cannot be read: {reason}; check its permissions and the disk") from failure

"""One shard's file: its entry in the manifest, writing and reading it, in a directory or an object store.

The bytes are those the safetensors library writes. Worker processes call `write_shard`;
one process writes the manifest that lists their shards: see `ShardWriter.adopt`.
"""

import errno
import hashlib
import json
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from brim.engine.storage.places import Place, cache_home, sync
from brim.errors import ConfigError, DatasetError, ShardCorrupt, StorageError

RowFields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name → (dtype, shape of one row)

REMAKE = "restore it from a copy, or make the dataset again in another {out}"

_HEADER_GUESS = 16 * 1024  # bytes read first; headers are smaller
_MAX_VERIFIED_BYTES = 8 * 2**20  # of the list of verified files; beyond, it begins anew
_SETTLED_NS = 100_000_000  # a file changed again this soon may have the same time: it is not remembered
_GAP = 256 * 1024  # gaps up to this many bytes are read rather than split into two requests

# In the order safetensors lays tensors out: wide types first, so that each is aligned in the mapped file.
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A shard as the manifest lists it."""

    name: str  # NNNNNN.safetensors
    items: int
    bytes: int  # of the file
    sha256: str  # of the file
    totals: dict[str, int]  # running totals after the shard's last row


def shard_name(number: int) -> str:
    """The file's name, in the directory `shards`."""
    if not 0 <= number <= 999_999:
        raise ConfigError(f"shard {number} is above 999999, the last there can be", hint="raise the items per shard")
    return f"{number:06d}.safetensors"


def write_shard(place: Place, number: int, rows: dict[str, Tensor], totals: dict[str, int]) -> ShardEntry:
    """Write one shard of a dataset, durable when this returns; the manifest does not list it yet.

    rows    name → (n, …)  any device
    totals  running totals after the last row

    Another process may write the same shard at the same time, as long as its bytes are equal.
    """
    rows = {name: tensor.detach().cpu().contiguous() for name, tensor in rows.items()}
    items, name = check_fields(rows, str(place)), shard_name(number)
    with refusals(place.at(f"shards/{name}")):
        size, sha256 = put_shard(place, number, rows, durable=True)
    return ShardEntry(name=name, items=items, bytes=size, sha256=sha256, totals=dict(totals))


def put_shard(
    place: Place,
    number: int,
    tensors: dict[str, Tensor],
    *,
    before: Callable[[], None] = lambda: None,
    durable: bool = False,
) -> tuple[int, str]:
    """Write a shard completely or not at all, calling `before` just before it gets its name; its bytes and sha256.

    In a directory it is written under another name, synced if durable, and renamed; in a store it is uploaded.
    """
    name = shard_name(number)
    if place.path is not None:
        file = place.path / "shards" / name
        temporary = file.with_name(f".{number:06d}.{secrets.token_hex(4)}.tmp")
        with unfinished(temporary):
            written = write_safetensors(temporary, tensors)
            if durable:
                sync(temporary)
            before()
            temporary.replace(file)
        return written
    with ExitStack() as stack:
        try:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brim-"))) / name
            written = write_safetensors(file, tensors)
        except OSError as failure:
            raise StorageError(
                f"{tempfile.gettempdir()}: cannot write a shard before its upload, {failure.strerror or failure}",
                hint="free some space there or set TMPDIR to a larger disk, then continue with {resume}",
            ) from failure
        before()
        place.put_file(file, f"shards/{name}")
    return written


def check_fields(rows: dict[str, Tensor], where: str, *totals: Tensor) -> int:
    """Check that the rows can be written, and return their number."""
    counts = {len(tensor) for tensor in (*rows.values(), *totals)}
    if len(counts) != 1 or not rows:
        raise DatasetError(f"{where}: rows and totals must have one length, got {sorted(counts)}")
    for name, tensor in rows.items():
        if tensor.dtype not in DTYPES:
            raise DatasetError(f'{where}: "{name}" is {tensor.dtype}, expected one of {list(DTYPES)}')
    return counts.pop()


def write_safetensors(file: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Write the bytes `safetensors.torch.save` would give; returns their number and sha256.

    Straight from the tensors' memory: save() copies the shard twice, save_file() hides the system's error.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    ordered = sorted(tensors.items(), key=lambda pair: (ranks[pair[1].dtype], pair[0]))
    header, offset = {}, 0
    for name, tensor in ordered:
        span = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    memory: list[Any] = [tensor.reshape(-1).view(torch.uint8).numpy() for _, tensor in ordered]
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for piece in (struct.pack("<Q", len(text)), text, *memory):
            digest.update(piece)
            out.write(piece)
    return 8 + len(text) + offset, digest.hexdigest()


_STEPS = {
    errno.ENOSPC: ("no space is left on the device", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("the file would be larger than allowed", "raise the limit or write fewer items per shard"),
    errno.EROFS: ("the file system is read-only", "make it writable"),
    errno.EACCES: ("no permission", "change the permissions"),
    errno.EPERM: ("the operation is not permitted", "change the permissions"),
    errno.EIO: ("the device failed", "check the disk"),
}


@contextmanager
def refusals(path: object, *, kept: bool = True) -> Iterator[None]:
    """Turn an error of the file system into StorageError; kept: complete shards stay usable."""
    try:
        yield
    except OSError as failure:
        reason, step = _STEPS.get(failure.errno or 0, (str(failure.strerror or failure), "check the path"))
        if kept:
            message = f"{path}: cannot write, {reason}; complete shards stay usable"
            raise StorageError(message, code="not_written", hint=f"{step}, then continue with {{resume}}") from failure
        raise StorageError(
            f"{path}: cannot write, {reason}", code="not_written", hint=f"{step} or choose another {{out}}"
        ) from failure


@contextmanager
def unfinished(temporary: Path) -> Iterator[None]:
    """Removes a temporary file after any failure."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


# Reading


@dataclass(frozen=True, slots=True)
class Stored:
    """A file in an object store, with the part of the Path interface that a shard needs."""

    place: Place
    key: str  # in the place

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def __str__(self) -> str:
        return self.place.at(self.key)


ShardPath = Path | Stored


def shard_path(place: Place, name: str) -> ShardPath:
    return Stored(place, f"shards/{name}") if place.path is None else place.path / "shards" / name


def read_shard(
    file: ShardPath, entry: ShardEntry, names: Sequence[str] | None = None, *, verify: bool | None = None
) -> dict[str, Tensor]:
    """Rows of one shard: mapped from a local file until touched, fetched from a store, only what names says.

    verify compares the checksum first, for which all of the file is read; None: at the first use of the file.
    """
    rows = _fetch(file, entry, names, verify) if isinstance(file, Stored) else _map(file, entry, names, verify)
    for name, tensor in rows.items():
        if tensor.ndim < 1 or len(tensor) != entry.items:
            corrupt(file, f'"{name}" has shape {list(tensor.shape)}, the manifest says {entry.items} items')
    return rows


def _map(file: Path, entry: ShardEntry, names: Sequence[str] | None, verify: bool | None) -> dict[str, Tensor]:
    check_bytes(file, entry, checksum=verify)
    try:
        with safe_open(file, "pt") as opened:
            wanted = check_names(names, opened.keys(), file)
            return {name: opened.get_tensor(name) for name in wanted}
    except SafetensorError as failure:
        corrupt(file, f"is no safetensors file ({failure})", failure)
    except OSError as failure:
        unreadable(file, failure)


def _fetch(file: Stored, entry: ShardEntry, names: Sequence[str] | None, verify: bool | None) -> dict[str, Tensor]:
    if verify or names is None:
        data = _whole(file, entry, checksum=verify is not False)  # all of it is here
        spans = _parse(file, entry, data)
        pieces = {0: data}
    else:
        spans, pieces = read_header(file, entry), {}
    wanted = check_names(names, spans, file)
    if not pieces:
        for start, stop in _joined([spans[name].bytes for name in wanted]):
            pieces[start] = _range(file, start, stop)
    return {name: _tensor(spans[name], pieces) for name in wanted}


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor is in a shard's file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: tuple[int, int]  # first and behind the last, of the file


def read_header(file: ShardPath, entry: ShardEntry) -> dict[str, Span]:
    """The tensors' positions in a shard, of an object store usually with one small request."""
    start = _range(file, 0, min(entry.bytes, _HEADER_GUESS))
    length = 8 + int.from_bytes(start[:8], "little")
    if len(start) < length <= entry.bytes:
        start += _range(file, len(start), length)
    return _parse(file, entry, start)


def _parse(file: ShardPath, entry: ShardEntry, data: bytes) -> dict[str, Span]:
    length = 8 + int.from_bytes(data[:8], "little")
    try:
        if length > len(data):
            raise ValueError("its header is cut short")
        header = json.loads(data[8:length])
        header.pop("__metadata__", None)
        spans = {name: _span(one, length) for name, one in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as failure:
        corrupt(file, f"is no safetensors file ({failure})", failure)
    end = max((span.bytes[1] for span in spans.values()), default=length)
    if end != entry.bytes:
        corrupt(file, f"is for {end} bytes by its header, the manifest says {entry.bytes}")
    return spans


def _span(one: dict[str, Any], base: int) -> Span:
    dtype, shape = _BY_NAME[one["dtype"]], tuple(int(size) for size in one["shape"])
    start, stop = (base + int(offset) for offset in one["data_offsets"])
    if not base <= start <= stop or min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{one} makes no sense")
    return Span(dtype, shape, (start, stop))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges to read; tensors close to each other are read together, as a request costs more than a few bytes."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start - out[-1][1] <= _GAP:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def _tensor(span: Span, pieces: dict[int, bytes]) -> Tensor:
    """A tensor with its own memory, copied from the range that holds its bytes."""
    first = max(start for start in pieces if start <= span.bytes[0])
    out = torch.empty(span.shape, dtype=span.dtype)
    if out.numel():
        view = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        view[:] = memoryview(pieces[first])[span.bytes[0] - first : span.bytes[1] - first]
    return out


def _range(file: ShardPath, start: int, stop: int) -> bytes:
    """Bytes of a shard; raises ShardCorrupt if there are fewer than requested."""
    try:
        if isinstance(file, Stored):
            data = file.place.read_bytes(file.key, start, stop)
        else:
            with file.open("rb") as opened:
                opened.seek(start)
                data = opened.read(stop - start)
    except OSError as failure:
        unreadable(file, failure)
    if len(data) != stop - start:
        corrupt(file, f"ends at byte {start + len(data)}, expected {stop} at least")
    return data


def _whole(file: Stored, entry: ShardEntry, *, checksum: bool) -> bytes:
    try:
        data = file.place.read_bytes(file.key, 0, entry.bytes + 1)  # one more shows that it is longer
    except FileNotFoundError as failure:
        corrupt(file, "is missing", failure)
    if len(data) != entry.bytes:
        more = "more than " if len(data) > entry.bytes else ""
        corrupt(file, f"has {more}{min(len(data), entry.bytes)} bytes, the manifest says {entry.bytes}")
    if checksum and hashlib.sha256(data).hexdigest() != entry.sha256:
        corrupt(file, "checksum differs from the manifest")
    return data


# Checking


def check_bytes(file: ShardPath, entry: ShardEntry, *, checksum: bool | None) -> None:
    """Raise ShardCorrupt if a shard's file differs from the manifest.

    checksum None: only if this file, of that inode, size and time, was not verified before, here or by another process;
    a store checks its own objects.
    """
    try:
        if isinstance(file, Stored):
            if checksum:
                _whole(file, entry, checksum=True)
            elif checksum is False and (size := file.place.size(file.key)) != entry.bytes:
                corrupt(file, f"has {size} bytes, the manifest says {entry.bytes}")
            return
        status = file.stat()
        if status.st_size != entry.bytes:
            corrupt(file, f"has {status.st_size} bytes, the manifest says {entry.bytes}")
        state = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {entry.sha256}"
        if checksum or (checksum is None and not _verified.has(state)):
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != entry.sha256:
                    corrupt(file, "checksum differs from the manifest")
            if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
                _verified.add(state)
    except OSError as failure:
        unreadable(file, failure)


class _Verified:
    """States of files whose checksum was compared, one a line of a file in the user's cache directory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: set[str] | None = None

    def has(self, state: str) -> bool:
        with self._lock:
            if self._states is None:
                self._states = set()
                with suppress(OSError, UnicodeDecodeError):
                    if self._file().stat().st_size > _MAX_VERIFIED_BYTES:
                        self._file().unlink()
                    self._states = set(self._file().read_text().splitlines())
            return state in self._states

    def add(self, state: str) -> None:
        if self.has(state):
            return
        with self._lock, suppress(OSError):  # without a cache directory this process alone remembers
            assert self._states is not None
            self._states.add(state)
            self._file().parent.mkdir(parents=True, exist_ok=True)
            with self._file().open("a") as out:
                out.write(f"{state}\n")

    @staticmethod
    def _file() -> Path:
        return cache_home() / "verified.txt"


_verified = _Verified()


def check_names(names: Sequence[str] | None, known: Iterable[str], where: object) -> Sequence[str]:
    known = list(known)
    for name in names or ():
        if name not in known:
            raise DatasetError(f'{where} has no field "{name}"', hint=f"it has {', '.join(known) or 'no items yet'}")
    return known if names is None else names


def corrupt(file: ShardPath, fault: str, cause: BaseException | None = None) -> NoReturn:
    """Raise ShardCorrupt: the shard differs from the manifest."""
    raise ShardCorrupt(f"shard {file.name}: {fault} ({file})", code="damaged", hint=REMAKE) from cause


def unreadable(file: ShardPath, failure: OSError) -> NoReturn:
    """Raise for a file that cannot be read or is missing."""
    if isinstance(failure, FileNotFoundError):
        corrupt(file, "is missing", failure)
    reason = failure.strerror or failure
    raise StorageError(f"{file} cannot be read: {reason}", hint="check its permissions and the disk") from failure

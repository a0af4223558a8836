"""Tensors on disk, the writing half: rows in, whole shards and a manifest that lists them out.

Shards appear by rename, the manifest after them, both synced: whatever is killed, a reader sees all of a shard or
nothing of it.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor

from brim.engine.memory import guard
from brim.engine.shard_file import DTYPES, refusals, shard_name, write_safetensors, write_shard
from brim.engine.shards import FORMAT_VERSION, MANIFEST, Dataset, Fields, ShardEntry, allocate, check_bytes
from brim.engine.storage import sync
from brim.errors import ConfigError, DatasetError, ShardCorrupt, StorageError

__all__ = ["COMMIT_S", "ShardWriter", "Verify", "verify", "write_shard"]

COMMIT_S = 1.0  # shards made within this time share one commit: syncing each would cost more than making it

_OURS = re.compile(r"[0-9]{6}\.safetensors|\.[0-9]{6}(\.[0-9a-f]{8})?\.tmp")

Verify = Literal["all", "sizes"]


def verify(dataset: Dataset, how: Verify, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare shards with the manifest: all bytes, or the sizes of all and the bytes of the last.

    Shards are synced before the manifest lists them, so a crash leaves the listed ones whole; sizes find what was cut
    short or lost all the same. Terabytes are continued in seconds then.
    """
    if how == "all":
        dataset.verify(progress)
        return
    last = len(dataset.shards) - 1
    for number, entry in enumerate(dataset.shards):
        check_bytes(dataset.path / "shards" / entry.name, entry, checksum=number == last)
        if progress is not None:
            progress(number + 1, last + 1)


class ShardWriter:
    """Appends rows to a dataset directory, cut into shards of exactly items_per_shard.

    Leaving the context writes what is left as a shorter last shard, also after Ctrl-C or a failure of the
    caller, so that what was made can be used; resuming makes that shard again. Memory holds one shard.
    """

    def __init__(
        self,
        path: Path | str,
        header: dict[str, Any],
        *,
        items_per_shard: int,
        identity: tuple[str, ...] = (),
        resume: bool = False,
        derived: Callable[[int, dict[str, int]], dict[str, Any]] | None = None,
        verify: Verify = "all",
    ) -> None:
        """Store; the header's keys go to the manifest, those in identity must be equal to resume.

        derived gives further keys from the items and totals of each commit, so that they hold after a crash too.
        verify "all" reads every shard of a dataset that is continued; "sizes" trusts its own crashes: see `verify`.
        """
        self.path = Path(path)
        self.header = header
        self.items_per_shard = items_per_shard
        self.identity = identity
        self.resume = resume
        self.derived = derived
        self.verify: Verify = verify
        self._full: list[ShardEntry] = []
        self._partial: ShardEntry | None = None  # listed last; goes once a longer shard takes its place
        self._created = datetime.now(UTC).isoformat(timespec="seconds")
        self._complete = False
        self._fields: Fields = {}
        self._buffer: dict[str, Tensor] = {}
        self._rows = 0  # rows accepted; those beyond the full shards are in the buffer
        self._row_totals: dict[str, int] = {}  # after the last accepted row
        self._flushed = 0  # rows accepted when the partial shard was written here
        self._ahead: dict[int, ShardEntry] = {}  # adopted, behind a gap
        self._unsynced: list[Path] = []
        self._dirty = False  # what the manifest on disk says is out of date
        self._commit_failed = False
        self._committed_at = 0.0
        self._fresh = True  # started by us, not continued
        self._made: list[Path] = []  # directories that did not exist before, outermost first
        self._lock: int | None = None

    @property
    def items(self) -> int:
        """Items in full shards: where the next row of a resumed dataset belongs."""
        return len(self._full) * self.items_per_shard

    @property
    def totals(self) -> dict[str, int]:
        """Running totals after the last full shard, empty at the start."""
        return dict(self._full[-1].totals) if self._full else {}

    def __enter__(self) -> Self:
        """Check everything, then create the directory or continue the one that is there."""
        if self.items_per_shard < 1:
            raise ConfigError(f"items_per_shard={self.items_per_shard} must be at least 1")
        json.dumps(self._manifest())  # a header that cannot be written must fail before anything is created
        with refusals(self.path, kept=False):
            self._fresh = _is_vacant(self.path)
            if not self._fresh and not self.resume:
                raise DatasetError(f"{self.path} is not empty; add --resume to continue it or choose another --out")
            try:
                self._start() if self._fresh else self._continue()
            except BaseException:
                self._unlock()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left and commit; a file system that refused is not asked to take more rows."""
        try:
            if not isinstance(failure, StorageError):
                self.flush_partial()
                self._commit()
            elif not self._commit_failed:  # shards renamed since the last commit are whole: list them
                with suppress(StorageError):
                    self._commit()
            if failure is not None and self._fresh and not self._listed():
                self._withdraw()  # nothing was made: leave no directory that refuses the next try
        finally:
            self._unlock()

    def append(self, rows: dict[str, Tensor], totals: dict[str, Tensor]) -> None:
        """Add n rows; full shards are written as they fill.

        rows    name → (n, …)  any device; same names, dtypes and row shapes each time
        totals  name → (n,)    int64, running total after each row; a shard's entry keeps that of its last row
        """
        assert not self._complete, "append after finish"
        num_rows = self._check_rows(rows, totals)
        start = 0
        while start < num_rows:
            filled = self._buffered()
            stop = min(num_rows, start + self.items_per_shard - filled)
            for name, tensor in rows.items():
                self._buffer[name][filled : filled + stop - start].copy_(tensor[start:stop].detach())
            # Both at once and only now: an interrupt before this line leaves the shard as it was.
            last = {name: int(values[stop - 1]) for name, values in totals.items()}
            self._rows, self._row_totals = self._rows + stop - start, last
            start = stop
            if self._buffered() == self.items_per_shard:
                self._write_shard()

    def adopt(self, number: int, entry: ShardEntry) -> None:
        """List a shard that another process wrote with `write_shard`; in any order, also twice.

        The manifest lists the shards before the first gap; one with fewer than items_per_shard is the last. Call
        `vacate` before such shards are written, and do not append rows to the same dataset.
        """
        assert not self._complete, "adopt after finish"
        if entry.name != shard_name(number) or not 1 <= entry.items <= self.items_per_shard:
            raise DatasetError(
                f"{self.path}: shard {number} is {entry.name} of {entry.items} items, expected {shard_name(number)} "
                f"of 1 to {self.items_per_shard}"
            )
        known = self._full[number] if number < len(self._full) else self._ahead.get(number)
        if number == len(self._full) and self._partial is not None:
            known = self._partial
        if known is not None and known.sha256 != entry.sha256:
            raise DatasetError(
                f"{self.path}: shard {entry.name} was made twice with different bytes; use devices of one type only"
            )
        if known is None:
            self._ahead[number] = entry
        while self._partial is None and (ready := self._ahead.pop(len(self._full), None)) is not None:
            self._list(ready)

    def vacate(self) -> None:
        """Stop listing a partial last shard that others are about to write: no reader may see its name on new bytes."""
        assert not self._buffered(), "vacate after append"
        if self._partial is not None:
            self._partial, self._dirty = None, True
            self._commit()

    def flush_partial(self) -> None:
        """Write the rows of the unfinished shard as they are; a longer one that is already listed stays."""
        if self._buffered() > (self._partial.items if self._partial else 0):
            self._write_shard()

    def finish(self, **extra: Any) -> None:
        """Write what is left, add the extra fields to the manifest and mark the dataset complete."""
        assert not self._ahead, f"shard {len(self._full)} is missing"
        with refusals(self.path):
            if not self._buffered():
                self._partial = None
            elif self._flushed != self._rows:
                self._write_shard()  # also over a listed partial one: it may come from a run with more items
            self.header = {**self.header, **extra}
            self._complete = self._dirty = True
            self._commit()
            self._sweep()

    # Opening

    def _start(self) -> None:
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        try:
            for place in reversed(missing):
                place.mkdir(exist_ok=True)
                self._made.append(place)
            self._lock = _lock_directory(self.path)
            # The manifest comes first, so that a crash from here on leaves a directory that can be resumed.
            self._dirty = True
            self._commit()
            (self.path / "shards").mkdir(exist_ok=True)
            sync(self.path.parent)
        except (OSError, StorageError):
            self._withdraw()
            raise

    def _continue(self) -> None:
        if not (self.path / MANIFEST).exists():
            raise DatasetError(f"{self.path} has no {MANIFEST} to resume from; choose another --out")
        self._lock = _lock_directory(self.path)
        found = Dataset(self.path)
        self._check_identity(found.manifest)
        self._created = str(found.manifest["created"])
        self._keep(found)
        (self.path / "shards").mkdir(exist_ok=True)
        self._sweep()
        self._committed_at = time.monotonic()

    def _check_identity(self, found: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps({**self.header, "items_per_shard": self.items_per_shard}))
        for key in ("items_per_shard", *self.identity):
            difference = _first_difference(key, found.get(key, _ABSENT), wanted.get(key, _ABSENT))
            if difference:
                raise DatasetError(
                    f"{self.path} cannot be resumed: {difference}; use the same options, or another --out"
                )

    def _keep(self, found: Dataset) -> None:
        """Take over the full shards, checked, and a partial last one until it is made again."""
        self._full = list(found.shards)
        if self._full and self._full[-1].items < self.items_per_shard:
            self._partial = self._full.pop()
        for entry in self._full:
            if entry.items != self.items_per_shard:
                raise DatasetError(
                    f"{self.path / MANIFEST}: shard {entry.name} has {entry.items} items, "
                    f"expected {self.items_per_shard}; choose another --out"
                )
        found.shards = self._full
        verify(found, self.verify)
        self._fields = found.fields
        self._rows, self._row_totals = self.items, self.totals
        if self._partial is not None:
            try:
                check_bytes(self.path / "shards" / self._partial.name, self._partial, checksum=True)
            except ShardCorrupt:  # it is made again anyway
                self._partial, self._dirty = None, True

    # Writing

    def _buffered(self) -> int:
        return self._rows - self.items

    def _listed(self) -> list[ShardEntry]:
        return [*self._full, *([self._partial] if self._partial else [])]

    def _check_rows(self, rows: dict[str, Tensor], totals: dict[str, Tensor]) -> int:
        """Number of rows, once it is sure that they belong with those before; allocates on the first call."""
        counts = {len(tensor) for tensor in (*rows.values(), *totals.values())}
        fields = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.items()}
        if len(counts) != 1 or not fields:
            raise DatasetError(f"{self.path}: rows and totals must have one length, got {sorted(counts)}")
        if fields != (self._fields or fields):
            raise DatasetError(f"{self.path}: rows are {fields}, the shards before hold {self._fields}")
        for name, (dtype, _) in fields.items():
            if dtype not in DTYPES:
                raise DatasetError(f'{self.path}: "{name}" is {dtype}, expected one of {list(DTYPES)}')
        if not self._buffer:
            self._fields = fields
            with guard():
                self._buffer = allocate(fields, self.items_per_shard)
        return counts.pop()

    def _write_shard(self) -> None:
        """Write the buffered rows as the next shard and list it, full or partial."""
        number, count = len(self._full), self._buffered()
        if number > 999_999:
            raise ConfigError(f"items_per_shard={self.items_per_shard} needs over a million shards; raise it")
        file = self.path / "shards" / shard_name(number)
        temporary = file.with_name(f".{number:06d}.tmp")
        with refusals(file, temporary, kept=bool(self._listed())):
            tensors = {name: rows[:count] for name, rows in self._buffer.items()}
            size, sha256 = write_safetensors(temporary, tensors)
            if self._partial is not None:
                # Same file name: the manifest must stop listing the old bytes before they go.
                self._partial, self._dirty = None, True
                self._commit()
            temporary.replace(file)
        self._list(ShardEntry(name=file.name, items=count, bytes=size, sha256=sha256, totals=self._row_totals))

    def _list(self, entry: ShardEntry) -> None:
        """Take the next shard, which is there, into the manifest, at once or with those of the next second."""
        self._unsynced.append(self.path / "shards" / entry.name)
        self._dirty = True
        self._rows, self._row_totals = self.items + entry.items, entry.totals
        if entry.items == self.items_per_shard:
            self._full.append(entry)
        else:
            self._partial, self._flushed = entry, self._rows
        if time.monotonic() - self._committed_at >= COMMIT_S:
            self._commit()

    def _commit(self) -> None:
        """Make the manifest on disk say what is there, after making sure that it is there."""
        if not self._dirty:
            return
        file, temporary = self.path / MANIFEST, self.path / f".{MANIFEST}.tmp"
        self._commit_failed = True  # until its end; a sync that failed once seems to work when tried again
        with refusals(file, temporary, kept=bool(self._listed())):
            for shard in self._unsynced:
                sync(shard)
            if self._unsynced:
                sync(self.path / "shards")
            with temporary.open("w", encoding="utf-8") as out:
                json.dump(self._manifest(), out, indent=1, ensure_ascii=False)
                out.write("\n")
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
            sync(self.path)
        self._unsynced.clear()
        self._dirty = self._commit_failed = False
        self._committed_at = time.monotonic()

    def _manifest(self) -> dict[str, Any]:
        listed = self._listed()
        items, totals = sum(entry.items for entry in listed), listed[-1].totals if listed else {}
        own_first = {"format_version": FORMAT_VERSION, "created": self._created}
        own_last = {
            **(self.derived(items, totals) if self.derived is not None else {}),
            "items": items,
            "items_per_shard": self.items_per_shard,
            "totals": totals,
            "complete": self._complete,
            "shards": [asdict(entry) for entry in listed],
        }
        assert not self.header.keys() & {*own_first, *own_last}, "header uses a key of the manifest"
        return {**own_first, **self.header, **own_last}

    # Tidying

    def _sweep(self) -> None:
        """Remove temporary files and shards the manifest does not list; foreign files stay."""
        listed = {entry.name for entry in self._listed()}
        for file in (self.path / "shards").iterdir():
            if _OURS.fullmatch(file.name) and file.name not in listed:
                file.unlink()
        (self.path / f".{MANIFEST}.tmp").unlink(missing_ok=True)

    def _withdraw(self) -> None:
        """Undo _start: remove what it made, as long as nothing else is in it."""
        with suppress(OSError):
            if (self.path / "shards").exists():
                self._sweep()
                (self.path / "shards").rmdir()
            (self.path / MANIFEST).unlink(missing_ok=True)
            for place in reversed(self._made):
                place.rmdir()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# Directories


def _is_vacant(path: Path) -> bool:
    """Nothing there but what a crash before the first manifest can leave."""
    if not path.exists():
        return True
    if not path.is_dir():
        raise DatasetError(f"{path} is a file, expected a directory; choose another --out")
    return {entry.name for entry in path.iterdir()} <= {f".{MANIFEST}.tmp"}


def _lock_directory(path: Path) -> int:
    """Keep a second writer out; the lock ends with the process, however that ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as failure:
        os.close(handle)
        raise DatasetError(f"{path} is being written by another process; wait for it to end") from failure
    except OSError:
        pass  # a file system without locks, such as some NFS: go on without
    return handle


# What differs


_ABSENT = object()


def _first_difference(path: str, found: Any, wanted: Any) -> str:
    """In words, the first place where two JSON values differ; empty when they are equal."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = [(f"{path}.{key}", key) for key in dict.fromkeys((*found, *wanted))]
        pairs = [(name, found.get(key, _ABSENT), wanted.get(key, _ABSENT)) for name, key in keys]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(found, wanted, strict=True))]
    elif found == wanted:
        return ""
    else:
        old, new = ("absent" if value is _ABSENT else json.dumps(value) for value in (found, wanted))
        return f"{path} is {old} in the dataset and {new} now"
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), "")

"""Writing datasets: rows in, complete shards and a manifest that lists them out.

Shards appear atomically, the manifest after them: whatever is killed, a reader sees a complete shard or none. How they
are put into a directory or an object store is in `destination.py`.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor

from brim.engine.device import guard
from brim.engine.storage.dataset import FORMAT_VERSION, MANIFEST, Dataset, allocate
from brim.engine.storage.destination import destination_of
from brim.engine.storage.places import Place, place_of
from brim.engine.storage.shard_file import (
    RowFields,
    ShardEntry,
    check_bytes,
    check_fields,
    put_shard,
    refusals,
    shard_name,
)
from brim.errors import ConfigError, DatasetError, ShardCorrupt, StorageError

COMMIT_S = 1.0  # shards written within this time share one commit: syncing each would cost more than writing it

Verify = Literal["all", "sizes"]


def verify(dataset: Dataset, how: Verify, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare shards with the manifest: all bytes, or the sizes of all and the bytes of the last.

    Shards are synced before the manifest lists them, so a crash leaves the listed ones complete; comparing sizes still
    finds truncated or lost files, and terabytes are resumed in seconds.
    """
    if how == "all":
        dataset.verify(progress)
        return
    last = len(dataset.shards) - 1
    stored = dataset.place.sizes("shards") if dataset.place.path is None else None  # one list, not a request for each
    for number, entry in enumerate(dataset.shards):
        if stored is None or number == last or stored.get(entry.name) != entry.bytes:
            check_bytes(dataset.file(entry), entry, checksum=number == last)
        if progress is not None:
            progress(number + 1, last + 1)


class ShardWriter:
    """Appends rows to a dataset, in a directory or under a URL, cut into shards of exactly items_per_shard.

    Leaving the context writes the remaining rows as a shorter last shard, also after Ctrl-C or a failure of the
    caller, so that they can be used; resuming writes that shard again. Memory holds one shard.
    """

    def __init__(
        self,
        path: Path | str | Place,
        header: dict[str, Any],
        *,
        items_per_shard: int,
        identity: tuple[str, ...] = (),
        resume: bool = False,
        derived: Callable[[int, dict[str, int]], dict[str, Any]] | None = None,
        verify: Verify = "all",
        version: int = FORMAT_VERSION,
    ) -> None:
        """The header's keys go to the manifest; those in identity must be equal to resume.

        version is what the rows mean, which must be the same to resume.
        derived gives further keys from the items and totals of each commit, so that they hold after a crash too.
        verify "all" reads every shard of a dataset that is continued; "sizes" trusts its own crashes: see `verify`.
        """
        self.place = place_of(path)
        self.header = header
        self.items_per_shard = items_per_shard
        self.identity = identity
        self.resume = resume
        self.derived = derived
        self.verify: Verify = verify
        self.version = version
        self._full: list[ShardEntry] = []
        self._texts: list[str] = []  # the first of them as the manifest has them
        self._partial: ShardEntry | None = None  # listed last; goes once a longer shard takes its place
        self._created = datetime.now(UTC).isoformat(timespec="seconds")
        self._complete = False
        self._fields: RowFields = {}
        self._buffer: dict[str, Tensor] = {}
        self._rows = 0  # rows accepted; those beyond the full shards are in the buffer
        self._row_totals: dict[str, int] = {}  # after the last accepted row
        self._flushed = 0  # rows accepted when the partial shard was written here
        self._ahead: dict[int, ShardEntry] = {}  # adopted, behind a gap
        self._unsynced: list[str] = []  # names of shards
        self._dirty = False  # the manifest on disk is out of date
        self._commit_failed = False
        self._committed_at = 0.0
        self._fresh = True  # started by us, not continued
        self._destination = destination_of(self.place)
        self._commit_cost_s = 0.0  # of the last manifest put into a store

    @property
    def items(self) -> int:
        """Items in full shards: where the next row of a resumed dataset belongs."""
        return len(self._full) * self.items_per_shard

    @property
    def totals(self) -> dict[str, int]:
        """Running totals after the last full shard, empty at the start."""
        return dict(self._full[-1].totals) if self._full else {}

    def __enter__(self) -> Self:
        """Check everything, then create the dataset or continue the existing one."""
        if self.items_per_shard < 1:
            raise ConfigError(
                "must be at least 1", field="items_per_shard", value=self.items_per_shard, code="out_of_range"
            )
        self._text()  # a header that cannot be written must fail before anything is created
        with refusals(self.place, kept=False):
            self._fresh = self._destination.is_vacant()
            if not self._fresh and not self.resume:
                raise DatasetError(
                    f"{self.place} is not empty",
                    code="occupied",
                    hint="add {resume} to continue it or choose another {out}",
                )
            try:
                self._start() if self._fresh else self._continue()
            except BaseException:
                self._destination.unlock()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining rows and commit; after a storage error no more rows are written."""
        try:
            if not isinstance(failure, StorageError):
                self.flush_partial()
                self._commit()
            elif not self._commit_failed:  # shards renamed since the last commit are complete: list them
                with suppress(StorageError):
                    self._commit()
            if failure is not None and self._fresh and not self._listed():
                self._destination.undo()  # nothing was written: leave no directory that would block the next try
        finally:
            self._destination.unlock()

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
                f"{self.place}: shard {number} is {entry.name} of {entry.items} items, expected {shard_name(number)} "
                f"of 1 to {self.items_per_shard}"
            )
        known = self._full[number] if number < len(self._full) else self._ahead.get(number)
        if number == len(self._full) and self._partial is not None:
            known = self._partial
        if known is not None and known.sha256 != entry.sha256:
            raise DatasetError(
                f"{self.place}: shard {entry.name} was made twice with different bytes",
                hint="use devices of one type only",
            )
        if known is None:
            self._ahead[number] = entry
        while self._partial is None and (ready := self._ahead.pop(len(self._full), None)) is not None:
            self._list(ready)

    def vacate(self) -> None:
        """Stop listing a partial last shard that others are about to write: no reader may see its name on new bytes."""
        assert not self._buffered(), "vacate after append"
        self._unlist_partial()

    def flush_partial(self) -> None:
        """Write the rows of the unfinished shard; a longer one that is already listed stays."""
        if self._buffered() > (self._partial.items if self._partial else 0):
            self._write_shard()

    def finish(self, **extra: Any) -> None:
        """Write the remaining rows, add the extra fields to the manifest and mark the dataset complete."""
        assert not self._ahead, f"shard {len(self._full)} is missing"
        with refusals(self.place):
            if not self._buffered():
                self._partial = None
            elif self._flushed != self._rows:
                self._write_shard()  # also over a listed partial one: it may come from a run with more items
            self.header = {**self.header, **extra}
            self._complete = self._dirty = True
            self._commit()
            self._destination.sweep({entry.name for entry in self._listed()})

    # Opening

    def _start(self) -> None:
        try:
            self._destination.create()
            # The manifest comes first, so that a crash from here on leaves a directory that can be resumed.
            self._dirty = True
            self._commit()
            self._destination.prepare()
        except (OSError, StorageError):
            self._destination.undo()
            raise

    def _continue(self) -> None:
        if not self.place.exists(MANIFEST):
            raise DatasetError(
                f"{self.place} has no {MANIFEST} to resume from", code="occupied", hint="choose another {out}"
            )
        self._destination.lock()
        dataset = Dataset(self.place)
        self._check_identity(dataset.manifest)
        self._created = str(dataset.manifest["created"])
        self._keep(dataset)
        self._destination.prepare()
        self._destination.sweep({entry.name for entry in self._listed()})
        self._committed_at = time.monotonic()

    def _check_identity(self, manifest: dict[str, Any]) -> None:
        own = {"format_version": self.version, "items_per_shard": self.items_per_shard}
        wanted = json.loads(json.dumps({**self.header, **own}))
        for key in (*own, *self.identity):
            difference = _first_difference(key, manifest.get(key, _ABSENT), wanted.get(key, _ABSENT))
            if difference:
                is_of_another_version = key == "format_version"
                raise DatasetError(
                    f"{self.place} cannot be resumed: {difference}",
                    code="differs",
                    hint="it was made by another version of brim; remove it or choose another {out}"
                    if is_of_another_version
                    else "use the same options, or choose another {out}",
                )

    def _keep(self, dataset: Dataset) -> None:
        """Take over the full shards, verified, and a partial last one until it is written again."""
        self._full = list(dataset.shards)
        if self._full and self._full[-1].items < self.items_per_shard:
            self._partial = self._full.pop()
        for entry in self._full:
            if entry.items != self.items_per_shard:
                raise DatasetError(
                    f"{self.place.at(MANIFEST)}: shard {entry.name} has {entry.items} items, "
                    f"expected {self.items_per_shard}",
                    code="differs",
                    hint="choose another {out}",
                )
        dataset.shards = self._full
        verify(dataset, self.verify)
        self._fields = dataset.fields
        self._rows, self._row_totals = self.items, self.totals
        if self._partial is not None:
            try:
                check_bytes(dataset.file(self._partial), self._partial, checksum=True)
            except ShardCorrupt:  # it is made again anyway
                self._partial, self._dirty = None, True

    # Writing

    def _buffered(self) -> int:
        return self._rows - self.items

    def _listed(self) -> list[ShardEntry]:
        return [*self._full, *([self._partial] if self._partial else [])]

    def _check_rows(self, rows: dict[str, Tensor], totals: dict[str, Tensor]) -> int:
        """Check that the rows match the previous ones and return their number; allocates on the first call."""
        num_rows = check_fields(rows, str(self.place), *totals.values())
        fields = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.items()}
        if fields != (self._fields or fields):
            raise DatasetError(f"{self.place}: rows are {fields}, the shards before hold {self._fields}")
        if not self._buffer:
            self._fields = fields
            with guard():
                self._buffer = allocate(fields, self.items_per_shard)
        return num_rows

    def _write_shard(self) -> None:
        """Write the buffered rows as the next shard and list it, full or partial."""
        number, count = len(self._full), self._buffered()
        name = shard_name(number)
        tensors = {field: rows[:count] for field, rows in self._buffer.items()}
        with refusals(self.place.at(f"shards/{name}"), kept=bool(self._listed())):
            # synced with the manifest, for several shards at once
            size, sha256 = put_shard(self.place, number, tensors, before=self._unlist_partial)
        self._list(ShardEntry(name=name, items=count, bytes=size, sha256=sha256, totals=self._row_totals))

    def _unlist_partial(self) -> None:
        """The new shard has the same file name: the manifest must not list the old bytes when they are replaced."""
        if self._partial is not None:
            self._partial, self._dirty = None, True
            self._commit()

    def _list(self, entry: ShardEntry) -> None:
        """List the next shard in the manifest, at once or with those of the next second."""
        self._unsynced.append(entry.name)
        self._dirty = True
        self._rows, self._row_totals = self.items + entry.items, entry.totals
        if entry.items == self.items_per_shard:
            self._full.append(entry)
        else:
            self._partial, self._flushed = entry, self._rows
        if time.monotonic() - self._committed_at >= max(COMMIT_S, 20 * self._commit_cost_s):
            self._commit()

    def _commit(self) -> None:
        """Make the shards durable, then write a manifest that lists them."""
        if not self._dirty:
            return
        self._commit_failed = True  # until it ends: a sync that failed once may seem to work when repeated
        began_s = time.monotonic()
        text = self._text()
        with refusals(self.place.at(MANIFEST), kept=bool(self._listed())):
            self._destination.put_manifest(text, self._unsynced)
        self._unsynced.clear()
        self._dirty = self._commit_failed = False
        self._committed_at = time.monotonic()
        if self.place.path is None:  # the manifest of many shards is large: at most a twentieth of the time is for it
            self._commit_cost_s = self._committed_at - began_s

    def _text(self) -> str:
        """The manifest as JSON; entries of full shards are formatted once: a hundred thousand take seconds."""
        self._texts += [_entry_text(entry) for entry in self._full[len(self._texts) :]]
        listed = [*self._texts, *([_entry_text(self._partial)] if self._partial else [])]
        text = json.dumps(self._manifest(), indent=1, ensure_ascii=False)
        if listed:
            text = "".join([text.removesuffix("[]\n}"), "[\n", ",\n".join(listed), "\n ]\n}"])
        return text + "\n"

    def _manifest(self) -> dict[str, Any]:
        """The manifest without its list of shards."""
        last = self._partial or (self._full[-1] if self._full else None)
        items, totals = self.items + (self._partial.items if self._partial else 0), last.totals if last else {}
        own_first = {"format_version": self.version, "created": self._created}
        own_last = {
            **(self.derived(items, totals) if self.derived is not None else {}),
            "items": items,
            "items_per_shard": self.items_per_shard,
            "totals": totals,
            "complete": self._complete,
            "shards": [],
        }
        assert not self.header.keys() & {*own_first, *own_last}, "header uses a key of the manifest"
        return {**own_first, **self.header, **own_last}


def _entry_text(entry: ShardEntry) -> str:
    return indent(json.dumps(asdict(entry), indent=1, ensure_ascii=False), "  ")


# Differences


_ABSENT = object()


def _first_difference(path: str, old_value: Any, wanted: Any) -> str:
    """The first difference of two JSON values, in words; empty if they are equal."""
    if isinstance(old_value, dict) and isinstance(wanted, dict):
        keys = [(f"{path}.{key}", key) for key in dict.fromkeys((*old_value, *wanted))]
        pairs = [(name, old_value.get(key, _ABSENT), wanted.get(key, _ABSENT)) for name, key in keys]
    elif isinstance(old_value, list) and isinstance(wanted, list) and len(old_value) == len(wanted):
        pairs = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(old_value, wanted, strict=True))]
    elif old_value == wanted:
        return ""
    else:
        old, new = ("absent" if value is _ABSENT else json.dumps(value) for value in (old_value, wanted))
        return f"{path} is {old} in the dataset and {new} now"
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), "")

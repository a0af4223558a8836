"""Where a writer puts a dataset: a directory, or a prefix of an object store.

Both keep a second writer out, write a shard completely or not at all, write the manifest after the shards it lists, and
remove the leftovers of a crash. A directory renames and syncs; a store accepts an object completely or not at all.
"""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from brim.engine.storage.dataset import MANIFEST
from brim.engine.storage.places import ObjectPlace, Place, lock_directory, sync
from brim.engine.storage.shard_file import unfinished
from brim.errors import DatasetError, StorageError

LEASE_S = 60.0  # longest time a dead writer keeps others out
LEASE_FILE = ".lock.json"


class Lease:
    """The right to write under a prefix; held from `acquire` to `release`."""

    def __init__(self, place: ObjectPlace) -> None:
        self.place = place
        self._token = secrets.token_hex(16)
        self._renewing = ObjectPlace(place.url, patience_s=0.0)  # a failed renewal is repeated at the next interval
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease and keep renewing it; DatasetError if a live writer has it."""
        if not self.place.create(self._text(), LEASE_FILE):
            self._refuse_living()
            self.place.remove(LEASE_FILE)  # if two find it expired, the store lets only one create the next
            if not self.place.create(self._text(), LEASE_FILE):
                self._refuse_living()
                raise DatasetError(
                    f"{self.place}: another process started to write at the same time",
                    code="in_use",
                    hint="try again later",
                )
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise StorageError unless the lease is still ours."""
        lease = self._read(self.place)
        if lease.get("token") != self._token:
            raise StorageError(
                f"{self.place}: {lease.get('writer', 'another process')} has taken over, because this process did not "
                f"renew its lease for {LEASE_S:g} s",
                code="in_use",
                hint="wait for the other process to end",
            )

    def release(self) -> None:
        """Give the lease back, so that the next writer need not wait for its end."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with suppress(StorageError):  # otherwise it expires
            if self._read(self.place).get("token") == self._token:
                self.place.remove(LEASE_FILE)

    def _refuse_living(self) -> None:
        lease = self._read(self.place)
        try:
            left_s = float(lease.get("until", 0)) - time.time()
        except (TypeError, ValueError):
            left_s = 0.0
        if left_s > 0:
            raise DatasetError(
                f"{self.place} is being written by {lease.get('writer', 'another process')}",
                code="in_use",
                hint=f"wait for it to end, or {left_s:.0f} s if it was killed",
            )

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / 3):
            with suppress(StorageError):
                if self._read(self._renewing).get("token") != self._token:
                    return  # check() says so
                self._renewing.put_bytes(self._text(), LEASE_FILE)

    def _text(self) -> bytes:
        writer = f"process {os.getpid()} of {socket.gethostname()}"
        return json.dumps({"writer": writer, "token": self._token, "until": time.time() + LEASE_S}).encode()

    @staticmethod
    def _read(place: ObjectPlace) -> dict[str, Any]:
        """The content of the lease; empty if there is none or it cannot be read."""
        with suppress(FileNotFoundError, ValueError):
            lease = json.loads(place.read_bytes(LEASE_FILE))
            if isinstance(lease, dict):
                return lease
        return {}


_OURS = re.compile(r"[0-9]{6}\.safetensors|\.[0-9]{6}(\.[0-9a-f]{8})?\.tmp")


def destination_of(place: Place) -> "Destination":
    """The destination of a dataset at a place."""
    return StoreDestination(place) if isinstance(place, ObjectPlace) else DirectoryDestination(place)


class DirectoryDestination:
    def __init__(self, place: Place) -> None:
        assert place.path is not None
        self.path = place.path
        self._made: list[Path] = []  # directories that did not exist before, outermost first
        self._lock: int | None = None

    def is_vacant(self) -> bool:
        """Whether there is nothing but leftovers of a crash before the first manifest."""
        if not self.path.exists():
            return True
        if not self.path.is_dir():
            raise DatasetError(
                f"{self.path} is a file, expected a directory", code="occupied", hint="choose another {out}"
            )
        return {entry.name for entry in self.path.iterdir()} <= {f".{MANIFEST}.tmp"}

    def create(self) -> None:
        """Create the directory and its parents, and keep other writers out."""
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            self._made.append(place)
        self.lock()

    def lock(self) -> None:
        self._lock = lock_directory(self.path, DatasetError)

    def prepare(self) -> None:
        """Make room for shards, once the manifest is written."""
        (self.path / "shards").mkdir(exist_ok=True)
        if self._made:
            sync(self.path.parent)

    def put_manifest(self, text: str, shards: Collection[str]) -> None:
        """Sync the shards, then the manifest, then rename it."""
        file, temporary = self.path / MANIFEST, self.path / f".{MANIFEST}.tmp"
        with unfinished(temporary):
            for name in shards:
                sync(self.path / "shards" / name)
            if shards:
                sync(self.path / "shards")
            with temporary.open("w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
            sync(self.path)

    def sweep(self, listed: Collection[str]) -> None:
        """Remove temporary files and shards that are not listed; foreign files stay."""
        for file in (self.path / "shards").iterdir():
            if _OURS.fullmatch(file.name) and file.name not in listed:
                file.unlink()
        (self.path / f".{MANIFEST}.tmp").unlink(missing_ok=True)

    def undo(self) -> None:
        """Remove what was created, so that the next try finds an empty directory."""
        with suppress(OSError):
            if (self.path / "shards").exists():
                self.sweep(())
                (self.path / "shards").rmdir()
            (self.path / MANIFEST).unlink(missing_ok=True)
            for place in reversed(self._made):
                place.rmdir()

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class StoreDestination:
    def __init__(self, place: ObjectPlace) -> None:
        self.place = place
        self._lease = Lease(place)

    def is_vacant(self) -> bool:
        return set(self.place.walk()) <= {LEASE_FILE}

    def create(self) -> None:
        """Take the lease, then check again: another writer may have written since the prefix was found empty."""
        self.lock()
        if not self.is_vacant():
            raise DatasetError(f"{self.place} is no longer empty", code="occupied", hint="add {resume} to continue it")

    def lock(self) -> None:
        self._lease.acquire()

    def prepare(self) -> None:
        """An object store has no directories."""

    def put_manifest(self, text: str, shards: Collection[str]) -> None:
        """Shards are durable once uploaded; only the holder of the lease may list them."""
        self._lease.check()
        self.place.put_bytes(text.encode(), MANIFEST)

    def sweep(self, listed: Collection[str]) -> None:
        for name in self.place.names("shards"):
            if _OURS.fullmatch(name) and name not in listed:
                self.place.remove(f"shards/{name}")

    def undo(self) -> None:
        """Remove what this run wrote, unless another writer has taken over."""
        with suppress(StorageError):
            self._lease.check()
            self.sweep(())
            self.place.remove(MANIFEST)

    def unlock(self) -> None:
        self._lease.release()


Destination = DirectoryDestination | StoreDestination

"""One writer at a time in an object store: an object that says who writes there and until when, renewed by a thread.

A directory has the operating system's lock, which ends with its process; a store has none. A writer that dies leaves a
lease that runs out; one that loses its lease, because the store did not answer it for so long, notices before it
writes another manifest.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from brim.engine.storage.places import ObjectPlace
from brim.errors import DatasetError, StorageError

LEASE_S = 60.0  # a dead writer keeps others out for so long at most
NAME = ".lock.json"


class Lease:
    """The right to write under a prefix; held from `acquire` to `release`."""

    def __init__(self, place: ObjectPlace) -> None:
        """Store."""
        self.place = place
        self._token = secrets.token_hex(16)
        self._renewing = ObjectPlace(place.url, patience_s=0.0)  # a renewal that fails is tried at the next one
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease and keep it; DatasetError when a living writer has it."""
        if not self.place.create(self._text(), NAME):
            self._refuse_living()
            self.place.remove(NAME)  # of two who find it run out, the store lets one create the next
            if not self.place.create(self._text(), NAME):
                self._refuse_living()
                raise DatasetError(f"{self.place}: another process began to write at this moment; try again later")
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise StorageError unless the lease is still ours."""
        found = self._read(self.place)
        if found.get("token") != self._token:
            raise StorageError(
                f"{self.place}: {found.get('writer', 'another process')} writes there now, since this one did not "
                f"renew its lease for {LEASE_S:g} s; nothing more is written here, wait for the other one"
            )

    def release(self) -> None:
        """Let the next writer in at once."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with suppress(StorageError):  # else it runs out
            if self._read(self.place).get("token") == self._token:
                self.place.remove(NAME)

    def _refuse_living(self) -> None:
        found = self._read(self.place)
        try:
            left_s = float(found.get("until", 0)) - time.time()
        except (TypeError, ValueError):
            left_s = 0.0
        if left_s > 0:
            raise DatasetError(
                f"{self.place} is being written by {found.get('writer', 'another process')}; wait for it to end, or "
                f"{left_s:.0f} s if it was killed"
            )

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / 3):
            with suppress(StorageError):
                if self._read(self._renewing).get("token") != self._token:
                    return  # check() says so
                self._renewing.put_bytes(self._text(), NAME)

    def _text(self) -> bytes:
        writer = f"process {os.getpid()} of {socket.gethostname()}"
        return json.dumps({"writer": writer, "token": self._token, "until": time.time() + LEASE_S}).encode()

    @staticmethod
    def _read(place: ObjectPlace) -> dict[str, Any]:
        """What the lease says; nothing where there is none, or one that is not ours to understand."""
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(place.read_bytes(NAME))
            if isinstance(found, dict):
                return found
        return {}

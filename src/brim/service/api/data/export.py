"""A dataset to take away: its own files as they are, or radio samples in the format of other tools.

Another format is first written below DATA/uploads, where the next start clears what a killed process leaves; then the
zip is made as it is sent. Whatever ends an export, its folder goes and its place is free again.
"""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from brim.errors import ConfigError, DatasetError, StorageError, TooMany
from brim.jobs.store import DatasetRow, new_id
from brim.jobs.worker import disk
from brim.service.api.data.reading import readable, refusal
from brim.service.api.data.zipping import Entry, zipped

MAX_EXPORTS: Final = 2  # of one API process, until they are fetched: each may take a dataset's room on the disk
MANIFEST: Final = "manifest.json"
_LOOK_S = 0.5  # between two looks at whether the client is still there


class Parcel:
    """What is sent, and what has to go afterwards; made by Exports, closed once by whoever has it last."""

    def __init__(self, give_back: Callable[[], None], folder: Path | None = None) -> None:
        self.entries: Iterator[Entry] = iter(())
        self.folder = folder
        self._give_back, self._lock, self._closed = give_back, threading.Lock(), False

    def close(self) -> None:
        """Remove what was written for it; a second time changes nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._give_back()


class Exports:
    """The exports of one API process."""

    def __init__(self, limit: int = MAX_EXPORTS) -> None:
        self._limit, self._free = limit, threading.Semaphore(limit)
        self._pool = ThreadPoolExecutor(limit, thread_name_prefix="export")

    async def own_files(self, row: DatasetRow, place: Path, redact: Callable[[Any], Any]) -> Parcel:
        """The dataset's own files; redact takes what the manifest says of this machine out of it."""
        parcel = self._open(None)
        return await self._made(parcel, self._pool.submit(_take_own, parcel, row, place, redact))

    async def converted(
        self, row: DatasetRow, place: Path, fmt: str, *, data: Path, min_free_bytes: int, request: Request
    ) -> Parcel:
        """Radio samples in another format; ClientDisconnect where the client leaves meanwhile."""
        parcel, gone = self._open(data / "uploads" / new_id()), threading.Event()
        work = self._pool.submit(_convert, parcel, row, place, fmt, min_free_bytes, gone)
        return await self._made(parcel, work, request, gone)

    def _open(self, folder: Path | None) -> Parcel:
        if not self._free.acquire(blocking=False):
            raise TooMany(f"{self._limit} exports are being made or fetched, the most at once; try again later")
        return Parcel(self._free.release, folder)

    async def _made(
        self,
        parcel: Parcel,
        work: "Future[None]",
        request: Request | None = None,
        gone: threading.Event | None = None,
    ) -> Parcel:
        """The parcel once it is ready; where that comes to nothing it is closed, as soon as its thread has ended."""
        try:
            waiting = asyncio.wrap_future(work)
            while not (await asyncio.wait({waiting}, timeout=_LOOK_S))[0]:
                if request is not None and gone is not None and await request.is_disconnected():
                    gone.set()
            await waiting
        except BaseException:
            if gone is not None:
                gone.set()
            work.add_done_callback(lambda _: parcel.close())
            raise
        return parcel


class Download(StreamingResponse):
    """A parcel on its way as a zip."""

    media_type = "application/zip"

    def __init__(self, parcel: Parcel, name: str) -> None:
        self._parcel, self._bytes = parcel, zipped(parcel.entries)
        super().__init__(self._bytes, headers={"Content-Disposition": f'attachment; filename="{name}"'})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, and clear up however that ends."""
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._bytes.close()  # type: ignore[attr-defined]  # a generator: lets go of the file it reads
            ending = asyncio.get_running_loop().run_in_executor(None, self._parcel.close)
            await asyncio.shield(ending)  # goes on where this is cancelled


def file_name(row: DatasetRow, fmt: str) -> str:
    """Such as night-sky.parquet.zip: only what every file system takes."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in row.name)
    stem = "-".join(filter(None, plain.split("-")))[:60] or "dataset"
    return f"{stem}.zip" if fmt == "files" else f"{stem}.{fmt}.zip"


# In a thread


def _take_own(parcel: Parcel, row: DatasetRow, place: Path, redact: Callable[[Any], Any]) -> None:
    with readable(row, place):
        parcel.entries = iter(_images(place) if row.kind == "images" else _shards(place, redact))


def _images(place: Path) -> list[Entry]:
    from brim.jobs.registry.datasets import image_folders
    from brim.segmentation.images import find_images

    folders = [folder for folder in image_folders(place) if folder is not None]
    return [(file.relative_to(place).as_posix(), file) for file in find_images(folders)]


def _shards(place: Path, redact: Callable[[Any], Any]) -> list[Entry]:
    """Manifest, table and what the manifest lists, so that the zip holds a dataset that can be read again."""
    from brim.engine.storage import Dataset

    data = Dataset(place)
    text = json.dumps(redact(data.manifest), indent=1, ensure_ascii=False)
    table = [(file.name, file) for file in (place / "items.json",) if file.is_file()]
    shards = [(f"shards/{entry.name}", place / "shards" / entry.name) for entry in data.shards]
    return [(MANIFEST, f"{text}\n".encode()), *table, *shards]


class _Gone(Exception):
    """Nobody waits for it any more."""


def _convert(
    parcel: Parcel, row: DatasetRow, place: Path, fmt: str, min_free_bytes: int, gone: threading.Event
) -> None:
    from brim.rf.datasets.export import export
    from brim.rf.datasets.inspect import open_dataset

    folder = parcel.folder
    assert folder is not None

    def look(done: int, total: int) -> None:
        if gone.is_set():
            raise _Gone
        _check_room(folder, 0, min_free_bytes)

    try:
        look(0, 0)
        _check_room(folder, sum(entry.bytes for entry in open_dataset(place).shards), min_free_bytes)
        folder.mkdir(mode=0o700, parents=True)
        export(place, folder / "export", fmt, progress=look)
    except _Gone:
        raise ClientDisconnect from None
    except (ConfigError, DatasetError) as failure:
        raise refusal(row, place, failure, "exported") from failure
    except StorageError as failure:
        raise _worded(failure) from failure
    files = sorted((folder / "export").iterdir())
    parcel.entries = ((file.name, file) for file in files)


def _worded(failure: StorageError) -> StorageError:
    """Without the command line's next step, where the disk itself refused."""
    cause = failure.__cause__
    reason = cause.strerror if isinstance(cause, OSError) else None
    return StorageError(f"the export cannot be written: {reason}; free some space" if reason else str(failure))


def _check_room(folder: Path, need_bytes: int, min_free_bytes: int) -> None:
    free = disk.free_bytes(folder)
    if need_bytes + min_free_bytes > free:
        raise StorageError(
            f"the export needs about {disk.words(need_bytes)} of disk and {disk.words(min_free_bytes)} must stay free, "
            f"but only {disk.words(free)} are free; free some space, or take format=files, which needs none"
        )

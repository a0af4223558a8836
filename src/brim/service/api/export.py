"""A dataset as a zip: its own files, or radio samples in the format of other tools.

Another format is first written below DATA/uploads, which the next start clears of what a killed process left; the zip
is made while it is sent. However an export ends, its folder is removed and its slot is free again.
"""

import asyncio
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from brim.errors import TooMany
from brim.jobs.store import DatasetRow, JobRow, new_id

MAX_EXPORTS: Final = 2  # of one API process, until they are fetched: each may need a dataset's size of disk
CHUNK_BYTES: Final = 1024**2
LARGE_BYTES: Final = 2**30  # larger entries are written with 64-bit sizes, which is announced before the first byte

ZipEntry = tuple[str, Path | bytes]  # name in the zip, and content


class Exports:
    """Slots for the exports of one API process, each with a folder that exists while it is needed."""

    def __init__(self, limit: int = MAX_EXPORTS) -> None:
        self._limit = self.num_free = limit

    def open(self, data: Path) -> Path:
        """The folder of a new export; close it once, whatever happens."""
        if not self.num_free:
            raise TooMany(f"{self._limit} exports are being made or fetched, the most at once", hint="try again later")
        self.num_free -= 1
        return data / "uploads" / new_id()

    async def close(self, folder: Path) -> None:
        """Remove the folder, also when the request is cancelled meanwhile."""
        removing = asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, folder, True)
        try:
            await asyncio.shield(removing)
        finally:
            self.num_free += 1


class Download(StreamingResponse):
    """An export on its way as a zip; closes it at the end."""

    media_type = "application/zip"

    def __init__(self, exports: Exports, folder: Path, entries: Iterable[ZipEntry], name: str) -> None:
        self._exports, self._folder, self._chunks = exports, folder, zipped(entries)
        super().__init__(self._chunks, headers={"Content-Disposition": f'attachment; filename="{name}"'})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._chunks.close()  # type: ignore[attr-defined]  # a generator: closes the file it reads
            await self._exports.close(self._folder)


def file_name(row: DatasetRow | JobRow, format: str) -> str:
    """A name such as night-sky.parquet.zip that every file system accepts."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in row.name)
    stem = "-".join(filter(None, plain.split("-")))[:60] or "dataset"
    return f"{stem}.zip" if format == "files" else f"{stem}.{format}.zip"


def zipped(entries: Iterable[ZipEntry]) -> Iterator[bytes]:
    """The bytes of a zip in chunks; files are opened when their turn comes.

    Stored, not compressed: shards, Parquet and images hardly get smaller, and it would take hours.
    """
    buffer = _Buffer()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]  # needs no seek
        for name, content in entries:
            if isinstance(content, bytes):
                archive.writestr(name, content)
                yield buffer.take()
                continue
            info = zipfile.ZipInfo.from_file(content, name, strict_timestamps=False)
            large = info.file_size >= LARGE_BYTES
            with content.open("rb") as opened, archive.open(info, "w", force_zip64=large) as out:
                while chunk := opened.read(CHUNK_BYTES):
                    out.write(chunk)
                    yield buffer.take()
    yield buffer.take()


class _Buffer:
    """What a zip is written to; cannot seek."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        taken, self._pieces = b"".join(self._pieces), []
        return taken

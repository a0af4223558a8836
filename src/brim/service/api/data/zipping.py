"""Files as one zip that is made while it is sent: nothing of it is ever whole in memory or on disk."""

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

CHUNK_BYTES = 1024**2
LARGE_BYTES = 2**30  # from here on an entry is written with 64-bit sizes, which must be said before its first byte

Entry = tuple[str, Path | bytes]  # its name in the zip, and what it holds


def zipped(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The bytes of a zip, some at a time; files are opened when their turn comes.

    Stored, not packed: shards, Parquet and images hardly get smaller, and the sender would be at it for hours.
    """
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]  # needs no seek
        for name, content in entries:
            if isinstance(content, bytes):
                archive.writestr(name, content)
                yield sink.take()
                continue
            about = zipfile.ZipInfo.from_file(content, name, strict_timestamps=False)
            large = about.file_size >= LARGE_BYTES
            with content.open("rb") as opened, archive.open(about, "w", force_zip64=large) as out:
                while chunk := opened.read(CHUNK_BYTES):
                    out.write(chunk)
                    yield sink.take()
    yield sink.take()


class _Sink:
    """What a zip is written to: it has no place to go back to."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def take(self) -> bytes:
        """All since the last time."""
        taken, self._pieces = b"".join(self._pieces), []
        return taken

"""A multipart body written to disk as it comes: never in memory, never under a name that leads elsewhere.

Each file goes to FOLDER/FIELD/NAME, where the field is one of ours and the name is a plain one; labels to
FOLDER/labels.csv.
"""

import re
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from brim.errors import ConfigError, Conflict, StorageError
from brim.jobs.worker import disk
from brim.service.api.data.multipart import Multipart, text_of

FILES: Final = ("images", "masks", "sequences")
LABELS: Final = "labels"
TEXTS: Final = ("name", "kind")
NAME: Final = re.compile(r"[^\W_.-][\w. -]{0,199}|_[\w. -]{0,199}")
_MAX_TEXT = 1000  # bytes of a text field
_LOOK_BYTES = 16 * 1024**2  # written between two looks at the disk


class Upload:
    """Takes a body in pieces; inside a with block. Blocking: feed it from a thread."""

    def __init__(self, folder: Path, boundary: bytes, *, max_files: int, min_free_bytes: int) -> None:
        """Write below folder, which is made."""
        self.texts: dict[str, str] = {}
        self.num_files: dict[str, int] = dict.fromkeys(FILES, 0)
        self.labels: Path | None = None
        self._folder, self._max_files, self._min_free = folder, max_files, min_free_bytes
        self._field, self._text, self._file = "", bytearray(), _none()
        self._names: set[tuple[str, str]] = set()
        self._unseen = _LOOK_BYTES  # look at the disk before the first byte
        self._body = Multipart(boundary, self)

    def __enter__(self) -> Self:
        """Make the folder."""
        self._folder.mkdir(mode=0o700, parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is open."""
        self._close()

    def feed(self, chunk: bytes) -> None:
        """Take some bytes."""
        self._look_at_disk(len(chunk))
        try:
            self._body.feed(chunk)
        except OSError as failure:
            raise StorageError(f"the upload cannot be stored: {failure.strerror}; free some space") from failure

    def finish(self) -> None:
        """Say that all has been fed."""
        self._body.finish()

    # Parts

    def open(self, field: str, name: str | None) -> None:
        """Begin a part."""
        self._field, self._text, self._file = "", bytearray(), _none()
        if field in TEXTS and field not in self.texts:
            self._field, self.texts[field] = field, ""
        elif field in FILES:
            self._field, self._file = field, self._create(field, name or "")
        elif field == LABELS and self.labels is None:
            self.labels = self._folder / "labels.csv"
            self._field, self._file = field, self.labels.open("xb")
        elif field in (*TEXTS, LABELS):
            raise ConfigError(f"{field} is given twice; give it once", field=field)
        else:
            known = ", ".join((*TEXTS, *FILES, LABELS))
            raise ConfigError(f"{field[:60]} is unknown; known: {known}", field=field[:60])

    def _create(self, field: str, name: str) -> IO[bytes]:
        if not NAME.fullmatch(name) or name.endswith((".", " ")):
            expected = "1 to 200 letters, digits, spaces, dots, - or _, without a folder and not beginning with a dot"
            raise ConfigError(f"{field}: a file's name must be {expected}", field=field)
        if (field, name.casefold()) in self._names:
            raise Conflict(f'{field}: "{name}" comes twice; give each file a name of its own', field=field)
        if len(self._names) >= self._max_files:
            raise ConfigError(
                f"{field}: more than {self._max_files} files at once; send fewer, as several datasets", field=field
            )
        self._names.add((field, name.casefold()))
        self.num_files[field] += 1
        (self._folder / field).mkdir(mode=0o700, exist_ok=True)
        return (self._folder / field / name).open("xb")

    def write(self, data: bytes, start: int, end: int) -> None:
        """Take some of it."""
        if self._file is not None:
            self._file.write(data[start:end])
            return
        self._text.extend(data[start:end])
        if len(self._text) > _MAX_TEXT:
            raise ConfigError(f"{self._field} is longer than {_MAX_TEXT} bytes", field=self._field)

    def end(self) -> None:
        """Close it."""
        if self._file is None:
            self.texts[self._field] = text_of(self._text)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _look_at_disk(self, coming: int) -> None:
        self._unseen += coming
        if self._unseen >= _LOOK_BYTES:
            self._unseen = 0
            check_room(self._folder, coming, self._min_free)


def check_room(folder: Path, coming: int, min_free_bytes: int) -> None:
    """Refuse bytes that the disk has no room for."""
    free = disk.free_bytes(folder)
    if coming + min_free_bytes > free:
        raise StorageError(
            f"the upload brings {disk.words(coming)} and {disk.words(min_free_bytes)} must stay free, but only "
            f"{disk.words(free)} are free; free some space, then send it again"
        )


def _none() -> IO[bytes] | None:
    return None

"""Multipart bodies, parsed in pieces as they arrive; uploads go straight to disk.

A file is written to FOLDER/FIELD/NAME, where the field is one of ours and the name is plain; labels go to
FOLDER/labels.csv.
"""

import re
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

import python_multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from brim.errors import ConfigError, Conflict, StorageError
from brim.jobs.worker import disk
from brim.service.api.body import Unreadable

FILES: Final = ("images", "masks", "sequences")
LABELS: Final = "labels"
TEXTS: Final = ("name", "kind")
NAME: Final = re.compile(r"[^\W_.-][\w. -]{0,199}|_[\w. -]{0,199}")
_MAX_HEADER: Final = 4096  # bytes of a part's header
_MAX_HEADERS: Final = 16
_MAX_TEXT: Final = 1000  # bytes of a text field
_CHECK_BYTES: Final = 16 * 1024**2  # written between two checks of the disk


class PartConsumer(Protocol):
    """Receives parts one after another: open, any number of writes, end."""

    def open(self, field: str, name: str | None) -> None:
        """Begin a part; name is that of a file."""

    def write(self, data: bytes, start: int, end: int) -> None:
        """Take data[start:end], which must not be kept without a copy or a view."""

    def end(self) -> None:
        """The part is complete."""


def boundary_of(content_type: str) -> bytes:
    """The boundary of a multipart body; 415 for other types, 400 if it is missing."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        shown = kind.decode("latin-1")[:60]
        raise Unreadable(415, f'the body is of type "{shown}"; send files as multipart/form-data')
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise Unreadable(400, "the multipart body has no valid boundary; let the client make it")
    return boundary


class Multipart:
    """Splits a body into its parts."""

    def __init__(self, boundary: bytes, parts: PartConsumer) -> None:
        self._parts = parts
        self._headers: dict[bytes, bytes] = {}
        self._header = (bytearray(), bytearray())
        self._is_complete = False
        callbacks: dict[str, Any] = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._open,
            "on_part_data": parts.write,
            "on_part_end": parts.end,
            "on_end": self._complete,
        }
        self._parser = python_multipart.MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as failure:
            raise Unreadable(400, "the multipart body cannot be read; let the client make it") from failure

    def finish(self) -> None:
        """Check that the body was complete."""
        if not self._is_complete:
            raise Unreadable(400, "the multipart body ends before its last boundary; send it again")

    def _begin(self) -> None:
        self._headers, self._header = {}, (bytearray(), bytearray())

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])
        self._check_header()

    def _check_header(self) -> None:
        if sum(map(len, self._header)) > _MAX_HEADER or len(self._headers) > _MAX_HEADERS:
            raise Unreadable(400, f"a part's headers are longer than {_MAX_HEADER} bytes; use shorter names")

    def _header_end(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._headers[name.lower()] = value
        self._header = (bytearray(), bytearray())

    def _open(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise Unreadable(400, "a part of the body has no name; send each as form-data with a name")
        name = text_of(options[b"filename"]) if b"filename" in options else None
        self._parts.open(text_of(options[b"name"]).removesuffix("[]"), name)

    def _complete(self) -> None:
        self._is_complete = True


def text_of(value: bytes | bytearray) -> str:
    """A name or text in a body."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unreadable(400, "a name or text in the body is not UTF-8") from None


class Upload:
    """Writes the files of a body below a folder, inside a with block. Blocking: feed it from a thread."""

    def __init__(self, folder: Path, boundary: bytes, *, max_files: int, min_free_bytes: int) -> None:
        self.texts: dict[str, str] = {}
        self.num_files: dict[str, int] = dict.fromkeys(FILES, 0)
        self.labels: Path | None = None
        self._folder, self._max_files, self._min_free = folder, max_files, min_free_bytes
        self._field, self._text = "", bytearray()
        self._file: IO[bytes] | None = None
        self._names: set[tuple[str, str]] = set()
        self._unchecked = _CHECK_BYTES  # check the disk before the first byte
        self._body = Multipart(boundary, self)

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700, parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def feed(self, chunk: bytes) -> None:
        self._check_disk(len(chunk))
        try:
            self._body.feed(chunk)
        except OSError as failure:
            raise StorageError(f"the upload cannot be stored: {failure.strerror}", hint="free some space") from failure

    def finish(self) -> None:
        self._body.finish()

    # Parts

    def open(self, field: str, name: str | None) -> None:
        self._field, self._text, self._file = "", bytearray(), None
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
        if self._file is not None:
            self._file.write(data[start:end])
            return
        self._text.extend(data[start:end])
        if len(self._text) > _MAX_TEXT:
            raise ConfigError(f"{self._field} is longer than {_MAX_TEXT} bytes", field=self._field)

    def end(self) -> None:
        if self._file is None:
            self.texts[self._field] = text_of(self._text)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_disk(self, num_bytes: int) -> None:
        self._unchecked += num_bytes
        if self._unchecked >= _CHECK_BYTES:
            self._unchecked = 0
            check_room(self._folder, num_bytes, self._min_free)


def check_room(folder: Path, num_bytes: int, min_free_bytes: int) -> None:
    """StorageError if the disk has no room for an upload."""
    free = disk.free_bytes(folder)
    if num_bytes + min_free_bytes > free:
        raise StorageError(
            f"the upload needs {disk.words(num_bytes)} and {disk.words(min_free_bytes)} must stay free, but only "
            f"{disk.words(free)} are free",
            hint="free some space, then send it again",
        )

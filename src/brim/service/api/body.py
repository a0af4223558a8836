"""Request bodies: how many bytes they may have, JSON parsed strictly, and multipart parsed in pieces as they arrive.

`BodyLimit` is pure ASGI behind the gate and counts bytes as they arrive, so chunked bodies are limited too. JSON may
hold no NaN, no key twice, no lone surrogates, and no more than MAX_NESTING levels. Uploads go straight to disk: a file
is written to FOLDER/FIELD/NAME, where the field is one of ours and the name is plain; labels go to FOLDER/labels.csv.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self

import python_multipart
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brim.errors import ConfigError, Conflict, StorageError
from brim.jobs.status import MAX_NESTING
from brim.jobs.worker import disk
from brim.service.api.errors import send_problem

FILES: Final = ("images", "masks", "sequences", "recordings")
LABELS: Final = "labels"
TEXTS: Final = ("name", "kind")
UPLOAD_HINT: Final = "free some space, then send it again"
NAME: Final = re.compile(r"[^\W_.-][\w. -]{0,199}|_[\w. -]{0,199}")
_MAX_HEADER: Final = 4096  # bytes of a part's header
_MAX_HEADERS: Final = 16
_MAX_NAME_BYTES: Final = 255  # of a file's name; file systems take no more
_MAX_TEXT: Final = 1000  # bytes of a text field
_CHECK_BYTES: Final = 16 * 1024**2  # written between two checks of the disk


class Unreadable(HTTPException):
    """A body that is not what its type says, or of no type we take: 400 or 415."""


class BodyTooLarge(HTTPException):
    """Raised where a body is being read; becomes 413."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, _sentence(limit_bytes))


class BodyLimit:
    """Rejects bodies of more than `limit_of(path)` bytes: by Content-Length, or when the limit is passed."""

    def __init__(self, app: ASGIApp, *, limit_of: Callable[[str], int]) -> None:
        self._app, self._limit_of = app, limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = self._limit_of(scope["path"])
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:  # the server has rejected what is not a number
            return await _reject(send, limit)
        try:
            await self._app(scope, _counting(receive, limit), send)
        except BodyTooLarge:  # of a page, which has no handler of exceptions
            await _reject(send, limit)
        return None


@asynccontextmanager
async def unless_gone(request: Request) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects, as ClientDisconnect. The body must have been read."""
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def read_json(request: Request) -> Any:
    body = await request.body()  # first, so that the client gets to read a rejection
    check_type(request)
    return parse(body)


def check_type(request: Request) -> None:
    """415 unless the request says that its body is JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Unreadable(415, f'the body is of type "{kind[:60]}"; send JSON with Content-Type: application/json')


def parse(body: bytes) -> Any:
    """The value of a JSON text; 400 that says what is wrong with it."""
    try:
        value = json.loads(
            body.decode(), parse_float=_number, parse_constant=_reject_constant, object_pairs_hook=_unique_keys
        )
    except UnicodeDecodeError:
        _invalid("it is not UTF-8")
    except RecursionError:
        _invalid(f"it is nested deeper than {MAX_NESTING} levels")
    except json.JSONDecodeError as failure:
        _invalid(f"{failure.msg.lower()} at line {failure.lineno}, column {failure.colno}")
    except ValueError as failure:  # ours, or an integer of thousands of digits
        _invalid(str(failure) if isinstance(failure, _Invalid) else "a number is too long")
    _check(value, MAX_NESTING)
    return value


async def _reject(send: Send, limit: int) -> None:
    await send_problem(send, 413, _sentence(limit), [(b"connection", b"close")])  # there may be more of the body


def _counting(receive: Receive, limit: int) -> Receive:
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise BodyTooLarge(limit)
        return message

    return counted


def _sentence(limit: int) -> str:
    return f"the body is larger than {limit} bytes, the most this address takes; send less at once"


def _number(text: str) -> float | int:
    """8.0 is the integer 8: JSON has one type of number."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


class _Invalid(ValueError):
    pass


def _invalid(reason: str) -> NoReturn:
    raise Unreadable(400, f"the body is not valid JSON: {reason}")


def _reject_constant(name: str) -> NoReturn:
    raise _Invalid(f"{name} is not a number in JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):  # otherwise the last would count, silently
        raise _Invalid("a key occurs twice in one object")
    return values


def _check(value: Any, depth: int) -> None:
    """Check nesting and that every text can be encoded again."""
    if depth < 0:
        _invalid(f"it is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            _invalid("a text holds half of a character (a lone surrogate)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, depth)
            _check(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth - 1)


# Multipart


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
    """Splits a body into its parts, one after another: `open`, any number of `write`, `end`."""

    def __init__(self, boundary: bytes) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = bytearray(), bytearray()  # of the header that is being read
        self._is_complete = False
        callbacks: dict[str, Any] = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self.write,
            "on_part_end": self.end,
            "on_end": self._complete,
        }
        self._parser = python_multipart.MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def open(self, field: str, name: str | None) -> None:
        """Begin a part; name is that of a file."""
        raise NotImplementedError

    def write(self, data: bytes, start: int, end: int) -> None:
        """Take data[start:end], which must not be kept without a copy."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as failure:
            raise Unreadable(400, "the multipart body cannot be read; let the client make it") from failure

    def finish(self) -> None:
        if not self._is_complete:
            raise Unreadable(400, "the multipart body ends before its last boundary; send it again")

    def _begin(self) -> None:
        self._headers = {}

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._name) + len(self._value) > _MAX_HEADER or len(self._headers) > _MAX_HEADERS:
            raise Unreadable(400, f"a part's headers are longer than {_MAX_HEADER} bytes; use shorter names")

    def _header_end(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise Unreadable(400, "a part of the body has no name; send each as form-data with a name")
        name = text_of(options[b"filename"]) if b"filename" in options else None
        self.open(text_of(options[b"name"]).removesuffix("[]"), name)

    def _complete(self) -> None:
        self._is_complete = True


def text_of(value: bytes | bytearray) -> str:
    """A name or text in a body."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unreadable(400, "a name or text in the body is not UTF-8") from None


class Upload(Multipart):
    """Writes the files of a body below a folder, inside a with block. Blocking: feed it from a thread."""

    def __init__(
        self,
        folder: Path,
        boundary: bytes,
        *,
        max_files: int,
        min_free_bytes: int,
        files: tuple[str, ...] = FILES,
        table: str = LABELS,
        texts: tuple[str, ...] = TEXTS,
    ) -> None:
        """files, table and texts name the fields of many files, of one CSV file, and of texts."""
        super().__init__(boundary)
        self.texts: dict[str, str] = {}
        self.num_files: dict[str, int] = dict.fromkeys(files, 0)
        self.labels: Path | None = None  # the table
        self._file_fields, self._table, self._text_fields = files, table, texts
        self._folder, self._max_files, self._min_free = folder, max_files, min_free_bytes
        self._field, self._text = "", bytearray()
        self._file: IO[bytes] | None = None
        self._names: set[tuple[str, str]] = set()
        self._unchecked = _CHECK_BYTES  # check the disk before the first byte

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700, parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def feed(self, chunk: bytes) -> None:
        self._check_disk(len(chunk))
        try:
            super().feed(chunk)
        except OSError as failure:
            raise StorageError(f"the upload cannot be stored: {failure.strerror}", hint="free some space") from failure

    def open(self, field: str, name: str | None) -> None:
        self._field, self._text, self._file = "", bytearray(), None
        if field in self._text_fields and field not in self.texts:
            self._field, self.texts[field] = field, ""
        elif field in self._file_fields:
            self._field, self._file = field, self._create(field, name or "")
        elif field == self._table and self.labels is None:
            self.labels = self._folder / f"{field}.csv"
            self._field, self._file = field, self.labels.open("xb")
        elif field in (*self._text_fields, self._table):
            raise ConfigError(f"{field} is given twice; give it once", field=field)
        else:
            known = ", ".join((*self._text_fields, *self._file_fields, self._table))
            raise ConfigError(f"{field[:60]} is unknown; known: {known}", field=field[:60])

    def _create(self, field: str, name: str) -> IO[bytes]:
        if not NAME.fullmatch(name) or name.endswith((".", " ")) or len(name.encode()) > _MAX_NAME_BYTES:
            expected = (
                "1 to 200 letters, digits, spaces, dots, - or _, in at most 255 bytes, without a folder and not "
                "beginning with a dot"
            )
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
            disk.check_room(self._folder, num_bytes, self._min_free, "upload", UPLOAD_HINT)

"""A multipart body, fed in pieces as they come, taken apart; what becomes of its parts is another's matter."""

from typing import Any, Protocol

import python_multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from brim.service.api.body import Unreadable

_MAX_HEADER = 4096  # bytes of a part's header
_MAX_HEADERS = 16


class Parts(Protocol):
    """Takes parts one after another: opened, then any number of pieces, then ended."""

    def open(self, field: str, name: str | None) -> None:
        """Begin a part; name is that of a file."""

    def write(self, data: bytes, start: int, end: int) -> None:
        """Some of its bytes: data[start:end], not to be kept without a copy or a view."""

    def end(self) -> None:
        """It is whole."""


def boundary_of(content_type: str) -> bytes:
    """The boundary of a multipart body; 415 for other types, 400 where it is missing."""
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

    def __init__(self, boundary: bytes, parts: Parts) -> None:
        self._parts = parts
        self._headers: dict[bytes, bytes] = {}
        self._header = (bytearray(), bytearray())
        self._is_whole = False
        callbacks: dict[str, Any] = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._open,
            "on_part_data": parts.write,
            "on_part_end": parts.end,
            "on_end": self._finish,
        }
        self._parser = python_multipart.MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def feed(self, chunk: bytes) -> None:
        """Take some bytes."""
        try:
            self._parser.write(chunk)
        except FormParserError as failure:
            raise Unreadable(400, "the multipart body cannot be read; let the client make it") from failure

    def finish(self) -> None:
        """Say that all has been fed."""
        if not self._is_whole:
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

    def _finish(self) -> None:
        self._is_whole = True


def text_of(value: bytes | bytearray) -> str:
    """A name or a text of a body."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unreadable(400, "a name or text in the body is not UTF-8") from None

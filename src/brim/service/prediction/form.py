"""The form of a prediction request: files in memory, fields checked, in any order.

Pieces are kept as they arrive and joined once, when a file is complete: 300 kB take 0.3 ms in all.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from brim.errors import ConfigError, TooLarge
from brim.service.api.multipart import Multipart, text_of

MAX_NAME: Final = 200  # characters of a file's name
MAX_DEADLINE_MS: Final = 600_000
MODEL_PATTERN: Final = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$"
_MAX_TEXT = 1000  # bytes of a field
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": True, "false": False}  # in any case: Python writes True


@dataclass(slots=True)
class File:
    """One file of a form."""

    name: str
    data: bytes = b""

    def take(self) -> bytes:
        """Its bytes, which are no longer kept here."""
        data, self.data = self.data, b""
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class FormFields:
    """The files and fields of a route's form."""

    files: tuple[str, ...] = ("file",)  # names of the field
    max_files: int = 1
    max_file_bytes: int
    fields: Mapping[str, Callable[[str, str], Any]] = field(default_factory=dict)  # name → reads (name, text)


class Form:
    """Keeps the files of a body and reads its fields, piece by piece."""

    def __init__(self, boundary: bytes, fields: FormFields) -> None:
        self.files: list[File] = []
        self.values: dict[str, Any] = {}
        self._fields = fields
        self._field, self._is_file = "", False
        self._pieces: list[memoryview] = []
        self._length = 0
        self._body = Multipart(boundary, self)

    def feed(self, chunk: bytes) -> None:
        self._body.feed(chunk)

    def finish(self) -> None:
        """Check that the body was complete and had a file."""
        self._body.finish()
        if not self.files:
            name = self._fields.files[0]
            raise ConfigError(f"{name} is missing; send one as multipart/form-data", field=name)

    def open(self, field: str, name: str | None) -> None:
        self._field, self._is_file, self._length = field, field in self._fields.files, 0
        self._pieces = []
        if self._is_file:
            if name is None:
                raise ConfigError(f"{field} is a text; send a file, with a filename", field=field)
            self._check_count()
            self.files.append(File(_shown(name) or "the file"))
        elif field in self.values:
            raise ConfigError(f"{field} is given twice; give it once", field=field)
        elif field not in self._fields.fields:
            known = ", ".join((*self._fields.files, *self._fields.fields))
            raise ConfigError(f"{_shown(field)[:60]} is unknown; known: {known}", field=_shown(field)[:60])

    def write(self, data: bytes, start: int, end: int) -> None:
        self._length += end - start
        limit = self._fields.max_file_bytes if self._is_file else _MAX_TEXT
        if self._length > limit:
            text = f"{self._field} is larger than {limit} bytes, the most that is accepted"
            raise TooLarge(f"{text}; send a smaller one") if self._is_file else ConfigError(text, field=self._field)
        self._pieces.append(memoryview(data)[start:end])

    def end(self) -> None:
        data, self._pieces = b"".join(self._pieces), []
        if self._is_file:
            self.files[-1].data = data
        else:
            self.values[self._field] = self._fields.fields[self._field](self._field, text_of(data))

    def _check_count(self) -> None:
        most = self._fields.max_files
        if len(self.files) < most:
            return
        if most == 1:
            raise ConfigError(
                f'{self._field} is given twice; send many to "POST /api/batch-segment"', field=self._field
            )
        raise TooLarge(f"{self._field}: more than {most} files at once; send them in several requests")


# Fields: each function takes the field's name and text and returns its value


def read_model(name: str, text: str) -> str:
    """A model's name; empty if none is named."""
    if not re.fullmatch(MODEL_PATTERN, text):
        raise ConfigError(
            f'{name} must be 1 to 100 letters, digits, . _ or -; "GET /api/models" lists them', field=name
        )
    return text


def read_threshold(name: str, text: str) -> float:
    """A probability, neither 0 nor 1."""
    value = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < value < 1:
        raise ConfigError(
            f"{name}={_shown(text)[:60]} must be a number above 0 and below 1; 0.5 is the default", field=name
        )
    return value


def read_flag(name: str, text: str) -> bool:
    value = _WORDS.get(text.lower())
    if value is None:
        raise ConfigError(f"{name}={_shown(text)[:60]} must be true or false", field=name)
    return value


def read_deadline_ms(name: str, text: str) -> int:
    """Milliseconds from a request's first byte."""
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= value <= MAX_DEADLINE_MS:
        raise ConfigError(f"{name}={_shown(text)[:60]} must be a whole number from 1 to {MAX_DEADLINE_MS}", field=name)
    return value


def choice(*choices: str) -> Callable[[str, str], str]:
    """Reads one of several words."""

    def read(name: str, text: str) -> str:
        if text not in choices:
            raise ConfigError(f"{name}={_shown(text)[:60]} must be one of {', '.join(choices)}", field=name)
        return text

    return read


def _shown(text: str) -> str:
    """A client's text, safe to repeat in a message."""
    return "".join(letter if letter.isprintable() else "�" for letter in text[:MAX_NAME])

"""The service's token: made once, kept in a file that only its owner can read, or given in BRIM_TOKEN.

A browser never keeps the token itself: its cookie holds a value derived from it, useless as a Bearer token.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from brim.errors import ConfigError, StorageError

VARIABLE = "BRIM_TOKEN"
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,512}$")  # what a header and a quoted URL can hold


def find(file: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """The token in BRIM_TOKEN or else in the file; None if there is neither."""
    token = environ.get(VARIABLE) or _read(file)
    if token is not None and not _PRINTABLE.match(token):
        source = VARIABLE if environ.get(VARIABLE) else file
        raise ConfigError(
            f"{source} must hold 1 to 512 printable ASCII characters without spaces; choose another token"
        )
    return token


def ensure(file: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The token in BRIM_TOKEN or else in the file, which is created if it is missing."""
    return find(file, environ) or _make(file)


def session_value(token: str) -> str:
    """The cookie's value: it does not reveal the token, and a new token ends all sessions."""
    return hmac.new(token.encode(), b"brim session 1", hashlib.sha256).hexdigest()


def equals(given: str, expected: str) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def _read(file: Path) -> str | None:
    """The file's text; None if it is missing or empty (a first start that was cut short)."""
    try:
        text = file.read_text().strip()
        if text and file.stat().st_mode & 0o077:
            file.chmod(0o600)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "it is not text"
        raise StorageError(f"{file} cannot be read: {reason}; correct it, or give {VARIABLE}") from failure
    return text or None


def _make(file: Path) -> str:
    token = secrets.token_urlsafe(32)
    write_secret(file, token)
    return token


def write_secret(file: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all, and so that a power cut cannot take it back."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as out:
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as failure:
        raise StorageError(f"{file} cannot be written: {failure.strerror}", hint="choose another {data}") from failure

"""A job's own log, DATA/jobs/ID/log.jsonl: one JSON object {at, level, text} a line, written by the worker at hand.

Lines are appended whole; a kill may leave half a line, which readers pass over. Texts are redacted when written.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from brim.errors import StorageError

MAX_BYTES: Final = 16 * 1024**2  # a job that logs more has its later lines dropped
MAX_TEXT: Final = 4000  # characters of one line
_MAX_AT: Final = 1e11  # seconds since 1970, of times that have a date
LOGGER: Final = "brim"  # of the library and of jobs


def log_file(data: Path, job_id: str) -> Path:
    return data / "jobs" / job_id / "log.jsonl"


class JobLog(logging.Handler):
    def __init__(self, path: Path, redact: Callable[[str], str] = str) -> None:
        """Open the log for appending, creating its folder; a line that a kill cut off is completed first."""
        super().__init__(logging.INFO)
        self._redact = redact
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as failure:
            raise StorageError(
                f"the job's log cannot be opened: {failure.strerror}; see to {path}, then resume the job"
            ) from failure
        self._bytes = os.fstat(self._file).st_size
        if self._bytes and os.pread(self._file, 1, self._bytes - 1) != b"\n":
            self._write(b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; a disk error must not end the job."""
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + (self.formatter or logging.Formatter()).formatException(record.exc_info)
            line = {"at": record.created, "level": record.levelname.lower(), "text": self._redact(text)[:MAX_TEXT]}
            self._write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")
        except OSError:
            return
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()

    def _write(self, line: bytes) -> None:
        if self._file < 0 or self._bytes + len(line) > MAX_BYTES:
            return
        self._bytes += os.write(self._file, line)


@contextmanager
def logging_to(path: Path, redact: Callable[[str], str] = str) -> Iterator[logging.Logger]:
    """Write what the library and the job log to the job's log."""
    logger, handler = logging.getLogger(LOGGER), JobLog(path, redact)
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        handler.close()


def read_log(path: Path, after: int = 0, limit: int = 1000) -> tuple[list[dict[str, Any]], int]:
    """Up to `limit` lines that begin at byte `after` or later, and where to read on; no log yet: none.

    A line still being written is left for the next read; an offset within a line gives the lines after it.
    """
    lines: list[dict[str, Any]] = []
    try:
        file = path.open("rb")
    except OSError:
        return lines, max(0, after)
    with file:
        place = min(max(0, after), file.seek(0, os.SEEK_END))
        file.seek(place)
        while len(lines) < limit and (line := file.readline()).endswith(b"\n"):
            place += len(line)
            if (entry := _parse(line)) is not None:
                lines.append(entry)
    return lines, place


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(entry, dict) and entry.keys() == {"at", "level", "text"} and isinstance(entry["at"], float)
    return entry if is_ours and 0 <= entry["at"] < _MAX_AT else None

"""Every exception brim raises on purpose.

    BrimError                  something the user can act on; the command line prints it and exits with 2
    ├── ConfigError            a value, option or combination that cannot work
    │   ├── NothingAccepted    a configuration whose gates refuse every sample
    │   └── FieldError         the same, of a request, with the field's name
    │       ├── FieldConflict  the same, right by itself but not with the other fields or what is there; a Conflict too
    │       └── FieldNotFound  the same, an id that names nothing; a NotFound too
    ├── DatasetError           a dataset directory that is missing, foreign, occupied or inconsistent
    │   └── ShardCorrupt       a shard whose bytes differ from the manifest
    ├── ImageError             an image or mask that cannot be read or used
    ├── TooLarge               a request whose body, or what it unpacks to, is above a limit
    ├── UnsupportedType        a request whose file is of no kind that is read there
    ├── CheckpointError        a checkpoint that is missing, damaged, or of another model or run
    ├── TrainingDiverged       a loss or weight that is no longer a finite number
    ├── StorageError           the file system or an object store refused: full, no permission, no answer
    ├── ClusterError           a cluster that does not answer, whose nodes differ, or that lost its workers
    ├── DeviceError            a device that is not there or cannot be used
    │   └── RankLost           another rank of a training, which failed or is gone
    ├── NotFound               an id that names nothing
    ├── Conflict               what the state of a thing does not allow now, such as deleting what is in use
    ├── TooMany                more than a limit allows at once
    ├── Unavailable            a database, or the service itself, that does not answer for now
    ├── Overloaded             a request that could not be answered by its deadline; says when to come again
    ├── DeadlinePassed         a request that was accepted, but whose deadline passed before it ran
    └── OutOfMemory            a batch that does not fit; halved and retried wherever a batch can be halved

An error is data: a message, the field it is about and the value that field had, a code that programs can compare, and
a hint for the next step. No code reads a message. With a value the message continues "field=value …":

    ConfigError("must be a multiple of 0.2 s", field="duration_s", value=0.3, hint="{duration_s} of 1.0 is usual")

A hint is a template: `{resume}` and `{out}` stand for settings, and each surface writes them its own way: the command
line `--resume`, a request `config.resume`, Python `resume`. `{rf generate}`, with a space, stands for a command or a
kind of job.
"""

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self

_NAMED = re.compile(r"\{([a-z_. ]+)\}")
_SHOWN = 60  # characters of a value that a message repeats
_ABSENT: Final = object()


class BrimError(Exception):
    """Base of all errors brim raises on purpose."""

    default_code: ClassVar[str] = "failed"

    def __init__(
        self, message: str, *, field: str | None = None, value: Any = _ABSENT, code: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.field, self.hint = message, field, hint
        self.code = code or self.default_code
        self._shown = (
            None if value is _ABSENT else shown(value)
        )  # as text: a value may be large, or not survive pickling

    def __str__(self) -> str:
        return self.phrase(lambda name: name)

    def phrase(self, name: Callable[[str], str]) -> str:
        """The whole sentence; name says how this surface writes a setting or a command."""
        subject = f"{name(self.field)}={self._shown} " if self.field is not None and self._shown is not None else ""
        hint = _NAMED.sub(lambda match: name(match[1]), self.hint)
        return f"{subject}{self.message}; {hint}" if hint else f"{subject}{self.message}"

    def within(self, path: str) -> Self:
        """The same error, of a configuration that stands at that path of a larger one."""
        if self.field is not None and path:
            self.field = f"{path}.{self.field}"
        return self


def shown(value: Any) -> str:
    """A value as messages repeat it: as JSON, shortened, without control characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = printable(text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def printable(text: str, limit: int = 500) -> str:
    """Text that any encoding and any terminal can show: requests may hold control characters and lone surrogates."""
    safe = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


class ConfigError(BrimError):
    """A configuration value, option or combination that cannot work."""


class NothingAccepted(ConfigError):
    """The gates refused every sample within the bounded number of tries."""


class FieldError(ConfigError):
    """A value of a request that cannot work; field is its name, such as config.batch_size."""

    field: str

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field=field)


class DatasetError(BrimError):
    """A dataset directory that is missing, foreign, occupied or inconsistent."""


class ShardCorrupt(DatasetError):
    """A shard whose bytes differ from what the manifest records."""


class CheckpointError(BrimError):
    """A checkpoint that is missing, damaged, or of another model or run."""


class TrainingDiverged(BrimError):
    """A loss or weight that is no longer a finite number; the checkpoint before it stays."""


class StorageError(BrimError):
    """The file system or an object store refused: full, read-only, no permission, no answer."""


class ClusterError(BrimError):
    """A cluster that does not answer, whose nodes differ, or that lost its workers."""


class DeviceError(BrimError):
    """A device that is not there or cannot be used."""


class RankLost(DeviceError):
    """Another rank of a training failed or is gone, and this one cannot go on without it."""


class OutOfMemory(BrimError):
    """A batch that does not fit in memory."""


class ImageError(BrimError):
    """An image or mask that cannot be read or used."""


class TooLarge(BrimError):
    """A request whose body, or what it unpacks to, is above a limit."""


class UnsupportedType(BrimError):
    """A request whose file is of no kind that is read there."""


class NotFound(BrimError):
    """An id that names nothing."""


class Conflict(BrimError):
    """What the state of a thing does not allow now."""


class TooMany(BrimError):
    """More than a limit allows at once; the next step is to wait."""


class Unavailable(BrimError):
    """A database, or the service itself, that does not answer for now."""


class Overloaded(BrimError):
    """A request refused at once, because it could not be answered by its deadline beside those accepted before."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(BrimError):
    """A request that was accepted, but that could no longer be answered in time when its turn came."""


class FieldConflict(FieldError, Conflict):
    """A value of a request that is right by itself, but not with another one or with what is there now."""


class FieldNotFound(FieldError, NotFound):
    """An id in a request that names nothing."""

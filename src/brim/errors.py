"""Every exception brim raises on purpose.

    BrimError                  something the user can act on; the command line prints it and exits with 2
    ├── ConfigError            a value, option or combination that cannot work
    │   └── NothingAccepted    a configuration whose gates reject every sample
    ├── DatasetError           a dataset directory that is missing, foreign, occupied or inconsistent
    │   └── ShardCorrupt       a shard whose bytes differ from the manifest
    ├── ImageError             an image or mask that cannot be read or used
    ├── TooLarge               a request whose body, or its unpacked content, is above a limit
    ├── UnsupportedType        a request with a file of a type that is not supported
    ├── CheckpointError        a checkpoint that is missing, damaged, or of another model or run
    ├── TrainingDiverged       a loss or weight that is no longer a finite number
    ├── StorageError           the file system or object store failed: full, read-only, no permission, no answer
    ├── ClusterError           a cluster that does not answer, whose nodes differ, or that lost its workers
    ├── DeviceError            a device that is missing or cannot be used
    │   └── RankLost           another rank of a training that failed or is gone
    ├── NotFound               an id that does not exist
    ├── Conflict               the current state does not allow this, such as deleting a dataset that is in use
    ├── TooMany                more than a limit allows at once
    ├── Unavailable            a database, or the service itself, does not answer for now
    ├── Overloaded             a request that would miss its deadline; says when to retry
    ├── DeadlinePassed         a request that was accepted, but whose deadline passed before it ran
    └── OutOfMemory            a batch that does not fit; halved and retried wherever a batch can be halved

An error is data: a message, the field it is about and that field's value, a code that programs can compare, and a hint
for the next step. No code parses a message. With a value the message continues "field=value …":

    ConfigError("must be a multiple of 0.2 s", field="duration_s", value=0.3, hint="{duration_s} of 1.0 is usual")

A hint is a template: `{resume}` and `{out}` stand for settings, and each surface writes them its own way: the command
line `--resume`, a request `config.resume`, Python `resume`. `{rf generate}`, with a space, stands for a command or a
kind of job.
"""

import json
import re
from collections.abc import Callable, Mapping
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
        self.more: tuple[BrimError, ...] = ()  # other fields of the same input that are wrong too
        # Kept as text: a value may be large, or not survive pickling.
        self._shown = None if value is _ABSENT else shown(value)

    def __str__(self) -> str:
        return self.phrase(lambda name: name)

    def phrase(self, name: Callable[[str], str]) -> str:
        """The whole sentence; `name` says how this surface writes a setting or a command."""
        subject = f"{name(self.field)}={self._shown} " if self.field is not None and self._shown is not None else ""
        hint = self.phrase_hint(name)
        return f"{subject}{self.message}; {hint}" if hint else f"{subject}{self.message}"

    def phrase_hint(self, name: Callable[[str], str]) -> str:
        return _NAMED.sub(lambda match: name(match[1]), self.hint)

    def within(self, path: str) -> Self:
        """The same error, of a configuration that stands at that path of a larger one."""
        if self.field is not None and path:
            self.field = f"{path}.{self.field}"
        return self

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON-able values, for another process; `from_dict` reads them back."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "field": self.field,
            "shown": self._shown,
            "code": self.code,
            "hint": self.hint,
        }


def from_dict(values: Mapping[str, Any]) -> BrimError:
    """The error that another process described with `as_dict`."""
    kind = globals().get(values["type"], BrimError)
    error: BrimError = kind(values["message"])
    error.field, error.hint, error._shown = values["field"], values["hint"], values["shown"]
    error.code = values["code"]
    return error


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
    """A value or option that cannot work; with code "conflict" a combination of values that are right by themselves."""


class NothingAccepted(ConfigError):
    """The gates rejected every sample within the bounded number of tries."""


class DatasetError(BrimError):
    """A dataset directory that is missing, foreign, occupied or inconsistent."""


class ShardCorrupt(DatasetError):
    """A shard whose bytes differ from what the manifest records."""


class CheckpointError(BrimError):
    """A checkpoint that is missing, damaged, or of another model or run."""


class TrainingDiverged(BrimError):
    """A loss or weight that is no longer a finite number; the checkpoint before it is kept."""


class StorageError(BrimError):
    """The file system or object store failed: full, read-only, no permission, no answer."""


class ClusterError(BrimError):
    """A cluster that does not answer, whose nodes differ, or that lost its workers."""


class DeviceError(BrimError):
    """A device that is missing or cannot be used."""


class RankLost(DeviceError):
    """Another rank of a training failed or is gone, and this one cannot continue without it."""


class OutOfMemory(BrimError):
    """A batch that does not fit in memory."""


class ImageError(BrimError):
    """An image or mask that cannot be read or used."""


class TooLarge(BrimError):
    """A request whose body, or its unpacked content, is above a limit."""


class UnsupportedType(BrimError):
    """A request with a file of a type that is not supported."""


class NotFound(BrimError):
    """An id that does not exist."""

    default_code = "not_found"


class Conflict(BrimError):
    """The current state does not allow this."""

    default_code = "conflict"


class TooMany(BrimError):
    """More than a limit allows at once; the next step is to wait."""


class Unavailable(BrimError):
    """A database, or the service itself, does not answer for now."""


class Overloaded(BrimError):
    """A request rejected at once, because it would miss its deadline behind those accepted before it."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(BrimError):
    """A request that was accepted, but whose deadline passed before it ran."""


def with_article(value: object) -> str:
    """The type of a value in a sentence: a Tensor, an int."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"

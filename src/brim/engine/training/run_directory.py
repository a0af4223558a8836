"""The description of a run in its directory: written when the run begins, compared before it is continued."""

import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import brim
from brim.engine.storage import LocalPlace
from brim.errors import CheckpointError, StorageError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunFile:
    """The JSON file in a run's directory that says what is trained on what."""

    name: str
    kind: str  # of the run; a directory of another kind is rejected
    command: str  # that makes such runs

    def describe(self, **about: Any) -> dict[str, Any]:
        versions = {"brim": brim.__version__, "torch": torch.__version__, "python": platform.python_version()}
        known = {"format_version": FORMAT_VERSION, "kind": self.kind, "model_type": f"brim-{self.kind}"}
        return {**known, **about, "versions": versions}

    def read(self, run: Path) -> dict[str, Any]:
        """The description of a run; a missing or damaged one, or one of something else, is a CheckpointError."""
        file = run / self.name
        if not file.is_file():
            file = run / "config.json"  # a folder that was shared has nothing else
        if not file.is_file():
            fault = f"has no {self.name}" if run.is_dir() else "is not a directory"
            hint = f"give the directory of a run of {{{self.command}}}"
            raise CheckpointError(f"{run} {fault}", code="not_found", hint=hint)
        about = read_json(file)
        if about.get("kind") != self.kind:
            fault = f'is a run of another model: kind={about.get("kind")!r}, expected "{self.kind}"'
            raise CheckpointError(f"{run} {fault}", code="wrong_kind")
        if about.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format_version is {about.get('format_version')!r}, expected {FORMAT_VERSION}",
                code="other_version",
                hint="use the version of brim that made it",
            )
        if not isinstance(about.get("training"), dict):
            raise CheckpointError(f"{file} has no settings", code="damaged", hint="restore it from a copy")
        return about

    def read_begun(self, out: Path, resume: bool) -> dict[str, Any] | None:
        """The description of the run in `out`; None if that is new or empty. Anything else there is an error."""
        if out.exists() and not out.is_dir():
            raise _occupied(f"{out} is a file", "choose another {out}")
        unfinished = f".{self.name}."  # written by a process that was killed
        names = [file.name for file in out.iterdir() if not file.name.startswith(unfinished)] if out.exists() else []
        if not names:
            return None
        if self.name not in names:
            raise _occupied(f"{out} is not empty and has no {self.name}", "choose another {out}")
        if not resume:
            raise _occupied(f"{out} is not empty", "add {resume} to continue it or choose another {out}")
        return self.read(out)

    def write(self, run: Path, about: Mapping[str, Any]) -> None:
        write_json(run / self.name, about)


def check_same(out: Path, old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """Raise CheckpointError unless the settings a run was begun with are those it is continued with, but for `free`."""
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name) and name not in free:
            raise CheckpointError(
                f"{out}: {name} was {old.get(name)} and is {new.get(name)} now",
                field=name,
                code="conflict",
                hint="resume with the same, or choose another {out}",
            )


def read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(f"{file} cannot be read: {reason}", hint="check its permissions") from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(
            f"{file} is not valid JSON ({failure})", code="damaged", hint="restore it from a copy"
        ) from failure
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is not a JSON object", code="damaged", hint="restore it from a copy")
    return values


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    LocalPlace(file.parent).put_bytes(text.encode(), file.name)


def _occupied(message: str, hint: str) -> CheckpointError:
    return CheckpointError(message, field="out", code="occupied", hint=hint)

"""Where a network of a user comes from, and how it is named. Nothing here imports torch or runs its code.

    FILE.py:factory   a function or class in a Python file
    FILE.pt2          a program of torch.export; FILE.pt or FILE.ts one of TorchScript, for prediction only
    NAME              declared by an installed package in the entry point group brim.networks, or by the administrator
                      in BRIM_NETWORKS, as NAME=FILE.py:factory, several separated by commas

A network from a file is named by its absolute path and the beginning of its SHA-256, so that changed code has another
name: `/home/me/unet.py:make@0d6be69b264717f2`.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from brim.errors import ConfigError

GROUP: Final = "brim.networks"  # of entry points
VARIABLE: Final = "BRIM_NETWORKS"  # of the environment
PROGRAMS: Final = (".pt2", ".pt", ".ts")  # torch.export, TorchScript

SourceKind = Literal["code", "package", "program"]
_SHOWN = 16  # digits of the SHA-256 in a name
_REFERENCE = re.compile(r"(?P<path>.+?\.(?P<suffix>py|pt2|pt|ts))(?::(?P<factory>[^:@]*))?(?:@(?P<sha>[0-9a-f]{16}))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSource:
    """The file a network comes from, as a run remembers it."""

    kind: SourceKind
    path: str  # absolute
    factory: str = ""  # the function or class that makes it; of a program none
    sha256: str  # of the file
    package: str = ""  # the name that a package or the administrator declares it by

    @property
    def name(self) -> str:
        """The name of the network in this process, in a run and in a catalogue."""
        return self.package or f"{self.reference}@{self.sha256[:_SHOWN]}"

    @property
    def reference(self) -> str:
        return f"{self.path}:{self.factory}" if self.factory else self.path

    @property
    def title(self) -> str:
        """For people who need not know the folders of this machine."""
        return self.package or title_of(self.name)

    def as_dict(self) -> dict[str, str]:
        return {"name": self.title, **{name: value for name, value in asdict(self).items() if value}}

    @classmethod
    def of(cls, values: Any) -> "NetworkSource | None":
        """What as_dict wrote; None for anything else."""
        if not isinstance(values, Mapping):
            return None
        known = {name: str(values[name]) for name in ("path", "factory", "sha256", "package") if name in values}
        kind = values.get("kind")
        if kind not in get_args(SourceKind) or not {"path", "sha256"} <= known.keys():
            return None
        return cls(kind=cast(SourceKind, kind), **known)

    def now(self) -> "NetworkSource":
        """The same file as it is today; raises if it is gone."""
        return find_source(self.package or self.reference)


def is_reference(text: str) -> bool:
    """Whether a name is that of a file, not one that is declared."""
    return _REFERENCE.fullmatch(text) is not None


def title_of(name: str) -> str:
    """A network's name without the folder and the digest of its file."""
    match = _REFERENCE.fullmatch(name)
    if match is None:
        return name
    file = Path(match["path"]).name
    return f"{file}:{match['factory']}" if match["factory"] else file


def find_source(text: str) -> NetworkSource:
    """The source that FILE.py:factory, a program or a declared name stands for.

    With a digest, as in the name of a network, the file must not have changed.
    """
    if is_reference(text):
        return _from_file(text)
    source = named_source(text)
    if source is None:
        known = ", ".join(declared()) or "none is declared here"
        raise ConfigError(
            f"is neither FILE.py:factory, nor a program (.pt2, .pt), nor a declared network ({known})",
            field="network",
            value=text,
            code="unknown_choice",
        )
    return source


def named_source(name: str) -> NetworkSource | None:
    """The source of a declared network; None if no package and no administrator declares one of that name."""
    if (reference := _of_administrator().get(name)) is not None:
        source = _from_file(reference)
        return NetworkSource(**{**asdict(source), "package": name})
    if (entry := _entry_points().get(name)) is None:
        return None
    try:
        spec = find_spec(entry.module)
    except (ImportError, ValueError) as failure:
        raise _broken(f"{name}: {entry.module} cannot be found ({failure})") from failure
    if spec is None or spec.origin is None or not entry.attr:
        raise _broken(f"{name}: {entry.value} is no module:factory that can be imported")
    return NetworkSource(
        kind="package", path=spec.origin, factory=entry.attr, sha256=_digest(Path(spec.origin)), package=name
    )


def entry_of(name: str) -> EntryPoint:
    return _entry_points()[name]


def declared() -> tuple[str, ...]:
    """Names of the networks that packages and the administrator declare, in alphabetical order."""
    return tuple(sorted({*_of_administrator(), *_entry_points()}))


def _from_file(text: str) -> NetworkSource:
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise _broken(f"{text} is no FILE.py:factory and no program (.pt2, .pt)")
    path, factory = Path(match["path"]).expanduser().absolute(), match["factory"] or ""
    if match["suffix"] == "py" and not factory:
        raise ConfigError(
            "names a file and no function in it",
            field="network",
            value=text,
            code="missing",
            hint=f"write {path.name}:FACTORY",
        )
    if match["suffix"] != "py" and factory:
        raise _broken(f"{text}: a program has no functions to choose from; give {path.name} alone")
    kind: SourceKind = "code" if match["suffix"] == "py" else "program"
    source = NetworkSource(kind=kind, path=str(path), factory=factory, sha256=_digest(path))
    if match["sha"] and not source.sha256.startswith(match["sha"]):
        raise ConfigError(
            f"{path} has changed: its SHA-256 began with {match['sha']} and begins with {source.sha256[:_SHOWN]} now",
            field="network",
            code="changed",
            hint="restore the file, or add the model again",
        )
    return source


@cache
def _parse(text: str) -> dict[str, str]:
    networks: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, reference = part.partition("=")
        if not _NAME.fullmatch(name) or not reference:
            raise ConfigError(f'{VARIABLE}: "{part}" is not NAME=FILE.py:factory; correct the environment')
        networks[name] = reference
    return networks


def _of_administrator() -> dict[str, str]:
    return _parse(os.environ.get(VARIABLE, ""))


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as failure:
        reason = "does not exist" if isinstance(failure, FileNotFoundError) else f"cannot be read: {failure.strerror}"
        raise ConfigError(f"{path} {reason}", field="network", code="not_found", hint="correct {network}") from failure


def _broken(text: str) -> ConfigError:
    return ConfigError(text, field="network", code="unusable")

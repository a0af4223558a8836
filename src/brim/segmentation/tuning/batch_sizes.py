"""The file `batch_sizes.json`: what tuning found, per device and model.

    {"format_version": 1, "created": "2026-01-31T12:00:00Z",
     "devices": {"NVIDIA H200 140 GiB": {"device_info": {…},
                                         "batch_configurations": {"hrnet": {…}},
                                         "detailed_results": {"hrnet": [trial, …]}}}}

Several devices live in one file. It is checked whole when read: a value that cannot be is named, never guessed around.
Keys this version does not know are kept as they are. Megabytes are 10⁶ bytes.
"""

import copy
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from brim.engine.device import describe, total_bytes, worker_count
from brim.errors import ConfigError, StorageError

FORMAT_VERSION: Final = 1
FILE_NAME: Final = "batch_sizes.json"
PRECISIONS: Final = ("fp32", "bf16", "fp16")
LAYOUTS: Final = ("contiguous", "channels_last")

_GIB = 1024**3
_NEXT_STEP = 'correct it, or delete the file and tune again with "{segment tune}"'
_SECTIONS = ("device_info", "batch_configurations", "detailed_results")
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeEntry:
    """What tuning found for a model on a device; it holds for images of up to image_size × image_size pixels."""

    optimal_batch_size: int  # the smallest within noise of the best throughput
    max_safe_batch_size: int  # the largest proven with the reserve left free
    expected_throughput: float  # images/s at the optimum
    p50_latency_ms: float  # of one batch at the optimum
    p95_latency_ms: float
    memory_limit_mb: float  # 10⁶ bytes that tuning allowed itself: budget × (1 − reserve)
    image_size: int  # pixels per side
    precision: str
    layout: str
    compiled: bool

    def __post_init__(self) -> None:
        _check_entry(asdict(self), lambda field, value, expected: ConfigError(f"{field}={value} must be {expected}"))


class BatchSizes:
    """The content of a file; `with_entry` gives a changed copy, `write` puts the changes into a file."""

    def __init__(self) -> None:
        self._document: Document = {"format_version": FORMAT_VERSION, "created": _now(), "devices": {}}
        self._changes: dict[tuple[str, str], tuple[Document, Document, list[Document]]] = {}

    @classmethod
    def read(cls, path: Path | str) -> "BatchSizes":
        """The file's content; a missing file is empty, a malformed one is a ConfigError."""
        sizes = cls()
        document = _load(Path(path))
        if document is not None:
            sizes._document = document
        return sizes

    @property
    def created(self) -> str:
        """When the file was first made, ISO 8601."""
        return str(self._document["created"])

    @property
    def devices(self) -> tuple[str, ...]:
        """Keys of the devices that have been tuned."""
        return tuple(self._document["devices"])

    def models(self, key: str) -> tuple[str, ...]:
        return tuple(self._section(key, "batch_configurations"))

    def elsewhere(self, key: str, model: str) -> tuple[str, ...]:
        """Other devices that have an entry for the model: worth a word to the user, never a value to use."""
        return tuple(other for other in self.devices if other != key and model in self.models(other))

    def entry(self, key: str, model: str) -> BatchSizeEntry | None:
        """What was found for a model on the device of this key, and on no other."""
        found = self._section(key, "batch_configurations").get(model)
        return (
            None
            if found is None
            else BatchSizeEntry(**{field.name: found[field.name] for field in fields(BatchSizeEntry)})
        )

    def trials(self, key: str, model: str) -> list[Document]:
        return copy.deepcopy(list(self._section(key, "detailed_results").get(model, [])))

    def info(self, key: str) -> Document:
        return copy.deepcopy(dict(self._section(key, "device_info")))

    def with_entry(
        self,
        key: str,
        device_info: Mapping[str, Any],
        model: str,
        entry: BatchSizeEntry,
        trials: Sequence[Mapping[str, Any]],
    ) -> "BatchSizes":
        """A copy in which the model has this entry on the device of this key."""
        change = (dict(device_info), asdict(entry), [dict(trial) for trial in trials])
        sizes = BatchSizes()
        sizes._document = copy.deepcopy(self._document)
        sizes._changes = {**self._changes, (key, model): copy.deepcopy(change)}
        _apply(sizes._document, key, model, *change)
        return sizes

    def write(self, path: Path | str) -> "BatchSizes":
        """Write the file in one step and return what it now holds: ours, and what others wrote to it meanwhile."""
        file = Path(path).absolute().resolve()  # through a link: the rename would put a file in its place
        with _refusals(file), _locked(file):
            merged = BatchSizes()
            merged._document = _merged(_load(file) or {}, copy.deepcopy(self._document))
            for (key, model), change in self._changes.items():
                _apply(merged._document, key, model, *copy.deepcopy(change))
            _replace(file, json.dumps(merged._document, allow_nan=False, indent=1) + "\n")
        return merged

    def as_json(self) -> Document:
        """The document as it stands in the file."""
        return copy.deepcopy(self._document)

    def _section(self, key: str, name: str) -> Document:
        found: Document = self._document["devices"].get(key, {}).get(name, {})
        return found


def sizes_file(file: Path | str = "auto") -> Path:
    """The file of batch sizes to use.

    "auto" is `batch_sizes.json` in the current directory if it exists there, which is then updated in place, else the
    one in the user's cache directory.
    """
    if str(file) != "auto":
        return Path(file)
    here = Path(FILE_NAME)
    if here.exists():
        return here
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the specification says to ignore a relative one
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:  # a user without a home, as in some containers
            cache = Path(tempfile.gettempdir())
    return cache / "brim" / FILE_NAME


# Which device


def device_key(device: torch.device) -> str:
    """Name and memory of a device, the same from run to run, e.g. "NVIDIA H200 140 GiB"."""
    name = " ".join(str(describe(device)["name"]).split())
    if device.type == "cpu":
        cores = worker_count()
        return f"{name} {cores} core{'s' * (cores > 1)} {_rounded_gib(total_bytes(device))} GiB"
    return f"{name} {math.ceil(total_bytes(device) / _GIB)} GiB"


def device_info(device: torch.device) -> dict[str, Any]:
    """Facts about a device to keep beside its entries, without those that change from minute to minute."""
    facts = {name: value for name, value in describe(device).items() if name not in ("device", "free_bytes")}
    facts["torch"] = str(torch.__version__)
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    return facts


def _rounded_gib(size_bytes: int) -> int:
    """GiB, rounded up to a sixteenth: the kernel keeps a part for itself that differs from boot to boot."""
    gib = math.ceil(size_bytes / _GIB)
    step = 1 << max(0, gib.bit_length() - 4)
    return -(-gib // step) * step


# Reading


def _load(file: Path) -> Document | None:
    """The checked document of a file, None where there is no file."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(
            f"{file} cannot be read: {reason}; check its permissions or choose another file"
        ) from failure
    try:
        document = json.loads(content, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as failure:
        reason = "its values are nested too deeply" if isinstance(failure, RecursionError) else str(failure)
        raise ConfigError(f"{file} is not valid JSON: {reason}", hint=_NEXT_STEP) from failure
    _check(document, file)
    return dict(document)


def _without_twins(pairs: list[tuple[str, Any]]) -> Document:
    found: Document = {}
    for key, value in pairs:
        if key in found:  # json would keep the last one and say nothing
            raise ValueError(f'key "{key}" occurs twice in one object')
        found[key] = value
    return found


def _check(document: Any, file: Path) -> None:
    def fault(path: str, value: Any, expected: str) -> ConfigError:
        text = json.dumps(value)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return ConfigError(f"{file}: {path or 'the document'} is {shown} and must be {expected}", hint=_NEXT_STEP)

    _check_finite(document, "", fault)
    _expect(document, dict, "", "an object", fault)
    if type(document.get("format_version")) is not int or document["format_version"] != FORMAT_VERSION:
        raise fault("format_version", document.get("format_version"), f"{FORMAT_VERSION}, what this version reads")
    if not _is_time(document.get("created")):
        raise fault("created", document.get("created"), "a time like 2026-01-31T12:00:00Z")
    _expect(document.get("devices"), dict, "devices", "an object of devices", fault)
    for key, device in document["devices"].items():
        _check_device(device, f'devices."{key}"', fault)


Fault = Callable[[str, Any, str], ConfigError]


def _check_device(device: Any, path: str, fault: Fault) -> None:
    _expect(device, dict, path, f"an object with {', '.join(_SECTIONS)}", fault)
    for section in _SECTIONS:
        _expect(device.get(section), dict, f"{path}.{section}", "an object", fault)
    for model, entry in device["batch_configurations"].items():
        where = f'{path}.batch_configurations."{model}"'
        _expect(entry, dict, where, "an object", fault)
        _check_entry(entry, _inside(where, fault))
    for model, trials in device["detailed_results"].items():
        where = f'{path}.detailed_results."{model}"'
        _expect(trials, list, where, "a list of trials", fault)
        for number, trial in enumerate(trials):
            _expect(trial, dict, f"{where}[{number}]", "an object", fault)


def _inside(path: str, fault: Fault) -> Fault:
    return lambda field, value, expected: fault(f"{path}.{field}", value, expected)


def _check_entry(entry: Mapping[str, Any], fault: Fault) -> None:
    for field, (is_right, expected) in _FIELDS.items():
        if not is_right(entry.get(field)):
            raise fault(field, entry.get(field), expected)
    optimal, safe = entry["optimal_batch_size"], entry["max_safe_batch_size"]
    if optimal > safe:
        raise fault("optimal_batch_size", optimal, f"at most max_safe_batch_size, {safe}")
    if entry["p50_latency_ms"] > entry["p95_latency_ms"]:
        raise fault("p50_latency_ms", entry["p50_latency_ms"], f"at most p95_latency_ms, {entry['p95_latency_ms']}")


def _check_finite(value: Any, path: str, fault: Fault) -> None:
    """No NaN and no infinity anywhere, also not where we do not look otherwise."""
    if isinstance(value, float) and not math.isfinite(value):
        raise fault(path, value, "a finite number")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(inner, f"{path}.{key}".lstrip("."), fault)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_finite(inner, f"{path}[{number}]", fault)


def _expect(value: Any, kind: type, path: str, expected: str, fault: Fault) -> None:
    if not isinstance(value, kind):
        raise fault(path, value, expected)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31  # type: True is an int as well


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e15 and math.isfinite(value)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


_COUNT = (_is_count, "a whole number of at least 1")
_POSITIVE = (_is_positive, "a number above 0")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimal_batch_size": _COUNT,
    "max_safe_batch_size": _COUNT,
    "expected_throughput": _POSITIVE,
    "p50_latency_ms": _POSITIVE,
    "p95_latency_ms": _POSITIVE,
    "memory_limit_mb": _POSITIVE,
    "image_size": _COUNT,
    "precision": (lambda value: value in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
    "layout": (lambda value: value in LAYOUTS, f"one of {', '.join(LAYOUTS)}"),
    "compiled": (lambda value: type(value) is bool, "true or false"),
}


# Writing


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _apply(document: Document, key: str, model: str, info: Document, entry: Document, trials: list[Document]) -> None:
    device = document["devices"].setdefault(key, {section: {} for section in _SECTIONS})
    device["device_info"].update(info)
    device["batch_configurations"].setdefault(model, {}).update(entry)  # not replaced: it may hold keys we do not know
    device["detailed_results"][model] = trials


def _merged(theirs: Document, ours: Document) -> Document:
    """All keys of both; where they differ the file's own stand, since our changes are applied after."""
    for key, value in ours.items():
        inner = theirs.setdefault(key, value)
        if isinstance(inner, dict) and isinstance(value, dict):
            _merged(inner, value)
    return theirs


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        with temporary.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other writers of this file out; the lock ends with the process, however that ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.with_name(f".{file.name}.lock")  # not the file itself: the rename would leave us an old one's lock
    handle = _lock(lock)
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: who waits for it finds it gone, and makes a new one
        os.close(handle)


def _lock(lock: Path) -> int:
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            return handle  # a file system without locks, such as some NFS: go on without
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        os.close(handle)  # its holder removed it while we waited


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(f"{file}: cannot write, {reason}", hint="choose another {out}") from failure

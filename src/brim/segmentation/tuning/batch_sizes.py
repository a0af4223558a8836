"""The file `batch_sizes.json`: tuned batch sizes by device and network.

    {"format_version": 1, "created": "2026-01-31T12:00:00Z",
     "devices": {"NVIDIA H200 140 GiB": {"device_info": {…},
                                         "batch_configurations": {"hrnet": {…}},
                                         "detailed_results": {"hrnet": [trial, …]}}}}

One file holds several devices. The whole file is validated when it is read; unknown keys are kept. Megabytes are 10⁶
bytes.
"""

import copy
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import torch

from brim.config import Range, check, read, settings
from brim.engine.device import describe, total_bytes, worker_count
from brim.engine.storage import cache_home
from brim.errors import ConfigError, StorageError
from brim.segmentation.networks.network import MemoryLayout, NetworkPrecision

log = logging.getLogger("brim")

FORMAT_VERSION: Final = 1
FILE_NAME: Final = "batch_sizes.json"

_GIB = 1024**3
_SECTIONS = ("device_info", "batch_configurations", "detailed_results")
Document = dict[str, Any]
Count = Annotated[int, Range(1, 2**31 - 1)]
Positive = Annotated[float, Range(above=0, below=1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeEntry:
    """Tuned batch sizes of a network on a device, for images of up to image_size × image_size pixels."""

    optimal_batch_size: Count  # the smallest within noise of the best throughput
    max_safe_batch_size: Count  # the largest proven with the reserve left free
    expected_throughput: Positive  # images/s at the optimum
    p50_latency_ms: Positive  # of one batch at the optimum
    p95_latency_ms: Positive
    memory_limit_mb: Positive  # 10⁶ bytes that tuning could use: budget × (1 − reserve)
    image_size: Count  # pixels per side
    precision: NetworkPrecision
    layout: MemoryLayout
    compiled: bool

    def __post_init__(self) -> None:
        check(self)
        for name, limit in (("optimal_batch_size", "max_safe_batch_size"), ("p50_latency_ms", "p95_latency_ms")):
            value, most = getattr(self, name), getattr(self, limit)
            if value > most:
                raise ConfigError(f"must be at most {limit}, {most}", field=name, value=value, code="conflict")


class BatchSizes:
    """The content of a file."""

    def __init__(self, document: Document) -> None:
        self._document = document

    @classmethod
    def read(cls, path: Path | str) -> "BatchSizes":
        """The file's content; a missing file is empty, a malformed one raises ConfigError."""
        return cls(_load(Path(path)))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._document["devices"])

    def models(self, key: str) -> tuple[str, ...]:
        return tuple(self._entries(key))

    def elsewhere(self, key: str, model: str) -> tuple[str, ...]:
        """Other devices that have an entry for the model; their sizes do not apply to this one."""
        return tuple(other for other in self.devices if other != key and model in self._entries(other))

    def entry(self, key: str, model: str) -> BatchSizeEntry | None:
        values = self._entries(key).get(model)
        return None if values is None else _read_entry(values, model)

    def write(self, path: Path | str) -> None:
        """Add to the file what it does not have."""
        with _updated(path) as document:
            _merge(document, self.as_json())

    def as_json(self) -> Document:
        """The document as it stands in the file."""
        return copy.deepcopy(self._document)

    def _entries(self, key: str) -> Document:
        entries: Document = self._document["devices"].get(key, {}).get("batch_configurations", {})
        return entries


def save_entry(
    path: Path | str,
    key: str,
    device_info: Mapping[str, Any],
    model: str,
    entry: BatchSizeEntry,
    trials: Sequence[Mapping[str, Any]],
) -> None:
    """Put the entry of a model on the device of this key into the file; the rest of the file stays as it is."""
    with _updated(path) as document:
        device = document["devices"].setdefault(key, {section: {} for section in _SECTIONS})
        device["device_info"].update(device_info)
        device["batch_configurations"].setdefault(model, {}).update(asdict(entry))  # it may hold unknown keys
        device["detailed_results"][model] = list(trials)


def sizes_file(file: Path | str = "auto") -> Path:
    """The file of batch sizes to use.

    "auto" is `batch_sizes.json` in the current directory if it exists, otherwise in the user's cache directory.
    """
    if str(file) != "auto":
        return Path(file)
    local = Path(FILE_NAME)
    if local.exists():
        return local
    return cache_home() / FILE_NAME


def device_key(device: torch.device) -> str:
    """Name and memory of a device, the same from run to run, e.g. "NVIDIA H200 140 GiB"."""
    name = " ".join(str(describe(device)["name"]).split())
    gib = math.ceil(total_bytes(device) / _GIB)
    if device.type != "cpu":
        return f"{name} {gib} GiB"
    # Rounded up to a sixteenth: the part that the kernel reserves differs from boot to boot.
    step = 1 << max(0, gib.bit_length() - 4)
    cores = worker_count()
    return f"{name} {cores} core{'s' * (cores > 1)} {-(-gib // step) * step} GiB"


def device_info(device: torch.device) -> dict[str, Any]:
    """Facts about a device that do not change while it is used."""
    facts = {name: value for name, value in describe(device).items() if name not in ("device", "free_bytes")}
    facts["torch"] = str(torch.__version__)
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    return facts


# Reading


def _load(file: Path) -> Document:
    """The validated document of a file, an empty one if the file does not exist."""
    try:
        content = file.read_bytes()
        document = json.loads(content, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
        return _checked(document)
    except FileNotFoundError:
        return _empty()
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(
            f"{file} cannot be read: {reason}; check its permissions or choose another file"
        ) from failure
    except ConfigError as failure:
        fault, code = f"{file}: {failure}", failure.code
    except RecursionError:
        fault, code = f"{file} is not valid JSON: its values are nested too deeply", None
    except ValueError as failure:
        fault, code = f"{file} is not valid JSON: {failure}", None
    if file == cache_home() / FILE_NAME:  # nobody wrote it by hand
        log.warning("%s; it is not used", fault)
        return _empty()
    raise ConfigError(fault, code=code, hint='correct it, or delete the file and tune again with "{segment tune}"')


def _empty() -> Document:
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"format_version": FORMAT_VERSION, "created": created, "devices": {}}


def _unique(pairs: list[tuple[str, Any]]) -> Document:
    values = dict(pairs)
    if len(values) < len(pairs):  # json would silently keep the last one
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f'key "{twice}" occurs twice in one object')
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _checked(document: Any) -> Document:
    _object(document, "the document")
    version, created = document.get("format_version"), document.get("created")
    if version != FORMAT_VERSION or version is True:
        raise ConfigError(f"must be {FORMAT_VERSION}", field="format_version", value=version)
    try:
        has_zone = datetime.fromisoformat(created).tzinfo is not None
    except (TypeError, ValueError):
        has_zone = False
    if not has_zone:
        raise ConfigError("must be a time like 2026-01-31T12:00:00Z", field="created", value=created)
    for key, device in _object(document.get("devices"), "devices").items():
        path = f'devices."{key}"'
        sections = {name: _object(_object(device, path).get(name), f"{path}.{name}") for name in _SECTIONS}
        for model, entry in sections["batch_configurations"].items():
            where = f'{path}.batch_configurations."{model}"'
            _read_entry(_object(entry, where), where)
        for model, trials in sections["detailed_results"].items():
            where = f'{path}.detailed_results."{model}"'
            if not isinstance(trials, list):
                raise ConfigError("must be a list of trials", field=where, value=trials, code="wrong_type")
            for number, trial in enumerate(trials):
                _object(trial, f"{where}[{number}]")
    return dict(document)


def _object(value: Any, path: str) -> Document:
    if not isinstance(value, dict):
        raise ConfigError("must be an object", field=path, value=value, code="wrong_type")
    return value


def _read_entry(values: Document, path: str) -> BatchSizeEntry:
    known = {name: values[name] for name in settings(BatchSizeEntry) if name in values}
    return read(BatchSizeEntry, known, path)


# Writing


@contextmanager
def _updated(path: Path | str) -> Iterator[Document]:
    """The document of a file, to be changed in the block; then the file is replaced atomically."""
    file = Path(path).absolute().resolve()  # the target of a link: a rename would replace the link itself
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        with _locked(file):
            document = _load(file)
            yield document
            try:
                with new.open("w") as out:
                    out.write(json.dumps(document, allow_nan=False, indent=1) + "\n")
                    out.flush()
                    os.fsync(out.fileno())
                new.replace(file)
            finally:
                new.unlink(missing_ok=True)
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(f"{file}: cannot write, {reason}", hint="choose another {out}") from failure


def _merge(theirs: Document, ours: Document) -> None:
    """Add our keys to theirs; where values differ, theirs stays."""
    for key, value in ours.items():
        inner = theirs.setdefault(key, value)
        if isinstance(inner, dict) and isinstance(value, dict):
            _merge(inner, value)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Exclude other writers of this file until the block or the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.with_name(f".{file.name}.lock")  # not the file itself, which is replaced by a rename
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            break  # a file system without locks, such as some NFS: continue without
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                break
        os.close(handle)  # its holder removed it while we waited: lock the new one
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held, so that nobody locks a file that is about to go
        os.close(handle)

"""Where the values of a training go besides its own metrics.jsonl: CSV, TensorBoard, MLflow, Weights & Biases.

A logger has two methods, `log(values, step)` and `artifact(path)`; anything with these two can be given to brim.train.
Those here also learn when a run begins and ends. Each package is imported when its logger begins, and only then.
"""

import csv
import importlib
import importlib.util
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable
from uuid import uuid4

from brim.errors import ConfigError, with_article

log = logging.getLogger("brim")

__all__ = ["CSV", "Logger", "LogsValues", "MLflow", "TensorBoard", "WandB", "parse", "using"]


@runtime_checkable
class LogsValues(Protocol):
    """What every logger can do."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step: loss, lr and samples_per_s, or what evaluate returned."""

    def artifact(self, path: Path) -> None:
        """A file worth keeping: the weights, when training has ended."""


class Logger:
    """Base of the loggers here: they also learn where a run is, at which step it begins and when it ends."""

    package: ClassVar[str] = ""  # that must be installed; also the name of brim's extra

    def check(self) -> None:
        """Raise ConfigError if the package is missing; called before anything is written."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"{self.package} is missing to log to {type(self).__name__}",
                code="missing_package",
                hint=f"pip install 'brim[{self.package}]'",
            )

    def begin(self, folder: Path, step: int) -> None:
        """Called once, before the first value; step is above 0 for a run that is resumed."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def artifact(self, path: Path) -> None:
        """Nothing, unless a logger keeps files."""

    def end(self) -> None:
        """Called once, also after a failure."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({given})"


class CSV(Logger):
    """A table with a row for each step that has values, RUN/train/metrics.csv unless a file is named."""

    def __init__(self, file: Path | str | None = None) -> None:
        """Where to write; None: into the folder of the run."""
        self.file = file
        self._rows: list[dict[str, Any]] = []
        self._names: list[str] = ["step"]
        self._path = Path()

    def begin(self, folder: Path, step: int) -> None:
        self._path = Path(self.file) if self.file is not None else folder / "metrics.csv"
        self._rows, self._names = [], ["step"]
        if step and self._path.exists():  # rows after the resumed step will come again
            with self._path.open(newline="", encoding="utf-8") as opened:
                self._rows = [row for row in csv.DictReader(opened) if int(row["step"]) <= step]
        self._names = list(dict.fromkeys(["step", *(name for row in self._rows for name in row)]))
        self._rewrite()

    def log(self, values: Mapping[str, float], step: int) -> None:
        row = {"step": step, **values}
        self._rows.append(row)
        if all(name in self._names for name in row):
            with self._path.open("a", newline="", encoding="utf-8") as opened:
                csv.DictWriter(opened, self._names).writerow(row)
        else:
            self._names = list(dict.fromkeys([*self._names, *row]))
            self._rewrite()

    def _rewrite(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, self._names)
            writer.writeheader()
            writer.writerows(self._rows)
        partial.replace(self._path)


class TensorBoard(Logger):
    """Events for TensorBoard, in RUN/train/tensorboard unless a folder is named; written without its package.

    Its own writer is slow to import: with boto3 installed a third of a second, in every training.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        """Where to write; None: into the folder of the run."""
        self.folder = folder
        self._file: Any = None

    def begin(self, folder: Path, step: int) -> None:
        where = folder / "tensorboard" if self.folder is None else Path(self.folder)
        where.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # sorted by time
        self._file = (where / name).open("wb", buffering=0)
        self._write(0, _field(3, b"brain.Event:2"))  # file_version
        if step:
            self._write(step + 1, _field(7, b"\x08\x01"))  # a session began: later steps of earlier files are void

    def log(self, values: Mapping[str, float], step: int) -> None:
        scalars = (_field(1, _field(1, name.encode()) + b"\x15" + _float32(value)) for name, value in values.items())
        self._write(step, _field(5, b"".join(scalars)))

    def end(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, content: bytes) -> None:
        """An Event of tensorboard/compat/proto/event.proto, as a record: length, data, and a checksum of each."""
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _field(number: int, data: bytes) -> bytes:
    """A field of bytes, text or a message in the wire format of protocol buffers."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


@cache
def _crc32c_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in table]
    return table


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as TensorFlow's records have it."""
    crc, table = 0xFFFFFFFF, _crc32c_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class MLflow(Logger):
    """A run in MLflow, at tracking_uri or where MLFLOW_TRACKING_URI points; a resumed run continues its own."""

    package = "mlflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str = "brim", run_name: str | None = None) -> None:
        """Nothing is sent before training begins."""
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self._client: Any = None
        self._run_id = ""
        self._failed = True

    def begin(self, folder: Path, step: int) -> None:
        self.check()
        mlflow = importlib.import_module("mlflow")
        try:
            self._client = mlflow.MlflowClient(self.tracking_uri)
            self._run_id = _remembered(folder / "mlflow.json", step, self._start)
        except Exception as failure:  # MLflow's own errors, and those of its HTTP client
            raise ConfigError(
                f"MLflow at {self.tracking_uri or os.environ.get('MLFLOW_TRACKING_URI') or 'its default'} does not "
                f"answer ({_first_line(failure)})",
                hint="check its address, or leave this logger out",
            ) from failure

    def _start(self) -> str:
        known = self._client.get_experiment_by_name(self.experiment)
        number = known.experiment_id if known else self._client.create_experiment(self.experiment)
        return str(self._client.create_run(number, run_name=self.run_name).info.run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))
        self._failed = False

    def end(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, "FAILED" if self._failed else "FINISHED")


class WandB(Logger):
    """A run in Weights & Biases; a resumed run continues its own. `mode="offline"` sends nothing."""

    package = "wandb"

    def __init__(self, project: str = "brim", name: str | None = None, mode: str | None = None) -> None:
        """Nothing is sent before training begins."""
        self.project, self.name, self.mode = project, name, mode
        self._run: Any = None

    def begin(self, folder: Path, step: int) -> None:
        self.check()
        wandb = importlib.import_module("wandb")
        run_id = _remembered(folder / "wandb.json", step, lambda: uuid4().hex[:8])
        options = {"project": self.project, "name": self.name, "dir": str(folder), "id": run_id, "resume": "allow"}
        if self.mode is not None:
            options["mode"] = self.mode
        try:
            self._run = wandb.init(**options)
        except Exception as failure:  # its own errors, and those of its HTTP client
            raise ConfigError(
                f"Weights & Biases cannot begin a run ({_first_line(failure)})", hint='log in, or give mode="offline"'
            ) from failure

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def artifact(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


# Loggers for all trainings of a process


SETTING = "BRIM_LOGGERS"  # in the environment: loggers of every training, of a service's jobs too
_current: ContextVar[tuple[LogsValues, ...]] = ContextVar("brim_loggers", default=())


@contextmanager
def using(loggers: Iterable[LogsValues]) -> Iterator[None]:
    """Every training inside the with block also logs to these."""
    token = _current.set(tuple(loggers))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> tuple[LogsValues, ...]:
    """Those of the with block around this call, and new ones of the setting in the environment."""
    return (*_current.get(), *parse(os.environ.get(SETTING, "")))


def parse(text: str) -> list[Logger]:
    """Loggers from a setting: names with an address or project each, as in "mlflow=http://tracker:5000, csv"."""
    loggers: list[Logger] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        if name.lower() not in _KINDS:
            raise ConfigError(
                f'"{name}" is no logger', field="loggers", code="unknown_choice", hint=f"use {', '.join(_KINDS)}"
            )
        loggers.append(_KINDS[name.lower()](*([value] if value else [])))
    return loggers


_KINDS: dict[str, type[Logger]] = {"csv": CSV, "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def check(loggers: Sequence[Any]) -> None:
    """Raise ConfigError for what is no logger."""
    if not isinstance(loggers, list | tuple):
        raise ConfigError(f"loggers is {with_article(loggers)}", hint="give a list, as in [brim.loggers.CSV()]")
    for logger in loggers:
        if isinstance(logger, type):
            raise ConfigError(f"{logger.__name__} is a class", hint=f"make one: {logger.__name__}()")
        if not isinstance(logger, LogsValues):
            raise ConfigError(
                f"{with_article(logger)} is no logger", hint="give one with log(values, step) and artifact(path)"
            )
        if isinstance(logger, Logger):
            logger.check()


def _remembered(file: Path, step: int, make: Callable[[], str]) -> str:
    """The id that a resumed run has had before, or a new one, kept in a file of the run."""
    if step and file.exists():
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    run_id = str(make())
    file.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")
    return run_id


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0][:200]

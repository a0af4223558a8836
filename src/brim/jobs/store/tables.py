"""What the catalogue stores of jobs, datasets, runs and models: rows as frozen values, and the tables they are in.

Times are seconds since 1970, UTC. Rows are ordered by `number`, never by a time: clocks jump. Ids are opaque.
On PostgreSQL the tables live in the schema `brim`, beside that of the job library; on SQLite in a file of their own.
"""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin

import sqlalchemy as sa

from brim.jobs.status import JobProgress, JobStatus, Wanted

Makes = Literal["dataset", "run", "result"]
DatasetKind = Literal["rf", "images", "sequences", "recordings"]
DatasetState = Literal["writing", "ready", "partial", "deleting"]
ModelKind = Literal["segment", "locate", "classify"]
RunState = Literal["training", "ready", "partial"]
EventKind = Literal["status", "progress", "log"]

SCHEMA: Final = "brim"  # PostgreSQL only
SILENT_S: Final = 15.0  # without an update of a running job, after which no worker has it, as while the disk is full
FOLDERS: Final[dict[str, str]] = {"dataset": "datasets", "run": "runs", "result": "results"}  # of the data directory

ID_LENGTH: Final = 32
ID_LETTERS: Final = frozenset("0123456789abcdef")
MIN_ID: Final = 4  # letters that people must give of one
_ID = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}")


def new_id() -> str:
    """An id that cannot be guessed and is safe as a folder name."""
    return secrets.token_hex(16)


def is_id(text: str) -> bool:
    """Whether a text has the form of an id; anything else never reaches a database or a file system."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    number: int = 0
    id: str
    kind: str
    name: str
    status: JobStatus = "pending"
    wanted: Wanted = "run"
    config: dict[str, Any]
    inputs: dict[str, Any]
    makes: Makes
    output_id: str  # of the dataset or run it makes; the job's own for a result
    result: dict[str, Any] | None = None
    error: str | None = None
    failure: dict[str, Any] | None = None  # field, code and hint of the error
    key_hash: str | None = None  # of the Idempotency-Key
    submitted_by: str | None = None  # None: with the shared token, or by brim itself
    worker: str | None = None  # that runs it now
    attempts: int = 0
    deaths: int = 0  # of its workers, in a row without getting further
    deaths_at: int = -1  # `current` at the last of them
    current: int = 0
    total: int = 0
    rate: float = 0.0
    eta_s: float | None = None
    message: str = ""
    event_seq: int = 0  # of its newest event
    stopping_at: float | None = None  # when a stop was first asked for
    created_at: float
    queued_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    updated_at: float

    @property
    def progress(self) -> JobProgress:
        return JobProgress(
            current=self.current, total=self.total, rate=float(self.rate), eta_s=self.eta_s, message=self.message
        )  # fmt: skip

    @property
    def shown_status(self) -> JobStatus:
        """As people see it: of a running job its worker tells every second, else it waits for a worker."""
        is_lost = self.status == "running" and time.time() - self.updated_at > SILENT_S
        return "queued" if is_lost else self.status

    @property
    def out(self) -> str:
        """Where it writes, relative to the data directory; the same for every attempt."""
        return f"{FOLDERS[self.makes]}/{self.output_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something that happened to a job; seq counts 1, 2, 3 … for each job."""

    job_id: str
    seq: int
    kind: EventKind
    data: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    number: int
    id: str
    name: str
    kind: DatasetKind
    state: DatasetState
    path: str  # within the data directory, or absolute where an administrator added it
    owned: bool  # whether deleting it deletes its files
    items: int
    bytes: int
    job_id: str | None  # that made it
    about: dict[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    number: int
    id: str
    name: str
    kind: str  # of the job that made it, such as rf.train
    state: RunState
    path: str
    job_id: str | None
    config: dict[str, Any]
    summary: dict[str, Any]
    remarks: dict[str, Any] | None = None  # tags and notes of people
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model that requests may name."""

    number: int
    name: str
    kind: ModelKind
    network: str
    path: str  # absolute: a run's directory or a file of weights
    version: str  # another each time it is added
    about: dict[str, Any]
    added_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """What a worker computes on, as it said when it started."""

    worker: str
    info: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a job has written so far."""

    items: int | None  # samples, or steps of a run; 0: nothing is there, None: its files are damaged
    bytes: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)  # the dataset's `about`, the run's `summary`


# Tables

metadata: Final = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)
_BIG: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts only its own kind of primary key
_TYPES: Final[dict[Any, sa.types.TypeEngine[Any]]] = {
    str: sa.Text(),
    Literal: sa.Text(),
    int: sa.BigInteger(),
    float: sa.Float(53),
    bool: sa.Boolean(),
}


def _table(name: str, row: type, *parts: sa.schema.SchemaItem) -> sa.Table:
    """A table with a column for each field of a row, of its type; parts are indexes, and columns that are more."""
    own = {part.name for part in parts if isinstance(part, sa.Column)}
    columns = [_column(each.name, each.type) for each in fields(row) if each.name not in own]
    return sa.Table(name, metadata, *columns, *parts, sqlite_autoincrement=columns[0].name == "number")


def _column(name: str, hint: Any) -> sa.Column[Any]:
    if name == "number":  # the order of insertion
        return sa.Column(name, _BIG, sa.Identity(), primary_key=True)
    optional = isinstance(hint, UnionType)
    plain = get_args(hint)[0] if optional else hint
    kind = get_origin(plain) or plain
    column_type = sa.JSON(none_as_null=optional) if kind is dict else _TYPES[kind]
    return sa.Column(name, column_type, nullable=optional, unique=name == "id" or None)


def _made_by() -> sa.Column[Any]:
    return sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="SET NULL"), index=True)


meta = sa.Table(
    "meta", metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)
jobs = _table(
    "jobs",
    JobRow,
    sa.Column("key_hash", sa.Text, unique=True),
    *(sa.Column(name, sa.Integer, nullable=False) for name in ("attempts", "deaths", "event_seq")),
    sa.Index(None, "status", "number"),
    sa.Index(None, "kind", "number"),
)
events = _table(
    "events",
    EventRow,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
)
datasets = _table("datasets", DatasetRow, _made_by())
runs = _table("runs", RunRow, _made_by())
uses = sa.Table(  # what a job reads: not deleted while it may still run
    "uses",
    metadata,
    sa.Column("number", _BIG, sa.Identity(), primary_key=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("dataset_id", sa.Text, sa.ForeignKey("datasets.id", ondelete="CASCADE"), index=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id", ondelete="CASCADE"), index=True),
)
models = _table("models", ModelRow, sa.Column("name", sa.Text, nullable=False, unique=True))
devices = _table("devices", DeviceRow, sa.Column("worker", sa.Text, primary_key=True))


def is_lost() -> sa.ColumnElement[bool]:
    """Whether a job runs and nobody tells of it: `JobRow.shown_status` as a condition."""
    return (jobs.c.status == "running") & (jobs.c.updated_at < time.time() - SILENT_S)

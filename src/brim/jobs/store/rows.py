"""What the catalogue gives out: rows as frozen values, and pages of them."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, Literal, TypeVar

import sqlalchemy as sa

from brim.jobs.status import JobProgress, JobStatus, Wanted

Makes = Literal["dataset", "run", "result"]
DatasetKind = Literal["rf", "images", "sequences"]
DatasetState = Literal["writing", "ready", "partial", "deleting"]
ModelKind = Literal["segment", "locate", "classify"]
RunState = Literal["training", "ready", "partial"]
EventKind = Literal["status", "progress", "log"]

FOLDERS: Final[dict[str, str]] = {"dataset": "datasets", "run": "runs", "result": "results"}  # of the data directory

_ID = re.compile(r"[0-9a-f]{32}")
_Row = TypeVar("_Row")


def new_id() -> str:
    """An id that cannot be guessed and is safe as a folder name."""
    return secrets.token_hex(16)


def is_id(text: str) -> bool:
    """Whether a text has the form of an id; anything else never reaches a database or a file system."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    number: int
    id: str
    kind: str
    name: str
    status: JobStatus
    wanted: Wanted
    config: dict[str, Any]
    inputs: dict[str, Any]
    makes: Makes
    output_id: str
    result: dict[str, Any] | None
    error: str | None
    failure: dict[str, Any] | None = None  # field, code and hint of the error
    key_hash: str | None
    worker: str | None
    attempts: int
    deaths: int
    deaths_at: int
    current: int
    total: int
    rate: float
    eta_s: float | None
    message: str
    event_seq: int
    stopping_at: float | None
    created_at: float
    queued_at: float | None
    started_at: float | None
    finished_at: float | None
    updated_at: float

    @property
    def progress(self) -> JobProgress:
        return JobProgress(
            current=self.current, total=self.total, rate=float(self.rate), eta_s=self.eta_s, message=self.message
        )  # fmt: skip

    @property
    def out(self) -> str:
        """Where it writes, relative to the data directory; the same for every attempt."""
        return f"{FOLDERS[self.makes]}/{self.output_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a job has written so far."""

    items: int  # samples, or steps of a run; 0: nothing is there
    bytes: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)  # the dataset's `about`, the run's `summary`


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    number: int
    id: str
    name: str
    kind: DatasetKind
    state: DatasetState
    path: str
    owned: bool
    items: int
    bytes: int
    job_id: str | None
    about: dict[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    number: int
    id: str
    name: str
    kind: str
    state: RunState
    path: str
    job_id: str | None
    config: dict[str, Any]
    summary: dict[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model that requests may name."""

    number: int
    name: str
    kind: ModelKind
    network: str
    path: str
    version: str
    about: dict[str, Any]
    added_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something that happened to a job; seq counts 1, 2, 3 … for each job."""

    job_id: str
    seq: int
    kind: EventKind
    data: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    worker: str
    info: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True)
class RowPage(Generic[_Row]):
    """One page of a list, newest first."""

    rows: list[_Row]
    page: int  # from 1
    per_page: int
    total: int  # rows on all pages

    @property
    def pages(self) -> int:
        """At least 1: an empty list is one empty page."""
        return max(1, -(-self.total // self.per_page))


def row_of(kind: type[_Row], row: sa.Row[Any]) -> _Row:
    values = row._mapping
    return kind(**{each.name: values[each.name] for each in fields(kind)})  # type: ignore[arg-type]  # all are dataclasses


def page_of(
    connection: sa.Connection,
    table: sa.Table,
    kind: type[_Row],
    where: list[sa.ColumnElement[bool]],
    page: int,
    per_page: int,
) -> RowPage[_Row]:
    """A page of a table, newest first; one beyond the end is empty."""
    total = connection.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one()
    first = (page - 1) * per_page
    rows: list[_Row] = []
    if 0 <= first < total:  # else the number may be larger than the database can count
        query = sa.select(table).where(*where).order_by(table.c.number.desc()).limit(per_page).offset(first)
        rows = [row_of(kind, row) for row in connection.execute(query)]
    return RowPage(rows, page, per_page, total)

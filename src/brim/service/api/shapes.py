"""What answers look like. Times are ISO 8601 in UTC; no shape has a place for a path."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from brim.jobs.status import JobProgress, Status

Json = dict[str, Any]
MAX_PAGE = 10**6


class Shape(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(Shape):
    """Every refusal: one sentence, and the field it is about where there is one."""

    detail: str
    field: str | None


class ProgressShape(Shape):
    """How far a job has come; total is 0 and percent null where that is not known."""

    current: int
    total: int
    percent: float | None
    rate: float = Field(description="items a second")
    eta_s: float | None
    message: str


class Job(Shape):
    """One job."""

    id: str
    kind: str
    name: str
    status: Status
    progress: ProgressShape
    config: Json
    result: Json | None
    error: str | None
    failure: Json | None  # of the error: field, code and hint
    created_at: str
    started_at: str | None
    finished_at: str | None
    attempts: int


class Page(Shape):
    """Where a list stands among its pages of 50, newest first."""

    page: int
    pages: int
    total: int


class JobPage(Page):
    """Jobs, newest first."""

    jobs: list[Job]


class Dataset(Shape):
    """One dataset; `partial` means that its job was stopped before the end: what is there is valid."""

    id: str
    name: str
    kind: Literal["rf", "images", "sequences"]
    state: str
    items: int
    bytes: int
    job_id: str | None
    about: Json | None
    created_at: str


class DatasetPage(Page):
    """Datasets, newest first."""

    datasets: list[Dataset]


class Preview(Shape):
    """The first items of a dataset."""

    kind: Literal["rf", "images", "sequences"]
    items: list[Json]


class Run(Shape):
    """One training run."""

    id: str
    name: str
    kind: str
    state: str
    job_id: str | None
    config: Json | None
    summary: Json | None
    created_at: str


class RunPage(Page):
    """Runs, newest first."""

    runs: list[Run]


class RunDetail(Run):
    """One training run with the last lines of its metrics."""

    metrics: list[Json]


class LogLine(Shape):
    """One line of a job's log."""

    at: str
    level: str
    text: str


class LogPage(Shape):
    """Lines of a job's log, and where to read on."""

    lines: list[LogLine]
    next: int


class ResultFile(Shape):
    """One file a job made."""

    name: str
    bytes: int


class ResultFiles(Shape):
    """The files a job made."""

    files: list[ResultFile]


class Devices(Shape):
    """What the workers run on."""

    devices: list[Json]


class BatchSizes(BaseModel):
    """Tuned batch sizes, as the file of them holds them."""

    devices: Json


class Model(Shape):
    """One model that requests may name; what is null is known once it is loaded."""

    name: str
    kind: Literal["segment", "locate", "classify"]
    network: str
    state: Literal["cold", "loading", "warm", "failed"]
    error: str | None
    memory_bytes: int | None
    batch_size: int | None = Field(description="as tuned: the most that run together")
    max_batch_size: int | None = Field(description="the largest that is known to fit")
    device: str | None
    added_at: str


class Models(Shape):
    """The models that requests may name, by name."""

    models: list[Model]


class Health(Shape):
    """The service answers."""

    status: Literal["ok"]


class Ready(Shape):
    """Whether jobs can be taken, and what each depends on."""

    status: Literal["ready", "not ready"]
    database: bool
    workers: int
    disk: bool
    free_bytes: int


# From the catalogue's rows


def job(row: Any, redact: Callable[[str], str]) -> Job:
    """A job as the API shows it; what the worker said is redacted once more."""
    progress = JobProgress(current=row.current, total=row.total, rate=row.rate, eta_s=row.eta_s, message=row.message)
    shown = finite(progress.as_dict())
    return Job(
        id=row.id,
        kind=row.kind,
        name=row.name,
        status=row.status,
        progress=ProgressShape(**{**shown, "rate": shown["rate"] or 0.0, "message": redact(progress.message)}),
        config=row.config,
        result=None if row.result is None else redacted(row.result, redact),
        error=None if row.error is None else redact(row.error),
        failure=None if row.failure is None else redacted(row.failure, redact),
        created_at=time_text(row.created_at),
        started_at=_maybe_time(row.started_at),
        finished_at=_maybe_time(row.finished_at),
        attempts=row.attempts,
    )


def dataset(row: Any, redact: Callable[[str], str]) -> Dataset:
    """A dataset without its place on disk."""
    return Dataset(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        items=row.items,
        bytes=row.bytes,
        job_id=row.job_id,
        about=None if row.about is None else redacted(row.about, redact),
        created_at=time_text(row.created_at),
    )


def run(row: Any, redact: Callable[[str], str]) -> Run:
    """A run without its place on disk."""
    return Run(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        job_id=row.job_id,
        config=row.config,
        summary=None if row.summary is None else redacted(row.summary, redact),
        created_at=time_text(row.created_at),
    )


def model(row: Any, told: Mapping[str, Any], redact: Callable[[str], str]) -> Model:
    """A model without its place on disk; told is what a predictor says of it."""
    return Model(
        name=row.name,
        kind=row.kind,
        network=row.network,
        state=told.get("state", "cold"),
        error=None if told.get("error") is None else redact(str(told["error"])),
        memory_bytes=told.get("memory_bytes"),
        batch_size=told.get("batch_size"),
        max_batch_size=told.get("max_batch_size"),
        device=told.get("device"),
        added_at=time_text(row.added_at),
    )


def time_text(at_s: float) -> str:
    """Epoch seconds as 2026-01-31T12:00:00.000Z."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(value: Any) -> Any:
    """The same value with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """The same value with every text redacted and every number finite."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(item, redact) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, redact) for item in value]
    return finite(value)


def _maybe_time(at_s: float | None) -> str | None:
    return None if at_s is None else time_text(at_s)

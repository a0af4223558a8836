"""The JSON of answers, made from the catalogue's rows. Times are ISO 8601 in UTC; no answer has a path."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from brim.jobs.status import JobProgress, JobStatus

JsonObject = dict[str, Any]
MAX_PAGE = 10**6


class AnswerModel(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(AnswerModel):
    """Every error: one sentence, and the field it is about if there is one."""

    detail: str
    field: str | None


class ProgressOut(AnswerModel):
    """How far a job has come; total is 0 and percent null where that is not known."""

    current: int
    total: int
    percent: float | None
    rate: float = Field(description="items a second")
    eta_s: float | None
    message: str


class JobOut(AnswerModel):
    id: str
    kind: str
    name: str
    status: JobStatus
    progress: ProgressOut
    config: JsonObject
    result: JsonObject | None
    error: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    attempts: int


class PageOut(AnswerModel):
    """Where a list stands among its pages of 50, newest first."""

    page: int
    pages: int
    total: int


class JobPageOut(PageOut):
    jobs: list[JobOut]


class DatasetOut(AnswerModel):
    """One dataset; `partial` means that its job was stopped before the end: what is there is valid."""

    id: str
    name: str
    kind: Literal["rf", "images", "sequences"]
    state: str
    items: int
    bytes: int
    job_id: str | None
    about: JsonObject | None
    created_at: str


class DatasetPageOut(PageOut):
    datasets: list[DatasetOut]


class PreviewOut(AnswerModel):
    """The first items of a dataset."""

    kind: Literal["rf", "images", "sequences"]
    items: list[JsonObject]


class RunOut(AnswerModel):
    id: str
    name: str
    kind: str
    state: str
    job_id: str | None
    config: JsonObject | None
    summary: JsonObject | None
    created_at: str


class RunPageOut(PageOut):
    runs: list[RunOut]


class RunDetailOut(RunOut):
    """One training run with the last lines of its metrics."""

    metrics: list[JsonObject]


class LogLineOut(AnswerModel):
    at: str
    level: str
    text: str


class LogPageOut(AnswerModel):
    """Lines of a job's log, and where to read on."""

    lines: list[LogLineOut]
    next: int


class ResultFileOut(AnswerModel):
    name: str
    bytes: int


class ResultFilesOut(AnswerModel):
    files: list[ResultFileOut]


class DevicesOut(AnswerModel):
    """What the workers run on."""

    devices: list[JsonObject]


class BatchSizesOut(BaseModel):
    """Tuned batch sizes, as the file of them holds them."""

    devices: JsonObject


class ModelOut(AnswerModel):
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


class ModelsOut(AnswerModel):
    """The models that requests may name, by name."""

    models: list[ModelOut]


class HealthOut(AnswerModel):
    status: Literal["ok"]


class ReadyOut(AnswerModel):
    """Whether jobs can be taken, and what each depends on."""

    status: Literal["ready", "not ready"]
    database: bool
    workers: int
    disk: bool
    free_bytes: int


class ValidatedOut(AnswerModel):
    """A job that could be submitted as it is."""

    kind: str
    name: str
    config: JsonObject = Field(description="with every default filled in")
    estimated_bytes: int = Field(description="on disk when it is done; from above")


class KindOut(AnswerModel):
    """What a job of one kind reads, makes and can be configured with."""

    kind: str
    title: str
    description: str
    makes: Literal["dataset", "run", "result"]
    reads: Literal["rf", "images", "sequences"] | None = Field(description="kind of the datasets it reads")
    reads_run: str | None = Field(description="kind of the job that made the run it reads")
    schema_: JsonObject = Field(alias="schema", description="JSON schema of its config, complete in itself")
    presets: dict[str, JsonObject] = Field(description="by name, initial values of fields")


class KindsOut(AnswerModel):
    kinds: list[KindOut]


class MetricLinesOut(AnswerModel):
    """Lines of a run's metrics, and the number of the next one."""

    lines: list[JsonObject] = Field(description="each with its step and epoch, and its phase if the run has several")
    next: int = Field(description="give it as `after` to read on")


class DeviceSampleOut(AnswerModel):
    """One second of a device; null where it cannot be read."""

    at: float = Field(description="seconds since 1970")
    busy_share: float | None = Field(description="of the GPU, or of all cores of the machine")
    memory_bytes: int | None = Field(description="in use, by any process")
    power_w: float | None
    ceiling_share: float | None = Field(
        description="of the job that runs there: share of its last ten seconds of computing in which it waited for "
        "nothing, by its own clocks; null if none runs or reports it. What a run reached is in its result."
    )


class DeviceHistoryOut(AnswerModel):
    """The last samples of a worker's device."""

    worker: str
    name: str
    kind: Literal["gpu", "cpu"]
    memory_total_bytes: int | None
    job_id: str | None = Field(description="of the job that runs there")
    samples: list[DeviceSampleOut] = Field(description="oldest first")
    stalls: dict[str, float] = Field(description="share of the job's last ten seconds of computing waited, by cause")


class DeviceHistoriesOut(AnswerModel):
    interval_s: float
    devices: list[DeviceHistoryOut]


# From the catalogue's rows


def job(row: Any, redact: Callable[[str], str]) -> JobOut:
    """A job; what the worker reported is redacted once more."""
    progress = JobProgress(current=row.current, total=row.total, rate=row.rate, eta_s=row.eta_s, message=row.message)
    shown = finite(progress.as_dict())
    return JobOut(
        id=row.id,
        kind=row.kind,
        name=row.name,
        status=row.status,
        progress=ProgressOut(**{**shown, "rate": shown["rate"] or 0.0, "message": redact(progress.message)}),
        config=row.config,
        result=None if row.result is None else redacted(row.result, redact),
        error=None if row.error is None else redact(row.error),
        created_at=time_text(row.created_at),
        started_at=_maybe_time(row.started_at),
        finished_at=_maybe_time(row.finished_at),
        attempts=row.attempts,
    )


def dataset(row: Any, redact: Callable[[str], str]) -> DatasetOut:
    """A dataset without its path."""
    return DatasetOut(
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


def run(row: Any, redact: Callable[[str], str]) -> RunOut:
    """A run without its path."""
    return RunOut(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        job_id=row.job_id,
        config=row.config,
        summary=None if row.summary is None else redacted(row.summary, redact),
        created_at=time_text(row.created_at),
    )


def model(row: Any, report: Mapping[str, Any], redact: Callable[[str], str]) -> ModelOut:
    """A model without its path; report is what a predictor says of it."""
    return ModelOut(
        name=row.name,
        kind=row.kind,
        network=row.network,
        state=report.get("state", "cold"),
        error=None if report.get("error") is None else redact(str(report["error"])),
        memory_bytes=report.get("memory_bytes"),
        batch_size=report.get("batch_size"),
        max_batch_size=report.get("max_batch_size"),
        device=report.get("device"),
        added_at=time_text(row.added_at),
    )


def time_text(at_s: float) -> str:
    """Epoch seconds as 2026-01-31T12:00:00.000Z."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(value: Any) -> Any:
    """The same value with None for numbers that JSON cannot write."""
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

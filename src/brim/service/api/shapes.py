"""The JSON of answers, made from the catalogue's rows. Times are ISO 8601 in UTC; no answer has a path."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from brim.engine.networks.source import title_of
from brim.jobs.status import JobProgress, JobStatus
from brim.service.access import Role

JsonObject = dict[str, Any]
MAX_PAGE = 10**6
_REPORTED = ("result", "error", "about", "summary")  # by workers: redacted


class AnswerModel(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


_Out = TypeVar("_Out", bound=AnswerModel)


class Fault(AnswerModel):
    """One sentence, and the field it is about if there is one."""

    detail: str
    field: str | None


class Problem(Fault):
    """Every error; where several fields are wrong, all of them, the first one's sentence above."""

    errors: list[Fault] = []


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
    submitted_by: str | None = Field(
        None, exclude_if=lambda by: by is None, description="name of the token or person; left out for the shared token"
    )


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
    kind: Literal["rf", "images", "sequences", "recordings"]
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

    kind: Literal["rf", "images", "sequences", "recordings"]
    items: list[JsonObject]


class QualityOut(AnswerModel):
    """The one figure by which runs of a kind are compared."""

    name: Literal["median_error_m", "ap50", "dice", "accuracy", "ccc"]
    value: float
    smaller_is_better: bool


class RunOut(AnswerModel):
    id: str
    name: str
    kind: str
    state: str
    job_id: str | None
    config: JsonObject | None
    summary: JsonObject | None
    quality: QualityOut | None = Field(description="null before it is known; of a locator, from its newest evaluation")
    tags: list[str]
    notes: str
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
    run_id: str | None = Field(description="of the run that trained it, where that is listed")
    run_name: str | None
    added_at: str


class AddedModelOut(ModelOut):
    replaced: bool = Field(description="whether there was a model of this name")


class ModelsOut(AnswerModel):
    """The models that requests may name, by name."""

    models: list[ModelOut]


class ActorOut(AnswerModel):
    """Who asks."""

    name: str
    role: Role


class TokenOut(AnswerModel):
    name: str
    role: Role
    source: Literal["token", "sign-in"] = Field(description="a token, or a person who signed in at the provider")
    created_at: str
    expires_at: str | None


class NewTokenOut(TokenOut):
    token: str = Field(description="not kept: it cannot be shown again")


class TokensOut(AnswerModel):
    """The named tokens, oldest first."""

    tokens: list[TokenOut]


class ActionOut(AnswerModel):
    at: str
    by: str
    role: str
    action: str
    about: str = Field(description="the address it was about, or made")
    status: int | None = Field(description="of the answer")


class ActionsOut(AnswerModel):
    """What was done, newest first."""

    actions: list[ActionOut]


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
    estimated_seconds: float | None = Field(
        description="to run, from completed jobs of its kind on this machine; null before the first"
    )


class KindOut(AnswerModel):
    """What a job of one kind reads, makes and can be configured with."""

    kind: str
    title: str
    description: str
    makes: Literal["dataset", "run", "result"]
    reads: Literal["rf", "images", "sequences", "recordings"] | None = Field(
        description="kind of the datasets it reads"
    )
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
    busy_share: float | None = Field(description="of the GPU; of a CPU the share of all cores that a job uses")
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
    shown = redacted(progress.as_dict(), redact)
    progress_out = ProgressOut(**{**shown, "rate": shown["rate"] or 0.0})
    return _of(JobOut, row, redact, status=row.shown_status, progress=progress_out)


def dataset(row: Any, redact: Callable[[str], str]) -> DatasetOut:
    """A dataset without its path."""
    return _of(DatasetOut, row, redact)


def run(
    row: Any, redact: Callable[[str], str], evaluated: Mapping[str, Any] | None = None, *, brief: bool = False
) -> RunOut:
    """A run without its path; evaluated is the result of its newest evaluation, if any. Brief: without its settings."""
    remarks = row.remarks or {}
    others: dict[str, Any] = {"config": None, "summary": None} if brief else {}
    return _of(
        RunOut, row, redact, quality=quality(row.summary or {}, evaluated or {}), tags=list(remarks.get("tags", ())),
        notes=str(remarks.get("notes", "")), **others,
    )  # fmt: skip


def quality(summary: Mapping[str, Any], evaluated: Mapping[str, Any]) -> QualityOut | None:
    """The figure of a run that its kind is judged by."""
    scores = {**(summary.get("scores") or {}), **(evaluated.get("metrics") or {})}
    known = {**summary, **scores}
    for name in ("median_error_m", "ap50", "dice", "accuracy", "ccc"):
        value = known.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            return QualityOut(name=name, value=float(value), smaller_is_better=name.endswith("_m"))
    return None


def model(row: Any, report: Mapping[str, Any], redact: Callable[[str], str]) -> ModelOut:
    """A model without its path; report is what a predictor says of it."""
    known = {name: report.get(name) for name in ("error", "memory_bytes", "batch_size", "max_batch_size", "device")}
    origin = {name: row.about.get(name) for name in ("run_id", "run_name")}
    network = title_of(row.network)  # without the folder of a file that it comes from
    more = {"state": report.get("state", "cold"), "network": network, **origin, **redacted(known, redact)}
    return _of(ModelOut, row, redact, **more)


def _of(kind: type[_Out], row: Any, redact: Callable[[str], str], **others: Any) -> _Out:
    """An answer from the attributes of a row that have its fields' names."""
    for name in kind.model_fields.keys() - others.keys():
        value = getattr(row, name)
        if name.endswith("_at") and value is not None:
            value = time_text(value)
        others[name] = redacted(value, redact) if name in _REPORTED else value
    return kind(**others)


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

"""Jobs: check, submit, list, show, stop, resume, delete, watch, and what they logged and made."""

import asyncio
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool

from brim.errors import ConfigError, Conflict, NotFound, TooMany, Unavailable
from brim.jobs.kinds import MAX_TEXT
from brim.jobs.registry.outputs import output_of
from brim.jobs.status import FINISHED, RESUMABLE, UNFINISHED, Status
from brim.jobs.store import JobRow
from brim.jobs.worker.joblog import log_file, read_log
from brim.service.api import shapes, shapes_live
from brim.service.api.body import read_json
from brim.service.api.context import Context, Here
from brim.service.api.events import EventStream
from brim.service.api.openapi import KIND_NAMES, Id, PageNumber, refusals
from brim.service.api.submit import submit, validate

router = APIRouter(prefix="/api/training/jobs", tags=["jobs"])

SETTLE_S = 5.0  # a job that was told to stop does so by then; a resume waits for it
_LOOK_S = 0.1
KEY_PATTERN = r"^[!-~]([ -~]{0,198}[!-~])?$"

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=KEY_PATTERN,
        description="1 to 200 printable characters: the same key gives the same job, not a second one",
    ),
]


@router.post(
    "",
    status_code=202,
    response_model=shapes.Job,
    responses=refusals(400, 404, 409, 413, 415, 422, 429, 503, 507),
    summary="Submit a job",
)
async def submit_job(
    request: Request, response: Response, here: Here, idempotency_key: IdempotencyKey = None
) -> shapes.Job:
    """Queue a job; three forms of body: a dataset to generate, a locator to train, or any kind by its name."""
    body = await read_json(request)
    row, is_new = await run_in_threadpool(submit, here, body, idempotency_key)
    response.headers["Location"] = f"{router.prefix}/{row.id}"
    if not is_new:
        response.headers["Idempotency-Replayed"] = "true"
    return shapes.job(row, here.redact)


@router.post(
    "/validate",
    response_model=shapes_live.Validated,
    responses=refusals(400, 404, 409, 413, 415, 422, 503, 507),
    summary="Check a job without submitting it",
)
async def validate_job(request: Request, here: Here) -> shapes_live.Validated:
    """The config with every default and the disk it would take, or what submitting it would be refused with.

    Stores nothing, and needs no room among the waiting jobs.
    """
    body = await read_json(request)
    spec, need = await run_in_threadpool(validate, here, body)
    return shapes_live.Validated(kind=spec.kind, name=spec.name, config=spec.config, estimated_bytes=need)


@router.get("", response_model=shapes.JobPage, responses=refusals(422, 503), summary="List jobs, newest first")
def list_jobs(
    here: Here,
    status: Annotated[Status | Literal[""], Query()] = "",
    kind: Annotated[str, Query(json_schema_extra={"enum": ["", *KIND_NAMES]})] = "",
    name: Annotated[str, Query(max_length=MAX_TEXT, description="A part of the name, in capitals or not.")] = "",
    page: PageNumber = 1,
) -> shapes.JobPage:
    """50 a page; an empty status, kind or name means any."""
    if kind and kind not in KIND_NAMES:
        raise ConfigError(f'kind="{kind[:60]}" is unknown; choose one of {", ".join(KIND_NAMES)}', field="kind")
    found = here.catalogue.jobs.page(status=status or None, kind=kind or None, name=name or None, page=page or 1)
    jobs = [shapes.job(row, here.redact) for row in found.rows]
    return shapes.JobPage(jobs=jobs, page=found.page, pages=found.pages, total=found.total)


@router.get("/{id}", response_model=shapes.Job, responses=refusals(404, 503), summary="Show a job")
def show_job(id: Id, here: Here) -> shapes.Job:
    """One job."""
    return shapes.job(here.job(id), here.redact)


@router.delete("/{id}", status_code=204, responses=refusals(404, 409, 503), summary="Delete a job")
def delete_job(id: Id, here: Here) -> None:
    """Forget a job that is neither waiting nor running, its log and its files; its dataset or run stays."""
    row = here.job(id)
    if not here.catalogue.jobs.remove(id):
        row = here.job(id)
        raise Conflict(f'the job "{row.name}" is {row.status}; cancel it first')
    with suppress(Unavailable):  # its records in the queue do no harm
        here.queue.forget(id)
    for folder in ("jobs", "results"):
        shutil.rmtree(here.settings.data / folder / row.id, ignore_errors=True)


@router.post(
    "/{id}/cancel",
    status_code=202,
    response_model=shapes.Job,
    responses=refusals(404, 409, 503),
    summary="Cancel a job",
)
def cancel_job(id: Id, here: Here) -> shapes.Job:
    """Stop a job at its next batch; what it made so far stays, and it can be resumed."""
    return shapes.job(_stop(here, here.job(id), "cancel"), here.redact)


@router.post(
    "/{id}/pause", status_code=202, response_model=shapes.Job, responses=refusals(404, 409, 503), summary="Pause a job"
)
def pause_job(id: Id, here: Here) -> shapes.Job:
    """Stop a job at its next batch, to be resumed later."""
    return shapes.job(_stop(here, here.job(id), "pause"), here.redact)


@router.post(
    "/{id}/resume",
    status_code=202,
    response_model=shapes.Job,
    responses=refusals(404, 409, 429, 503),
    summary="Resume a job",
)
async def resume_job(id: Id, here: Here) -> shapes.Job:
    """Queue a paused, cancelled or failed job again; it goes on where it was."""
    until_s = time.monotonic() + SETTLE_S
    row = await run_in_threadpool(here.job, id)
    while row.status in UNFINISHED and row.wanted != "run" and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)  # it is being stopped, and must have been before it may run again
        row = await run_in_threadpool(here.job, id)
    return shapes.job(await run_in_threadpool(_resume, here, row), here.redact)


@router.get(
    "/{id}/events",
    status_code=200,
    response_class=EventStream,
    responses={200: {"content": {"text/event-stream": {}}}, **refusals(404, 422, 503)},
    summary="Watch a job",
)
def watch_job(
    id: Id,
    here: Here,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID")] = "",
    after: Annotated[str, Query(pattern=r"^[0-9]{0,18}$")] = "",
) -> Response:
    """Server-sent events: the job as it is, then `status`, `progress` and `log` as they come, until it has ended.

    With Last-Event-ID, or `after`, what came after that event and nothing else.
    """
    row = here.job(id)
    last = _number(last_event_id, "Last-Event-ID") if last_event_id else _number(after, "after")
    is_known = last is not None and last <= row.event_seq
    return EventStream(
        here.hub,
        lambda: here.catalogue.jobs.get(id),
        job_id=id,
        after=last if is_known and last is not None else row.event_seq,
        snapshot=None if is_known else shapes.job(row, here.redact).model_dump(),
        redact=here.redact,
    )


@router.get("/{id}/logs", response_model=shapes.LogPage, responses=refusals(404, 422, 503), summary="Read a job's log")
def read_logs(
    id: Id,
    here: Here,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> shapes.LogPage:
    """Lines from where the last answer's `next` says."""
    found, place = read_log(log_file(here.settings.data, here.job(id).id), after, limit)
    lines = [_line(entry, here) for entry in found]
    return shapes.LogPage(lines=lines, next=place)


@router.get(
    "/{id}/files", response_model=shapes.ResultFiles, responses=refusals(404, 503), summary="List a job's files"
)
def list_files(id: Id, here: Here) -> shapes.ResultFiles:
    """The files a prediction, evaluation or tuning made."""
    found = _files(here.settings.data / "results" / here.job(id).id)
    return shapes.ResultFiles(files=[shapes.ResultFile(name=name, bytes=size) for name, size in sorted(found.items())])


@router.get(
    "/{id}/files/{name:path}",
    status_code=200,
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}, **refusals(404, 503)},
    summary="Fetch one of a job's files",
)
def fetch_file(id: Id, name: str, here: Here) -> FileResponse:
    """The file of that name in the list; a name is looked up there, never joined to a path."""
    folder = here.settings.data / "results" / here.job(id).id
    known = {known: known for known in _files(folder)}.get(name)
    if known is None:
        raise NotFound("the job has no file of this name; its files are listed one level up")
    headers = {"Content-Disposition": "attachment"}  # never shown as a page of ours, whatever is in it
    return FileResponse(folder / known, media_type="application/octet-stream", headers=headers)


# Changes


def _stop(here: Context, row: JobRow, wanted: Literal["cancel", "pause"]) -> JobRow:
    jobs = here.catalogue.jobs
    to: Status = "cancelled" if wanted == "cancel" else "paused"
    idle = ["pending", "queued", "paused"] if wanted == "cancel" else ["pending", "queued"]
    if row.status != to:
        # of a job that no worker has begun, which none will begin after this; else the worker that has it ends it
        begun = row.status not in idle or not jobs.move(
            row.id, to, of=idle, wanted=wanted, output=output_of(here.settings.data, row)
        )
        if not begun or jobs.want(row.id, wanted):
            with suppress(Unavailable):  # it is noted, and reconciling tells the queue
                here.queue.cancel(row.id)
        row = here.job(row.id)
    if row.status != to and (row.status in FINISHED or row.wanted != wanted):
        raise Conflict(f'the job "{row.name}" is {row.status}, and so cannot be {to}')
    return row


def _resume(here: Context, row: JobRow) -> JobRow:
    jobs = here.catalogue.jobs
    if row.status in UNFINISHED and row.wanted != "run":
        raise Conflict(f'the job "{row.name}" is still stopping; try again in a few seconds')
    if row.status not in RESUMABLE:
        raise Conflict(f'the job "{row.name}" is {row.status}; only paused, cancelled and failed jobs can be resumed')
    if jobs.count_unfinished() >= here.settings.max_unfinished:
        raise TooMany(f"{here.settings.max_unfinished} jobs are waiting or running, the most at once; try again later")
    if not jobs.move(row.id, "pending", of=[row.status], wanted="run"):
        raise Conflict(f'the job "{row.name}" was just changed by another request; look at it again')
    with suppress(Conflict, Unavailable):  # away, or its failure is just being recorded: reconciling queues it
        here.queue.resume(row.id, failed=row.status == "failed")
        jobs.move(row.id, "queued", of=["pending"])
    return here.job(row.id)


# Reading


def _number(text: str, name: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ConfigError(f"{name} must be the number of an event, as its id says", field=name)
    return int(text)


def _line(entry: dict[str, Any], here: Context) -> shapes.LogLine:
    at = shapes.time_text(float(entry["at"]))
    return shapes.LogLine(at=at, level=str(entry["level"]), text=here.redact(str(entry["text"])))


def _files(folder: Path) -> dict[str, int]:
    """Names below a folder and their bytes; hidden ones are still being written."""
    found: dict[str, int] = {}
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        if not file.is_symlink() and file.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = file.stat().st_size
    return found

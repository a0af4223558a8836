"""Jobs: validate, submit, list, show, stop, resume, delete, watch, and their logs and files."""

import asyncio
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from brim.errors import ConfigError, Conflict, NotFound, StorageError, TooMany, Unavailable
from brim.jobs.kinds import KINDS, MAX_TEXT, Spec, read_body
from brim.jobs.registry.outputs import output_of
from brim.jobs.status import FINISHED, RESUMABLE, UNFINISHED, JobStatus
from brim.jobs.store import JobRow
from brim.jobs.worker import disk
from brim.jobs.worker.joblog import log_file, read_log
from brim.jobs.worker.process import cores
from brim.service.api import shapes
from brim.service.api.body import read_json
from brim.service.api.context import By, Context, Here, name_of
from brim.service.api.events import EventStream
from brim.service.api.export import Download, file_name
from brim.service.api.openapi import KIND_NAMES, Id, PageNumber, problems

router = APIRouter(prefix="/api/training/jobs", tags=["jobs"])

SETTLE_S = 5.0  # a job that was told to stop does so by then; a resume waits for it
ESTIMATED_FROM = 5  # completed jobs, of which the median counts
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
    responses=problems(400, 404, 409, 413, 415, 422, 429, 503, 507),
    summary="Submit a job",
)
async def submit_job(
    request: Request, response: Response, here: Here, by: By, idempotency_key: IdempotencyKey = None
) -> shapes.JobOut:
    """Queue a job; three forms of body: a dataset to generate, a locator to train, or any kind by its name.

    The job is stored in the catalogue first: if this process dies before it is queued, reconciling queues it.
    """
    body = await read_json(request)
    spec = await run_in_threadpool(read_body, body)
    key_hash = None if idempotency_key is None else hashlib.sha256(idempotency_key.encode()).hexdigest()
    known = None if key_hash is None else await run_in_threadpool(here.catalogue.jobs.of_key, key_hash)
    if known is not None:  # its job, also if there is no room for another
        row, is_new = known, False
    else:
        await _check(here, spec)
        row, is_new = await run_in_threadpool(_submit, here, spec, key_hash, name_of(by))
    response.headers["Location"] = f"{router.prefix}/{row.id}"
    if not is_new:
        response.headers["Idempotency-Replayed"] = "true"
    return shapes.job(row, here.redact)


@router.post(
    "/validate",
    responses=problems(400, 404, 409, 413, 415, 422, 503, 507),
    summary="Check a job without submitting it",
)
async def validate_job(request: Request, here: Here) -> shapes.ValidatedOut:
    """The config with every default and the disk it would take, or the error that submitting it would give.

    Stores nothing, and does not count as a waiting job.
    """
    body = await read_json(request)
    spec = await run_in_threadpool(read_body, body)
    num_bytes = await _check(here, spec)
    seconds = await run_in_threadpool(_estimate_s, here, spec)
    return shapes.ValidatedOut(
        kind=spec.kind, name=spec.name, config=spec.config, estimated_bytes=num_bytes, estimated_seconds=seconds
    )


@router.get("", responses=problems(422, 503), summary="List jobs, newest first")
def list_jobs(
    here: Here,
    status: Annotated[JobStatus | Literal[""], Query()] = "",
    kind: Annotated[str, Query(json_schema_extra={"enum": ["", *KIND_NAMES]})] = "",
    name: Annotated[str, Query(max_length=MAX_TEXT, description="A part of the name, in capitals or not.")] = "",
    page: PageNumber = 1,
) -> shapes.JobPageOut:
    """50 a page; an empty status, kind or name means any."""
    if kind and kind not in KIND_NAMES:
        raise ConfigError(f'kind="{kind[:60]}" is unknown; choose one of {", ".join(KIND_NAMES)}', field="kind")
    rows = here.catalogue.jobs.page(status=status or None, kind=kind or None, name=name or None, page=page or 1)
    jobs = [shapes.job(row, here.redact) for row in rows.rows]
    return shapes.JobPageOut(jobs=jobs, page=rows.page, pages=rows.pages, total=rows.total)


@router.get("/{id}", responses=problems(404, 503), summary="Show a job")
def show_job(id: Id, here: Here) -> shapes.JobOut:
    return shapes.job(here.job(id), here.redact)


@router.delete("/{id}", status_code=204, responses=problems(404, 409, 503), summary="Delete a job")
def delete_job(id: Id, here: Here) -> None:
    """Delete a job that is neither waiting nor running, with its log and files; its dataset or run stays."""
    row = here.job(id)
    if not here.catalogue.jobs.remove(row.id):
        row = here.job(row.id)
        raise Conflict(f'the job "{row.name}" is {row.status}; cancel it first')
    with suppress(Unavailable):  # its records in the queue do no harm
        here.queue.forget(row.id)
    for folder in ("jobs", "results"):
        shutil.rmtree(here.settings.data / folder / row.id, ignore_errors=True)


@router.post("/{id}/cancel", status_code=202, responses=problems(404, 409, 503), summary="Cancel a job")
def cancel_job(id: Id, here: Here) -> shapes.JobOut:
    """Stop a job at its next batch; its output so far stays, and it can be resumed."""
    return _stop(here, here.job(id), "cancel")


@router.post("/{id}/pause", status_code=202, responses=problems(404, 409, 503), summary="Pause a job")
def pause_job(id: Id, here: Here) -> shapes.JobOut:
    """Stop a job at its next batch, to be resumed later."""
    return _stop(here, here.job(id), "pause")


@router.post("/{id}/resume", status_code=202, responses=problems(404, 409, 429, 503), summary="Resume a job")
async def resume_job(id: Id, here: Here) -> shapes.JobOut:
    """Queue a paused, cancelled or failed job again; it continues where it stopped."""
    until_s = time.monotonic() + SETTLE_S
    row = await run_in_threadpool(here.job, id)
    while row.status in UNFINISHED and row.wanted != "run" and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)  # it must have stopped before it may run again
        row = await run_in_threadpool(here.job, id)
    return shapes.job(await run_in_threadpool(_resume, here, row), here.redact)


@router.get(
    "/{id}/events",
    status_code=200,
    response_class=EventStream,
    responses={200: {"content": {"text/event-stream": {}}}, **problems(404, 422, 503)},
    summary="Watch a job",
)
def watch_job(
    id: Id,
    here: Here,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID")] = "",
    after: Annotated[str, Query(pattern=r"^[0-9]{0,18}$")] = "",
) -> Response:
    """Server-sent events: the job as it is, then `status`, `progress` and `log` events until it has ended.

    With Last-Event-ID, or `after`, only the events after that one.
    """
    row = here.job(id)
    last = _number(last_event_id, "Last-Event-ID") if last_event_id else _number(after, "after")
    is_known = last is not None and last <= row.event_seq
    return EventStream(
        here.hub,
        lambda: here.catalogue.jobs.get(row.id),
        job_id=row.id,
        after=last if is_known and last is not None else row.event_seq,
        snapshot=None if is_known else shapes.job(row, here.redact).model_dump(),
        redact=here.redact,
    )


@router.get("/{id}/logs", responses=problems(404, 422, 503), summary="Read a job's log")
def read_logs(
    id: Id,
    here: Here,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> shapes.LogPageOut:
    """Lines from the last answer's `next` on."""
    entries, offset = read_log(log_file(here.settings.data, here.job(id).id), after, limit)
    lines = [
        shapes.LogLineOut(at=shapes.time_text(float(entry["at"])), level=str(entry["level"]), text=text)
        for entry in entries
        for text in [here.redact(str(entry["text"]))]
    ]
    return shapes.LogPageOut(lines=lines, next=offset)


@router.get("/{id}/files", responses=problems(404, 503), summary="List a job's files")
def list_files(id: Id, here: Here) -> shapes.ResultFilesOut:
    """The files a prediction, evaluation or tuning made."""
    sizes = _files(here.settings.data / "results" / here.job(id).id)
    files = [shapes.ResultFileOut(name=name, bytes=size) for name, size in sorted(sizes.items())]
    return shapes.ResultFilesOut(files=files)


@router.get(
    "/{id}/files/{name:path}",
    status_code=200,
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}, **problems(404, 503)},
    summary="Fetch one of a job's files",
)
def fetch_file(id: Id, name: str, here: Here) -> FileResponse:
    """The file of that name in the list; a name is looked up there, never joined to a path."""
    folder = here.settings.data / "results" / here.job(id).id
    known = {known: known for known in _files(folder)}.get(name)
    if known is None:
        raise NotFound("the job has no file of this name; its files are listed one level up")
    headers = {"Content-Disposition": "attachment"}  # never shown as one of our pages, whatever it holds
    return FileResponse(folder / known, media_type="application/octet-stream", headers=headers)


@router.get(
    "/{id}/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/zip": {}}}, **problems(404, 409, 429, 503)},
    summary="All files of a job as a zip",
)
async def export_files(id: Id, here: Here) -> Response:
    """One zip of what the job has written beside its dataset or run."""
    row = await run_in_threadpool(here.job, id)
    place = here.settings.data / "results" / row.id
    names = await run_in_threadpool(_files, place)
    if not names:
        raise Conflict(f'the job "{row.name}" has no files')
    folder = here.exports.open(here.settings.data)
    entries = [(name, place / name) for name in sorted(names)]
    return Download(here.exports, folder, entries, file_name(row, "files"))


# Submitting


async def _check(here: Context, spec: Spec) -> int:
    """The bytes a job will take on disk; an error for one that could not run: no such device, unusable inputs,
    settings that do not fit them, or a full disk."""
    inputs = await run_in_threadpool(_inputs, here, spec)
    num_bytes: int = await here.reader.call("check_job", kind=spec.kind, name=spec.name, config=spec.config, **inputs)
    try:
        disk.check_room(here.settings.data, num_bytes, here.settings.min_free_bytes, "job", "")
    except StorageError as error:
        raise Conflict(error.message, hint="free some space or ask for less") from error
    return num_bytes


def _inputs(here: Context, spec: Spec) -> dict[str, Any]:
    """The paths of a job's inputs, once its devices and inputs exist."""
    kind, data = KINDS[spec.kind], here.settings.data
    _check_devices(here, spec)
    here.catalogue.jobs.check(_input_ids(spec), kind.reads, kind.reads_run)
    _check_unseen(here, spec)
    datasets = [str(data / here.dataset(id).path) for id in spec.dataset_ids]
    return {"datasets": datasets, "run": None if spec.run_id is None else str(data / here.run(spec.run_id).path)}


def _check_unseen(here: Context, spec: Spec) -> None:
    """Reject the evaluation of a run on what it was trained on, unless that is asked for."""
    if spec.run_id is None or spec.config.get("allow_training_data", True):
        return
    run = here.run(spec.run_id)
    trained = set((run.config or {}).get("dataset_ids", ()))
    for index, id in enumerate(spec.dataset_ids):
        if id in trained:
            text = f'the run "{run.name}" was trained on the dataset "{here.dataset(id).name}"'
            field = f"config.dataset_ids[{index}]"
            raise Conflict(text, field=field, hint="choose another, or set {allow_training_data}")


def _check_devices(here: Context, spec: Spec) -> None:
    """Reject a GPU that no worker has, more devices than this machine has, and a cluster if the service has none."""
    config, gpus = spec.config, here.settings.gpus
    accelerator, wanted = config.get("accelerator", "auto"), config.get("devices", 1)
    if accelerator in ("gpu", "cuda"):
        infos = [row.info for row in here.catalogue.devices.all()]
        if infos and not any("cuda" in str(info.get("device", info.get("type", ""))) for info in infos):
            text = 'is not possible: no worker has a GPU; use "auto"'
            raise Conflict(text, field="config.accelerator", value=accelerator)
    if config.get("cluster") and here.settings.cluster is None:
        text = "is not possible: this service has no cluster; leave it out"
        raise Conflict(text, field="config.cluster", value=True)
    on_cpu = not gpus or accelerator == "cpu"
    available = cores() if on_cpu else len(gpus)
    if isinstance(wanted, int) and wanted > available:
        devices = f"{available} {'core' if on_cpu else 'GPU'}{'s' * (available > 1)}"
        text = f'is more than the {devices} of this machine; give at most {available}, or "all"'
        raise Conflict(text, field="config.devices", value=wanted)


def _submit(here: Context, spec: Spec, key_hash: str | None, by: str | None) -> tuple[JobRow, bool]:
    """The job, and whether it is new: another request with the same key may have been first."""
    kind = KINDS[spec.kind]
    row, is_new = here.catalogue.jobs.submit(
        spec, key_hash=key_hash, inputs=_input_ids(spec), makes=kind.makes, reads=kind.reads, reads_run=kind.reads_run,
        limit=here.settings.max_unfinished, submitted_by=by,
    )  # fmt: skip
    return (_enqueue(here, row), True) if is_new else (row, False)


def _enqueue(here: Context, row: JobRow) -> JobRow:
    """Queue a pending job; if the queue does not answer, it stays pending and is queued later."""
    if os.environ.get("BRIM_FAIL_AT") == "submit.enqueue":  # tests of what a crash leaves here
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        here.queue.submit(row.id)
        here.catalogue.jobs.move(row.id, "queued", of=["pending"])
        return here.job(row.id)
    except (NotFound, Unavailable):
        return row


def _estimate_s(here: Context, spec: Spec) -> float | None:
    """Seconds that a job may take, from the last completed ones of its kind on this machine; None before the first."""
    rows = here.catalogue.jobs.page(kind=spec.kind, status="completed", per_page=ESTIMATED_FROM).rows
    rates = []
    for row in rows:
        work = _work(here, row.config)
        if work and row.started_at is not None and row.finished_at is not None:
            rates.append((row.finished_at - row.started_at) / work)
    work = _work(here, spec.config)
    return round(median(rates) * work, 1) if rates and work else None


def _work(here: Context, config: Mapping[str, Any]) -> float:
    """What the time of a job grows with: items times epochs, or the time it was given; 0 if that is not known."""
    if "seconds" in config:
        return float(config["seconds"]) * max(1, len(config.get("models") or ()))
    items = config.get("num_samples") or 0
    for id in config.get("dataset_ids") or ():
        row = here.catalogue.datasets.get(id)
        items += 0 if row is None else row.items
    epochs = config.get("epochs") or config.get("classifier_epochs") or 1
    return float(items) * float(epochs)


def _input_ids(spec: Spec) -> dict[str, Any]:
    return {"dataset_ids": list(spec.dataset_ids), "run_id": spec.run_id}


# Changes


def _stop(here: Context, row: JobRow, wanted: Literal["cancel", "pause"]) -> shapes.JobOut:
    jobs = here.catalogue.jobs
    to: JobStatus = "cancelled" if wanted == "cancel" else "paused"
    idle = ["pending", "queued", "paused"] if wanted == "cancel" else ["pending", "queued"]
    if row.status != to:
        # a job that no worker has begun ends here, and none will begin it; otherwise its worker ends it
        begun = row.status not in idle or not jobs.move(
            row.id, to, of=idle, wanted=wanted, output=output_of(here.settings.data, row)
        )
        if not begun or jobs.want(row.id, wanted):
            with suppress(Unavailable):  # it is stored, and reconciling tells the queue
                here.queue.cancel(row.id)
        row = here.job(row.id)
    if row.status != to and (row.status in FINISHED or row.wanted != wanted):
        raise Conflict(f'the job "{row.name}" is {row.status}, and so cannot be {to}')
    return shapes.job(row, here.redact)


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
    with suppress(Conflict, Unavailable):  # not answering, or its failure is just being recorded: reconciling queues it
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


def _files(folder: Path) -> dict[str, int]:
    """Sizes of the files below a folder by name; hidden ones are still being written."""
    sizes: dict[str, int] = {}
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        if not file.is_symlink() and file.is_file() and not any(part.startswith(".") for part in name.parts):
            sizes[name.as_posix()] = file.stat().st_size
    return sizes

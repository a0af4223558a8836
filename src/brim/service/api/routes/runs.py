"""Training runs: what was trained, its metrics, and what its newest evaluation left for a map or a plot.

Metrics of all phases are one series of lines in the order they were written, numbered from 0. A file may have grown
for days, so no more of it is held than is returned. A line still being written is left for the next request; one that
is not JSON keeps its number and is left out.
"""

import json
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from brim.config import Doc, Length, check, plain, read, schema
from brim.errors import Conflict, NotFound
from brim.jobs.registry.outputs import EMBEDDING, ERRORS, read_json
from brim.jobs.store import JobRow, RunRow
from brim.service.api import body, figures, shapes
from brim.service.api.context import Context, Here
from brim.service.api.openapi import Id, PageNumber, problems

router = APIRouter(prefix="/api/runs", tags=["runs"])

NUM_LINES: Final = 200
MAX_LINES: Final = 10_000
METRICS: Final = "metrics.jsonl"
WORST: Final = "worst.json"
_TAIL_BYTES: Final = 1024**2

MetricLine = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRemarks:
    """What people note about a run; what is left out stays."""

    tags: Annotated[
        tuple[Annotated[str, Length(1, 60)], ...] | None, Length(0, 20, unique=True), Doc("Short words to find it by.")
    ] = None
    notes: Annotated[str | None, Length(0, 4000), Doc("Anything worth remembering.")] = None

    def __post_init__(self) -> None:
        check(self)


@router.get("", responses=problems(422, 503), summary="List runs, newest first")
def list_runs(
    here: Here,
    kind: Annotated[Literal["", "rf.train", "segment.train", "sequence.train"], Query()] = "",
    name: Annotated[str, Query(max_length=200, description="A part of the name, in capitals or not.")] = "",
    page: PageNumber = 1,
    per_page: Annotated[int, Query(ge=1, le=1000)] = 50,
    brief: Annotated[bool, Query(description="Leave out config and summary.")] = False,
) -> shapes.RunPageOut:
    """50 a page unless more are asked for; an empty kind or name means any."""
    rows = here.catalogue.runs.page(kind=kind or None, name=name or None, page=page or 1, per_page=per_page)
    evaluated = _evaluated(here, rows.rows)
    runs = [shapes.run(row, here.redact, evaluated.get(row.id), brief=brief) for row in rows.rows]
    return shapes.RunPageOut(runs=runs, page=rows.page, pages=rows.pages, total=rows.total)


@router.patch(
    "/{id}",
    responses=problems(400, 404, 413, 415, 422, 503),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema(RunRemarks)}}}},
    summary="Change the tags and notes of a run",
)
async def remark_run(id: Id, request: Request, here: Here) -> shapes.RunOut:
    """Replaces the tags, the notes, or both."""
    given = plain(read(RunRemarks, await body.read_json(request), path=""))
    row = await run_in_threadpool(here.run, id)
    kept = {**(row.remarks or {}), **{name: value for name, value in given.items() if value is not None}}
    changed = await run_in_threadpool(here.catalogue.runs.remark, row.id, kept)
    return shapes.run(changed or row, here.redact, _evaluated(here, [row]).get(row.id))


@router.get("/{id}", responses=problems(404, 503), summary="Show a run")
def show_run(id: Id, here: Here) -> shapes.RunDetailOut:
    """One run with the last 200 lines of its metrics; those of a run in several phases say which."""
    row = here.run(id)
    metrics = shapes.redacted(last_lines(here.settings.data / row.path, NUM_LINES), here.redact)
    shown = shapes.run(row, here.redact, _evaluated(here, [row]).get(row.id))
    return shapes.RunDetailOut(**shown.model_dump(), metrics=metrics)


@router.get("/{id}/metrics", responses=problems(404, 422, 503), summary="Read a run's metrics")
def read_metrics(
    id: Id,
    here: Here,
    after: Annotated[int, Query(ge=0, le=2**53, description="Number of the first line, from 0.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES)] = 1000,
    points: Annotated[
        int | None,
        Query(ge=1, le=MAX_LINES, description="Thin to so many lines of each sort; after and limit are then unused."),
    ] = None,
) -> shapes.MetricLinesOut:
    """All phases in order, as one series; continue from the last answer's `next`.

    With `points`, the whole series thinned evenly, training and evaluation each on its own.
    """
    run = here.settings.data / here.run(id).path
    metrics = read_lines(run, after, limit) if points is None else thin_lines(run, points)
    return shapes.MetricLinesOut(lines=shapes.redacted(metrics.lines, here.redact), next=metrics.next)


@router.get("/{id}/errors", responses=problems(404, 409, 503), summary="Where a locator placed transmitters")
def run_errors(id: Id, here: Here) -> figures.RunErrorsOut:
    """Truth, estimate and ellipse of the samples of the run's newest rf.evaluate."""
    job, points = _newest(here, id, "rf.train", "rf.evaluate", ERRORS)
    result = job.result or {}
    return figures.RunErrorsOut(
        **_origin(job), samples=result["samples"], metrics=shapes.redacted(result["metrics"], here.redact), **points
    )


@router.get("/{id}/embedding", responses=problems(404, 409, 503), summary="How a network embeds sequences")
def run_embedding(id: Id, here: Here) -> figures.RunEmbeddingOut:
    """The sequences of the run's newest sequence.evaluate as points of a plane."""
    job, points = _newest(here, id, "sequence.train", "sequence.evaluate", EMBEDDING)
    scores = shapes.redacted((job.result or {})["metrics"], here.redact)
    return figures.RunEmbeddingOut(**_origin(job), scores=scores, **points)


@router.get("/{id}/worst", responses=problems(404, 409, 503), summary="Where a segmentation network does worst")
def run_worst(id: Id, here: Here) -> figures.RunWorstOut:
    """Pictures of what was held out: while it trains of a few crops as they are predicted now, then of the worst."""
    run = here.run(id)
    if run.kind != "segment.train":
        raise Conflict(f'the run "{run.name}" was made by {run.kind}; only those of segment.train have this')
    worst = read_json(here.settings.data / run.path / WORST)
    if worst is None:
        raise NotFound(f'the run "{run.name}" has no pictures; they are made at its evaluations')
    # captions alone: base64 can look like a path
    pictures = [
        figures.WorstPictureOut(caption=here.redact(one["caption"]), picture=one["picture"])
        for one in worst["pictures"]
    ]
    return figures.RunWorstOut(note=worst["note"], pictures=pictures)


def _evaluated(here: Context, rows: Sequence[RunRow]) -> dict[str, dict[str, Any]]:
    """Results of the newest evaluations of locators, whose training measures no distance, by run."""
    ids = [row.id for row in rows if row.kind == "rf.train"]
    return here.catalogue.jobs.results_on_runs(ids, "rf.evaluate") if ids else {}


def _newest(here: Context, id: str, made_by: str, kind: str, name: str) -> tuple[JobRow, dict[str, Any]]:
    """The newest completed evaluation of a run, and the file it left."""
    run = here.run(id)
    if run.kind != made_by:
        raise Conflict(f'the run "{run.name}" was made by {run.kind}; only those of {made_by} have this')
    job = here.catalogue.jobs.newest_on_run(run.id, kind)
    if job is None:
        raise NotFound(f'the run "{run.name}" has no evaluation; evaluate it first, with a job of kind {kind}')
    points = read_json(here.settings.data / job.out / name)
    if points is None:
        raise NotFound(f'the newest evaluation of the run "{run.name}" left no {name}; evaluate it again')
    return job, points


def _origin(job: JobRow) -> dict[str, Any]:
    return {"job_id": job.id, "dataset_id": job.config["dataset_ids"][0]}


# Metrics


class MetricLines(NamedTuple):
    """Some lines of the series."""

    lines: list[MetricLine]
    next: int  # number of the line after them


def read_lines(run: Path, after: int = 0, limit: int = 1000) -> MetricLines:
    """Up to `limit` lines from the given number on.

    If there are fewer than `after`, since a run continued from an earlier checkpoint: none, and how many there are.
    """
    number, lines = 0, list[MetricLine]()
    for number, (phase, line) in enumerate(islice(_lines(run), after + limit), 1):
        if number > after and (value := _parse(line)) is not None:
            lines.append({**phase, **value})
    return MetricLines(lines, number)


def thin_lines(run: Path, points: int) -> MetricLines:
    """At most `points` lines of each sort, evenly over the whole series including its ends.

    Lines with the same names in the same phase are a sort: otherwise evaluations, one in thousands, would be lost.
    """
    sorts: dict[Hashable, list[int]] = {}
    number = 0
    for number, (phase, line) in enumerate(_lines(run), 1):
        if (value := _parse(line)) is not None:
            sorts.setdefault((*phase.values(), *value), []).append(number - 1)
    kept = {index for indices in sorts.values() for index in _evenly(indices, points)}
    lines: list[MetricLine] = []
    for index, (phase, line) in enumerate(islice(_lines(run), number)):
        if index in kept and (value := _parse(line)) is not None:  # None: a worker went back meanwhile
            lines.append({**phase, **value})
    return MetricLines(lines, number)


def last_lines(run: Path, limit: int) -> list[MetricLine]:
    """The last lines, without reading those before."""
    lines: deque[MetricLine] = deque(maxlen=limit)
    for phase, file in _files(run):
        parsed = (_parse(line) for line in _tail(file, limit))
        lines.extend({**phase, **value} for value in parsed if value is not None)
    return list(lines)


def _files(run: Path) -> list[tuple[dict[str, str], Path]]:
    """Phase and file of each, in the order they were written."""
    if (run / METRICS).is_file():
        return [({}, run / METRICS)]
    return [({"phase": file.parent.name}, file) for file in sorted(run.glob(f"*/{METRICS}"), key=_written)]


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _lines(run: Path) -> Iterator[tuple[dict[str, str], bytes]]:
    for phase, file in _files(run):
        try:
            opened = file.open("rb")
        except OSError:
            continue  # just deleted
        with opened:
            for line in opened:
                if line.endswith(b"\n"):
                    yield phase, line


def _tail(file: Path, limit: int) -> list[bytes]:
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, 2) - _TAIL_BYTES)
            opened.seek(start)
            return opened.read().splitlines()[1 if start else 0 :][-limit:]  # the first may be cut
    except OSError:
        return []


def _parse(line: bytes) -> MetricLine | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _evenly(indices: list[int], points: int) -> list[int]:
    """At most so many of them: the last always, the first unless there is only one."""
    if len(indices) <= points:
        return indices
    if points == 1:
        return indices[-1:]
    step = (len(indices) - 1) / (points - 1)
    return [indices[round(number * step)] for number in range(points)]

"""Training runs: what was trained, with what, and how its loss went."""

from typing import Annotated

from fastapi import APIRouter, Query

from brim.service.api import shapes, shapes_live
from brim.service.api.context import Here
from brim.service.api.data.run_metrics import last_lines, read_lines, thin_lines
from brim.service.api.openapi import Id, PageNumber, refusals

router = APIRouter(prefix="/api/runs", tags=["runs"])

NUM_LINES = 200
MAX_LINES = 10_000


@router.get("", response_model=shapes.RunPage, responses=refusals(422, 503), summary="List runs, newest first")
def list_runs(here: Here, page: PageNumber = 1) -> shapes.RunPage:
    """50 a page."""
    found = here.catalogue.runs.page(page=page or 1)
    runs = [shapes.run(row, here.redact) for row in found.rows]
    return shapes.RunPage(runs=runs, page=found.page, pages=found.pages, total=found.total)


@router.get("/{id}", response_model=shapes.RunDetail, responses=refusals(404, 503), summary="Show a run")
def show_run(id: Id, here: Here) -> shapes.RunDetail:
    """One run with the last 200 lines of its metrics; those of a run in several phases say which."""
    row = here.run(id)
    metrics = shapes.redacted(last_lines(here.settings.data / row.path, NUM_LINES), here.redact)
    return shapes.RunDetail(**shapes.run(row, here.redact).model_dump(), metrics=metrics)


@router.get(
    "/{id}/metrics",
    response_model=shapes_live.MetricLines,
    responses=refusals(404, 422, 503),
    summary="Read a run's metrics",
)
def read_metrics(
    id: Id,
    here: Here,
    after: Annotated[int, Query(ge=0, le=2**53, description="Number of the first line, from 0.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES)] = 1000,
    points: Annotated[
        int | None,
        Query(ge=1, le=MAX_LINES, description="Thin to so many lines of each sort; after and limit are then unused."),
    ] = None,
) -> shapes_live.MetricLines:
    """All phases in order, as one series; go on from where the last answer's `next` says.

    With `points`, the whole series thinned evenly, training and evaluation each on its own.
    """
    run = here.settings.data / here.run(id).path
    found = read_lines(run, after, limit) if points is None else thin_lines(run, points)
    return shapes_live.MetricLines(lines=shapes.redacted(found.lines, here.redact), next=found.next)

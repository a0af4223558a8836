"""Runs to look at: what their newest evaluation left for a map or a plot."""

from typing import Any

from fastapi import APIRouter

from brim.errors import Conflict, NotFound
from brim.jobs.registry.outputs import EMBEDDING, ERRORS, read_json
from brim.jobs.store import JobRow
from brim.service.api import shapes_views
from brim.service.api.context import Context, Here
from brim.service.api.openapi import Id, refusals
from brim.service.api.shapes import redacted

router = APIRouter(prefix="/api/runs", tags=["runs"])


@router.get(
    "/{id}/errors",
    response_model=shapes_views.RunErrors,
    responses=refusals(404, 409, 503),
    summary="Where a locator put transmitters",
)
def run_errors(id: Id, here: Here) -> shapes_views.RunErrors:
    """Truth, estimate and ellipse of the samples of the run's newest rf.evaluate."""
    job, left = _newest(here, id, "rf.train", "rf.evaluate", ERRORS)
    result = job.result or {}
    return shapes_views.RunErrors(
        **_about(job), samples=result["samples"], metrics=redacted(result["metrics"], here.redact), **left
    )


@router.get(
    "/{id}/embedding",
    response_model=shapes_views.RunEmbedding,
    responses=refusals(404, 409, 503),
    summary="What a network makes of sequences",
)
def run_embedding(id: Id, here: Here) -> shapes_views.RunEmbedding:
    """The sequences of the run's newest sequence.evaluate as points of a plane."""
    job, left = _newest(here, id, "sequence.train", "sequence.evaluate", EMBEDDING)
    return shapes_views.RunEmbedding(**_about(job), scores=redacted((job.result or {})["metrics"], here.redact), **left)


def _newest(here: Context, id: str, made_by: str, kind: str, name: str) -> tuple[JobRow, dict[str, Any]]:
    """The newest completed evaluation of a run, and the file it left."""
    run = here.run(id)
    if run.kind != made_by:
        raise Conflict(f'the run "{run.name}" was made by {run.kind}; only those of {made_by} have this')
    job = here.catalogue.jobs.newest_on_run(id, kind)
    if job is None:
        raise NotFound(f'the run "{run.name}" has no evaluation; evaluate it first, with a job of kind {kind}')
    left = read_json(here.settings.data / job.out / name)
    if left is None:
        raise NotFound(f'the newest evaluation of the run "{run.name}" left no {name}; evaluate it again')
    return job, left


def _about(job: JobRow) -> dict[str, Any]:
    return {"job_id": job.id, "dataset_id": job.config["dataset_ids"][0]}

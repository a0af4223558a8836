"""The service itself: health, readiness, kinds of jobs, devices, tuned batch sizes, metrics."""

import json
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from brim.errors import Unavailable
from brim.jobs.kinds import KINDS, config_schema
from brim.jobs.worker import disk
from brim.service.api import shapes
from brim.service.api.context import Here
from brim.service.api.devices import INTERVAL_S, MAX_SAMPLES
from brim.service.api.errors import RETRY_AFTER_S
from brim.service.api.metrics import CONTENT_TYPE
from brim.service.api.openapi import problems

router = APIRouter(tags=["service"])


@router.head("/health", response_model=None, summary="Whether the service answers, in the status alone")
@router.get("/health", summary="Whether the service answers")
async def health() -> shapes.HealthOut:
    """Needs no token and touches nothing: also answers while the database is away."""
    return shapes.HealthOut(status="ok")


@router.head(
    "/ready",
    response_model=None,
    responses={503: {"description": "Something that jobs need is missing."}},
    summary="Whether jobs can be taken, in the status alone",
)
@router.get(
    "/ready",
    responses={503: {"model": shapes.ReadyOut, "description": "Something that jobs need is missing."}},
    summary="Whether jobs can be taken",
)
def ready(response: Response, here: Here) -> shapes.ReadyOut:
    """200 if the databases answer, a worker has started and the disk has room; otherwise 503."""
    database, workers = True, 0
    try:
        here.catalogue.ping()
        here.queue.check()
        workers = len(here.catalogue.devices.all())
    except Unavailable:
        database = False
    free = disk.free_bytes(here.settings.data)
    has_room = free > here.settings.min_free_bytes
    is_ready = database and workers > 0 and has_room
    if not is_ready:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S[503])
    status = "ready" if is_ready else "not ready"
    return shapes.ReadyOut(status=status, database=database, workers=workers, disk=has_room, free_bytes=free)  # type: ignore[arg-type]


@router.get("/api/devices", responses=problems(503), summary="What the workers run on")
def devices(here: Here) -> shapes.DevicesOut:
    """As each worker reported when it started."""
    rows = here.catalogue.devices.all()
    facts = [{**row.info, "worker": row.worker, "since": shapes.time_text(row.at)} for row in rows]
    return shapes.DevicesOut(devices=shapes.redacted(facts, here.redact))


@router.get("/api/devices/history", responses=problems(422), summary="Recent samples of the workers' devices")
def device_history(
    here: Here, seconds: Annotated[int, Query(ge=1, le=MAX_SAMPLES, description="How far back.")] = 600
) -> shapes.DeviceHistoriesOut:
    """A sample a second since this process started, an hour at most; also answers while the database is away."""
    devices = [replace(device, name=here.redact(device.name)) for device in here.history.last(seconds)]
    histories = [shapes.DeviceHistoryOut.model_validate(device) for device in devices]
    return shapes.DeviceHistoriesOut(interval_s=INTERVAL_S, devices=histories)


@router.get("/api/training/kinds", tags=["jobs"], summary="List the kinds of jobs")
def list_kinds() -> shapes.KindsOut:
    """Each kind with the JSON schema of its config: types, ranges, defaults, and what each field means."""
    return _kinds()


@cache
def _kinds() -> shapes.KindsOut:
    names = ("title", "description", "makes", "reads", "reads_run")
    kinds = [
        shapes.KindOut(
            kind=kind.name,
            schema=config_schema(kind.name),
            presets={name: dict(values) for name, values in kind.presets.items()},
            **{name: getattr(kind, name) for name in names},
        )
        for kind in KINDS.values()
    ]
    return shapes.KindsOut(kinds=kinds)


@router.get(
    "/api/batch-sizes", response_model=shapes.BatchSizesOut, responses=problems(503), summary="Tuned batch sizes"
)
def batch_sizes(here: Here) -> Any:
    """The file that tuning writes; no devices before the first tuning."""
    try:
        sizes = json.loads(here.settings.batch_sizes.read_bytes())
        assert isinstance(sizes["devices"], dict)
    except FileNotFoundError:
        sizes = {"devices": {}}
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as failure:
        raise Unavailable("the file of tuned batch sizes cannot be read; tune again") from failure
    return shapes.redacted(sizes, here.redact)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    summary="Metrics for Prometheus",
)
async def metrics(here: Here) -> Response:
    """Requests, jobs by status, predictions, streams, workers, free disk; also while the database is away."""
    predictors = await here.predictions.snapshot()

    def render() -> bytes:
        return here.metrics.render(
            here.catalogue.jobs.counts,
            lambda: len(here.catalogue.devices.all()),
            streams=here.hub.num_watchers,
            free_bytes=disk.free_bytes(here.settings.data),
            predictors=predictors,
        )

    text = await run_in_threadpool(render)
    return Response(text, media_type=CONTENT_TYPE)

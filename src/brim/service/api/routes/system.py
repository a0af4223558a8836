"""The service itself: devices, tuned batch sizes, health, readiness, metrics."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from brim.errors import Unavailable
from brim.jobs.worker import disk
from brim.service.api import shapes, shapes_live
from brim.service.api.context import Context, Here
from brim.service.api.data.device_history import INTERVAL_S, MAX_SAMPLES, Device
from brim.service.api.errors import RETRY_AFTER_S
from brim.service.api.metrics import CONTENT_TYPE
from brim.service.api.openapi import refusals

router = APIRouter(tags=["service"])


@router.head("/health", response_model=None, summary="Whether the service answers, in the status alone")
@router.get("/health", response_model=shapes.Health, summary="Whether the service answers")
async def health() -> shapes.Health:
    """Needs no token and touches nothing: also answers while the database is away."""
    return shapes.Health(status="ok")


@router.head(
    "/ready",
    response_model=None,
    responses={503: {"description": "Something that jobs need is missing."}},
    summary="Whether jobs can be taken, in the status alone",
)
@router.get(
    "/ready",
    response_model=shapes.Ready,
    responses={503: {"model": shapes.Ready, "description": "Something that jobs need is missing."}},
    summary="Whether jobs can be taken",
)
def ready(response: Response, here: Here) -> shapes.Ready:
    """200 when the databases answer, a worker is there, the disk has room and all kinds are known; else 503."""
    database, workers = True, 0
    try:
        here.catalogue.ping()
        here.queue.check()
        workers = len(here.catalogue.devices.all())
    except Unavailable:
        database = False
    free = disk.free_bytes(here.settings.data)
    has_room = free > here.settings.min_free_bytes
    is_ready = database and workers > 0 and has_room and here.warm.is_done
    if not is_ready:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S[503])
    status = "ready" if is_ready else "not ready"
    return shapes.Ready(status=status, database=database, workers=workers, disk=has_room, free_bytes=free)  # type: ignore[arg-type]


@router.get("/api/devices", response_model=shapes.Devices, responses=refusals(503), summary="What the workers run on")
def devices(here: Here) -> shapes.Devices:
    """As each worker reported when it started."""
    rows = here.catalogue.devices.all()
    facts = [{**row.info, "worker": row.worker, "since": shapes.time_text(row.at)} for row in rows]
    return shapes.Devices(devices=shapes.redacted(facts, here.redact))


@router.get(
    "/api/devices/history",
    response_model=shapes_live.History,
    responses=refusals(422),
    summary="What the workers' devices did lately",
)
def device_history(
    here: Here, seconds: Annotated[int, Query(ge=1, le=MAX_SAMPLES, description="How far back.")] = 600
) -> shapes_live.History:
    """A sample a second since this process started, an hour at most; also answers while the database is away."""
    stories = [_story(device, here) for device in here.history.last(seconds)]
    return shapes_live.History(interval_s=INTERVAL_S, devices=stories)


def _story(device: Device, here: Context) -> shapes_live.DeviceStory:
    return shapes_live.DeviceStory(
        worker=device.worker,
        name=here.redact(device.name),
        kind=device.kind,
        memory_total_bytes=device.memory_total_bytes,
        job_id=device.job_id,
        samples=[shapes_live.DeviceSample(**sample._asdict()) for sample in device.samples],
        stalls=device.stalls,
    )


@router.get("/api/batch-sizes", response_model=shapes.BatchSizes, responses=refusals(503), summary="Tuned batch sizes")
def batch_sizes(here: Here) -> Any:
    """The file that tuning writes; no devices before the first tuning."""
    try:
        found = json.loads(here.settings.batch_sizes.read_bytes())
        assert isinstance(found["devices"], dict)
    except FileNotFoundError:
        found = {"devices": {}}
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as failure:
        raise Unavailable("the file of tuned batch sizes cannot be read; tune again") from failure
    return shapes.redacted(found, here.redact)


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

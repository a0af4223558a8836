"""The service itself: health, readiness, kinds of jobs, models, devices, tuned batch sizes, metrics."""

import json
from functools import cache
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from brim.errors import Unavailable
from brim.jobs.worker import disk
from brim.service.api import shapes
from brim.service.api.context import Context, Here
from brim.service.api.devices import INTERVAL_S, MAX_SAMPLES, DeviceRecord
from brim.service.api.errors import RETRY_AFTER_S, redacted
from brim.service.api.metrics import CONTENT_TYPE
from brim.service.api.openapi import problems

router = APIRouter(tags=["service"])

_MODEL_STATES: Final = ("failed", "cold", "loading", "warm")  # of several predictors, the most advanced is shown


@router.head("/health", response_model=None, summary="Whether the service answers, in the status alone")
@router.get("/health", response_model=shapes.HealthOut, summary="Whether the service answers")
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
    response_model=shapes.ReadyOut,
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


@router.get(
    "/api/devices", response_model=shapes.DevicesOut, responses=problems(503), summary="What the workers run on"
)
def devices(here: Here) -> shapes.DevicesOut:
    """As each worker reported when it started."""
    rows = here.catalogue.devices.all()
    facts = [{**row.info, "worker": row.worker, "since": shapes.time_text(row.at)} for row in rows]
    return shapes.DevicesOut(devices=shapes.redacted(facts, here.redact))


@router.get(
    "/api/devices/history",
    response_model=shapes.DeviceHistoriesOut,
    responses=problems(422),
    summary="Recent samples of the workers' devices",
)
def device_history(
    here: Here, seconds: Annotated[int, Query(ge=1, le=MAX_SAMPLES, description="How far back.")] = 600
) -> shapes.DeviceHistoriesOut:
    """A sample a second since this process started, an hour at most; also answers while the database is away."""
    histories = [_history(device, here) for device in here.history.last(seconds)]
    return shapes.DeviceHistoriesOut(interval_s=INTERVAL_S, devices=histories)


def _history(device: DeviceRecord, here: Context) -> shapes.DeviceHistoryOut:
    return shapes.DeviceHistoryOut(
        worker=device.worker,
        name=here.redact(device.name),
        kind=device.kind,
        memory_total_bytes=device.memory_total_bytes,
        job_id=device.job_id,
        samples=[shapes.DeviceSampleOut(**sample._asdict()) for sample in device.samples],
        stalls=device.stalls,
    )


@router.get("/api/training/kinds", response_model=shapes.KindsOut, tags=["jobs"], summary="List the kinds of jobs")
def list_kinds() -> shapes.KindsOut:
    """Each kind with the JSON schema of its config: types, ranges, defaults, and what each field means."""
    return _kinds()


@cache
def _kinds() -> shapes.KindsOut:
    from brim.jobs.kinds import KINDS, config_schema

    kinds = [
        shapes.KindOut(
            kind=kind.name,
            title=kind.title,
            description=kind.description,
            makes=kind.makes,
            reads=kind.reads,
            reads_run=kind.reads_run,
            schema=config_schema(kind.name),
            presets={name: dict(values) for name, values in kind.presets.items()},
        )
        for kind in KINDS.values()
    ]
    return shapes.KindsOut(kinds=kinds)


@router.get(
    "/api/models",
    response_model=shapes.ModelsOut,
    responses=problems(503),
    tags=["predictions"],
    summary="The models that requests may name",
)
async def list_models(here: Here) -> shapes.ModelsOut:
    """By name, with state and memory; a model is loaded when it is registered, or when it is first requested."""
    reports: dict[str, dict[str, Any]] = {}
    for report in await here.predictions.models():
        known = reports.get(report["name"])
        if known is None or _MODEL_STATES.index(report["state"]) > _MODEL_STATES.index(known["state"]):
            reports[report["name"]] = report
    rows = await here.models.all()
    models = [shapes.model(row, reports.get(row.name, {}), lambda text: redacted(text, here.redact)) for row in rows]
    return shapes.ModelsOut(models=models)


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

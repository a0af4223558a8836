"""Immediate predictions, images to polygons and sequences to classes, and their models; `locate.py` has positions.

Requests that arrive together run together, in the prediction processes.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from brim.config import Doc, Length, part, plain, read, schema
from brim.errors import BrimError
from brim.jobs.registry import models as registry
from brim.jobs.store import ModelKind
from brim.segmentation.config import RequestConfig
from brim.service.api import shapes
from brim.service.api.body import read_json
from brim.service.api.context import Here
from brim.service.api.errors import INTERNAL, phrase, redacted, status_of
from brim.service.api.openapi import problems
from brim.service.prediction.channel import PredictionAnswer
from brim.service.prediction.request import MODEL_PATTERN, File, PredictForm, PredictionRequest
from brim.service.settings import Settings

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api", tags=["predictions"])

BATCH_FILES: Final = 4  # a batch may have the bytes of so many files of the largest size
_FORM_BYTES: Final = 64 * 1024  # of boundaries, headers and fields
_OURS: Final = ("max_pixels", "as_rings")  # of a RequestConfig: not for clients
_STATES: Final = ("failed", "cold", "loading", "warm")  # of several predictors, the most advanced is shown
_JSON: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_FILE: Final[dict[str, Any]] = {"type": "string", "format": "binary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentForm(RequestConfig, PredictForm):
    """How an image is segmented, and by which model."""

    strict: Annotated[bool, Doc("Never batched with others: always the same bits.")] = False

    def __post_init__(self) -> None:
        PredictForm.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSegmentForm(SegmentForm):
    """The same for many images, whose results are in one JSON."""

    format: Annotated[Literal["geojson", "coco"], Doc("Format of the answers.")] = "geojson"


_PROBLEMS = problems(400, 404, 408, 413, 415, 422, 429, 503)
_ANSWERED = {"Brim-Model": {"schema": {"type": "string"}}, "Server-Timing": {"schema": {"type": "string"}}}
COLLECTION: dict[str, Any] = {
    "type": "object",
    "required": ["type", "features"],
    "properties": {"type": {"const": "FeatureCollection"}, "features": {"type": "array", "items": {"type": "object"}}},
}
_RESULTS: dict[str, Any] = {
    "type": "object",
    "required": ["model", "format", "results", "ok", "failed"],
    "properties": {
        "model": {"type": "string"},
        "format": {"enum": ["geojson", "coco"]},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["file", "status"],
                "properties": {
                    "file": {"type": "string"},
                    "status": {"enum": ["ok", "error"]},
                    "result": {"type": "object", "description": "where status is ok"},
                    "code": {"type": "integer", "description": "status of a request for this file alone"},
                    "detail": {"type": "string", "description": "what is wrong, in a sentence"},
                },
            },
        },
        "ok": {"type": "integer"},
        "failed": {"type": "integer"},
    },
}
_CLASS: dict[str, Any] = {
    "type": "object",
    "required": ["model", "class", "confidence", "probabilities"],
    "properties": {
        "model": {"type": "string"},
        "class": {"type": "string"},
        "confidence": {"type": "number"},
        "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}


KINDS: dict[str, ModelKind] = {
    "/api/segment": "segment", "/api/batch-segment": "segment", "/api/classify": "classify",
}  # fmt: skip


def body_limits(settings: Settings) -> dict[str, int]:
    """The most bytes of a body, by path."""
    one = settings.max_predict_bytes + _FORM_BYTES
    many = BATCH_FILES * settings.max_predict_bytes + settings.max_predict_files * _FORM_BYTES
    return {"/api/segment": one, "/api/classify": one, "/api/batch-segment": many, "/api/locate": many}


def request_body(kind: type[PredictForm], media_type: str = "multipart/form-data", **files: Any) -> dict[str, Any]:
    """The request body in the document: the files, and the fields that clients may set."""
    form = schema(kind)
    properties = {name: field for name, field in form["properties"].items() if name not in _OURS}
    properties["model"]["pattern"] = MODEL_PATTERN
    del properties["deadline_ms"]["default"]  # of a request that names none, the service's
    required = [*form["required"], *(name for name in ("file", "files") if name in files)]
    form |= {"properties": {**files, **properties}, "required": required}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": form}}}}


def prediction_answers(**content: Any) -> dict[int | str, dict[str, Any]]:
    by_type = {name: {"schema": schema} for name, schema in content.items()}
    return {200: {"description": "The prediction.", "content": by_type, "headers": _ANSWERED}, **_PROBLEMS}


@router.post(
    "/segment",
    response_class=Response,
    responses=prediction_answers(
        **{
            "application/geo+json": COLLECTION,
            "application/json": {"type": "object"},
            "application/zip": _FILE,
            "image/png": _FILE,
            "image/tiff": _FILE,
            "text/csv": {"type": "string"},
        }
    ),
    openapi_extra=request_body(SegmentForm, file={**_FILE, "description": "an image: PNG, JPEG, TIFF, …"}),
    summary="An image to polygons",
)
async def segment(request: Request, here: Here) -> Response:
    """The objects in the image: GeoJSON, COCO, ImageJ ROIs, a mask, an overlay, labels or measurements."""
    async with PredictionRequest(request, here, "segment") as call:
        (file,), form = await call.read_form(SegmentForm, max_pixels=here.settings.max_predict_pixels, as_rings=True)
        answer = await _segment(call, file, form)
        return call.respond(answer, **{"Brim-Polygons": str(answer.facts.get("polygons", 0))})


@router.post(
    "/batch-segment",
    response_class=Response,
    responses=prediction_answers(**{"application/json": _RESULTS}),
    openapi_extra=request_body(BatchSegmentForm, files={"type": "array", "minItems": 1, "items": _FILE}),
    summary="Many images to polygons, each with a result of its own",
)
async def batch_segment(request: Request, here: Here) -> Response:
    """Each file succeeds or fails on its own, in order; 503 only if all were rejected."""
    settings = here.settings
    async with PredictionRequest(request, here, "segment") as call:
        files, form = await call.read_form(
            BatchSegmentForm, files=("files", "file"), max_files=settings.max_predict_files,
            max_pixels=settings.max_predict_pixels, as_rings=True,
        )  # fmt: skip
        answers = await asyncio.gather(*(_segment(call, file, form) for file in files), return_exceptions=True)
        failures = [answer for answer in answers if not isinstance(answer, PredictionAnswer)]
        if len(failures) == len(answers) and all(_status(failure) == 503 for failure in failures):
            raise failures[0]
        rows = [_row(here, file.name, answer) for file, answer in zip(files, answers, strict=True)]
        head = _JSON({"model": call.model_name, "format": form.format})
        tail = _JSON({"ok": len(answers) - len(failures), "failed": len(failures)})
        body = b"".join((head[:-1].encode(), b',"results":[', b",".join(rows), b"],", tail[1:].encode()))
        return call.respond(PredictionAnswer(body, "application/json", {}))


@router.post(
    "/classify",
    response_class=Response,
    responses=prediction_answers(**{"application/json": _CLASS}),
    openapi_extra=request_body(PredictForm, file={**_FILE, "description": "one .npy sequence"}),
    summary="A sequence to its class",
)
async def classify(request: Request, here: Here) -> Response:
    """The class of one sequence and the probability of each; clusters for a run without labels."""
    async with PredictionRequest(request, here, "classify") as call:
        (file,), _ = await call.read_form(PredictForm)
        answer = await call.predict(file)
        body = _JSON({"model": call.model_name, **json.loads(answer.body)}).encode()
        return call.respond(answer._replace(body=body))


# Helpers


async def _segment(call: PredictionRequest, file: File, form: SegmentForm) -> PredictionAnswer:
    answer = await call.predict(file, strict=form.strict, **plain(part(RequestConfig, form)))
    from brim.segmentation.objects import RINGS, ImageObjects, geojson_of  # NumPy: too slow for the start

    if answer.media_type != RINGS:
        return answer
    objects = ImageObjects.from_bytes(answer.body)
    text = geojson_of(objects.rings, objects.measurements)
    return PredictionAnswer(text, "application/geo+json", answer.facts)


def _status(failure: BaseException) -> int:
    return status_of(failure) if isinstance(failure, BrimError) else 500


def _row(here: Here, name: str, answer: PredictionAnswer | BaseException) -> bytes:
    """The result of one file; the model's JSON goes in as it is."""
    if isinstance(answer, PredictionAnswer):
        return b"".join((_JSON({"file": name, "status": "ok"})[:-1].encode(), b',"result":', answer.body, b"}"))
    if isinstance(answer, BrimError):
        detail = redacted(phrase(answer), here.redact)
    else:
        log.error("internal error in one file of many", exc_info=answer)
        detail = INTERNAL
    return _JSON({"file": name, "status": "error", "code": _status(answer), "detail": detail}).encode()


# Models


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A model to add."""

    name: Annotated[str, Length(1, 100), Doc("Name for requests: letters, digits, dots, - and _.")]
    run_id: Annotated[str, Length(1, 32), Doc("Run that trained it; the first letters of its id are enough.")]


@router.get("/models", responses=problems(503), summary="The models that requests may name")
async def list_models(here: Here) -> shapes.ModelsOut:
    """By name, with state and memory; a model is loaded when it is registered, or when it is first requested."""
    reports: dict[str, dict[str, Any]] = {}
    for report in await here.predictions.models():
        known = reports.get(report["name"])
        if known is None or _STATES.index(report["state"]) > _STATES.index(known["state"]):
            reports[report["name"]] = report
    rows = await here.models.all()
    models = [shapes.model(row, reports.get(row.name, {}), lambda text: redacted(text, here.redact)) for row in rows]
    return shapes.ModelsOut(models=models)


@router.post(
    "/models",
    status_code=201,
    responses=problems(400, 404, 409, 413, 415, 422, 429, 503),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema(NewModel)}}}},
    summary="Let requests name what a run trained",
)
async def add_model(request: Request, here: Here) -> shapes.AddedModelOut:
    """Check that a run's weights load, and list them as a model; a model of that name is replaced."""
    asked = read(NewModel, await read_json(request), path="")
    registry.check_name(asked.name)
    run = await run_in_threadpool(here.run, asked.run_id)
    registry.check_trained(run)
    path = (here.settings.data / run.path).resolve()
    summary = registry.ModelSummary(**await here.reader.call("look_model", path=str(path)))
    row, replaced = await run_in_threadpool(
        registry.put_run, here.catalogue, run, name=asked.name, path=path, summary=summary
    )
    await here.models.refresh()
    model = shapes.model(row, {}, lambda text: redacted(text, here.redact))
    return shapes.AddedModelOut(**model.model_dump(), replaced=replaced)

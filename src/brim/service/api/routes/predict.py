"""Immediate predictions: images to polygons, observations to positions, sequences to classes.

Requests that arrive together run together, in the prediction processes.
"""

import asyncio
import json
import logging
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from brim.errors import BrimError, ConfigError
from brim.service.api.context import Here
from brim.service.api.errors import INTERNAL, phrase, redacted, status_of
from brim.service.api.openapi import problems
from brim.service.prediction.form import (
    MAX_DEADLINE_MS,
    MODEL_PATTERN,
    File,
    Form,
    FormFields,
    choice,
    read_deadline_ms,
    read_flag,
    read_model,
    read_threshold,
)
from brim.service.prediction.protocol import PredictionAnswer
from brim.service.prediction.request import PredictionRequest
from brim.service.settings import Settings

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api", tags=["predictions"])

FORMATS: Final = ("geojson", "coco", "roi", "mask", "overlay")
JSON_FORMATS: Final = FORMATS[:2]  # several results fit in one answer
BATCH_FILES: Final = 4  # a batch may have the bytes of so many files of the largest size
_FORM_BYTES: Final = 64 * 1024  # of boundaries, headers and fields
_JSON: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

_MODEL: dict[str, Any] = {
    "type": "string",
    "pattern": MODEL_PATTERN,
    "description": "as GET /api/models lists it; optional if there is only one of the kind",
}
_DEADLINE: dict[str, Any] = {
    "type": "integer",
    "minimum": 1,
    "maximum": MAX_DEADLINE_MS,
    "description": "milliseconds from the request's first byte; also the header Brim-Deadline-Ms, by which a "
    "request that cannot be answered in time is rejected before its body is read",
}
_FILE: dict[str, Any] = {"type": "string", "format": "binary"}
_SEGMENT: dict[str, Any] = {
    "model": _MODEL,
    "threshold": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": 0.5},
    "detect_holes": {"type": "boolean", "default": True},
    "strict": {
        "type": "boolean",
        "default": False,
        "description": "never batched with others: always the same bits",
    },
    "deadline_ms": _DEADLINE,
}
_SEGMENT_FIELDS: Final = {
    "model": read_model,
    "threshold": read_threshold,
    "detect_holes": read_flag,
    "strict": read_flag,
    "deadline_ms": read_deadline_ms,
}
_PROBLEMS = problems(400, 404, 408, 413, 415, 422, 429, 503)
_ANSWERED = {"Brim-Model": {"schema": {"type": "string"}}, "Server-Timing": {"schema": {"type": "string"}}}
_COLLECTION: dict[str, Any] = {
    "type": "object",
    "required": ["type", "features"],
    "properties": {"type": {"const": "FeatureCollection"}, "features": {"type": "array", "items": {"type": "object"}}},
}
_RESULTS: dict[str, Any] = {
    "type": "object",
    "required": ["model", "format", "results", "ok", "failed"],
    "properties": {
        "model": {"type": "string"},
        "format": {"enum": list(JSON_FORMATS)},
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


def body_limits(settings: Settings) -> dict[str, int]:
    """The most bytes of a body, by path."""
    one = settings.max_predict_bytes + _FORM_BYTES
    many = BATCH_FILES * settings.max_predict_bytes + settings.max_predict_files * _FORM_BYTES
    return {"/api/segment": one, "/api/classify": one, "/api/batch-segment": many}


def _form(required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "additionalProperties": False, "required": [required], "properties": properties}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _answers(**content: Any) -> dict[int | str, dict[str, Any]]:
    by_type = {name: {"schema": schema} for name, schema in content.items()}
    return {200: {"description": "The prediction.", "content": by_type, "headers": _ANSWERED}, **_PROBLEMS}


@router.post(
    "/segment",
    response_class=Response,
    responses=_answers(
        **{
            "application/geo+json": _COLLECTION,
            "application/json": {"type": "object"},
            "application/zip": _FILE,
            "image/png": _FILE,
        }
    ),
    openapi_extra=_form(
        "file",
        file={**_FILE, "description": "an image: PNG, JPEG, TIFF, …"},
        format={"type": "string", "enum": list(FORMATS), "default": "geojson"},
        **_SEGMENT,
    ),
    summary="An image to polygons",
)
async def segment(request: Request, here: Here) -> Response:
    """The objects in the image, as GeoJSON, COCO, ImageJ ROIs, a mask or an overlay."""
    fields = FormFields(
        max_file_bytes=here.settings.max_predict_bytes, fields={**_SEGMENT_FIELDS, "format": choice(*FORMATS)}
    )
    async with PredictionRequest(request, here, "segment") as call:
        form = await call.read_form(fields)
        answer = await _segment(call, here.settings, form.files[0], form)
        return call.respond(answer, **{"Brim-Polygons": str(answer.facts.get("polygons", 0))})


@router.post(
    "/batch-segment",
    response_class=Response,
    responses=_answers(**{"application/json": _RESULTS}),
    openapi_extra=_form(
        "files",
        files={"type": "array", "minItems": 1, "items": _FILE},
        format={"type": "string", "enum": list(JSON_FORMATS), "default": "geojson"},
        **_SEGMENT,
    ),
    summary="Many images to polygons, each with a result of its own",
)
async def batch_segment(request: Request, here: Here) -> Response:
    """Each file succeeds or fails on its own, in order; 503 only if all were rejected."""
    settings = here.settings
    fields = FormFields(
        files=("files", "file"),
        max_files=settings.max_predict_files,
        max_file_bytes=settings.max_predict_bytes,
        fields={**_SEGMENT_FIELDS, "format": choice(*JSON_FORMATS)},
    )
    async with PredictionRequest(request, here, "segment") as call:
        form = await call.read_form(fields)
        answers = await asyncio.gather(
            *(_segment(call, settings, file, form) for file in form.files), return_exceptions=True
        )
        failures = [answer for answer in answers if not isinstance(answer, PredictionAnswer)]
        if len(failures) == len(answers) and all(_status(failure) == 503 for failure in failures):
            raise failures[0]
        rows = [_row(here, file.name, answer) for file, answer in zip(form.files, answers, strict=True)]
        head = _JSON({"model": call.model_name, "format": form.values.get("format", "geojson")})
        tail = _JSON({"ok": len(answers) - len(failures), "failed": len(failures)})
        body = b"".join((head[:-1].encode(), b',"results":[', b",".join(rows), b"],", tail[1:].encode()))
        return call.respond(PredictionAnswer(body, "application/json", {}))


@router.post(
    "/classify",
    response_class=Response,
    responses=_answers(**{"application/json": _CLASS}),
    openapi_extra=_form(
        "file", file={**_FILE, "description": "one .npy sequence"}, model=_MODEL, deadline_ms=_DEADLINE
    ),
    summary="A sequence to its class",
)
async def classify(request: Request, here: Here) -> Response:
    """The class of one sequence and the probability of each; clusters for a run without labels."""
    fields = FormFields(
        max_file_bytes=here.settings.max_predict_bytes,
        fields={"model": read_model, "deadline_ms": read_deadline_ms},
    )
    async with PredictionRequest(request, here, "classify") as call:
        form = await call.read_form(fields)
        answer = await call.predict(form.files[0])
        body = _JSON({"model": call.model_name, **json.loads(answer.body)}).encode()
        return call.respond(answer._replace(body=body))


@router.post(
    "/locate",
    response_class=Response,
    responses=_answers(**{"application/geo+json": _COLLECTION}),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["observations"],
                        "properties": {
                            "observations": {
                                "type": "array",
                                "minItems": 1,
                                "items": {"type": "object"},
                                "description": 'as "brim rf locate" reads them; docs/prediction.md has an example',
                            },
                            "model": _MODEL,
                            "deadline_ms": _DEADLINE,
                        },
                    }
                }
            },
        },
    },
    summary="Observations to positions",
)
async def locate(request: Request, here: Here) -> Response:
    """Where transmitters are, as GeoJSON points and ellipses."""
    async with PredictionRequest(request, here, "locate") as call:
        values = await call.read_json(_read_observations)
        data = _JSON({"observations": values["observations"]}).encode()
        return call.respond(await call.predict(File("", data)))


# Helpers


async def _segment(call: PredictionRequest, settings: Settings, file: File, form: Form) -> PredictionAnswer:
    values = form.values
    answer = await call.predict(
        file,
        strict=values.get("strict", False),
        threshold=values.get("threshold", 0.5),
        detect_holes=values.get("detect_holes", True),
        format=values.get("format", "geojson"),
        max_pixels=settings.max_predict_pixels,
        as_rings=True,
    )
    from brim.segmentation.objects import RINGS, Rings, geojson_of  # NumPy: too slow for the start

    if answer.media_type != RINGS:
        return answer
    return PredictionAnswer(geojson_of(Rings.from_bytes(answer.body)), "application/geo+json", answer.facts)


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


def _read_observations(body: Any) -> dict[str, Any]:
    """The fields of a body, checked."""
    known = ("observations", "model", "deadline_ms")
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object with observations", field="observations")
    for name in body:
        if name not in known:
            raise ConfigError(f"{name[:60]} is unknown; known: {', '.join(known)}", field=name[:60])
    observations = body.get("observations")
    if not isinstance(observations, list) or not observations or not all(isinstance(one, dict) for one in observations):
        text = "observations must be a list of at least one object with stations"
        raise ConfigError(text, field="observations")
    if not isinstance(body.get("model", ""), str):
        raise ConfigError("model must be a text", field="model")
    values: dict[str, Any] = {"observations": observations, "model": read_model("model", body.get("model", ""))}
    if "deadline_ms" in body:
        deadline = body["deadline_ms"]
        text = str(deadline) if isinstance(deadline, int) and not isinstance(deadline, bool) else "?"
        values["deadline_ms"] = read_deadline_ms("deadline_ms", text)
    return values

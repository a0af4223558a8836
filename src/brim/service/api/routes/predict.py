"""Predictions at once: images to polygons, observations to positions, sequences to classes.

What arrives together runs together, in the predictors; here a body is collected and an answer handed on.
"""

import asyncio
import json
import logging
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from brim.engine.batching import Answer
from brim.errors import BrimError, ConfigError
from brim.service.api.body import check_type, parse
from brim.service.api.context import Here
from brim.service.api.data.multipart import boundary_of
from brim.service.api.errors import INTERNAL, redacted, status_of
from brim.service.api.openapi import refusals
from brim.service.prediction.form import (
    MAX_DEADLINE_MS,
    MODEL_PATTERN,
    File,
    Form,
    Takes,
    choice,
    read_deadline_ms,
    read_flag,
    read_model,
    read_threshold,
)
from brim.service.prediction.intake import Body
from brim.service.prediction.predicting import Asked, predict
from brim.service.settings import Settings

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api", tags=["predictions"])

FORMATS: Final = ("geojson", "coco", "roi", "mask", "overlay")
JSON_FORMATS: Final = FORMATS[:2]  # that can stand in one answer with others
BATCH_FILES: Final = 4  # files of the largest size that a batch may bring in bytes
_FORM_BYTES: Final = 64 * 1024  # of boundaries, headers and fields
_JSON: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

_MODEL: dict[str, Any] = {
    "type": "string",
    "pattern": MODEL_PATTERN,
    "description": "as GET /api/models lists it; may be left out where only one of the kind is there",
}
_DEADLINE: dict[str, Any] = {
    "type": "integer",
    "minimum": 1,
    "maximum": MAX_DEADLINE_MS,
    "description": "milliseconds from the request's first byte; also the header Brim-Deadline-Ms, by which what is "
    "hopeless is refused before its body is read",
}
_FILE: dict[str, Any] = {"type": "string", "format": "binary"}
_SEGMENT: dict[str, Any] = {
    "model": _MODEL,
    "threshold": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": 0.5},
    "detect_holes": {"type": "boolean", "default": True},
    "strict": {"type": "boolean", "default": False, "description": "in no batch with others: the same bits always"},
    "deadline_ms": _DEADLINE,
}
_SEGMENT_FIELDS: Final = {
    "model": read_model,
    "threshold": read_threshold,
    "detect_holes": read_flag,
    "strict": read_flag,
    "deadline_ms": read_deadline_ms,
}
_REFUSALS = refusals(400, 404, 408, 413, 415, 422, 429, 503)
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
                    "code": {"type": "integer", "description": "as the status of a request for this file alone"},
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
    """Bytes that a request may bring, by its path."""
    one = settings.max_predict_bytes + _FORM_BYTES
    many = BATCH_FILES * settings.max_predict_bytes + settings.max_predict_files * _FORM_BYTES
    return {"/api/segment": one, "/api/classify": one, "/api/batch-segment": many}


def _form(required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "additionalProperties": False, "required": [required], "properties": properties}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _answers(**content: Any) -> dict[int | str, dict[str, Any]]:
    by_type = {name: {"schema": schema} for name, schema in content.items()}
    return {200: {"description": "The prediction.", "content": by_type, "headers": _ANSWERED}, **_REFUSALS}


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
    """What "brim segment predict" finds in the image, as GeoJSON, COCO, ImageJ ROIs, a mask or an overlay."""
    takes = Takes(
        max_file_bytes=here.settings.max_predict_bytes, fields={**_SEGMENT_FIELDS, "format": choice(*FORMATS)}
    )

    async def answer(asked: Asked, form: Form) -> Response:
        found = await _segment(asked, form.files[0], form)
        return asked.answer(found, **{"Brim-Polygons": str(found.facts.get("polygons", 0))})

    return await _of_form(request, here, "segment", takes, answer)


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
    """Each file succeeds or fails alone, in order; 503 only where all were refused."""
    settings = here.settings
    takes = Takes(
        files=("files", "file"),
        max_files=settings.max_predict_files,
        max_file_bytes=settings.max_predict_bytes,
        fields={**_SEGMENT_FIELDS, "format": choice(*JSON_FORMATS)},
    )

    async def answer(asked: Asked, form: Form) -> Response:
        found = await asyncio.gather(*(_one(asked, file, form) for file in form.files))
        failures = [one for one in found if isinstance(one, Exception)]
        if len(failures) == len(found) and all(_status(one) == 503 for one in failures):
            raise failures[0]
        return asked.answer(Answer(_results(asked, form, found), "application/json", {}))

    return await _of_form(request, here, "segment", takes, answer)


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
    """The class of one sequence and the probability of each; of a run without labels, clusters."""
    fields = {"model": read_model, "deadline_ms": read_deadline_ms}
    takes = Takes(max_file_bytes=here.settings.max_predict_bytes, fields=fields)

    async def answer(asked: Asked, form: Form) -> Response:
        found = await asked.ask(form.files[0])
        assert asked.model is not None
        return asked.answer(Answer(_with_model(asked.model.name, found.body), found.media_type, found.facts))

    return await _of_form(request, here, "classify", takes, answer)


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
    """Where transmitters are, as GeoJSON points and ellipses: what "brim rf locate" says."""
    body: dict[str, Any] = {}

    async def collect(asked: Asked, incoming: Body) -> str:
        check_type(request)
        pieces: list[bytes] = []
        await incoming.read(pieces.append)
        body.update(_observations(parse(b"".join(pieces))))
        asked.within(body.get("deadline_ms"))
        return str(body.get("model", ""))

    async def answer(asked: Asked) -> Response:
        data = _JSON({"observations": body["observations"]}).encode()
        return asked.answer(await asked.ask(File("", data)))

    return await predict(request, here, "locate", collect, answer)


# Helpers


async def _of_form(request: Request, here: Here, kind: Any, takes: Takes, answer: Any) -> Response:
    """Collect a form, then answer."""
    collected: list[Form] = []

    async def collect(asked: Asked, body: Body) -> str:
        form = Form(boundary_of(request.headers.get("content-type", "")), takes)
        await body.read(form.feed)
        form.finish()
        asked.within(form.values.get("deadline_ms"))
        collected.append(form)
        return str(form.values.get("model", ""))

    return await predict(request, here, kind, collect, lambda asked: answer(asked, collected[0]))


async def _segment(asked: Asked, file: File, form: Form) -> Answer:
    values = form.values
    answer = await asked.ask(
        file,
        strict=values.get("strict", False),
        threshold=values.get("threshold", 0.5),
        detect_holes=values.get("detect_holes", True),
        format=values.get("format", "geojson"),
        max_pixels=asked.here.settings.max_predict_pixels,
        as_rings=True,
    )
    from brim.segmentation.objects import RINGS, Rings, geojson_of  # NumPy: too slow for the start

    if answer.media_type != RINGS:
        return answer
    return Answer(geojson_of(Rings.from_bytes(answer.body)), "application/geo+json", answer.facts)


async def _one(asked: Asked, file: File, form: Form) -> Answer | Exception:
    """A file of many: its failure is its own."""
    try:
        return await _segment(asked, file, form)
    except BrimError as failure:
        return failure
    except Exception as failure:
        log.error("internal error in one file of many", exc_info=failure)
        return failure


def _status(failure: Exception) -> int:
    return status_of(failure) if isinstance(failure, BrimError) else 500


def _results(asked: Asked, form: Form, found: list[Answer | Exception]) -> bytes:
    """One JSON text; what models said goes in as it is."""
    assert asked.model is not None
    rows = [_row(asked, file.name, one) for file, one in zip(form.files, found, strict=True)]
    failed = sum(not isinstance(one, Answer) for one in found)
    head = _JSON({"model": asked.model.name, "format": form.values.get("format", "geojson")})
    tail = _JSON({"ok": len(found) - failed, "failed": failed})
    return b"".join((head[:-1].encode(), b',"results":[', b",".join(rows), b"],", tail[1:].encode()))


def _row(asked: Asked, name: str, one: Answer | Exception) -> bytes:
    if isinstance(one, Answer):
        return b"".join((_JSON({"file": name, "status": "ok"})[:-1].encode(), b',"result":', one.body, b"}"))
    detail = redacted(str(one), asked.here.redact) if isinstance(one, BrimError) else INTERNAL
    return _JSON({"file": name, "status": "error", "code": _status(one), "detail": detail}).encode()


def _with_model(name: str, body: bytes) -> bytes:
    return _JSON({**{"model": name}, **json.loads(body)}).encode()


def _observations(value: Any) -> dict[str, Any]:
    """The fields of a body, by name."""
    known = ("observations", "model", "deadline_ms")
    if not isinstance(value, dict):
        raise ConfigError("the body must be a JSON object with observations", field="observations")
    for name in value:
        if name not in known:
            raise ConfigError(f"{name[:60]} is unknown; known: {', '.join(known)}", field=name[:60])
    found = value.get("observations")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ConfigError("observations must be a list of at least one object with stations", field="observations")
    if not isinstance(value.get("model", ""), str):
        raise ConfigError("model must be a text", field="model")
    out: dict[str, Any] = {"observations": found, "model": read_model("model", value.get("model", ""))}
    if "deadline_ms" in value:
        given = value["deadline_ms"]
        text = str(given) if isinstance(given, int) and not isinstance(given, bool) else "?"
        out["deadline_ms"] = read_deadline_ms("deadline_ms", text)
    return out

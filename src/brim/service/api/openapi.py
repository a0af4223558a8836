"""The OpenAPI document: FastAPI's, with the schema of job bodies and the ways to authenticate."""

from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Path, Query
from fastapi.openapi.utils import get_openapi
from pydantic import Field

from brim import __version__
from brim.jobs.kinds import KINDS
from brim.service.api.shapes import MAX_PAGE, Problem

KIND_NAMES: Final = tuple(KINDS)
_MEANINGS: Final = {
    400: "The body is not valid JSON, or not a valid form.",
    404: "Nothing has an id that the request names.",
    408: "The body did not arrive in time.",
    409: "Valid, but in conflict with the current state, or values that conflict with one another.",
    413: "The body, or what it unpacks to, is too large.",
    415: "The body, or a file in it, is of a type that is not accepted.",
    422: "A value that does not fit this document.",
    429: "Too many jobs or requests are waiting or running; see Retry-After.",
    503: "A database or the models do not answer, or not in time; see Retry-After.",
    507: "The disk has no room for it.",
}
_ALWAYS: Final = {
    401: "The token is missing or wrong.",
    403: "The role of the token does not allow it, or the request comes from another site's page.",
    421: "The Host header names no host of this service.",
}

Id = Annotated[str, Path(description="An id, as lists and answers give it.")]
PageNumber = Annotated[Annotated[int, Field(ge=1, le=MAX_PAGE)] | Literal[""], Query(description="From 1.")]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors that a route may answer with, for the document."""
    return {status: {"model": Problem, "description": _MEANINGS[status]} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        from brim.jobs.kinds import body_schema

        schema = get_openapi(
            title="brim",
            version=__version__,
            summary="Durable jobs over HTTP: generate, train, tune, predict, evaluate; and immediate predictions.",
            routes=app.routes,
        )
        schema["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer"},
            "cookie": {"type": "apiKey", "in": "cookie", "name": "brim_session"},
        }
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                _complete(path, operation)
        body = {"required": True, "content": {"application/json": {"schema": body_schema()}}}
        for path in ("/api/training/jobs", "/api/training/jobs/validate"):
            schema["paths"][path]["post"]["requestBody"] = body
        app.openapi_schema = schema
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add the answers of the gate, which every route has."""
    is_open = path == "/health"
    operation["security"] = [] if is_open else [{"token": []}, {"cookie": []}]
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for status, meaning in _ALWAYS.items():
        if not (is_open and status == 401):
            operation["responses"][str(status)] = {"description": meaning, "content": problem}
    operation["responses"] = dict(sorted(operation["responses"].items()))

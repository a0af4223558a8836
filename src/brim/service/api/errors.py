"""Errors as answers: one table from the error's family to a status, one body, `{"detail", "field"}`,
with `errors` of the same shape where several fields are wrong.

No path, host name or traceback leaves the service: texts of our own errors are redacted, all others become
"internal error".
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Send

from brim import errors
from brim.jobs.kinds import job_phrase

log = logging.getLogger(__name__)

INTERNAL = "internal error; the service's log says more"
RETRY_AFTER_S = {429: 10, 503: 5}
# The first family that fits decides: special ones stand before their parents.
STATUS: tuple[tuple[type[errors.BrimError], int], ...] = (
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.TooLarge, 413),
    (errors.UnsupportedType, 415),
    (errors.TooMany, 429),
    (errors.Overloaded, 503),
    (errors.DeadlinePassed, 503),
    (errors.Unavailable, 503),
    (errors.StorageError, 507),
    (errors.BrimError, 422),
)
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}
_FORMS = {"Idempotency-Key": "1 to 200 printable characters", "after": "the number of an event"}
_ADDRESS = re.compile(r'("(?:GET|POST) /api/[a-z/-]+")')  # one of ours, where a sentence says where to look
_SENTENCES = {
    400: "the request cannot be read; send it again as the documentation says",
    404: "nothing is at this address; /docs lists what is",
    405: "this address does not take this method; the Allow header lists those it takes",
}


def status_of(error: errors.BrimError) -> int:
    if error.code == "conflict":  # also of a ConfigError: values that are valid alone but not together
        return 409
    return next(status for family, status in STATUS if isinstance(error, family))


def phrase(error: errors.BrimError) -> str:
    """The sentence of an error, with settings and commands named as requests name them."""
    return job_phrase(error)[0]


def problem_bytes(detail: str, field: str | None = None, faults: Sequence[tuple[str, str | None]] = ()) -> bytes:
    """The body of every answer that is an error; faults are sentence and field of each, where several are wrong."""
    body: dict[str, Any] = {"detail": detail, "field": field}
    if len(faults) > 1:
        body["errors"] = [{"detail": text, "field": name} for text, name in faults]
    return json.dumps(body, ensure_ascii=False).encode(errors="replace")


async def send_problem(
    send: Send,
    status: int,
    detail: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
    kind: str = "http.response",
) -> None:
    """The same below the framework; without a detail there is no body."""
    body = problem_bytes(detail) if detail else b""
    about = [(b"content-length", str(len(body)).encode()), *([(b"content-type", b"application/json")] if body else [])]
    await send({"type": f"{kind}.start", "status": status, "headers": [*headers, *about]})
    await send({"type": f"{kind}.body", "body": body})


def problem(
    status: int,
    detail: str,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
    faults: Sequence[tuple[str, str | None]] = (),
) -> Response:
    extra = {"Retry-After": str(RETRY_AFTER_S[status])} if status in RETRY_AFTER_S else {}
    body = problem_bytes(detail, field, faults)
    return Response(body, status, media_type="application/json", headers={**extra, **(headers or {})})


def redacted(text: str, redact: Callable[[str], str]) -> str:
    """A sentence without what it says of this machine; our own addresses in it stay."""
    return "".join(part if _ADDRESS.match(part) else redact(part) for part in _ADDRESS.split(text))


def retry_after(error: errors.BrimError) -> dict[str, str]:
    """Whole seconds, rounded up, for an error that knows better than the table."""
    wait_s = getattr(error, "retry_after_s", None)
    return {} if wait_s is None else {"Retry-After": str(max(1, math.ceil(min(wait_s, 3600))))}


def install(app: FastAPI, redact: Callable[[str], str]) -> None:
    """Answer every error of a route with a problem."""

    def brim_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.BrimError)
        faults = [(redacted(phrase(one), redact), one.field or None) for one in (error, *error.more)]
        return problem(status_of(error), *faults[0], retry_after(error), faults)

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(allowed(app, request))
        own = type(error) is not HTTPException  # ours say more than the framework's
        detail = str(error.detail) if own else _SENTENCES.get(error.status_code, str(error.detail))
        return problem(error.status_code, detail, headers=headers)

    def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(422, *first_fault(error.errors()))

    def any_error(request: Request, error: Exception) -> Response:
        log.error("internal error in %s %s", request.method, template(request.scope), exc_info=error)
        return problem(500, INTERNAL)

    def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    app.add_exception_handler(errors.BrimError, brim_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, any_error)


def first_fault(faults: Any) -> tuple[str, str]:
    """Sentence and field of the first invalid parameter of a route."""
    fault = faults[0]
    field = str(fault["loc"][1]) if len(fault["loc"]) > 1 else str(fault["loc"][0])
    value = fault.get("input")
    shown = f"={value}" if isinstance(value, str | int | float) and len(str(value)) <= 60 else ""
    kind, context = fault["type"], fault.get("ctx", {})
    expected = _FORMS.get(field) if kind == "string_pattern_mismatch" else _EXPECTED.get(kind)
    words = str(fault["msg"]) if expected is None else f"must be {expected.format(**context)}"
    return errors.printable(f"{field}{shown} {words}"), field


def allowed(app: FastAPI, request: Request) -> list[str]:
    """Methods of all routes at a request's path: the framework names only those of the first.

    If routes have exactly this path, only those count, even if an id could be named so.
    """
    methods: set[str] = set()
    exact = [route for route in app.routes if getattr(route, "path", "") == request.scope["path"]]
    for route in exact or app.routes:
        match, _ = route.matches({**request.scope, "path_params": {}})
        if match is not Match.NONE:
            methods |= set(getattr(route, "methods", None) or ())
    return sorted(methods)


def template(scope: Mapping[str, Any]) -> str:
    """The route's pattern, such as /api/datasets/{id}: paths hold ids, and unknown ones anything at all."""
    return str(getattr(scope.get("route"), "path", "(unknown)"))

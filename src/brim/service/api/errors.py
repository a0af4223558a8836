"""What an error is to a client: one table from the family to a status, one shape, `{"detail": …, "field": …}`.

No path, host name or traceback leaves: texts of our own errors are redacted, all others become "internal error".
"""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from brim import errors
from brim.errors import printable

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


def status_of(failure: errors.BrimError) -> int:
    """The status code of one of our own errors."""
    if failure.code == "conflict":  # also of a ConfigError: values that are right by themselves but not together
        return 409
    return next(status for family, status in STATUS if isinstance(failure, family))


def problem_bytes(detail: str, field: str | None = None) -> bytes:
    """The body of every refusal."""
    return json.dumps({"detail": detail, "field": field}, ensure_ascii=False).encode(errors="replace")


def problem(status: int, detail: str, field: str | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal as a response."""
    extra = {"Retry-After": str(RETRY_AFTER_S[status])} if status in RETRY_AFTER_S else {}
    body = problem_bytes(detail, field)
    return Response(body, status, media_type="application/json", headers={**extra, **(headers or {})})


def redacted(text: str, redact: Callable[[str], str]) -> str:
    """A sentence without what it says of this machine; addresses of ours in it stay."""
    return "".join(part if _ADDRESS.match(part) else redact(part) for part in _ADDRESS.split(text))


def _retry_after(failure: errors.BrimError) -> dict[str, str]:
    """Whole seconds, rounded up, where the error knows better than the table."""
    wait_s = getattr(failure, "retry_after_s", None)
    return {} if wait_s is None else {"Retry-After": str(max(1, math.ceil(min(wait_s, 3600))))}


def install(app: FastAPI, redact: Callable[[str], str]) -> None:
    """Have every error of a route answered in our shape."""

    def brim_error(request: Request, failure: Exception) -> Response:
        assert isinstance(failure, errors.BrimError)
        return problem(
            status_of(failure),
            redacted(str(failure), redact),
            getattr(failure, "field", None) or None,
            _retry_after(failure),
        )

    def http_error(request: Request, failure: Exception) -> Response:
        assert isinstance(failure, HTTPException)
        headers = dict(failure.headers or {})
        if failure.status_code == 405:
            headers["Allow"] = ", ".join(allowed(app, request))
        own = type(failure) is not HTTPException  # ours say more than the framework's
        detail = str(failure.detail) if own else _SENTENCES.get(failure.status_code, str(failure.detail))
        return problem(failure.status_code, detail, headers=headers)

    def validation_error(request: Request, failure: Exception) -> Response:
        assert isinstance(failure, RequestValidationError)
        return problem(422, *first_fault(failure.errors()))

    def any_error(request: Request, failure: Exception) -> Response:
        log.error("internal error in %s %s", request.method, template(request.scope), exc_info=failure)
        return problem(500, INTERNAL)

    app.add_exception_handler(errors.BrimError, brim_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, any_error)


def first_fault(faults: Any) -> tuple[str, str]:
    """Sentence and field of the first thing that a parameter of a route is not."""
    fault = faults[0]
    field = str(fault["loc"][1]) if len(fault["loc"]) > 1 else str(fault["loc"][0])
    given = fault.get("input")
    shown = f"={given}" if isinstance(given, str | int | float) and len(str(given)) <= 60 else ""
    kind, context = fault["type"], fault.get("ctx", {})
    expected = _FORMS.get(field) if kind == "string_pattern_mismatch" else _EXPECTED.get(kind)
    words = str(fault["msg"]) if expected is None else f"must be {expected.format(**context)}"
    return printable(f"{field}{shown} {words}"), field


def allowed(app: FastAPI, request: Request) -> list[str]:
    """Methods of all routes at a request's path: the framework names only those of the first.

    A path that routes have as it stands is theirs alone, though an id could be called so.
    """
    found: set[str] = set()
    exact = [route for route in app.routes if getattr(route, "path", "") == request.scope["path"]]
    for route in exact or app.routes:
        match, _ = route.matches({**request.scope, "path_params": {}})
        if match is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    return sorted(found)


def template(scope: Mapping[str, Any]) -> str:
    """The route's pattern, such as /api/datasets/{id}: paths hold ids, and unknown ones anything at all."""
    return str(getattr(scope.get("route"), "path", "(unknown)"))

"""Request bodies: how many bytes they may have, and JSON parsed strictly.

`BodyLimit` is pure ASGI behind the gate and counts bytes as they arrive, so chunked bodies are limited too. JSON may
hold no NaN, no key twice, no lone surrogates, and no more than MAX_NESTING levels.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brim.service.api.errors import problem_bytes

MAX_NESTING = 50
DRAIN_BYTES = 16 * 1024**2  # of a rejected body that are read and dropped
DRAIN_S = 5.0
_T = TypeVar("_T")


class Unreadable(HTTPException):
    """A body that is not what its type says, or of no type we take: 400 or 415."""


class BodyTooLarge(HTTPException):
    """Raised where a body is being read; becomes 413."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, _sentence(limit_bytes))


class BodyLimit:
    """Rejects bodies of more than `limit_of(path)` bytes: by Content-Length, or when the limit is passed."""

    def __init__(self, app: ASGIApp, *, limit_of: Callable[[str], int]) -> None:
        self._app, self._limit_of = app, limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = self._limit_of(scope["path"])
        if _content_length(scope) > limit:
            await drain(scope, receive)
            return await _reject(limit, send)
        await self._app(scope, _counting(scope, receive, limit), send)
        return None


async def drain(scope: Scope, receive: Receive, limit_bytes: int = DRAIN_BYTES) -> None:
    """Read and drop the rest of a body, within limits: a client still sending would not read the answer."""
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # the client waits for our word before it sends
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while num_bytes <= limit_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):  # complete, or the client is gone
                    return


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of work, which is cancelled when the client disconnects. The body must have been read."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def read_json(request: Request) -> Any:
    body = await request.body()  # first, so that the client gets to read a rejection
    check_type(request)
    return parse(body)


def check_type(request: Request) -> None:
    """415 unless the request says that its body is JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Unreadable(415, f'the body is of type "{kind[:60]}"; send JSON with Content-Type: application/json')


def parse(body: bytes) -> Any:
    """The value of a JSON text; 400 that says what is wrong with it."""
    try:
        value = json.loads(
            body.decode(), parse_float=_number, parse_constant=_reject_constant, object_pairs_hook=_unique_keys
        )
    except UnicodeDecodeError:
        _invalid("it is not UTF-8")
    except RecursionError:
        _invalid(f"it is nested deeper than {MAX_NESTING} levels")
    except json.JSONDecodeError as failure:
        _invalid(f"{failure.msg.lower()} at line {failure.lineno}, column {failure.colno}")
    except ValueError as failure:  # ours, or an integer of thousands of digits
        _invalid(str(failure) if isinstance(failure, _Invalid) else "a number is too long")
    _check(value, MAX_NESTING)
    return value


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0  # the server has rejected what is not a number
    return 0


def _counting(scope: Scope, receive: Receive, limit: int) -> Receive:
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            if message.get("more_body", False):
                await drain(scope, receive)
            raise BodyTooLarge(limit)
        return message

    return counted


async def _reject(limit: int, send: Send) -> None:
    body = problem_bytes(_sentence(limit))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # there may be more of the body
    ]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _sentence(limit: int) -> str:
    return f"the body is larger than {limit} bytes, the most this address takes; send less at once"


def _number(text: str) -> float | int:
    """8.0 is the integer 8: JSON has one type of number."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


class _Invalid(ValueError):
    pass


def _invalid(reason: str) -> NoReturn:
    raise Unreadable(400, f"the body is not valid JSON: {reason}")


def _reject_constant(name: str) -> NoReturn:
    raise _Invalid(f"{name} is not a number in JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):  # otherwise the last would count, silently
        raise _Invalid("a key occurs twice in one object")
    return values


def _check(value: Any, depth: int) -> None:
    """Check nesting and that every text can be encoded again."""
    if depth < 0:
        _invalid(f"it is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            _invalid("a text holds half of a character (a lone surrogate)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, depth)
            _check(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth - 1)

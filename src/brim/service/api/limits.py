"""How many bytes a request may bring: counted as they come, so that chunked bodies are limited too.

Pure ASGI, behind the gate: a stranger gets no further than 401, whatever he sends.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brim.service.api.errors import problem_bytes

DRAIN_BYTES = 16 * 1024**2  # of a refused body that are read and dropped
DRAIN_S = 5.0


class BodyTooLarge(HTTPException):
    """Raised where a body is being read; becomes 413."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, _sentence(limit_bytes))


class BodyLimit:
    """Refuse bodies of more than `limit_of(path)` bytes: at once where the length is said, else when it is passed."""

    def __init__(self, app: ASGIApp, *, limit_of: Callable[[str], int]) -> None:
        self._app, self._limit_of = app, limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 or pass on, counting."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = self._limit_of(scope["path"])
        if _said_length(scope) > limit:
            await drain(scope, receive)
            return await _refuse(limit, send)
        await self._app(scope, _counting(scope, receive, limit), send)
        return None


async def drain(scope: Scope, receive: Receive, limit_bytes: int = DRAIN_BYTES) -> None:
    """Read and drop the rest of a body, within limits: a client still sending would not get to read the answer."""
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # it waits for our word before it sends
    seen = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while seen <= limit_bytes:
                message = await receive()
                seen += len(message.get("body", b""))
                if not message.get("more_body", False):  # its end, or the client's
                    return


def _said_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0  # the server has refused what is no number
    return 0


def _counting(scope: Scope, receive: Receive, limit: int) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            if message.get("more_body", False):
                await drain(scope, receive)
            raise BodyTooLarge(limit)
        return message

    return counted


async def _refuse(limit: int, send: Send) -> None:
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

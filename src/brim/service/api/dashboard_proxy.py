"""The dashboard behind the API's address: requests that are no route of the API are forwarded to its process.

Pure ASGI behind authentication, so that pages and their WebSocket need the same cookie and Origin. Knows nothing of the
pages: bytes go to a Unix socket and come back. The cookie and the token are not forwarded.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from brim.service.api.metrics import CSP, PAGES

API_PATHS: Final = ("/api", "/docs", "/openapi.json", "/health", "/ready", "/metrics")
START_S = 20.0  # the dashboard's process may just be starting: its socket is there before it
ANSWER_S = 60.0
RESTART = 1012  # close code: the other end will be back
_UNSENT = (1005, 1006)  # codes that are never sent
_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect")
_OURS = (*_HOP, "authorization", "cookie")
_SET_HERE = (*_HOP, "server", "date")  # by our own server
_PAGE = SimpleNamespace(path=PAGES)  # one route for all pages in metrics and log
_STARTING = b"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>brim</title><meta http-equiv="refresh" content="2"></head>
<body><p>The dashboard is starting; this page reloads until it answers. The API answers: <a href="/docs">/docs</a>.</p>
</body></html>
"""


class DashboardProxy:
    """Sends routes of the API to the API, everything else to the dashboard."""

    def __init__(self, path: Path, *, tile_url: str = "") -> None:
        """Take the dashboard's socket; it need not be there yet."""
        self._folder, self._file = path.parent, path.name
        self._csp = _page_csp(tile_url).encode()
        self._client: httpx.AsyncClient | None = None
        self._descriptor = -1

    async def __aenter__(self) -> "DashboardProxy":
        self._descriptor = os.open(self._folder, os.O_PATH | os.O_CLOEXEC)
        timeout = httpx.Timeout(ANSWER_S, connect=START_S)
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=32)
        transport = httpx.AsyncHTTPTransport(uds=self._socket, limits=limits)
        self._client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()
            os.close(self._descriptor)
            self._client = None

    def before(self, api: ASGIApp) -> ASGIApp:
        """An application that has both."""

        async def both(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or is_api(scope["path"]):
                await api(scope, receive, send)
            elif scope["type"] == "http":
                scope["route"] = _PAGE
                await self._forward_request(scope, receive, send)
            else:
                await self._forward_socket(scope, receive, send)

        return both

    @property
    def _socket(self) -> str:
        return f"/proc/self/fd/{self._descriptor}/{self._file}"  # short, whatever the folder

    async def _forward_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._client is not None
        has_body = scope["method"] not in ("GET", "HEAD")
        request = self._client.build_request(
            scope["method"], _url(scope), headers=_headers(scope), content=_body(receive) if has_body else None
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError:
            return await _starting(send)
        try:
            is_page = answer.headers.get("content-type", "").startswith("text/html")
            headers = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in _SET_HERE]
            extra = [(b"content-security-policy", self._csp)] if is_page else []
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers + extra})
            with suppress(httpx.TransportError):  # it ended halfway, and so does this answer
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()

    async def _forward_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        url = _url(scope).copy_with(scheme="ws")
        try:
            async with unix_connect(
                self._socket, str(url), compression=None, max_size=None, ping_interval=None, open_timeout=START_S
            ) as far:
                await send({"type": "websocket.accept"})
                await _relay(far, receive, send)
        except (OSError, TimeoutError, InvalidHandshake):
            await send({"type": "websocket.close", "code": 1013, "reason": ""})


def is_api(path: str) -> bool:
    """Whether a path is the API's."""
    return any(path == own or path.startswith(f"{own}/") for own in API_PATHS)


def _page_csp(tile_url: str) -> str:
    """What a page may load: itself, and map tiles from the configured server. Vue compiles its templates."""
    tiles = f" {tile_url.split('/{')[0].split('/', 3)[0]}//{tile_url.split('/')[2]}" if tile_url else ""
    return (
        f"{CSP}; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        f"img-src 'self' data: blob:{tiles}; connect-src 'self'"
    )


def _url(scope: Scope) -> httpx.URL:
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    path = scope.get("raw_path") or scope["path"].encode()
    return httpx.URL(scheme="http", host="dashboard", raw_path=path.partition(b"?")[0] + query)


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in scope["headers"] if name.decode("latin-1").lower() not in _OURS]


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _starting(send: Send) -> None:
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"retry-after", b"2")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _STARTING})


async def _relay(far: ClientConnection, receive: Receive, send: Send) -> None:
    """Messages both ways until one side ends; then the other is closed."""

    async def onwards() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await far.send(text if text is not None else message["bytes"])

    async def back() -> None:
        with suppress(ConnectionClosed):
            async for data in far:
                await send(_message(data))
        code = far.close_code or 1000
        await send({"type": "websocket.close", "code": RESTART if code in _UNSENT else code, "reason": ""})

    tasks = [asyncio.create_task(onwards()), asyncio.create_task(back())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, ConnectionClosed, OSError, RuntimeError):
                await task


def _message(data: str | bytes) -> Message:
    return {"type": "websocket.send", "text" if isinstance(data, str) else "bytes": data}

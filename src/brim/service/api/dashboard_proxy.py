"""The dashboard behind the API's address: requests that are no route of the API are forwarded to its process.

Pure ASGI behind authentication, so that pages and their WebSocket need the same cookie and Origin. Knows nothing of the
pages: bytes go to a Unix socket and come back. The cookie and the token are not forwarded,
but the session is, so a page has the rights of the person looking at it.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from brim.service.access import SHARED
from brim.service.api.metrics import CSP, PAGES
from brim.service.settings import ACTOR, SESSION

API_PATHS: Final = ("/api", "/docs", "/openapi.json", "/health", "/ready", "/metrics")
START_S = 20.0  # the dashboard's process may just be starting: its socket is there before it
ANSWER_S = 60.0
RESTART = 1012  # close code: the other end will be back
_UNSENT = (1005, 1006)  # codes that are never sent
_HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect")
_SESSION, _ACTOR = SESSION.encode(), ACTOR.encode()
_SECRETS = (b"authorization", b"cookie", _SESSION, _ACTOR)
_SET_HERE = (b"server", b"date")  # by our own server
_PAGE = SimpleNamespace(path=PAGES)  # one route for all pages in metrics and log
_STARTING = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>brim</title><meta http-equiv="refresh" content="2"></head>
<body><p>The dashboard is starting; this page reloads until it answers. The API answers: <a href="/docs">/docs</a>.</p>
</body></html>
"""


class DashboardProxy:
    """Sends routes of the API to the API, everything else to the dashboard."""

    def __init__(self, path: Path, *, tile_url: str = "") -> None:
        """Path is the dashboard's socket, which need not exist yet."""
        self._folder, self._file = path.parent, path.name
        self._csp = _page_csp(tile_url).encode()
        self._client: httpx.AsyncClient | None = None
        self._descriptor = -1

    async def __aenter__(self) -> "DashboardProxy":
        self._descriptor = os.open(self._folder, os.O_PATH | os.O_CLOEXEC)
        timeout = httpx.Timeout(ANSWER_S, connect=START_S)
        # an idle connection is given up before the dashboard closes it, after 5 s
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=32, keepalive_expiry=2.0)
        transport = httpx.AsyncHTTPTransport(uds=self._socket, limits=limits)
        self._client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()
            os.close(self._descriptor)
            self._client = None

    def before(self, api: ASGIApp) -> ASGIApp:
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
        body = None if scope["method"] in ("GET", "HEAD") else Request(scope, receive).stream()
        headers = _headers(scope["headers"], drop=_SECRETS)
        actor = scope["actor"]  # with whose session the pages ask the API
        headers.append((_SESSION, actor.session.encode()))
        if actor.name != SHARED:
            headers.append((_ACTOR, f"{actor.name}, {actor.role}".encode()))
        try:
            request = self._client.build_request(scope["method"], _url(scope), headers=headers, content=body)
            answer = await self._client.send(request, stream=True)
        except ClientDisconnect:
            return None
        except httpx.TransportError:
            return await HTMLResponse(_STARTING, 503, {"Retry-After": "2"})(scope, receive, send)
        try:
            headers = _headers(answer.headers.raw, drop=_SET_HERE)
            if answer.headers.get("content-type", "").startswith("text/html"):
                headers.append((b"content-security-policy", self._csp))
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            with suppress(httpx.TransportError):  # the dashboard ended halfway, and so does this answer
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
    return any(path == own or path.startswith(f"{own}/") for own in API_PATHS)


def _page_csp(tile_url: str) -> str:
    """What a page may load: itself, and map tiles from the configured server. Vue compiles its templates."""
    tiles = f" {urlsplit(tile_url).scheme}://{urlsplit(tile_url).netloc}" if tile_url else ""
    return (
        f"{CSP}; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        f"img-src 'self' data: blob:{tiles}; connect-src 'self'"
    )


def _url(scope: Scope) -> httpx.URL:
    """The address at the dashboard, without a token: it logs addresses that it does not know."""
    parts = [one for one in scope["query_string"].split(b"&") if unquote(one.partition(b"=")[0]) != "token"]
    query = b"?" + b"&".join(parts) if any(parts) else b""
    path = scope.get("raw_path") or scope["path"].encode()
    return httpx.URL(scheme="http", host="dashboard", raw_path=path.partition(b"?")[0] + query)


def _headers(headers: Iterable[tuple[bytes, bytes]], *, drop: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in (*_HOP, *drop)]


async def _relay(far: ClientConnection, receive: Receive, send: Send) -> None:
    """Messages both ways until one side ends; then the other is closed."""

    async def to_dashboard() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await far.send(text if text is not None else message["bytes"])

    async def to_browser() -> None:
        with suppress(ConnectionClosed):
            async for data in far:
                await send({"type": "websocket.send", "text" if isinstance(data, str) else "bytes": data})
        code = far.close_code or 1000
        await send({"type": "websocket.close", "code": RESTART if code in _UNSENT else code, "reason": ""})

    tasks = [asyncio.create_task(to_dashboard()), asyncio.create_task(to_browser())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Authentication before everything else, for HTTP and WebSocket: Host, Origin and token.

Pure ASGI, so that no route, mount or protocol can be forgotten. In this order: Host (a foreign name means DNS
rebinding) → Origin (a page of another site) → open paths → `/?token=`, which sets the cookie and redirects to a clean
address → Bearer token or cookie. Unknown routes answer as known ones do: 401.
"""

from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from brim.service.api.body import drain
from brim.service.api.errors import problem_bytes
from brim.service.token import equals, session_value

COOKIE = "brim_session"
OPEN_PATHS = ("/health",)
DRAIN_BYTES = 1024**2  # read of an unauthenticated body
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Rejection(NamedTuple):
    """An answer given at the gate, before any route."""

    status: int
    detail: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Gate:
    """Lets requests through that name one of our hosts and carry the token."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        """Hosts are lower case, without port."""
        if not token:
            raise ValueError("a gate needs a token")
        self._app, self._token, self._hosts = app, token, frozenset(hosts)
        self._session = session_value(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = None if scope["type"] == "lifespan" else self._reject(scope)
        if rejection is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await drain(scope, receive, DRAIN_BYTES)
            await _answer(rejection, send, "http.response")
        elif "websocket.http.response" in scope.get("extensions", {}):
            await _answer(rejection, send, "websocket.http.response")
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    def _reject(self, scope: Scope) -> Rejection | None:
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or _without_port(hosts[0]) not in self._hosts:
            return Rejection(421, "the Host header names no host of this service; the administrator can allow more")
        if not all(_same_site(origin, hosts[0]) for origin in _values(scope, b"origin")):
            return Rejection(403, "the request comes from another site's page; open the service's own address instead")
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return None
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
            if tokens and equals(tokens[0], self._token):
                return Rejection(303, "", self._cookie())
        if self._is_known(scope):
            return None
        return Rejection(
            401,
            "the token is missing or wrong; send Authorization: Bearer TOKEN, or open the address printed at start",
            ((b"www-authenticate", b"Bearer"),),
        )

    def _is_known(self, scope: Scope) -> bool:
        for value in _values(scope, b"authorization"):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer" and equals(token.strip(), self._token):
                return True
        return any(equals(cookie, self._session) for cookie in _cookies(_values(scope, b"cookie")))

    def _cookie(self) -> tuple[tuple[bytes, bytes], ...]:
        value = f"{COOKIE}={self._session}; Path=/; HttpOnly; SameSite=Strict"
        return (b"location", b"/"), (b"set-cookie", value.encode())


async def _answer(rejection: Rejection, send: Send, kind: str) -> None:
    body = problem_bytes(rejection.detail) if rejection.detail else b""
    headers = [*rejection.headers, (b"content-length", str(len(body)).encode())]
    if body:
        headers.append((b"content-type", b"application/json"))
    await send({"type": f"{kind}.start", "status": rejection.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _without_port(host: str) -> str:
    """The name of a Host header: localhost of localhost:8000, [::1] of [::1]:8000."""
    if host.startswith("["):
        address, bracket, rest = host.partition("]")
        return (address + bracket).lower() if not rest or _is_port(rest) else ""
    name, colon, _ = host.partition(":")
    return name.lower() if not colon or _is_port(host[len(name) :]) else ""


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isascii() and text[1:].isdigit()


def _same_site(origin: str, host: str) -> bool:
    """Whether an Origin is the address the request was sent to; a proxy in front of us may use https."""
    scheme, mark, site = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return bool(mark) and port is not None and site.removesuffix(port) == host.lower().removesuffix(port)


def _cookies(headers: list[str]) -> list[str]:
    """Values of our cookie; a malformed header holds none."""
    values = []
    for header in headers:
        for pair in header.split(";"):
            name, _, value = pair.strip().partition("=")
            if name == COOKIE:
                values.append(value.strip('"'))
    return values

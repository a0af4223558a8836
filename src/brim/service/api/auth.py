"""The one gate before everything, for HTTP and WebSocket alike: who is called, who calls, and with what token.

Pure ASGI, so that no route, mount or protocol can be forgotten. In this order: Host (a name that is not ours means
DNS rebinding) → Origin (another site's page is posting) → open paths → `/?token=`, which sets the cookie and answers
with a clean address → Bearer token or cookie. Unknown routes answer as known ones do: 401.
"""

from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from brim.service.api.errors import problem_bytes
from brim.service.api.limits import drain
from brim.service.token import equals, session_value

COOKIE = "brim_session"
OPEN_PATHS = ("/health",)
DRAIN_BYTES = 1024**2  # of a stranger's body
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Refusal(NamedTuple):
    """An answer given at the gate."""

    status: int
    detail: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Gate:
    """Let through what names one of our hosts and shows the token."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        """Guard app; hosts are lower case, without port."""
        if not token:
            raise ValueError("a gate without a token would stand open")
        self._app, self._token, self._hosts = app, token, frozenset(hosts)
        self._session = session_value(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer."""
        refusal = None if scope["type"] == "lifespan" else self._refuse(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await drain(scope, receive, DRAIN_BYTES)
            await _answer(refusal, send, "http.response")
        elif "websocket.http.response" in scope.get("extensions", {}):
            await _answer(refusal, send, "websocket.http.response")
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    def _refuse(self, scope: Scope) -> Refusal | None:
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or _without_port(hosts[0]) not in self._hosts:
            return Refusal(421, "this name is not one the service answers to; start it with --allow-host NAME")
        if not all(_same_site(origin, hosts[0]) for origin in _values(scope, b"origin")):
            return Refusal(403, "the request comes from another site's page; open the service's own address instead")
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return None
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
            if given and equals(given[0], self._token):
                return Refusal(303, "", self._cookie())
        if self._is_known(scope):
            return None
        return Refusal(
            401,
            "the token is missing or wrong; send Authorization: Bearer TOKEN, or open the address printed at start",
            ((b"www-authenticate", b"Bearer"),),
        )

    def _is_known(self, scope: Scope) -> bool:
        for value in _values(scope, b"authorization"):
            scheme, _, given = value.partition(" ")
            if scheme.lower() == "bearer" and equals(given.strip(), self._token):
                return True
        return any(equals(cookie, self._session) for cookie in _cookies(_values(scope, b"cookie")))

    def _cookie(self) -> tuple[tuple[bytes, bytes], ...]:
        value = f"{COOKIE}={self._session}; Path=/; HttpOnly; SameSite=Strict"
        return (b"location", b"/"), (b"set-cookie", value.encode())


async def _answer(refusal: Refusal, send: Send, kind: str) -> None:
    body = problem_bytes(refusal.detail) if refusal.detail else b""
    headers = [*refusal.headers, (b"content-length", str(len(body)).encode())]
    if body:
        headers.append((b"content-type", b"application/json"))
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
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
    """Whether an Origin is the address the request was sent to; a proxy may speak https before us."""
    scheme, mark, site = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return bool(mark) and port is not None and site.removesuffix(port) == host.lower().removesuffix(port)


def _cookies(headers: list[str]) -> list[str]:
    """Values of our cookie; a malformed header holds none."""
    found = []
    for header in headers:
        for pair in header.split(";"):
            name, _, value = pair.strip().partition("=")
            if name == COOKIE:
                found.append(value.strip('"'))
    return found

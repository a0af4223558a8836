"""Authentication before everything else, for HTTP and WebSocket: Host, Origin, token and role.

Pure ASGI, so that no route, mount or protocol can be forgotten. In this order: the target (a path, not too long) →
Host (a foreign name means DNS rebinding) → Origin (a page of another site) → open paths → `/?token=`, which sets the
cookie and redirects to a clean address → Bearer token or cookie → whether its role may. Unknown routes answer as known
ones do: 401. Routes find who asks in `scope["actor"]`.
"""

from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from brim.errors import printable
from brim.service.access import Access, Actor, may, needed_role
from brim.service.api.dashboard_proxy import is_api
from brim.service.api.errors import send_problem
from brim.service.api.sign_in import LOGIN, LOGOUT, SignIn
from brim.service.settings import COOKIE

OPEN_PATHS = ("/health",)
MAX_TARGET_BYTES = 8192  # of path and query
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


SIGN_IN = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in · brim</title></head>
<body><main><h1>brim does not know this browser yet</h1>
<p>Open the address that was printed when the service started; it ends in <code>/?token=…</code> and signs this browser
in. Or paste a token: the shared one is in the file <code>token</code> of the data directory, and the administrator can
make you one of your own:</p>
<form action="/" method="get"><label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Sign in</button></form>{provider}</main></body></html>
"""
_PROVIDER = f'<p><a href="{LOGIN}">Sign in at your organisation</a></p>'


class Rejection(NamedTuple):
    """An answer given at the gate, before any route."""

    status: int
    detail: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Gate:
    """Lets requests through that name one of our hosts and carry a token whose role suffices."""

    def __init__(self, app: ASGIApp, access: Access, *, hosts: Collection[str], sign_in: SignIn | None = None) -> None:
        self._app, self._access, self._hosts, self._sign_in = app, access, frozenset(hosts), sign_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = None if scope["type"] == "lifespan" else self._reject(scope)
        if rejection is None and self._sign_in is not None and self._sign_in.takes(scope):
            answer = await self._sign_in.answer(scope, self._cookie)
            await answer(scope, receive, send)
        elif rejection is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and rejection.status == 401 and _wants_page(scope):
            page = SIGN_IN.replace("{provider}", _PROVIDER if self._sign_in else "")
            await HTMLResponse(page, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        elif scope["type"] == "http":
            await send_problem(send, *rejection)
        elif "websocket.http.response" in scope.get("extensions", {}):
            await send_problem(send, *rejection, kind="websocket.http.response")
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    def _reject(self, scope: Scope) -> Rejection | None:
        target = scope.get("raw_path") or scope["path"].encode()
        if not target.startswith(b"/") or b"#" in target + scope["query_string"]:
            return Rejection(400, "the target of the request is not a path of this service")
        if len(target) + len(scope["query_string"]) > MAX_TARGET_BYTES:
            return Rejection(414, f"path and query are longer than {MAX_TARGET_BYTES} bytes")
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or _without_port(hosts[0]) not in self._hosts:
            return Rejection(421, "the Host header names no host of this service; the administrator can allow more")
        if not all(_same_site(origin, hosts[0]) for origin in _values(scope, b"origin")):
            return Rejection(403, "the request comes from another site's page; open the service's own address instead")
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return None
        if self._sign_in is not None and self._sign_in.takes(scope):
            return None
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
            known = self._access.of_token(tokens[0]) if tokens else None
            if known is not None:
                return Rejection(303, "", ((b"location", b"/"), (b"set-cookie", self._cookie(known.session).encode())))
        actor = self._actor(scope)
        if actor is None:
            return Rejection(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN, or open the address printed at start",
                ((b"www-authenticate", b"Bearer"),),
            )
        scope["actor"] = actor
        if scope["type"] == "http" and scope["path"] == LOGOUT and scope["method"] == "GET":
            return Rejection(303, "", ((b"location", b"/"), (b"set-cookie", f"{self._cookie('')}; Max-Age=0".encode())))
        return _reject_role(actor, scope)

    def _actor(self, scope: Scope) -> Actor | None:
        for value in _values(scope, b"authorization"):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer" and (actor := self._access.of_token(token.strip())):
                return actor
        actors = map(self._access.of_session, _cookies(_values(scope, b"cookie")))
        return next((actor for actor in actors if actor is not None), None)

    def _cookie(self, session: str) -> str:
        """A cookie that signs a browser in; one for each service, whoever signs in."""
        return f"{COOKIE}_{self._access.service}={session}; Path=/; HttpOnly; SameSite=Strict"


def _reject_role(actor: Actor, scope: Scope) -> Rejection | None:
    """Every role may load pages: they call the API with the session of the person looking at them."""
    if scope["type"] != "http" or not is_api(scope["path"]):
        return None
    needed = needed_role(scope["method"], scope["path"])
    if may(actor.role, needed):
        return None
    what = f"{scope['method'][:20]} {scope['path'][:100]}"
    text = f'"{actor.name}" has the role {actor.role}; {what} needs the role {needed}, which the administrator can give'
    return Rejection(403, printable(text))


def _wants_page(scope: Scope) -> bool:
    """Whether a person's browser asks for a page, rather than a program for data."""
    return scope["method"] == "GET" and any(value.startswith("text/html") for value in _values(scope, b"accept"))


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
    """Values of cookies that may be ours, or another service's of this host; a malformed header holds none."""
    values = []
    for header in headers:
        for pair in header.split(";"):
            name, _, value = pair.strip().partition("=")
            if name.startswith(COOKIE):
                values.append(value.strip('"'))
    return values

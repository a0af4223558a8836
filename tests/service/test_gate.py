"""Nobody gets past the gate without the token, from another site's page, or by another name; on any route."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from live_api import TOKEN, running

from brim.service.access import Access
from brim.service.api.auth import MAX_TARGET_BYTES, Gate
from brim.service.token import session_value
from waiting import PATIENCE_S

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
UNKNOWN = (
    "/nope",
    "/api/nope",
    "/api/training/jobs/",
    "/health/",
    "/healthz",
    "//health",
    "/docs/assets/nope.js",
    "/ws",
)
DEVICES = "/api/devices"


def test_every_route_and_method_needs_the_token_but_health(shared):
    paths = {route.path.replace("{id}", "0" * 32).replace("{name:path}", "a.json") for route in shared.api.routes}
    assert len(paths) > 20

    for path in (*sorted(paths - {"/health"}), *UNKNOWN):
        for method in METHODS:
            answer = shared.ask(method, path, token=None)
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert shared.get("/health", token=None).json == {"status": "ok"}


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ä" * 8])
def test_a_wrong_token_is_refused(shared, token):
    assert shared.get(DEVICES, token=token.encode().decode("latin-1")).status == 401


def test_the_scheme_of_the_token_is_read_in_any_case(shared):
    assert shared.get(DEVICES, token=None, headers={"Authorization": f"bearer {TOKEN}"}).status == 200
    assert shared.get(DEVICES, token=None, headers={"Authorization": f"Basic {TOKEN}"}).status == 401
    assert shared.get(f"{DEVICES}?token={TOKEN}", token=None).status == 401


def test_the_address_with_the_token_sets_a_cookie_and_is_left_at_once(shared):
    answer = shared.get(f"/?token={TOKEN}", token=None)

    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert TOKEN not in cookie

    pair = cookie.split(";")[0]
    assert shared.get("/", token=None, headers={"Cookie": pair}).status == 200
    assert shared.get(DEVICES, token=None, headers={"Cookie": f"other=1; {pair}"}).status == 200
    assert shared.get(DEVICES, token=pair.partition("=")[2]).status == 401, "the session is no token"
    assert shared.get(DEVICES, token=None, headers={"Cookie": f"brim_session={TOKEN}"}).status == 401
    assert shared.get("/?token=wrong", token=None).status == 401


def test_a_person_without_a_token_gets_a_page_and_a_program_a_problem(shared):
    page = shared.get("/", token=None, headers={"Accept": "text/html,*/*"})
    problem = shared.get("/api/runs", token=None)

    assert (page.status, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert b'name="token"' in page.body
    assert (problem.status, problem.headers["content-type"]) == (401, "application/json")


def test_two_services_of_one_host_have_cookies_of_their_own(shared, tmp_path):
    with running(tmp_path / "data", token="another-token_0123456789") as other:
        answers = [one.get(f"/?token={one.settings.token}", token=None) for one in (shared, other)]
        pairs = [answer.headers["set-cookie"].split(";")[0] for answer in answers]
        kept = dict(pair.split("=") for pair in pairs)  # as a browser keeps them: by name, for all ports
        both = {"Cookie": "; ".join(f"{name}={value}" for name, value in kept.items())}

        assert [one.get(DEVICES, token=None, headers=both).status for one in (shared, other)] == [200, 200]
        assert other.get(DEVICES, token=None, headers={"Cookie": pairs[0]}).status == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:80:80", "user@localhost", ""])
def test_a_foreign_host_is_refused(shared, host):
    for path in ("/health", DEVICES, f"/?token={TOKEN}"):
        assert shared.get(path, headers={"Host": host}).status == 421


@pytest.mark.parametrize("host", ["LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_our_own_names_are_known_with_any_port(shared, host):
    assert shared.get(DEVICES, headers={"Host": host}).status == 200


def test_two_hosts_are_refused(shared):
    with shared.connect("GET", "/health", head="Host: evil.example\r\nConnection: close\r\n") as connection:
        assert connection.makefile("rb").read().split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", "http://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://localhost:9", 403),
        ("localhost:8000", "https://evil.example:443", 403),
        ("localhost:8000", "file://", 403),
        ("localhost:8000", "localhost:8000", 403),
        ("localhost", "http://localhost:443", 403),
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost", "https://localhost", 200),
        ("localhost:80", "http://LOCALHOST", 200),
    ],
)
def test_only_our_own_pages_are_let_in(shared, host, origin, status):
    headers = {"Host": host, "Origin": origin}

    assert shared.get(DEVICES, headers=headers).status == status
    assert (shared.post("/api/training/jobs", {}, headers=headers).status == 403) == (status == 403)


def test_an_address_has_as_many_bytes_as_the_limit_and_no_more(shared):
    query = "?" + "a" * (MAX_TARGET_BYTES - len(DEVICES))

    assert shared.get(DEVICES + query).status == 200
    assert shared.get(f"{DEVICES}{query}a").status == 414


UPGRADED = {"websocket.http.response": {}}
BEARER = (b"authorization", f"Bearer {TOKEN}".encode())


@pytest.mark.parametrize(
    ("headers", "extensions", "expected"),
    [
        ([(b"host", b"localhost")], {}, "websocket.close"),
        ([(b"host", b"localhost")], UPGRADED, 401),
        ([(b"host", b"evil.example"), BEARER], UPGRADED, 421),
        ([(b"host", b"localhost"), (b"origin", b"http://evil.example")], UPGRADED, 403),
        ([(b"host", b"localhost"), BEARER], {}, "passed"),
        ([(b"host", b"localhost"), (b"cookie", f"brim_session={session_value(TOKEN)}".encode())], {}, "passed"),
    ],
)
def test_a_websocket_meets_the_same_gate(headers, extensions, expected):
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"type": "passed"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/health", "query_string": b"", "headers": headers, "extensions": extensions}
    gate = Gate(app, Access(Path("/nowhere"), TOKEN), hosts={"localhost"})
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]

    assert expected in (sent[0]["type"], sent[0].get("status"))


def test_what_is_no_http_gets_a_plain_refusal(shared):
    for raw in (b"\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", shared.port), timeout=PATIENCE_S) as connection:
            connection.sendall(raw)
            assert connection.recv(4096).split()[1] in (b"400", b"421")

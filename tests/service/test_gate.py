"""Nobody gets past the gate without the token, from another site's page, or by another name; on any route."""

import asyncio
import http.client
import socket
from pathlib import Path
from typing import Any

import pytest
from live_api import TOKEN, running

from brim.service.access import Access
from brim.service.api.auth import Gate
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


def paths_of(api: Any) -> list[str]:
    """Every path of the application, with an id where it takes one."""
    found = []
    for route in api.routes:
        found.append(route.path.replace("{id}", "0" * 32).replace("{name:path}", "a.json"))
    return sorted(set(found))


def test_every_route_and_method_needs_the_token(shared):
    paths = [path for path in paths_of(shared.api) if path != "/health"]
    assert len(paths) > 20

    for path in (*paths, *UNKNOWN):
        for method in METHODS:
            answer = shared.ask(method, path, token=None)
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ä" * 8])
def test_a_wrong_token_is_refused(shared, token):
    assert shared.get("/api/devices", token=token.encode().decode("latin-1")).status == 401


def test_health_needs_no_token(shared):
    assert shared.get("/health", token=None).json == {"status": "ok"}


def test_the_scheme_of_the_token_is_read_in_any_case(shared):
    assert shared.get("/api/devices", token=None, headers={"Authorization": f"bearer {TOKEN}"}).status == 200
    assert shared.get("/api/devices", token=None, headers={"Authorization": f"Basic {TOKEN}"}).status == 401
    assert shared.get(f"/api/devices?token={TOKEN}", token=None).status == 401


def test_the_address_with_the_token_sets_a_cookie_and_is_left_at_once(shared):
    answer = shared.get(f"/?token={TOKEN}", token=None)

    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert TOKEN not in cookie

    pair = cookie.split(";")[0]
    assert shared.get("/", token=None, headers={"Cookie": pair}).status == 200
    assert shared.get("/api/devices", token=None, headers={"Cookie": f"other=1; {pair}"}).status == 200
    assert shared.get("/api/devices", token=pair.partition("=")[2]).status == 401, "the session is no token"
    assert shared.get("/api/devices", token=None, headers={"Cookie": f"brim_session={TOKEN}"}).status == 401
    assert shared.get("/?token=wrong", token=None).status == 401


def test_two_services_of_one_host_have_cookies_of_their_own(shared, tmp_path):
    with running(tmp_path / "data", token="another-token_0123456789") as other:
        answers = [one.get(f"/?token={one.settings.token}", token=None) for one in (shared, other)]
        pairs = [answer.headers["set-cookie"].split(";")[0] for answer in answers]
        kept = dict(pair.split("=") for pair in pairs)  # as a browser keeps them: by name, for all ports
        both = {"Cookie": "; ".join(f"{name}={value}" for name, value in kept.items())}

        assert [one.get("/api/devices", token=None, headers=both).status for one in (shared, other)] == [200, 200]
        assert other.get("/api/devices", token=None, headers={"Cookie": pairs[0]}).status == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:80:80", "user@localhost", ""])
def test_a_foreign_host_is_refused(shared, host):
    for path in ("/health", "/api/devices", f"/?token={TOKEN}"):
        assert shared.get(path, headers={"Host": host}).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_our_own_names_are_known_with_any_port(shared, host):
    assert shared.get("/api/devices", headers={"Host": host}).status == 200


def test_two_hosts_are_refused(shared):
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        lines = ["GET /health HTTP/1.1", "Host: localhost", "Host: evil.example", "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        answer = connection.makefile("rb").read()

    assert answer.split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:9", "https://evil.example:443", "file://", "localhost:8000"],
)
def test_another_sites_page_is_refused(shared, origin):
    headers = {"Host": "localhost:8000", "Origin": origin}

    assert shared.post("/api/training/jobs", {}, headers=headers).status == 403
    assert shared.get("/api/devices", headers=headers).status == 403


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "https://localhost"),
        ("localhost:80", "http://LOCALHOST"),
    ],
)
def test_our_own_page_is_let_in(shared, host, origin):
    assert shared.get("/api/devices", headers={"Host": host, "Origin": origin}).status == 200


def test_an_upgrade_to_websocket_needs_the_token_too(shared):
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "A" * 22 + "==",
        "Sec-WebSocket-Version": "13",
    }

    assert shared.get("/ws", token=None, headers=headers).status == 401
    assert shared.get("/api/devices", token=None, headers=headers).status == 401


@pytest.mark.parametrize(
    ("headers", "extensions", "expected"),
    [
        ([(b"host", b"localhost")], {}, "websocket.close"),
        ([(b"host", b"localhost")], {"websocket.http.response": {}}, 401),
        (
            [(b"host", b"evil.example"), (b"authorization", f"Bearer {TOKEN}".encode())],
            {"websocket.http.response": {}},
            421,
        ),
        ([(b"host", b"localhost"), (b"origin", b"http://evil.example")], {"websocket.http.response": {}}, 403),
        ([(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())], {}, "passed"),
        ([(b"host", b"localhost"), (b"cookie", f"brim_session={session_value(TOKEN)}".encode())], {}, "passed"),
    ],
)
def test_a_websocket_meets_the_same_gate(headers, extensions, expected):
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"type": "passed"})

    async def run() -> None:
        scope = {
            "type": "websocket",
            "path": "/health",
            "headers": headers,
            "query_string": b"",
            "extensions": extensions,
        }

        async def send(message: Any) -> None:
            sent.append(message)

        await Gate(app, Access(Path("/nowhere"), TOKEN), hosts={"localhost"})(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(run())

    assert expected in (sent[0]["type"], sent[0].get("status"))


def test_access_without_a_token_cannot_be_built(tmp_path):
    with pytest.raises(ValueError, match="needs a token"):
        Access(tmp_path, "")


def test_what_is_no_http_gets_a_plain_refusal(shared):
    for raw in (b"\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", shared.port), timeout=PATIENCE_S) as connection:
            connection.sendall(raw)
            assert connection.recv(4096).split()[1] in (b"400", b"421")


def test_a_head_of_megabytes_is_refused(shared):
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/health", headers={"X-Large": "a" * 10**6})
        assert connection.getresponse().status == 400
    except (BrokenPipeError, ConnectionResetError):
        pass  # it hung up before all was sent
    finally:
        connection.close()

    assert shared.get("/health", token=None).status == 200


def test_a_stranger_who_sends_much_gets_to_read_the_refusal(shared):
    assert shared.post("/api/training/jobs", b"x" * 900_000, token=None).status == 401

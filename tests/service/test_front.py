"""What stands before the dashboard: the gate for pages and sockets alike, and bytes that pass unchanged."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from live_api import TOKEN, Api, running
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from brim.service.api import dashboard_proxy as front
from brim.service.api.auth import COOKIE
from brim.service.api.dashboard_proxy import is_api
from brim.service.run import unix_socket
from brim.service.token import session_value
from waiting import PATIENCE_S

COOKIES = {"Cookie": f"{COOKIE}={session_value(TOKEN)}"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """A dashboard that says what it was asked, and says again what its socket hears."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") == "end":
                return await send({"type": "websocket.close", "code": 4001})
            await send({**message, "type": "websocket.send"})
        return None
    size = 0
    while (message := await receive()).get("more_body") or message.get("body"):
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    told = {
        "path": scope["raw_path"].decode(),
        "query": scope["query_string"].decode(),
        "headers": [(name.decode(), value.decode()) for name, value in sorted(scope["headers"])],
        "bytes": size,
    }
    kind = b"text/html" if scope["path"] == "/page" else b"application/json"
    body = json.dumps(told).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})
    return None


class Toy:
    """The echo on a socket, in a thread."""

    def __init__(self, path: Path) -> None:
        self.listening = unix_socket.listen(path)
        config = uvicorn.Config(echo, lifespan="off", log_config=None, ws="websockets-sansio", loop="asyncio")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listening]}, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        self.listening.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API with a dashboard behind it, in a folder whose name is longer than a socket's may be."""
    data = tmp_path_factory.mktemp("front") / ("long" * 30)
    with running(data, dashboard=True) as api:
        toy = Toy(api.settings.dashboard_socket)
        yield api
        toy.end()


def talk(api: Api, headers: dict[str, str], say: Callable[[ClientConnection], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        url = f"ws://127.0.0.1:{api.port}/_nicegui_ws/socket.io/?EIO=4"
        async with connect(url, additional_headers=headers, compression=None) as made:
            return await say(made)

    return asyncio.run(run())


def refusal(api: Api, headers: dict[str, str]) -> int:
    async def nothing(_: ClientConnection) -> None: ...

    with pytest.raises(InvalidStatus) as raised:
        talk(api, headers, nothing)
    return int(raised.value.response.status_code)


def test_pages_need_the_token_as_all_else_does(pages):
    assert pages.get("/jobs", token=None).status == 401
    assert pages.get("/jobs", token=None, headers=COOKIES).status == 200
    assert pages.get("/jobs", headers={"Origin": "http://elsewhere.example"}).status == 403
    assert pages.get("/jobs", headers={"Host": "elsewhere.example"}).status == 421


def test_a_socket_needs_the_cookie_and_a_page_of_this_service(pages):
    assert refusal(pages, {}) == 401
    assert refusal(pages, {"Cookie": f"{COOKIE}=wrong"}) == 401
    assert refusal(pages, {**COOKIES, "Origin": "http://elsewhere.example"}) == 403
    assert refusal(pages, {**COOKIES, "Origin": "null"}) == 403


def test_path_query_and_body_pass_unchanged_with_who_asks_and_no_secret(pages):
    access, body = pages.context.access, b"x" * 3_000_000
    _, token = access.tokens.add("ann", "viewer")
    forged = {"X-Brim-Session": "forged", "X-Brim-Actor": "root, administrator", **COOKIES}

    told = pages.post(f"/a%20b/c%2Fd?e=%26&token={TOKEN}&%74oken=x&b", body, headers=forged, token=token).json

    assert (told["path"], told["query"], told["bytes"]) == ("/a%20b/c%2Fd", "e=%26&b", len(body))
    headers = [(name, value) for name, value in told["headers"] if name.startswith("x-brim")]
    assert headers == [("x-brim-actor", "ann, viewer"), ("x-brim-session", access.of_token(token).session)]
    assert not {"cookie", "authorization"} & {name for name, _ in told["headers"]}
    names = [name for name, _ in pages.get("/x", headers=forged).json["headers"]]
    assert ("x-brim-session" in names, "x-brim-actor" in names) == (True, False), "nobody's name for the shared token"


def test_messages_pass_both_ways_until_one_side_ends(pages):
    async def say(made: ClientConnection) -> tuple[Any, ...]:
        await made.send("é" * 100_000)
        text = await made.recv()
        await made.send(b"\x00\xff")
        data = await made.recv()
        await made.send("end")
        with pytest.raises(ConnectionClosed):
            await made.recv()
        return text, data, made.close_code

    own = {**COOKIES, "Origin": f"http://127.0.0.1:{pages.port}"}

    assert talk(pages, own, say) == ("é" * 100_000, b"\x00\xff", 4001)


def test_routes_of_the_api_stay_its_own(pages):
    assert pages.get("/api/nope").json["detail"].startswith("nothing is at this address")
    assert pages.get("/health", token=None).json == {"status": "ok"}
    assert [path for path in ("/api", "/api/x", "/docs/a", "/apix", "/", "/jobs") if is_api(path)] == [
        "/api", "/api/x", "/docs/a",
    ]  # fmt: skip


def test_pages_may_load_from_here_alone(pages):
    policy = pages.get("/page").headers["content-security-policy"]

    assert "connect-src 'self'" in policy
    assert "http" not in policy
    assert "https://tiles.example.org" in front._page_csp("https://tiles.example.org/a/{z}/{x}/{y}.png")


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "http://127.0.0.1/jobs", 400),
        ("OPTIONS", "*", 400),
        ("GET", "/jobs#here", 400),
        ("GET", "/" + "a" * 9000, 414),
        ("GET", "//elsewhere.example/jobs", 200),
        ("GET", '/[a]{b}|c\\d"e^`<>', 200),
    ],
)
def test_odd_targets_are_rejected_or_passed_on(pages, method, target, status):
    with pages.connect(method, target, head="Connection: close\r\n") as connection:
        assert connection.makefile("rb").read().startswith(f"HTTP/1.1 {status} ".encode())


def test_a_body_that_is_too_large_is_refused_before_the_dashboard_sees_it(pages):
    assert pages.post("/upload", headers={"Content-Length": str(1 << 40)}).status == 413


def test_a_dashboard_that_is_away_is_said_in_words_and_the_api_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "START_S", 0.3)
    with running(tmp_path / "data", dashboard=True) as api:
        with api.connect("GET", "/jobs", head="Connection: close\r\n") as connection:
            page = connection.makefile("rb").read()
        assert page.startswith(b"HTTP/1.1 503")
        assert b"The dashboard is starting" in page
        assert refusal(api, COOKIES) in (403, 503)
        assert api.get("/api/datasets").status == 200


def test_without_a_dashboard_the_first_page_lists_the_api(shared):
    assert b"/api/training/jobs" in shared.get("/").body
    assert shared.get("/jobs").status == 404

"""The client of a service, against a server that answers what a test says."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from brim.cli import client
from brim.cli.client import ServerEvent, ServiceClient, find_token, read_events
from brim.errors import BrimError, ConfigError, Conflict, NotFound, TooMany, Unavailable


class Answers(HTTPServer):
    """Answers each request with the next of its answers, and keeps what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[tuple[str, dict[str, str], bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((f"{self.command} {self.path}", dict(self.headers), body))
        status, text = self.server.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers() as made:
        thread = threading.Thread(target=made.serve_forever, args=[0.01])
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def service(server: Answers, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    monkeypatch.setattr(client, "RETRY_S", 0.0)
    return ServiceClient(f"http://127.0.0.1:{server.server_port}/brim/", "secret")


def test_a_request_has_the_token_its_body_and_the_parameters_that_were_given(server, service):
    server.answers = [(200, b'{"jobs": []}'), (201, b'{"id": "a"}'), (204, b"")]

    assert service.get("/api/jobs", status="a b", kind=None, page=2) == {"jobs": []}
    assert service.post("/api/jobs", b"{}", **{"Idempotency-Key": "k"}) == {"id": "a"}
    service.delete("/api/jobs/a")

    lines, headers, bodies = zip(*server.asked, strict=True)
    assert lines == ("GET /brim/api/jobs?status=a+b&page=2", "POST /brim/api/jobs", "DELETE /brim/api/jobs/a")
    assert {each["Authorization"] for each in headers} == {"Bearer secret"}
    assert (headers[1]["Idempotency-Key"], headers[1]["Content-Type"], bodies[1]) == ("k", "application/json", b"{}")


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (401, {}, ConfigError, "the service rejects the token"),
        (404, {"detail": 'see "GET /api/training/jobs"'}, NotFound, 'see "brim jobs list"'),
        (409, {"detail": "is running", "field": "id"}, Conflict, "id: is running"),
        (429, {"detail": "100 jobs"}, TooMany, "100 jobs"),
        (503, {"detail": "later"}, Unavailable, "later"),
        (422, {"detail": "epochs=0", "field": "epochs"}, ConfigError, "epochs=0"),
        (302, [], ConfigError, "the service answered 302 Found"),
    ],
)
def test_a_refusal_is_the_error_it_stands_for_in_the_service_s_own_words(server, service, status, body, kind, text):
    server.answers = [(status, json.dumps(body).encode())]

    with pytest.raises(BrimError) as caught:
        service.get("/x")

    assert (type(caught.value), str(caught.value).partition("; give ")[0]) == (kind, text)


def test_every_fault_of_a_body_is_told(server, service):
    server.answers = [(422, b'{"detail": "two", "errors": [{"detail": "a", "field": "x"}, {"detail": "b"}]}')]

    with pytest.raises(ConfigError) as caught:
        service.post("/x", b"{}")

    assert [str(each) for each in (caught.value, *caught.value.more)] == ["x: a", "b"]


def test_a_stream_of_events_is_read_as_the_standard_says():
    stream = (
        b': alive\n\nid: 7\nevent: progress\ndata: {"a":\ndata: 1}\n\ndata:{"b": 2}\r\n\r\nevent: empty\n\ndata: {"c'
    )

    assert list(read_events(io.BytesIO(stream))) == [
        ServerEvent("7", "progress", {"a": 1}),
        ServerEvent("", "message", {"b": 2}),
    ]


def test_a_stream_that_breaks_is_resumed_after_its_last_event(server, service):
    event = b'id: %d\ndata: {"n": %d}\n\n'
    server.answers = [(200, event % (4, 4) + b"data: not JSON\n\n"), (503, b"{}"), (200, event % (5, 5))]

    assert [each.data["n"] for each in service.events("/events")] == [4, 5]
    assert [headers.get("Last-Event-ID") for _, headers, _ in server.asked] == [None, "4", "4"]


def test_a_service_that_was_never_there_is_not_waited_for(server, service):
    server.answers = [(503, b'{"detail": "away"}')]

    with pytest.raises(Unavailable, match="away"):
        list(service.events("/events"))


def test_the_token_is_the_named_file_s_then_the_environment_s_then_the_service_s(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("of-the-service\n")
    (tmp_path / "mine").write_text("of-the-file\n")
    monkeypatch.setenv("BRIM_TOKEN", "of-the-environment")

    found = [find_token(tmp_path / "mine", tmp_path), find_token(None, tmp_path)]
    monkeypatch.delenv("BRIM_TOKEN")
    found.append(find_token(None, tmp_path))

    assert found == ["of-the-file", "of-the-environment", "of-the-service"]

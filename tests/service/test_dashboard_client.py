"""The dashboard's client: many pages are one request, and a refusal is not remembered for long."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from brim.service.dashboard import client
from brim.service.dashboard.client import Api, Rejected
from brim.service.settings import Settings


class Service(ThreadingHTTPServer):
    """Answers with how often it was asked; the first few times it refuses."""

    refusals = asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.asked += 1
        refused = self.server.asked <= self.server.refusals
        body = json.dumps({"detail": "not yet", "field": None} if refused else {"asked": self.server.asked}).encode()
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_PATCH = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def api_of(service: Service) -> Api:
    return Api(Settings(data=Path("/nowhere"), token="t", port=service.server_address[1]), lambda: "a-session")


def test_however_many_pages_look_the_service_is_asked_once(service):
    async def run() -> list[int]:
        api = api_of(service)
        found = await asyncio.gather(*(api.seen("/x", fresh_s=60.0) for _ in range(20)))
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [1] * 20


def test_a_refusal_names_pages_and_no_routes():
    refused = Rejected(404, 'no job has this id; "GET /api/training/jobs" lists them', "id")

    assert refused.detail == "no job has this id; the page Jobs lists them"
    assert refused.faults == {"id": refused.detail}


def test_pages_of_two_people_share_no_answer(service):
    async def run() -> list[int]:
        people = iter(("ann", "bob", "ann"))
        api = Api(Settings(data=Path("/nowhere"), token="t", port=service.server_address[1]), lambda: next(people))
        found = [await api.seen("/x", fresh_s=60.0) for _ in range(3)]
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [1, 2, 1]


def test_an_answer_from_before_a_change_is_not_shown_after_it(service):
    async def run() -> list[int]:
        api = api_of(service)
        found = [await api.seen("/x", fresh_s=3600.0)]
        for change in (api.delete("/x/1"), api.patch("/x/1", {})):
            await change
            found.append(await api.seen("/x", fresh_s=3600.0))
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [1, 3, 5]


def test_a_refusal_is_asked_again_soon_and_an_answer_is_kept(service, monkeypatch):
    monkeypatch.setattr(client, "FRESH_S", 0.05)
    service.refusals = 1

    async def run() -> list[int]:
        api = api_of(service)
        with pytest.raises(Rejected, match="not yet"):
            await api.seen("/x", fresh_s=3600.0)
        await asyncio.sleep(0.1)
        found = [await api.seen("/x", fresh_s=3600.0), await api.seen("/x", fresh_s=3600.0)]
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [2, 2]

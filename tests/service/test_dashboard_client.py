"""The dashboard's client: many pages are one request, and a refusal is not remembered for long."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from brim.service.dashboard import client
from brim.service.dashboard.client import Api, Rejected
from brim.service.settings import Settings


class Service(httpx.MockTransport):
    """Answers with how often it was asked; the first few times it refuses."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__(self.answer)
        self.refusals, self.asked = refusals, 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.asked <= self.refusals:
            return httpx.Response(503, json={"detail": "not yet", "field": None})
        return httpx.Response(200, json={"asked": self.asked})


def api_of(service: Service, session: Callable[[], str] = lambda: "a-session") -> Api:
    api = Api(Settings(data=Path("/nowhere"), token="t"), session)
    api._http = httpx.AsyncClient(transport=service, base_url="http://service")
    return api


def test_however_many_pages_look_the_service_is_asked_once():
    async def run() -> list[int]:
        api = api_of(Service())
        found = await asyncio.gather(*(api.seen("/x", fresh_s=60.0) for _ in range(20)))
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [1] * 20


def test_pages_of_two_people_share_no_answer():
    async def run() -> list[int]:
        people = iter(("ann", "bob", "ann"))
        api = api_of(Service(), lambda: next(people))
        found = [await api.seen("/x", fresh_s=60.0) for _ in range(3)]
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [1, 2, 1]


def test_an_answer_from_before_a_change_is_not_shown_after_it():
    async def run() -> list[int]:
        api = api_of(Service())
        found = [await api.seen("/x", fresh_s=3600.0)]
        for change in (api.delete("/x/1"), api.patch("/x/1", {})):
            await change
            found.append(await api.seen("/x", fresh_s=3600.0))
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [1, 3, 5]


def test_a_refusal_is_asked_again_soon_and_an_answer_is_kept(monkeypatch):
    monkeypatch.setattr(client, "FRESH_S", 0.05)

    async def run() -> list[int]:
        api = api_of(Service(refusals=1))
        with pytest.raises(Rejected, match="not yet"):
            await api.seen("/x", fresh_s=3600.0)
        await asyncio.sleep(0.1)
        found = [await api.seen("/x", fresh_s=3600.0), await api.seen("/x", fresh_s=3600.0)]
        await api.close()
        return [one["asked"] for one in found]

    assert asyncio.run(run()) == [2, 2]

"""The REST API as the pages use it: one connection pool, one token, and what was just read is not asked for again."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from brim.service.settings import DASHBOARD, Settings

TIMEOUT_S = 60.0
FRESH_S = 0.9  # what many pages show is asked for once in as long
KEPT = 512  # answers

JsonValue = Any


class Refused(Exception):
    """An answer that is no 2xx: the API's own sentence, and the field it is about where there is one."""

    def __init__(self, status: int, detail: str, field: str | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.field = status, detail, field


class Api:
    """The service's REST API."""

    def __init__(self, settings: Settings) -> None:
        """Take the settings: address, token and the choices that pages show."""
        self.settings = settings
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            headers={"Authorization": f"Bearer {settings.token}", "User-Agent": DASHBOARD},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=32),
            trust_env=False,
        )
        self._kept: dict[str, tuple[float, asyncio.Future[JsonValue]]] = {}

    async def get(self, path: str, **query: Any) -> JsonValue:
        """What is there now."""
        return (await self.ask("GET", path, params=_given(query))).json()

    async def seen(self, path: str, *, fresh_s: float = FRESH_S, **query: Any) -> JsonValue:
        """What is there, or was just now: however many pages look, the API is asked about once a second."""
        key = str(httpx.URL(path, params=_given(query)))
        found = self._kept.get(key)
        if found is None or _is_old(*found, fresh_s):
            if len(self._kept) >= KEPT:
                self._kept = {name: one for name, one in self._kept.items() if not one[1].done()}
            found = (time.monotonic(), asyncio.ensure_future(self.get(path, **query)))
            self._kept[key] = found
        return await asyncio.shield(found[1])

    async def post(self, path: str, body: JsonValue = None) -> JsonValue:
        """Ask for a change; the answer's JSON."""
        return (await self.ask("POST", path, json={} if body is None else body)).json()

    async def delete(self, path: str) -> None:
        await self.ask("DELETE", path)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request; what is no 2xx is raised as Refused, also where nobody answers."""
        try:
            answer = await self._http.request(method, path, **options)
        except httpx.HTTPError:
            raise Refused(503, "the service does not answer; it may be starting again") from None
        if answer.is_success:
            return answer
        try:
            told = answer.json()
            raise Refused(answer.status_code, str(told["detail"]), told.get("field"))
        except (ValueError, LookupError, TypeError):
            raise Refused(answer.status_code, f"the service answered {answer.status_code}") from None

    async def close(self) -> None:
        await self._http.aclose()


def part(text: str) -> str:
    """A text as one part of a path."""
    return quote(text, safe="")


def _is_old(asked_s: float, answer: "asyncio.Future[JsonValue]", fresh_s: float) -> bool:
    """Whether to ask again; a refusal is not kept for as long as an answer may be."""
    if not answer.done():
        return False
    failed = answer.cancelled() or answer.exception() is not None
    return time.monotonic() - asked_s > (min(fresh_s, FRESH_S) if failed else fresh_s)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

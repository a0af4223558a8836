"""The REST API as the pages use it: one connection pool, and recent answers shared between one person's pages.

Pages use the session of the person looking at them, and so have that person's rights, until the token is revoked.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import httpx
from nicegui import context

from brim.service.settings import COOKIE, DASHBOARD, SESSION, Settings

TIMEOUT_S = 60.0
FRESH_S = 0.9  # an answer is shared between pages for this long
KEPT = 512  # answers
_PAGES: Final = {"training/jobs": "Jobs", "datasets": "Datasets", "runs": "Runs", "models": "Segment"}
_ROUTE: Final = re.compile(rf'"GET /api/({"|".join(_PAGES)})"')  # what the API advises is a page here

JsonValue = Any


class Rejected(Exception):
    """An answer other than 2xx: the API's message, and the field it is about if there is one.

    faults  sentences by field, of all fields that are wrong
    """

    def __init__(
        self, status: int, detail: str, field: str | None = None, faults: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.field = status, as_page(detail), field
        faults = faults or ({field: detail} if field else {})
        self.faults = {name: as_page(text) for name, text in faults.items()}


class Api:
    """The service's REST API, with its settings: address, token and what pages show of them."""

    def __init__(self, settings: Settings, session: Callable[[], str] | None = None) -> None:
        """session returns that of the person looking at the current page."""
        self.settings = settings
        self._session = session or _session_of_page
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            headers={"User-Agent": DASHBOARD},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=32),
            trust_env=False,
        )
        self._kept: dict[str, tuple[float, asyncio.Future[JsonValue]]] = {}

    async def get(self, path: str, **query: Any) -> JsonValue:
        return await self._ask("GET", path, params=query)

    async def seen(self, path: str, *, fresh_s: float = FRESH_S, **query: Any) -> JsonValue:
        """Like get, but however many pages look, the API is asked about once a second."""
        session = self._session()  # here: another task knows no page
        key = f"{session} {httpx.URL(path, params=query)}"
        kept = self._kept.get(key)
        if kept is None or _is_old(*kept, fresh_s):
            if len(self._kept) >= KEPT:
                self._kept = {name: one for name, one in self._kept.items() if not one[1].done()}
            answer = asyncio.ensure_future(self._ask("GET", path, session, params=query))
            kept = self._kept[key] = (time.monotonic(), answer)
        return await asyncio.shield(kept[1])

    async def post(self, path: str, body: JsonValue = None) -> JsonValue:
        return await self._ask("POST", path, json=body or {})

    async def patch(self, path: str, body: JsonValue) -> JsonValue:
        answer = await self._ask("PATCH", path, json=body)
        self._kept.clear()
        return answer

    async def delete(self, path: str) -> None:
        await self._ask("DELETE", path)
        self._kept.clear()  # or a list would still show what is gone

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, session: str = "", **options: Any) -> JsonValue:
        """The answer's JSON; Rejected unless it is a 2xx, and if nobody answers."""
        cookie = {"Cookie": f"{COOKIE}={session or self._session()}"}
        try:
            answer = await self._http.request(method, path, headers=cookie, **options)
        except httpx.HTTPError:
            raise Rejected(503, "the service does not answer; it may be restarting") from None
        if answer.is_success:
            return answer.json() if answer.content else None
        try:
            problem = answer.json()
            faults = {one["field"]: str(one["detail"]) for one in problem.get("errors", []) if one["field"]}
            raise Rejected(answer.status_code, str(problem["detail"]), problem.get("field"), faults)
        except (ValueError, LookupError, TypeError):
            raise Rejected(answer.status_code, f"the service answered {answer.status_code}") from None


def as_page(detail: str) -> str:
    return _ROUTE.sub(lambda match: f"the page {_PAGES[match[1]]}", detail)


def _session_of_page() -> str:
    """Session of the person looking at the current page, as the API process wrote it into the page's request."""
    return str(context.client.request.headers.get(SESSION, ""))


def part(text: str) -> str:
    """A text as one segment of a path."""
    return quote(text, safe="")


def _is_old(asked_s: float, answer: "asyncio.Future[JsonValue]", fresh_s: float) -> bool:
    """Whether to ask again; a failure is never kept for longer than FRESH_S."""
    if not answer.done():
        return False
    failed = answer.cancelled() or answer.exception() is not None
    return time.monotonic() - asked_s > (min(fresh_s, FRESH_S) if failed else fresh_s)

"""The models that requests may name, as the catalogue had them a second ago; predictors are told of changes.

Looked up in memory, so that a request for a prediction touches no database, and goes on while that is away.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from brim.errors import ConfigError, NotFound, Unavailable
from brim.jobs.store import ModelKind, ModelRow
from brim.service.prediction.process.client import Predictions

log = logging.getLogger(__name__)
_T = TypeVar("_T")

LOOK_S: Final = 1.0
_AGAIN_S: Final = 0.1  # between two looks for a name that is not known


class Listed(Protocol):
    """The catalogue's models."""

    def all(self) -> list[ModelRow]:
        """By name."""


class KnownModels:
    """The registered models; inside `async with` they are kept up to date."""

    def __init__(self, listed: Listed, predictions: Predictions) -> None:
        self._listed, self._predictions = listed, predictions
        self._rows: dict[str, ModelRow] | None = None
        self._looked_s = -_AGAIN_S
        self._first = asyncio.Event()  # the first look has ended, one way or the other
        self._again = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "KnownModels":
        self._watch = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch

    async def all(self) -> list[ModelRow]:
        """By name."""
        return list((await self._sure(self._known)).values())

    async def of_kind(self, kind: ModelKind) -> list[str]:
        """Names of the models of one kind, at least one."""
        return await self._sure(lambda: self._of_kind(kind))

    async def find(self, name: str, kind: ModelKind) -> ModelRow:
        """The model a request means: the one it names, or the only one of that kind."""
        return await self._sure(lambda: self._find(name, kind))

    async def _sure(self, find: Callable[[], _T]) -> _T:
        """What is found; where nothing is, it may have been added just now."""
        await self._first.wait()
        try:
            return find()
        except (NotFound, Unavailable):
            await self._look_again()
        return find()

    def _of_kind(self, kind: ModelKind) -> list[str]:
        found = [name for name, row in self._known().items() if row.kind == kind]
        if not found:
            raise NotFound(f'no model is there to {kind}; add one with "brim models add NAME RUN"', field="model")
        return found

    def _find(self, name: str, kind: ModelKind) -> ModelRow:
        rows = self._known()
        if not name:
            found = self._of_kind(kind)
            if len(found) > 1:
                could = f"{len(found)} could be meant: {', '.join(found)}"
                raise ConfigError(f"model is missing and {could}; name one", field="model")
            return rows[found[0]]
        if name not in rows:
            raise NotFound(f'no model is named "{name}"; "GET /api/models" lists those there are', field="model")
        if rows[name].kind != kind:
            raise ConfigError(
                f'model="{name}" is there to {rows[name].kind}, not to {kind}; name another', field="model"
            )
        return rows[name]

    def _known(self) -> dict[str, ModelRow]:
        if self._rows is None:
            raise Unavailable("the catalogue's database does not answer; try again soon")
        return self._rows

    async def _keep(self) -> None:
        while True:
            await self._look()
            self._first.set()
            await asyncio.sleep(LOOK_S)

    async def _look_again(self) -> None:
        """One look that begins after this call, for all that wait for one; not more often than may be."""
        asked_s = time.monotonic()
        async with self._again:
            if self._looked_s < asked_s:
                await asyncio.sleep(self._looked_s + _AGAIN_S - asked_s)
                await self._look()

    async def _look(self) -> None:
        self._looked_s = time.monotonic()
        try:
            rows = {row.name: row for row in await run_in_threadpool(self._listed.all)}
        except Unavailable:
            return  # what was known holds
        except Exception:
            log.exception("the catalogue's models cannot be read")
            return
        if rows != self._rows:
            self._rows = rows
            self._predictions.register([as_asked(row) for row in rows.values()])


def as_asked(row: ModelRow) -> dict[str, Any]:
    """A model as predictors are told of it."""
    return {
        "name": row.name, "kind": row.kind, "network": row.network, "path": row.path, "version": row.version,
    }  # fmt: skip

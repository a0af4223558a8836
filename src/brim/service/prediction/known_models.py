"""The registered models, as in the catalogue at most a second ago; predictors are told of changes.

Looked up in memory, so that a prediction needs no database and works while that does not answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.concurrency import run_in_threadpool

from brim.errors import ConfigError, NotFound, Unavailable
from brim.jobs.store import ModelKind, ModelRow, ModelTable
from brim.service.prediction.client import Predictions

log = logging.getLogger(__name__)
_T = TypeVar("_T")

REFRESH_S: Final = 1.0
_AGAIN_S: Final = 0.1  # between two queries for an unknown name


class KnownModels:
    """The registered models; inside `async with` they are kept up to date."""

    def __init__(self, table: ModelTable, predictions: Predictions) -> None:
        self._table, self._predictions = table, predictions
        self._rows: dict[str, ModelRow] | None = None
        self._read_s = -_AGAIN_S
        self._first = asyncio.Event()  # the first query has ended, with or without success
        self._again = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "KnownModels":
        self._refreshing = asyncio.create_task(self._refresh())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._refreshing is not None
        self._refreshing.cancel()
        with suppress(asyncio.CancelledError):
            await self._refreshing

    async def all(self) -> list[ModelRow]:
        return list((await self._sure(self._known)).values())

    async def of_kind(self, kind: ModelKind) -> list[str]:
        """Names of the models of one kind; at least one."""
        return await self._sure(lambda: self._of_kind(kind))

    async def find(self, name: str, kind: ModelKind) -> ModelRow:
        """The model that a request names, or the only one of that kind."""
        return await self._sure(lambda: self._find(name, kind))

    async def _sure(self, find: Callable[[], _T]) -> _T:
        """The result of find; after a fresh query if there is none, since the model may have been added just now."""
        await self._first.wait()
        try:
            return find()
        except (NotFound, Unavailable):
            await self._read_again()
        return find()

    def _of_kind(self, kind: ModelKind) -> list[str]:
        names = [name for name, row in self._known().items() if row.kind == kind]
        if not names:
            hint = "an administrator registers models with the command line"
            raise NotFound(f"no model is registered to {kind}", field="model", hint=hint)
        return names

    def _find(self, name: str, kind: ModelKind) -> ModelRow:
        rows = self._known()
        if not name:
            names = self._of_kind(kind)
            if len(names) > 1:
                text = f"model is missing, and there are {len(names)}: {', '.join(names)}; name one"
                raise ConfigError(text, field="model")
            return rows[names[0]]
        if name not in rows:
            raise NotFound(f'no model is named "{name}"; "GET /api/models" lists them', field="model")
        if rows[name].kind != kind:
            text = f'model="{name}" is registered to {rows[name].kind}, not to {kind}; name another'
            raise ConfigError(text, field="model")
        return rows[name]

    def _known(self) -> dict[str, ModelRow]:
        if self._rows is None:
            raise Unavailable("the catalogue's database does not answer; try again soon")
        return self._rows

    async def _refresh(self) -> None:
        while True:
            await self._read()
            self._first.set()
            await asyncio.sleep(REFRESH_S)

    async def _read_again(self) -> None:
        """One query that begins after this call, shared by all that wait for one, and not too often."""
        called_s = time.monotonic()
        async with self._again:
            if self._read_s < called_s:
                await asyncio.sleep(self._read_s + _AGAIN_S - called_s)
                await self._read()

    async def _read(self) -> None:
        self._read_s = time.monotonic()
        try:
            rows = {row.name: row for row in await run_in_threadpool(self._table.all)}
        except Unavailable:
            return  # the known ones stay
        except Exception:
            log.exception("the catalogue's models cannot be read")
            return
        if rows != self._rows:
            self._rows = rows
            self._predictions.register([as_message(row) for row in rows.values()])


def as_message(row: ModelRow) -> dict[str, Any]:
    """A model as predictors are told about it."""
    return {
        "name": row.name, "kind": row.kind, "network": row.network, "path": row.path, "version": row.version,
    }  # fmt: skip

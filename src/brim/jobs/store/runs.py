"""Training runs as people see them; jobs make and change them, and whoever has trained without one adds them."""

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from brim.jobs.store.engine import clean, reading, writing
from brim.jobs.store.rows import Page, RunRow, is_id, new_id, page_of, row_of
from brim.jobs.store.tables import runs


class Runs:
    """All training runs."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def add(self, *, name: str, kind: str, path: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> RunRow:
        """List a finished run that no job made; a path that is listed already gives the run that is."""
        values = {
            "id": new_id(),
            "name": clean(name),
            "kind": kind,
            "state": "ready",
            "path": path,
            "config": dict(config),
            "summary": dict(summary),
            "created_at": time.time(),
        }
        with writing(self._engine) as connection:
            known = connection.execute(sa.select(runs).where(runs.c.path == path)).first()
            row = known or connection.execute(sa.insert(runs).values(values).returning(runs)).one()
            return row_of(RunRow, row)

    def get(self, id: str) -> RunRow | None:
        """One run; None for an id that names none."""
        if not is_id(id):
            return None
        with reading(self._engine) as connection:
            row = connection.execute(sa.select(runs).where(runs.c.id == id)).one_or_none()
            return None if row is None else row_of(RunRow, row)

    def page(self, *, kind: str | None = None, page: int = 1, per_page: int = 50) -> Page[RunRow]:
        """One page of runs, newest first."""
        where = [runs.c.kind == clean(kind)] if kind is not None else []
        with reading(self._engine) as connection:
            return page_of(connection, runs, RunRow, where, page, per_page)

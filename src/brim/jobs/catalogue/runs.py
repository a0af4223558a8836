"""Training runs as people see them; jobs make and change them."""

import sqlalchemy as sa

from brim.jobs.catalogue.engine import clean, reading
from brim.jobs.catalogue.rows import Page, RunRow, is_id, page_of, row_of
from brim.jobs.catalogue.tables import runs


class Runs:
    """All training runs."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

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

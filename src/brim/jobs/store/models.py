"""Models that requests may name. Every method is one transaction."""

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from brim.jobs.store.engine import clean, reading, writing
from brim.jobs.store.rows import ModelKind, ModelRow, new_id, row_of
from brim.jobs.store.tables import models


class Models:
    """All models, by name."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def put(
        self, *, name: str, kind: ModelKind, network: str, path: str, about: Mapping[str, Any] | None = None
    ) -> tuple[ModelRow, bool]:
        """List a model, and whether it took another's place; each time is a version of its own, to be loaded anew."""
        values: dict[str, Any] = {"name": name, "kind": kind, "network": network, "path": path}
        values |= {"about": dict(about or {}), "version": new_id()[:12], "added_at": time.time()}
        with writing(self._engine) as connection:
            gone = connection.execute(sa.delete(models).where(models.c.name == name)).rowcount
            row = connection.execute(sa.insert(models).values(values).returning(models)).one()
            return row_of(ModelRow, row), gone > 0

    def get(self, name: str) -> ModelRow | None:
        """The model of that name."""
        with reading(self._engine) as connection:
            row = connection.execute(sa.select(models).where(models.c.name == clean(name))).one_or_none()
            return None if row is None else row_of(ModelRow, row)

    def all(self) -> list[ModelRow]:
        """By name."""
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(models).order_by(models.c.name))
            return [row_of(ModelRow, row) for row in rows]

    def remove(self, name: str) -> bool:
        """Forget a model; whether there was one."""
        with writing(self._engine) as connection:
            return connection.execute(sa.delete(models).where(models.c.name == clean(name))).rowcount == 1

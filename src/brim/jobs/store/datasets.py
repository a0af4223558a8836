"""Datasets as people see them. Every method is one transaction.

Deleting takes two: `retire` marks a dataset that nothing uses, then its files go, then `forget` drops the row. Whoever
is killed in between leaves a row that `retired` lists.
"""

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from brim.errors import Conflict, NotFound
from brim.jobs.store.engine import clean, reading, writing
from brim.jobs.store.inputs import check_unread
from brim.jobs.store.rows import DatasetKind, DatasetRow, DatasetState, Page, is_id, new_id, page_of, row_of
from brim.jobs.store.tables import datasets


class Datasets:
    """All datasets."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def add(
        self,
        *,
        name: str,
        kind: DatasetKind,
        path: str,
        owned: bool,
        items: int,
        bytes: int,
        about: Mapping[str, Any] | None = None,
        id: str | None = None,
        state: DatasetState = "ready",
    ) -> DatasetRow:
        """List a dataset that no job made; a path that is listed already is a Conflict."""
        values = {
            "id": id or new_id(),
            "name": clean(name),
            "kind": kind,
            "state": state,
            "path": path,
            "owned": owned,
            "items": items,
            "bytes": bytes,
            "about": dict(about or {}),
            "created_at": time.time(),
        }
        with writing(self._engine) as connection:
            query = sa.select(datasets.c.name, datasets.c.id).where(datasets.c.path == path)
            if known := connection.execute(query).first():
                raise Conflict(f'it is listed already, as "{known.name}" with the id {known.id}')
            return row_of(DatasetRow, connection.execute(sa.insert(datasets).values(values).returning(datasets)).one())

    def get(self, id: str) -> DatasetRow | None:
        """One dataset; None for an id that names none."""
        if not is_id(id):
            return None
        with reading(self._engine) as connection:
            row = connection.execute(sa.select(datasets).where(datasets.c.id == id)).one_or_none()
            return None if row is None else row_of(DatasetRow, row)

    def named(self, name: str) -> list[DatasetRow]:
        """The datasets of that name, oldest first: names need not differ."""
        return self._list(datasets.c.name == clean(name))

    def page(self, *, kind: str | None = None, page: int = 1, per_page: int = 50) -> Page[DatasetRow]:
        """One page of datasets, newest first; those on their way out are not listed."""
        where = [datasets.c.state != "deleting"]
        where += [datasets.c.kind == clean(kind)] if kind is not None else []
        with reading(self._engine) as connection:
            return page_of(connection, datasets, DatasetRow, where, page, per_page)

    def retire(self, id: str) -> DatasetRow:
        """Mark a dataset that nothing writes or reads as on its way out; else Conflict, or NotFound."""
        with writing(self._engine) as connection:
            query = sa.select(datasets).where(datasets.c.id == id).with_for_update()
            row = connection.execute(query).one_or_none() if is_id(id) else None
            if row is None:
                raise NotFound('no dataset has this id; "brim datasets list" shows those there are')
            dataset = row_of(DatasetRow, row)
            if dataset.state == "writing":
                raise Conflict(f'the dataset "{dataset.name}" is still being written; cancel its job first')
            check_unread(connection, id)
            connection.execute(sa.update(datasets).where(datasets.c.id == id).values(state="deleting"))
            return dataset

    def retired(self) -> list[DatasetRow]:
        """Datasets whose deletion was begun and not ended."""
        return self._list(datasets.c.state == "deleting")

    def forget(self, id: str) -> bool:
        """Drop the row of a dataset that was retired."""
        with writing(self._engine) as connection:
            gone = sa.delete(datasets).where(datasets.c.id == id, datasets.c.state == "deleting")
            return connection.execute(gone).rowcount == 1

    def _list(self, *where: sa.ColumnElement[bool]) -> list[DatasetRow]:
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(datasets).where(*where).order_by(datasets.c.number))
            return [row_of(DatasetRow, row) for row in rows]

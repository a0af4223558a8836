"""The catalogue: what people see of jobs, datasets, runs and models. Every method is one transaction."""

import time
from collections.abc import Mapping
from typing import Any, Self

import sqlalchemy as sa

from brim.errors import Conflict, NotFound
from brim.jobs.status import clean
from brim.jobs.store.engine import RowPage, RowTable, fetch, insert_for, open_engine, reading, row_of, writing
from brim.jobs.store.jobs import EventTable, JobTable
from brim.jobs.store.links import check_unread
from brim.jobs.store.tables import (
    DatasetKind,
    DatasetRow,
    DatasetState,
    DeviceRow,
    ModelKind,
    ModelRow,
    RunRow,
    datasets,
    devices,
    is_id,
    meta,
    models,
    new_id,
    runs,
)

_OWNER = sa.select(meta.c.value).where(meta.c.key == "installation")


class Catalogue:
    """Jobs, their events, datasets, runs, models and devices; a database that does not answer raises Unavailable."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.jobs = JobTable(engine)
        self.events = EventTable(engine)
        self.datasets = DatasetTable(engine)
        self.runs = RunTable(engine)
        self.models = ModelTable(engine)
        self.devices = DeviceTable(engine)

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a database that `upgrade` has prepared; connects on first use."""
        return cls(open_engine(url))

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ping(self) -> None:
        """Raise Unavailable unless the database answers and has our tables."""
        with reading(self._engine) as connection:
            connection.execute(sa.select(meta.c.key).limit(1)).all()

    def owner(self) -> str | None:
        """The installation that claimed this catalogue, if any."""
        with reading(self._engine) as connection:
            return connection.execute(_OWNER).scalar_one_or_none()

    def claim(self, installation: str) -> str:
        """The installation that owns this catalogue: this one, unless another claimed it first."""
        with writing(self._engine) as connection:
            insert = insert_for(connection)(meta).values(key="installation", value=installation)
            connection.execute(insert.on_conflict_do_nothing(index_elements=["key"]))
            return str(connection.execute(_OWNER).scalar_one())


class DatasetTable(RowTable[DatasetRow]):
    """All datasets.

    Deleting takes two steps: `retire` marks a dataset that nothing uses, then its files are removed, then `forget`
    drops the row. A process killed in between leaves a row that `retired` lists.
    """

    table, row = datasets, DatasetRow

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
        """List a dataset that no job made; Conflict if its path is already listed."""
        values = {"id": id or new_id(), "name": clean(name), "kind": kind, "state": state, "path": path, "owned": owned}
        values |= {"items": items, "bytes": bytes, "about": dict(about or {}), "created_at": time.time()}
        with writing(self._engine) as connection:
            query = sa.select(datasets.c.name, datasets.c.id).where(datasets.c.path == path)
            if known := connection.execute(query).first():
                raise Conflict(f'it is listed already, as "{known.name}" with the id {known.id}')
            return row_of(DatasetRow, connection.execute(sa.insert(datasets).values(values).returning(datasets)).one())

    def named(self, name: str) -> list[DatasetRow]:
        """The datasets of that name, oldest first: names need not be unique."""
        return self._all(datasets.c.name == clean(name))

    def page(self, *, kind: str | None = None, page: int = 1, per_page: int = 50) -> RowPage[DatasetRow]:
        """One page of datasets, newest first, without those being deleted."""
        where = [datasets.c.state != "deleting"]
        where += [datasets.c.kind == clean(kind)] if kind is not None else []
        return self._page(where, page, per_page)

    def retire(self, id: str) -> DatasetRow:
        """Mark a dataset that nothing writes or reads for deletion; otherwise Conflict or NotFound."""
        with writing(self._engine) as connection:
            query = sa.select(datasets).where(datasets.c.id == id).with_for_update()
            dataset = fetch(connection, DatasetRow, query) if is_id(id) else None
            if dataset is None:
                raise NotFound("no dataset has this id", hint="{datasets list} shows all datasets")
            if dataset.state == "writing":
                raise Conflict(f'the dataset "{dataset.name}" is still being written; cancel its job first')
            check_unread(connection, id)
            connection.execute(sa.update(datasets).where(datasets.c.id == id).values(state="deleting"))
            return dataset

    def retired(self) -> list[DatasetRow]:
        """Datasets whose deletion has begun and is not complete."""
        return self._all(datasets.c.state == "deleting")

    def forget(self, id: str) -> bool:
        """Drop the row of a dataset that was retired."""
        with writing(self._engine) as connection:
            gone = sa.delete(datasets).where(datasets.c.id == id, datasets.c.state == "deleting")
            return connection.execute(gone).rowcount == 1


class RunTable(RowTable[RunRow]):
    table, row = runs, RunRow

    def add(self, *, name: str, kind: str, path: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> RunRow:
        """List a finished run that no job made; if its path is already listed, return that run."""
        values: dict[str, Any] = {"id": new_id(), "name": clean(name), "kind": kind, "state": "ready", "path": path}
        values |= {"config": dict(config), "summary": dict(summary), "created_at": time.time()}
        with writing(self._engine) as connection:
            known = connection.execute(sa.select(runs).where(runs.c.path == path)).first()
            return row_of(RunRow, known or connection.execute(sa.insert(runs).values(values).returning(runs)).one())

    def page(
        self, *, kind: str | None = None, name: str | None = None, page: int = 1, per_page: int = 50
    ) -> RowPage[RunRow]:
        """One page of runs, newest first; name matches a part of theirs, ignoring case."""
        where = [] if kind is None else [runs.c.kind == clean(kind)]
        where += [runs.c.name.icontains(clean(name), autoescape=True)] if name is not None else []
        return self._page(where, page, per_page)

    def remark(self, id: str, remarks: Mapping[str, Any]) -> RunRow | None:
        """Replace the tags and notes of a run."""
        with writing(self._engine) as connection:
            change = sa.update(runs).where(runs.c.id == id).values(remarks=dict(remarks)).returning(runs)
            return fetch(connection, RunRow, change)


class ModelTable(RowTable[ModelRow]):
    table, row = models, ModelRow

    def put(
        self, *, name: str, kind: ModelKind, network: str, path: str, about: Mapping[str, Any] | None = None
    ) -> tuple[ModelRow, bool]:
        """List a model, and whether it replaced another; it gets a new version, so that it is loaded again."""
        values: dict[str, Any] = {"name": name, "kind": kind, "network": network, "path": path}
        values |= {"about": dict(about or {}), "version": new_id()[:12], "added_at": time.time()}
        with writing(self._engine) as connection:
            gone = connection.execute(sa.delete(models).where(models.c.name == name)).rowcount
            row = connection.execute(sa.insert(models).values(values).returning(models)).one()
            return row_of(ModelRow, row), gone > 0

    def get(self, name: str) -> ModelRow | None:
        return self._one(models.c.name == clean(name))

    def all(self) -> list[ModelRow]:
        return sorted(self._all(), key=lambda model: model.name)

    def remove(self, name: str) -> bool:
        """Remove a model; whether there was one."""
        with writing(self._engine) as connection:
            return connection.execute(sa.delete(models).where(models.c.name == clean(name))).rowcount == 1


class DeviceTable(RowTable[DeviceRow]):
    table, row = devices, DeviceRow

    def put(self, worker: str, info: Mapping[str, Any]) -> None:
        values = {"info": dict(info), "at": time.time()}
        with writing(self._engine) as connection:
            insert = insert_for(connection)(devices).values(worker=worker, **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["worker"], set_=values))

    def all(self) -> list[DeviceRow]:
        return self._all()

    def clear(self) -> None:
        """Remove all, before workers start: a worker of an earlier start may not come back."""
        with writing(self._engine) as connection:
            connection.execute(sa.delete(devices))

"""What each worker computes on, as it said when it started."""

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from brim.jobs.store.engine import reading, writing
from brim.jobs.store.outputs import insert_for
from brim.jobs.store.rows import DeviceRow, row_of
from brim.jobs.store.tables import devices


class Devices:
    """The devices of all workers."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def put(self, worker: str, info: Mapping[str, Any]) -> None:
        """Note a worker's device in place of what it said before."""
        values = {"info": dict(info), "at": time.time()}
        with writing(self._engine) as connection:
            insert = insert_for(connection)(devices).values(worker=worker, **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["worker"], set_=values))

    def all(self) -> list[DeviceRow]:
        """By the worker's name."""
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(devices).order_by(devices.c.worker))
            return [row_of(DeviceRow, row) for row in rows]

    def clear(self) -> None:
        """Forget them all, before workers start: one of an earlier start may not come back."""
        with writing(self._engine) as connection:
            connection.execute(sa.delete(devices))

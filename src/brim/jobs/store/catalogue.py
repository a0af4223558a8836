"""The catalogue as one thing: an engine and what is kept in it."""

from typing import Self

import sqlalchemy as sa

from brim.jobs.store.datasets import Datasets
from brim.jobs.store.devices import Devices
from brim.jobs.store.engine import open_engine, reading, writing
from brim.jobs.store.events import Events
from brim.jobs.store.jobs import Jobs
from brim.jobs.store.models import Models
from brim.jobs.store.outputs import insert_for
from brim.jobs.store.runs import Runs
from brim.jobs.store.tables import meta


class Catalogue:
    """Jobs, their events, datasets, runs, models and devices; a database that does not answer raises Unavailable."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.jobs = Jobs(engine)
        self.events = Events(engine)
        self.datasets = Datasets(engine)
        self.runs = Runs(engine)
        self.models = Models(engine)
        self.devices = Devices(engine)

    @classmethod
    def open(cls, url: str) -> Self:
        """Of a database that `migrate.upgrade` has seen; connects when first asked for something."""
        return cls(open_engine(url))

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ping(self) -> None:
        """Raise Unavailable unless the database answers and has our tables."""
        with reading(self._engine) as connection:
            connection.execute(sa.select(meta.c.key).limit(1)).all()

    def claim(self, installation: str) -> str:
        """The installation this catalogue belongs to: this one, unless another was first."""
        with writing(self._engine) as connection:
            insert = insert_for(connection)(meta).values(key="installation", value=installation)
            connection.execute(insert.on_conflict_do_nothing(index_elements=["key"]))
            owner = connection.execute(sa.select(meta.c.value).where(meta.c.key == "installation")).scalar_one()
            return str(owner)

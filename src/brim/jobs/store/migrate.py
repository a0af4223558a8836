"""Bringing a database to the tables of this version; only the service's first process does it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from brim.errors import Unavailable
from brim.jobs.store.engine import open_engine, writing
from brim.jobs.store.tables import SCHEMA

VERSION_TABLE: Final = "brim_version"

_LOCK = 0x6272696D  # "brim": PostgreSQL's advisory lock, so that two starts do not migrate at once


def upgrade(url: str) -> None:
    """Make the tables, or change those of an earlier version; nothing where they are as they should be."""
    engine = open_engine(url)
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        connection = stack.enter_context(writing(engine))
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            connection.execute(sa.schema.CreateSchema(SCHEMA, if_not_exists=True))
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        config.attributes["connection"] = connection  # read by migrations/env.py
        try:
            command.upgrade(config, "head")
        except CommandError as failure:
            raise Unavailable(
                f"the catalogue's database is of a version that this brim does not know ({failure}); "
                "use the brim that wrote it, or a newer one"
            ) from failure

"""Opening, migrating and talking to the catalogue's database: SQLite by default, PostgreSQL by URL.

A database that does not answer raises `Unavailable`.
"""

import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from brim.errors import ConfigError, Unavailable
from brim.jobs.store.tables import SCHEMA

VERSION_TABLE: Final = "brim_version"

_LOCK = 0x6272696D  # "brim": PostgreSQL's advisory lock, so that two starts do not migrate at once
_BUSY_MS = 30_000  # how long a writer waits for another's transaction; ours take milliseconds
_POOL: dict[str, Any] = {"pool_size": 5, "max_overflow": 15, "pool_timeout": 10}  # of each process; PostgreSQL has 100
_WRITES = "brim_writes"  # execution option of a connection whose transaction will write
_TURN = "brim_turn"  # of an engine of SQLite: the lock of this process's writers


def open_engine(url: str) -> sa.Engine:
    """An engine set up for its database; connects on first use."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        options = {_TURN: threading.Lock()}
        engine = sa.create_engine(parsed, json_serializer=to_json, execution_options=options, **_POOL)
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine
    engine = sa.create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        **_POOL,
        pool_pre_ping=True,  # a server that was restarted costs nobody an error
        json_serializer=to_json,
        connect_args={"connect_timeout": 3, "tcp_user_timeout": 10_000},
    )
    # before SQLAlchemy's own first look at the connection, which asks for the schema
    sa.event.listen(engine, "connect", _set_up_postgres, insert=True)
    return engine


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """One transaction that only reads; never waits for a writer."""
    with _answering(), engine.begin() as connection:
        yield connection


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """One transaction that writes; on SQLite it holds the lock from its first statement on."""
    with _answering(), _turn(engine), engine.connect() as connection:
        connection.execution_options(**{_WRITES: True})
        with connection.begin():
            yield connection


def insert_for(connection: sa.Connection) -> Any:
    """The dialect's own INSERT, which knows ON CONFLICT."""
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def upgrade(url: str) -> None:
    """Create the tables, or migrate those of an earlier version; only the service's first process does this."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

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


def to_json(value: Any) -> str:
    """Standard JSON: numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False)


def clean(text: str) -> str:
    """Text that both databases can store: no NUL, no lone surrogate."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


# Helpers


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
        backend = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise ConfigError(f"the database URL cannot be read; {_FORMS}") from None  # it may hold a password
    if backend not in ("sqlite", "postgresql", "postgres"):
        raise ConfigError(f"a database of kind {backend} is not supported; {_FORMS}")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigError("an SQLite database in memory would lose every job; give a file, sqlite:///FILE")
    return parsed


_FORMS = "give postgresql://USER:PASSWORD@HOST:PORT/NAME or sqlite:///FILE"


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def _set_up_sqlite(connection: Any, _entry: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # Python's own idea of when a transaction begins leaves reads out of it
    for pragma in (f"busy_timeout={_BUSY_MS}", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
    until_s = time.monotonic() + _BUSY_MS / 1000
    while True:  # SQLite does not wait for the lock here: two processes may switch a new file to WAL at once
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that read first could not become a writer once another had written: it takes the lock at once.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _turn(engine: sa.Engine) -> Iterator[None]:
    """Writers of one process take turns: SQLite's own waiting is by sleeping ever longer, and starves some.

    Of 10 clients that submit 100 jobs at once, one in twenty waited 750 ms for the file's lock; in turns 100 ms.
    """
    lock = engine.get_execution_options().get(_TURN)
    if lock is None:
        yield
        return
    if not lock.acquire(timeout=_BUSY_MS / 1000):
        raise Unavailable("the catalogue's database is busy; try again soon")
    try:
        yield
    finally:
        lock.release()


def _set_up_postgres(connection: Any, _entry: ConnectionPoolEntry) -> None:
    connection.autocommit = True  # else a rollback would undo it
    connection.execute(f"SET search_path TO {SCHEMA}")
    connection.autocommit = False


@contextmanager
def _answering() -> Iterator[None]:
    """Connection errors become `Unavailable`; the driver's text, which names hosts, stays in the cause."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as failure:
        raise Unavailable(_reason(failure) or "the catalogue's database does not answer; try again soon") from failure
    except ProgrammingError as failure:
        if reason := _reason(failure):
            raise Unavailable(reason) from failure
        raise


def _reason(failure: Exception) -> str | None:
    """Known causes; a missing table is an OperationalError in SQLite and a ProgrammingError in PostgreSQL."""
    text = str(failure)
    if "no such table" in text or "UndefinedTable" in text:
        return "the catalogue's database has no tables yet; start the service once, which creates them"
    if "disk is full" in text or "DiskFull" in text:
        return "the disk of the catalogue's database is full; free some space"
    return None

"""Opening, migrating and talking to the catalogue's database: SQLite by default, PostgreSQL by URL.

A database that does not answer raises `Unavailable`.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from brim.errors import ConfigError, Conflict, Unavailable
from brim.jobs.durable import check_file, is_damaged
from brim.jobs.status import jsonable
from brim.jobs.store.tables import ID_LENGTH, ID_LETTERS, MIN_ID, SCHEMA, is_id, metadata

VERSION_TABLE: Final = "brim_version"
_Row = TypeVar("_Row")

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
        if connection.dialect.name == "sqlite":
            check_file(connection.exec_driver_sql)
        else:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            connection.execute(sa.schema.CreateSchema(SCHEMA, if_not_exists=True))
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        config.attributes["connection"] = connection  # read by migrations/env.py
        try:
            if sa.inspect(connection).has_table(VERSION_TABLE):
                command.upgrade(config, "head")
            else:
                metadata.create_all(connection)
                command.stamp(config, "head")
        except CommandError as failure:
            raise Unavailable(
                f"the catalogue's database is of a version that this brim does not know ({failure}); "
                "use the brim that wrote it, or a newer one"
            ) from failure


def to_json(value: Any) -> str:
    """Standard JSON: numbers that are not finite become null."""
    return json.dumps(jsonable(value), allow_nan=False)


# Rows


@dataclass(frozen=True, slots=True)
class RowPage(Generic[_Row]):
    """One page of a list, newest first."""

    rows: list[_Row]
    page: int  # from 1
    per_page: int
    total: int  # rows on all pages

    @property
    def pages(self) -> int:
        """At least 1: an empty list is one empty page."""
        return max(1, -(-self.total // self.per_page))


def row_of(kind: type[_Row], row: sa.Row[Any]) -> _Row:
    values = row._mapping
    return kind(**{each.name: values[each.name] for each in fields(kind)})  # type: ignore[arg-type]  # all are dataclasses


class RowTable(Generic[_Row]):
    """A table whose rows are given out as frozen values; every method is one transaction."""

    table: sa.Table
    row: type[_Row]

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def get(self, id: str) -> _Row | None:
        return self._one(self.table.c.id == id) if is_id(id) else None

    def find(self, text: str) -> _Row | None:
        """The row whose id is this text, or begins with it; Conflict if several do."""
        if not MIN_ID <= len(text) < ID_LENGTH or set(text) - ID_LETTERS:
            return self.get(text)
        with reading(self._engine) as connection:
            query = sa.select(self.table).where(self.table.c.id.startswith(text)).limit(2)
            rows = [row_of(self.row, row) for row in connection.execute(query)]
        if len(rows) > 1:
            raise Conflict(f"several ids begin with {text}; give more of the id")
        return rows[0] if rows else None

    def _one(self, *where: sa.ColumnElement[bool]) -> _Row | None:
        with reading(self._engine) as connection:
            return fetch(connection, self.row, sa.select(self.table).where(*where))

    def _all(self, *where: sa.ColumnElement[bool]) -> list[_Row]:
        with reading(self._engine) as connection:
            query = sa.select(self.table).where(*where).order_by(*self.table.primary_key.columns)
            return [row_of(self.row, row) for row in connection.execute(query)]

    def _page(self, where: Sequence[sa.ColumnElement[bool]], page: int, per_page: int) -> RowPage[_Row]:
        """A page, newest first; one beyond the end is empty."""
        first = (page - 1) * per_page
        rows: list[_Row] = []
        with reading(self._engine) as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(self.table).where(*where)).scalar_one()
            if 0 <= first < total:  # else the number may be larger than the database can count
                query = sa.select(self.table).where(*where).order_by(self.table.c.number.desc())
                query = query.limit(per_page).offset(first)
                rows = [row_of(self.row, row) for row in connection.execute(query)]
        return RowPage(rows, page, per_page, total)


def fetch(connection: sa.Connection, kind: type[_Row], query: sa.Executable) -> _Row | None:
    """The row that a query gives, if any."""
    row = connection.execute(query).one_or_none()
    return None if row is None else row_of(kind, row)


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
    except (DatabaseError, sqlite3.Error, PoolTimeout) as failure:
        reason = _reason(failure)
        if reason is None and not isinstance(failure, OperationalError | InterfaceError | sqlite3.Error | PoolTimeout):
            raise
        raise Unavailable(reason or "the catalogue's database does not answer; try again soon") from failure


def _reason(failure: Exception) -> str | None:
    """Known causes; a missing table is an OperationalError in SQLite and a ProgrammingError in PostgreSQL."""
    text = str(failure)
    if "no such table" in text or "UndefinedTable" in text:
        return "the catalogue's database has no tables yet; start the service once, which creates them"
    if "disk is full" in text or "DiskFull" in text:
        return "the disk of the catalogue's database is full; free some space"
    if is_damaged(text):
        return (
            "the catalogue's database is damaged; restore catalogue.sqlite from a copy, or move it and jobs.sqlite "
            "away to begin with an empty catalogue"
        )
    return None

"""Rows of a SQL query, from PostgreSQL or SQLite, through Arrow; no password is ever shown."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from brim.engine.device import guard
from brim.engine.rows.columns import arrow_tensor
from brim.engine.rows.source import TensorSource, choose
from brim.errors import ConfigError, DatasetError, StorageError

_CONNECT_S = 10  # libpq waits for minutes by default


class SqlSource(TensorSource):
    """The result of one query, read once and in bulk through Arrow; lists of equal length become an axis."""

    def __init__(self, url: str, query: str, names: Sequence[str] | None = None) -> None:
        """Run the query; any changes it makes are rolled back."""
        self.url = without_password(url)
        table = _fetch(url, query)
        columns = list(table.column_names)
        for name in columns:
            if columns.count(name) > 1:
                raise DatasetError(f'the query returns two columns "{name}"', hint="rename one with AS")
        wanted = choose({name: table.column(name) for name in columns}, names, "the query's result")
        if not table.num_rows:
            raise DatasetError(f"the query returned no rows from {self.url}", hint="check its conditions")
        with guard():
            super().__init__(
                {
                    name: arrow_tensor(
                        name, column, cast=f"leave it out or cast it, as in CAST({name} AS DOUBLE PRECISION)"
                    )
                    for name, column in wanted.items()
                }
            )
        self.description = f"{self.num_items} rows of a query to {self.url}"


def sql(url: str, query: str) -> SqlSource:
    """Rows of a query, for a Resident: sql("postgresql://host/database", "select x, y from rows")."""
    for name, value in (("url", url), ("query", query)):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{name}={value!r} must be text", hint='as in brim.sql("postgresql://…", "select …")')
    return SqlSource(url, query)


def _driver(scheme: str) -> Any:
    """The ADBC driver of a database, imported when it is needed."""
    try:
        import pyarrow  # noqa: F401  # what every driver hands over

        if scheme == "sqlite":
            import adbc_driver_sqlite.dbapi

            return adbc_driver_sqlite.dbapi
        import adbc_driver_postgresql.dbapi

        return adbc_driver_postgresql.dbapi
    except ImportError as failure:
        raise ConfigError(
            f"{failure.name} is missing to read from {scheme}", hint="pip install 'brim[sql]'"
        ) from failure


def _fetch(url: str, query: str) -> Any:
    scheme = url.partition(":")[0].lower()
    if scheme not in ("postgresql", "postgres", "sqlite"):
        raise ConfigError(f'database URL "{without_password(url)}": use postgresql://… or sqlite:///path')
    driver = _driver(scheme)
    target = _sqlite_file(url) if scheme == "sqlite" else _with_timeout(url)
    # from None: the driver's own message may quote the password
    try:
        connection = driver.connect(target)
    except driver.Error as failure:
        fault = _scrub(str(failure), url)
        raise StorageError(f"{without_password(url)} cannot be opened: {fault}", hint="check URL and server") from None
    with connection, connection.cursor() as cursor:
        try:
            cursor.execute(query.strip().rstrip(";"))
            return cursor.fetch_arrow_table()
        except driver.DataError as failure:
            raise DatasetError(f"the query's data cannot be read: {_scrub(str(failure), url)}") from None
        except driver.Error as failure:
            fault = _scrub(str(failure), url)
            raise ConfigError(f"the query fails on {without_password(url)}: {fault}", hint="check the query") from None
        except (OSError, ValueError) as failure:  # Arrow's, while rows arrive
            raise _interrupted(_scrub(str(failure), url), [column[0] for column in cursor.description or ()]) from None


def _interrupted(fault: str, columns: list[str]) -> DatasetError | StorageError:
    """In SQLite a column's type may change from row to row; else the server or the connection is at fault."""
    mismatch = re.search(r"mismatch in column (\d+)", fault)
    if mismatch is None:
        return StorageError(f"the query was interrupted: {fault}", hint="check the server and try again")
    column = columns[int(mismatch[1])] if int(mismatch[1]) < len(columns) else mismatch[1]
    return DatasetError(f'column "{column}" changes its type: {fault}', hint="cast it in the query")


def _sqlite_file(url: str) -> str:
    path = unquote(url.partition(":///")[2])
    if not path:
        raise ConfigError(f'database URL "{url}": write sqlite:///relative.db or sqlite:////absolute.db')
    if not Path(path).is_file():
        raise StorageError(f"{path} is not a file", hint="check the path of the SQLite database")
    return f"file:{quote(str(Path(path).absolute()))}?mode=ro"


def _with_timeout(url: str) -> str:
    if "connect_timeout=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}connect_timeout={_CONNECT_S}"


_USER = re.compile(r"^(\w+://[^/?#@:]*):(.*)@(?=[^@]*$)")  # up to the last @: passwords are often not encoded


def without_password(url: str) -> str:
    url = _USER.sub(r"\1:***@", url)
    return re.sub(r"(?i)((?:ssl)?password=)[^&#]*", r"\1***", url)


def _scrub(text: str, url: str) -> str:
    """One line without the password, as it stands in the URL or decoded."""
    match = _USER.match(url)
    secrets = [match[2]] if match else []
    secrets += [value for key, value in parse_qsl(urlsplit(url).query) if key.lower().endswith("password")]
    for secret in filter(None, secrets):
        for form in (secret, unquote(secret), quote(secret, safe="")):
            text = text.replace(form, "***")
    return " ".join(text.split())

"""Rows of a SQL query, from PostgreSQL or SQLite, through Arrow; no password is ever shown."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import guard
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
                raise DatasetError(f'the query returns two columns "{name}"; rename one with AS')
        wanted = choose({name: table.column(name) for name in columns}, names, "the query's result")
        if not table.num_rows:
            raise DatasetError(f"the query returned no rows from {self.url}; check its conditions")
        with guard():
            super().__init__({name: _to_tensor(name, column) for name, column in wanted.items()})
        self.description = f"{self.num_items} rows of a query to {self.url}"


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
        raise ConfigError(f"{failure.name} is missing to read from {scheme}; pip install 'brim[sql]'") from failure


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
        raise StorageError(f"{without_password(url)} cannot be opened: {fault}; check URL and server") from None
    with connection, connection.cursor() as cursor:
        try:
            cursor.execute(query.strip().rstrip(";"))
            return cursor.fetch_arrow_table()
        except driver.DataError as failure:
            raise DatasetError(f"the query's data cannot be read: {_scrub(str(failure), url)}") from None
        except driver.Error as failure:
            fault = _scrub(str(failure), url)
            raise ConfigError(f"the query fails on {without_password(url)}: {fault}; check the query") from None
        except (OSError, ValueError) as failure:  # Arrow's, while rows arrive
            raise _interrupted(_scrub(str(failure), url), [column[0] for column in cursor.description or ()]) from None


def _interrupted(fault: str, columns: list[str]) -> DatasetError | StorageError:
    """In SQLite a column's type may change from row to row; else the server or the connection is at fault."""
    mismatch = re.search(r"mismatch in column (\d+)", fault)
    if mismatch is None:
        return StorageError(f"the query was interrupted: {fault}; check the server and try again")
    column = columns[int(mismatch[1])] if int(mismatch[1]) < len(columns) else mismatch[1]
    return DatasetError(f'column "{column}" changes its type: {fault}; cast it in the query')


def _sqlite_file(url: str) -> str:
    path = unquote(url.partition(":///")[2])
    if not path:
        raise ConfigError(f'database URL "{url}": write sqlite:///relative.db or sqlite:////absolute.db')
    if not Path(path).is_file():
        raise StorageError(f"{path} is not a file; check the path of the SQLite database")
    return f"file:{quote(str(Path(path).absolute()))}?mode=ro"


def _with_timeout(url: str) -> str:
    if "connect_timeout=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}connect_timeout={_CONNECT_S}"


_USER = re.compile(r"^(\w+://[^/?#@:]*):(.*)@(?=[^@]*$)")  # up to the last @: passwords are often not encoded


def without_password(url: str) -> str:
    """The URL for messages."""
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


def _to_tensor(name: str, column: Any) -> Tensor:
    out: Tensor | None = None
    row = 0
    for chunk in column.chunks:
        if not len(chunk):
            continue
        values = torch.from_numpy(_to_numpy(name, chunk, row, 1))
        if out is None:
            out = torch.empty((len(column), *values.shape[1:]), dtype=values.dtype)
        if out.shape[1:] != values.shape[1:]:
            _ragged(name, row)
        out[row : row + len(chunk)] = values
        row += len(chunk)
    assert out is not None
    return out


def _to_numpy(name: str, array: Any, row: int, per_row: int) -> np.ndarray[Any, Any]:
    """Values of an Arrow array whose first value belongs to this row, per_row values to each."""
    from pyarrow import types

    kind = array.type
    if array.null_count:
        null = int(np.nonzero(array.is_null().to_numpy(zero_copy_only=False))[0][0])
        fault = f'column "{name}" is null in row {row + null // per_row}'
        raise DatasetError(f"{fault}, counted from 0; leave such rows out or use COALESCE")
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        width = int(lengths[0])
        odd = np.nonzero(lengths != width)[0]
        if len(odd) or not width:
            _ragged(name, row + (int(odd[0]) // per_row if len(odd) else 0))
        values = _to_numpy(name, array.flatten(), row, per_row * width)
        return values.reshape(len(array), width, *values.shape[1:])
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        fault = f'column "{name}" is {getattr(kind, "type_name", kind)} from row {row} on'
        raise DatasetError(f"{fault}, not a number; leave it out or cast it, as in CAST({name} AS DOUBLE PRECISION)")
    return np.array(array.to_numpy(zero_copy_only=False))  # a copy: Arrow's memory is read-only


def _ragged(name: str, row: int) -> NoReturn:
    raise DatasetError(
        f'column "{name}" has a list of another length, or an empty one, in row {row}, counted from 0; '
        "all rows need equally many values"
    )

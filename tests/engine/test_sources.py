import hashlib
import importlib.util
import os
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

from brim.engine.rows.columns import arrow_tensor, to_columns
from brim.engine.rows.files import DatasetSource, NpyFolderSource
from brim.engine.rows.source import SideBySide, TensorSource, read_rows
from brim.engine.rows.sql import SqlSource, without_password
from brim.engine.storage import Dataset, shard_file
from brim.engine.storage.dataset import allocate
from brim.engine.storage.writer import ShardWriter
from brim.errors import ConfigError, DatasetError, StorageError

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))

from postgres import Postgres, find_binaries

# Helpers


def rows_of(start, stop):
    index = torch.arange(start, stop)
    return {
        "iq": torch.complex(index.float(), -index.float())[:, None].repeat(1, 3),
        "x": index.float()[:, None, None] / torch.ones(1, 2, 2),
        "half": index.bfloat16(),
        "index": index,
        "even": index % 2 == 0,
    }


def make_dataset(path, start, stop, per_shard=10, header=None, rows=rows_of):
    with ShardWriter(path, header or {"features": [{"name": "snr_db"}]}, items_per_shard=per_shard) as out:
        out.append(rows(start, stop), {"tried": torch.arange(start, stop)})
        out.finish()
    return path


def read(source, start=0, stop=None):
    stop = source.num_items if stop is None else stop
    out = allocate(source.fields, stop - start)
    source.read(start, stop, out)
    return out


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# Tensors


def test_sources_side_by_side_are_one():
    rows = rows_of(0, 9)
    left, right = TensorSource(rows, names=["index", "x"]), TensorSource(rows, names=["even"])
    both = SideBySide([left, right])

    assert_same(read(both, 2, 7), {name: rows_of(2, 7)[name] for name in ("index", "x", "even")})
    with pytest.raises(DatasetError, match="have 9, 8 items"):
        SideBySide([left, TensorSource(rows_of(0, 8))])


@pytest.mark.parametrize(
    "index", [[3], [3, 4, 5], [3, 5, 4, 6], [9, 0, 5, 5, 1], [0, 4000, 1, 4001], list(range(9, -1, -1))]
)
def test_rows_are_read_in_the_order_asked_for(index):
    source = TensorSource(rows_of(0, 5000))
    out = allocate(source.fields, len(index))

    read_rows(source, torch.tensor(index), out)

    assert_same(out, {name: tensor[index] for name, tensor in rows_of(0, 5000).items()})


# Columns


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [1, 2, 3], "y": torch.zeros(2, 3)}, 'column "y" has 2 rows, "x" has 3'),
        ({"x": [1, 2], "y": 5.0}, 'column "y" is a single number'),
        ({"x": [1, 2], "y": torch.zeros(2, device="meta")}, 'column "y" is on meta, "x" is on cpu'),
        ({"x": [[1, 2], [3]]}, r'column "x" has shape \[1\] in row 1'),
        ({"x": np.array([np.zeros(2), None], object)}, "in row 1"),
        ({"x": ["a"]}, "holds text, not numbers"),
        ({}, "there is no column"),
    ],
)
def test_columns_that_make_no_table_are_refused(columns, message):
    with pytest.raises(DatasetError, match=message):
        to_columns(columns)


def test_lists_of_a_column_become_an_axis_across_chunks():
    column = pyarrow.chunked_array([[[[1, 2], [3, 4], [5, 6]]], [[[7, 8], [9, 10], [11, 12]]]])

    assert torch.equal(arrow_tensor("x", column), torch.arange(1, 13).view(2, 3, 2))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[[1, 2], [3, 4]], [[5, 6], [7, None]]], '"x" is null in row 3'),
        ([[[1, 2], [3, 4]], [[5, 6], [7]]], "another length, or an empty one, in row 3"),
        ([[[1, 2]], [[5, 6, 7]]], "another length, or an empty one, in row 1"),
    ],
)
def test_arrow_faults_name_their_row(chunks, message):
    with pytest.raises(DatasetError, match=message):
        arrow_tensor("x", pyarrow.chunked_array(chunks))


# brim datasets


def test_a_dataset_is_read_across_shards(tmp_path):
    source = DatasetSource(make_dataset(tmp_path / "a", 0, 25))

    assert list(source.blocks) == [0, 10, 20, 25]
    found = read(source)
    assert_same({name: found[name] for name in rows_of(0, 1)}, rows_of(0, 25))
    assert torch.equal(read(source, 8, 23)["index"], torch.arange(8, 23))


def test_several_datasets_are_one(tmp_path):
    paths = [make_dataset(tmp_path / "a", 0, 25), make_dataset(tmp_path / "b", 25, 42, per_shard=4)]

    source = DatasetSource(paths, names=["index", "x"])

    assert source.num_items == 42
    assert_same(read(source, 20, 40), {name: rows_of(20, 40)[name] for name in ("index", "x")})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rows": lambda a, b: {**rows_of(a, b), "x": torch.zeros(b - a, 3)}}, r'"x" is float32 \[3\]'),
        ({"header": {"features": [{"name": "rssi_dbm"}]}}, '"features": only the first has rssi_dbm'),
        ({"header": {"features": [{"name": "snr_db", "unit": "W"}]}}, "other units"),
    ],
)
def test_datasets_that_differ_say_in_what(tmp_path, other, message):
    paths = [make_dataset(tmp_path / "a", 0, 5), make_dataset(tmp_path / "b", 0, 5, **other)]

    with pytest.raises(DatasetError, match=message):
        DatasetSource(paths)


def test_every_file_is_verified_at_its_first_use_and_after_a_change(tmp_path, monkeypatch):
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: hashed.append(Path(file.name).name) or digest(file, name)
    )
    monkeypatch.setattr(shard_file, "_verified", shard_file._Verified())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_dataset(tmp_path / "a", 0, 20)
    names = ["000000.safetensors", "000001.safetensors"]
    for name in names:
        os.utime(path / "shards" / name, (1, 1))  # not written just now

    read(DatasetSource(path))
    assert sorted(hashed) == names
    read(DatasetSource(path))
    monkeypatch.setattr(shard_file, "_verified", shard_file._Verified())  # another process
    read(DatasetSource(path))
    assert len(hashed) == 2
    os.utime(path / "shards" / names[1], (2, 2))
    Dataset(path).load()
    assert hashed[2:] == names[1:]


# Folders of .npy


def save(path, **arrays):
    path.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


def test_equal_arrays_with_names_are_fields_and_with_numbers_are_items(tmp_path):
    arrays = [np.full(9, value) for value in range(3)]

    fields = NpyFolderSource(save(tmp_path / "f", a=arrays[0], b=arrays[1], c=arrays[2]))
    items = NpyFolderSource(save(tmp_path / "i", a0=arrays[0], a1=arrays[1], a2=arrays[2]))

    assert (fields.layout, fields.num_items) == ("fields", 9)
    assert (items.layout, items.num_items) == ("items", 3)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_one_array_per_item_in_the_order_of_its_number(tmp_path, shape):
    arrays = {f"item_{number}": np.full(shape, number, "f4") for number in range(12)}

    source = NpyFolderSource(save(tmp_path / "i", **arrays))

    assert "one array per item" in source.description
    assert_same(read(source, 1, 12), {"data": torch.from_numpy(np.stack(list(arrays.values())[1:]))})


def test_fortran_order_and_foreign_bytes_are_read_right(tmp_path):
    x = np.arange(60.0).reshape(10, 3, 2)

    source = NpyFolderSource(save(tmp_path / "f", x=np.asfortranarray(x), y=x.astype(">f4")))

    assert_same(read(source, 2, 9), {"x": torch.from_numpy(x[2:9]), "y": torch.from_numpy(x[2:9].astype("f4"))})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array([1, None])}, r"x\.npy holds Python objects"),
        ({"x": np.zeros(3, [("a", "f4")])}, r"x\.npy holds"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, r"y\.npy has shape \[4\], x\.npy has \[3, 2\]"),
        ({"i0": np.zeros(3), "i1": np.zeros(3), "i2": np.zeros(4)}, r"i2\.npy is float64 \[4\].*items must be alike"),
        ({"x": np.zeros((0, 2))}, "no items"),
    ],
)
def test_bad_arrays_are_named(tmp_path, arrays, message):
    with pytest.raises(DatasetError, match=message):
        NpyFolderSource(save(tmp_path / "f", **arrays))


@pytest.mark.parametrize("size", [0, 9, 127, 200])
def test_a_truncated_file_is_named(tmp_path, size):
    path = save(tmp_path / "f", x=np.zeros(20), y=np.zeros((20, 2)))
    os.truncate(path / "y.npy", size)

    with pytest.raises(DatasetError, match=r"y\.npy"):
        NpyFolderSource(path)


# SQL

adbc = pytest.mark.skipif(importlib.util.find_spec("adbc_driver_manager") is None, reason="brim[sql] is not installed")


@pytest.fixture
def sqlite(tmp_path):
    file = tmp_path / "a b#1.db"
    with sqlite3.connect(file) as made:
        made.execute("CREATE TABLE t (i INTEGER, x REAL, s TEXT)")
        made.executemany("INSERT INTO t VALUES (?, ?, ?)", [(i, i / 4, str(i)) for i in range(5000)])
        made.execute("CREATE TABLE bad (i, x)")
        made.executemany("INSERT INTO bad VALUES (?, ?)", [(i, None if i == 3 else 0.5) for i in range(5)])
        made.executemany("INSERT INTO bad VALUES (?, ?)", [("text" if i == 3000 else i, 0.5) for i in range(4000)])
    made.close()
    return f"sqlite:///{file.as_posix().replace('#', '%23').replace(' ', '%20')}"


@adbc
def test_sqlite_is_read(sqlite):
    source = SqlSource(sqlite, "SELECT i, x FROM t ORDER BY i;")

    expected = {"i": torch.arange(5000), "x": torch.arange(5000, dtype=torch.float64) / 4}
    assert_same(read(source), expected)
    assert "5000 rows" in source.description


@adbc
@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        ("SELECT s FROM t", DatasetError, 'column "s" is string from row 0'),
        ("SELECT i FROM bad", DatasetError, 'column "i" changes its type'),
        ("SELECT i FROM t WHERE i < 0", DatasetError, "no rows"),
        ("SELECT nope FROM t", ConfigError, "no such column: nope"),
        ("DELETE FROM t RETURNING i", ConfigError, "readonly"),
    ],
)
def test_sqlite_refuses_what_is_no_tensor(sqlite, query, error, message):
    with pytest.raises(error, match=message):
        SqlSource(sqlite, query)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p@ss@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h/d?password=p&x=1", "postgresql://u@h/d?password=***&x=1"),
        ("postgresql://h/d", "postgresql://h/d"),
    ],
)
def test_passwords_are_not_shown(url, shown):
    assert without_password(url) == shown


@pytest.fixture(scope="module")
def postgres():
    """The URL of a database of a server of our own."""
    if find_binaries() is None or importlib.util.find_spec("adbc_driver_postgresql") is None:
        pytest.skip("PostgreSQL or its driver is not installed")
    with Postgres() as server:
        yield server.url


def test_postgresql_is_read_in_bulk(postgres):
    query = """SELECT i, (i / 4.0)::float4 AS x, i::float8 / 3 AS y, i % 2 = 0 AS even, (i % 7)::int2 AS small,
                      ARRAY[i, i + 1, i + 2]::float4[] AS window
               FROM generate_series(0, 99999) AS i(i) ORDER BY i"""

    source = SqlSource(postgres, query)

    index = torch.arange(100_000)
    found = read(source)
    assert source.num_items == 100_000
    assert_same(
        found,
        {
            "i": index.int(),
            "x": index.float() / 4,
            "y": index.double() / 3,
            "even": index % 2 == 0,
            "small": (index % 7).to(torch.int16),
            "window": torch.stack([index, index + 1, index + 2], 1).float(),
        },
    )


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        ("SELECT i, NULLIF(i, 70000) AS x FROM generate_series(0, 99999) i", DatasetError, '"x" is null in row 70000'),
        ("SELECT i::numeric AS n FROM generate_series(0, 9) i", DatasetError, 'column "n" is numeric.*CAST'),
        ("SELECT 1 / (i - 5) AS x FROM generate_series(0, 9) i", DatasetError, "division by zero"),
    ],
)
def test_postgresql_refuses_what_is_no_tensor(postgres, query, error, message):
    with pytest.raises(error, match=message):
        SqlSource(postgres, query)


def test_a_wrong_database_or_server_is_a_clear_error_without_the_password(postgres):
    for url, message in (
        (postgres.replace("brim@", "brim:sekret@").replace("/postgres", "/nope"), '"nope" does not exist'),
        ("postgresql://brim:sekret@127.0.0.1:9/x", "refused"),
        ("postgresql://brim@127.0.0.1:9/x?password=sekret", "refused"),
        ("postgresql://brim:sek%ret@127.0.0.1/x", r"\*\*\*"),
    ):
        with pytest.raises(StorageError, match=message) as caught:
            SqlSource(url, "SELECT 1")
        assert not any(secret in str(caught.value) for secret in ("sekret", "sek%ret"))
        assert caught.value.__cause__ is None

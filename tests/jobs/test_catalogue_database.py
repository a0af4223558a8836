"""The database under the catalogue: migrated, absent, stopped and back; datasets, models and devices in it."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor

import alembic.autogenerate
import alembic.command
import first_catalogue
import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from desk import Asked

from brim.errors import ConfigError, Conflict, NotFound, Unavailable
from brim.jobs.store import Catalogue, upgrade
from brim.jobs.store.engine import VERSION_TABLE, open_engine, reading, writing
from brim.jobs.store.tables import meta, metadata

ASKED = Asked("rf.evaluate", "e", {})


@pytest.fixture
def engine(database_url):
    opened = open_engine(database_url)
    yield opened
    opened.dispose()


# Migrations


@pytest.mark.parametrize("first", [True, False])
def test_a_new_catalogue_and_one_of_the_first_version_get_the_tables_of_today(database_url, engine, first):
    if first:
        make_first(engine)
    upgrade(database_url)

    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert alembic.autogenerate.compare_metadata(context, metadata) == []
        assert context.get_current_revision() == "0005"


def make_first(engine):
    """A catalogue as the first services made it."""
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.schema.CreateSchema("brim"))
        first_catalogue.create(Operations(MigrationContext.configure(connection)))
        connection.execute(sa.text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(sa.text(f"INSERT INTO {VERSION_TABLE} VALUES ('0001')"))


def test_a_migration_keeps_the_rows_and_migrating_again_changes_nothing(database_url, engine):
    make_first(engine)
    with Catalogue.open(database_url) as catalogue:
        with pytest.raises(Unavailable, match="no tables yet"):
            catalogue.models.all()
        row = add(catalogue)

        upgrade(database_url)
        job, _ = catalogue.jobs.submit(ASKED)
        upgrade(database_url)

        assert catalogue.datasets.get(row.id) == row
        assert catalogue.jobs.unfinished() == [catalogue.jobs.get(job.id)]
        assert catalogue.models.all() == []


def test_several_may_migrate_at_once(database_url):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upgrade, [database_url] * 4))

    with Catalogue.open(database_url) as catalogue:
        catalogue.ping()


def test_a_database_of_a_later_version_is_refused_in_words(database_url, engine):
    upgrade(database_url)
    with writing(engine) as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))

    with pytest.raises(Unavailable, match="does not know"):
        upgrade(database_url)


def test_an_upgrade_that_fails_leaves_nothing_behind(database_url, monkeypatch):
    """Tables and version go in together: the next start finds either all or nothing."""

    def fail(*_, **__):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(alembic.command, "stamp", fail)
        with pytest.raises(RuntimeError):
            upgrade(database_url)
    upgrade(database_url)

    with Catalogue.open(database_url) as catalogue:
        catalogue.ping()


def test_the_tables_do_not_mix_with_others_of_the_same_postgres(postgres):
    url = postgres.fresh()
    upgrade(url)

    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        found = sa.inspect(connection)
        assert found.get_table_names("public") == []
        assert set(metadata.tables) | {VERSION_TABLE} == set(found.get_table_names("brim"))
    engine.dispose()


# A database that is not there, or not for now


@pytest.mark.parametrize("url", ["mysql://h/d", "nonsense", "sqlite:///:memory:", "://secret@"])
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError) as caught:
        Catalogue.open(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_unavailable_and_names_no_host():
    with Catalogue.open("postgresql://brim:secret@127.0.0.1:1/x") as catalogue, pytest.raises(Unavailable) as caught:
        catalogue.ping()

    assert "127.0.0.1" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_server_stopped_and_started_costs_only_the_time_between(postgres):
    url = postgres.fresh()
    upgrade(url)
    with Catalogue.open(url) as catalogue:
        job, _ = catalogue.jobs.submit(ASKED)
        postgres.stop()
        try:
            for call in (lambda: catalogue.jobs.get(job.id), lambda: catalogue.jobs.submit(ASKED), catalogue.ping):
                with pytest.raises(Unavailable):
                    call()
        finally:
            postgres.start()

        assert [found.id for found in catalogue.jobs.unfinished()] == [job.id]


def test_a_file_that_is_locked_for_too_long_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr("brim.jobs.store.engine._BUSY_MS", 100)
    url = f"sqlite:///{tmp_path}/c.sqlite"
    upgrade(url)
    held = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    with Catalogue.open(url) as catalogue:
        with pytest.raises(Unavailable):
            catalogue.jobs.submit(ASKED)
        assert catalogue.jobs.page().total == 0  # readers do not wait for a writer
        held.execute("ROLLBACK")
        held.close()

        assert catalogue.jobs.submit(ASKED)[1]


def test_a_writer_holds_the_file_from_its_first_statement_on_and_a_reader_never(tmp_path):
    """One that read first could not write any more once another process had written."""
    upgrade(f"sqlite:///{tmp_path}/c.sqlite")
    engine, other = open_engine(f"sqlite:///{tmp_path}/c.sqlite"), sqlite3.connect(tmp_path / "c.sqlite", timeout=0)
    other.isolation_level = None

    with reading(engine) as connection:
        connection.execute(sa.select(meta)).all()
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    with writing(engine) as connection:
        connection.execute(sa.select(meta)).all()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")

    other.close()
    engine.dispose()


def test_sqlite_keeps_what_was_committed_and_checks_what_refers(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path}/c.sqlite")
    names = ("journal_mode", "synchronous", "foreign_keys")
    with reading(engine) as connection:
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]
    engine.dispose()

    assert found == ["wal", 2, 1]


def test_the_first_installation_owns_a_catalogue(catalogue):
    assert catalogue.owner() is None
    assert [catalogue.claim("first"), catalogue.claim("second"), catalogue.owner()] == ["first"] * 3


# Datasets, models and devices


def add(catalogue, name="d", kind="images", path="/x", **others):
    return catalogue.datasets.add(name=name, kind=kind, path=path, owned=False, items=2, bytes=3, **others)


def test_datasets_are_listed_newest_first_by_kind_and_name_and_each_path_once(catalogue):
    rows = [add(catalogue, f"n{i % 2}", kind, f"/{i}") for i, kind in enumerate(["rf", "images", "rf"])]
    ids = [row.id for row in rows]

    assert [row.id for row in catalogue.datasets.page().rows] == ids[::-1]
    assert [row.id for row in catalogue.datasets.page(kind="rf").rows] == [ids[2], ids[0]]
    assert [row.id for row in catalogue.datasets.named("n0")] == [ids[0], ids[2]]
    assert (rows[0].items, rows[0].bytes, rows[0].owned, rows[0].state) == (2, 3, False, "ready")
    with pytest.raises(Conflict, match=ids[1]):
        add(catalogue, "another", path="/1")


def test_deleting_takes_two_steps_and_can_be_gone_on_with(catalogue):
    row = add(catalogue)
    assert not catalogue.datasets.forget(row.id)

    assert catalogue.datasets.retire(row.id).id == row.id
    assert catalogue.datasets.page().total == 0
    assert [one.id for one in catalogue.datasets.retired()] == [row.id]
    assert catalogue.datasets.retire(row.id).id == row.id  # again, after a crash

    assert catalogue.datasets.forget(row.id)
    with pytest.raises(NotFound):
        catalogue.datasets.retire(row.id)


def test_a_dataset_that_is_being_written_is_not_deleted(catalogue):
    job, _ = catalogue.jobs.submit(Asked("rf.generate", "g", {}), makes="dataset")

    with pytest.raises(Conflict, match="still being written"):
        catalogue.datasets.retire(job.output_id)


def test_a_worker_tells_its_device_anew_at_each_start(catalogue):
    catalogue.devices.put("w1", {"name": "old"})
    catalogue.devices.put("w0", {"name": "cpu"})
    catalogue.devices.put("w1", {"name": "new"})

    assert [(row.worker, row.info["name"]) for row in catalogue.devices.all()] == [("w0", "cpu"), ("w1", "new")]
    catalogue.devices.clear()
    assert catalogue.devices.all() == []


def test_models_are_listed_by_name_and_each_adding_is_a_version_of_its_own(catalogue):
    def put(name, path="/runs/a", network="unet_tiny"):
        return catalogue.models.put(name=name, kind="segment", network=network, path=path, about={"parameters": 7})

    (second, new), (first, _) = put("b"), put("a")
    again, replaced = put("b", "/runs/b", "hrnet")

    assert (new, replaced) == (False, True)
    assert catalogue.models.all() == [first, again]
    assert (again.path, again.network, again.about) == ("/runs/b", "hrnet", {"parameters": 7})
    assert again.version not in (first.version, second.version)
    assert catalogue.models.get("c") is None
    assert [catalogue.models.remove("b"), catalogue.models.remove("b")] == [True, False]
    assert catalogue.models.all() == [first]

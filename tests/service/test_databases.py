"""Databases and identity of a data directory at a start: damaged, emptied or half written, said in a sentence."""

import os
import sqlite3
from pathlib import Path

import pytest

from brim.errors import ConfigError, Conflict, StorageError, Unavailable
from brim.jobs.kinds import Spec
from brim.service import token
from brim.service.run.start import choose_token, hold, open_databases, tidy
from brim.service.settings import Settings


def start(data: Path) -> None:
    """As a service does, with a job in its catalogue, and end."""
    settings = Settings(data=data)
    settings.make_folders()
    catalogue, queue = open_databases(settings)
    catalogue.jobs.submit(Spec("rf.generate", "n", {}))
    catalogue.close()
    queue.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    data = tmp_path_factory.mktemp("started") / "data"
    start(data)
    return data


@pytest.fixture
def data(started, tmp_path) -> Path:
    """A data directory that was in use; its databases are whole files, without journals."""
    place = tmp_path / "data"
    place.mkdir()
    for name in ("catalogue.sqlite", "jobs.sqlite"):
        source, target = sqlite3.connect(started / name), sqlite3.connect(place / name)
        source.backup(target)
        source.close()
        target.close()
    (place / "installation").write_bytes((started / "installation").read_bytes())
    return place


def rubbish(file: Path) -> None:
    file.write_bytes(os.urandom(8192))


def flip(file: Path) -> None:
    """Damage a page in the middle: the header stays good."""
    content = bytearray(file.read_bytes())
    content[4096 * 3 : 4096 * 4] = os.urandom(4096)
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [rubbish, flip])
@pytest.mark.parametrize(("name", "subject"), [("catalogue.sqlite", "the catalogue"), ("jobs.sqlite", "the queue")])
def test_a_damaged_database_is_said_with_the_way_out(data, name, subject, damage):
    damage(data / name)

    with pytest.raises(Unavailable, match=rf"^{subject}'s database is damaged; restore {name} from a copy, or move"):
        start(data)


@pytest.mark.parametrize("gone", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_an_emptied_catalogue_is_noticed(data, gone):
    gone(data / "catalogue.sqlite")

    with pytest.raises(Unavailable, match=r"is empty, but jobs\.sqlite is of an earlier start; restore"):
        start(data)
    (data / "jobs.sqlite").unlink()
    start(data)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"0123", None])
def test_a_damaged_installation_is_said_with_what_it_should_hold(data, content):
    known = (data / "installation").read_text().strip()
    (data / "installation").unlink() if content is None else (data / "installation").write_bytes(content)

    with pytest.raises(StorageError) as caught:
        start(data)
    assert f"or write {known} to it" in str(caught.value)
    (data / "installation").write_text(known)
    start(data)


def test_another_data_directory_is_still_refused(data):
    (data / "installation").write_text("f" * 32)

    with pytest.raises(Conflict, match="belongs to another data directory"):
        start(data)


@pytest.mark.parametrize("step", ["upgrade", "_installation", "migrate"])
def test_a_first_start_that_was_cut_short_can_be_repeated(tmp_path, monkeypatch, step):
    def cut(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"brim.service.run.start.{step}", cut)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "data")

    start(tmp_path / "data")


def test_the_identity_is_synced_with_its_folder(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(
        token.os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_mode & 0o170000), sync(handle))
    )

    token.write_secret(tmp_path / "installation", "a" * 32)

    assert synced == [0o100000, 0o040000]
    assert (tmp_path / "installation").stat().st_mode & 0o777 == 0o600


def test_a_data_directory_has_one_service_at_a_time(tmp_path):
    settings = Settings(data=tmp_path / "data")
    lock = hold(settings)
    with pytest.raises(Conflict, match=rf"is in use by process {os.getpid()}; stop it") as caught:
        hold(settings)
    lock.release()

    assert (caught.value.field, caught.value.code) == ("data", "in_use")
    hold(settings).release()


def test_other_machines_may_connect_only_with_a_token_that_somebody_has_seen(tmp_path, monkeypatch):
    monkeypatch.delenv("BRIM_TOKEN", raising=False)
    closed, opened = (Settings(data=tmp_path, host=host) for host in ("127.0.0.1", "0.0.0.0"))
    with pytest.raises(ConfigError, match="lets other machines connect, and there is no token yet"):
        choose_token(opened)

    assert choose_token(closed) == choose_token(opened) == (tmp_path / "token").read_text().strip()


def test_what_processes_of_an_earlier_start_left_is_removed(tmp_path):
    settings = Settings(data=tmp_path, api_processes=2)
    settings.make_folders()
    left = ["workers/predict-0.loading", f"uploads/{'0' * 32}/a", "metrics/counter.db"]
    for name in (*left, "datasets/kept"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    tidy(settings)

    assert not [name for name in left if (tmp_path / name).exists()]
    assert (tmp_path / "datasets" / "kept").exists()
    assert (tmp_path / "metrics").is_dir()

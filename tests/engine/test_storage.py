"""Datasets in an object store: a real server of the S3 protocol on loopback, behind a proxy that fails on purpose."""

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import pytest
import s3fs
import torch
from fake_time import FakeTime
from test_shards import fill, rows_of, totals_of, writer

from brim.engine.rows.files import DatasetSource
from brim.engine.storage import destination
from brim.engine.storage import places as storage
from brim.engine.storage import writer as shard_writer
from brim.engine.storage.dataset import Dataset
from brim.engine.storage.places import ObjectPlace, place_of
from brim.engine.storage.shard_file import write_shard
from brim.errors import DatasetError, ShardCorrupt, StorageError
from s3_store import SECRET, FailingProxy, serve_s3
from waiting import until

BUCKET = "bucket"


@pytest.fixture(scope="module")
def server():
    with serve_s3() as store:
        store.s3.create_bucket(Bucket=BUCKET)
        yield store


@pytest.fixture
def proxy(server, monkeypatch):
    """The store as the environment names it, through a proxy."""
    with FailingProxy(server.port) as proxy:
        forget()
        for name, value in {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield proxy
        forget()


def forget():
    """The library keeps the endpoint and the keys that it saw first."""
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def clock(monkeypatch):
    """Pauses between two tries take no time."""
    clock = FakeTime()
    monkeypatch.setattr(storage, "time", clock)
    return clock


@pytest.fixture
def url(proxy, request):
    return f"s3://{BUCKET}/{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}/data"


@pytest.fixture
def clean(tmp_path):
    """What every way to 45 rows must come to."""
    return files_here(fill(tmp_path / "clean", 45))


def files_here(path):
    return without_time({str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()})


def files_there(server, url):
    return without_time(server.files(BUCKET, url.removeprefix(f"s3://{BUCKET}/")))


def without_time(files):
    manifest = json.loads(files["manifest.json"])
    del manifest["created"]
    return files | {"manifest.json": json.dumps(manifest)}


# Places


@pytest.fixture(params=["directory", "store"])
def place(request, tmp_path):
    if request.param == "directory":
        return place_of(tmp_path / "place")
    return place_of(request.getfixturevalue("url"))


def test_what_is_put_can_be_read(place, tmp_path):
    (tmp_path / "local").write_bytes(b"0123456789")
    place.put_file(tmp_path / "local", "shards/a")
    place.put_bytes(b"old", "b")
    place.put_bytes(b"new", "b")
    assert place.read_bytes("b") == b"new"
    assert place.read_bytes("shards/a", 2, 5) == b"234"
    assert place.read_bytes("shards/a", 8) == b"89"
    assert place.read_bytes("shards/a", 8, 100) == b"89"
    assert [place.read_bytes("shards/a", *span) for span in ((3, 3), (20, 30))] == [b"", b""]


def test_a_large_object_comes_in_parts(url, proxy, monkeypatch):
    monkeypatch.setattr(storage, "PART_BYTES", 1000)
    place, data = place_of(url), bytes(range(256)) * 20
    place.put_bytes(data, "large")
    proxy.requests.clear()
    assert place.read_bytes("large", 100, 9000) == data[100:]
    assert len(proxy.requests) == 9
    proxy.fail("cut", 2)
    assert place.read_bytes("large", 0, 5120) == data


def test_a_place_says_what_is_in_it(place):
    assert (place.names(), place.sizes("shards"), place.walk()) == ([], {}, [])
    for name in ("b", "a", "shards/2", "shards/1", "shards/deep/3"):
        place.put_bytes(name.encode(), name)
    assert place.names() == ["a", "b"]
    assert place.sizes("shards") == {"1": 8, "2": 8}
    assert place.walk() == ["a", "b", "shards/1", "shards/2", "shards/deep/3"]
    assert (place.size("a"), place.exists("a"), place.exists("shards"), place.exists("c")) == (1, True, False, False)


def test_what_is_not_there_is_said_so(place):
    for ask in (place.read_bytes, place.size):
        with pytest.raises(FileNotFoundError):
            ask("missing")
    place.put_bytes(b"1", "once")
    place.remove("once")
    place.remove("once")
    assert not place.exists("once")


def test_the_cache_forgets_what_was_not_used_for_a_month(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = storage.cache_folder("solved")
    for name, days in (("old", 31), ("young", 29)):
        (folder / name).mkdir()
        os.utime(folder / name, (time.time() - days * 86400,) * 2)
    assert [entry.name for entry in storage.cache_folder("solved").iterdir()] == ["young"]
    assert folder == tmp_path / "brim" / "solved"


def test_the_store_decides_who_creates_an_object(url):
    place, second = place_of(url), ObjectPlace(url)
    assert place.create(b"mine", "lock")
    assert not second.create(b"yours", "lock")
    assert place.read_bytes("lock") == b"mine"


def test_a_lost_answer_to_a_creation_is_no_refusal(url, proxy):
    place = place_of(url)
    place.walk()
    proxy.fail("cut")  # the object is there by then
    assert place.create(b"mine", "lock")


# Datasets


def test_only_the_fields_asked_for_travel(url, proxy):
    with writer(url, per_shard=100) as out:
        index = torch.arange(100)
        out.append({"x": torch.randn(100, 10_000), "index": index, "even": index % 2 == 0}, {})
    proxy.received = 0
    loaded = Dataset(url).load(["index", "even"])  # before and behind x
    assert torch.equal(loaded["index"], index)
    assert torch.equal(loaded["even"], index % 2 == 0)
    assert proxy.received < 60_000  # of 4 MB


def test_a_source_reads_each_stored_shard_once(url, proxy):
    fill(url, 45)
    source, out = DatasetSource(url, names=["index", "x"]), torch.empty(45, dtype=torch.int64)
    proxy.requests.clear()
    for start in range(0, 45, 3):
        source.read(start, start + 3, {"index": out[start : start + 3]})
    assert out.tolist() == [*range(45)]
    assert len(proxy.requests) == 2 * 5  # header and fields of each shard


def test_resume_sweeps_what_no_manifest_lists(url, server, clean):
    fill(url, 45)
    place = place_of(url)
    for name in ("shards/000007.safetensors", "shards/notes.txt"):
        place.put_bytes(b"left over", name)
    with writer(url, resume=True):
        pass
    assert files_there(server, url) == clean | {"shards/notes.txt": b"left over"}


def test_a_prefix_in_use_is_not_overwritten(url):
    fill(url, 5)
    with pytest.raises(DatasetError, match="is not empty"):
        fill(url, 5)
    place_of(f"{url}-notes").put_bytes(b"mine", "a.txt")
    with pytest.raises(DatasetError, match=r"has no manifest\.json to resume"):
        fill(f"{url}-notes", 5, resume=True)


@pytest.mark.parametrize("damage", ["cut", "delete"])
def test_a_damaged_object_is_named(url, damage):
    fill(url, 25)
    place, name = place_of(url), "shards/000001.safetensors"
    data = place.read_bytes(name)
    place.remove(name) if damage == "delete" else place.put_bytes(data[:-8], name)
    with pytest.raises(ShardCorrupt, match=r"shard 000001\.safetensors: .*\(s3://bucket"):
        Dataset(url).verify()
    with pytest.raises(ShardCorrupt, match=r"000001"):
        Dataset(url).load(["index"])
    with pytest.raises(ShardCorrupt, match=r"000001"):
        fill(url, 40, resume=True, verify="sizes")


# Shards of several workers


def make_shard(where, number):
    start, stop = 10 * number, min(45, 10 * number + 10)
    return number, write_shard(place_of(where), number, rows_of(start, stop), {"tried": 2 * stop})


@pytest.fixture(params=["directory", "store"])
def out(request, tmp_path):
    return tmp_path / "out" if request.param == "directory" else request.getfixturevalue("url")


def files_of(server, out):
    return files_here(out) if isinstance(out, Path) else files_there(server, out)


def test_shards_of_other_writers_are_listed_in_any_order(out, server, clean):
    with writer(out) as writing:
        made = dict(make_shard(out, number) for number in (4, 2, 0, 3, 1, 2))
        for number in (3, 4, 0, 0, 2, 1, 4):
            writing.adopt(number, made[number])
        writing.finish(report="done")
    assert files_of(server, out) == clean


def test_the_manifest_lists_what_has_no_gap_before_it(out, monkeypatch):
    monkeypatch.setattr(shard_writer, "COMMIT_S", 0.0)
    with writer(out) as writing:
        for number, listed in ((1, 0), (4, 0), (0, 2), (3, 2), (2, 5)):
            writing.adopt(*make_shard(out, number))
            writing._commit()
            assert len(Dataset(out).shards) == listed
    assert len(Dataset(out)) == 45


def test_a_gap_at_the_end_is_made_again(out, server, clean):
    with pytest.raises(KeyboardInterrupt), writer(out) as writing:  # noqa: PT012
        for number in (0, 1, 3):
            writing.adopt(*make_shard(out, number))
        raise KeyboardInterrupt
    assert len(Dataset(out)) == 20
    with writer(out, resume=True) as writing:
        assert writing.items == 20
        assert "000003.safetensors" not in place_of(out).names("shards")
        for number in (4, 3, 2):
            writing.adopt(*make_shard(out, number))
        writing.finish(report="done")
    assert files_of(server, out) == clean


def test_a_partial_shard_is_vacated_before_others_write_it(out, server, clean):
    fill(out, 33)
    with writer(out, resume=True) as writing:
        writing.vacate()
        assert len(Dataset(out)) == 30
        for number in (4, 3):
            writing.adopt(*make_shard(out, number))
        writing.finish(report="done")
    assert files_of(server, out) == clean


def test_a_shard_made_twice_must_be_the_same(tmp_path):
    with writer(tmp_path / "out") as writing:
        writing.adopt(*make_shard(tmp_path / "out", 0))
        other = write_shard(place_of(tmp_path / "out"), 0, rows_of(1, 11), {"tried": 20})
        with pytest.raises(DatasetError, match=r"000000\.safetensors was made twice with different bytes"):
            writing.adopt(0, other)
        with pytest.raises(DatasetError, match=r"expected 000001\.safetensors"):
            writing.adopt(1, other)


# A store that fails


@pytest.mark.parametrize("kind", ["503", "reset", "cut"])
@pytest.mark.parametrize("times", [1, 4])
def test_failures_that_pass_change_nothing(url, proxy, server, clean, clock, kind, times):
    with writer(url) as writing:
        for start in range(0, 45, 15):
            proxy.fail(kind, times)
            writing.append(rows_of(start, start + 15), totals_of(start, start + 15))
        proxy.fail(kind, times)
        writing.finish(report="done")
    assert files_there(server, url) == clean
    proxy.fail(kind, times)
    assert Dataset(url).load(["index"])["index"].tolist() == [*range(45)]


def test_a_store_that_is_down_for_a_while_is_waited_for_and_said_once(url, proxy, server, clean, clock, caplog):
    def sleep(seconds):
        FakeTime.sleep(clock, seconds)
        if len(clock.pauses) == 6:
            proxy.up()

    clock.sleep = sleep
    with writer(url) as writing, caplog.at_level(logging.INFO, "brim"):
        for start in range(0, 45, 5):
            if start == 20:
                proxy.down()
            writing.append(rows_of(start, start + 5), totals_of(start, start + 5))
        writing.finish(report="done")
    assert files_there(server, url) == clean
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith(f"{url} does not answer (")
    assert "trying again for up to 60 s" in said[0]
    assert said[1] == f"{url} answers again"


def test_a_store_that_stays_down_ends_the_run_which_resumes(url, proxy, server, clean, clock, monkeypatch):
    monkeypatch.setenv("BRIM_STORAGE_RETRY_S", "1.5")
    told = pytest.raises(StorageError, match=r"does not answer, tried for 1.5 s .*continue with resume")
    with told, writer(url) as out:
        out.append(rows_of(0, 20), totals_of(0, 20))
        proxy.down()
        out.append(rows_of(20, 45), totals_of(20, 45))
    assert sum(clock.pauses) == pytest.approx(1.5)  # nothing after the first failure waits again
    proxy.up()
    let_leases_run_out(monkeypatch)
    fill(url, 45, resume=True)
    assert files_there(server, url) == clean


# A store that refuses


@pytest.fixture
def refused(server, clock, monkeypatch):
    """Asks a store with these keys in the environment; the error must come at once and show no secret."""

    def ask(message, work, **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
        forget()
        with pytest.raises(StorageError, match=message) as caught:
            work()
        assert clock.pauses == []
        assert SECRET not in str(caught.value)
        assert env.get("AWS_SECRET_ACCESS_KEY") is None or env["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)

    return ask


def test_a_bucket_that_is_not_there_is_refused_at_once(proxy, refused):
    for work in (fill, lambda url, _: Dataset(url)):
        refused("no such bucket; create it or correct the URL", lambda work=work: work("s3://nobodys/data", 5))


def test_no_permission_is_refused_at_once(url, proxy, server, refused):
    fill(url, 5)
    with server.guarded() as keys:
        refused("no permission to read; let these credentials do s3:GetObject", lambda: Dataset(url), **keys)
        refused("no permission to list", lambda: fill(f"{url}-new", 5), **keys)
    assert files_there(server, url)


def test_bad_credentials_are_refused_at_once(url, proxy, server, refused):
    with server.guarded("s3:*") as keys:
        wrong = {**keys, "AWS_SECRET_ACCESS_KEY": "another-secret-of-someone"}
        refused(r"does not accept the credentials \(SignatureDoesNotMatch\)", lambda: Dataset(url), **wrong)
    refused("no credentials; set AWS_ACCESS_KEY_ID", lambda: Dataset(f"{url}2"), **dict.fromkeys(keys))


# Two writers


def let_leases_run_out(monkeypatch):
    monkeypatch.setattr(destination, "time", clock := FakeTime())
    clock.now_s = time.time() + destination.LEASE_S + 1


def test_a_second_writer_is_kept_out_while_the_first_lives(url, monkeypatch):
    monkeypatch.setattr(destination, "time", clock := FakeTime())
    monkeypatch.setattr(destination, "LEASE_S", 0.9)
    with writer(url) as out:
        out.append(rows_of(0, 3), totals_of(0, 3))
        for _ in range(3):
            with pytest.raises(DatasetError, match=r"is being written by process \d+ of .*; wait for it to end"):
                fill(url, 12, resume=True)
            clock.sleep(0.8)
            until(lambda: json.loads(place_of(url).read_bytes(destination.LEASE_FILE))["until"] == clock() + 0.9)
    assert len(Dataset(fill(url, 12, resume=True))) == 12


def test_who_lost_the_lease_writes_no_manifest(url, monkeypatch):
    told = pytest.raises(StorageError, match="another has taken over")
    with told, writer(url) as out:
        out.append(rows_of(0, 5), totals_of(0, 5))
        place_of(url).put_bytes(
            json.dumps({"writer": "another", "token": "t", "until": time.time() + 60}).encode(), destination.LEASE_FILE
        )
        before = place_of(url).read_bytes("manifest.json")
        out.finish(report="done")
    assert place_of(url).read_bytes("manifest.json") == before
    assert json.loads(place_of(url).read_bytes(destination.LEASE_FILE))["writer"] == "another"


@pytest.mark.parametrize("left", [b"", b"null", b'{"until": "x"}', b'{"until": 5}'])
def test_a_lease_that_ran_out_or_says_nothing_is_taken(url, left):
    place_of(url).put_bytes(left, destination.LEASE_FILE)
    assert len(Dataset(fill(url, 5))) == 5
    assert not place_of(url).exists(destination.LEASE_FILE)

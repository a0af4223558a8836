"""A database that stops, a disk that fills, a clock that jumps."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from fault_service import QUICK, Reader, Serve, shards, until

from brim.engine.shards import Dataset
from brim.rf import from_mapping, generate

pytestmark = pytest.mark.slow
SAMPLES = 160


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "data"
    generate(from_mapping(QUICK), out, SAMPLES, device="cpu")
    return shards(out)


def folder(serve: Serve, job: str) -> Path:
    """Where a job writes, found by its dataset."""
    rows = serve.get("/api/datasets")["datasets"]
    return serve.data / "datasets" / next(row["id"] for row in rows if row["job_id"] == job)


# PostgreSQL


def test_postgres_stopped_and_started_costs_a_job_nothing(make_serve: Callable[..., Serve], postgres, undisturbed):
    serve = make_serve(postgres.fresh()).start()
    job = serve.generate(SAMPLES)["id"]
    serve.wait_progress(job, 16)
    worker = serve.children()["w0"]

    postgres.stop()
    try:
        with Reader(serve, f"/api/training/jobs/{job}") as reader:
            time.sleep(2)
        health = serve.try_status("/health")
        submitted, refusal = serve.ask("POST", "/api/training/jobs", {"dataset_name": "x", "num_samples": 8})
    finally:
        postgres.start()
    done = serve.wait_after_outage(job)

    assert set(reader.statuses) == {503}
    assert health == 200
    assert (submitted, set(refusal)) == (503, {"detail", "field"})
    assert serve.children()["w0"] == worker
    assert done["attempts"] == 1
    assert shards(serve.data / "datasets" / done["result"]["dataset_id"]) == undisturbed


# Disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", place], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_fills_fails_the_job_in_words_and_resuming_completes_it(small_disk, make_serve, undisturbed):
    serve = Serve(small_disk / "data", BRIM_MIN_FREE_BYTES="0")
    serve.log = small_disk.parent / "serve.log"
    serve.start()
    try:
        job = serve.generate(SAMPLES)["id"]
        serve.wait_progress(job, 16)
        hog = _fill(small_disk)

        failed = serve.wait(job, "failed")
        kept = Dataset(folder(serve, job))
        hog.unlink()
        serve.act(job, "resume")
        done = serve.wait(job, "completed")

        assert "no space" in failed["error"].lower() or "free" in failed["error"].lower(), failed["error"]
        assert str(small_disk) not in failed["error"]
        assert 16 <= len(kept) < SAMPLES
        assert shards(serve.data / "datasets" / done["result"]["dataset_id"]) == undisturbed
    finally:
        serve.close()


def _fill(place: Path) -> Path:
    """Take all that is free but what the databases need to say that the disk is full."""
    hog = place / "hog"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with hog.open("wb") as out:
        out.truncate(0)
        os.posix_fallocate(out.fileno(), 0, max(1, free - 200_000))
    return hog


def test_a_reserve_that_is_reached_stops_the_job_and_more_room_lets_it_go_on(make_serve, tmp_path, undisturbed):
    free = tmp_path / "free"
    free.write_text(str(10**12))
    serve: Serve = make_serve(BRIM_FREE_BYTES_FILE=str(free)).start()
    job = serve.generate(SAMPLES)["id"]
    serve.wait_progress(job, 16)

    free.write_text("1000")
    failed = serve.wait(job, "failed")
    status, refusal = serve.ask("POST", "/api/training/jobs", {"dataset_name": "x", "num_samples": 8})
    kept = Dataset(folder(serve, job))
    free.write_text(str(10**12))
    serve.act(job, "resume")
    done = serve.wait(job, "completed")

    assert "then resume the job" in failed["error"]
    assert status == 507, refusal
    assert 16 <= len(kept) < SAMPLES
    assert shards(serve.data / "datasets" / done["result"]["dataset_id"]) == undisturbed


# Clock


def test_a_clock_that_jumps_an_hour_either_way_disturbs_nothing(make_serve, tmp_path, undisturbed):
    clock = tmp_path / "clock"
    clock.write_text("0")
    serve: Serve = make_serve(BRIM_TEST_CLOCK=str(clock)).start()
    first = serve.generate(SAMPLES, name="first")["id"]
    second = serve.generate(16, name="second")["id"]
    serve.wait_progress(first, 8)

    for current, jump in ((32, "3600"), (80, "-3600")):
        clock.write_text(jump)
        serve.wait_progress(first, current)
    clock.write_text("-7200")
    third = serve.generate(16, name="third")["id"]
    done = [serve.wait(job, "completed") for job in (first, second, third)]

    assert [job["attempts"] for job in done] == [1, 1, 1]
    listed = [job["name"] for job in serve.get("/api/training/jobs")["jobs"]]
    assert listed == ["third", "second", "first"]
    assert [_seconds(job) >= 0 for job in done] == [True] * 3
    assert shards(serve.data / "datasets" / done[0]["result"]["dataset_id"]) == undisturbed


def _seconds(job: dict) -> float:
    begin, end = (datetime.fromisoformat(job[name]) for name in ("started_at", "finished_at"))
    return (end - begin).total_seconds()


def test_a_job_cancelled_before_the_clock_went_back_is_still_stopped(make_serve, tmp_path):
    clock = tmp_path / "clock"
    clock.write_text("0")
    serve: Serve = make_serve(BRIM_TEST_CLOCK=str(clock)).start()
    job = serve.generate(100_000)["id"]
    serve.wait_progress(job, 8)

    clock.write_text("-3600")
    serve.act(job, "cancel")

    began = time.monotonic()
    until(lambda: serve.job(job)["status"] == "cancelled", 20, serve.said)
    assert time.monotonic() - began < 5

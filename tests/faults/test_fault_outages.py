"""A database that stops, a disk that fills, a clock that jumps."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from fault_service import QUICK, Reader, Serve, shards

from brim.rf import from_mapping, generate
from waiting import until

pytestmark = pytest.mark.long

SAMPLES = 120


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "data"
    generate(from_mapping(QUICK), out, SAMPLES, device="cpu")
    return shards(out)


# PostgreSQL


def test_postgres_stopped_and_started_costs_a_job_nothing(make_serve: Callable[..., Serve], postgres, undisturbed):
    serve = make_serve(postgres.fresh()).start()
    job = serve.generate(SAMPLES)["id"]
    serve.wait_progress(job, 16)
    worker = serve.children()["w0"]

    postgres.stop()
    try:
        with Reader(serve, f"/api/training/jobs/{job}") as reader:
            until(lambda: len(reader.statuses) >= 5)
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
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path, str], Path]]:
    """Mounts a file system of its own, as small as asked for."""
    mounted: list[Path] = []

    def mount(place: Path, size: str) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True
        ).returncode:
            pytest.skip("a small file system cannot be mounted here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path, leave: int) -> Path:
    """Take what is free but a few bytes."""
    hog, room = place / "hog", os.statvfs(place)
    with hog.open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, max(1, room.f_bavail * room.f_frsize - leave))
    return hog


def test_a_disk_full_with_databases_and_all_costs_time_and_nothing_else(small_disk, tmp_path, undisturbed):
    disk = small_disk(tmp_path / "disk", "24m")
    serve = Serve(disk / "data", BRIM_MIN_FREE_BYTES="0")
    serve.log = tmp_path / "serve.log"
    try:
        serve.start()
        job = serve.generate(SAMPLES)["id"]
        serve.wait_progress(job, 16)
        hog = fill(disk, leave=100_000)
        time.sleep(15)
        hog.unlink()
        done = serve.wait(job, "completed")
        assert shards(serve.data / "datasets" / done["result"]["dataset_id"]) == undisturbed
    finally:
        serve.close()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A service whose free disk and clock are what the files `free` and `clock` beside its data say."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "free").write_text(str(10**12))
    (folder / "clock").write_text("0")
    files = {"BRIM_FREE_BYTES_FILE": str(folder / "free"), "BRIM_TEST_CLOCK": str(folder / "clock")}
    made = Serve(folder / "data", **files)
    try:
        yield made.start()
    finally:
        made.close()


# Clock


def test_a_clock_that_jumps_an_hour_either_way_disturbs_nothing(odd, undisturbed):
    serve, clock = odd, odd.data.with_name("clock")
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
    assert listed[:3] == ["third", "second", "first"]
    assert [_seconds(job) >= 0 for job in done] == [True] * 3
    assert shards(serve.data / "datasets" / done[0]["result"]["dataset_id"]) == undisturbed


def _seconds(job: dict) -> float:
    begin, end = (datetime.fromisoformat(job[name]) for name in ("started_at", "finished_at"))
    return (end - begin).total_seconds()


def test_a_job_cancelled_before_the_clock_went_back_is_still_stopped(odd):
    serve, clock = odd, odd.data.with_name("clock")
    clock.write_text("0")
    job = serve.endless()
    serve.wait_progress(job, 8)

    clock.write_text("-3600")
    serve.act(job, "cancel")
    serve.wait(job, "cancelled")

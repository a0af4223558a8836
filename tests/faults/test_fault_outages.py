"""A database that stops, a disk that fills."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_service import JOBS, SAMPLES, Serve, shards

from waiting import until

pytestmark = pytest.mark.long


def test_postgres_stopped_and_started_costs_a_job_nothing(make_serve: Callable[..., Serve], postgres, undisturbed):
    serve = make_serve(postgres.fresh()).start()
    job = serve.generate(SAMPLES)["id"]
    serve.wait_progress(job, 16)
    worker = serve.children()["w0"]

    postgres.stop()
    try:
        statuses = {serve.try_status(f"{JOBS}/{job}") for _ in range(5)}
        health = serve.try_status("/health")
        submitted, refusal = serve.ask("POST", JOBS, {"dataset_name": "x", "num_samples": 8})
    finally:
        postgres.start()
    until(lambda: serve.try_status(f"{JOBS}/{job}") == 200, serve.said)
    done = serve.wait(job, "completed")

    assert statuses == {503}
    assert health == 200
    assert (submitted, set(refusal)) == (503, {"detail", "field"})
    assert serve.children()["w0"] == worker
    assert done["attempts"] == 1
    assert shards(serve.data / "datasets" / done["result"]["dataset_id"]) == undisturbed


def fill(place: Path, leave: int) -> Path:
    """Take what is free but a few bytes."""
    hog, room = place / "hog", os.statvfs(place)
    with hog.open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, max(1, room.f_bavail * room.f_frsize - leave))
    return hog


def test_a_disk_full_with_databases_and_all_costs_time_and_nothing_else(tmp_path, undisturbed):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", disk], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
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
        subprocess.run(["umount", "--lazy", disk], check=True)

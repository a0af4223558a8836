"""Processes that are killed, told to end or started twice: jobs go on."""

import http.client
import os
import subprocess
from collections.abc import Iterator

import pytest
from fault_service import QUICK, SAMPLES, Serve, is_running

from waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One service for the tests that leave it as it was."""
    made = Serve(tmp_path_factory.mktemp("shared") / "data")
    try:
        yield made.start()
    finally:
        made.close()


def test_a_second_service_on_the_same_data_is_refused(serve):
    done = subprocess.run(
        serve.command(), capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **serve.env}
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{serve.data} is in use by process {serve.process.pid}; stop it or choose another --data" in done.stderr
    assert serve.try_status("/health") == 200


def test_sigterm_drains_and_the_next_start_goes_on(serve, undisturbed):
    job = serve.endless()
    before = serve.wait_progress(job, 16)["progress"]["current"]
    children = serve.children()

    assert serve.terminate() == 143

    assert not any(is_running(pid) for pid in children.values())
    serve.start()
    assert serve.job(job)["progress"]["current"] >= before
    assert undisturbed.items() <= serve.cut(job, SAMPLES).items()
    assert serve.job(job)["attempts"] == 2


@pytest.mark.long
def test_an_api_killed_while_it_submits_loses_no_job_and_makes_no_second(make_serve):
    serve: Serve = make_serve(BRIM_FAIL_AT="submit.enqueue").start()
    body = {"dataset_name": "once", "num_samples": 16, "config": QUICK}

    with pytest.raises((OSError, http.client.HTTPException)):
        serve.submit(body, key="the same")
    until(lambda: serve.try_status("/ready") == 200)
    again = serve.submit(body, key="the same")

    assert serve.wait(again["id"], "completed")["attempts"] == 1
    assert serve.get("/api/training/jobs")["total"] == 1


def test_files_of_the_service_are_for_their_owner_alone(serve):
    assert serve.data.stat().st_mode & 0o777 == 0o700
    for file in (serve.data / "token", *serve.data.glob("*.sqlite*")):
        assert file.stat().st_mode & 0o777 == 0o600, file

"""Processes that end, hang, are told to end or are started twice: the API answers, and jobs go on."""

import http.client
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from fault_service import QUICK, Reader, Serve, is_running, shards

from brim.rf import from_mapping, generate
from waiting import PATIENCE_S, until

SAMPLES = 96


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One service for the tests that leave it as it was."""
    made = Serve(tmp_path_factory.mktemp("shared") / "data")
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "data"
    generate(from_mapping(QUICK), out, SAMPLES, device="cpu")
    return shards(out)


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
def test_a_worker_that_hangs_is_replaced_while_the_api_answers(make_serve, tmp_path, undisturbed):
    """By a signal that stops it, then by code that holds Python's lock: no thread of it could say that it lives."""
    hang = tmp_path / "hang"
    serve: Serve = make_serve(BRIM_HANG_S="4", BRIM_TEST_HANG=str(hang)).start()
    job = serve.endless()

    with Reader(serve, "/api/training/jobs") as reader:
        for current, way in ((8, lambda worker: os.kill(worker, signal.SIGSTOP)), (48, lambda _: hang.touch())):
            serve.wait_progress(job, current)
            worker = serve.children()["w0"]
            way(worker)
            until(lambda worker=worker: serve.children().get("w0", worker) != worker, serve.said)
        made = serve.cut(job, SAMPLES)

    assert set(reader.statuses) == {200}
    assert serve.job(job)["attempts"] >= 3
    assert serve.said().count("it hung: no progress for") >= 2  # more on a machine that is busy for long
    assert undisturbed.items() <= made.items()


def test_a_killed_api_comes_back_and_the_job_does_not_notice(serve):
    job = serve.generate(SAMPLES)["id"]
    serve.wait_progress(job, 8)
    api = serve.children()["api"]

    os.kill(api, signal.SIGKILL)
    status, _ = serve.ask("GET", "/health")  # the supervisor holds the port: callers wait and are not refused

    assert status == 200
    assert serve.wait(job, "completed")["attempts"] == 1


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


@pytest.mark.long
def test_jobs_of_workers_that_are_no_more_go_on_after_a_start_with_fewer(make_serve, undisturbed):
    serve: Serve = make_serve(workers=2).start()
    jobs = [serve.endless(f"made {index}") for index in range(2)]
    for job in jobs:
        serve.wait_progress(job, 8)

    serve.kill()
    serve.workers = 1
    serve.start()

    while jobs:
        job = until(lambda: next((job for job in jobs if serve.job(job)["attempts"] == 2), None), serve.said)
        assert undisturbed.items() <= serve.cut(job, SAMPLES).items()
        jobs.remove(job)


def test_files_of_the_service_are_for_their_owner_alone(serve):
    assert serve.data.stat().st_mode & 0o777 == 0o700
    for file in (serve.data / "token", *serve.data.glob("*.sqlite*")):
        assert file.stat().st_mode & 0o777 == 0o600, file

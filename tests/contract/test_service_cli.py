"""`brim serve` and `brim jobs` as others build on them: flags, JSON, exit codes, words."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from cli_commands import Ended, brim, refused
from fault_service import QUICK, Serve

from waiting import PATIENCE_S, until

KEYS = {
    "id", "kind", "name", "status", "progress", "config", "result", "error", "created_at", "started_at", "finished_at",
    "attempts",
}  # fmt: skip


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("service") / "data")
    try:
        yield made.start()
    finally:
        made.close()


def jobs(serve: Serve, *argv: str | Path) -> Ended:
    return brim("jobs", *argv, "--data", serve.data, "--url", f"http://127.0.0.1:{serve.port}")


def submit(serve: Serve, tmp_path: Path, samples: int, *argv: str) -> dict:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"dataset_name": "from a terminal", "num_samples": samples, "config": QUICK}))
    done = jobs(serve, "submit", file, *argv, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


# A job's life


def test_a_job_from_submission_to_deletion(serve, tmp_path):
    job = submit(serve, tmp_path, 24)
    watched = jobs(serve, "watch", job["id"], "--json")
    shown = jobs(serve, "show", job["id"], "--json")
    listed = jobs(serve, "list", "--status", "completed", "--kind", "rf.generate", "--json")
    logged = jobs(serve, "logs", job["id"], "--json")
    deleted = jobs(serve, "delete", job["id"], "--json")

    assert set(job) == KEYS
    assert watched.code == 0, watched.err
    assert json.loads(watched.out)["status"] == "completed"
    assert "dataset_id" in json.loads(shown.out)["result"]
    assert job["id"] in [each["id"] for each in json.loads(listed.out)["jobs"]]
    assert any("starts on the CPU" in line["text"] for line in json.loads(logged.out)["lines"])
    assert json.loads(deleted.out) == {"id": job["id"], "deleted": True}
    assert jobs(serve, "show", job["id"]).code == 2


def test_pause_resume_and_cancel(serve, tmp_path):
    job = submit(serve, tmp_path, 100_000)["id"]
    serve.wait_progress(job, 8)

    assert jobs(serve, "pause", job).code == 0
    paused = jobs(serve, "watch", job, "--json")
    assert (paused.code, json.loads(paused.out)["status"]) == (1, "paused")
    assert jobs(serve, "resume", job).code == 0
    serve.wait(job, "running")
    assert jobs(serve, "cancel", job).code == 0
    cancelled = jobs(serve, "watch", job, "--json")
    assert (cancelled.code, json.loads(cancelled.out)["status"]) == (1, "cancelled")


def test_the_same_key_gives_the_same_job(serve, tmp_path):
    first, second = (submit(serve, tmp_path, 8, "--key", "nightly 1")["id"] for _ in range(2))

    assert first == second


def test_watch_goes_on_when_the_api_is_killed(serve, tmp_path):
    job = submit(serve, tmp_path, 160)["id"]
    serve.wait_progress(job, 8)
    killer = threading.Timer(1.5, serve.kill_child, ["api"])
    killer.start()

    watched = jobs(serve, "watch", job, "--json")

    killer.join()
    assert watched.code == 0, watched.err
    assert json.loads(watched.out)["status"] == "completed"


def test_ctrl_c_ends_the_watching_and_not_the_job(serve, tmp_path):
    job = submit(serve, tmp_path, 100_000)["id"]
    serve.wait_progress(job, 8)
    command = [sys.executable, "-m", "brim", "jobs", "watch", job, "--data", str(serve.data)]
    env = {**os.environ, "BRIM_URL": f"http://127.0.0.1:{serve.port}"}
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert watcher.stderr is not None
    assert "from a terminal running" in watcher.stderr.readline()

    watcher.send_signal(signal.SIGINT)
    _, said = watcher.communicate(timeout=PATIENCE_S)

    assert watcher.returncode == 130
    assert "the job continues" in said
    assert serve.job(job)["status"] == "running"
    serve.act(job, "cancel")
    serve.wait(job, "cancelled")


# What goes wrong: one sentence, exit code 2


def test_refusals_of_the_service_are_its_own_sentences(serve, tmp_path):
    unknown = "0" * 32
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"dataset_name": "x", "num_samples": 8, "config": {"frequency_mhzz": 1}}))

    for argv, words in {
        ("show", unknown): "no job has this id",
        ("cancel", unknown): "no job has this id",
        ("submit", str(file)): "frequency_mhzz",
        ("list", "--kind", "rf.nothing"): "rf.nothing",
    }.items():
        done = jobs(serve, *argv)
        assert (done.code, done.out) == (2, ""), (argv, done)
        assert words in done.err
        assert done.err.strip().count("\n") == 0
        assert done.err.startswith("error: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["submit", "missing.json"], "missing.json"),
        (["show", ".."], '".."'),
        (["show", "../../health"], '"../../health"'),
        (["logs", "x", "--follow", "--json"], "--follow"),
        (["list", "--url", "ftp://x"], "--url="),
        (["list", "--url", "http://127.0.0.1:1"], "brim serve"),
    ],
)
def test_mistakes_of_the_command_line_are_one_sentence(argv, words, monkeypatch):
    monkeypatch.setenv("BRIM_TOKEN", "t")

    assert words in refused("jobs", *argv)


def test_no_token_is_said_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("BRIM_TOKEN", raising=False)

    assert f"{tmp_path}/token" in refused("jobs", "list", "--data", tmp_path)


@pytest.fixture
def _no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--database", "mysql://x/y"], "--database"),
        (["--host", "0.0.0.0"], "0.0.0.0"),
        (["--allow-host", "a b"], '"a b"'),
    ],
)
def test_mistakes_of_serve_are_one_sentence(argv, words, tmp_path):
    assert words in refused("serve", "--data", tmp_path / "data", "--port", "0", *argv)


def test_more_workers_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    assert "--workers=3 is more than the 2 GPUs" in refused("serve", "--data", tmp_path, "--workers", "3")


@pytest.mark.usefixtures("_no_gpu")
def test_a_data_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()

    assert str(tmp_path / "file") in refused("serve", "--data", tmp_path / "file" / "data")


def test_a_chosen_token_is_not_printed(tmp_path):
    made = Serve(tmp_path / "data", BRIM_TOKEN="chosen-by-me")
    try:
        made.start(ready=False)
        made.token = "chosen-by-me"
        until(lambda: made.try_status("/health") == 200)
        assert made.ask("GET", "/api/training/jobs")[0] == 200
        assert not (made.data / "token").exists()
        assert "chosen-by-me" not in made.said()
    finally:
        made.close()

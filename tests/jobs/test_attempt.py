"""The work of an attempt in one thread, watched from another."""

import json
import sqlite3
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest

from brim.errors import ConfigError, StorageError
from brim.jobs.kinds import Stopped
from brim.jobs.status import JobProgress
from brim.jobs.worker import main
from brim.jobs.worker import run as module
from brim.jobs.worker.joblog import log_file
from brim.jobs.worker.run import Attempt, WorkerSettings
from waiting import PATIENCE_S


class Toy(Attempt):
    """An attempt at a job that does what a test says, and is given up instead of killed."""

    def __init__(self, data, body, attempts=0, **config):
        nothing = SimpleNamespace(get=lambda id: None, tell=lambda id, progress: None)
        self.beats, self.given_up = [], threading.Event()
        job = SimpleNamespace(
            id="0" * 32, name="toy", attempts=attempts, out="results/toy", makes="result", inputs={}, config=config,
            progress=JobProgress(),
        )  # fmt: skip
        (data / "workers").mkdir(exist_ok=True)
        settings = WorkerSettings(worker="w0", data=data, device="cpu", beat=lambda: self.beats.append(1))
        super().__init__(job, settings, SimpleNamespace(datasets=nothing, runs=nothing, jobs=nothing))
        self._body = body

    def _work(self):
        return self._body(self)

    def _give_up(self):
        self.given_up.set()

    def stopped(self):
        assert self._stop.wait(PATIENCE_S)
        raise Stopped


@pytest.fixture
def start(tmp_path):
    """Start an attempt in a thread, as the main thread does in a worker."""
    threads = []

    def begin(body, *, leave=False, **config):
        attempt = Toy(tmp_path, body, **config)
        if leave:
            attempt.leave()
        threads.append((attempt, threading.Thread(target=attempt.run)))
        threads[-1][1].start()
        return attempt

    yield begin
    for attempt, thread in threads:
        attempt.close()
        thread.join()


def never() -> bool:
    return False


def test_the_end_of_the_work_is_noticed_at_once(start, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 1e6)  # who waited for the next look would never end

    assert start(lambda _: {"made": 3}).wait(never)["result"] == {"made": 3}


def test_the_catalogue_is_told_of_the_progress_every_second(start, monkeypatch):
    clock, told, over = SimpleNamespace(now_s=100.0), [], threading.Event()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    poll_s = 1.01 * module.POLL_S  # waiting takes a little longer than was asked for
    monkeypatch.setattr(module, "POLL_S", 0.001)
    attempt = start(lambda _: over.wait(PATIENCE_S) and {})
    attempt._catalogue.jobs.tell = lambda id, progress: told.append(clock.now_s)

    def look() -> bool:
        clock.now_s += poll_s
        if clock.now_s > 110:
            over.set()
        return False

    attempt.wait(look)

    assert told[0] == 100
    assert told[-1] > 110
    assert max(later - sooner for sooner, later in pairwise(told)) <= 1


@pytest.mark.parametrize(
    ("attempts", "words"),
    [
        (0, 'the job "toy" starts on the CPU'),
        (1, 'the job "toy" starts on the CPU again, attempt 2: continues with what is saved'),
    ],
)
def test_the_log_begins_in_words_without_ids(start, tmp_path, caplog, attempts, words):
    caplog.set_level("INFO", "brim")
    start(lambda _: {}, attempts=attempts).wait(never)

    first, *_ = log_file(tmp_path, "0" * 32).read_text().splitlines()
    assert json.loads(first)["text"] == words


def test_a_cancel_stops_the_work_and_waits_for_its_end(start):
    record = start(Toy.stopped).wait(lambda: True)

    assert (record["ended"], record["result"]) == (True, None)


def test_a_failure_is_recorded_with_its_field_code_and_hint(start):
    def body(_):
        raise ConfigError("is too large", field="size", value=9, code="conflict", hint="lower {size}")

    record = start(body, size=9).wait(never)

    assert record["error"] == "config.size=9 is too large; lower config.size"
    assert record["failure"] == {"field": "config.size", "code": "conflict", "hint": "lower config.size"}


def test_an_unexpected_failure_wears_the_process_out(start):
    attempt = start(lambda _: 1 / 0)

    assert attempt.wait(never)["failure"]["code"] == "unexpected"
    assert attempt.is_unexpected


def test_a_full_disk_is_the_failure(start, monkeypatch):
    monkeypatch.setattr(module.disk, "watch", lambda *_: StorageError("the disk is nearly full"))

    assert start(Toy.stopped).wait(never)["error"] == "the disk is nearly full"


def test_a_report_of_the_work_is_kept_and_beats(start):
    def body(attempt):
        attempt.tell(JobProgress(current=2, total=5))
        return {}

    attempt = start(body)
    attempt.wait(never)

    assert attempt.progress.percent == 40
    assert attempt.beats == [1]


def test_work_that_does_not_stop_is_given_up(start, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    attempt = start(lambda attempt: {"gave up": attempt.given_up.wait(PATIENCE_S)})

    assert attempt.wait(lambda: True)["ended"] is True
    assert attempt.given_up.is_set()


def test_work_that_is_left_is_not_given_up(start, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    running = threading.Event()

    def body(attempt):
        running.set()
        return {"gave up": attempt.given_up.wait(0.3)}

    attempt = start(body)
    assert running.wait(PATIENCE_S)
    attempt.leave()
    attempt.wait(never)

    assert not attempt.given_up.is_set()


def test_an_attempt_stopped_before_its_turn_does_nothing(start):
    assert start(lambda _: {"ran": True}, leave=True).wait(never)["result"] is None


# What the queue kept, or would not keep


class Ended(BaseException):
    """The process ended."""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker without a queue, and the errors of the jobs that it failed."""
    monkeypatch.setattr(main.os, "_exit", lambda code: (_ for _ in ()).throw(Ended))
    settings = WorkerSettings(worker="w0", data=tmp_path, device="cpu", beat=lambda: None)
    made = main.Worker(settings, SimpleNamespace(), f"sqlite:///{tmp_path}/jobs.sqlite")
    errors = []
    monkeypatch.setattr(made, "_fail", lambda job_id, error, failure: errors.append(error))
    monkeypatch.setattr(made, "_settle", lambda job_id: None)
    return made, errors


def test_a_recorded_exception_fails_its_job_and_the_worker_lives(worker, monkeypatch):
    made, errors = worker
    monkeypatch.setattr(main, "run_step", lambda name, step: 1 / 0)

    with pytest.raises(main.JobFailed):
        made._job("0" * 32)
    assert errors == ["unexpected ZeroDivisionError: division by zero; the job's log has more"]


def test_a_record_that_the_queue_cannot_take_ends_the_worker_and_not_the_job(worker, monkeypatch):
    made, errors = worker

    def full(name, step):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(main, "run_step", full)
    with pytest.raises(Ended):
        made._job("0" * 32)
    assert errors == []


def test_nothing_that_a_job_raises_leaves_its_steps(worker, monkeypatch):
    made, _ = worker

    def broken(*_, **__):
        raise RecursionError("of its files")

    row = SimpleNamespace(id="0" * 32, makes="dataset", out="datasets/x")
    made._catalogue = SimpleNamespace(jobs=SimpleNamespace(get=lambda id: row, move=lambda *_, **__: True))
    monkeypatch.setattr(main, "Attempt", broken)
    monkeypatch.setattr(main, "output_of", broken)

    assert made._run("0" * 32)["error"].startswith("unexpected RecursionError")
    assert made._publish("0" * 32, {})["error"].startswith("unexpected RecursionError")

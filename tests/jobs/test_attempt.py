"""The work of an attempt in one thread, watched from another; what the worker makes of its end."""

import json
import sqlite3
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
from desk import Asked

from brim.errors import ConfigError, StorageError, Unavailable
from brim.jobs.durable import DbosState
from brim.jobs.kinds import Stopped
from brim.jobs.status import JobProgress
from brim.jobs.worker import main
from brim.jobs.worker import run as module
from brim.jobs.worker.joblog import log_file
from brim.jobs.worker.run import Attempt, WorkerSettings, failed, surely
from waiting import PATIENCE_S

JOB = "0" * 32


class Toy(Attempt):
    """An attempt at a job that does what a test says, and is given up instead of killed."""

    def __init__(self, data, body, *, attempts=0, before=None, reads=None, **config):
        self.beats, self.given_up, self.told = [], threading.Event(), []
        job = SimpleNamespace(
            id=JOB, name="toy", attempts=attempts, out="results/toy", makes="result", config=config,
            inputs={"dataset_ids": list(reads or ())}, progress=before or JobProgress(),
        )  # fmt: skip
        (data / "workers").mkdir(exist_ok=True)
        settings = WorkerSettings(
            worker="w0", data=data, device="cpu", gpus=("0", "1"), own_gpu="1", beat=lambda: self.beats.append(1)
        )
        rows = {id: SimpleNamespace(path=path, name=id) for id, path in (reads or {}).items()}
        jobs = SimpleNamespace(tell=lambda id, progress: self.told.append(progress))
        super().__init__(job, settings, SimpleNamespace(datasets=rows, runs={}, jobs=jobs))
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

    def begin(body, *, leave=False, **options):
        attempt = Toy(tmp_path, body, **options)
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

    assert start(lambda _: {"made": 3}).wait(never) == {
        "ended": True, "result": {"made": 3}, "error": None, "failure": None,
    }  # fmt: skip


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


def test_until_the_work_knows_its_place_that_of_the_attempt_before_is_shown(start):
    before = JobProgress(current=5, total=9, rate=3.0, message="counting")
    waits = start(lambda _: {}, before=before)
    waits.wait(never)
    knows = start(lambda attempt: attempt.tell(JobProgress(current=0, total=7)) or {}, before=before)
    knows.wait(never)

    assert waits.told[-1] == JobProgress(current=5, total=9, message="starting")
    assert knows.told[-1] == JobProgress(current=0, total=7)
    assert knows.beats == [1]


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

    first, *_ = log_file(tmp_path, JOB).read_text().splitlines()
    assert json.loads(first)["text"] == words


def test_an_input_that_is_gone_fails_the_job_by_its_id(start, tmp_path):
    (tmp_path / "datasets" / "a").mkdir(parents=True)
    there = start(lambda attempt: {"paths": len(attempt._inputs().datasets)}, reads={"a": "datasets/a"})
    gone = start(Attempt._inputs, reads={"a": "datasets/a", "b": "datasets/b"})

    assert there.wait(never)["result"] == {"paths": 1}
    assert gone.wait(never)["error"].startswith("the dataset b that the job reads no longer exists")


@pytest.mark.parametrize(
    ("config", "held"), [({}, ["1"]), ({"devices": 2}, ["0", "1"]), ({"accelerator": "cpu"}, []), ({"cluster": 1}, [])]
)
def test_a_job_holds_the_gpus_it_needs_and_no_more(start, tmp_path, monkeypatch, config, held):
    monkeypatch.setattr(module, "free_cached", lambda: None)

    def body(attempt):
        with attempt._gpus():
            return {"held": [name for name in ("0", "1") if not module._is_free(tmp_path / "workers", name)]}

    assert start(body, **config).wait(never)["result"] == {"held": held}


def test_a_cancel_stops_the_work_and_waits_for_its_end(start):
    record = start(Toy.stopped).wait(lambda: True)

    assert (record["ended"], record["result"]) == (True, None)


def test_a_failure_is_recorded_with_its_field_code_and_hint(start):
    def body(_):
        raise ConfigError("is too large", field="size", value=9, code="conflict", hint="lower {size}")

    attempt = start(body, size=9)
    record = attempt.wait(never)

    assert record["error"] == "config.size=9 is too large; lower config.size"
    assert record["failure"] == {"field": "config.size", "code": "conflict", "hint": "lower config.size"}
    assert not attempt.is_unexpected


def test_an_unexpected_failure_wears_the_process_out_and_is_one_short_line(start):
    attempt = start(lambda _: 1 / 0)

    assert attempt.wait(never)["failure"]["code"] == "unexpected"
    assert attempt.is_unexpected
    said = failed(ValueError("a" * 9000 + "\nthe second line"))["error"]
    assert said == f"unexpected ValueError: {'a' * 500}; the job's log has more"


def test_a_full_disk_is_the_failure(start, monkeypatch):
    monkeypatch.setattr(module.disk, "watch", lambda *_: StorageError("the disk is nearly full"))

    assert start(Toy.stopped).wait(never)["error"] == "the disk is nearly full"


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


def test_what_must_not_be_lost_is_tried_until_the_database_is_back(monkeypatch):
    waited, answers = [], [Unavailable("away")] * 6 + ["kept"]
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waited.append))

    def write():
        if isinstance(answer := answers.pop(0), Unavailable):
            raise answer
        return answer

    assert surely(write) == "kept"
    assert waited == [1, 2, 5, 10, 10, 10]


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
        made._job(JOB)
    assert errors == ["unexpected ZeroDivisionError: division by zero; the job's log has more"]


def test_a_record_that_the_queue_cannot_take_ends_the_worker_and_not_the_job(worker, monkeypatch):
    made, errors = worker

    def full(name, step):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(main, "run_step", full)
    with pytest.raises(Ended):
        made._job(JOB)
    assert errors == []


def test_slices_that_an_earlier_brim_recorded_are_passed_over(worker, monkeypatch):
    made, _ = worker
    record = {"result": {"made": 3}, "error": None}
    records = [{**record, "ended": False, "result": None}] * 200 + [{**record, "ended": True}, None]
    monkeypatch.setattr(main, "run_step", lambda name, step: records.pop(0))

    assert made._job(JOB) == {"made": 3}


def test_nothing_that_a_job_raises_leaves_its_steps(worker, monkeypatch):
    made, _ = worker

    def broken(*_, **__):
        raise RecursionError("of its files")

    row = SimpleNamespace(id=JOB, makes="dataset", out="datasets/x")
    made._catalogue = SimpleNamespace(jobs=SimpleNamespace(get=lambda id: row, move=lambda *_, **__: True))
    monkeypatch.setattr(main, "Attempt", broken)
    monkeypatch.setattr(main, "output_of", broken)

    assert made._run(JOB)["error"].startswith("unexpected RecursionError")
    assert made._publish(JOB, {})["error"].startswith("unexpected RecursionError")


def test_a_result_is_published_with_the_run_and_never_over_damaged_files(worker, catalogue, tmp_path):
    made, _ = worker
    made._catalogue = catalogue
    jobs = [catalogue.jobs.submit(Asked(f"toy.{makes}", "n", {}), makes=makes)[0] for makes in ("run", "dataset")]
    for job, file in zip(jobs, ("train/last/state.json", "manifest.json"), strict=True):
        catalogue.jobs.move(job.id, "running", of=["pending"], worker="w0")
        (tmp_path / job.out / file).parent.mkdir(parents=True)
        (tmp_path / job.out / file).write_text('{"step": 40, "items": "many"}')
    run, dataset = jobs

    assert made._publish(run.id, {"dice": 0.9}) == {}
    assert catalogue.jobs.get(run.id).status == "completed"
    assert catalogue.runs.get(run.output_id).summary.items() >= {"step": 40, "dice": 0.9}.items()
    assert "is damaged" in made._publish(dataset.id, {})["error"]
    assert catalogue.jobs.get(dataset.id).status == "running"


def test_a_stop_at_the_last_moment_wins_and_is_settled_by_whoever_has_the_job(worker, catalogue, tmp_path):
    made, _ = worker
    cancelled, states = [], {}
    made._catalogue, made._queue = catalogue, SimpleNamespace(cancel=cancelled.append, states=lambda ids: states)
    job, _ = catalogue.jobs.submit(Asked("toy.count", "n", {}), makes="dataset")
    catalogue.jobs.move(job.id, "running", of=["pending"], worker="w0")
    catalogue.jobs.want(job.id, "cancel")

    assert made._publish(job.id, {}) == {}
    assert (cancelled, catalogue.jobs.get(job.id).status) == ([job.id], "running")
    for state, status in (("PENDING", "running"), ("CANCELLED", "cancelled")):
        states[job.id] = DbosState(state, "w1")
        main.Worker._settle(made, job.id)
        assert catalogue.jobs.get(job.id).status == status

"""The work of an attempt in one thread, watched from another."""

import threading
import time
from types import SimpleNamespace

import pytest

from brim.errors import ConfigError, StorageError
from brim.jobs.kinds import Stopped
from brim.jobs.status import JobProgress
from brim.jobs.worker import run as module
from brim.jobs.worker.run import Attempt, WorkerSettings, slice_s


class Toy(Attempt):
    """An attempt at a job that does what a test says, and is given up instead of killed."""

    def __init__(self, data, body, **config):
        nothing = SimpleNamespace(get=lambda id: None, tell=lambda id, progress: None)
        self.beats, self.given_up = [], threading.Event()
        job = SimpleNamespace(
            id="0" * 32, name="toy", attempts=0, out="results/toy", makes="result", inputs={}, config=config,
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
        assert self._stop.wait(10)
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


def test_slices_grow_with_the_length_of_a_job():
    assert (slice_s(0), slice_s(100), slice_s(10**6)) == (1.0, 5.0, 600.0)


def test_a_slice_ends_while_the_work_goes_on(start):
    go_on = threading.Event()
    attempt = start(lambda _: {"ok": go_on.wait(10)})

    assert attempt.wait(0.05, never)["ended"] is False
    go_on.set()

    assert attempt.wait(10, never)["result"] == {"ok": True}


def test_the_end_of_the_work_ends_the_slice_at_once(start):
    attempt = start(lambda _: {"made": 3})

    began = time.monotonic()
    assert attempt.wait(60, never)["ended"] is True
    assert time.monotonic() - began < 5


def test_a_cancel_stops_the_work_and_waits_for_its_end(start):
    record = start(Toy.stopped).wait(60, lambda: True)

    assert (record["ended"], record["result"]) == (True, None)


def test_a_failure_is_recorded_with_its_field_code_and_hint(start):
    def body(_):
        raise ConfigError("is too large", field="size", value=9, code="conflict", hint="lower {size}")

    record = start(body, size=9).wait(60, never)

    assert record["error"] == "config.size=9 is too large; lower config.size"
    assert record["failure"] == {"field": "config.size", "code": "conflict", "hint": "lower config.size"}


def test_an_unexpected_failure_wears_the_process_out(start):
    attempt = start(lambda _: 1 / 0)

    assert attempt.wait(60, never)["failure"]["code"] == "unexpected"
    assert attempt.is_unexpected


def test_a_full_disk_is_the_failure(start, monkeypatch):
    monkeypatch.setattr(module.disk, "watch", lambda *_: StorageError("the disk is nearly full"))

    assert start(Toy.stopped).wait(60, never)["error"] == "the disk is nearly full"


def test_a_report_of_the_work_is_kept_and_beats(start):
    def body(attempt):
        attempt.tell(JobProgress(current=2, total=5))
        return {}

    attempt = start(body)
    attempt.wait(60, never)

    assert attempt.progress.percent == 40
    assert attempt.beats == [1]


def test_work_that_does_not_stop_is_given_up(start, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    attempt = start(lambda attempt: {"gave up": attempt.given_up.wait(10)})

    assert attempt.wait(60, lambda: True)["ended"] is True
    assert attempt.given_up.is_set()


def test_work_that_is_left_is_not_given_up(start, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    running = threading.Event()

    def body(attempt):
        running.set()
        return {"gave up": attempt.given_up.wait(0.3)}

    attempt = start(body)
    assert running.wait(10)
    attempt.leave()
    attempt.wait(60, never)

    assert not attempt.given_up.is_set()


def test_an_attempt_stopped_before_its_turn_does_nothing(start):
    assert start(lambda _: {"ran": True}, leave=True).wait(60, never)["result"] is None

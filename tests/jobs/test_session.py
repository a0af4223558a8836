"""A body in one thread, watched from another."""

import threading
import time

import pytest

from brim.errors import StorageError
from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import Stopped
from brim.jobs.worker import session as module
from brim.jobs.worker.session import Bench, Session


@pytest.fixture
def bench():
    """A bench that another thread serves, as the main thread does in a worker."""
    served, leaving = Bench(), threading.Event()
    thread = threading.Thread(target=served.serve, args=[leaving.is_set, lambda: None])
    thread.start()
    yield served
    leaving.set()
    thread.join()


def never() -> bool:
    return False


def until_stopped(session: Session) -> dict:
    assert session.stop.wait(10)
    raise Stopped


def test_a_slice_ends_while_the_body_goes_on(bench):
    go_on = threading.Event()
    session = bench.start(Session(lambda _: {"ok": go_on.wait(10)}, lambda: None))

    assert session.wait(0.05, never) is False
    go_on.set()

    assert session.wait(10, never) is True
    assert session.result == {"ok": True}


def test_the_end_of_the_body_ends_the_slice_at_once(bench):
    session = bench.start(Session(lambda _: {"made": 3}, lambda: None))

    began = time.monotonic()
    assert session.wait(60, never) is True
    assert time.monotonic() - began < 5


def test_a_cancel_stops_the_body_and_waits_for_its_end(bench):
    session = bench.start(Session(until_stopped, lambda: None))

    assert session.wait(60, lambda: True) is True
    assert session.result is None


def test_a_failure_is_raised_in_the_thread_that_waits(bench):
    def body(_):
        raise StorageError("full")

    session = bench.start(Session(body, lambda: None))

    with pytest.raises(StorageError, match="full"):
        session.wait(60, never)


def test_our_own_reason_to_stop_is_the_failure(bench):
    session = bench.start(Session(until_stopped, lambda: None))

    session.fail(StorageError("the disk is nearly full"))

    with pytest.raises(StorageError, match="nearly full"):
        session.wait(60, never)


def test_a_word_from_the_body_is_kept_and_beats(bench):
    beats = []

    def body(session):
        session.tell(Progress(current=2, total=5))
        return {}

    session = bench.start(Session(body, lambda: beats.append(1)))
    session.wait(60, never)

    assert session.progress.percent == 40
    assert beats == [1]


def test_a_body_that_does_not_stop_is_given_up(bench, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    given_up = threading.Event()
    session = bench.start(Session(lambda _: {"gave up": given_up.wait(10)}, lambda: None, given_up.set))

    assert session.wait(60, lambda: True) is True
    assert given_up.is_set()


def test_a_body_that_is_left_is_not_given_up(bench, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    given_up = threading.Event()
    session = Session(lambda session: {"gave up": given_up.wait(0.3)}, lambda: None, given_up.set)
    bench.start(session)

    session.leave()
    session.wait(60, never)

    assert not given_up.is_set()


def test_a_session_stopped_before_its_turn_does_nothing(bench):
    session = Session(lambda _: {"ran": True}, lambda: None)
    session.stop.set()
    bench.start(session)

    assert session.wait(60, never) is True
    assert session.result is None


def test_an_idle_bench_beats():
    beats, bench = [], Bench()

    bench.serve(lambda: len(beats) >= 2, lambda: beats.append(1))

    assert len(beats) == 2

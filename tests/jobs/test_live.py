"""What a running job says of its waiting: shares of the last seconds, in a file that is whole or not there."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from brim.jobs.status import Flow
from brim.jobs.worker import live as module
from brim.jobs.worker.live import LiveFile, LiveStatus, Shares, read_live

JOB = "a" * 32


def flow(seconds: float, **waiting: float) -> Flow:
    return Flow(seconds=seconds, waiting=waiting)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "workers").mkdir()
    return tmp_path


def test_shares_are_those_of_the_last_seconds():
    shares = Shares()
    for second in range(100):
        shares.add(flow(second, data=0.5 * second, copy=0.0))  # half of it waited, for long
    for second in range(100, 111):  # ten of them
        ceiling, stalls = shares.add(flow(second, data=50.0, copy=0.1 * (second - 100)))

    assert ceiling == pytest.approx(0.9)
    assert stalls == {"data": 0.0, "copy": 0.1}


def test_nothing_is_said_before_two_words_and_while_nothing_is_computed():
    shares = Shares()

    assert shares.add(None) == (None, {})
    assert shares.add(flow(1, data=0.5)) == (None, {})
    assert shares.add(flow(2, data=0.5)) == (1.0, {"data": 0.0})
    for _ in range(10):
        found = shares.add(flow(2, data=0.5))
    assert found == (None, {}), "it does something else, such as evaluating"


def test_a_phase_of_its_own_begins_anew():
    shares = Shares()
    shares.add(flow(50, data=10))
    shares.add(flow(60, data=20))

    assert shares.add(flow(1, data=5, copy=3)) == (None, {})
    assert shares.add(flow(3, data=5.2, copy=3)) == (0.9, {"data": 0.1, "copy": 0.0})
    assert shares.add(flow(4, data=9, copy=2)) == (0.0, {"data": 1.0, "copy": 0.0})  # a GPU reports waiting late


def test_a_word_is_read_as_it_was_written_and_gone_when_cleared(data: Path):
    live = LiveFile(data, "w0")
    live.tell(JOB, None)
    first = read_live(data, "w0")
    live.tell(JOB, flow(1, data=0))
    live.tell(JOB, flow(2, data=0.25))

    assert first is not None
    assert first == LiveStatus(at=first.at, job_id=JOB, ceiling_share=None, stalls={}, cpu_share=first.cpu_share)
    second = read_live(data, "w0")
    assert second is not None
    assert (second.ceiling_share, second.stalls) == (0.75, {"data": 0.25})
    assert read_live(data, "w1") is None
    live.clear()
    live.clear()
    assert read_live(data, "w0") is None
    assert list((data / "workers").iterdir()) == []


def test_the_processor_is_shared_by_all_cores_and_an_old_word_is_that_of_a_worker_that_died(data: Path, monkeypatch):
    clock = SimpleNamespace(now_s=100.0, used_s=7.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: clock.now_s))
    monkeypatch.setattr(module, "_cpu_s", lambda: clock.used_s)
    monkeypatch.setattr(module, "cores", lambda: 4)
    live = LiveFile(data, "w0")
    clock.now_s, clock.used_s = 102.0, 11.0  # four seconds of eight

    live.tell(JOB, None)

    assert read_live(data, "w0").cpu_share == 0.5
    clock.now_s += 9.9
    assert read_live(data, "w0") is not None
    clock.now_s += 0.2
    assert read_live(data, "w0") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"at": 1}', '{"at": "x", "job_id": "", "ceiling_share": 1}'])
def test_what_is_no_word_is_none(data: Path, text):
    (data / "workers" / "w0.live").write_text(text)

    assert read_live(data, "w0") is None


def test_a_disk_that_takes_nothing_fails_no_job(tmp_path: Path):
    live = LiveFile(tmp_path / "gone", "w0")

    live.tell(JOB, flow(1, data=0))
    live.clear()

    assert not (tmp_path / "gone").exists()

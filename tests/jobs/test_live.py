"""What a running job says of its waiting: shares of the last seconds, in a file that is whole or not there."""

import json
import threading
from pathlib import Path

import pytest

from brim.jobs.status import Flow
from brim.jobs.worker.live import WINDOW, LiveFile, LiveStatus, Shares, read_live

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
    for second in range(100, 100 + WINDOW + 1):
        ceiling, stalls = shares.add(flow(second, data=50.0, copy=0.1 * (second - 100)))

    assert ceiling == pytest.approx(0.9)
    assert stalls == {"data": 0.0, "copy": 0.1}


def test_nothing_is_said_before_two_words_and_while_nothing_is_computed():
    shares = Shares()

    assert shares.add(None) == (None, {})
    assert shares.add(flow(1, data=0.5)) == (None, {})
    assert shares.add(flow(2, data=0.5)) == (1.0, {"data": 0.0})
    for _ in range(WINDOW):
        found = shares.add(flow(2, data=0.5))
    assert found == (None, {}), "it does something else, such as evaluating"


def test_a_phase_of_its_own_begins_anew():
    shares = Shares()
    shares.add(flow(50, data=10))
    shares.add(flow(60, data=20))

    assert shares.add(flow(1, data=0.1)) == (None, {})
    assert shares.add(flow(3, data=0.3)) == (0.9, {"data": 0.1})


def test_shares_stay_between_none_and_all():
    shares = Shares()
    shares.add(flow(1, data=5, copy=3))

    assert shares.add(flow(2, data=9, copy=2)) == (0.0, {"data": 1.0, "copy": 0.0})


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


def test_readers_never_see_half_a_word(data: Path):
    live, done, seen = LiveFile(data, "w0"), threading.Event(), list[LiveStatus | None]()
    live.tell(JOB, None)

    def read() -> None:
        while not done.is_set():
            seen.append(read_live(data, "w0"))

    reader = threading.Thread(target=read)
    reader.start()
    for second in range(500):
        live.tell(JOB, flow(second, **{f"cause-{number}": 0.0 for number in range(second % 50)}))
    done.set()
    reader.join()

    assert len(seen) > 10
    assert None not in seen


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"at": 1}', '{"at": "x", "job_id": "", "ceiling_share": 1}'])
def test_what_is_no_word_is_none(data: Path, text):
    (data / "workers" / "w0.live").write_text(text)

    assert read_live(data, "w0") is None


def test_a_disk_that_takes_nothing_fails_no_job(tmp_path: Path):
    live = LiveFile(tmp_path / "gone", "w0")

    live.tell(JOB, flow(1, data=0))
    live.clear()

    assert not (tmp_path / "gone").exists()


def test_the_file_says_no_more_than_it_needs(data: Path):
    LiveFile(data, "w0").tell(JOB, None)

    said = json.loads((data / "workers" / "w0.live").read_text())
    assert said.keys() == {"at", "job_id", "ceiling_share", "stalls", "cpu_share"}

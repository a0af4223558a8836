import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
from fake_time import FakeTime
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.engine.meter.throughput import Meter
from brim.engine.pipeline import Pipeline, Stage, _Channel, _End
from waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def _threads_are_joined() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def same(item: int) -> int:
    return item


def three_stages(work: Callable[[int], int], place: str) -> list[Stage[int, int]]:
    return [Stage(name=name, work=work if name == place else same) for name in ("first", "middle", "last")]


@settings(max_examples=15, deadline=None)
@given(
    num_items=st.integers(0, 25),
    workers=st.lists(st.integers(1, 5), max_size=3),
    depth=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_results_keep_the_order_of_the_source(num_items: int, workers: list[int], depth: int, seed: int) -> None:
    rng = random.Random(seed)

    def work(item: int) -> int:
        time.sleep(rng.random() * 0.003)
        return item + 1

    stages = [Stage(name=f"s{i}", work=work, workers=num, depth=depth) for i, num in enumerate(workers)]
    with Pipeline(range(num_items), stages, depth=depth) as results:
        assert list(results) == [item + len(stages) for item in range(num_items)]


def test_workers_of_one_stage_overlap() -> None:
    meeting = threading.Barrier(4, timeout=PATIENCE_S)

    def work(item: int) -> int:
        meeting.wait()
        return item

    with Pipeline(range(12), [Stage(name="a", work=work, workers=4)]) as results:
        assert list(results) == list(range(12))


class Broken(Exception):
    pass


def break_at_five(item: int) -> int:
    if item == 5:
        raise Broken(item)
    return item


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_failing_stage_raises_its_own_exception_after_the_results_before_it(place: str) -> None:
    got: list[int] = []
    with (
        pytest.raises(Broken) as caught,
        Pipeline(range(100), three_stages(break_at_five, place)) as results,
    ):
        got.extend(results)  # extend keeps what came before the failure
    assert got == [0, 1, 2, 3, 4]
    assert caught.value.args == (5,)
    assert frames(caught.value)[-1] == "break_at_five"


def test_failing_source_raises_its_own_exception_after_the_results_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        break_at_five(5)

    got: list[int] = []
    with pytest.raises(Broken) as caught, Pipeline(source(), three_stages(same, "")) as results:
        got.extend(results)
    assert got == [0, 1, 2, 3, 4]
    assert frames(caught.value)[-2:] == ["source", "break_at_five"]


def test_first_failure_in_order_wins_over_the_first_in_time() -> None:
    def work(item: int) -> int:
        if item == 2:
            time.sleep(0.05)
        if item >= 2:
            raise Broken(item)
        return item

    got: list[int] = []
    stage = Stage(name="a", work=work, workers=4)
    with pytest.raises(Broken) as caught, Pipeline(range(20), [stage]) as results:
        got.extend(results)
    assert (got, caught.value.args) == ([0, 1], (2,))


def test_failure_stops_the_stages_before_it() -> None:
    pulled = []

    def source() -> Iterator[int]:
        for item in range(1000):
            pulled.append(item)
            yield item

    with Pipeline(source(), three_stages(break_at_five, "last")) as results:
        assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
        for thread in results._threads:
            thread.join(PATIENCE_S)
        assert all(not thread.is_alive() for thread in results._threads)
        assert next(results) == 4
    assert len(pulled) < 20


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_stop_iteration_inside_a_stage_is_an_error_not_the_end(place: str) -> None:
    def work(item: int) -> int:
        return next(iter([])) if item == 3 else item

    got: list[int] = []
    with (
        pytest.raises(RuntimeError, match=f"{place}.*StopIteration") as caught,
        Pipeline(range(9), three_stages(work, place)) as results,
    ):
        got.extend(results)
    assert got == [0, 1, 2]
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_thread_that_dies_without_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    close = _Channel.close
    pipeline = Pipeline(range(3), [Stage(name="a", work=same), Stage(name="b", work=same)])

    def die(channel: _Channel, end: _End) -> None:
        if channel is pipeline._channels[place]:
            raise MemoryError
        close(channel, end)

    monkeypatch.setattr(_Channel, "close", die)
    got: list[int] = []
    with pytest.raises(RuntimeError, match="died without"), pipeline as results:
        got.extend(results)
    assert got == [0, 1, 2]


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_interrupts_a_waiting_caller() -> None:
    waiting, gate = threading.Event(), threading.Event()

    def interrupt() -> None:
        waiting.wait(PATIENCE_S)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    done: list[bool] = []
    stage = Stage(name="a", work=lambda item: done.append(gate.wait(PATIENCE_S)))
    with Pipeline(range(3), [stage], tick=waiting.set) as results:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(results)
        assert done == []
        gate.set()
        thread.join(PATIENCE_S)


def test_items_in_flight_are_bounded_by_depths_and_workers() -> None:
    pulled = 0

    def source() -> Iterator[int]:
        nonlocal pulled
        while True:
            pulled += 1
            yield pulled

    stages = [Stage(name="a", work=same, workers=2, depth=3), Stage(name="b", work=same, depth=1)]
    with Pipeline(source(), stages, depth=2):
        until(lambda: pulled >= 2 + (2 + 3) + (1 + 1))
        time.sleep(0.05)
        assert pulled == 2 + (2 + 3) + (1 + 1)


def test_tick_is_called_between_many_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ticks = FakeTime(), []
    monkeypatch.setattr("brim.engine.pipeline.time", clock)
    with Pipeline(range(20), [], tick=lambda: ticks.append(clock())) as results:
        for _ in results:
            clock.sleep(0.03)
    assert ticks == pytest.approx([100.0, 100.12, 100.24, 100.36, 100.48, 100.6])  # every fourth wait: 0.25 s at most


def test_accounts_of_every_stage_add_up_to_the_wall_time() -> None:
    clock, pulled = FakeTime(), []
    meter = Meter(clock=clock)

    def source() -> Iterator[int]:
        for item in range(30):
            pulled.append(item)
            yield item

    def work(item: int) -> int:
        """Takes 3 s, once everything before it is full: the queues hold two items each, and the first stage one."""
        until(lambda: len(pulled) == min(30, item + 6))
        clock.sleep(3.0)
        return item

    stages = [Stage(name="quick", work=same), Stage(name="slow", work=work)]
    meter.start()
    with Pipeline(source(), stages, meter=meter) as results:
        for _ in results:
            meter.count(4)
    meter.stop()
    summary = meter.summary()
    quick, long = summary["stages"]["quick"], summary["stages"]["slow"]
    assert list(summary["stages"]) == ["source", "quick", "slow"]
    assert [stage["items"] for stage in summary["stages"].values()] == [30, 30, 30]
    assert summary["items"] == 120
    assert (long["busy_s"], long["wait_input_s"], long["wait_room_s"]) == (90.0, 0.0, 0.0)
    assert (summary["seconds"], long["share"]) == (90.0, 1.0)
    assert quick["wait_room_s"] > 60 > 30 > quick["wait_input_s"]

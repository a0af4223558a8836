import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_time import FakeTime

from brim.engine.meter.stalls import CAUSES, RunClock, StepTimes, Times, diagnose, mean_times, split_wait, time_step

NONE = dict.fromkeys(CAUSES, 0.0)


def times(*, steps: int = 1000, seconds: float = 10.0, **waiting: float) -> Times:
    return Times(seconds=seconds, steps=steps, waiting={**NONE, **waiting}, step_s=0.01, device_s=0.0098)


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named(cause: str) -> None:
    (text,) = diagnose(times(**{cause: 4.0}))
    assert text.startswith(f"{cause}: 40%")


def test_the_worst_cause_comes_first_and_small_ones_are_left_out() -> None:
    found = diagnose(times(copy=1.0, data=4.0, logging=0.4, checkpoint=2.0))
    assert [text.partition(":")[0] for text in found] == ["data", "checkpoint", "copy"]


def test_a_sync_per_step_is_named_with_its_place() -> None:
    found = Times(
        seconds=10, steps=100, waiting=NONE | {"host_sync": 0.2}, step_s=0.1, device_s=0.03, syncs=("a.py:7",)
    )
    (text,) = diagnose(found)
    assert text.startswith("host_sync:")
    assert "a.py:7" in text


def test_a_tiny_kernel_is_launch_bound() -> None:
    times = Times(seconds=1.0, steps=1000, waiting=NONE, step_s=1e-3, device_s=2e-4)
    assert diagnose(times) == ["launch-bound: the device idles 80% of a step: larger batch or graph"]
    assert diagnose(replace(times, captured=True)) == diagnose(replace(times, device_s=7e-4)) == []
    assert diagnose(Times(seconds=0.0, steps=0, waiting=NONE)) == []


@pytest.mark.parametrize(
    ("host_s", "copy_s", "device_s", "expected"),
    [
        (0.5, 0.0, None, (0.5, 0.0)),
        (0.5, 0.4, None, (0.1, 0.4)),
        (0.5, 0.0, 0.5, (0.5, 0.0)),  # starved: host and device waited together
        (0.5, 0.0, 0.1, (0.1, 0.0)),  # the device had work for most of it
        (0.0, 0.0, 0.3, (0.0, 0.3)),  # the host ran ahead, the stream waited for a copy
        (0.5, 0.5, 0.5, (0.0, 0.5)),  # the host waited for the copy
    ],
)
def test_waiting_is_split_by_what_the_device_saw(
    host_s: float, copy_s: float, device_s: float | None, expected: tuple[float, float]
) -> None:
    assert split_wait(host_s, copy_s, device_s) == pytest.approx(expected)


def test_clock_counts_training_alone_and_goes_on_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr("brim.engine.meter.stalls.time", time)
    clock = RunClock(torch.device("cpu"), SimpleNamespace(copy_s=0.0))
    clock.go()
    with clock.stepping(8):
        time.sleep(2)
    with clock.losing("logging"):
        time.sleep(1)
    clock.pause()
    time.sleep(5)
    assert (clock.seconds, clock.step_s, clock.waiting) == (3, 2, NONE | {"logging": 1})
    again = RunClock(torch.device("cpu"), SimpleNamespace(copy_s=0.0))
    again.load(clock.as_state())
    assert (again.samples, again.steps, again.seconds) == (8, 1, clock.seconds)
    assert again.waiting == clock.waiting


def test_waiting_of_every_fifth_step_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: between two steps the host waits 3 s, in which the device has work for 1 s; 10 batches, 2 sampled."""
    time = FakeTime()
    monkeypatch.setattr("brim.engine.meter.stalls.time", time)
    event = SimpleNamespace(elapsed_time=lambda other: 2000.0)
    monkeypatch.setattr("brim.engine.meter.stalls._record", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock = RunClock(torch.device("cuda"), SimpleNamespace(copy_s=0.0))
    clock.go()
    for _ in range(10):
        with clock.feeding():
            time.sleep(3)
    clock.pause()
    assert clock.waiting == NONE | {"data": 10 * 2.0}
    assert clock.seconds == 30


def test_a_step_is_timed_by_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations = itertools.cycle([0.01, 0.01, 0.03])

    def step() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    times = time_step(step, torch.device("cpu"), captured=False, budget_s=0.2)

    assert times.step_s == pytest.approx(0.01)
    assert times.device_s is None


def test_steps_on_several_shapes_count_as_often_as_they_came():
    short, long = StepTimes(step_s=0.1, items=8.0), StepTimes(step_s=0.4, items=2.0, syncs=("a.py:3",))

    found = mean_times([(short, 3), (long, 1)])

    assert found.step_s == pytest.approx((3 * 0.1 + 0.4) / 4)
    assert found.items == pytest.approx((3 * 8 + 2) / 4)
    assert found.device_s is None
    assert found.syncs == ("a.py:3",)

"""Measuring real steps on the CPU, and steps whose time and memory are known."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_time import FakeTime

from brim.engine.device import memory
from brim.engine.tuning.prober import ProbeConfig, Prober

CPU = torch.device("cpu")
QUICK = ProbeConfig(block_s=0.01, settle_s=0.0)
MIB = 1024**2


@pytest.fixture
def clock(monkeypatch):
    """Steps take the time that they say, and everything else takes none."""
    clock = FakeTime()
    monkeypatch.setattr("brim.engine.tuning.prober.time", clock)
    return clock


def lasting(clock: FakeTime, base_s: float, item_s: float) -> Callable[[int], Callable[[], None]]:
    return lambda batch: lambda: clock.sleep(base_s + item_s * batch)


def test_the_first_call_is_warm_up_and_counts_apart(clock):
    def make(batch: int) -> Callable[[], None]:
        times_s = iter([0.2])
        return lambda: clock.sleep(next(times_s, 0.005))

    prober = Prober(make, CPU, QUICK)
    trial = prober(2)
    assert trial.seconds == pytest.approx(0.005)
    assert trial.warmup_s == prober.warmup_s == pytest.approx(0.195)


def test_a_step_takes_the_median_of_its_blocks_and_its_tail_is_told(clock):
    """Three blocks of four steps, at 10, 20 and 30 ms; then twenty single steps, of which two are slow."""
    times_s = iter([0.01, 0.01, *[0.01] * 4, *[0.02] * 4, *[0.03] * 4, *[0.01] * 9, 0.2, *[0.01] * 9, 0.3])
    config = ProbeConfig(block_s=0.04, settle_s=0.0, latencies=20)

    trial = Prober(lambda batch: lambda: clock.sleep(next(times_s)), CPU, config)(5)

    assert trial.seconds == pytest.approx(0.02)
    assert trial.throughput == pytest.approx(250)
    assert trial.spread == pytest.approx(2 / 3)  # half of 500 - 166.7 items/s, of 250
    assert (trial.p50_ms, trial.p95_ms) == (pytest.approx(10), pytest.approx(300))
    assert trial.steps == 2 + 3 * 4


def test_peak_memory_is_that_of_the_trial_alone(monkeypatch):
    held: weakref.WeakSet[Any] = weakref.WeakSet()
    peak = [0]

    class Block:
        """Something large that no step must keep alive."""

        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes
            held.add(self)
            peak[0] = max(peak[0], sum(block.num_bytes for block in held))

    def reset(device: torch.device) -> bool:
        peak[0] = sum(block.num_bytes for block in held)
        return True

    def make(batch: int) -> Callable[[], Block]:
        inputs = Block(100 * batch)
        return lambda: Block(inputs.num_bytes // 10)

    monkeypatch.setattr(memory, "_reset_peak", reset)
    monkeypatch.setattr(memory, "_peak_bytes", lambda device: peak[0])
    prober = Prober(make, CPU, QUICK)
    assert [prober(batch).peak_bytes for batch in (4, 1, 4)] == [440, 110, 440]


def test_a_proof_runs_as_many_steps_as_asked():
    calls = []
    trial = Prober(lambda batch: lambda: calls.append(batch), CPU, QUICK).prove(3, 7)
    assert calls == [3] * 7
    assert trial.steps == 7
    assert trial.peak_bytes

"""Measuring real steps on the CPU, and steps whose time and memory are known."""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from brim.engine.config import SweepConfig
from brim.engine.device.memory import INJECT_VARIABLE, inject_oom
from brim.engine.tuning.prober import ProbeConfig, Prober, budget_bytes, tune
from brim.engine.tuning.trials import Trial, merge
from brim.errors import ConfigError, OutOfMemory
from waiting import promised

CPU = torch.device("cpu")
QUICK = ProbeConfig(block_s=0.01, settle_s=0.0)
MIB = 1024**2


def sleeping(base_s: float, item_s: float) -> Callable[[int], Callable[[], None]]:
    return lambda batch: lambda: time.sleep(base_s + item_s * batch)


@pytest.mark.alone
def test_a_step_is_timed_and_its_latency_told():
    trial = Prober(sleeping(0.004, 0.001), CPU, QUICK)(6)
    assert trial.batch == 6
    assert 0.010 <= trial.seconds < 0.015
    assert trial.p50_ms is not None
    assert trial.p95_ms is not None
    assert 10 <= trial.p50_ms <= trial.p95_ms < 40
    assert trial.throughput == pytest.approx(6 / trial.seconds)
    assert (trial.status, trial.device_share) == ("ok", None)
    assert trial.steps >= 5


@pytest.mark.alone
def test_short_steps_are_timed_many_at_a_time():
    calls = []
    trial = Prober(lambda batch: lambda: calls.append(batch), CPU, QUICK)(1)
    assert trial.seconds < 1e-4
    assert len(calls) > 300


@pytest.mark.alone
def test_the_first_call_is_warm_up_and_counts_apart():
    def make(batch: int) -> Callable[[], None]:
        times_s = iter([0.2])
        return lambda: time.sleep(next(times_s, 0.005))

    prober = Prober(make, CPU, QUICK)
    trial = prober(2)
    assert trial.seconds < 0.01
    assert 0.19 < trial.warmup_s < 0.3
    assert prober.warmup_s == trial.warmup_s


def test_peak_memory_is_that_of_the_trial_alone():
    def make(batch: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.ones(batch * 64 * MIB, dtype=torch.uint8)

    prober = Prober(make, CPU, QUICK)
    big, small, again = prober(4), prober(1), prober(4)
    assert big.peak_bytes is not None
    assert small.peak_bytes is not None
    assert again.peak_bytes is not None
    assert 170 * MIB < big.peak_bytes - small.peak_bytes < 210 * MIB
    assert abs(again.peak_bytes - big.peak_bytes) < 40 * MIB
    assert prober.budget_bytes > big.peak_bytes


def test_a_proof_runs_as_many_steps_as_asked():
    calls = []
    trial = Prober(lambda batch: lambda: calls.append(batch), CPU, QUICK).prove(3, 7)
    assert calls == [3] * 7
    assert trial.steps == 7
    assert trial.peak_bytes


class Holder:
    """Something large that a failed step must not keep alive."""


@pytest.mark.parametrize("failure", [MemoryError("none left"), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_of_any_kind_is_told_and_lets_go_of_the_step(failure):
    holders: list[weakref.ref[Holder]] = []

    def make(batch: int) -> Callable[[], None]:
        holder = Holder()
        holders.append(weakref.ref(holder))

        def step() -> None:
            assert holder
            raise failure

        return step

    with pytest.raises(OutOfMemory, match="out of memory") as caught:
        Prober(make, CPU, QUICK)(4)
    failure.__traceback__ = None
    gc.collect()
    assert holders[0]() is None
    assert caught.value.__cause__ is None


def test_another_failure_passes_with_its_type():
    def make(batch: int) -> Callable[[], None]:
        raise NotImplementedError("no kernel for this")

    with pytest.raises(NotImplementedError, match="no kernel"):
        Prober(make, CPU, QUICK)(4)


def test_injected_out_of_memory_is_honoured(monkeypatch):
    with inject_oom(above=5), pytest.raises(OutOfMemory, match="injected"):
        Prober(sleeping(0.001, 0), CPU, QUICK)(6)
    monkeypatch.setenv(INJECT_VARIABLE, "8")
    found = tune(sleeping(0.004, 0.0), CPU, SweepConfig(limit=64, seconds=30))  # it ends long before that
    assert found.batch == found.max_safe == 8
    assert any(trial.status == "oom" for trial in found.trials)


def test_a_real_step_is_tuned_on_the_cpu_and_never_slower_than_batch_1():
    weight = torch.randn(256, 256)

    def make(batch: int) -> Callable[[], torch.Tensor]:
        rows = torch.randn(batch, 256)
        return lambda: rows @ weight

    heard: list[Trial] = []
    found = tune(make, CPU, SweepConfig(limit=64, seconds=5), progress=heard.append)
    single = merge([trial for trial in found.trials if trial.batch == 1])
    assert found.chosen.throughput >= 0.8 * single.throughput  # others may use the machine meanwhile
    assert found.batch <= found.max_safe <= 64
    assert found.seconds < promised(8)
    assert heard == found.trials


def test_a_training_step_is_tuned_too():
    network = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def make(batch: int) -> Callable[[], None]:
        rows = torch.randn(batch, 64)

        def step() -> None:
            optimizer.zero_grad()
            network(rows).square().mean().backward()
            optimizer.step()

        return step

    found = tune(make, CPU, SweepConfig(limit=16, seconds=3))
    assert 1 <= found.batch <= found.max_safe <= 16


def test_the_budget_is_what_is_free_and_what_is_held():
    assert budget_bytes(CPU) > 100 * MIB


@pytest.mark.parametrize("changes", [{"blocks": 0}, {"latencies": 0}, {"block_s": 0.0}, {"enough_s": -1.0}])
def test_a_probe_that_cannot_work_is_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        ProbeConfig(**changes)

"""The search on simulated devices: known knees, noise, memory and time."""

import math
import random
from collections.abc import Callable

import pytest

from brim.engine.config import SweepConfig
from brim.engine.tuning.search import Sweep, sweep
from brim.engine.tuning.trials import Trial, TrialBook, merge
from brim.errors import OutOfMemory

StepTime = Callable[[int], float]  # batch → seconds of a step
MB = 10**6


class Device:
    """A device whose step times, memory and clock are known."""

    def __init__(self, step_s: StepTime, *, noise: float = 0.0, seed: int = 0, **limits: float) -> None:
        self.step_s, self.noise, self.random = step_s, noise, random.Random(seed)
        self.base, self.item = limits.get("base", 0), limits.get("item", 0)
        self.fits = limits.get("fits", math.inf)  # more items do not fit, whatever the memory model says
        self.works = limits.get("works", math.inf)  # more items fail in a kernel
        self.jump_from, self.jump = limits.get("jump_from", math.inf), limits.get("jump", 0)
        self.now_s = 0.0
        self.steps: dict[int, int] = {}
        self.tried: list[int] = []

    def peak(self, batch: int) -> int:
        return int(self.base + self.item * batch + (self.jump if batch >= self.jump_from else 0))

    def clock(self) -> float:
        return self.now_s

    def __call__(self, batch: int) -> Trial:
        warm = 1 if batch in self.steps else 2
        step_s = self.step_s(batch)
        self.now_s += warm * step_s + max(0.12, 3 * step_s)
        return self._trial(batch, warm + 3)

    def prove(self, batch: int, steps: int) -> Trial:
        self.now_s += (steps + 1) * self.step_s(batch)
        return self._trial(batch, steps)

    def _trial(self, batch: int, steps: int) -> Trial:
        self.tried.append(batch)
        if batch > self.fits:
            raise OutOfMemory(f"batch of {batch}")
        if batch > self.works:
            raise RuntimeError("index out of the int32 range\nsecond line")
        self.steps[batch] = self.steps.get(batch, 0) + steps
        seconds = self.step_s(batch) * math.exp(self.random.gauss(0, self.noise))
        return Trial(batch=batch, seconds=seconds, spread=self.noise, steps=steps, peak_bytes=self.peak(batch) or None)

    def rate(self, batch: int) -> float:
        return batch / self.step_s(batch)

    def best_rate(self, top: int) -> float:
        return max(map(self.rate, range(1, top + 1)))


def knee(at: float, step_ms: float = 2.0) -> StepTime:
    return lambda batch: step_ms / 1e3 * max(1.0, batch / at)


def smooth(at: float) -> StepTime:
    return lambda batch: 0.002 * (1 + batch / at)


def sawtooth(width: float, share: float) -> StepTime:
    """Tiles of `width` items: part of the work goes up in steps."""
    return lambda batch: 0.002 * (0.3 + (1 - share) * batch / width + share * math.ceil(batch / width))


def search(device: Device, **changes: float | int | None) -> Sweep:
    config = SweepConfig(**{"seconds": 1e6, **changes})  # type: ignore[arg-type]
    return sweep(device, config, prove=device.prove, clock=device.clock)


# The optimum


@pytest.mark.parametrize("step_s", [knee(1), knee(0.2)], ids=["flat", "flat and slow"])
def test_batch_1_is_kept_where_more_brings_nothing(step_s):
    found = search(Device(step_s))
    assert found.batch == 1
    assert "batching does not matter: batch 1 reaches 100% of the best" in found.verdict
    assert "batches above 4: throughput stopped rising at 1" in found.skipped


def test_the_smallest_of_equals_is_chosen_not_the_best_by_a_hair():
    device = Device(lambda batch: 0.001 * max(8.0, batch * (1 - 0.00001 * batch)))
    found = search(device, limit=512)
    assert found.batch == 8
    assert found.best.throughput >= found.chosen.throughput


def random_device(seed: int, noise: float) -> Device:
    rng = random.Random(seed)
    kinds = (
        knee(rng.uniform(4, 200)),
        knee(rng.uniform(4, 40), step_ms=100),
        smooth(rng.uniform(0.5, 6)),
        sawtooth(rng.uniform(2, 20), rng.uniform(0.2, 0.9)),
    )
    return Device(kinds[seed % len(kinds)], noise=noise, seed=seed)


@pytest.mark.parametrize(("noise", "loss"), [(0.0, 0.02), (0.005, 0.02), (0.01, 0.025)])
def test_the_optimum_is_within_2_percent_of_an_exhaustive_sweep(noise, loss):
    losses = []
    for seed in range(100):
        device = random_device(seed, noise)
        batch = search(device).batch
        losses.append(1 - device.rate(batch) / device.best_rate(2 * batch))
    assert max(losses) <= loss
    assert sum(value > 0.02 for value in losses) <= 2


# Memory


def allowed(device: Device, budget: int, headroom: float = 0.1) -> int:
    """The largest size that truly stays within the budget less its headroom."""
    return max(size for size in range(1, 4097) if device.peak(size) <= budget * (1 - headroom))


@pytest.mark.parametrize("base", [0, 300 * MB])
@pytest.mark.parametrize("item", [0.4 * MB, 3 * MB, 41 * MB])
@pytest.mark.parametrize("at", [3, 17])
def test_the_largest_safe_batch_is_proven_and_close_to_the_limit(at, item, base):
    device = Device(knee(at), base=base, item=item)
    found = search(device, budget_bytes=1000 * MB)
    largest = allowed(device, 1000 * MB)
    assert 0.97 * largest - 1 <= found.max_safe <= largest
    assert device.steps[found.max_safe] >= SweepConfig().prove_steps
    assert found.batch <= found.max_safe
    assert max(device.tried) <= largest  # the model kept it from trying what does not fit


def test_a_size_is_safe_after_as_many_steps_as_asked():
    device = Device(knee(8))
    assert search(device, limit=32, prove_steps=20).max_safe == 32  # probed before, in fewer steps
    assert device.steps[32] >= 20


def test_what_will_not_fit_is_not_tried_and_said():
    device = Device(smooth(50), base=100 * MB, item=10 * MB)
    found = search(device, budget_bytes=500 * MB)
    assert max(device.tried) <= 35
    assert any(reason.startswith("batch 64: expected to take 740 MB of 450 MB") for reason in found.skipped)


@pytest.mark.parametrize("seed", range(30))
def test_a_jump_above_the_memory_model_is_never_returned(seed):
    rng = random.Random(seed)
    limits = {"base": 50 * MB, "item": 2 * MB, "jump_from": rng.randint(2, 500), "jump": rng.uniform(20, 400) * MB}
    device = Device(knee(rng.randint(1, 60)), noise=0.005, seed=seed, **limits)
    found = search(device, budget_bytes=1000 * MB)
    assert device.peak(found.max_safe) <= 900 * MB
    assert device.steps[found.max_safe] >= 5
    assert 1 <= found.batch <= found.max_safe


@pytest.mark.parametrize("seed", range(30))
def test_out_of_memory_at_an_unpredictable_size_is_survived(seed):
    rng = random.Random(seed)
    fits = rng.choice([1, 2, 3, rng.randint(4, 60), rng.randint(60, 400)])
    device = Device(knee(rng.randint(1, 60)), noise=0.005, seed=seed, base=MB, item=MB, fits=fits)
    found = search(device, budget_bytes=1000 * MB)
    assert 0.85 * fits <= found.max_safe <= fits
    assert device.rate(found.batch) >= 0.98 * device.best_rate(min(fits, 2 * found.batch))
    assert device.steps[found.max_safe] >= 5
    assert fits >= 400 or any(trial.status == "oom" for trial in found.trials)


def test_a_size_that_fits_once_but_not_again_is_not_safe():
    class Leaky(Device):
        def _trial(self, batch: int, steps: int) -> Trial:
            if batch > 20 and self.steps.get(batch):
                raise OutOfMemory(f"batch of {batch}")
            return super()._trial(batch, min(steps, 3))

    found = search(Leaky(knee(32)))
    assert found.batch <= found.max_safe <= 20


def test_a_failing_kernel_is_an_upper_bound():
    device = Device(smooth(100), works=70)
    found = search(device)
    assert found.batch <= found.max_safe <= 70
    failed = next(trial for trial in found.trials if trial.status == "failed")
    assert failed.detail == "index out of the int32 range"


# Latency and time


def test_a_latency_limit_binds_the_optimum_but_not_the_safe_size():
    device = Device(smooth(10), base=1, item=MB)
    found = search(device, p95_ms=8.0, budget_bytes=1000 * MB)
    assert device.step_s(found.batch) <= 0.008
    assert found.batch >= 28  # 30 items take 8 ms
    assert found.max_safe > 800
    assert any(trial.status == "slow" for trial in found.trials)


def test_the_95th_percentile_is_compared_with_the_limit_where_it_is_known():
    """Steps of 1 ms, every tenth of which takes 4 ms from 9 items on."""
    found = sweep(
        lambda batch: Trial(batch=batch, seconds=0.001, p50_ms=1.0, p95_ms=4.0 if batch > 8 else 1.0, steps=10),
        SweepConfig(limit=64, p95_ms=3.0),
    )
    assert found.batch == 8
    assert {trial.batch for trial in found.trials if trial.status == "slow"} >= {16}


@pytest.mark.parametrize("seconds", [1.0, 4.0, 10.0, 60.0])
@pytest.mark.parametrize("step_ms", [2.0, 50.0, 500.0, 5000.0])
def test_the_time_limit_is_kept(seconds, step_ms):
    device = Device(knee(8, step_ms), base=MB, item=MB)
    found = search(device, seconds=seconds, budget_bytes=4000 * MB)
    batch_1_s = 6 * step_ms / 1e3  # always measured, whatever the limit
    assert found.seconds <= seconds * 1.05 + batch_1_s
    assert device.steps[found.max_safe] >= 5
    assert found.max_safe >= 3000 or found.skipped


def test_compilation_counts_apart():
    class Compiling(Device):
        def _trial(self, batch: int, steps: int) -> Trial:
            first = batch not in self.steps
            self.now_s += 30.0 if first else 0.0
            trial = super()._trial(batch, steps)
            return Trial(batch=batch, seconds=trial.seconds, steps=steps, warmup_s=30.0 if first else 0.0)

    found = search(Compiling(knee(17)), seconds=30.0, limit=128)
    assert found.batch == 17
    assert found.warmup_s >= 150.0
    assert search(Compiling(knee(17)), seconds=30.0, limit=128, warmup_seconds=0.0).batch < 17


# Words


def test_a_step_that_waits_for_something_else_is_told():
    found = sweep(lambda batch: Trial(batch=batch, seconds=0.01, device_share=0.3), SweepConfig(limit=64))
    assert "not limited by the device: it is busy for 30% of the time" in found.verdict


def test_repeated_trials_merge_into_one():
    merged = merge(
        [
            Trial(batch=4, seconds=0.010, steps=3, peak_bytes=7, p95_ms=1.0),
            Trial(batch=4, seconds=0.030, steps=4, peak_bytes=9, p95_ms=2.0, device_share=0.5),
            Trial(batch=4, seconds=0.011, steps=5, peak_bytes=8, p95_ms=3.0, warmup_s=0.5),
        ]
    )
    assert (merged.seconds, merged.steps, merged.peak_bytes, merged.p95_ms) == (0.011, 12, 9, 3.0)
    assert (merged.device_share, merged.warmup_s) == (0.5, 0.5)
    assert merged.throughput == pytest.approx(4 / 0.011)


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_size_that_did_not_run_again_is_chosen_no_more(status):
    book = TrialBook(64)
    for size in (1, 2, 4, 8):
        book.add(Trial(batch=size, seconds=0.01))
    book.add(Trial(batch=4, seconds=0.0, status=status))
    assert (book.sizes(), book.best(), book.top) == ([1, 2], 2, 3)
    assert not book.ran(4)
    book.add(Trial(batch=2, seconds=0.01, status="over budget"))
    assert (book.sizes(), book.best(), book.top) == ([1], 1, 1)


def test_memory_is_fitted_with_a_base():
    book = TrialBook(4096)
    assert book.predict_bytes(8) is None
    for size in (1, 2, 4):
        book.add(Trial(batch=size, seconds=0.01, peak_bytes=100 + 7 * size))
    assert book.predict_bytes(8) == pytest.approx(156)
    assert book.largest_within(800.5) == 100

"""Measures steps of any callable at any batch size, on any device: time, spread, latency, true peak memory.

`search.py` decides which sizes to measure.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from brim.config import Range, check
from brim.engine.config import SweepConfig
from brim.engine.device import PeakMemory, check_injected, free_bytes, guard
from brim.engine.meter import behind_sleep_s
from brim.engine.tuning.search import Sweep, sweep
from brim.engine.tuning.trials import Trial
from brim.errors import OutOfMemory

StepFn = Callable[[], object]  # runs one step; its result is ignored
MakeStep = Callable[[int], StepFn]  # batch → its step, inputs allocated

MAX_WARMUP = 6  # calls: compilers and graph captures settle after the second or third
SETTLED = 0.9  # warm-up ends with a call that takes more than this share of the previous one
MAX_SLEEP_S = 0.5  # longest head start given to the host when the device's own time is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """How long one probe measures."""

    blocks: Annotated[int, Range(1)] = 3  # timed blocks of steps: their median counts, their spread is reported
    block_s: Annotated[float, Range(above=0)] = 0.04  # least length of a block, unless one step is longer
    enough_s: Annotated[float, Range(above=0)] = 1.5  # no further block after this: long steps are precise enough
    latencies: Annotated[int, Range(1)] = 3  # single steps per probe, each synchronised
    settle_s: float = 0.5  # seconds of steps before the very first probe, while clocks and caches come up

    def __post_init__(self) -> None:
        check(self)


def tune(
    make_step: MakeStep,
    device: torch.device,
    config: SweepConfig | None = None,
    *,
    progress: Callable[[Trial], None] | None = None,
) -> Sweep:
    """The fastest batch and the largest safe one of a step, inference or training, on this device.

    The memory budget is the memory free now, unless the config sets one.
    """
    prober = Prober(make_step, device)
    config = config or SweepConfig()
    if config.budget_bytes is None:
        config = replace(config, budget_bytes=prober.budget_bytes)
    return sweep(prober, config, prove=prober.prove, progress=progress)


class Prober:
    """Measures the steps that make_step makes; call it with a batch for a short trial.

    Every trial makes a new step and drops it at the end, so that sizes do not share memory.
    """

    def __init__(self, make_step: MakeStep, device: torch.device, config: ProbeConfig | None = None) -> None:
        self.make_step, self.device = make_step, device
        self.config = config or ProbeConfig()
        self.warmup_s = 0.0  # in first calls of a size so far: compilation, plan search, capture
        self._latencies_ms: dict[int, list[float]] = {}
        self._device_s: dict[int, float] = {}
        self._fresh = True
        self._clean()
        self.budget_bytes = budget_bytes(device)

    def __call__(self, batch: int) -> Trial:
        """Measure a size briefly; OutOfMemory if it does not fit."""
        return self._guarded(batch, lambda step: self._measure(batch, step))

    def prove(self, batch: int, steps: int) -> Trial:
        """Run at least that many steps of a size, with the peak memory of all of them."""
        return self._guarded(batch, lambda step: self._repeat(batch, step, steps))

    # One trial

    def _guarded(self, batch: int, measure: Callable[[StepFn], Trial]) -> Trial:
        """Run a measurement on a new step, with the allocator clean before it and after it."""
        check_injected(batch)
        self._clean()
        outcome = self._attempt(batch, measure)
        # Only now is the traceback that kept the step's tensors alive gone.
        self._clean()
        if isinstance(outcome, Trial):
            return outcome
        raise outcome

    def _attempt(self, batch: int, measure: Callable[[StepFn], Trial]) -> Trial | Exception:
        try:
            with guard(), _Peak(self.device) as peak:
                trial = measure(self.make_step(batch))
                self._wait()
            return replace(trial, peak_bytes=peak.bytes)
        except OutOfMemory as failure:
            return OutOfMemory(str(failure))
        except RuntimeError as failure:
            failure.__context__ = failure.__cause__ = None
            return failure.with_traceback(None)

    def _measure(self, batch: int, step: StepFn) -> Trial:
        num_warmup, first_s, step_s = self._warm_up(batch, step)
        rates, num_timed = self._time_blocks(batch, step, step_s)
        seconds = batch / statistics.median(rates)
        self._time_singles(batch, step, seconds)
        return replace(
            self._trial(batch, seconds, num_warmup + num_timed, first_s),
            spread=(max(rates) - min(rates)) / 2 / statistics.median(rates),
            device_share=self._device_share(batch, step, seconds),
        )

    def _repeat(self, batch: int, step: StepFn, steps: int) -> Trial:
        took_s = [self._timed(step) for _ in range(max(2, steps))]
        self._latencies_ms.setdefault(batch, []).extend(second * 1e3 for second in took_s[1:])
        return self._trial(batch, statistics.median(took_s[1:]), len(took_s), took_s[0])

    def _trial(self, batch: int, seconds: float, steps: int, first_s: float) -> Trial:
        latencies_ms, warmup_s = sorted(self._latencies_ms[batch]), max(0.0, first_s - seconds)
        self.warmup_s += warmup_s
        p95_ms = latencies_ms[min(len(latencies_ms) - 1, int(0.95 * len(latencies_ms)))]
        return Trial(
            batch=batch, seconds=seconds, p50_ms=statistics.median(latencies_ms), p95_ms=p95_ms, steps=steps,
            warmup_s=warmup_s,
        )  # fmt: skip

    # Its parts

    def _warm_up(self, batch: int, step: StepFn) -> tuple[int, float, float]:
        """Steps until their time settles: how many, seconds of the first, seconds of the last."""
        first_s = last_s = self._timed(step)
        known, num, began_s = batch in self._latencies_ms, 1, time.perf_counter()
        least_s = self.config.settle_s if self._fresh else 0.0
        # A size that ran before has its plans and kernels; its step needs one call to touch its inputs.
        while not known and (num < MAX_WARMUP or time.perf_counter() - began_s < least_s):
            before_s, last_s = last_s, self._timed(step)
            num += 1
            settled = last_s > SETTLED * before_s or last_s > self.config.enough_s
            if settled and time.perf_counter() - began_s >= least_s:
                break
        self._fresh = False
        return num, first_s, last_s

    def _time_blocks(self, batch: int, step: StepFn, step_s: float) -> tuple[list[float], int]:
        """Items per second of each block, whose steps are not waited for one by one; and the steps in all."""
        rates: list[float] = []
        each = max(1, round(self.config.block_s / max(1e-7, step_s)))
        began_s = time.perf_counter()
        while len(rates) < self.config.blocks:
            block_began_s = time.perf_counter()
            for _ in range(each):
                step()
            self._wait()
            now_s = time.perf_counter()
            rates.append(batch * each / (now_s - block_began_s))
            if now_s - began_s > self.config.enough_s:
                break
        return rates, each * len(rates)

    def _time_singles(self, batch: int, step: StepFn, seconds: float) -> None:
        """Time single steps of this size, in addition to those of earlier probes."""
        latencies_ms = self._latencies_ms.setdefault(batch, [])
        is_long = seconds * self.config.latencies > self.config.enough_s
        if not (latencies_ms and is_long):
            latencies_ms.extend(self._timed(step) * 1e3 for _ in range(1 if is_long else self.config.latencies))

    def _device_share(self, batch: int, step: StepFn, seconds: float) -> float | None:
        """Share of a step's time in which the device is busy; measured once, for sizes probed twice."""
        if (
            self.device.type != "cuda"
            or len(self._latencies_ms[batch]) <= self.config.latencies
            or seconds > MAX_SLEEP_S
        ):
            return None
        if batch not in self._device_s:
            with torch.cuda.device(self.device):
                self._device_s[batch], _ = behind_sleep_s(step, seconds)
        return min(1.0, self._device_s[batch] / seconds)

    def _timed(self, step: StepFn) -> float:
        began_s = time.perf_counter()
        step()
        self._wait()
        return time.perf_counter() - began_s

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            with suppress(OSError, AttributeError):  # freed memory would otherwise count for the next trial
                ctypes.CDLL(None).malloc_trim(0)


def budget_bytes(device: torch.device) -> int:
    """Memory this process could hold on the device: what is free, and what it holds already."""
    if device.type == "cuda":
        # Other processes' memory is not free, nor what is beyond our share; torch's cache and our tensors are ours.
        return free_bytes(device) + torch.cuda.memory_allocated(device)
    with PeakMemory(device) as now:
        return free_bytes(device) + now.start_bytes


class _Peak(PeakMemory):
    """The most memory that a trial took from the device.

    On CUDA what the allocator reserved, not what tensors held: fragments and workspaces must fit too.
    """

    @property
    def bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        return super().bytes

"""Where the time goes: throughput, busy and waiting seconds per stage, share of the ceiling, power.

Independent of what the stages do; displays nothing.
"""

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Self

import torch

from brim.engine.device import gpu_uuid
from brim.engine.nvml import close_nvml, find_gpu, open_nvml, quietly
from brim.errors import ConfigError

BUSY = "busy"  # in the stage's own work
INPUT = "input"  # waiting for the stage before
ROOM = "room"  # waiting for the stage after


class Meter:
    """Seconds and items of every stage of a run; safe to use from many threads.

    Each thread accounts its own time, so a stage with four workers has a busy share of up to 4.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, gpu: "GpuSampler | None" = None) -> None:
        """Take a clock in seconds, and a sampler whose summary becomes the summary\'s "gpu"."""
        self._clock = clock
        self._gpu = gpu
        self._lock = threading.Lock()
        self._started_s: float | None = None
        self._elapsed_s = 0.0
        self._items = 0
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._stage_items: defaultdict[str, int] = defaultdict(int)

    def start(self) -> None:
        """Start the wall clock, or continue it after a stop."""
        with self._lock:
            if self._started_s is None:
                self._started_s = self._clock()

    def stop(self) -> None:
        """Halt the wall clock; a second stop changes nothing."""
        with self._lock:
            self._elapsed_s = self._wall_s()
            self._started_s = None

    def busy(self, stage: str, *, items: int = 1) -> AbstractContextManager[None]:
        """Count the body of a with statement as work, and its items unless it raises."""
        return _Span(self, self._clock, stage, BUSY, items)

    def waiting(self, stage: str, cause: str) -> AbstractContextManager[None]:
        """Count the body of a with statement as waiting, by cause."""
        return _Span(self, self._clock, stage, cause, 0)

    def add(self, stage: str, seconds: float, kind: str, *, items: int = 0) -> None:
        """Add seconds measured elsewhere; kind is BUSY or the cause of a wait."""
        with self._lock:
            self._seconds[stage][kind] += seconds
            self._stage_items[stage] += items

    def count(self, items: int) -> None:
        """Add items that left the last stage."""
        with self._lock:
            self._items += items

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._wall_s()

    def stage(self, name: str) -> dict[str, Any]:
        """Return the account of one stage so far, as in the summary."""
        with self._lock:
            return self._stage_summary(name, self._wall_s())

    def summary(self) -> dict[str, Any]:
        """Return the accounts so far; spans still open are not in them."""
        with self._lock:
            wall_s = self._wall_s()
            summary: dict[str, Any] = {
                "seconds": wall_s,
                "items": self._items,
                "items_per_s": _ratio(self._items, wall_s),
                "stages": {stage: self._stage_summary(stage, wall_s) for stage in self._seconds},
                "waiting": self._waiting(),
            }
        gpu = self._gpu.summary() if self._gpu is not None else None
        if gpu is not None:
            summary["gpu"] = gpu
        return summary

    def _wall_s(self) -> float:
        running_s = 0.0 if self._started_s is None else self._clock() - self._started_s
        return self._elapsed_s + running_s

    def _stage_summary(self, stage: str, wall_s: float) -> dict[str, Any]:
        seconds = self._seconds[stage]
        return {
            "busy_s": seconds.get(BUSY, 0.0),
            "share": _ratio(seconds.get(BUSY, 0.0), wall_s),
            "wait_input_s": seconds.get(INPUT, 0.0),
            "wait_room_s": seconds.get(ROOM, 0.0),
            "items": self._stage_items[stage],
        }

    def _waiting(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for seconds in self._seconds.values():
            for cause in seconds.keys() - {BUSY}:
                total[cause] = total.get(cause, 0.0) + seconds[cause]
        return dict(sorted(total.items()))


def ceiling_rate(
    run: Callable[[], int],
    *,
    seconds: float = 1.0,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the items/s of the compute stage alone, as the median over repeats on one batch.

    run makes one batch, synchronises the device and returns its number of items; it is repeated
    for at least the given seconds, after warmup calls that do not count.
    """
    if seconds <= 0:
        raise ConfigError(f"seconds={seconds} must be above 0", hint="1.0 is enough for batches of some ms")
    for _ in range(warmup):
        run()
    rates: list[float] = []
    began_s = now_s = clock()
    while now_s - began_s < seconds:
        last_s = now_s
        num_items = run()
        now_s = clock()
        rates.append(num_items / max(now_s - last_s, 1e-9))
    return statistics.median(rates)


class GpuSampler:
    """Power, utilisation and memory of one GPU, sampled in a thread while the with block runs.

    Keeps running sums, not samples: a run may take days. Does nothing on other devices and where NVML is missing.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.1) -> None:
        self._device, self._interval_s = device, interval_s
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._samples = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._peak_bytes: int | None = None
        self._last: tuple[float, float | None] | None = None  # time in s, power in W
        self._integral_j: float | None = None
        self._counter_mj: tuple[int, int] | None = None  # first and latest reading

    def __enter__(self) -> Self:
        self._nvml = open_nvml() if self._device.type == "cuda" else None
        if self._nvml is None:
            return self
        self._handle = find_gpu(self._nvml, gpu_uuid(self._device))
        if self._handle is None:
            close_nvml(self._nvml)
            return self
        self._sample()
        self._leave.clear()
        self._thread = threading.Thread(target=self._keep_sampling, name="gpu-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None or self._nvml is None:
            return
        self._leave.set()
        self._thread.join()
        self._thread = None
        self._sample()
        close_nvml(self._nvml)

    def summary(self) -> dict[str, Any] | None:
        """What was sampled so far, or None; a reading the GPU does not offer is None."""
        with self._lock:
            if not self._samples:
                return None
            counter_mj = self._counter_mj
            return {
                "power_w_mean": self._mean("power_w"),
                "energy_j": self._integral_j if counter_mj is None else (counter_mj[1] - counter_mj[0]) / 1e3,
                "utilisation_mean": self._mean("utilisation"),
                "memory_bytes_peak": self._peak_bytes,
                "samples": self._samples,
            }

    def _mean(self, name: str) -> float | None:
        return self._sums[name] / self._counts[name] if self._counts[name] else None

    def _keep_sampling(self) -> None:
        while not self._leave.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        nvml, handle, now_s = self._nvml, self._handle, time.perf_counter()
        assert nvml is not None
        power_w = quietly(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        utilisation = quietly(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory_bytes = quietly(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        energy_mj = quietly(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        with self._lock:
            self._samples += 1
            for name, value in (("power_w", power_w), ("utilisation", utilisation)):
                if value is not None:
                    self._sums[name] += value
                    self._counts[name] += 1
            if memory_bytes is not None:
                self._peak_bytes = max(memory_bytes, self._peak_bytes or 0)
            if energy_mj is not None:
                self._counter_mj = (self._counter_mj[0] if self._counter_mj else energy_mj, energy_mj)
            last, self._last = self._last, (now_s, power_w)
            if last is not None and last[1] is not None and power_w is not None:
                self._integral_j = (self._integral_j or 0.0) + (now_s - last[0]) * (last[1] + power_w) / 2


class _Span:
    """A context manager that adds its duration to a meter."""

    # a class, not contextlib: a generator would add its frames to the traceback of a failing stage
    __slots__ = ("_began_s", "_clock", "_items", "_kind", "_meter", "_stage")

    def __init__(self, meter: Meter, clock: Callable[[], float], stage: str, kind: str, items: int) -> None:
        self._meter, self._clock, self._stage, self._kind, self._items = meter, clock, stage, kind, items
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = self._clock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = self._clock() - self._began_s
        self._meter.add(self._stage, seconds, self._kind, items=self._items if kind is None else 0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

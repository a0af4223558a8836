import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_time import FakeTime

from brim.engine.meter.throughput import BUSY, INPUT, ROOM, GpuSampler, Meter, ceiling_rate
from waiting import until


def test_summary_shows_where_the_time_went() -> None:
    clock = FakeTime()
    meter = Meter(clock=clock)
    meter.start()
    with meter.busy("compute"):
        clock.sleep(6.0)
    with meter.waiting("compute", INPUT):
        clock.sleep(3.0)
    with meter.waiting("compute", ROOM):
        clock.sleep(1.0)
    meter.add("read", 4.0, BUSY, items=7)  # in another thread
    meter.add("write", 2.0, "disk")
    meter.add("write", 0.5, INPUT)
    meter.count(50)
    meter.stop()
    clock.sleep(99.0)
    assert meter.summary() == {
        "seconds": 10.0,
        "items": 50,
        "items_per_s": 5.0,
        "stages": {
            "compute": {"busy_s": 6.0, "share": 0.6, "wait_input_s": 3.0, "wait_room_s": 1.0, "items": 1},
            "read": {"busy_s": 4.0, "share": 0.4, "wait_input_s": 0.0, "wait_room_s": 0.0, "items": 7},
            "write": {"busy_s": 0.0, "share": 0.0, "wait_input_s": 0.5, "wait_room_s": 0.0, "items": 0},
        },
        "waiting": {"disk": 2.0, "input": 3.5, "room": 1.0},
    }


def test_wall_time_runs_from_start_to_stop_and_goes_on_after_another_start() -> None:
    clock = FakeTime()
    meter = Meter(clock=clock)
    for _ in range(2):
        meter.start()
        meter.start()
        clock.sleep(2.0)
        assert meter.summary()["seconds"] % 2.0 == 0.0  # also while it runs
        meter.stop()
        meter.stop()
        clock.sleep(5.0)
    assert meter.summary()["seconds"] == 4.0


def test_failed_work_takes_time_but_makes_no_item() -> None:
    clock = FakeTime()
    meter = Meter(clock=clock)

    def fail() -> None:
        clock.sleep(1.0)
        raise KeyError

    with pytest.raises(KeyError), meter.busy("a", items=8):
        fail()
    with meter.busy("a", items=8):
        clock.sleep(1.0)
    stage = meter.summary()["stages"]["a"]
    assert (stage["busy_s"], stage["items"]) == (2.0, 8)


def test_accounts_from_many_threads_are_all_kept() -> None:
    meter = Meter()

    def account() -> None:
        for _ in range(2000):
            meter.add("a", 1.0, BUSY, items=1)
            meter.count(1)

    threads = [threading.Thread(target=account) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = meter.summary()
    assert summary["items"] == summary["stages"]["a"]["items"] == 8000
    assert summary["stages"]["a"]["busy_s"] == 8000.0


def test_ceiling_is_the_median_rate_after_the_warm_up() -> None:
    clock = FakeTime()
    durations_s = iter([50.0, 0.1, 0.2, 0.1, 0.9])  # the first is the warm-up

    def run() -> int:
        clock.sleep(next(durations_s))
        return 10

    assert ceiling_rate(run, seconds=1.25, clock=clock) == pytest.approx(75.0)  # of 100, 50, 100, 11
    assert next(durations_s, None) is None


class FakeNvml:
    """An NVML of two GPUs, of which CUDA sees the second alone; it draws 200 W."""

    def __init__(self, *, missing: frozenset[str] = frozenset()) -> None:
        self.missing, self.clock = missing, FakeTime()
        self.open = 0

    def _check(self, name: str) -> None:
        if name in self.missing:
            raise RuntimeError(f"{name}: not supported")

    def nvmlInit(self) -> None:
        self._check("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._check("handle")
        if uuid not in ("GPU-aaaa", "GPU-bbbb"):
            raise RuntimeError("not found")
        return uuid

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert handle == "GPU-bbbb"
        self._check("power")
        return 200_000

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._check("utilisation")
        return SimpleNamespace(gpu=90)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._check("memory")
        return SimpleNamespace(used=1 << 30)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check("energy")
        return int(self.clock() * 200_000)


def sample(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> dict[str, Any] | None:
    """The summary of 0.15 s in which a sample is taken at least five times."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="bbbb"))
    monkeypatch.setattr("brim.engine.meter.throughput.time", nvml.clock)
    before = threading.active_count()
    with GpuSampler(torch.device("cuda:0"), interval_s=0.01) as sampler:
        for number in range(2, 5):
            nvml.clock.sleep(0.05)
            until(lambda number=number: (sampler.summary() or {"samples": 9})["samples"] >= number)
    assert threading.active_count() == before
    assert nvml.open == 0
    return sampler.summary()


def test_sampler_finds_the_gpu_by_uuid_and_reads_the_energy_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = sample(monkeypatch, FakeNvml())
    assert gpu is not None
    assert gpu["power_w_mean"] == 200.0
    assert gpu["utilisation_mean"] == 90.0
    assert gpu["memory_bytes_peak"] == 1 << 30
    assert gpu["samples"] >= 5
    assert gpu["energy_j"] == pytest.approx(30.0)


def test_power_that_changes_is_integrated_by_trapezia(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, watts = FakeNvml(missing=frozenset({"energy"})), iter([100.0, 400.0, 100.0])
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", lambda handle: round(next(watts) * 1000))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="bbbb"))
    monkeypatch.setattr("brim.engine.meter.throughput.time", nvml.clock)
    with GpuSampler(torch.device("cuda:0"), interval_s=3600.0) as sampler:
        nvml.clock.sleep(2)
        sampler._sample()
        nvml.clock.sleep(4)
    gpu = sampler.summary()
    assert gpu is not None
    assert (gpu["energy_j"], gpu["power_w_mean"], gpu["samples"]) == (2 * 250 + 4 * 250, 200.0, 3)


def test_sampler_reports_missing_readings_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(missing=frozenset({"power", "energy", "utilisation", "memory"}))
    gpu = sample(monkeypatch, nvml)
    assert gpu is not None
    assert [gpu[key] for key in gpu if key != "samples"] == [None] * 4


@pytest.mark.parametrize("missing", ["init", "handle"])
def test_sampler_is_silent_without_nvml(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    assert sample(monkeypatch, FakeNvml(missing=frozenset({missing}))) is None

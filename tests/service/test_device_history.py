"""The last minutes of every device over HTTP: a sample a second, and what the worker's job says of its waiting."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_api import Api

from brim.errors import Unavailable
from brim.jobs.status import Flow
from brim.jobs.store import DeviceRow
from brim.jobs.worker.live import STALE_S, LiveFile
from brim.service.api.devices import MAX_SAMPLES, DeviceHistory, DeviceSample, Gauges, Reading
from waiting import PATIENCE_S, until

HISTORY = "/api/devices/history"
CPU = {"device": "cpu", "name": "a processor", "total_bytes": 8 * 2**30}
GPU = {"device": "cuda:0", "name": "a GPU", "total_bytes": 80 * 2**30, "uuid": "bbbb"}


def rows(**workers: dict[str, Any]) -> list[DeviceRow]:
    return [DeviceRow(worker=name, info=info, at=1.0) for name, info in workers.items()]


# Over HTTP


def test_what_the_workers_job_says_is_shown_until_it_ends(api: Api, monkeypatch):
    monkeypatch.setattr("brim.jobs.worker.live.STALE_S", 10 * PATIENCE_S)
    api.catalogue.devices.put("w0", CPU)
    live = LiveFile(api.settings.data, "w0")
    live.tell("a" * 32, Flow(seconds=1.0, waiting={"data": 0.0, "copy": 0.0}))
    live.tell("a" * 32, Flow(seconds=5.0, waiting={"data": 1.0, "copy": 0.2}))

    def device() -> Any:
        return next(iter(api.get(HISTORY).json["devices"]), None)

    shown = until(lambda: (found := device()) and found["job_id"] and found)
    live.clear()

    assert shown["job_id"] == "a" * 32
    assert shown["stalls"] == {"data": 0.25, "copy": 0.05}
    assert shown["samples"][-1]["ceiling_share"] == 0.7
    until(lambda: device()["job_id"] is None)
    assert device()["stalls"] == {}
    assert 0.7 in [sample["ceiling_share"] for sample in device()["samples"]], "the history keeps it"


def test_a_database_that_is_away_leaves_the_history(api: Api, monkeypatch):
    api.catalogue.devices.put("w0", CPU)
    until(lambda: api.get(HISTORY).json["devices"])

    def away() -> Any:
        raise Unavailable("the catalogue's database does not answer; try again soon")

    monkeypatch.setattr(api.api.state.context.history, "_workers", away)
    before = len(api.get(HISTORY).json["devices"][0]["samples"])
    until(lambda: len(api.get(HISTORY).json["devices"][0]["samples"]) > before)


# The ring


def test_the_ring_keeps_an_hour(tmp_path: Path, monkeypatch):
    with DeviceHistory(tmp_path, lambda: rows(w0=CPU), interval_s=0.01) as history:
        device = until(lambda: history.last(60))[0]
    assert device.samples.maxlen is None, "a copy"
    ring = history._devices["w0"].samples

    ring.extend(DeviceSample(second, 0.5, 1, None, None) for second in range(3700))
    monkeypatch.setattr("brim.service.api.devices.time", SimpleNamespace(time=lambda: 3700.0))

    assert len(ring) == MAX_SAMPLES == 3600
    assert [sample.at for sample in history.last(600)[0].samples] == list(range(3101, 3700))


def test_workers_that_are_gone_are_dropped_and_those_with_another_device_begin_anew(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("brim.service.api.devices.LIST_S", 0.0)
    working = {"w0": CPU, "w1": CPU}
    with DeviceHistory(tmp_path, lambda: rows(**working), interval_s=0.01) as history:
        until(lambda: len(history.last(3600)) == 2 and history.last(3600)[0].samples)
        working.pop("w1")
        before_at = history.last(3600)[0].samples[-1].at
        working["w0"] = {**CPU, "name": "another"}

        def begun_anew() -> Any:
            (device, *others) = history.last(3600)
            return device.name == "another" and not others and device.samples and device

        device = until(begun_anew)

    assert device.worker == "w0"
    assert device.samples[0].at > before_at


# Gauges


def test_the_busy_share_is_that_of_all_cores_since_the_last_look(tmp_path: Path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n")
    (tmp_path / "stat").write_text("cpu 100 0 100 700 100 0 0 0 50 50\ncpu0 1 1 1 1\n")
    cpu = Gauges(tmp_path)
    cpu.cpu()

    (tmp_path / "stat").write_text("cpu 130 0 120 740 110 0 0 0 80 80\n")
    reading = cpu.cpu()

    assert reading.busy_share == pytest.approx(0.5)  # 50 of 100 ticks; those of guests are in the others
    assert (reading.memory_bytes, reading.memory_total_bytes) == (600 * 1024, 1000 * 1024)
    assert cpu.cpu().busy_share is None, "no tick since"


@pytest.mark.parametrize(("cpu_share", "busy_share"), [(0.25, 0.25), (0.75, 0.5), (None, 0.0)])
def test_a_cpu_is_busy_with_a_job_as_far_as_both_say(tmp_path, monkeypatch, cpu_share, busy_share):
    live = SimpleNamespace(cpu_share=cpu_share, ceiling_share=0.7, job_id="a" * 32, stalls={"data": 0.1})
    monkeypatch.setattr("brim.service.api.devices.read_live", lambda data, worker: live)
    history = DeviceHistory(tmp_path, lambda: rows(w0=CPU))
    history._sample(SimpleNamespace(cpu=lambda: Reading(0.5, 3, 10)))

    (device,) = history.last(60)
    assert device.samples[-1][1:] == (busy_share, 3, None, 0.7)
    assert (device.memory_total_bytes, device.job_id, device.stalls) == (10, "a" * 32, {"data": 0.1})


class Nvml:
    """A driver with two GPUs, one of which does not tell its power."""

    def __init__(self) -> None:
        self.ended = False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.ended = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-aaaa", "GPU-bbbb"):
            raise RuntimeError("not found")
        return uuid

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=85 if handle == "GPU-bbbb" else 10)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=3, total=10)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if handle == "GPU-aaaa":
            raise RuntimeError("not supported")
        return 350_500


def test_a_gpu_is_found_by_its_uuid(tmp_path: Path, monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with DeviceHistory(tmp_path, lambda: rows(w0=GPU, w1=CPU), interval_s=0.01) as history:
        gpu, cpu = until(lambda: (found := history.last(60)) and found[0].samples and found)

    assert (gpu.kind, gpu.memory_total_bytes) == ("gpu", 10)
    assert gpu.samples[-1][1:] == (0.85, 3, 350.5, None)
    assert cpu.kind == "cpu"
    assert nvml.ended


def test_what_a_gpu_does_not_tell_is_null(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    with Gauges() as gauges:
        assert gauges.gpu("aaaa") == (0.1, 3, 10, None)
        assert gauges.gpu("cccc") == (None, None, None, None)
        assert gauges.gpu(None) == (None, None, None, None), "which of the two?"


def test_a_word_of_a_worker_that_died_is_not_believed(tmp_path: Path, monkeypatch):
    (tmp_path / "workers").mkdir()
    long_ago = time.time() - STALE_S - 1
    with monkeypatch.context() as then:
        then.setattr("brim.jobs.worker.live.time.time", lambda: long_ago)
        LiveFile(tmp_path, "w0").tell("a" * 32, None)
    with DeviceHistory(tmp_path, lambda: rows(w0=CPU), interval_s=0.01) as history:
        (device,) = until(lambda: (found := history.last(60)) and found[0].samples and found)

    assert device.job_id is None

"""The last hour of every worker's device, one sample a second, kept in the memory of the API process.

NVML and /proc (`Gauges`) ─┐
what workers report       ─┴─▶ one thread ──▶ a ring of samples per worker ──▶ GET /api/devices/history
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, Self

from brim.engine.nvml import close_nvml, find_gpu, open_nvml, quietly
from brim.errors import Unavailable
from brim.jobs.store import DeviceRow
from brim.jobs.worker.live import read_live

INTERVAL_S: Final = 1.0
MAX_SAMPLES: Final = 3600
LIST_S: Final = 5.0  # between two queries for the workers: they come with the service and seldom change
JOIN_S: Final = 5.0
PROC: Final = Path("/proc")
_IDLE: Final = (3, 4)  # columns of /proc/stat: idle, and idle while waiting for a disk
_GUESTS: Final = 8  # columns from here on are already counted in the others

log = logging.getLogger(__name__)


class DeviceSample(NamedTuple):
    """One second of a device; None where it cannot be read."""

    at: float  # seconds since 1970
    busy_share: float | None
    memory_bytes: int | None
    power_w: float | None
    ceiling_share: float | None  # of the job that runs there


@dataclass(slots=True)
class DeviceRecord:
    """What is known of a worker's device."""

    worker: str
    name: str
    kind: Literal["gpu", "cpu"]
    memory_total_bytes: int | None
    uuid: str | None = None
    job_id: str | None = None
    stalls: dict[str, float] = field(default_factory=dict)
    samples: deque[DeviceSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))


class DeviceHistory:
    """Samples while the with block runs; may be read from any thread."""

    def __init__(
        self,
        data: Path,
        workers: Callable[[], list[DeviceRow]],
        *,
        interval_s: float = INTERVAL_S,
        proc: Path = PROC,
    ) -> None:
        self._data, self._workers, self._interval_s, self._proc = data, workers, interval_s, proc
        self._lock, self._leave = threading.Lock(), threading.Event()
        self._devices: dict[str, DeviceRecord] = {}
        self._listed_s: float | None = None
        self._failed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._leave.clear()
        self._thread = threading.Thread(target=self._run, name="device-history", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)  # a database that does not answer is not waited for

    def last(self, seconds: float) -> list[DeviceRecord]:
        """Copies of every device with its samples of the last seconds, by the worker's name."""
        since = time.time() - seconds
        with self._lock:
            return [
                replace(
                    device,
                    stalls=dict(device.stalls),
                    samples=deque(sample for sample in device.samples if sample.at > since),
                )
                for _, device in sorted(self._devices.items())
            ]

    # The thread

    def _run(self) -> None:
        with Gauges(self._proc) as gauges:
            due_s = time.monotonic() + self._interval_s
            while not self._leave.wait(max(0.0, due_s - time.monotonic())):
                due_s = max(due_s + self._interval_s, time.monotonic())  # missed samples are not made up for
                try:
                    self._sample(gauges)
                except Exception:  # readings that fail are None; a bug of ours must not end the history
                    if not self._failed:
                        log.exception("the devices cannot be sampled; the history has a gap")
                    self._failed = True

    def _sample(self, gauges: "Gauges") -> None:
        self._list()
        now, cpu = time.time(), gauges.cpu()
        for device in self._devices.values():
            reading = cpu if device.kind == "cpu" else gauges.gpu(device.uuid)
            live = read_live(self._data, device.worker)
            ceiling_share = None if live is None else live.ceiling_share
            busy_share = reading.busy_share
            if device.kind == "cpu" and busy_share is not None:  # the machine may be busy with others
                busy_share = 0.0 if live is None else min(busy_share, live.cpu_share or 0.0)
            sample = DeviceSample(now, busy_share, reading.memory_bytes, reading.power_w, ceiling_share)
            with self._lock:
                device.samples.append(sample)
                device.memory_total_bytes = reading.memory_total_bytes or device.memory_total_bytes
                device.job_id, device.stalls = (None, {}) if live is None else (live.job_id, live.stalls)

    def _list(self) -> None:
        """Look up the workers now and then; while the database does not answer, the known ones stay."""
        now_s = time.monotonic()
        if self._listed_s is not None and now_s - self._listed_s < LIST_S and self._devices:
            return
        try:
            rows = self._workers()
        except Unavailable:
            return
        self._listed_s = now_s
        with self._lock:
            self._devices = {row.worker: self._record(row) for row in rows}

    def _record(self, row: DeviceRow) -> DeviceRecord:
        """A worker's device with the samples taken so far, unless the worker has another device now."""
        info, total = row.info, row.info.get("total_bytes")
        is_gpu = "cuda" in str(info.get("device", info.get("type", "")))
        current = DeviceRecord(
            worker=row.worker,
            name=str(info.get("name") or ("GPU" if is_gpu else "CPU")),
            kind="gpu" if is_gpu else "cpu",
            memory_total_bytes=total if isinstance(total, int) else None,
            uuid=info.get("uuid"),
        )
        before = self._devices.get(row.worker)
        if before is None or (before.kind, before.uuid, before.name) != (current.kind, current.uuid, current.name):
            return current
        return before


# Gauges


class Reading(NamedTuple):
    """The state of a device now; None where it cannot be read."""

    busy_share: float | None = None  # since the reading before
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None


class Gauges:
    """Readings of this machine's devices, inside a with block; for one thread."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc, self._ticks = proc, (0, 0)  # all and idle ones, at the reading before
        self._nvml: ModuleType | None = None
        self._gpus: dict[str, Any] = {}
        self._tried = False

    def __enter__(self) -> Self:
        self.cpu()
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            close_nvml(self._nvml)
        self._nvml, self._gpus = None, {}

    def cpu(self) -> Reading:
        """Busy share of all cores since the reading before, and this machine's memory."""
        try:
            ticks = [int(text) for text in (self._proc / "stat").read_text().splitlines()[0].split()[1:]]
        except (OSError, ValueError, IndexError):
            return Reading()  # not Linux
        total, idle = sum(ticks[:_GUESTS]), sum(ticks[column] for column in _IDLE if column < len(ticks))
        spent, idled = total - self._ticks[0], idle - self._ticks[1]
        self._ticks = (total, idle)
        busy = min(1.0, max(0.0, 1 - idled / spent)) if spent > 0 else None
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            memory = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            return Reading(busy, memory["MemTotal"] - memory["MemAvailable"], memory["MemTotal"])
        except (OSError, ValueError, KeyError, IndexError):
            return Reading(busy)

    def gpu(self, uuid: str | None) -> Reading:
        """The GPU with that UUID, or the only one if the worker does not name it."""
        if not self._tried:  # not before a worker has a GPU: machines without one need no NVML
            self._nvml, self._tried = open_nvml(), True
        nvml = self._nvml
        if nvml is None:
            return Reading()
        handle = self._gpus.get(uuid or "")
        if handle is None:
            handle = self._gpus[uuid or ""] = find_gpu(nvml, uuid) if uuid else _only_gpu(nvml)
        return Reading() if handle is None else _read_gpu(nvml, handle)


def _only_gpu(nvml: ModuleType) -> Any:
    if quietly(lambda: nvml.nvmlDeviceGetCount()) != 1:
        return None
    return quietly(lambda: nvml.nvmlDeviceGetHandleByIndex(0))


def _read_gpu(nvml: ModuleType, handle: Any) -> Reading:
    percent = quietly(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    memory = quietly(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    power_mw = quietly(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return Reading(
        busy_share=None if percent is None else percent / 100,
        memory_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_w=None if power_mw is None else power_mw / 1e3,
    )

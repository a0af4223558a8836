"""The last hour of every worker's device, a sample a second, in the memory of the process that answers for it.

gauges (NVML, /proc) ─┐
the workers' words   ─┴─▶ one thread ──▶ a ring of samples for each worker ──▶ GET /api/devices/history
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from brim.errors import Unavailable
from brim.jobs.store import DeviceRow
from brim.jobs.worker.live import LiveStatus, read_live
from brim.service.api.data.gauges import PROC, Gauges, Reading

INTERVAL_S: Final = 1.0
MAX_SAMPLES: Final = 3600
LIST_S: Final = 5.0  # between two looks at who works: workers come with the service and seldom change
JOIN_S: Final = 5.0

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One second of a device."""

    at: float  # seconds since 1970
    busy_share: float | None
    memory_bytes: int | None
    power_w: float | None
    ceiling_share: float | None  # of the job that runs there


@dataclass(slots=True)
class Device:
    """What is known of a worker's device."""

    worker: str
    name: str
    kind: Literal["gpu", "cpu"]
    memory_total_bytes: int | None
    uuid: str | None = None
    job_id: str | None = None
    stalls: dict[str, float] = field(default_factory=dict)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))


class DeviceHistory:
    """Samples while the with block runs; may be asked from any thread."""

    def __init__(
        self,
        data: Path,
        workers: Callable[[], list[DeviceRow]],
        *,
        interval_s: float = INTERVAL_S,
        proc: Path = PROC,
    ) -> None:
        """Take the data directory, what lists the workers, and the time between samples."""
        self._data, self._workers, self._interval_s, self._proc = data, workers, interval_s, proc
        self._lock, self._leave = threading.Lock(), threading.Event()
        self._devices: dict[str, Device] = {}
        self._listed_s: float | None = None
        self._failed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin to sample."""
        self._leave.clear()
        self._thread = threading.Thread(target=self._run, name="device-history", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; a database that does not answer is not waited for."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def last(self, seconds: float) -> list[Device]:
        """Every worker's device with its samples of the last seconds, as copies, by the worker's name."""
        since = time.time() - seconds
        with self._lock:
            return [
                Device(
                    worker=each.worker,
                    name=each.name,
                    kind=each.kind,
                    memory_total_bytes=each.memory_total_bytes,
                    uuid=each.uuid,
                    job_id=each.job_id,
                    stalls=dict(each.stalls),
                    samples=deque(sample for sample in each.samples if sample.at > since),
                )
                for _, each in sorted(self._devices.items())
            ]

    # The thread

    def _run(self) -> None:
        with Gauges(self._proc) as gauges:
            due_s = time.monotonic() + self._interval_s
            while not self._leave.wait(max(0.0, due_s - time.monotonic())):
                due_s = max(due_s + self._interval_s, time.monotonic())  # what was missed is not made up for
                try:
                    self._sample(gauges)
                except Exception:  # of no single reading, those are None: a fault of ours, which must not end the rest
                    if not self._failed:
                        log.exception("the devices cannot be sampled; the history has a gap")
                    self._failed = True

    def _sample(self, gauges: Gauges) -> None:
        """One sample of every device, all of the same moment."""
        self._list()
        now, cpu = time.time(), gauges.cpu()
        for each in self._devices.values():
            reading = cpu if each.kind == "cpu" else gauges.gpu(each.uuid)
            self._note(each, now, reading, read_live(self._data, each.worker))

    def _note(self, device: Device, at: float, read: Reading, word: LiveStatus | None) -> None:
        sample = Sample(
            at, read.busy_share, read.memory_bytes, read.power_w, None if word is None else word.ceiling_share
        )
        with self._lock:
            device.samples.append(sample)
            device.memory_total_bytes = read.memory_total_bytes or device.memory_total_bytes
            device.job_id = None if word is None else word.job_id
            device.stalls = {} if word is None else word.stalls

    def _list(self) -> None:
        """Look who works, now and then; while the database is away, those of before."""
        now_s = time.monotonic()
        if self._listed_s is not None and now_s - self._listed_s < LIST_S and self._devices:
            return
        try:
            rows = self._workers()
        except Unavailable:
            return
        self._listed_s = now_s
        with self._lock:
            self._devices = {row.worker: self._known(row) for row in rows}

    def _known(self, row: DeviceRow) -> Device:
        """A worker's device with what was sampled of it, unless it has another one now."""
        fresh = _device(row.worker, row.info)
        before = self._devices.get(row.worker)
        same = before is not None and (before.kind, before.uuid, before.name) == (fresh.kind, fresh.uuid, fresh.name)
        return before if same and before is not None else fresh


def _device(worker: str, info: dict[str, Any]) -> Device:
    """As the worker described it when it started."""
    is_gpu = "cuda" in str(info.get("device", info.get("type", "")))
    total = info.get("total_bytes")
    return Device(
        worker=worker,
        name=str(info.get("name") or ("GPU" if is_gpu else "CPU")),
        kind="gpu" if is_gpu else "cpu",
        memory_total_bytes=total if isinstance(total, int) else None,
        uuid=info.get("uuid"),
    )

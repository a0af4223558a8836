"""Readings of this machine's devices: how busy, how much memory, what power. No torch; what cannot be read is None."""

from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

from brim.engine.nvml import close_nvml, find_gpu, open_nvml, quietly

PROC = Path("/proc")
_IDLE = (3, 4)  # of the numbers in /proc/stat: idle, and idle while a disk is busy
_GUESTS = 8  # from this one on they are counted among the others already


class Reading(NamedTuple):
    """One look at a device."""

    busy_share: float | None = None  # since the look before
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None


class Gauges:
    """All of them, inside a with block; used by one thread."""

    def __init__(self, proc: Path = PROC) -> None:
        """Store; nothing is opened yet."""
        self._cpu = Cpu(proc)
        self._nvml: ModuleType | None = None
        self._gpus: dict[str, Any] = {}
        self._tried = False

    def __enter__(self) -> Self:
        """Begin to count."""
        self._cpu.read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let NVML go."""
        if self._nvml is not None:
            close_nvml(self._nvml)
        self._nvml, self._gpus = None, {}

    def cpu(self) -> Reading:
        """All cores of this machine, and its memory."""
        return self._cpu.read()

    def gpu(self, uuid: str | None) -> Reading:
        """The GPU of that UUID, or the only one where a worker does not say which it has."""
        if not self._tried:  # not before a worker has a GPU: machines without one need no NVML
            self._nvml, self._tried = open_nvml(), True
        nvml = self._nvml
        if nvml is None:
            return Reading()
        handle = self._gpus.get(uuid or "")
        if handle is None:
            handle = self._gpus[uuid or ""] = find_gpu(nvml, uuid) if uuid else _only(nvml)
        return Reading() if handle is None else _read_gpu(nvml, handle)


class Cpu:
    """The processor's ticks from one look to the next."""

    def __init__(self, proc: Path = PROC) -> None:
        """Take where the kernel says it."""
        self._proc, self._before = proc, (0, 0)

    def read(self) -> Reading:
        """Busy share since the look before, of all cores; and the memory."""
        try:
            numbers = [int(text) for text in (self._proc / "stat").read_text().splitlines()[0].split()[1:]]
        except (OSError, ValueError, IndexError):
            return Reading()  # not Linux
        total = sum(numbers[:_GUESTS])
        idle = sum(numbers[place] for place in _IDLE if place < len(numbers))
        spent, idled = total - self._before[0], idle - self._before[1]
        self._before = (total, idle)
        used, all_of_it = self._memory()
        busy = min(1.0, max(0.0, 1 - idled / spent)) if spent > 0 else None
        return Reading(busy, used, all_of_it)

    def _memory(self) -> tuple[int | None, int | None]:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            return known["MemTotal"] - known["MemAvailable"], known["MemTotal"]
        except (OSError, ValueError, KeyError, IndexError):
            return None, None


def _only(nvml: ModuleType) -> Any:
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

"""Which device, what it is, how many cores feed it, and random streams that depend only on their name.

Device names are read here and nowhere else; other modules take a `torch.device` or follow their input.
"""

import hashlib
import math
import os
import platform
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

import torch

from brim.engine.device.memory import PROC, cgroup_directories, free_bytes, total_bytes
from brim.errors import ConfigError, DeviceError

_T = TypeVar("_T")
_U = TypeVar("_U")
_CUDA = re.compile(r"cuda(?::([0-9]{1,4}))?")


def resolve_device(name: str) -> torch.device:
    """The device named "auto" (first GPU, else CPU), "cpu", "cuda" (cuda:0) or "cuda:N"; it must exist."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = _CUDA.fullmatch(name)
    if match is None:
        raise ConfigError(
            "is unknown", field="device", value=name, code="unknown_choice", hint="use auto, cpu, cuda or cuda:N"
        )
    index = int(match[1] or 0)
    num_here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_here:
        raise DeviceError("is not available", field="device", value=name, code="unavailable", hint=_choices(num_here))
    return torch.device("cuda", index)


def named_device(device: torch.device | str | int | None) -> torch.device:
    """A device as people name it: as in resolve_device, a torch.device, the number of a GPU, or None for auto."""
    if isinstance(device, torch.device) and device.type in ("cpu", "cuda"):
        return device if device.type == "cpu" or torch.cuda.is_available() else resolve_device(str(device))
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    return resolve_device("auto" if device is None else str(device))


def with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it: "cuda" is the current one."""
    is_vague = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_vague else device


def _choices(num_here: int) -> str:
    if num_here:
        choices = "cuda:0" if num_here == 1 else f"cuda:0 to cuda:{num_here - 1}"
        return f"{num_here} CUDA device{'s' * (num_here > 1)} found: use {choices} or cpu"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install a CUDA build or use cpu"
    return "no CUDA device found: check the driver with nvidia-smi or use cpu"


def describe(device: torch.device) -> dict[str, object]:
    """Facts about the device for a person or a report: name, memory, cores."""
    facts: dict[str, object] = {
        "device": str(device),
        "name": _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "total_bytes": total_bytes(device),
        "free_bytes": free_bytes(device),
        "cores": worker_count(),  # CPU cores on either device: they feed a GPU
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["multiprocessors"] = properties.multi_processor_count
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    return facts


def gpu_uuid(device: torch.device) -> str | None:
    """The UUID by which NVML identifies a GPU; None for other devices, or if torch does not know it."""
    if device.type != "cuda":
        return None
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (AttributeError, AssertionError, RuntimeError):  # an old torch, one without CUDA, a driver that is gone
        return None


def _cpu_name() -> str:
    try:
        for line in (PROC / "cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "CPU"


def stream(seed: int, *path: str | int, device: torch.device) -> torch.Generator:
    """Random stream named by path, e.g. stream(7, "augment", epoch)."""
    name = repr((seed, path)).encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest())
    return torch.Generator(device).manual_seed(number)


def worker_count() -> int:
    """CPU cores this process may use, within its affinity and its cgroup quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Rounded down: a thread above the quota is throttled, and stalls those that wait for it.
    return max(1, min(cores, math.floor(_cpu_quota())))


class CoreThreads:
    """A pool with a thread per core, each with one torch thread, so that no operation waits for another core.

    Work that torch divides among cores waits for the slowest of them, spinning: on a busy machine a small operation
    takes forty times as long.
    """

    def __enter__(self) -> Self:
        self._before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(worker_count(), initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    def map(self, work: Callable[[_T], _U], items: Iterable[_T]) -> list[_U]:
        return list(self._pool.map(work, items))

    def start(self, work: Callable[[_T], _U], item: _T) -> Future[_U]:
        return self._pool.submit(work, item)


def _cpu_quota() -> float:
    """Cores' worth of time the tightest enclosing cgroup allows; all cores without a quota."""
    cores = float(os.cpu_count() or 1)
    for group in cgroup_directories("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # v2, v1
            try:
                words = " ".join((group / name).read_text() for name in names).split()
            except OSError:
                continue
            # v2 writes "max", v1 writes -1 for no quota: neither is decimal
            if len(words) == 2 and words[0].isdecimal() and int(words[1]) > 0:
                cores = min(cores, int(words[0]) / int(words[1]))
    return cores

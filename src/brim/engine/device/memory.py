"""How much memory there is, what a batch may take, and what to do when it did not fit.

This is the only module that recognises out-of-memory; everyone else catches `brim.errors.OutOfMemory`.
It knows bytes and devices, not what a batch holds.
"""

import gc
import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

import torch

from brim.errors import ConfigError, OutOfMemory

log = logging.getLogger("brim")

INJECT_VARIABLE = "BRIM_INJECT_OOM_ABOVE"
SHARE_VARIABLE = "BRIM_MEMORY_SHARE"  # share of each device's memory this process may use
PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
SAMPLE_S = 0.005  # short enough to see a batch's peak; one read of /proc costs about 20 µs

_UNITS = {
    **{"": 1, "b": 1},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.IGNORECASE)


# Sizes


def parse_size(text: str) -> int:
    """Bytes from text such as "2GiB", "500 MB", "1.5 GiB", "1073741824"."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    size = int(Decimal(match[1]) * factor) if match and factor else 0
    if size < 1:
        raise ConfigError(
            f'size "{text}" is not a positive number of bytes', hint="write it like 2GiB, 500MB or 1073741824"
        )
    return size


def format_size(size_bytes: int) -> str:
    """Bytes as a person reads them, in powers of 1024: "1.5 GiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def batch_for(budget_bytes: int, bytes_per_item: int, fixed_bytes: int = 0, *, limit: int) -> int:
    """Largest batch, from 1 to limit, whose items fit the budget beside fixed_bytes."""
    room_bytes = max(0, budget_bytes - fixed_bytes)
    return max(1, min(limit, room_bytes // max(1, bytes_per_item)))


# How much there is


def free_bytes(device: torch.device) -> int:
    """Memory a new allocation can use now on the device, cgroup limits and this process's share included."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        free = min(int(torch.cuda.mem_get_info(device)[0]), _left_of_share(device, reserved))
        # The driver counts torch's cache as taken, though the next tensor comes out of it.
        return free + reserved - torch.cuda.memory_allocated(device)
    free = min([_host_free_bytes(), *(limit - used for limit, used in _cgroup_memory())])
    return min(free, _left_of_share(device, _resident_bytes()))


def total_bytes(device: torch.device) -> int:
    """Memory of the device, or what the cgroup leaves of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([_host_total_bytes(), *(limit for limit, _ in _cgroup_memory())])


def memory_share() -> float:
    """The part of each device's memory that this process may have, by BRIM_MEMORY_SHARE; 1 without it."""
    text = os.environ.get(SHARE_VARIABLE)
    if not text:
        return 1.0
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f'{SHARE_VARIABLE}="{text}" must be above 0 and at most 1', hint="set it like 0.8 or unset it"
        )
    return share


def keep_to_share(device: torch.device) -> None:
    """Limit torch to this process's share of the memory, so that other processes never run out of theirs."""
    share = memory_share()
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


def _left_of_share(device: torch.device, used_bytes: int) -> int:
    share = memory_share()
    return max(0, int(share * total_bytes(device)) - used_bytes) if share < 1 else sys.maxsize


def cgroup_directories(controller: str) -> list[Path]:
    """This process's control groups for a controller, innermost first: each of them may set a limit."""
    directories: list[Path] = []
    for line in _read(PROC / "self/cgroup").splitlines():
        _, names, group = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        unified = CGROUP_ROOT if (CGROUP_ROOT / "cgroup.controllers").exists() else CGROUP_ROOT / "unified"
        mount = CGROUP_ROOT / controller if names else unified  # v1 names its controllers, v2 does not
        path = PurePosixPath(group)
        directories += [mount / up.relative_to("/") for up in (path, *path.parents) if ".." not in up.parts]
    return directories


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of every enclosing memory cgroup that has a limit."""
    for group in cgroup_directories("memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
            if limit.isdecimal() and used.isdecimal():
                # Idle page cache counts as used, but the kernel drops it before an allocation fails: writing a
                # dataset would otherwise look like a leak.
                cache = _field(group / "memory.stat", cache_name)
                yield int(limit), max(0, int(used) - (cache or 0))


def _host_free_bytes() -> int:
    available_kib = _field(PROC / "meminfo", "MemAvailable:")
    # no /proc, as on macOS: assume that others use half
    return _host_total_bytes() // 2 if available_kib is None else available_kib * 1024


def _host_total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not Linux, another cgroup version, or hidden by the container


def _field(path: Path, name: str) -> int | None:
    """The number after name in a file of "name number" lines."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


# When it does not fit


# Recognised by message: torch's CPU allocator has no exception type of its own, and what runs out of memory in
# TorchScript is a RuntimeError that says so after a traceback.
_IN_TEXT = re.compile(r"(DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA (error: )?out of memory).*")


@contextmanager
def guard() -> Iterator[None]:
    """Turn every kind of out-of-memory into OutOfMemory; other failures pass untouched."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as failure:
        raise OutOfMemory(_reason(str(failure).strip().split("\n")[0] or type(failure).__name__)) from failure
    except RuntimeError as failure:
        match = _IN_TEXT.search(str(failure))
        if match is None:
            raise
        raise OutOfMemory(_reason(match[0])) from failure


def _reason(detail: str) -> str:
    return f"out of memory: {detail}; use a smaller batch or a smaller memory budget"


_injected_above: int | None = None  # process-wide, because pipeline threads must see it too


@contextmanager
def inject_oom(above: int) -> Iterator[None]:
    """Fault injection: inside the block a batch of more than `above` items does not fit."""
    global _injected_above
    before, _injected_above = _injected_above, above
    try:
        yield
    finally:
        _injected_above = before


def check_injected(batch: int) -> None:
    """Raise OutOfMemory when fault injection says that this batch does not fit."""
    above = _injected_above
    if above is None and (text := os.environ.get(INJECT_VARIABLE)):
        if not text.isdecimal():
            raise ConfigError(f'{INJECT_VARIABLE}="{text}" is not a number of items', hint="set it like 64 or unset it")
        above = int(text)
    if above is not None and batch > above:
        raise OutOfMemory(f"batch of {batch} is above the injected limit of {above} ({INJECT_VARIABLE})")


_Result = TypeVar("_Result")


class Halving:
    """A batch size that halves when a batch does not fit, and stays halved."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._warned = False
        self._lock = threading.Lock()  # several workers may share one batch size

    def run(self, fn: Callable[[Any], _Result], items: Any) -> list[_Result]:
        """Results of fn over items (a list, range or tensor), in order: one if they fit at once, else one per part."""
        results: list[_Result] = []
        waiting = [items]
        while waiting:
            part = waiting.pop()
            # A part larger than a size that failed is cut at once: it would fail again.
            if len(part) <= max(1, self.size):
                if self._fits(fn, part, results):
                    continue
                # Only now, outside the except block, is the traceback gone that kept fn's tensors alive.
                self._shrink(len(part))
            middle = (len(part) + 1) // 2
            waiting += [part[middle:], part[:middle]]
        return results

    def _fits(self, fn: Callable[[Any], _Result], part: Any, results: list[_Result]) -> bool:
        try:
            check_injected(len(part))
            with guard():
                results.append(fn(part))
        except OutOfMemory as failure:
            if len(part) > 1:
                return False
            raise OutOfMemory(
                f"a single item does not fit on {self.device} ({failure}); "
                "make the items smaller, free memory or use a larger device"
            ) from failure
        return True

    def _shrink(self, failed: int) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        with self._lock:
            self.size = min(self.size, (failed + 1) // 2)
            if not self._warned:
                log.warning("batch of %d did not fit on %s; continuing with %d", failed, self.device, self.size)
            self._warned = True


# What it took


class PeakMemory:
    """The most memory in use at any moment of a block; blocks may nest.

    On CUDA what torch's tensors held on the device, on the CPU the resident set of the process.
    """

    _open: "list[PeakMemory]" = []  # noqa: RUF012  # shared on purpose: the counters below are the process's
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start_bytes = 0  # in use when the block was entered
        self._seen_bytes = 0
        self._sampler: threading.Thread | None = None
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        with self._lock:
            # Resetting the counter would erase what enclosing blocks have seen: they note it first.
            for other in self._open:
                other._note()
            self._open.append(self)
            resettable = _reset_peak(self.device)
            self.start_bytes = _peak_bytes(self.device) if resettable else _resident_bytes()
        if not resettable and _field(PROC / "self/status", "VmRSS:") is not None:
            self._sampler = threading.Thread(target=self._sample, name="brim-peak-memory", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._sampler is not None:
            self._sampler.join()
        with self._lock:
            self._note()
            self._open.remove(self)

    @property
    def bytes(self) -> int:
        """Peak so far, final once the block is left."""
        with self._lock:
            if self in self._open:
                self._note()
            return self._seen_bytes

    def _note(self) -> None:
        reading = _resident_bytes() if self._sampler is not None else _peak_bytes(self.device)
        self._seen_bytes = max(self._seen_bytes, reading)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with self._lock:
                self._note()


def _reset_peak(device: torch.device) -> bool:
    """Make the peak counter start from what is in use now; False where that is not permitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # starts CUDA where nothing has yet: no statistics before that
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")
        return True
    return False


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak_kib = _field(PROC / "self/status", "VmHWM:")
    if peak_kib is not None:
        return peak_kib * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # since the process began: the best macOS has
    return peak if sys.platform == "darwin" else peak * 1024


def _resident_bytes() -> int:
    return (_field(PROC / "self/status", "VmRSS:") or 0) * 1024

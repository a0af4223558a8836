"""What a training step waits for: measured during training and on a fixed batch, with a diagnosis in words.

Waiting is lost device time. On a CPU the host clock measures it. On a GPU the host runs ahead, so events on the stream
measure it; the device time of one step is measured by queueing it behind a sleeping kernel.
"""

import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CAUSES = ("data", "copy", "host_sync", "logging", "checkpoint")
NAMED_ABOVE = 0.05  # share of the time from which a cause is reported
LAUNCH_BOUND_BELOW = 0.6  # share of a step in which the device works; less, and it waits for launches
ROUNDS = 5  # of steps on a fixed batch
SAMPLE_EVERY = 5  # steps; two events cost about 3 µs of device time, and 5 shares no factor with usual block sizes

_ADVICE = {
    "data": "the source cannot keep up; hold the data in VRAM or RAM, or make the source faster",
    "copy": "copies to the device are slow; hold the data in VRAM, or copy from pinned memory ahead of time",
    "host_sync": "the step makes the host wait for the device; keep .item(), .cpu() and prints out of the loss",
    "logging": "logs are written too often; raise log_every",
    "checkpoint": "checkpoints are written too often or to a slow disk; raise checkpoint_every_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    seconds: float  # of training, without evaluation and preparation
    steps: int
    waiting: Mapping[str, float]  # seconds by cause
    step_s: float | None = None  # one step on a fixed batch, one after the other; None: not measured
    device_s: float | None = None  # the same step without gaps between its kernels; None on a CPU
    captured: bool = False  # the step is a captured graph
    syncs: tuple[str, ...] = ()  # where a step made the host wait


def diagnose(times: Times) -> list[str]:
    """What kept the device from working, in words, worst first; empty if nothing did."""
    causes: list[tuple[float, str]] = []
    for cause, seconds in times.waiting.items():
        share = seconds / times.seconds if times.seconds > 0 else 0.0
        if share >= NAMED_ABOVE or (cause == "host_sync" and times.syncs):
            where = f" ({', '.join(times.syncs)})" if cause == "host_sync" and times.syncs else ""
            causes.append((share, f"{cause}: {share:.0%} of the time{where}: {_ADVICE[cause]}"))
    if times.step_s and times.device_s is not None and not times.captured and not times.syncs:
        idle = 1 - times.device_s / times.step_s
        if idle > 1 - LAUNCH_BOUND_BELOW:
            text = f"launch-bound: the device idles {idle:.0%} of a step: larger batch or graph"
            causes.append((idle * times.step_s * times.steps / max(times.seconds, 1e-9), text))
    return [text for _, text in sorted(causes, key=lambda pair: -pair[0])]


def split_wait(host_s: float, copy_s: float, device_s: float | None) -> tuple[float, float]:
    """Seconds of waiting for data and for copies between two steps.

    host_s    the host was held by the source
    copy_s    the part of it in which the source waited for a copy
    device_s  between the steps on the device; None on a CPU
    """
    data_s = max(0.0, host_s - copy_s)
    if device_s is None:
        return data_s, min(copy_s, host_s)
    data_s = min(data_s, device_s)  # while the device still had work, the host's waiting cost nothing
    return data_s, device_s - data_s


class Copies(Protocol):
    copy_s: float  # seconds a source of batches has waited for copies


class RunClock:
    """Seconds, steps and samples of training, and the time lost; continued after a resume.

    On a GPU the waiting of every SAMPLE_EVERY-th step is measured, by events, and extrapolated.
    """

    def __init__(self, device: torch.device, source: Copies) -> None:
        self._device, self._source = device, source
        self._began_s: float | None = None
        self._counted_s = 0.0  # until the last pause
        self._before: dict[str, float] = {}  # waiting of earlier runs
        self._spent = dict.fromkeys(CAUSES, 0.0)  # data and copy: of the sampled steps
        self._fed, self._sampled = 0, 0  # batches, and those of which the waiting is known
        self._pending: list[tuple[Any, Any, float, float]] = []
        self.steps = 0
        self.samples = 0
        self.samples_before = 0  # of earlier runs
        self.step_s = 0.0  # the host's, in steps

    @property
    def seconds(self) -> float:
        return self._counted_s + (0.0 if self._began_s is None else time.perf_counter() - self._began_s)

    @property
    def waiting(self) -> dict[str, float]:
        scale = self._fed / max(1, self._sampled)
        now = {cause: seconds * (scale if cause in ("data", "copy") else 1) for cause, seconds in self._spent.items()}
        return {cause: now[cause] + self._before.get(cause, 0.0) for cause in CAUSES}

    @property
    def waiting_now(self) -> dict[str, float] | None:
        """Seconds lost by the causes known during training; None until the first are measured."""
        if not self._sampled:
            return None
        return {cause: seconds for cause, seconds in self.waiting.items() if cause != "host_sync"}

    def go(self) -> None:
        """Start the clock, or keep it running."""
        if self._began_s is None:
            self._began_s = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock once the device has finished its queued work."""
        if self._began_s is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                self._settle()
            self._counted_s, self._began_s = self.seconds, None

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Around the wait for a batch, until it has arrived or its copy is queued."""
        on_gpu = self._device.type == "cuda"
        event = _record() if on_gpu and self._fed % SAMPLE_EVERY == 0 else None
        began_s, copied_s = time.perf_counter(), self._source.copy_s
        yield
        host_s, copy_s = time.perf_counter() - began_s, self._source.copy_s - copied_s
        self._fed += 1
        if event is not None:
            self._pending.append((event, _record(), host_s, copy_s))
        elif not on_gpu:
            self._add(*split_wait(host_s, copy_s, None))

    @contextmanager
    def stepping(self, num_items: int) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.step_s += time.perf_counter() - began_s
        self.steps += 1
        self.samples += num_items

    @contextmanager
    def losing(self, cause: str) -> Iterator[None]:
        """Around work during which the device is idle; it must have been synchronised.

        Counts only while the clock runs: the checkpoint after the last step delays nothing.
        """
        self._settle()
        began_s = time.perf_counter()
        yield
        if self._began_s is not None:
            self._spent[cause] += time.perf_counter() - began_s

    def _settle(self) -> None:
        """Read the events; only right after the device was synchronised."""
        for first, last, host_s, copy_s in self._pending:
            self._add(*split_wait(host_s, copy_s, first.elapsed_time(last) / 1e3))
        self._pending.clear()

    def _add(self, data_s: float, copy_s: float) -> None:
        self._sampled += 1
        self._spent["data"] += data_s
        self._spent["copy"] += copy_s

    def as_state(self) -> dict[str, Any]:
        state = {"seconds": self.seconds, "steps": self.steps, "samples": self.samples, "step_s": self.step_s}
        return {**state, "waiting": self.waiting}

    def load(self, state: Mapping[str, Any]) -> None:
        self._counted_s, self.steps, self.samples = state["seconds"], state["steps"], state["samples"]
        self.samples_before = self.samples
        self.step_s, self._before = state["step_s"], dict(state["waiting"])


def _record() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    step_s: float | None  # None: not measured
    device_s: float | None = None  # None on a CPU
    syncs: tuple[str, ...] = ()
    items: float = 0.0  # of the batch


def mean_times(timed: Sequence[tuple[StepTimes, int]]) -> StepTimes:
    """Several steps as one, each as often as its count says; all were measured on one device."""
    total = sum(count for _, count in timed)

    def mean(values: Iterable[float]) -> float:
        return sum(value * count for value, (_, count) in zip(values, timed, strict=True)) / total

    on_gpu = all(times.device_s is not None for times, _ in timed)
    return StepTimes(
        step_s=mean(times.step_s or 0.0 for times, _ in timed),
        device_s=mean(times.device_s or 0.0 for times, _ in timed) if on_gpu else None,
        syncs=tuple(dict.fromkeys(sync for times, _ in timed for sync in times.syncs)),
        items=mean(times.items for times, _ in timed),
    )


def time_step(step: Callable[[], object], device: torch.device, *, captured: bool, budget_s: float = 0.3) -> StepTimes:
    """Time a step that is repeated on one fixed batch; the caller restores what the step changes."""
    if device.type != "cuda":
        times_s: list[float] = []
        while sum(times_s) < budget_s or len(times_s) < 2:
            began_s = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - began_s)
        return StepTimes(step_s=statistics.median(times_s))
    # the median over rounds of many steps each: one alone would count the latency of its first launch
    repeats = max(2, min(1000, round(budget_s / ROUNDS / max(_elapsed_s(step, 2), 1e-6))))
    step_s = statistics.median(_elapsed_s(step, repeats) for _ in range(ROUNDS))
    if captured:  # its kernels follow each other without the host
        return StepTimes(step_s=step_s, device_s=step_s)
    syncs = tuple(find_syncs(step))
    device_s, blocked = behind_sleep_s(step, step_s)
    if blocked and not syncs:
        syncs = ("a wait in the step, such as torch.cuda.synchronize()",)
    return StepTimes(step_s=step_s, device_s=min(device_s, step_s), syncs=syncs)


def _elapsed_s(step: Callable[[], object], repeats: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    for _ in range(repeats):
        step()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / repeats


def behind_sleep_s(step: Callable[[], object], step_s: float) -> tuple[float, bool]:
    """Device seconds of a step whose launches were hidden by a sleeping kernel, and whether the host was held by it."""
    first, awake, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    cycles = int((0.02 + 3 * step_s) * 2e9)  # at about 2 GHz
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    awake.record()
    began_s = time.perf_counter()
    step()
    host_s = time.perf_counter() - began_s
    last.record()
    torch.cuda.synchronize()
    return awake.elapsed_time(last) / 1e3, host_s > 0.8 * first.elapsed_time(awake) / 1e3


def find_syncs(work: Callable[[], object]) -> list[str]:
    """Lines, as file:line, that make the host wait for the GPU while work runs; explicit waits are not seen."""
    lines: dict[str, None] = {}
    me = threading.get_ident()

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        # the mode is the process's: a prefetching thread may wait as much as it likes
        if "synchronizing CUDA operation" in str(message) and threading.get_ident() == me:
            lines[f"{filename.rpartition('/')[2]}:{lineno}"] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return list(lines)

"""Warm-up of a model: every batch size it will use runs before the first request.

Kernels are chosen, graphs captured and memory allocated here, not during the first requests. Each size is timed, as a
first guess for the batch policy, and the memory of the largest is measured, so that it can be accounted for.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from brim.engine.device import PeakMemory, format_size, guard
from brim.errors import OutOfMemory

RUNS = {"cuda": 2, "cpu": 1}  # of each size: on a GPU the next one captures a graph
CAPTURE_RUNS = 3  # on a GPU, from the largest size down: the capture, and two to time
WORTH = 0.05  # a larger batch must be this much faster per item to be worth its latency
TUNED = 16  # items: up to here a tuned size is used as it is; beyond, only where it pays: a batch of 82 that was 4 %
# faster per item than one of 16 took five times as long, and every other request waits for it
PATIENCE = 2  # sizes that may be no faster before the climb ends: throughput goes up in steps


class Warmable(Protocol):
    """What warm_up needs from a model."""

    sizes: Sequence[int]  # to be tried; afterwards, those to be used
    expected_s: Mapping[int, float]  # of a batch, by its size; set here
    weight_bytes: int

    @property
    def tuned(self) -> bool:
        """Whether the largest size is known to be the best; otherwise sizes are tried while throughput rises."""

    def example(self, num: int) -> list[Any]:
        """Parts like those of real requests."""

    def forward(self, parts: list[Any]) -> Any: ...

    def collect(self, running: Any) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    sizes: tuple[int, ...]  # that fit, up to the one beyond which batches are no faster
    expected_s: dict[int, float]
    memory_bytes: int  # weights, graphs, and the most that a batch holds beside them


def ladder(top: int) -> tuple[int, ...]:
    """Batch sizes 1, 2, 3, 4, 6, 8, 12, 16, … up to top, which is the last: few to capture, none far from the next."""
    steps = sorted({base << shift for shift in range(max(1, top).bit_length()) for base in (1, 2, 3)})
    return (*(size for size in steps if size < top), max(1, top))


def warm_up(
    model: Warmable,
    device: torch.device,
    lock: AbstractContextManager[Any],
    *,
    limit_bytes: int | None = None,
) -> Warmed:
    """Run the sizes of a model one after the other, and keep those that fit and raise throughput.

    The lock guards the device; it is held for one batch at a time, so that other models are served in between. One
    item that does not fit is an OutOfMemory.
    """
    before_bytes, most_bytes = _held_bytes(device), 0
    expected_s: dict[int, float] = {}
    least = TUNED if model.tuned else 1
    for size in model.sizes:
        try:
            runs = RUNS[device.type] + (size == 1)  # the very first is slow on any device
            seconds, batch_bytes = _run(model, size, device, lock, runs)
            total = model.weight_bytes + batch_bytes
            if limit_bytes is not None and total > limit_bytes:
                used, limit = format_size(total), format_size(limit_bytes)
                raise OutOfMemory(f"it takes {used} with its weights, and {limit} may be used")
        except OutOfMemory:
            if size == 1:
                raise
            break
        expected_s[size], most_bytes = seconds, max(most_bytes, batch_bytes)
        if size > least and _levelled_off(expected_s):
            break
    sizes = _worth(expected_s, least)
    if device.type == "cuda":
        # Downwards: a smaller graph computes in what a larger one took, while a larger one would take more beside it.
        for size in reversed(sizes):
            expected_s[size], _ = _run(model, size, device, lock, CAPTURE_RUNS)
    model.sizes, model.expected_s = sizes, {size: expected_s[size] for size in sizes}
    graph_bytes = _held_bytes(device) - before_bytes  # graphs keep their working memory
    return Warmed(
        sizes=sizes,
        expected_s=dict(model.expected_s),
        memory_bytes=model.weight_bytes + max(most_bytes, graph_bytes),
    )


def _run(
    model: Warmable, size: int, device: torch.device, lock: AbstractContextManager[Any], runs: int
) -> tuple[float, int]:
    """Seconds of a batch, and the most memory it held."""
    least_s, most_bytes = math.inf, 0
    for _ in range(runs):
        parts = model.example(size)
        with lock, PeakMemory(device) as memory, guard():
            began_s = time.perf_counter()
            for output in model.collect(model.forward(parts)):
                if isinstance(output, BaseException):
                    raise output
            least_s = min(least_s, time.perf_counter() - began_s)
        most_bytes = max(most_bytes, memory.bytes - memory.start_bytes)
    return least_s, most_bytes


def _levelled_off(expected_s: Mapping[int, float]) -> bool:
    """Whether the last sizes were no faster per item than the best before them."""
    rates = [size / seconds for size, seconds in expected_s.items()]
    return len(rates) > PATIENCE and max(rates[-PATIENCE:]) < (1 + WORTH) * max(rates[:-PATIENCE])


def _worth(expected_s: Mapping[int, float], least: int) -> tuple[int, ...]:
    """Sizes up to least, and further up to the smallest that is about as fast per item as the best."""
    rates = {size: size / seconds for size, seconds in expected_s.items()}
    best = max(rates.values())
    top = next(size for size, rate in rates.items() if rate >= best / (1 + WORTH))
    return tuple(size for size in rates if size <= max(top, least))


def _held_bytes(device: torch.device) -> int:
    """Memory that torch has reserved on a GPU after emptying its cache; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))

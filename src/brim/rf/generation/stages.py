"""From accepted scenes to rows on one device: the stages that every way of generating shares, overlapped.

scenes (the caller's source) → prepare (messages, links) → compute (device) → assemble (rows) → the caller's loop
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import Halving, PeakMemory, batch_for, free_bytes, worker_count
from brim.engine.meter import Meter, ceiling_rate
from brim.engine.pipeline import HostCopy, Pending, Pipeline, Stage
from brim.rf.config import GenerateConfig
from brim.rf.generation.batch import Backend, Measured, Work, make_work
from brim.rf.generation.compute import open_backend
from brim.rf.generation.rows import assemble
from brim.rf.physics.scene import Scenes

GPU_LIMIT = 2_048  # samples per batch; larger ones are no faster: benchmarks/results/generate_h200_2026-11-15.md
GPU_RAMP = 256  # samples of the first batch at most, doubled from batch to batch
GPU_PROBE = 8  # samples in the first batch whose memory is measured
IQ_BYTES = 512 * 2**20  # of IQ in a batch at most: it passes through the host's memory, several batches at once
BATCHES_IN_FLIGHT = 4  # between the stages on a CPU, each holding its rows

Tag = TypeVar("Tag")
Rows = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Made(Generic[Tag]):
    """Rows of a batch, with what its scenes were tagged with."""

    rows: Rows
    tag: Tag


@dataclass(frozen=True, slots=True)
class _Started:
    """A part of a batch on its way to the host."""

    work: Work
    pending: Pending


class Stages:
    """A device with its backend, its batch size and the threads that feed it; open while the with block runs."""

    def __init__(self, config: GenerateConfig, device: torch.device, *, threads: int | None = None) -> None:
        """Store; threads are the CPU cores to compute on, all of them unless told."""
        self.config, self.device = config, device
        self.threads = threads or worker_count()
        self.iq = config.dataset_type == "iq_raw"
        self.on_gpu = device.type == "cuda"
        # On a CPU two batches share the threads, so that none idles at the end of a batch.
        self.compute_workers = 1 if self.on_gpu else 2
        self.meter, self.copies = Meter(), HostCopy()
        self.halving = Halving(1, device)
        self.backend: Backend
        self._ramp = GPU_RAMP
        self._previous: Pending | None = None
        self._largest: Work | None = None  # a batch to measure the ceiling on
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open the backend."""
        self.backend = self._open.enter_context(open_backend(self.config, self.device, self.threads))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End its threads."""
        self._open.close()

    @property
    def device_name(self) -> str:
        """As the manifest has it: shards of one name have equal bytes."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    # Before the run

    def prepare(self, first: Scenes, batch_size: int | None, memory: int | None) -> None:
        """Settle the batch size, given or fitted to the memory, and compile what must be compiled."""
        self.halving.size = batch_size or self._fit(first, memory)
        if batch_size and self.on_gpu:
            self._measure(_repeat(self.config, first, 1))

    def _fit(self, first: Scenes, memory: int | None) -> int:
        """Samples per batch that the memory takes, from the measured memory of a small and then a full batch."""
        limit = GPU_LIMIT if self.on_gpu else 2 * self.threads
        if self.iq:
            limit = max(1, min(limit, IQ_BYTES // (self.config.max_receivers * self.config.num_samples_iq * 8)))
        size = min(limit, GPU_PROBE if self.on_gpu else self.threads)
        for _ in range(2):
            work = _repeat(self.config, first, size)
            with PeakMemory(self.device) as peak:
                self._measure(work)
            used = max(1, peak.bytes - peak.start_bytes)
            # The probe repeats one sample; others may be heard by every receiver.
            per_item = used / size * self.config.max_receivers / (len(work.links) / size)
            budget = free_bytes(self.device) * 8 // 10  # the rest is for fragmentation and the neighbours
            if memory is not None:
                budget = max(1, min(budget, memory - peak.start_bytes))
            in_flight = 1 if self.on_gpu else BATCHES_IN_FLIGHT
            size = batch_for(budget, int(per_item * in_flight) + 1, limit=limit)
        return size

    def _measure(self, work: Work) -> int:
        """The compute stage alone on one batch, to the end; returns its records."""
        self.halving.size = max(self.halving.size, len(work))
        self.halving.run(lambda part: self.backend.measure(part, iq=self.iq), work)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return len(work.links)

    # The run

    def next_batch(self) -> int:
        """Samples of the next batch: the first are small, so that a GPU does not wait for the host to begin."""
        size = min(self.halving.size, self._ramp)
        self._ramp *= 2
        return size

    def run(self, source: Iterable[tuple[Scenes, Tag]], tick: Callable[[], None] | None = None) -> Pipeline:
        """Results of type Made in the order of the source; a pipeline to be entered."""
        stages: list[Stage[Any, Any]] = [
            Stage(name="prepare", work=self._prepare, workers=2),
            Stage(name="compute", work=self._compute, workers=self.compute_workers, depth=1),
            Stage(name="assemble", work=self._assemble, workers=2, depth=1),
        ]
        return Pipeline(source, stages, meter=self.meter, source_name="scene", depth=1, tick=tick)

    def _prepare(self, item: tuple[Scenes, Tag]) -> tuple[Work, Tag]:
        scenes, tag = item
        return make_work(self.config, scenes), tag

    def _compute(self, item: tuple[Work, Tag]) -> tuple[list[_Started], Tag]:
        work, tag = item
        parts = self.halving.run(self._start, work)
        if self._largest is None or len(work) > len(self._largest):
            self._largest = work
        if self.on_gpu:  # one batch computes while the one before is copied out
            previous, self._previous = self._previous, parts[-1].pending
            if previous is not None:
                previous.wait()
        return parts, tag

    def _start(self, work: Work) -> _Started:
        measured = self.backend.measure(work, iq=self.iq)
        tensors = {"peak": measured.peak, "truth": measured.truth, "features": measured.features}
        if measured.iq is not None:
            tensors["iq"] = measured.iq
        return _Started(work, self.copies.start(tensors))

    def _assemble(self, item: tuple[list[_Started], Tag]) -> Made[Tag]:
        parts, tag = item
        rows = []
        for part in parts:
            host = part.pending.wait()
            measured = Measured(peak=host["peak"], truth=host["truth"], features=host["features"], iq=host.get("iq"))
            rows.append(assemble(self.config, part.work, measured))
        return Made(join(rows), tag)

    # After the run

    def ceiling(self) -> float | None:
        """Records/s of the compute stage alone on the largest batch over and over; None when there was none.

        In records, since the samples of one batch may have more or fewer receivers than the run's.
        """
        work = self._largest
        if work is None:
            return None

        def once() -> int:
            if self.compute_workers == 1:
                return self._measure(work)
            with ThreadPoolExecutor(self.compute_workers) as pool:
                return sum(pool.map(self._measure, [work] * (2 * self.compute_workers)))

        return ceiling_rate(once, warmup=int(self.on_gpu))


def join(parts: list[Rows]) -> Rows:
    """The rows of several batches as one."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([rows[name] for rows in parts]) for name in parts[0]}


def _repeat(config: GenerateConfig, first: Scenes, num: int) -> Work:
    """A batch of the same sample over and over."""
    return make_work(config, first[np.zeros(num, np.int64)])

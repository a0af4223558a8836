"""From accepted scenes to rows on one device, in overlapped stages.

scenes (the caller's source) → prepare (messages, links) → compute (device) → assemble (rows) → the caller's loop
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.engine.device import Halving, PeakMemory, batch_for, free_bytes, resolve_device, worker_count
from brim.engine.meter import Meter, ceiling_rate
from brim.engine.pipeline import HostCopy, Pending, Pipeline, Stage
from brim.rf import features as ft
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.generation.accounting import DeviceAccount
from brim.rf.generation.backend import Backend, Measured, Transmissions, make_transmissions, open_backend
from brim.rf.generation.rows import assemble
from brim.rf.physics.scene import Scenes, make_scenes

GPU_LIMIT = 2_048  # samples per batch; larger ones are no faster: benchmarks/results/generate_h200_2026-11-15.md
GPU_RAMP = 256  # samples of the first batch at most, doubled from batch to batch
GPU_PROBE = 8  # samples in the first batch whose memory is measured
IQ_BYTES = 512 * 2**20  # of IQ in a batch at most: it passes through the host's memory, several batches at once
BATCHES_IN_FLIGHT = 4  # between the stages on a CPU, each holding its rows

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class MadeBatch(Generic[Tag]):
    """Rows of a batch, with the tag of its scenes."""

    rows: dict[str, Tensor]
    tag: Tag


@dataclass(frozen=True, slots=True)
class _StartedPart:
    """A part of a batch on its way to the host."""

    batch: Transmissions
    pending: Pending


class Stages:
    """A device with its backend, its batch size and the threads that feed it; open while the with block runs."""

    def __init__(self, config: GenerateConfig, device: torch.device, *, threads: int | None = None) -> None:
        """threads are the CPU cores to compute on; None: all of them."""
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
        self._largest: Transmissions | None = None  # a batch to measure the ceiling on
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self.backend = self._open.enter_context(open_backend(self.config, self.device, self.threads))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def device_name(self) -> str:
        """As in the manifest: devices of one name produce equal bytes."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    # Before the run

    def prepare(self, first: Scenes, batch_size: int | None, memory: int | None) -> None:
        """Set the batch size, or fit it to the memory, and compile the kernels."""
        self.halving.size = batch_size or self._fit(first, memory)
        if batch_size and self.on_gpu:
            self._measure(_repeat(self.config, first, 1))

    def _fit(self, first: Scenes, memory: int | None) -> int:
        """Samples per batch that fit in memory, from the measured memory of a small and then a full batch."""
        limit = GPU_LIMIT if self.on_gpu else 2 * self.threads
        if self.iq:
            limit = max(1, min(limit, IQ_BYTES // (self.config.max_receivers * self.config.num_samples_iq * 8)))
        size = min(limit, GPU_PROBE if self.on_gpu else self.threads)
        for _ in range(2):
            batch = _repeat(self.config, first, size)
            with PeakMemory(self.device) as peak:
                self._measure(batch)
            used = max(1, peak.bytes - peak.start_bytes)
            # The probe repeats one sample; others may be heard by every receiver.
            per_item = used / size * self.config.max_receivers / (len(batch.links) / size)
            budget = free_bytes(self.device) * 8 // 10  # the rest is for fragmentation and other processes
            if memory is not None:
                budget = max(1, min(budget, memory - peak.start_bytes))
            in_flight = 1 if self.on_gpu else BATCHES_IN_FLIGHT
            size = batch_for(budget, int(per_item * in_flight) + 1, limit=limit)
        return size

    def _measure(self, batch: Transmissions) -> int:
        """The compute stage alone on one batch, to the end; returns its records."""
        self.halving.size = max(self.halving.size, len(batch))
        self.halving.run(lambda part: self.backend.measure(part, iq=self.iq), batch)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return len(batch.links)

    # The run

    def next_batch(self) -> int:
        """Samples of the next batch: the first are small, so that a GPU does not wait for the host to begin."""
        size = min(self.halving.size, self._ramp)
        self._ramp *= 2
        return size

    def run(self, source: Iterable[tuple[Scenes, Tag]], tick: Callable[[], None] | None = None) -> Pipeline:
        """Results of type MadeBatch in the order of the source; a pipeline to be entered."""
        stages: list[Stage[Any, Any]] = [
            Stage(name="prepare", work=self._prepare, workers=2),
            Stage(name="compute", work=self._compute, workers=self.compute_workers, depth=1),
            Stage(name="assemble", work=self._assemble, workers=2, depth=1),
        ]
        return Pipeline(source, stages, meter=self.meter, source_name="scene", depth=1, tick=tick)

    def _prepare(self, item: tuple[Scenes, Tag]) -> tuple[Transmissions, Tag]:
        scenes, tag = item
        return make_transmissions(self.config, scenes), tag

    def _compute(self, item: tuple[Transmissions, Tag]) -> tuple[list[_StartedPart], Tag]:
        batch, tag = item
        parts = self.halving.run(self._start, batch)
        if self._largest is None or len(batch) > len(self._largest):
            self._largest = batch
        if self.on_gpu:  # one batch computes while the one before is copied out
            previous, self._previous = self._previous, parts[-1].pending
            if previous is not None:
                previous.wait()
        return parts, tag

    def _start(self, batch: Transmissions) -> _StartedPart:
        measured = self.backend.measure(batch, iq=self.iq)
        tensors = {"peak": measured.peak, "truth": measured.truth, "features": measured.features}
        if measured.iq is not None:
            tensors["iq"] = measured.iq
        return _StartedPart(batch, self.copies.start(tensors))

    def _assemble(self, item: tuple[list[_StartedPart], Tag]) -> MadeBatch[Tag]:
        parts, tag = item
        rows = []
        for part in parts:
            host = part.pending.wait()
            measured = Measured(peak=host["peak"], truth=host["truth"], features=host["features"], iq=host.get("iq"))
            rows.append(assemble(self.config, part.batch, measured))
        return MadeBatch(join(rows), tag)

    # After the run

    def ceiling(self) -> float | None:
        """Records/s of the compute stage alone on the largest batch, repeated; None without a batch.

        In records, since the samples of one batch may have more or fewer receivers than the run's.
        """
        batch = self._largest
        if batch is None:
            return None

        def once() -> int:
            if self.compute_workers == 1:
                return self._measure(batch)
            with ThreadPoolExecutor(self.compute_workers) as pool:
                return sum(pool.map(self._measure, [batch] * (2 * self.compute_workers)))

        return ceiling_rate(once, warmup=int(self.on_gpu))

    def account(self, peak_bytes: int, gpu: dict[str, Any] | None, *, ceiling: float | None = None) -> DeviceAccount:
        """Time and memory of the run; gpu is a GpuSampler's summary."""
        stages = self.meter.summary()["stages"] | ({"gpu": gpu} if gpu is not None else {})
        return DeviceAccount(ceiling=ceiling, stages=stages, batch_size=self.halving.size, peak_bytes=peak_bytes)


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([rows[name] for rows in parts]) for name in parts[0]}


def _repeat(config: GenerateConfig, first: Scenes, num: int) -> Transmissions:
    """A batch that repeats one sample."""
    return make_transmissions(config, first[np.zeros(num, np.int64)])


def generate_batch(
    config: GenerateConfig,
    indices: NDArray[np.int64] | Tensor | list[int] | range,
    device: torch.device | str = "auto",
    *,
    chunks: bool = False,
) -> dict[str, Tensor]:
    """Rows of the accepted attempts among these, in their order, without touching the disk."""
    index = np.asarray(indices, np.int64).reshape(-1)
    scenes = make_scenes(config, index)
    batch = make_transmissions(config, scenes[np.nonzero(scenes.accepted)[0]])
    iq = config.dataset_type == "iq_raw"
    if not len(batch):
        return assemble(config, batch, _empty(config, iq=iq), chunks=chunks)
    with open_backend(config, resolve_device(str(device))) as backend:
        return assemble(config, batch, backend.measure(batch, iq=iq).to("cpu"), chunks=chunks)


def _empty(config: GenerateConfig, *, iq: bool) -> Measured:
    """Measurements of no records."""
    return Measured(
        peak=torch.empty(0),
        truth=torch.empty(0, NUM_CHUNKS, 2),
        features=torch.empty(0, len(ft.FEATURES), len(ft.STATISTICS)),
        chunks=torch.empty(0, NUM_CHUNKS, len(ft.FEATURES)),
        iq=torch.empty(0, config.num_samples_iq, dtype=torch.complex64) if iq else None,
    )

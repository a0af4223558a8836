"""From accepted scenes to rows on one device, in overlapped stages.

scenes (the caller's source) → prepare (messages, links) → compute (device) → assemble (rows) → the caller's loop
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.engine.device import Halving, PeakMemory, batch_for, free_bytes, resolve_device, worker_count
from brim.engine.meter import BUSY, CeilingProbe, Meter, ceiling_rate
from brim.engine.pipeline import HostCopy, Pending, Pipeline, Stage
from brim.rf import features as ft
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.generation.accounting import DeviceAccount
from brim.rf.generation.backend import (
    PASS_RECORDS,
    Backend,
    Measured,
    Transmissions,
    make_transmissions,
    open_backend,
)
from brim.rf.generation.rows import assemble
from brim.rf.physics.scene import Scenes, make_scenes

GPU_LIMIT = 2_048  # samples per batch; larger ones are no faster: benchmarks/results/generate_h200_2026-11-15.md
GPU_RAMP = 256  # samples of the first batch at most, doubled from batch to batch
GPU_PROBE = 8  # samples in the first batch whose memory is measured
FITS = 6  # batches measured at most to fit the size
CEILING_S = 0.05  # how long the ceiling is measured, each time; at least one batch
IQ_BYTES = 512 * 2**20  # of IQ in a batch at most: it passes through the host's memory, several batches at once
SCENE_THREADS = 4  # that draw scenes for a GPU, at most
SWITCH_S = 1e-4  # after which a thread that computes in Python lets others run, on a GPU
BATCHES_IN_FLIGHT = 4  # between the stages on a CPU, each holding its rows

StartedPart = tuple[Transmissions, Pending]  # a part of a batch on its way to the host


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
        # A GPU takes more scenes over hills than one core draws; a CPU's cores have more to do with the signals.
        self.scene_threads = max(1, min(SCENE_THREADS, self.threads // 2)) if self.on_gpu else 1
        self.meter, self.copies = Meter(), HostCopy()
        self.halving = Halving(1, device)
        self.backend: Backend
        self._ramp = GPU_RAMP
        self._previous: Pending | None = None
        self.probe, self._turns = CeilingProbe(), threading.Condition()
        self._computing, self._probing = 0, False  # batches in the compute stage; whether the ceiling is measured
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self.on_gpu:
            self._open.enter_context(_switching_often())
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
        if batch_size:
            self.halving.size = batch_size
            if self.on_gpu:
                self._measure(_repeat(self.config, first, 1))
            return
        size = self._fit(first, memory)
        if self.on_gpu:  # what little memory limits are the records in the kernels at once, not the batch
            self.backend.limit_records(size * self.config.max_receivers)
        self.halving.size = GPU_LIMIT if self.on_gpu and not self.iq else size

    def _fit(self, first: Scenes, memory: int | None) -> int:
        """Samples that fit in memory at once, from the measured memory of a small and then of larger batches.

        FFTs need a tile of fixed size however small the batch: with little memory, the share of a sample is known only
        from a batch that nearly fills it.
        """
        limit = max(1, PASS_RECORDS // self.config.max_receivers) if self.on_gpu else 2 * self.threads
        if self.iq:
            limit = max(1, min(limit, IQ_BYTES // (self.config.max_receivers * self.config.num_samples_iq * 8)))
        size = min(limit, GPU_PROBE if self.on_gpu else self.threads)
        for number in range(FITS):
            batch = _repeat(self.config, first, size)
            with PeakMemory(self.device) as peak:
                self._measure(batch)
            used = max(1, peak.bytes - peak.start_bytes)
            # The probe repeats one sample; others may be heard by every receiver.
            per_item = used / size * self.config.max_receivers / (len(batch.links) / size)
            budget = free_bytes(self.device) * 8 // 10  # the rest is for fragmentation and other processes
            if memory is not None:
                budget = max(1, min(budget, memory - peak.start_bytes))
            if self.on_gpu:
                budget = budget * 7 // 8  # the rest is for the features of whole batches
            in_flight = 1 if self.on_gpu else BATCHES_IN_FLIGHT
            measured, size = size, batch_for(budget, int(per_item * in_flight) + 1, limit=limit)
            if number and size <= 1.2 * measured:
                break
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

    def run(self, source: Iterable[tuple[Scenes, Any]], tick: Callable[[], None] | None = None) -> Pipeline:
        """Rows and the tag of their scenes, in the order of the source; a pipeline to be entered."""
        stages: list[Stage[Any, Any]] = [
            Stage(name="prepare", work=lambda item: (make_transmissions(self.config, item[0]), item[1]), workers=2),
            Stage(name="compute", work=self._compute, workers=self.compute_workers, depth=1),
            Stage(name="assemble", work=self._assemble, workers=2, depth=1),
        ]
        return Pipeline(source, stages, meter=self.meter, source_name="scene", depth=1, tick=tick)

    def abandon(self) -> None:
        """Drop what is being computed: the pipeline's threads end within a sample's time."""
        self.backend.abandon()

    def _compute(self, item: tuple[Transmissions, Any]) -> tuple[list[StartedPart], Any]:
        batch, tag = item
        with self._computing_one():
            began_s = time.perf_counter()
            parts = self.halving.run(self._start, batch)
            if self.on_gpu:  # one batch computes while the one before is copied out
                previous, self._previous = self._previous, parts[-1][1]
                if previous is not None:
                    previous.wait()
            compute_s = time.perf_counter() - began_s
        self._measure_ceiling(batch, compute_s)
        return parts, tag

    def _start(self, batch: Transmissions) -> StartedPart:
        measured = self.backend.measure(batch, iq=self.iq)
        tensors = {name: getattr(measured, name) for name in ("peak", "truth", "features", "power")}
        if measured.iq is not None:
            tensors["iq"] = measured.iq
        return batch, self.copies.start(tensors)

    def _assemble(self, item: tuple[list[StartedPart], Any]) -> tuple[dict[str, Tensor], Any]:
        parts, tag = item
        return join([assemble(self.config, batch, Measured(**pending.wait())) for batch, pending in parts]), tag

    # The ceiling

    def _measure_ceiling(self, batch: Transmissions, compute_s: float) -> None:
        """Now and then, time the compute stage alone on a batch just made, while no other is computed.

        In records, since the samples of one batch may have more or fewer receivers than the run's.
        """
        run_s = self.meter.seconds - self.probe.cost_s
        with self._turns:
            if self._probing or not self.probe.due(run_s, compute_s):
                return
            self._probing, began_s = True, time.perf_counter()
            self._turns.wait_for(lambda: not self._computing)
        waited_s = time.perf_counter() - began_s

        def once() -> int:
            if self.compute_workers == 1:
                return self._measure(batch)
            with ThreadPoolExecutor(self.compute_workers) as pool:
                return sum(pool.map(self._measure, [batch] * self.compute_workers))

        try:
            rate = ceiling_rate(once, seconds=CEILING_S, warmup=int(self.on_gpu))
            # the other worker computed meanwhile: half of the waiting was work
            self.probe.add(rate, time.perf_counter() - began_s - waited_s / 2, run_s)
        finally:
            with self._turns:
                self._probing = False
                self._turns.notify_all()
            self.meter.add("compute", began_s - time.perf_counter(), BUSY)

    @contextmanager
    def _computing_one(self) -> Iterator[None]:
        """A batch is computed, and not while the ceiling is measured."""
        with self._turns:
            self._turns.wait_for(lambda: not self._probing)
            self._computing += 1
        try:
            yield
        finally:
            with self._turns:
                self._computing -= 1
                self._turns.notify_all()

    def account(self, peak_bytes: int, gpu: dict[str, Any] | None) -> DeviceAccount:
        """Time and memory of the run; gpu is a GpuSampler's summary."""
        ceiling = statistics.median(self.probe.rates) if self.probe.rates else None
        stages = self.meter.summary()["stages"] | ({"gpu": gpu} if gpu is not None else {})
        return DeviceAccount(ceiling=ceiling, stages=stages, batch_size=self.halving.size, peak_bytes=peak_bytes)


@contextmanager
def _switching_often() -> Iterator[None]:
    """Threads that draw, prepare and assemble let go of the interpreter soon: a launch must not wait for them."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([rows[name] for rows in parts]) for name in parts[0]}


def _repeat(config: GenerateConfig, first: Scenes, num: int) -> Transmissions:
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
    return Measured(
        peak=torch.empty(0),
        truth=torch.empty(0, NUM_CHUNKS, 2),
        features=torch.empty(0, len(ft.FEATURES), len(ft.STATISTICS)),
        power=torch.empty(0),
        chunks=torch.empty(0, NUM_CHUNKS, len(ft.FEATURES)),
        iq=torch.empty(0, config.num_samples_iq, dtype=torch.complex64) if iq else None,
    )

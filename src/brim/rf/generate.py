"""A dataset of N accepted samples on disk: scenes, signals, features and shards, all overlapped.

scene (scenes, gates) → prepare (messages, links) → compute (device) → assemble (rows) → write (shards, the caller)
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from brim import __version__
from brim.engine.device import resolve_device, worker_count
from brim.engine.memory import Halving, PeakMemory, batch_for, free_bytes
from brim.engine.meter import GpuSampler, Meter, ceiling_rate, ceiling_share
from brim.engine.pipeline import HostCopy, Pending, Pipeline, Stage
from brim.engine.shard_writer import ShardWriter, Verify, verify
from brim.engine.shards import Dataset
from brim.errors import ConfigError, DatasetError
from brim.rf.batch import Backend, Measured, Work, make_work
from brim.rf.compute import open_backend
from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.gates import REASONS, Accepted, Totals, accepted_batches, first_accepted
from brim.rf.geometry import SPEED_OF_LIGHT
from brim.rf.link import noise_dbm, warn_outside_validity
from brim.rf.rows import TRUTH, assemble
from brim.rf.scene import Scenes, max_delay_s
from brim.rf.waveform import PARAMETERS

GPU_LIMIT = 2_048  # samples per batch; larger ones are no faster: benchmarks/results/generate_h200_2026-11-15.md
GPU_RAMP = 256  # samples of the first batch at most, doubled from batch to batch
GPU_PROBE = 8  # samples in the first batch whose memory is measured
IQ_BYTES = 512 * 2**20  # of IQ in a batch at most: it passes through the host's memory, several batches at once
BATCHES_IN_FLIGHT = 4  # between the stages on a CPU, each holding its rows
_Result = TypeVar("_Result")
_log = logging.getLogger("brim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is; handed to the caller at least once a second."""

    done: int  # accepted samples
    total: int
    attempted: int
    rate: float  # accepted samples per second so far
    eta_s: float
    message: str
    seconds: float = 0.0  # of generating so far
    waiting: Mapping[str, float] | None = None  # of which the compute stage waited, by cause; None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run made and what it took; times do not count the compilation of kernels."""

    dataset: str
    accepted: int
    attempted: int
    rejected: dict[str, int]
    seconds: float
    samples_per_s: float
    iq_per_s: float
    device: str
    batch_size: int
    ceiling_share: float | None  # rate of the whole run over that of the compute stage alone; None when not measured
    stages: dict[str, Any]
    peak_bytes: int
    stopped: bool = False  # before all samples were made, by request

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        out = asdict(self)
        del out["stopped"]
        return out


def generate(
    config: GenerateConfig,
    out: Path | str,
    samples: int = 1000,
    *,
    device: str | torch.device = "auto",
    batch_size: int | None = None,
    memory: int | None = None,
    resume: bool = True,
    verify: Verify = "all",
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Report:
    """Make a dataset of `samples` accepted samples in `out`, continuing what is there.

    The same config and seed give the same bytes whatever the batch size, the memory, the number of threads or how
    often the run was stopped or killed. `progress` is called at least once a second, from the caller's thread;
    `stop` is asked at each batch boundary, and what was made until then stays a usable dataset. `verify` "sizes" does
    not read again what is there already, which takes long where that is much.
    """
    if samples < 1:
        raise ConfigError(f"samples={samples} must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1; omit it to fit the memory")
    if memory is not None and memory < 1:
        raise ConfigError(f"memory={memory} must be above 0 bytes; omit it to use what is free")
    run = _Run(config, Path(out), samples, resolve_device(str(device)), verify, progress)
    return run.execute(resume, batch_size, memory, stop)


@dataclass(frozen=True, slots=True)
class _Started:
    """A part of a batch on its way to the host."""

    work: Work
    pending: Pending


class _Run:
    """One call of generate: what its stages share."""

    def __init__(
        self,
        config: GenerateConfig,
        out: Path,
        samples: int,
        device: torch.device,
        verify: Verify,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.verify = verify
        self.config, self.out, self.samples, self.device, self.progress = config, out, samples, device, progress
        self.iq = config.dataset_type == "iq_raw"
        self.on_gpu = device.type == "cuda"
        # On a CPU two batches share the threads, so that none idles at the end of a batch.
        self.compute_workers = 1 if self.on_gpu else 2
        self.meter, self.copies = Meter(), HostCopy()
        self.backend: Backend
        self.halving = Halving(1, device)
        self.ramp = GPU_RAMP
        self.previous: Pending | None = None
        self.largest: Work | None = None  # a batch to measure the ceiling on
        self.totals = {"attempted": 0, **dict.fromkeys(REASONS, 0)}
        self.done = self.made = self.records = 0  # samples in all, samples and records of this run
        self.began_s = time.perf_counter()
        self.stopped, self.message, self.rate = False, "starting", 0.0

    def execute(
        self, resume: bool, batch_size: int | None, memory: int | None, stop: Callable[[], bool] | None
    ) -> Report:
        """Open everything, run the stages, leave the manifest complete or usable."""
        warn_outside_validity(self.config, max_delay_s(self.config) * SPEED_OF_LIGHT)
        first = first_accepted(self.config)  # before anything is written: the gates may refuse everything
        if resume and self._is_finished():
            return self._report(0, None)
        with ExitStack() as stack:
            self.backend = stack.enter_context(open_backend(self.config, self.device))
            peak = stack.enter_context(PeakMemory(self.device))
            writer = stack.enter_context(self._writer(resume))
            self.done = writer.items
            self.totals.update(writer.totals)
            self.halving.size = batch_size or self._attend("fitting the batch", lambda: self._fit(first, memory))
            if batch_size and self.on_gpu:
                self._attend("compiling kernels", lambda: self._measure(_repeat(self.config, first, 1)))
            with GpuSampler(self.device) as gpu:
                self._make(writer, stop)
            report = self._report(peak.bytes, gpu.summary())
            if not self.stopped:
                writer.finish(report=report.as_dict())
        return report

    # Opening

    def _writer(self, resume: bool) -> ShardWriter:
        header = {
            "kind": "rf",
            "config": self.config.as_dict(),
            "seed": self.config.seed,
            "features": [{"name": name, "unit": unit} for name, unit in FEATURES],
            "truth": [{"name": name, "unit": unit} for name, unit in TRUTH],
            "statistics": list(STATISTICS),
            "waveform": {"name": self.config.waveform, **PARAMETERS[self.config.waveform]},
            "noise_dbm": noise_dbm(self.config),
            "iq": {"unit": "sqrt(mW)", "sample_rate_hz": SAMPLE_RATE_HZ},
            "brim": __version__,
            "torch": torch.__version__,
            "device": self._device_name(),
        }
        return ShardWriter(
            self.out,
            header,
            items_per_shard=self.config.shard_items,
            identity=("kind", "config", "features", "truth"),
            resume=resume,
            derived=_counts,
            verify=self.verify,
        )

    def _is_finished(self) -> bool:
        """Whether the dataset already holds what is asked for, verified then; one that holds more is refused."""
        if not (self.out / "manifest.json").is_file():
            return False
        found = Dataset(self.out)
        if len(found) > self.samples:
            raise DatasetError(
                f"{self.out} already holds {len(found)} samples, more than the {self.samples} asked for; "
                "ask for more or choose another --out"
            )
        if found.manifest.get("kind") != "rf" or found.manifest.get("config") != self.config.as_dict():
            return False  # the writer says what differs
        if not found.manifest["complete"] or len(found) != self.samples:
            before, now = found.manifest.get("device"), self._device_name()
            if before != now:
                _log.warning("%s was begun on %s: shards made on %s differ in their last bits", self.out, before, now)
            return False
        self._attend("verifying", lambda: verify(found, self.verify))
        self.done, self.totals = self.samples, dict(found.shards[-1].totals)
        return True

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    def _fit(self, first: Scenes, memory: int | None) -> int:
        """Samples per batch that the memory takes, from the measured memory of a small and then a full batch."""
        limit = GPU_LIMIT if self.on_gpu else 2 * worker_count()
        if self.iq:
            limit = max(1, min(limit, IQ_BYTES // (self.config.max_receivers * self.config.num_samples_iq * 8)))
        size = min(limit, GPU_PROBE if self.on_gpu else worker_count())
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

    # Running

    def _make(self, writer: ShardWriter, stop: Callable[[], bool] | None) -> None:
        stages: list[Stage[Any, Any]] = [
            Stage(name="prepare", work=self._prepare, workers=2),
            Stage(name="compute", work=self._compute, workers=self.compute_workers, depth=1),
            Stage(name="assemble", work=self._assemble, workers=2, depth=1),
        ]
        source = accepted_batches(self.config, self.samples - self.done, self.totals, self._next_batch)
        self.message, self.began_s = "generating", time.perf_counter()
        self.meter.start()
        with Pipeline(source, stages, meter=self.meter, source_name="scene", depth=1, tick=self._tick) as results:
            for rows, totals in results:
                with self.meter.busy("write"):
                    writer.append(rows, {name: torch.from_numpy(values) for name, values in totals.items()})
                self._count(rows, totals)
                self._tick()
                if stop is not None and self.done < self.samples and stop():
                    self.stopped = True
                    break
            if not self.stopped:
                with self.meter.busy("write"):
                    writer.flush_partial()
        self.meter.stop()

    def _next_batch(self) -> int:
        """Samples of the next batch: the first are small, so that a GPU does not wait for the host to begin."""
        size = min(self.halving.size, self.ramp)
        self.ramp *= 2
        return size

    def _prepare(self, batch: Accepted) -> tuple[Work, Totals]:
        return make_work(self.config, batch.scenes), batch.totals

    def _compute(self, item: tuple[Work, Totals]) -> tuple[list[_Started], Totals]:
        work, totals = item
        parts = self.halving.run(self._start, work)
        if self.largest is None or len(work) > len(self.largest):
            self.largest = work
        if self.on_gpu:  # one batch computes while the one before is copied out
            previous, self.previous = self.previous, parts[-1].pending
            if previous is not None:
                previous.wait()
        return parts, totals

    def _start(self, work: Work) -> _Started:
        measured = self.backend.measure(work, iq=self.iq)
        tensors = {"peak": measured.peak, "truth": measured.truth, "features": measured.features}
        if measured.iq is not None:
            tensors["iq"] = measured.iq
        return _Started(work, self.copies.start(tensors))

    def _assemble(self, item: tuple[list[_Started], Totals]) -> tuple[dict[str, Tensor], Totals]:
        parts, totals = item
        rows = []
        for part in parts:
            host = part.pending.wait()
            measured = Measured(peak=host["peak"], truth=host["truth"], features=host["features"], iq=host.get("iq"))
            rows.append(assemble(self.config, part.work, measured))
        if len(rows) == 1:
            return rows[0], totals
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}, totals

    def _count(self, rows: dict[str, Tensor], totals: Totals) -> None:
        num = len(rows["index"])
        self.done, self.made = self.done + num, self.made + num
        self.records += int(rows["present"].sum())
        self.totals = {name: int(values[-1]) for name, values in totals.items()}
        self.rate = self.made / max(time.perf_counter() - self.began_s, 1e-9)
        self.meter.count(num)

    # Telling

    def _tick(self) -> None:
        if self.progress is None:
            return
        left = self.samples - self.done
        self.progress(
            Progress(
                done=self.done,
                total=self.samples,
                attempted=self.totals["attempted"],
                rate=self.rate,
                eta_s=left / self.rate if self.rate else float("inf"),
                message=self.message,
                seconds=self.meter.seconds,
                waiting=self._waiting() if self.made else None,
            )
        )

    def _waiting(self) -> dict[str, float]:
        """Seconds that the compute stage waited: for scenes to be prepared, and for its results to be written."""
        spent = self.meter.stage("compute")
        return {
            "preparing": spent["wait_input_s"] / self.compute_workers,
            "writing": spent["wait_room_s"] / self.compute_workers,
        }

    def _attend(self, message: str, work: Callable[[], _Result]) -> _Result:
        """Run something long in a thread, telling the caller that it goes on."""
        self.message = message
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            while True:
                self._tick()
                try:
                    return future.result(timeout=0.25)
                except TimeoutError:
                    if future.done():  # the work's own
                        raise

    def _report(self, peak_bytes: int, gpu: dict[str, Any] | None) -> Report:
        summary = self.meter.summary()
        seconds = summary["seconds"]
        rate, iq_rate = (count / max(seconds, 1e-9) for count in (self.made, self.records))
        return Report(
            dataset=str(self.out),
            accepted=self.done,
            attempted=self.totals["attempted"],
            rejected={reason: self.totals[reason] for reason in REASONS},
            seconds=seconds,
            samples_per_s=rate,
            iq_per_s=iq_rate,
            device=str(self.device),
            batch_size=self.halving.size,
            ceiling_share=self._ceiling_share(iq_rate),
            stages=summary["stages"] | ({"gpu": gpu} if gpu is not None else {}),
            peak_bytes=peak_bytes,
            stopped=self.stopped,
        )

    def _ceiling_share(self, iq_rate: float) -> float | None:
        """Rate over that of the compute stage alone on the same batch over and over; not for someone who asked to stop.

        In records, since the samples of one batch may have more or fewer receivers than the run's.
        """
        work = self.largest
        if work is None or self.stopped:
            return None

        def once() -> int:
            if self.compute_workers == 1:
                return self._measure(work)
            with ThreadPoolExecutor(self.compute_workers) as pool:
                return sum(pool.map(self._measure, [work] * (2 * self.compute_workers)))

        ceiling = self._attend("measuring the ceiling", lambda: ceiling_rate(once, warmup=int(self.on_gpu)))
        return ceiling_share(iq_rate, ceiling)


def _counts(items: int, totals: dict[str, int]) -> dict[str, Any]:
    """What the manifest says of the attempts behind its samples."""
    rejected = {reason: totals.get(reason, 0) for reason in REASONS}
    return {"counts": {"accepted": items, "attempted": totals.get("attempted", 0), "rejected": rejected}}


def _repeat(config: GenerateConfig, first: Scenes, num: int) -> Work:
    """A batch of the same sample over and over."""
    return make_work(config, first[np.zeros(num, np.int64)])

"""A dataset of N accepted samples on disk: scenes, signals, features and shards, all overlapped.

source (scenes, gates) → prepare (messages, links) → compute (device) → assemble (rows) → the caller writes shards
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim import __version__
from brim.engine.device import resolve_device, worker_count
from brim.engine.memory import Halving, PeakMemory, batch_for, free_bytes
from brim.engine.meter import GpuSampler, Meter, ceiling_rate, ceiling_share
from brim.engine.pipeline import HostCopy, Pending, Pipeline, Stage
from brim.engine.shards import Dataset, ShardWriter
from brim.errors import ConfigError, DatasetError, NothingAccepted
from brim.rf.compute import TRUTH, Backend, Measured, Work, assemble, make_work, open_backend
from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.link import noise_dbm, warn_outside_validity
from brim.rf.scene import Scenes, make_scenes
from brim.rf.waveform import PARAMETERS

MAX_TRIES = 200_000  # attempts in a row without an accepted one before we say that the gates refuse everything
ATTEMPTS_PER_BLOCK = 4_096  # scenes made at once; some tens of ms
BATCHES_IN_FLIGHT = 4  # between the stages, each holding its rows
GPU_LIMIT = 2_048  # samples; larger batches are no faster: results/generate_h200_2026-11-15.md
_REASONS = ("receivers", "gdop")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is; handed to the caller at least once a second."""

    done: int  # accepted samples
    total: int
    attempted: int
    rate: float  # accepted samples per second so far
    eta_s: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run made and what it took."""

    dataset: str
    accepted: int
    attempted: int
    rejected: dict[str, int]
    seconds: float
    samples_per_s: float
    iq_per_s: float
    device: str
    batch_size: int
    ceiling_share: float
    stages: dict[str, Any]
    peak_bytes: int
    stopped: bool = False  # before all samples were made, by request

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        out = asdict(self)
        del out["stopped"]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Accepted scenes with the running totals after each."""

    scenes: Scenes
    totals: dict[str, NDArray[np.int64]]


def generate(
    config: GenerateConfig,
    out: Path | str,
    samples: int = 1000,
    *,
    device: str | torch.device = "auto",
    batch_size: int | None = None,
    memory: int | None = None,
    resume: bool = True,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Report:
    """Make a dataset of `samples` accepted samples in `out`, continuing what is there.

    The same config and seed give the same bytes whatever the batch size, the memory, the number of threads or how
    often the run was stopped or killed. `progress` is called at least once a second, from the caller's thread;
    `stop` is asked at each batch boundary, and what was made until then stays a usable dataset.
    """
    if samples < 1:
        raise ConfigError(f"samples={samples} must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1; omit it to fit the memory")
    if memory is not None and memory < 1:
        raise ConfigError(f"memory={memory} must be above 0 bytes; omit it to use what is free")
    run = _Run(config, Path(out), samples, resolve_device(str(device)), batch_size, memory, progress, stop)
    return run.execute(resume)


class _Run:
    """One call of generate: what its stages share."""

    def __init__(
        self,
        config: GenerateConfig,
        out: Path,
        samples: int,
        device: torch.device,
        batch_size: int | None,
        memory: int | None,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.config, self.out, self.samples, self.device = config, out, samples, device
        self.batch_size, self.memory = batch_size, memory
        self.progress, self.stop = progress, stop
        self.iq = config.dataset_type == "iq_raw"
        self.meter = Meter()
        self.copies = HostCopy()
        self.done = self.attempted = self.made = self.records = 0
        self.totals = dict.fromkeys(_REASONS, 0)
        self.stopped = False
        self.began_s = time.perf_counter()
        self.message = "starting"
        self.backend: Backend
        self.halving: Halving
        self.previous: Pending | None = None
        self.last: Work | None = None  # a batch to measure the ceiling on

    def execute(self, resume: bool) -> Report:
        """Open everything, run the stages, close with the manifest complete or usable."""
        warn_outside_validity(self.config)
        first = _first_accepted(self.config)  # before anything is written: the gates may refuse everything
        if resume and (finished := self._finished()) is not None:
            return finished
        with ExitStack() as stack:
            self.backend = stack.enter_context(open_backend(self.config, self.device))
            peak = stack.enter_context(PeakMemory(self.device))
            writer = stack.enter_context(self._writer(resume))
            if writer.items > self.samples:
                raise DatasetError(
                    f"{self.out} already holds {writer.items} samples, more than the {self.samples} asked for; "
                    "ask for more or choose another --out"
                )
            self.halving = Halving(self._choose_batch(first), self.device)
            self.done = writer.items
            self.attempted = writer.totals.get("attempted", 0)
            self.totals = {reason: writer.totals.get(reason, 0) for reason in _REASONS}
            with GpuSampler(self.device) as gpu:
                self._make(writer)
            report = self._report(peak.bytes, gpu.summary())
            if not self.stopped:
                counts = {"accepted": self.done, "attempted": self.attempted, "rejected": dict(self.totals)}
                writer.finish(counts=counts, report=report.as_dict())
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
            "device": _device_name(self.device),
        }
        identity = ("kind", "config", "features", "truth")
        shard_items = self.config.shard_items
        return ShardWriter(self.out, header, items_per_shard=shard_items, identity=identity, resume=resume)

    def _finished(self) -> Report | None:
        """The report of a dataset that already holds exactly what is asked for, after verifying it."""
        if not (self.out / "manifest.json").is_file():
            return None
        found = Dataset(self.out)
        same = found.manifest.get("config") == self.config.as_dict() and found.manifest.get("kind") == "rf"
        if not (same and found.manifest.get("complete") and len(found) == self.samples):
            return None
        self._attend("verifying", found.verify)
        counts = found.manifest["counts"]
        self.done, self.attempted, self.totals = self.samples, counts["attempted"], counts["rejected"]
        return self._report(0, None)

    def _choose_batch(self, first: Scenes) -> int:
        """Samples per batch: asked for, else what the memory takes, from a measured batch on a GPU."""
        work = make_work(self.config, first)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self._attend("compiling kernels", lambda: self._warm_up(work))
        if self.batch_size is not None:
            return self.batch_size
        budget = free_bytes(self.device) * 8 // 10  # the rest is for fragmentation and the neighbours
        budget = min(budget, self.memory) if self.memory is not None else budget
        per_item = self.backend.bytes_per_sample(iq=self.iq) * (1 if on_gpu else BATCHES_IN_FLIGHT)
        return batch_for(budget, per_item, limit=GPU_LIMIT if on_gpu else 2 * worker_count())

    def _warm_up(self, work: Work) -> None:
        self.backend.measure(work, iq=self.iq)
        torch.cuda.synchronize(self.device)

    # Running

    def _make(self, writer: ShardWriter) -> None:
        cpu_workers = 2 if self.device.type == "cpu" else 1  # two batches share the threads: no gap between them
        stages = [
            Stage(name="prepare", work=self._prepare, workers=2),
            Stage(name="compute", work=self._compute, workers=cpu_workers, depth=1),
            Stage(name="assemble", work=self._assemble, workers=2, depth=1),
        ]
        self.message = "generating"
        self.began_s = time.perf_counter()
        self.meter.start()
        source = self._batches()
        with Pipeline(source, stages, meter=self.meter, source_name="scene", depth=1, tick=self._tick) as results:
            for rows, totals in results:
                with self.meter.busy("write"):
                    writer.append(rows, {name: torch.from_numpy(values) for name, values in totals.items()})
                self._count(rows, totals)
                self._tick()
                if self.stop is not None and self.done < self.samples and self.stop():
                    self.stopped = True
                    break
            if self.done == self.samples:
                with self.meter.busy("write"):
                    writer.flush_partial()
        self.meter.stop()

    def _batches(self) -> Iterator[_Batch]:
        """Accepted scenes in ascending order of attempt, as many as are still needed."""
        needed, at, since = self.samples - self.done, self.attempted, 0
        totals, waiting = dict(self.totals), list[_Batch]()
        while needed > 0:
            size = max(1, min(self.halving.size, needed))
            if sum(len(b.scenes) for b in waiting) < size:
                block = _gate(self.config, np.arange(at, at + min(ATTEMPTS_PER_BLOCK, 4 * size + 64)), totals)
                at, since = at + block.tried, 0 if len(block.batch.scenes) else since + block.tried
                totals = block.after
                waiting.append(block.batch)
                if since >= MAX_TRIES:
                    raise _nothing_accepted(self.config, since, {k: totals[k] for k in _REASONS}, at)
                continue
            merged = _merge(waiting)
            yield _cut(merged, slice(0, size))
            waiting, needed = [_cut(merged, slice(size, None))], needed - size

    def _prepare(self, batch: _Batch) -> tuple[Work, dict[str, NDArray[np.int64]]]:
        return make_work(self.config, batch.scenes), batch.totals

    def _compute(
        self, item: tuple[Work, dict[str, NDArray[np.int64]]]
    ) -> tuple[list[tuple[Work, Measured, Pending]], dict[str, NDArray[np.int64]]]:
        work, totals = item
        parts = self.halving.run(self._start, work)
        self.last = work
        if self.device.type == "cuda":  # one batch computes while the one before is copied out
            previous, self.previous = self.previous, parts[-1][2]
            if previous is not None:
                previous.wait()
        return parts, totals

    def _start(self, work: Work) -> tuple[Work, Measured, Pending]:
        measured = self.backend.measure(work, iq=self.iq)
        tensors = {"peak": measured.peak, "truth": measured.truth, "features": measured.features}
        if measured.iq is not None:
            tensors["iq"] = measured.iq
        return work, measured, self.copies.start(tensors)

    def _assemble(
        self, item: tuple[list[tuple[Work, Measured, Pending]], dict[str, NDArray[np.int64]]]
    ) -> tuple[dict[str, Tensor], dict[str, NDArray[np.int64]]]:
        parts, totals = item
        rows = []
        for work, measured, pending in parts:
            host = pending.wait()
            on_host = Measured(
                peak=host["peak"],
                truth=host["truth"],
                features=host["features"],
                chunks=measured.chunks,
                iq=host.get("iq"),
            )
            rows.append(assemble(self.config, work, on_host))
        if len(rows) == 1:
            return rows[0], totals
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}, totals

    def _count(self, rows: dict[str, Tensor], totals: dict[str, NDArray[np.int64]]) -> None:
        num = len(rows["index"])
        self.done, self.made, self.records = (
            self.done + num,
            self.made + num,
            self.records + int(rows["present"].sum()),
        )
        self.attempted = int(totals["attempted"][-1])
        self.totals = {reason: int(totals[reason][-1]) for reason in _REASONS}
        self.meter.count(num)

    # Telling

    def _tick(self) -> None:
        if self.progress is None:
            return
        seconds = max(time.perf_counter() - self.began_s, 1e-9)
        rate = self.made / seconds
        eta_s = (self.samples - self.done) / rate if rate else float("inf")
        self.progress(
            Progress(
                done=self.done,
                total=self.samples,
                attempted=self.attempted,
                rate=rate,
                eta_s=eta_s,
                message=self.message,
            )
        )

    def _attend(self, message: str, work: Callable[[], _T]) -> _T:
        """Run something long in a thread, telling the caller that it goes on."""
        self.message = message
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            while not future.done():
                self._tick()
                try:
                    return future.result(timeout=0.25)
                except TimeoutError:
                    continue
            return future.result()

    def _report(self, peak_bytes: int, gpu: dict[str, Any] | None) -> Report:
        summary = self.meter.summary()
        seconds = max(summary["seconds"], 1e-9)
        rate = self.made / seconds
        stages = dict(summary["stages"])
        if gpu is not None:
            stages["gpu"] = gpu
        return Report(
            dataset=str(self.out),
            accepted=self.done,
            attempted=self.attempted,
            rejected=dict(self.totals),
            seconds=summary["seconds"],
            samples_per_s=rate,
            iq_per_s=self.records / seconds,
            device=str(self.device),
            batch_size=self.halving.size if self.made else 0,
            ceiling_share=ceiling_share(rate, self._ceiling()) if self.last is not None else 1.0,
            stages=stages,
            peak_bytes=peak_bytes,
            stopped=self.stopped,
        )

    def _ceiling(self) -> float:
        """Samples per second of the compute stage alone, on the last batch."""
        work = self.last
        assert work is not None

        def once() -> int:
            self.halving.run(lambda part: self.backend.measure(part, iq=self.iq), work)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return len(work)

        return self._attend("measuring the ceiling", lambda: ceiling_rate(once, warmup=int(self.device.type == "cuda")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    batch: _Batch
    tried: int
    after: dict[str, int]


def _gate(config: GenerateConfig, index: NDArray[np.int64], before: dict[str, int]) -> _Block:
    """Scenes of some attempts, the accepted ones, and the running totals of what was refused and why."""
    scenes = make_scenes(config, index)
    keep = np.nonzero(scenes.accepted)[0]
    few = np.cumsum(~scenes.enough) + before["receivers"]
    wide = np.cumsum(scenes.enough & ~scenes.accepted) + before["gdop"]
    totals = {"attempted": index[keep] + 1, "receivers": few[keep], "gdop": wide[keep]}
    after = {"receivers": int(few[-1]), "gdop": int(wide[-1])}
    return _Block(batch=_Batch(scenes=scenes[keep], totals=totals), tried=len(index), after=after)


def _merge(batches: list[_Batch]) -> _Batch:
    if len(batches) == 1:
        return batches[0]
    names = Scenes.__slots__
    scenes = Scenes(**{n: np.concatenate([getattr(b.scenes, n) for b in batches]) for n in names})
    return _Batch(scenes=scenes, totals={k: np.concatenate([b.totals[k] for b in batches]) for k in batches[0].totals})


def _cut(batch: _Batch, rows: slice) -> _Batch:
    return _Batch(scenes=batch.scenes[rows], totals={name: values[rows] for name, values in batch.totals.items()})


def _first_accepted(config: GenerateConfig) -> Scenes:
    """The first accepted scene, or the word that the gates refuse everything."""
    totals = dict.fromkeys(_REASONS, 0)
    for at in range(0, MAX_TRIES, ATTEMPTS_PER_BLOCK):
        block = _gate(config, np.arange(at, at + (64 if at == 0 else ATTEMPTS_PER_BLOCK)), totals)
        if len(block.batch.scenes):
            return block.batch.scenes[:1]
        totals = block.after if at else totals  # the first, short block is tried again in full
        if at == 0:
            block = _gate(config, np.arange(ATTEMPTS_PER_BLOCK), totals)
            if len(block.batch.scenes):
                return block.batch.scenes[:1]
            totals = block.after
    raise _nothing_accepted(config, MAX_TRIES, totals, 0)


def _nothing_accepted(config: GenerateConfig, tried: int, refused: dict[str, int], at: int) -> NothingAccepted:
    worst = max(refused, key=lambda reason: refused[reason])
    rule = {
        "receivers": f"fewer than min_receivers={config.min_receivers} heard it at min_snr_db={config.min_snr_db:g} "
        f"with tx_power_dbm={config.tx_power_dbm:g}: raise the power, or lower min_snr_db or min_receivers",
        "gdop": f"GDOP above max_gdop={config.max_gdop:g}: raise max_gdop or spread the stations",
    }[worst]
    return NothingAccepted(
        f"none of {tried} attempts in a row was accepted (refused: receivers {refused['receivers']}, "
        f"gdop {refused['gdop']}); mostly {rule}"
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

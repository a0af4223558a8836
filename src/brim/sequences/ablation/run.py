"""Ablation: what each optimisation gains on this machine, in real training, switched on one after another.

Each step is a separate training loop: warmed up, then timed in blocks. Samples per second are frames per second over
the mean length of a sequence, so that a few batches of long or short sequences do not count as slow or fast. A step
made a difference if the change exceeds both the noise between blocks and the drift between two measurements of the
first configuration.
"""

import ctypes
import gc
import itertools
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import PeakMemory, describe, guard, resolve_device, stream, worker_count
from brim.engine.meter import time_step
from brim.engine.rows import HOST
from brim.errors import ConfigError, OutOfMemory, StorageError
from brim.sequences.ablation.loop import (
    AblationData,
    EngineStep,
    FedBatch,
    HandStep,
    LoopSetup,
    TrainStep,
    endless,
    make_module,
    make_source,
)
from brim.sequences.ablation.report import Ablation, AblationProgress, AblationStep, judge
from brim.sequences.config import SequenceConfig
from brim.sequences.corpus import Corpus, SequenceFolder
from brim.sequences.training import cudnn_autotune

UNPACKED_BYTES = 2 << 30  # written as single files at most
NUM_WORKERS, PREFETCH_FACTOR = 8, 6  # as in the report
CAP_S = {"cpu": 20.0, "cuda": 8.0}  # longest time to measure a step
WARM_STEPS = {"cpu": 2, "cuda": 10}
BLOCKS = 10
HELD = {"cpu": 3, "cuda": 8}  # batches kept on the device to measure the ceiling
PROGRESS_S = 0.5
START = "first configuration"

_Change = tuple[str, dict[str, Any], str]  # name, settings that it changes, and a remark
_Block = tuple[int, int, float]  # frames, frames with padding, seconds


def ablate(
    corpus: Path | str,
    *,
    steps: int = 200,
    device: str = "auto",
    progress: Callable[[AblationProgress], None] | None = None,
    seed: int = 0,
    model: SequenceConfig | None = None,
    cap_s: float | None = None,
) -> Ablation:
    """Measure training on a packed corpus, from the report's first configuration to all optimisations together.

    steps  training steps timed for each, or as many as fit into cap_s seconds
    model  the network; by default that of training
    """
    if steps < 1:
        raise ConfigError("must be at least 1; 200 is usual", field="steps", value=steps, code="out_of_range")
    if cap_s is not None and not cap_s > 0:
        raise ConfigError("must be above 0 seconds", field="cap_s", value=cap_s, code="out_of_range")
    where, opened = resolve_device(device), Corpus.open(corpus)
    opened.verify()
    config = model or SequenceConfig(dim=opened.dim)
    with _unpacked(opened, seed) as (data, notes), torch.random.fork_rng([where.index] if where.type == "cuda" else []):
        cap_s = cap_s or CAP_S[where.type]
        bench = _Bench(
            data=data, model=config, device=where, seed=seed, steps=steps, cap_s=cap_s, progress=progress
        )  # fmt: skip
        measured = bench.run(list(_plan(where)))
        notes.append(f"measured again at the end, the first configuration differed by {bench.drift:.1%}")
    return Ablation(steps=tuple(measured), device=str(describe(where)["name"]), notes=tuple(notes))


# The order of the optimisations


def _plan(device: torch.device) -> Iterator[_Change]:
    on_gpu = device.type == "cuda"
    workers = min(NUM_WORKERS, worker_count())
    half = "fp16" if on_gpu else "bf16" if _has_bf16() else "fp32"
    yield START, {}, ""
    yield "batch 64", {"batch_size": 64}, ""
    yield "workers", {"num_workers": workers}, f"{workers} workers"
    yield "prefetch", {"prefetch_factor": PREFETCH_FACTOR}, ""
    copies = "" if on_gpu else "a CPU needs no pinned memory and no copies"
    yield "persistent, pinned, non-blocking", {"persistent": True}, copies
    yield "mixed precision", {"precision": half}, half if half != "fp32" else "this CPU has no half precision: fp32"
    yield "cuDNN autotuner", {"autotuner": True}, "" if on_gpu else "only on a GPU"
    yield "set_to_none", {"set_to_none": True}, ""
    yield "packed corpus", {"packed": True}, ""
    yield "device augmentation", {"device_augmentation": True}, "" if on_gpu else "in the training process"
    yield "buckets", {"buckets": True}, "without pack_padded_sequence"
    yield "resident tier", {"resident": True}, ""
    yield "compile/graphs", {"compiled": True}, ""


def _has_bf16() -> bool:
    """Whether this CPU has bf16 instructions; without them torch's bf16 is slower than its fp32."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(check is not None and check() for check in checks)


# Data


@contextmanager
def _unpacked(corpus: Corpus, seed: int) -> Iterator[tuple[AblationData, list[str]]]:
    """The corpus, and some of its sequences as single files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="brim-ablate-") as name:
        folder = Path(name)
        rows = _rows_to_unpack(corpus, min(UNPACKED_BYTES, shutil.disk_usage(folder).free // 2), seed)
        try:
            for number, row in enumerate(rows.tolist()):
                np.save(folder / f"{number:08d}.npy", corpus.sequence(row).numpy())
        except OSError as failure:
            reason = failure.strerror or failure
            raise StorageError(f"{folder}: cannot write, {reason}; set TMPDIR to a larger disk") from failure
        num_classes = max(2, len(corpus.classes))
        stand_in = torch.arange(len(corpus)) % num_classes
        labels = torch.where(corpus.labels < 0, stand_in, corpus.labels)
        dtype = str(corpus.dtype).removeprefix("torch.")
        notes = [f"the .npy files of the first steps were unpacked from the corpus, as {dtype}, to a temporary folder"]
        if len(rows) < len(corpus):
            notes.append(f"measured on {len(rows)} of {len(corpus)} sequences, so that they fit there")
        files = SequenceFolder(folder)
        yield AblationData(files=files, corpus=corpus, rows=rows, labels=labels, num_classes=num_classes), notes


def _rows_to_unpack(corpus: Corpus, most_bytes: int, seed: int) -> Tensor:
    """As many random sequences as fit, in the order of the corpus."""
    mixed = torch.randperm(len(corpus), generator=stream(seed, "ablate", device=HOST))
    ends = (corpus.lengths[mixed] * corpus.dim * corpus.dtype.itemsize + 4096).cumsum(0)
    num = int((ends <= most_bytes).sum())
    if not num:
        raise StorageError(f"no room for single files of {corpus.path} in {tempfile.gettempdir()}; set TMPDIR")
    return mixed[:num].sort().values


# Measuring


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Measurements of one setup."""

    rates: list[float]  # of blocks, frames per second
    ceiling_share: float
    busy_share: float
    peak_bytes: int
    note: str


@dataclass(slots=True, kw_only=True)
class _Bench:
    """The steps of one ablation."""

    data: AblationData
    model: SequenceConfig
    device: torch.device
    seed: int
    steps: int
    cap_s: float
    progress: Callable[[AblationProgress], None] | None
    current: AblationProgress | None = None
    reported_s: float = 0.0
    drift: float = 0.0  # relative, between two measurements of the same loop

    def run(self, plan: list[_Change]) -> list[AblationStep]:
        """All steps; the first configuration is measured again at the end, to know the drift."""
        loops: list[_Measurement | None] = []
        setup = LoopSetup()
        for number, (name, change, _) in enumerate(plan):
            self.current, self.reported_s = AblationProgress(step=number, steps=len(plan), name=name, share=0.0), 0.0
            self._report(0.0)
            candidate = replace(setup, **change)
            loops.append(self._try(candidate))
            setup = candidate if loops[-1] is not None else setup  # what does not fit stays switched off
        again = self._try(LoopSetup())
        if loops[0] is not None and again is not None:
            self.drift = abs(statistics.median(again.rates) / statistics.median(loops[0].rates) - 1)
        return list(self._judged(plan, loops))

    def _try(self, setup: LoopSetup) -> _Measurement | None:
        try:
            with guard():
                return self._measure(setup)
        except OutOfMemory:
            return None
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            else:
                with suppress(OSError, AttributeError):  # glibc; otherwise freed memory would count in the next peak
                    ctypes.CDLL(None).malloc_trim(0)

    def _judged(self, plan: list[_Change], loops: list[_Measurement | None]) -> Iterator[AblationStep]:
        mean_length = float(self.data.corpus.lengths[self.data.rows].double().mean())
        before: list[float] | None = None
        for (name, change, remark), loop in zip(plan, loops, strict=True):
            if loop is None:
                yield AblationStep(name=name, verdict="did not fit", note="left switched off")
                continue
            rate = statistics.median(loop.rates)
            verdict = "start" if before is None else judge(before, loop.rates, self.drift)
            yield AblationStep(
                name=name,
                samples_per_s=rate / mean_length,
                busy_share=loop.busy_share,
                ceiling_share=loop.ceiling_share,
                peak_bytes=loop.peak_bytes,
                verdict="no difference" if "autotuner" in change and self.device.type == "cpu" else verdict,
                change=None if before is None else rate / statistics.median(before),
                note=", ".join(filter(None, [remark, loop.note])),
            )
            before = loop.rates

    def _measure(self, setup: LoopSetup) -> _Measurement:
        data, device, seed = self.data, self.device, self.seed
        with cudnn_autotune(setup.autotuner):
            module = make_module(self.model, data.num_classes, setup, device)
            step = (EngineStep if setup.compiled else HandStep)(module, setup, device, seed)
            source = make_source(setup, data, device, seed)
            lengths = (data.corpus if setup.packed or setup.resident else data.files).lengths
            with PeakMemory(device) as peak, source, closing(endless(source, lengths)) as batches:
                self._warm_up(step, batches, setup)
                blocks, busy = self._time_blocks(step, batches)
                peak_bytes = peak.bytes
                whole = (fed for fed in batches if len(fed.batch["frames"]) == source.batch_size)  # every epoch has one
                held = [
                    replace(fed, batch={name: tensor.clone() for name, tensor in fed.batch.items()})
                    for fed in itertools.islice(whole, HELD[device.type])
                ]  # copied, because a source may reuse its buffers
                note = f"tier {source.tier}" if setup.resident else ""
            step_s, device_s = self._time_held(step, held)
        # in padded frames: the batches held may be longer or shorter than the others
        rate = statistics.median(padded / seconds for _, padded, seconds in blocks)
        if device_s is not None:
            busy = min(1.0, rate * device_s)
        if setup.compiled:
            note = step.kind if step.kind != "eager" else "not possible here: eager"
        return _Measurement([frames / seconds for frames, _, seconds in blocks], rate * step_s, busy, peak_bytes, note)

    def _warm_up(self, step: TrainStep, batches: Iterator[FedBatch], setup: LoopSetup) -> None:
        """Start workers and libraries; with graphs, capture every shape of an epoch."""
        if isinstance(step, EngineStep):
            shapes: set[torch.Size] = set()
            for fed in itertools.islice(batches, max(1, len(self.data.rows) // setup.batch_size)):
                if fed.batch["frames"].shape not in shapes:
                    shapes.add(fed.batch["frames"].shape)
                    step.prepare(fed)
                if self.device.type == "cpu":
                    break  # only the first shape is compiled
        began_s = time.perf_counter()
        for fed in itertools.islice(batches, WARM_STEPS[self.device.type]):
            step(fed)
            self._wait()
            if time.perf_counter() - began_s > self.cap_s / 2:
                break

    def _time_blocks(self, step: TrainStep, batches: Iterator[FedBatch]) -> tuple[list[_Block], float]:
        """Time blocks of the loop; also returns the share of the cores' time that this process used."""
        blocks: list[_Block] = []
        began_s, began_cpu_s, left = time.perf_counter(), time.process_time(), self.steps
        while left and (len(blocks) < 2 or time.perf_counter() - began_s < self.cap_s):
            most, num, frames, padded = min(left, math.ceil(self.steps / BLOCKS)), 0, 0, 0
            block_s = time.perf_counter()
            while num < most and time.perf_counter() - block_s < self.cap_s / BLOCKS:
                fed = next(batches)
                step(fed)
                num, frames, padded = num + 1, frames + fed.num_frames, padded + fed.num_padded
            self._wait()
            blocks.append((frames, padded, time.perf_counter() - block_s))
            left -= num
            self._report(max(1 - left / self.steps, (time.perf_counter() - began_s) / self.cap_s))
        busy_s = time.process_time() - began_cpu_s
        return blocks, min(1.0, busy_s / (time.perf_counter() - began_s) / worker_count())

    def _time_held(self, step: TrainStep, held: Sequence[FedBatch]) -> tuple[float, float | None]:
        """Seconds per padded frame of batches already on the device: of the step, and on the GPU (None on a CPU)."""
        padded = sum(fed.num_padded for fed in held)
        if self.device.type == "cuda":
            times = [
                time_step(lambda fed=fed: step(fed), self.device, captured=step.kind == "graph", budget_s=0.1)  # type: ignore[misc]
                for fed in held
            ]
            return sum(t.step_s or 0.0 for t in times) / padded, sum(t.device_s or 0.0 for t in times) / padded
        rounds: list[float] = []
        began_s = time.perf_counter()
        while not rounds or (time.perf_counter() - began_s < self.cap_s / 4 and len(rounds) < 20):
            round_s = time.perf_counter()
            for fed in held:
                step(fed)
            rounds.append((time.perf_counter() - round_s) / padded)
            self._report(1.0)
        return statistics.median(rounds), None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _report(self, share: float) -> None:
        if self.progress is not None and self.current and time.perf_counter() - self.reported_s >= PROGRESS_S:
            self.reported_s = time.perf_counter()
            self.progress(replace(self.current, share=min(1.0, share)))

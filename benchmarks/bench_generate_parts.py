"""What the compute stage of `brim rf generate` spends on a GPU, kernel by kernel, and its host.

In this order, each told as soon as it is known:
1. the kernels against the torch path, and a batch against its samples one at a time and in small passes: bits;
2. the whole command in two presets, and with little memory;
3. kernel by kernel, with the host's time to queue a batch beside the device's;
4. the compute stage by the size of a pass, and where the host's time goes.
"""

import argparse
import cProfile
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench_generate import kernel_times, make_batch
from brim.engine.device import parse_size
from brim.rf import GenerateConfig, generate, preset
from brim.rf.features import FEATURES
from brim.rf.generation.backend import CpuBackend, Transmissions, make_transmissions
from brim.rf.generation.cuda import CudaBackend, Tuning
from brim.rf.physics.scene import make_scenes

PASSES = (512, 2_048, 16_384)
DEVICE = torch.device("cuda:0")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000, help="accepted samples of a whole command")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no part after so many seconds")
    options = parser.parse_args()
    began_s = time.perf_counter()
    torch.cuda.set_device(DEVICE)
    parts: list[Callable[[], None]] = [
        compare,
        compare_batches,
        partial(whole_commands, options.samples),
        kernel_table,
        passes,
        host_profile,
        fft_tiles,
    ]
    for part in parts:
        spent_s = time.perf_counter() - began_s
        if spent_s > options.seconds:
            print(f"[{spent_s:5.1f} s] left out: {part}", flush=True)
            continue
        print(f"[{spent_s:5.1f} s]", flush=True)
        try:
            part()
        except Exception as error:  # the next part may still tell something
            print(f"FAILED {type(error).__name__}: {error}", flush=True)


def compare() -> None:
    """Largest difference of each feature from the torch path, three samples."""
    for waveform in ("nbfm",):
        config = GenerateConfig(waveform=waveform, tx_power_dbm=30.0, seed=2**40 + 3)
        scenes = make_scenes(config, np.arange(4))
        work = make_transmissions(config, scenes[np.nonzero(scenes.accepted)[0]][:3])
        with CpuBackend(config) as cpu:
            reference = cpu.measure(work, iq=False)
        measured = CudaBackend(config, DEVICE).measure(work, iq=False).to("cpu")
        assert measured.chunks is not None
        assert reference.chunks is not None
        difference = (measured.chunks - reference.chunks).abs().flatten(0, 1).amax(0)
        listed = {name: f"{value:.1e}" for (name, _), value in zip(FEATURES, difference.tolist(), strict=True)}
        print(waveform, "differs from torch by at most", listed, flush=True)


def compare_batches() -> None:
    """A batch has the bits of its samples alone, in small passes, and with every tuning of the filter."""
    config = preset("production")
    work = make_batch(config, 120)
    backend = CudaBackend(config, DEVICE)
    whole = backend.measure(work, iq=False).features
    backend.pass_records = 100
    print("small passes equal:", torch.equal(backend.measure(work, iq=False).features, whole))
    for n in (0, 57, 119):
        alone = backend.measure(work[n : n + 1], iq=False).features
        print("sample", n, "equal:", torch.equal(alone, whole[int(work.starts[n]) : int(work.starts[n + 1])]))
    backend.tuning = Tuning(row=320, window=448, columns=64)
    print("wide rows of the filter equal:", torch.equal(backend.measure(work, iq=False).features, whole))


def whole_commands(samples: int) -> None:
    """Samples/s of the command; each preset after a small run that compiles."""
    runs: list[tuple[str, int, str | None]] = [
        ("production", samples, None),
        ("hostile", samples // 2, None),
        ("production", samples // 2, "1GiB"),
    ]
    for name, num, memory in runs:
        config = preset(name)
        for count in (2_000, num):
            with tempfile.TemporaryDirectory(prefix="brim-bench-") as folder:
                report = generate(
                    config, Path(folder) / "a", count, device=DEVICE, memory=parse_size(memory) if memory else None
                )
        shares = {stage: round(about.get("share", 0.0), 2) for stage, about in report.stages.items()}
        print(
            f"{name} {memory or ''}: {report.samples_per_s:,.0f} samples/s, {report.iq_per_s:,.0f} records/s, "
            f"peak {report.peak_bytes / 2**30:.2f} GiB, batch {report.batch_size}, busy {shares}",
            flush=True,
        )


def kernel_table() -> None:
    """Device time of each kernel, and the host's to queue the batch."""
    config = preset("production")
    work, names = make_batch(config, 2_048), _kernel_names()
    backend = CudaBackend(config, DEVICE)
    device_us = kernel_times(config, work, DEVICE, names)
    for name, us in sorted(device_us.items(), key=lambda item: -item[1]):
        print(f"{name:18} {us:7.3f} µs/record")
    print(f"{'all kernels':18} {sum(device_us.values()):7.3f} µs/record, {len(work.links)} records")
    us, host_us = stage_us(backend, work)
    print(f"{'stage':18} {us:7.3f} µs/record; the host queues it in {host_us:.3f}", flush=True)


def _kernel_names() -> list[str]:
    from brim.rf.generation import kernels

    return [name for name in vars(kernels) if name.endswith("_kernel")]


def passes() -> None:
    """The compute stage by the records of a pass."""
    config = preset("production")
    work, backend = make_batch(config, 2_048), CudaBackend(config, DEVICE)
    for most in PASSES:
        backend.pass_records = most
        us, host_us = stage_us(backend, work)
        print(f"passes of {most:5} records: {us:.3f} µs/record, host {host_us:.3f}", flush=True)


def host_profile() -> None:
    """Where the host's time goes that queues a batch."""
    work, backend = make_batch(preset("production"), 2_048), CudaBackend(preset("production"), DEVICE)
    backend.measure(work, iq=False)
    profile = cProfile.Profile()
    for _ in range(3):
        torch.cuda.synchronize()
        profile.runcall(backend.measure, work, iq=False)
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(14)
    print("\n".join(line for line in out.getvalue().splitlines() if line.strip()), flush=True)


def fft_tiles() -> None:
    """Whether rows of an FFT depend on how many are transformed at once."""
    for points in (5_000, 128):
        rows = torch.randn(10_240, points, dtype=torch.complex64, device=DEVICE)
        whole = torch.fft.fft(rows)
        equal = {num: torch.equal(torch.fft.fft(rows[:num]), whole[:num]) for num in (1, 5, 640, 1_280, 2_560, 5_120)}
        print(f"FFT of {points}: rows equal to those of 10240 at once", equal, flush=True)


def stage_us(backend: CudaBackend, work: Transmissions) -> tuple[float, float]:
    """Microseconds per record, of the device with the host and of the host until all is queued; medians of 5."""
    whole, queued = [], []
    for turn in range(6):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        backend.measure(work, iq=False)
        queued_s = time.perf_counter() - began_s
        torch.cuda.synchronize()
        if turn:
            whole.append(time.perf_counter() - began_s)
            queued.append(queued_s)
    return tuple(statistics.median(values) * 1e6 / len(work.links) for values in (whole, queued))  # type: ignore[return-value]


if __name__ == "__main__":
    main()

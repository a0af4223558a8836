"""How long does it take to measure ten minutes of eight receivers at 200 kHz?

    python benchmarks/bench_measure.py [--minutes 10] [--receivers 8] [--device cpu|cuda] [--folder DIR]

Writes SigMF recordings of int16 (3.8 GB at full size; deleted at the end), then times `brim.rf.measurement.measure`.
Prints a table and one JSON line.
"""

import argparse
import json
import math
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from brim.engine.device import resolve_device
from brim.rf.measurement import measure

RATE_HZ = 200_000
WIDTH_HZ = 12_500.0
BLOCK = 1 << 20


def write(folder: Path, receivers: int, seconds: float) -> list[Path]:
    """One noise-like transmission, delayed by whole and fractional samples, with noise of its own at each receiver."""
    num = int(seconds * RATE_HZ)
    rng = np.random.default_rng(1)
    # a period of a few seconds repeats: its correlation is sharp, and writing gigabytes takes no longer than it must
    period = min(num, 1 << 20)
    frequency = np.fft.fftfreq(period, 1 / RATE_HZ)
    spectrum = np.where(np.abs(frequency) < WIDTH_HZ / 2, np.exp(2j * np.pi * rng.uniform(size=period)), 0)
    paths = []
    for k in range(receivers):
        signal = np.fft.ifft(spectrum * np.exp(-2j * np.pi * frequency * k * 37.3e-6)) * period
        signal /= np.sqrt((np.abs(signal) ** 2).mean())
        name = folder / f"rx{k}"
        with name.with_suffix(".sigmf-data").open("wb") as file:
            for first in range(0, num, BLOCK):
                count = min(BLOCK, num - first)
                at = (first + np.arange(count)) % period
                noise = rng.standard_normal((count, 2), dtype=np.float32)
                parts = np.stack([signal.real[at], signal.imag[at]], -1) + noise
                file.write((parts * 3_000).astype("<i2").tobytes())
        place = [7.5 + 0.2 * math.cos(k), 45.0 + 0.2 * math.sin(k), 300.0]
        capture = {"core:sample_start": 0, "core:frequency": 145e6, "core:datetime": "2026-01-31T12:00:00.000000000Z",
                   "core:geolocation": {"type": "Point", "coordinates": place}}  # fmt: skip
        about = {"core:datatype": "ci16_le", "core:sample_rate": RATE_HZ, "core:version": "1.2.0"}
        meta = name.with_suffix(".sigmf-meta")
        meta.write_text(json.dumps({"global": about, "captures": [capture], "annotations": []}))
        paths.append(meta)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    device = resolve_device(options.device)
    folder = Path(tempfile.mkdtemp(prefix="brim-measure-", dir=options.folder))
    try:
        paths = write(folder, options.receivers, options.minutes * 60)
        times = []
        for _ in range(options.repeats):
            begin = time.perf_counter()
            observation = measure(paths, device=device).observation
            times.append(time.perf_counter() - begin)
        worst = max(
            abs(pair.difference_us - 37.3 * (int(pair.station[2:]) - int(pair.reference[2:])))
            for pair in observation.pairs
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    samples = options.receivers * options.minutes * 60 * RATE_HZ
    result = {
        "question": "measure",
        "device": str(device),
        "receivers": options.receivers,
        "minutes": options.minutes,
        "first_s": round(times[0], 2),
        "best_s": round(min(times), 2),
        "msamples_per_s": round(samples / min(times) / 1e6, 1),
        "pairs": len(observation.pairs),
        "worst_error_us": round(worst, 4),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "torch": torch.__version__,
    }
    for name, value in result.items():
        print(f"{name:16} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

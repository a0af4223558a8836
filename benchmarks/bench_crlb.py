"""How close to the Cramér-Rao bound are arrival differences of whole recordings?

    python benchmarks/bench_crlb.py [--trials 8] [--seconds 6] [--kind fm]

Writes SigMF recordings of three receivers for each modulation, bandwidth and SNR, measures them as `brim rf measure`
does, and compares the error of every pair with the bound of two receivers of an unknown signal. Prints
rms(error / bound) and rms(error / claimed sigma), then one JSON line.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.rf.measurement import MeasureConfig, measure

C128 = NDArray[np.complex128]
RATE_HZ = 12_000.0
KINDS = ("am", "fm", "psk", "fsk", "ofdm")
WIDTHS_HZ, SNRS_DB = (600.0, 4_000.0), (10.0, 20.0, 30.0)
PLACES = ((46.50, 8.80), (46.52, 8.86), (46.47, 8.87))


def filtered(values: C128, width_hz: float, edge: float = 0.2) -> C128:
    frequency = np.abs(np.fft.fftfreq(len(values), 1 / RATE_HZ))
    gain = np.clip((width_hz / 2 * (1 + edge) - frequency) / (width_hz * edge), 0, 1) ** 0.5
    return np.asarray(np.fft.ifft(np.fft.fft(values) * gain))


def transmission(kind: str, num: int, width_hz: float, rng: np.random.Generator) -> C128:
    """Of unit power, within about the width."""
    time_s = np.arange(num) / RATE_HZ
    if kind in ("am", "fm"):
        message = filtered(rng.normal(size=num).astype(np.complex128), width_hz if kind == "am" else width_hz / 4).real
        message /= message.std()
        out = 1 + 0.3 * message if kind == "am" else np.exp(2j * np.pi * np.cumsum(message) * width_hz / 6 / RATE_HZ)
    elif kind == "fsk":
        signs = 2 * rng.integers(0, 2, int(time_s[-1] * width_hz / 2.5) + 1) - 1
        tone = signs[(time_s * width_hz / 2.5).astype(np.int64)]
        out = np.exp(2j * np.pi * np.cumsum(tone) * width_hz / 5 / RATE_HZ)
    elif kind == "psk":
        symbol = (time_s * width_hz / 1.25).astype(np.int64)
        phases = np.exp(1j * np.pi / 2 * rng.integers(0, 4, symbol[-1] + 1))
        out = filtered(np.where(np.r_[True, np.diff(symbol) > 0], phases[symbol], 0), width_hz / 1.25, 0.25)
    else:  # ofdm
        length = int(RATE_HZ / width_hz * 64)
        carriers = np.zeros((-(-num // length), length), np.complex128)
        carriers[:, np.arange(-32, 32)] = np.exp(1j * np.pi / 2 * rng.integers(0, 4, (len(carriers), 64)))
        out = np.fft.ifft(carriers).ravel()[:num]
    return np.asarray(out / np.sqrt((np.abs(out) ** 2).mean()))


def bound_s(signal: C128, width_hz: float, density: float) -> float:
    """Least standard deviation of the delay between two receivers of an unknown signal, the phase unknown too."""
    power = np.fft.fftshift(np.abs(np.fft.fft(signal)) ** 2) / len(signal) / RATE_HZ
    frequency = np.fft.fftshift(np.fft.fftfreq(len(signal), 1 / RATE_HZ))
    near = max(1, int(len(signal) / RATE_HZ * width_hz / 200))
    ratio = np.convolve(power, np.ones(near) / near, "same") / density
    weight = 2 * ratio**2 / (1 + 2 * ratio)
    away = frequency - (weight * frequency).sum() / weight.sum()
    return 1 / math.sqrt(float((weight * (2 * np.pi * away) ** 2).sum()))


def trial(kind: str, width_hz: float, snr_db: float, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Errors of all pairs over the bound, and over their claimed sigmas."""
    rng = np.random.default_rng([seed, KINDS.index(kind), int(width_hz), int(snr_db)])
    num = int(seconds * RATE_HZ)
    signal = transmission(kind, num + 200, width_hz, rng)
    frequency = np.fft.fftfreq(len(signal), 1 / RATE_HZ)
    delays = rng.uniform(-8e-6, 8e-6, len(PLACES))
    density = 10 ** (-snr_db / 10) / width_hz
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for n, (place, delay) in enumerate(zip(PLACES, delays, strict=True)):
            late = np.fft.ifft(np.fft.fft(signal) * np.exp(-2j * np.pi * frequency * delay))[100:-100]
            noise = (rng.normal(size=num) + 1j * rng.normal(size=num)) * math.sqrt(density * RATE_HZ / 2)
            paths.append(write(Path(folder) / f"rx{n}", late * np.exp(1j * n) + noise, place))
        config = MeasureConfig(frequency_mhz=145.0, bandwidth_khz=1.4e-3 * width_hz)
        pairs = measure(paths, config=config).observation.pairs
    bound = bound_s(signal, width_hz, density) * 1e6
    errors = [
        (pair.difference_us - 1e6 * (delays[int(pair.station[2:])] - delays[int(pair.reference[2:])]), pair.sigma_us)
        for pair in pairs
    ]
    return [error / bound for error, _ in errors], [error / sigma for error, sigma in errors]


def write(path: Path, iq: C128, place: tuple[float, float]) -> Path:
    path.with_suffix(".sigmf-data").write_bytes(iq.astype("<c8").tobytes())
    capture: dict[str, Any] = {
        "core:sample_start": 0,
        "core:frequency": 145e6,
        "core:datetime": "2026-01-31T12:00:00.000000000Z",
        "core:geolocation": {"type": "Point", "coordinates": [place[1], place[0], 300.0]},
    }
    about = {"core:datatype": "cf32_le", "core:sample_rate": RATE_HZ, "core:version": "1.2.0"}
    meta = path.with_suffix(".sigmf-meta")
    meta.write_text(json.dumps({"global": about, "captures": [capture], "annotations": []}))
    return meta


def rms(values: list[float]) -> float:
    return round(math.sqrt(float(np.mean(np.square(values)))), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    print("| modulation | " + " | ".join(f"{width:g} Hz, {snr:g} dB" for width in WIDTHS_HZ for snr in SNRS_DB) + " |")
    print("| --- |" + " --- |" * (len(WIDTHS_HZ) * len(SNRS_DB)))
    for kind in options.kind or KINDS:
        all_bound, all_sigma, cells = [], [], []
        for width in WIDTHS_HZ:
            for snr in SNRS_DB:
                parts = [trial(kind, width, snr, options.seconds, seed) for seed in range(options.trials)]
                to_bound, to_sigma = ([value for part in parts for value in part[k]] for k in range(2))
                all_bound += to_bound
                all_sigma += to_sigma
                cells.append(f"{rms(to_bound):.2f} ({rms(to_sigma):.2f})")
        results[kind] = {"crlb": rms(all_bound), "sigma": rms(all_sigma), "pairs": len(all_bound)}
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"question": "crlb", "trials": options.trials, "seconds": options.seconds, "results": results}))


if __name__ == "__main__":
    main()

"""Recordings whose truth is known: one transmission, delayed to several receivers with their own clocks, as files."""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

C128 = NDArray[np.complex128]
STATIONS = {
    "ALFA": (46.5, 8.8, 400.0),
    "BRAVO": (51.4, 11.9, 100.0),
    "CHARLIE": (51.5, 3.6, 0.0),
    "DELTA": (48.8, 2.3, 50.0),
}
CENTRE_HZ = 7_100_000.0
EPOCH = "2026-01-31T12:00:00"
SECOND_OF_WEEK = 561_618  # of that moment, GPS


def shaped(values: C128, rate_hz: float, width_hz: float, edge: float = 0.2) -> C128:
    """Noise or symbols filtered to a width, unit power."""
    frequency = np.abs(np.fft.fftfreq(len(values), 1 / rate_hz))
    gain = np.clip((width_hz / 2 * (1 + edge) - frequency) / (width_hz * edge), 0, 1) ** 0.5
    out = np.fft.ifft(np.fft.fft(values) * gain)
    return np.asarray(out / np.sqrt((np.abs(out) ** 2).mean()))


def modulated(kind: str, num: int, rate_hz: float, width_hz: float, rng: np.random.Generator) -> C128:
    """A transmission of a kind, unit power."""
    noise = rng.normal(size=num) + 1j * rng.normal(size=num)
    if kind == "noise":
        return shaped(noise, rate_hz, width_hz)
    if kind == "am":
        message = shaped(noise.real + 0j, rate_hz, width_hz).real
        return np.asarray((1 + 0.3 * message / message.std()) / np.sqrt(1.09) + 0j)
    if kind == "fm":
        message = shaped(noise.real + 0j, rate_hz, width_hz / 4).real
        return np.asarray(np.exp(2j * np.pi * np.cumsum(message / message.std()) * width_hz / 6 / rate_hz))
    per_s = width_hz / (2.5 if kind == "fsk" else 1.25)
    symbol = (np.arange(num) * per_s / rate_hz).astype(np.int64)
    if kind == "fsk":
        signs = 2 * rng.integers(0, 2, symbol[-1] + 1) - 1
        return np.asarray(np.exp(2j * np.pi * np.cumsum(signs[symbol]) * width_hz / 5 / rate_hz))
    if kind == "psk":
        first = np.r_[True, np.diff(symbol) > 0]
        pulses = np.where(first, np.exp(1j * np.pi / 2 * rng.integers(0, 4, symbol[-1] + 1)[symbol]), 0)
        return shaped(pulses, rate_hz, per_s, 0.25)
    length, parts = int(rate_hz / width_hz * 64), []
    for _ in range(-(-num // length)):
        carriers = np.zeros(length, np.complex128)
        carriers[np.arange(-32, 32)] = np.exp(1j * np.pi / 2 * rng.integers(0, 4, 64))
        parts.append(np.fft.ifft(carriers))
    out = np.concatenate(parts)[:num]
    return np.asarray(out / np.sqrt((np.abs(out) ** 2).mean()))


class Scene:
    """A transmission that each receiver samples at its own rate, start, delay and oscillator."""

    def __init__(self, seconds: float, width_hz: float, kind: str = "psk", seed: int = 1, snr_db: float = 25.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.seconds, self.width_hz, self.snr_db = seconds, width_hz, snr_db
        self.dense_hz = 4 * width_hz
        num = int((seconds + 1) * self.dense_hz)
        self.signal = modulated(kind, num, self.dense_hz, width_hz, self.rng)

    def receive(
        self, rate_hz: float, start_s: float, delay_s: float, *, shift_hz: float = 0.0, num: int | None = None
    ) -> C128:
        """Samples at start_s + n / rate_hz of the signal delay_s late, with noise; it begins half a second early."""
        num = int(self.seconds * rate_hz) if num is None else num
        time_s = start_s + np.arange(num) / rate_hz
        at = (time_s - delay_s + 0.5) * self.dense_hz
        whole = np.floor(at).astype(np.int64)
        out = np.zeros(num, np.complex128)
        for k in range(-11, 13):  # a Kaiser-windowed sinc: −80 dB at a quarter of the rate
            away = at - whole - k
            weight = np.sinc(away) * np.i0(8 * np.sqrt(np.clip(1 - (away / 12) ** 2, 0, 1))) / np.i0(8)
            out += weight * self.signal[(whole + k) % len(self.signal)]
        phase = self.rng.uniform(0, 2 * np.pi)
        out *= np.exp(1j * (2 * np.pi * shift_hz * time_s + phase))
        noise = self.rng.normal(size=num) + 1j * self.rng.normal(size=num)
        return out + noise * np.sqrt(10 ** (-self.snr_db / 10) * rate_hz / self.width_hz / 2)


def to_int16(iq: C128, peak: float = 0.5) -> NDArray[np.int16]:
    """Interleaved, the strongest component at a share of full scale."""
    parts = np.stack([iq.real, iq.imag], -1)
    return np.asarray(np.round(parts / np.abs(parts).max() * peak * 32767).astype("<i2"))


def write_kiwi(
    path: Path, iq: C128 | NDArray[np.int16], rate_hz: float, start_s: float, *, stated_hz: int | None = None,
    stale: int = 2, edit: Any = None, jitter_s: float = 0.0, age: int = 1,
) -> Path:  # fmt: skip
    """A KiwiSDR file; start_s counts from EPOCH. edit may change the list of (seconds, nanoseconds) stamps."""
    data = to_int16(iq) if np.iscomplexobj(iq) else np.asarray(iq)
    blocks = [data[k : k + 512] for k in range(0, len(data) - 511, 512)]
    rng = np.random.default_rng(0)
    stamps = []
    for n in range(len(blocks)):
        elapsed = n * 512 / rate_hz
        moment = SECOND_OF_WEEK + start_s + elapsed + rng.normal() * jitter_s
        stamps.append((int(moment // 1), round((moment % 1) * 1e9) % 10**9))
    for n in range(stale):
        stamps[n] = (SECOND_OF_WEEK - 11_000 * (n + 1), 5)
    stamps = edit(stamps) if edit is not None else stamps
    body = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 2, stated_hz or round(rate_hz), round(rate_hz) * 4, 4, 16)
    for (second, nano), block in zip(stamps, blocks, strict=True):
        body += b"kiwi" + struct.pack("<IBBII", 10, age, 0, second, nano)
        body += b"data" + struct.pack("<I", block.nbytes) + block.tobytes()
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    return path


def write_sigmf(
    path: Path, iq: C128, rate_hz: float, start: str | None, *, datatype: str = "cf32_le",
    place: Sequence[float] | None = None, centre_hz: float = CENTRE_HZ, station: str | None = None, **about: Any,
) -> Path:  # fmt: skip
    """A .sigmf-meta with its data beside it; place is lat, lon, alt."""
    content = encode(iq, datatype)
    path.with_suffix(".sigmf-data").write_bytes(content)
    capture: dict[str, Any] = {"core:sample_start": 0, "core:frequency": centre_hz}
    if start is not None:
        capture["core:datetime"] = start
    if place is not None:
        lat, lon, alt = place
        capture["core:geolocation"] = {"type": "Point", "coordinates": [lon, lat, alt]}
    facts = {"core:datatype": datatype, "core:sample_rate": rate_hz, "core:version": "1.2.0",
             "core:sha512": hashlib.sha512(content).hexdigest(), **about}  # fmt: skip
    if station is not None:
        facts["brim:station"] = station
    meta = {"global": facts, "captures": [capture], "annotations": []}
    target = path.with_suffix(".sigmf-meta")
    target.write_text(json.dumps(meta))
    return target


def encode(iq: C128, datatype: str) -> bytes:
    """Samples in a SigMF type, at half of the full scale of an integer."""
    order = ">" if datatype.endswith("_be") else "<"
    kind, bits = datatype[1], int(datatype.partition("_")[0][2:])
    parts = np.stack([iq.real, iq.imag], -1) if datatype[0] == "c" else iq.real[:, None]
    if kind == "f":
        return parts.astype(f"{order}f{bits // 8}").tobytes()
    scaled = parts * (2.0 ** (bits - 1) - 1) * 0.5
    if kind == "u":
        scaled = scaled + 2.0 ** (bits - 1) - 0.5
    return np.round(scaled).astype(f"{order}{kind}{bits // 8}").tobytes()


def write_sites(path: Path) -> Path:
    lines = [",".join([name, *map(str, place)]) for name, place in STATIONS.items()]
    path.write_text("\n".join(["name,lat,lon,alt", *lines]) + "\n")
    return path

"""WAV files of IQ: KiwiSDR's with a GNSS time stamp before each block, and ordinary two-channel ones.

A KiwiSDR file is RIFF/WAVE with a `kiwi` chunk before each `data` chunk, 10 bytes, little endian: uint8 seconds since
the last position fix, uint8 reserved, uint32 GPS second of the week, uint32 nanosecond of the block's first sample.
Its name is DATE_FREQUENCY_STATION_iq.wav. The week comes from the date in the name. An ordinary file has one `data`
chunk; an `auxi` chunk, as SDR programs write it, gives its start and its centre frequency.
"""

import re
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from brim.rf.recordings.clock import WEEK_S
from brim.rf.recordings.recording import Recording, Samples, check_rate, file_size, unreadable

GPS_EPOCH_S = 315_964_800  # 1980-01-06 as Unix time
LEAP_S = ((1483228800, 18), (1435708800, 17), (1341100800, 16), (1230768000, 15), (0, 14))  # GPS − UTC from then on
FRESH_S = 30  # a stamp whose last fix is older than this drifts with the receiver's own oscillator
_NAME = re.compile(r"(\d{8}T\d{6})Z_(\d+)_([^_]+)")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {(_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 32): "<i4", (_FLOAT, 32): "<f4", (_FLOAT, 64): "<f8"}
_TO_END = (0, 0xFFFFFFFF)  # sizes that writers leave when they stream, or cannot say


@dataclass(slots=True)
class _Chunks:
    """What the walk through a file finds."""

    dtype: str = ""
    rate_hz: float = 0.0
    offsets: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    stamps: list[tuple[int, int, int, int]] = field(default_factory=list)  # sample, age, second, nanosecond
    start_s: float | None = None
    centre_hz: float | None = None


def read_wav(path: Path) -> Recording:
    """Open a WAV file of IQ, with or without KiwiSDR's stamps."""
    chunks = _walk(path, file_size(path))
    if not chunks.offsets:
        raise unreadable(path, "no samples in it")
    samples = Samples(path, chunks.dtype, chunks.offsets, chunks.counts)
    name = _NAME.search(path.name)
    station = name[3] if name else None
    centre_hz = float(name[2]) if name else chunks.centre_hz
    if not chunks.stamps:
        known = chunks.start_s is not None
        return Recording(
            path=path,
            format="wav",
            samples=samples,
            rate_hz=chunks.rate_hz,
            centre_hz=centre_hz,
            station=station,
            stamp_samples=np.zeros(int(known), np.int64),
            stamp_times_s=np.zeros(int(known)),
            epoch_s=chunks.start_s or 0.0,
            stamp_sigma_s=1e-3,
        )
    stamps = np.array(chunks.stamps, np.int64)
    age = int(np.percentile(stamps[:, 1], 90))
    recording = Recording(
        path=path,
        format="kiwi",
        samples=samples,
        rate_hz=chunks.rate_hz,
        centre_hz=centre_hz,
        station=station,
        stamp_samples=stamps[:, 0],
        stamp_times_s=stamps[:, 2] + stamps[:, 3] * 1e-9,
        epoch_s=week_start_s(name[1] if name else None, stamps[:, 2]),
        dated=name is not None,
        fix_age_s=float(age),
    )
    return recording.noted(f"last position fix up to {age} s old") if age > FRESH_S else recording


def week_start_s(date: str | None, seconds: NDArray[np.int64]) -> float:
    """Unix time of the GPS week that puts the stamps nearest to the date of the file's name; 0 without a date."""
    if date is None:
        return 0.0
    try:
        unix = datetime.strptime(date, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
    leap = next(seconds for since, seconds in LEAP_S if unix >= since)
    week = round((unix + leap - GPS_EPOCH_S - float(np.median(seconds))) / WEEK_S)
    return GPS_EPOCH_S + week * WEEK_S - leap


def _walk(path: Path, size: int) -> _Chunks:
    chunks = _Chunks()
    with path.open("rb") as file:
        head = file.read(12)
        if len(head) < 12 or head[:4] not in (b"RIFF", b"RF64") or head[8:] != b"WAVE":
            raise unreadable(path, "not a WAV file; expected RIFF and WAVE at its start")
        at, width = 12, 0
        while at + 8 <= size:
            file.seek(at)
            kind, length = struct.unpack("<4sI", file.read(8))
            body = at + 8
            if kind == b"data" and length in _TO_END:
                length = size - body
            if body + length > size:
                chunk = kind.decode("latin-1").strip()
                raise unreadable(path, f"chunk {chunk!r} at byte {at} is cut off: {size - body} of {length} bytes")
            if kind == b"fmt ":
                width = _format(path, file.read(min(length, 40)), chunks)
            elif kind == b"kiwi" and length >= 10:
                age, _, second, nano = struct.unpack("<BBII", file.read(10))
                chunks.stamps.append((sum_of(chunks.counts), age, second, nano))
            elif kind == b"auxi" and length >= 36:
                _auxi(file.read(36), chunks)
            elif kind == b"data":
                if not width:
                    raise unreadable(path, "samples before their format")
                chunks.offsets.append(body)
                chunks.counts.append((chunks.counts[-1] if chunks.counts else 0) + length // width)
            at = body + length + (length & 1)
    chunks.counts = np.diff([0, *chunks.counts]).tolist()
    return chunks


def sum_of(ends: list[int]) -> int:
    """Samples so far: the walk keeps running sums, so that long files are not added up again for each block."""
    return ends[-1] if ends else 0


def _format(path: Path, body: bytes, chunks: _Chunks) -> int:
    """Reads `fmt ` and returns the bytes of one sample."""
    if len(body) < 16:
        raise unreadable(path, "its format chunk is too short")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
    if kind == _EXTENSIBLE and len(body) >= 26:
        kind = struct.unpack("<H", body[24:26])[0]
    if channels != 2:
        raise unreadable(path, f"{channels} channel{'s' * (channels != 1)}; IQ has two, I and Q")
    if (kind, bits) not in _TYPES:
        raise unreadable(path, f"format {kind} with {bits} bits is not supported; 8, 16 or 32 bit PCM or float is")
    chunks.dtype, chunks.rate_hz = _TYPES[kind, bits], check_rate(path, rate)
    return int(bits) // 8 * 2


def _auxi(body: bytes, chunks: _Chunks) -> None:
    """Start as Windows' SYSTEMTIME and centre frequency in Hz."""
    year, month, _, day, hour, minute, second, milli = struct.unpack("<8H", body[:16])
    try:
        chunks.start_s = datetime(year, month, day, hour, minute, second, milli * 1000, UTC).timestamp()
    except ValueError:
        chunks.start_s = None
    chunks.centre_hz = float(struct.unpack("<I", body[32:36])[0]) or None

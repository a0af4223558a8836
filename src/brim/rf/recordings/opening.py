"""Opening recordings of any format, and the list of recordings that says what their files do not.

A list is CSV: `file`, and where the file does not say it `station`, `lat`, `lon`, `alt`, `start` (UTC), `rate_hz`,
`centre_hz` and `format` (cu8, cs16, cf32, …). It stands among the recordings itself, or beside a raw file as
`NAME.csv` or `recordings.csv`.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from brim.errors import BrimError, ConfigError, printable
from brim.rf.recordings.kiwi import read_wav
from brim.rf.recordings.recording import Recording, Samples, check_rate, file_size, unreadable
from brim.rf.recordings.sigmf import ARCHIVE, DATA, META, read_sigmf, read_time
from brim.rf.recordings.sites import read_table, to_number

RAW = {
    "cu8": "<u1", "ci8": "<i1", "cs8": "<i1", "cs16": "<i2", "ci16": "<i2", "cs32": "<i4", "cf32": "<f4", "cf64": "<f8",
}  # fmt: skip
LISTED = ("station", "lat", "lon", "alt", "start", "rate_hz", "centre_hz", "format")
LABELS = ("transmission", "tx_lat", "tx_lon", "tx_alt", "tx_power_dbm", "frequency_mhz", "bandwidth_khz")
ALIASES = {
    "path": "file", "recording": "file", "name": "station", "center_hz": "centre_hz", "frequency_hz": "centre_hz",
    "sample_rate": "rate_hz", "rate": "rate_hz", "start_time": "start", "datetime": "start",
}  # fmt: skip
BESIDE = "recordings.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A line of a list of recordings."""

    path: Path
    values: dict[str, str]
    source: str  # for messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A file that could not be opened, and why."""

    path: Path
    reason: str


def read_listing(path: Path) -> list[ListedFile]:
    """The lines of a list of recordings; files stand relative to it."""
    rows = read_table(path, "list of recordings", ("file",), (*LISTED, *LABELS), ALIASES)
    return [
        ListedFile(path=path.parent / row["file"], values=row, source=f"list of recordings {path}, line {number}")
        for number, row in rows
    ]


def open_recordings(paths: Iterable[Path | ListedFile]) -> tuple[list[Recording], list[Refused]]:
    """Every recording that can be opened, in order, and the files that cannot; the threads are busy with checksums."""
    files: list[ListedFile] = []
    for path in paths:
        if isinstance(path, ListedFile):
            files.append(path)
        elif path.suffix.lower() == ".csv":
            files += read_listing(path)
        else:
            files.append(ListedFile(path=path, values={}, source=""))
    seen: dict[Path, ListedFile] = {}
    twice: list[Refused] = []
    for one in files:
        if any(one.path == other.path for other in seen.values()):
            twice.append(Refused(path=one.path, reason="a second recording of one station: the file is given twice"))
        seen.setdefault(_key(one.path), one)
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(_open, seen.values()))
    recordings = [recording for one in opened if isinstance(one, list) for recording in one]
    return recordings, [*(one for one in opened if isinstance(one, Refused)), *twice]


def _key(path: Path) -> Path:
    """The two files of one SigMF recording are one recording."""
    name = path.name
    return path.with_name(name.removesuffix(DATA) + META) if name.endswith(DATA) else path


def _open(one: ListedFile) -> list[Recording] | Refused:
    try:
        return open_listed(one)
    except (BrimError, OSError) as failure:
        reason = str(failure) if isinstance(failure, BrimError) else failure.strerror or str(failure)
        return Refused(path=one.path, reason=reason.removeprefix(f"recording {printable(one.path.name)}: "))


def open_listed(one: ListedFile) -> list[Recording]:
    """The recordings of one file: a SigMF archive may hold several."""
    name = one.path.name.lower()
    if name.endswith((META, DATA, ARCHIVE)):
        recordings = read_sigmf(one.path)
    elif name.endswith((".wav", ".wave")):
        recordings = [read_wav(one.path)]
    elif (kind := one.values.get("format") or name.rpartition(".")[2]) in RAW:
        recordings = [_raw(one.path, RAW[kind])]
    else:
        file_size(one.path)
        expected = f"expected .wav, .sigmf-meta, .sigmf, .csv or raw {', '.join(RAW)}"
        raise unreadable(one.path, f"its kind is not known by its name; {expected}")
    values = one.values or _beside(one.path)
    return [_completed(recording, values, one.source) for recording in recordings]


def _beside(path: Path) -> dict[str, str]:
    """What a list beside a file says of it."""
    for place in (path.with_suffix(".csv"), path.parent / BESIDE):
        if place.is_file():
            lines = [one for one in read_listing(place) if one.path.name == path.name]
            if lines:
                return lines[0].values
    return {}


def _raw(path: Path, dtype: str) -> Recording:
    width = 2 * np.dtype(dtype).itemsize
    count = file_size(path) // width
    if not count:
        raise unreadable(path, "no samples in it")
    return Recording(path=path, format="raw", samples=Samples(path, dtype, [0], [count]), rate_hz=0.0)


def _completed(recording: Recording, values: dict[str, str], source: str) -> Recording:
    """A recording with what its line in a list adds."""
    numbers = {
        key: to_number(values[key], f"{source}: {key}")
        for key in ("lat", "lon", "alt", "rate_hz", "centre_hz")
        if values.get(key)
    }
    out = recording
    if "rate_hz" in numbers:
        out = replace(out, rate_hz=check_rate(out.path, numbers["rate_hz"]))
    if not out.rate_hz:
        raise unreadable(
            out.path, "raw samples without a sample rate", "list it in a CSV with file,station,start,rate_hz"
        )
    if "centre_hz" in numbers:
        out = replace(out, centre_hz=numbers["centre_hz"])
    if values.get("station"):
        out = replace(out, station=values["station"])
    if "lat" in numbers and "lon" in numbers:
        if not (-90 <= numbers["lat"] <= 90 and -180 <= numbers["lon"] <= 180):
            raise ConfigError(f"{source}: lat {numbers['lat']:g}, lon {numbers['lon']:g} is not on Earth")
        out = replace(out, place=(numbers["lat"], numbers["lon"], numbers.get("alt", 0.0)))
    if values.get("start"):
        second, fraction, sigma_s = read_time(out.path, values["start"])
        out = replace(
            out,
            stamp_samples=np.zeros(1, np.int64),
            stamp_times_s=np.array([fraction]),
            epoch_s=float(second),
            stamp_sigma_s=sigma_s,
        )
    return out

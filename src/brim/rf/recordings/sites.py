"""The stations file: where receivers stand, and what is known of their gain, noise, cable and antenna.

CSV with the header name,lat,lon,alt and, where known, gain_db, noise_figure_db, delay_us, height_m.
"""

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brim.config import nearest
from brim.errors import ConfigError, printable
from brim.rf.config import Station
from brim.rf.recordings.recording import Recording

COLUMNS = ("name", "lat", "lon", "alt")
OPTIONAL = ("gain_db", "noise_figure_db", "delay_us", "height_m")
MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A station with its calibration."""

    name: str
    lat: float
    lon: float
    alt: float
    gain_db: float | None = None  # from the antenna to the samples: dBm at the antenna = dB of full scale − gain
    noise_figure_db: float | None = None
    delay_us: float = 0.0  # of cable and receiver: taken off every arrival
    height_m: float | None = None  # of the antenna above ground


def read_sites(path: Path) -> tuple[Site, ...]:
    """The stations of a CSV file; a column that is not known is an error."""
    rows = read_table(path, "stations file", COLUMNS, OPTIONAL)
    sites: list[Site] = []
    for number, row in rows:
        where = f"stations file {path}, line {number}"
        values = {key: to_number(row[key], f"{where}: {key}") for key in (*COLUMNS[1:], *OPTIONAL) if row.get(key)}
        missing = [key for key in COLUMNS if not row.get(key)]
        if missing:
            raise ConfigError(f"{where}: no {' and no '.join(missing)}; every station needs a name and a position")
        try:
            Station(row["name"], values["lat"], values["lon"], values["alt"])
        except ConfigError as failure:
            raise ConfigError(f"{where}: {failure}", code=failure.code) from failure
        if any(row["name"].lower() == site.name.lower() for site in sites):
            raise ConfigError(f"{where}: station {row['name']!r} stands there twice", code="conflict")
        sites.append(Site(name=row["name"], **values))
    return tuple(sites)


def sites_text(sites: Iterable[Site]) -> str:
    """A stations file that `read_sites` reads."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*COLUMNS, *OPTIONAL))
    for site in sites:
        writer.writerow(["" if (value := getattr(site, key)) is None else value for key in (*COLUMNS, *OPTIONAL)])
    return file.getvalue()


def match_site(recording: Recording, sites: Iterable[Site]) -> Site | None:
    """The site of a recording: the name in its metadata, else the part of its file name that is a station's name."""
    named = {site.name.lower(): site for site in sites}
    if recording.station and recording.station.lower() in named:
        return named[recording.station.lower()]
    return named_in(recording.path, sites)


def named_in(path: Path, sites: Iterable[Site]) -> Site | None:
    """The site whose name is a part of a file's name."""
    named = {site.name.lower(): site for site in sites}
    stem = path.name.lower()
    parts = re.split(r"[_\s.]+", stem)
    for part in parts:
        if part in named:
            return named[part]
    inside = [name for name in named if name in stem]
    return named[max(inside, key=len)] if inside else None


def read_table(
    path: Path, what: str, needed: Iterable[str], optional: Iterable[str], aliases: dict[str, str] | None = None
) -> list[tuple[int, dict[str, str]]]:
    """Line numbers and rows of a CSV file with a header, values stripped; unknown and missing columns are errors."""
    needed, known = tuple(needed), (*needed, *optional)
    hint = f"the file is CSV with the header {','.join(needed)}"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{what} {path}: larger than 16 MiB", code="too_large", hint=hint)
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{what} {path}: {reason}", code="unreadable", hint=hint) from error
    if len(lines) < 2:
        raise ConfigError(f"{what} {path}: no lines below its header", code="missing", hint=hint)
    header = [(aliases or {}).get(name.strip().lower(), name.strip().lower()) for name in lines[0]]
    unknown = [name for name in header if name not in known]
    if unknown:
        name = unknown[0]
        text = f"{what} {path}: unknown column {printable(name)!r}; {nearest(name, known)}"
        raise ConfigError(text, code="unknown_field")
    if missing := [name for name in needed if name not in header]:
        raise ConfigError(f"{what} {path}: missing column {', '.join(missing)}", code="missing", hint=hint)
    rows = [(number, [value.strip() for value in line]) for number, line in enumerate(lines[1:], 2) if any(line)]
    return [(number, dict(zip(header, line, strict=False))) for number, line in rows]


def to_number(text: str, source: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{source} is {printable(text)!r}; expected a number", code="wrong_type")
    return value

"""Recordings of transmitters whose places are known: datasets with real measurements, and calibrated stations.

A list of recordings names for each file its `transmission` (any word; files with the same one belong together) and
where it came from: `tx_lat`, `tx_lon`, and if known `tx_alt`, `tx_power_dbm`, `frequency_mhz` and `bandwidth_khz`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.engine.storage import place_of
from brim.errors import ConfigError
from brim.rf.config import GenerateConfig, Station
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.dataset import open_writer
from brim.rf.generation.rows import TRUTH
from brim.rf.measurement.config import MeasureConfig
from brim.rf.measurement.document import Measurement
from brim.rf.measurement.run import measure
from brim.rf.physics.geometry import SPEED_OF_LIGHT, enu, gdop, geodesic_m
from brim.rf.physics.link import free_space_db
from brim.rf.recordings import Site
from brim.rf.recordings.opening import ListedFile, read_listing
from brim.rf.recordings.sites import to_number

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTransmission:
    """Files of one transmission and where it came from."""

    name: str
    files: list[ListedFile]
    lat: float
    lon: float
    alt: float
    power_dbm: float | None
    config: MeasureConfig


def read_known(path: Path) -> list[KnownTransmission]:
    """The transmissions of a list of recordings, in the order of their first lines."""
    groups: dict[str, list[ListedFile]] = {}
    for line in read_listing(path):
        groups.setdefault(line.values.get("transmission") or "1", []).append(line)
    return [_known(name, lines) for name, lines in groups.items()]


def _known(name: str, lines: list[ListedFile]) -> KnownTransmission:
    first = lines[0]
    for key in ("tx_lat", "tx_lon"):
        if not first.values.get(key):
            raise ConfigError(
                f"{first.source}: no {key}; every transmission needs the place of its transmitter", code="missing"
            )

    def number(key: str) -> float | None:
        return to_number(first.values[key], f"{first.source}: {key}") if first.values.get(key) else None

    lat, lon = number("tx_lat") or 0.0, number("tx_lon") or 0.0
    if not (-90 <= lat <= 90 and -180 <= lon <= 180):
        raise ConfigError(f"{first.source}: tx_lat {lat:g}, tx_lon {lon:g} is not on Earth")
    config = MeasureConfig(frequency_mhz=number("frequency_mhz"), bandwidth_khz=number("bandwidth_khz"))
    return KnownTransmission(
        name=name, files=lines, lat=lat, lon=lon, alt=number("tx_alt") or 0.0, power_dbm=number("tx_power_dbm"),
        config=config,
    )  # fmt: skip


def _measured(
    path: Path, sites: Sequence[Site], progress: Callable[[int, int], None] | None
) -> list[tuple[KnownTransmission, Measurement]]:
    known = read_known(path)
    out = []
    for number, one in enumerate(known):
        out.append((one, measure(one.files, sites, one.config)))
        if progress is not None:
            progress(number + 1, len(known))
    return out


# Datasets


def dataset_from(
    path: Path | str, out: Path | str, sites: Sequence[Site] = (), *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Write a dataset with a sample for every transmission of a list; returns a report."""
    measured = _measured(Path(path), sites, progress)
    stations = {one.name: one.site for _, each in measured for one in each.receivers}
    names = sorted(stations)
    frequency_hz = float(np.median([each.observation.frequency_hz or 0.0 for _, each in measured]))
    config = GenerateConfig(
        frequency_mhz=frequency_hz / 1e6,
        stations=tuple(Station(name, stations[name].lat, stations[name].lon, stations[name].alt) for name in names),
        min_receivers=min(3, len(names)),
    )
    rows = [_row(number, one, each, names, stations) for number, (one, each) in enumerate(measured)]
    joined = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    totals = {key: torch.zeros(len(rows), dtype=torch.int64) for key in ("receivers", "gdop")}
    with open_writer(config, place_of(str(out)), "cpu", resume=False, source="recordings") as writer:
        writer.append(joined, {"attempted": joined["index"] + 1, **totals})
        writer.finish(report={"seconds": 0.0, "samples_per_s": 0.0, "iq_per_s": 0.0, "device": "cpu"})
    left_out = [
        {"transmission": one.name, "name": drop.name, "reason": drop.reason}
        for one, each in measured
        for drop in each.observation.left_out
    ]
    return {"dataset": str(out), "samples": len(rows), "stations": names, "left_out": left_out}


def _row(
    number: int, one: KnownTransmission, each: Measurement, names: list[str], sites: dict[str, Site]
) -> dict[str, Tensor]:
    observation = each.observation
    table = torch.zeros(len(names), len(FEATURES), len(STATISTICS))
    present = torch.zeros(len(names), dtype=torch.bool)
    for station in observation.stations:
        if set(station.features) < {name for name, _ in FEATURES}:
            raise ConfigError(
                f"transmission {one.name}: {station.name} was recorded in less than the 25 kHz that a dataset needs",
                code="conflict",
            )
        row = names.index(station.name)
        present[row] = True
        table[row] = torch.tensor([[station.features[name][s] for s in STATISTICS] for name, _ in FEATURES])
    places = np.array([[sites[name].lat, sites[name].lon, sites[name].alt] for name in names])
    reference = names.index(observation.reference or observation.stations[0].name)
    truth, dilution, bound = _truth(one, places, present.numpy(), reference, table)
    return {
        "features": table,
        "valid": torch.ones(len(names), dtype=torch.bool),
        "present": present,
        "receivers": torch.from_numpy(places),
        "transmitter": torch.tensor([one.lat, one.lon, one.alt], dtype=torch.float64),
        "truth": truth,
        "reference": torch.tensor(reference),
        "gdop": torch.tensor(dilution, dtype=torch.float32),
        "crlb_m": torch.tensor(bound, dtype=torch.float32),
        "index": torch.tensor(number),
    }


def _truth(
    one: KnownTransmission, places: F64, present: NDArray[np.bool_], reference: int, table: Tensor
) -> tuple[Tensor, float, float]:
    """What is known for certain (distances, light times), the dilution and the bound by the measured sigmas."""
    lat, lon, alt = places.T
    at = (np.full(len(lat), value) for value in (one.lat, one.lon, one.alt))
    east, north, up = enu(lat, lon, alt, *at)
    distance = np.sqrt(east**2 + north**2 + up**2)
    truth = torch.zeros(len(places), len(TRUTH))
    columns = {name: k for k, (name, _) in enumerate(TRUTH)}
    delay = distance / SPEED_OF_LIGHT
    truth[:, columns["distance_m"]] = torch.from_numpy(distance).float()
    truth[:, columns["delay_s"]] = torch.from_numpy(delay).float()
    truth[:, columns["arrival_difference_us"]] = torch.from_numpy((delay - delay[reference]) * 1e6).float()
    names = [name for name, _ in FEATURES]
    sigma_m = table[:, names.index("arrival_sigma_us"), 0].double().numpy() * 1e-6 * SPEED_OF_LIGHT
    known = present & (sigma_m < 1e5)
    weight = np.where(known, 1 / np.maximum(sigma_m, 30.0) ** 2, 0.0)
    design = np.stack([-east / distance, -north / distance, np.ones_like(east)], 1)
    normal = design.T @ (weight[:, None] * design) + np.diag([1e-12, 1e-12, 1e-12])
    bound = math.sqrt(max(float(np.trace(np.linalg.inv(normal)[:2, :2])), 1.0))
    dilution = float(gdop(east[None], north[None], present[None])[0])
    return truth, min(dilution, 1e6), bound


# Calibration


def calibrate(
    path: Path | str, sites: Sequence[Site] = (), *, progress: Callable[[int, int], None] | None = None
) -> tuple[tuple[Site, ...], dict[str, Any]]:
    """Stations with their delays, and gains where powers are known; and a report with what is left over.

    Delays are relative to the first station, whose own is kept: differences determine no more.
    """
    measured = _measured(Path(path), sites, progress)
    stations = {one.name: one.site for _, each in measured for one in each.receivers}
    names = list(stations)
    delays, residuals = _delays(measured, names, stations)
    gains = _gains(measured, names)
    calibrated, report = [], []
    for n, name in enumerate(names):
        site = stations[name]
        gain = gains.get(name)
        calibrated.append(
            Site(
                name=name, lat=site.lat, lon=site.lon, alt=site.alt, height_m=site.height_m,
                noise_figure_db=site.noise_figure_db, delay_us=round(site.delay_us + float(delays[n]), 4),
                gain_db=site.gain_db if gain is None else round(gain, 2),
            )
        )  # fmt: skip
        offsets = {one.name: round(float(left[n]), 4) for (one, _), left in zip(measured, residuals, strict=True)}
        report.append({"name": name, "delay_us": calibrated[-1].delay_us, "gain_db": calibrated[-1].gain_db,
                       "clock_offset_us": offsets})  # fmt: skip
    return tuple(calibrated), {"stations": report, "transmissions": len(measured)}


def _delays(
    measured: list[tuple[KnownTransmission, Measurement]], names: list[str], stations: dict[str, Site]
) -> tuple[F64, list[F64]]:
    """Constant delays in µs beyond those taken off already, and per transmission what the clocks add."""
    rows, values, weights, owners = [], [], [], []
    for number, (one, each) in enumerate(measured):
        for pair in each.observation.pairs:
            i, j = names.index(pair.reference), names.index(pair.station)
            light = (_distance_m(one, stations[names[j]]) - _distance_m(one, stations[names[i]])) / SPEED_OF_LIGHT
            row = np.zeros(len(names))
            row[j], row[i] = 1.0, -1.0
            rows.append(row)
            values.append(pair.difference_us - light * 1e6)
            weights.append(1 / pair.sigma_us)
            owners.append(number)
    if not rows:
        raise ConfigError("no pair of stations heard a transmission together; nothing to calibrate", code="too_few")
    design, value, weight, owner = np.array(rows), np.array(values), np.array(weights), np.array(owners)
    delays = _solved(design, value, weight)
    left = []
    for number in range(len(measured)):
        own = owner == number
        left.append(_solved(design[own], value[own] - design[own] @ delays, weight[own]))
    return delays, left


def _solved(design: F64, value: F64, weight: F64) -> F64:
    """One number per station, the first 0."""
    if not len(value):
        return np.zeros(design.shape[1])
    solution, *_ = np.linalg.lstsq(design[:, 1:] * weight[:, None], value * weight, rcond=None)
    return np.concatenate([[0.0], solution])


def _gains(measured: list[tuple[KnownTransmission, Measurement]], names: list[str]) -> dict[str, float]:
    """Gain from the antenna to full scale in dB, over transmissions of known power, by free space."""
    offsets: dict[str, list[float]] = {name: [] for name in names}
    for one, each in measured:
        if one.power_dbm is None:
            continue
        for receiver, level_db in zip(each.receivers, each.levels_db, strict=True):
            distance = np.array([_distance_m(one, receiver.site)])
            loss = float(free_space_db((each.observation.frequency_hz or 0.0) / 1e6, distance)[0])
            offsets[receiver.name].append(level_db - (one.power_dbm - loss))
    return {name: float(np.median(values)) for name, values in offsets.items() if values}


def _distance_m(one: KnownTransmission, site: Site) -> float:
    return float(geodesic_m(*(np.array(value) for value in (one.lat, one.lon, site.lat, site.lon))))

"""From an observations document to sightings: positions, clocks and strengths that can be used, and why others cannot.

Axes: R stations. Both forms are read: the short one, whose stations give their arrival difference as a feature, and the
document of a measurement, with a difference for every pair of stations. Nothing that contradicts itself goes on: a
difference longer than light takes between two stations is refused, and with it the station that causes most of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError
from brim.rf.config import GenerateConfig
from brim.rf.location.evaluate import parse_observations
from brim.rf.location.posterior import Sighting, straight_lengths
from brim.rf.location.solver import METRES_PER_US, TX_HEIGHT_M, NoiseModel, observe
from brim.rf.measurement import Observation, PairMeasurement
from brim.rf.physics.geometry import SPEED_OF_LIGHT, geodesic_m
from brim.rf.physics.link import path_loss_db
from brim.rf.physics.propagation import ground_range_m, is_ground_wave, sun_elevation_deg, travel_sigma_us, travel_us
from brim.rf.recordings import Site

F64 = NDArray[np.float64]
LeftOutNames = list[dict[str, str]]  # {"name", "reason"}

FEWEST = 2  # stations: a difference and two strengths make a region, if a long one
ENOUGH = 3  # stations that must remain when others are left out
_UNCALIBRATED_DB = 10.0  # between receivers whose antennas and gains nobody measured
_LEAST_SIGMA_US = 0.003  # a metre: no arrival is known better
_BEYOND_SIGMAS, _BEYOND_US = 5.0, 1.0  # tolerance of differences beyond the baseline
_MARGIN_M, _GROUND_MARGIN_M = 60_000.0, 300_000.0  # around the stations at least


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPairs:
    """A sighting, what was left out of it, and what else the answer should say."""

    sighting: Sighting
    left_out: LeftOutNames
    frequency_mhz: float | None
    document: dict[str, Any]  # as it was read, with positions


def prepare_sightings(
    value: Any,
    *,
    config: GenerateConfig | None = None,
    noise: NoiseModel | None = None,
    power_dbm: float | None = None,
    stations: Sequence[Site] = (),
    min_stations: int = FEWEST,
    source: str = "observations",
) -> list[PreparedPairs]:
    """Sightings of a document, or of a list of them.

    config     how signals travel, and what noise short forms have; None: as usual at the frequency
    power_dbm  of the transmitter; None: unknown
    stations   positions for those that the document names without one
    """
    listed = value.get("observations", value) if isinstance(value, Mapping) else value
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{source}: no observations; expected an object with stations, or a list of such")
    return [
        _prepared(
            *_placed(one, stations, min_stations, f"{source}, number {n + 1}"),
            n,
            config,
            noise or NoiseModel(),
            power_dbm,
            f"{source}, number {n + 1}",
        )
        for n, one in enumerate(listed)
    ]


def _prepared(
    one: Mapping[str, Any],
    left_out: LeftOutNames,
    number: int,
    config: GenerateConfig | None,
    noise: NoiseModel,
    power_dbm: float | None,
    source: str,
) -> PreparedPairs:
    document = Observation.from_dict(one, source)
    mhz = None if document.frequency_hz is None else document.frequency_hz / 1e6
    if config is not None and mhz is None:
        mhz = config.frequency_mhz
    config = config or _usual(mhz)
    measured = _from_pairs(document, config, noise) if "pairs" in one else _from_features(one, config, noise, source)
    known = power_dbm is not None and measured.absolute
    loss = _received(config, 0.0 if power_dbm is None else power_dbm)
    sighting = _sighting(document, measured, config, mhz, known, loss, number)
    sighting, refused = _possible(sighting, source)
    return PreparedPairs(
        sighting=sighting, left_out=left_out + _listed(document) + refused, frequency_mhz=mhz, document=dict(one)
    )


def _usual(frequency_mhz: float | None) -> GenerateConfig:
    """The link as it usually is at a frequency."""
    if frequency_mhz is None:
        return GenerateConfig()
    loss: Any = "ground_wave" if is_ground_wave(frequency_mhz) else "log_distance"
    return GenerateConfig(frequency_mhz=frequency_mhz, loss=loss)


def _listed(document: Observation) -> LeftOutNames:
    return [{"name": one.name, "reason": one.reason} for one in document.left_out]


# Positions


def _placed(
    one: Any, stations: Sequence[Site], min_stations: int, source: str
) -> tuple[Mapping[str, Any], LeftOutNames]:
    """The document with positions from the stations file, without stations that have none anywhere."""
    listed = one.get("stations") if isinstance(one, Mapping) else None
    if not isinstance(listed, list) or not all(isinstance(station, Mapping) for station in listed):
        raise ConfigError(f"{source}: no list of stations; each needs lat, lon, alt and what it measured")
    known = {station.name: station for station in stations}
    names = [str(station.get("name", n)) for n, station in enumerate(listed)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{source}: station {twice!r} is there twice; give each its own name")
    kept, left_out = [], []
    for name, station in zip(names, listed, strict=True):
        placed = dict(station) | {"name": name}
        if name in known:
            file = known[name]
            placed |= {"lat": file.lat, "lon": file.lon, "alt": file.alt}
            placed |= {} if file.height_m is None else {"height_m": file.height_m}
        if placed.get("lat") is None or placed.get("lon") is None:
            left_out.append({"name": name, "reason": "it has no position"})
        else:
            kept.append({"alt": 0.0, **placed})
    if left_out and len(kept) < ENOUGH:
        nameless = ", ".join(entry["name"] for entry in left_out)
        raise ConfigError(
            f"{source}: {len(kept)} of {len(listed)} stations have a position, {nameless} none",
            code="missing",
            hint="give lat and lon in the document, or a line in {stations}",
        )
    if len(kept) < min_stations:
        raise ConfigError(f"{source}: {len(kept)} stations; at least {min_stations} must have heard the transmission")
    return {**one, "stations": kept}, left_out


# Measurements


@dataclass(frozen=True, slots=True)
class _Measured:
    timed: NDArray[np.bool_]
    arrival_us: F64
    arrival_sigma_us: F64
    strength_db: F64
    strength_sigma_db: F64
    absolute: bool


def _from_features(one: Mapping[str, Any], config: GenerateConfig, noise: NoiseModel, source: str) -> _Measured:
    """The short form: as the solver sees a dataset's sample, but for a sigma that is a plain number."""
    _, rows = parse_observations(one, config, source, min_stations=FEWEST)
    seen = observe(rows, config, noise)
    sigma = seen.arrival_sigma_m[0].numpy() / METRES_PER_US
    timed = seen.timed[0].numpy()
    given = [_plain_sigma(station) for station in one["stations"]]
    reference = int(rows["reference"][0])
    if any(value is not None and n != reference for n, value in enumerate(given)):
        sigma = _own_sigmas([sigma[n] if value is None else value for n, value in enumerate(given)], reference)
    return _Measured(
        timed, seen.arrival_m[0].numpy() / METRES_PER_US, sigma.clip(_LEAST_SIGMA_US),
        seen.strength_dbm[0].numpy(), seen.strength_db[0].numpy(), True,
    )  # fmt: skip


def _plain_sigma(station: Mapping[str, Any]) -> float | None:
    features = station.get("features", {})
    value = features.get("arrival_sigma_us", station.get("arrival_sigma_us"))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _own_sigmas(sigma: list[float], reference: int) -> F64:
    """Each station's own standard deviation from those of its difference to the reference.

    The reference is the strongest, as a rule: its own share of the variances is at most half of the smallest.
    """
    variance = np.square(sigma)
    others = np.delete(variance, reference)
    own = others.min() / 2
    variance = variance - own
    variance[reference] = own
    return np.asarray(np.sqrt(variance.clip(0)))


def _from_pairs(document: Observation, config: GenerateConfig, noise: NoiseModel) -> _Measured:
    stations = document.stations
    names = [station.name for station in stations]
    timed, arrival, sigma = arrivals_of_pairs(names, document.pairs)
    absolute = all(station.strength_absolute for station in stations)
    spread = math.hypot(config.shadowing_db, noise.strength_db, 0.0 if absolute else _UNCALIBRATED_DB)
    strength = np.array([station.strength_db for station in stations])
    return _Measured(timed, arrival, sigma, strength, np.full(len(names), spread), absolute)


def arrivals_of_pairs(names: list[str], pairs: tuple[PairMeasurement, ...]) -> tuple[NDArray[np.bool_], F64, F64]:
    """Which stations are timed, their arrivals on one clock and each one's own standard deviation, µs.

    Stations without a pair that leads to the others are not timed. Differences are adjusted by weighted least squares;
    where they contradict each other by more than their sigmas, the sigmas are raised to what they show.
    """
    index = {name: n for n, name in enumerate(names)}
    used = [pair for pair in pairs if pair.reference in index and pair.station in index and pair.sigma_us < 1e6]
    timed = _largest_group(len(names), [(index[pair.reference], index[pair.station]) for pair in used])
    used = [pair for pair in used if timed[index[pair.station]]]
    arrival, own = np.zeros(len(names)), np.full(len(names), 1.0)
    if not used:
        return timed, arrival, own
    first = np.array([index[pair.reference] for pair in used])
    second = np.array([index[pair.station] for pair in used])
    value = np.array([pair.difference_us for pair in used])
    sigma = np.array([max(_with_ambiguity(pair), _LEAST_SIGMA_US) for pair in used])
    matrix = np.zeros((len(used), len(names)))
    matrix[np.arange(len(used)), first], matrix[np.arange(len(used)), second] = -1.0, 1.0
    arrival = np.linalg.lstsq(matrix / sigma[:, None], value / sigma, rcond=None)[0]
    spare = len(used) - (int(timed.sum()) - 1)
    misfit = float((((matrix @ arrival - value) / sigma) ** 2).sum())
    widened = math.sqrt(max(1.0, misfit / spare)) if spare > 0 else 1.0
    return timed, arrival, _station_sigmas(len(names), first, second, sigma * widened)


def _with_ambiguity(pair: PairMeasurement) -> float:
    """The standard deviation with that of having taken the wrong peak."""
    jumps = [lag - pair.difference_us for lag in pair.alternatives_us]
    return math.hypot(pair.sigma_us, math.sqrt(pair.ambiguity) * max(map(abs, jumps), default=0.0))


def _largest_group(count: int, links: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """The largest set of stations that pairs connect; none without pairs."""
    group = np.arange(count)
    for _ in range(count):
        for a, b in links:
            group[group == max(group[a], group[b])] = min(group[a], group[b])
    sizes = np.bincount(group, minlength=count)
    best = int(sizes.argmax())
    return np.asarray((group == best) & (sizes[best] > 1))


def _station_sigmas(count: int, first: NDArray[np.int64], second: NDArray[np.int64], sigma: F64) -> F64:
    """Each station's own σ such that σ² of a pair is about the sum of two; where that leaves a choice, halves."""
    variance = sigma**2
    own = np.full(count, variance.min() / 2)
    for _ in range(100):
        for n in range(count):
            rows = (first == n) | (second == n)
            if rows.any():
                other = np.where(first == n, second, first)[rows]
                share = np.average(variance[rows] - own[other], weights=1 / variance[rows] ** 2)
                own[n] = max(float(share), 0.05 * float(variance[rows].min()))
    return np.asarray(np.sqrt(own))


# The sighting


def _received(config: GenerateConfig, power_dbm: float) -> Callable[[F64], F64]:
    total = power_dbm + config.tx_gain_dbi + config.rx_gain_dbi
    return lambda distance: total - path_loss_db(config, distance)


def _sighting(
    document: Observation,
    measured: _Measured,
    config: GenerateConfig,
    mhz: float | None,
    power_known: bool,
    loss: Callable[[F64], F64],
    number: int,
) -> Sighting:
    stations = document.stations
    lat, lon = np.array([s.lat for s in stations]), np.array([s.lon for s in stations])
    lon = lon[0] + (lon - lon[0] + 180) % 360 - 180  # a network across the 180th meridian stays together
    heights = [config.rx_antenna_m if s.height_m is None else s.height_m for s in stations]
    alt = np.array([s.alt for s in stations]) + heights
    along_ground, night = is_ground_wave(mhz), not _by_day(document.start, lat, lon)
    level = TX_HEIGHT_M + config.tx_antenna_m
    extent = float(geodesic_m(lat[:, None], lon[:, None], lat, lon).max())
    return Sighting(
        name=document.id or str(number),
        stations=tuple(station.name for station in stations),
        lat=lat,
        lon=lon,
        timed=measured.timed,
        arrival_us=measured.arrival_us,
        arrival_sigma_us=measured.arrival_sigma_us,
        heard=np.isfinite(measured.strength_db),
        strength_db=np.nan_to_num(measured.strength_db),
        strength_sigma_db=measured.strength_sigma_db,
        travel_us=lambda distance: travel_us(mhz, distance),
        travel_sigma_us=lambda distance: travel_sigma_us(mhz, distance, night=night),
        lengths=(lambda a, o: geodesic_m(a[:, None], o[:, None], lat, lon))
        if along_ground
        else straight_lengths(lat, lon, alt, level),
        power_dbm=loss,
        power_known=power_known,
        margin_m=max(_GROUND_MARGIN_M if along_ground else _MARGIN_M, extent),
    )


def _by_day(start: str | None, lat: F64, lon: F64) -> bool:
    """Whether the sun was up at all stations; an unknown time counts as night, when less is certain."""
    try:
        moment = datetime.fromisoformat(start or "")
    except ValueError:
        return False
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return bool((sun_elevation_deg(moment.timestamp(), lat, lon) > 0).all())


# What cannot be


def _possible(sighting: Sighting, source: str) -> tuple[Sighting, LeftOutNames]:
    """Without stations whose differences no place on Earth explains; an error if too few remain.

    The station in most such differences is at fault. Where two are in equally many, the posterior decides between
    them if there are enough others.
    """
    keep, left_out = np.ones(len(sighting.stations), bool), LeftOutNames()
    baseline = geodesic_m(sighting.lat[:, None], sighting.lon[:, None], sighting.lat, sighting.lon)
    sigma = np.hypot(sighting.arrival_sigma_us[:, None], sighting.arrival_sigma_us)
    limit = sighting.travel_us(baseline) + _BEYOND_SIGMAS * sigma + _BEYOND_US
    limit = limit + 2 * sighting.travel_sigma_us(baseline)
    late = sighting.arrival_us - sighting.arrival_us[:, None]
    while True:
        both = sighting.timed & keep
        beyond = (np.abs(late) > limit) & both[:, None] & both
        counts = np.sort(beyond.sum(1))[::-1]
        if not counts[0]:
            break
        worst = int(beyond.sum(1).argmax())
        other = int(np.where(beyond[worst], np.abs(late[worst]), -1.0).argmax())
        reason = _beyond(sighting, worst, other, float(late[other, worst]), float(baseline[other, worst]))
        tie = counts[1] == counts[0]
        if tie and both.sum() > ENOUGH:
            break
        keep[worst] = False
        if tie or keep.sum() < ENOUGH:
            raise ConfigError(f"{source}, station {sighting.stations[worst]!r}: {reason}", hint="check the clocks")
        left_out.append({"name": sighting.stations[worst], "reason": reason})
    return (sighting if keep.all() else _some(sighting, keep)), left_out


def _beyond(sighting: Sighting, station: int, other: int, late_us: float, baseline_m: float) -> str:
    return (
        f"its arrival differs by {_us(abs(late_us))} from that at {sighting.stations[other]}, but light takes "
        f"{_us(baseline_m / SPEED_OF_LIGHT * 1e6)} for the {baseline_m / 1e3:.3g} km between them"
    )


def _us(value: float) -> str:
    return f"{value / 1e3:.4g} ms" if value >= 1e4 else f"{value:.3g} µs"


def _some(sighting: Sighting, keep: NDArray[np.bool_]) -> Sighting:
    """The sighting of some of its stations."""
    lengths = sighting.lengths
    arrays = ("lat", "lon", "timed", "arrival_us", "arrival_sigma_us", "heard", "strength_db", "strength_sigma_db")
    names = tuple(name for name, kept in zip(sighting.stations, keep, strict=True) if kept)
    parts = {name: getattr(sighting, name)[keep] for name in arrays}
    return replace(sighting, stations=names, lengths=lambda lat, lon: lengths(lat, lon)[:, keep], **parts)


def check_sky_wave(prepared: PreparedPairs, lat: float, lon: float) -> None:
    """Refuse arrivals over paths that only the ionosphere explains."""
    seen, reach = prepared.sighting, ground_range_m(prepared.frequency_mhz)
    if not math.isfinite(reach) or not seen.timed.any():
        return
    distance = geodesic_m(np.array(lat), np.array(lon), seen.lat, seen.lon)
    far = np.where(seen.timed, distance, 0.0)
    worst = int(far.argmax())
    if far[worst] > reach:
        raise ConfigError(
            f"{prepared.frequency_mhz:g} MHz over {far[worst] / 1e3:.0f} km to {seen.stations[worst]} is a sky wave, "
            f"whose delay is not modelled; the ground wave reaches about {reach / 1e3:.0f} km",
            code="sky_wave",
            hint="use stations closer to the transmitter, or observations without arrival differences",
        )

"""The observations document: what stations heard of one transmission, as written by measuring and read by locating.

It is one observation in the form that locating has always read (`id`, `reference`, `stations` with `lat`, `lon`,
`alt` and `features`), with more keys beside it. Readers ignore keys they do not know. Nothing here imports torch.

    {"id": …, "reference": "A", "frequency_hz": …, "bandwidth_hz": …, "start": "2026-01-31T12:00:00Z", "seconds": 30.0,
     "stations": [{"name", "lat", "lon", "alt", "height_m"?, "strength_db", "strength_absolute", "snr_db", "noise_db",
                   "time": {"model", "rate_hz"?, …}, "problems": […], "features": {…}}],
     "pairs": [{"reference", "station", "difference_us", "sigma_us", "kind", "peak", "ambiguity", …}],
     "left_out": [{"name", "reason"}]}

Signs: a difference is the arrival at `station` minus the arrival at `reference`, cable delays and clocks taken off.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from brim.errors import ConfigError

TimeModel = Literal["gnss", "beacon", "sample", "none"]
PairKind = Literal["complex", "envelope", "frequency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StationTime:
    """How the clock of a recording was tied to the others."""

    model: TimeModel  # sample: one common start and the nominal rate, as simulated recordings have
    rate_hz: float | None = None  # fitted sample rate
    start: str | None = None  # UTC of the first sample, fitted
    residual_us: float | None = None  # rms of the stamps around the fitted line
    sigma_us: float = 0.0  # what the clock adds to an arrival's standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class StationMeasurement:
    """What one station heard."""

    name: str
    lat: float  # degrees
    lon: float
    alt: float  # m, ground above the ellipsoid
    height_m: float | None = None  # of the antenna above ground
    strength_db: float  # dBm at the antenna if absolute, else dB relative to the other stations of the document
    strength_absolute: bool = False
    snr_db: float  # in the bandwidth of the transmission
    noise_db: float  # noise in that bandwidth, in the unit of strength_db
    time: StationTime = field(default_factory=lambda: StationTime(model="none"))
    problems: tuple[str, ...] = ()
    features: dict[str, Any] = field(default_factory=dict)  # a dataset's features: mean, std, min, max by name


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasurement:
    """How much later a transmission arrived at one station than at another."""

    reference: str
    station: str
    difference_us: float
    sigma_us: float  # standard deviation, clocks included
    kind: PairKind
    peak: float  # correlation coefficient at the peak, 0 to 1
    ambiguity: float  # probability that another peak is the true one, 0 to 1
    alternatives_us: tuple[float, ...] = ()  # other peaks worth a look, highest first
    chunks: int = 1  # pieces of the recording that were measured one by one
    spread_us: float | None = None  # robust standard deviation between them
    curve: dict[str, Any] | None = None  # {"start_us", "step_us", "values"}: the correlation around the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A station or recording that was not used."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One transmission as heard by several stations.

    `pairs` holds every pair of stations whose clocks can be compared; pairs that share a station share its error.
    `features` of a station holds `arrival_difference_us` against `reference` and its sigma, from all pairs together.
    """

    id: str = ""
    reference: str | None = None
    frequency_hz: float | None = None
    bandwidth_hz: float | None = None
    start: str | None = None  # UTC
    seconds: float | None = None
    stations: tuple[StationMeasurement, ...] = ()
    pairs: tuple[PairMeasurement, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values; keys without a value are left out."""
        value: dict[str, Any] = _without_none(asdict(self))
        return value

    @classmethod
    def from_dict(cls, value: Any, source: str = "observations") -> "Observation":
        """Read a document; keys of today's short form fill what is missing (strength, pairs)."""
        if not isinstance(value, Mapping) or not isinstance(value.get("stations"), list):
            raise ConfigError(f"{source}: no list of stations; expected an object as measuring writes it")
        stations = tuple(_station(one, n, source) for n, one in enumerate(value["stations"]))
        reference = value.get("reference")
        pairs = value.get("pairs")
        return cls(
            id=str(value.get("id", "")),
            reference=None if reference is None else str(reference),
            frequency_hz=_optional(value, "frequency_hz", source),
            bandwidth_hz=_optional(value, "bandwidth_hz", source),
            start=None if value.get("start") is None else str(value["start"]),
            seconds=_optional(value, "seconds", source),
            stations=stations,
            pairs=tuple(_pair(one, source) for one in pairs)
            if isinstance(pairs, list)
            else _pairs_of_features(stations, reference),
            left_out=tuple(
                LeftOut(name=str(one.get("name", "")), reason=str(one.get("reason", "")))
                for one in value.get("left_out") or ()
                if isinstance(one, Mapping)
            ),
        )


_NUMBER = {"type": "number"}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Observation",
    "type": "object",
    "required": ["stations"],
    "properties": {
        "id": {"type": "string"},
        "reference": {"type": "string"},
        "frequency_hz": _NUMBER,
        "bandwidth_hz": _NUMBER,
        "start": {"type": "string", "format": "date-time"},
        "seconds": _NUMBER,
        "stations": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["lat", "lon", "alt"],
                "properties": {
                    "name": {"type": "string"},
                    "lat": {"type": "number", "minimum": -90, "maximum": 90},
                    "lon": {"type": "number", "minimum": -180, "maximum": 180},
                    "alt": {"type": "number", "minimum": -500, "maximum": 9000},
                    "height_m": _NUMBER,
                    "strength_db": _NUMBER,
                    "strength_absolute": {"type": "boolean"},
                    "snr_db": _NUMBER,
                    "noise_db": _NUMBER,
                    "time": {
                        "type": "object",
                        "required": ["model"],
                        "properties": {
                            "model": {"enum": list(get_args(TimeModel))},
                            "rate_hz": _NUMBER,
                            "start": {"type": "string", "format": "date-time"},
                            "residual_us": _NUMBER,
                            "sigma_us": _NUMBER,
                        },
                    },
                    "problems": {"type": "array", "items": {"type": "string"}},
                    "features": {"type": "object"},
                },
            },
        },
        "pairs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["reference", "station", "difference_us", "sigma_us"],
                "properties": {
                    "reference": {"type": "string"},
                    "station": {"type": "string"},
                    "difference_us": _NUMBER,
                    "sigma_us": {"type": "number", "minimum": 0},
                    "kind": {"enum": list(get_args(PairKind))},
                    "peak": {"type": "number", "minimum": 0, "maximum": 1},
                    "ambiguity": {"type": "number", "minimum": 0, "maximum": 1},
                    "alternatives_us": {"type": "array", "items": _NUMBER},
                    "chunks": {"type": "integer", "minimum": 1},
                    "spread_us": _NUMBER,
                    "curve": {"type": "object"},
                },
            },
        },
        "left_out": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "reason"],
                "properties": {"name": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
    },
}
STATION_KEYS = frozenset(SCHEMA["properties"]["stations"]["items"]["properties"])  # all others are features


def _station(one: Any, number: int, source: str) -> StationMeasurement:
    if not isinstance(one, Mapping):
        raise ConfigError(f"{source}: station {number} is no object; each needs lat, lon, alt and what it measured")
    name = str(one.get("name", number))
    where = f"{source}, station {name!r}"
    features = one.get("features", {})
    if not isinstance(features, Mapping):
        raise ConfigError(f"{where}: features must be an object of values by name")
    features = {key: value for key, value in one.items() if key not in STATION_KEYS} | dict(features)
    noise = _first(one.get("noise_db"), _mean(features.get("noise_floor_dbm")), 0.0)
    snr = _first(one.get("snr_db"), _mean(features.get("snr_db")), math.nan)
    strength = _first(one.get("strength_db"), _mean(features.get("rssi_dbm")), snr + noise)
    time = one.get("time")
    return StationMeasurement(
        name=name,
        lat=_number(one.get("lat"), f"{where}: lat"),
        lon=_number(one.get("lon"), f"{where}: lon"),
        alt=_number(one.get("alt"), f"{where}: alt"),
        height_m=_optional(one, "height_m", where),
        strength_db=strength,
        strength_absolute=bool(one.get("strength_absolute", "strength_db" not in one)),
        snr_db=snr,
        noise_db=noise,
        time=_time(time, where) if isinstance(time, Mapping) else StationTime(model="none"),
        problems=tuple(str(problem) for problem in one.get("problems") or ()),
        features=dict(features),
    )


def _time(value: Mapping[str, Any], source: str) -> StationTime:
    model = value.get("model", "none")
    if model not in get_args(TimeModel):
        raise ConfigError(f"{source}: time model {model!r} is unknown; expected {', '.join(get_args(TimeModel))}")
    return StationTime(
        model=model,
        rate_hz=_optional(value, "rate_hz", source),
        start=None if value.get("start") is None else str(value["start"]),
        residual_us=_optional(value, "residual_us", source),
        sigma_us=_optional(value, "sigma_us", source) or 0.0,
    )


def _pair(one: Any, source: str) -> PairMeasurement:
    if not isinstance(one, Mapping) or "reference" not in one or "station" not in one:
        raise ConfigError(f"{source}: a pair needs reference, station, difference_us and sigma_us")
    where = f"{source}, pair {one['reference']}–{one['station']}"
    kind = one.get("kind", "complex")
    if kind not in get_args(PairKind):
        raise ConfigError(f"{where}: kind {kind!r} is unknown; expected {', '.join(get_args(PairKind))}")
    others = one.get("alternatives_us") or ()
    return PairMeasurement(
        reference=str(one["reference"]),
        station=str(one["station"]),
        difference_us=_number(one.get("difference_us"), f"{where}: difference_us"),
        sigma_us=_number(one.get("sigma_us"), f"{where}: sigma_us"),
        kind=kind,
        peak=_number(one.get("peak", 1.0), f"{where}: peak"),
        ambiguity=_number(one.get("ambiguity", 0.0), f"{where}: ambiguity"),
        alternatives_us=tuple(_number(lag, f"{where}: alternatives_us") for lag in others),
        chunks=int(_number(one.get("chunks", 1), f"{where}: chunks")),
        spread_us=_optional(one, "spread_us", where),
        curve=dict(one["curve"]) if isinstance(one.get("curve"), Mapping) else None,
    )


def _pairs_of_features(stations: tuple[StationMeasurement, ...], reference: Any) -> tuple[PairMeasurement, ...]:
    """Pairs of the short form, whose stations give their difference to the reference as features."""
    timed = {one.name: _mean(one.features.get("arrival_difference_us")) for one in stations}
    zero = [name for name, value in timed.items() if value == 0]
    first = str(reference) if reference is not None else (zero[0] if zero else None)
    if first is None:
        return ()
    out = []
    for one in stations:
        value, sigma = timed[one.name], _mean(one.features.get("arrival_sigma_us"))
        if one.name != first and value is not None and (sigma is None or sigma < 1e6):
            pair = {"reference": first, "station": one.name, "difference_us": value, "sigma_us": _first(sigma, 1.0)}
            out.append(_pair(pair, "observations"))
    return tuple(out)


def _mean(value: Any) -> float | None:
    value = value.get("mean") if isinstance(value, Mapping) else value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _first(*values: Any) -> float:
    return next((float(value) for value in values if isinstance(value, int | float)), math.nan)


def _optional(value: Mapping[str, Any], key: str, source: str) -> float | None:
    return None if value.get(key) is None else _number(value[key], f"{source}: {key}")


def _number(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{source} is {value!r}; expected a finite number")
    return float(value)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_none(one) for one in value]
    return value

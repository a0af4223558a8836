"""What to generate: one frozen configuration, its presets and the built-in network of receivers."""

import csv
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from brim.errors import ConfigError
from brim.rf.physics.philox import PATH_STRIDE

Waveform = Literal["nbfm", "am", "cw", "fsk"]
Loss = Literal["free_space", "log_distance", "hata"]
Fading = Literal["rayleigh", "rician", "none"]
Environment = Literal["city", "residential", "rural"]
DatasetType = Literal["feature_based", "iq_raw"]

CHANNEL_HZ = 12_500.0  # every SNR and every power in the channel refers to this bandwidth
SAMPLE_RATE_HZ = 200_000  # of the IQ records; the noise fills this band
NUM_CHUNKS = 5  # features are measured per chunk, a fifth of the record each
RANDOM_RECEIVERS = (5, 10)  # fewest and most receivers of a sample with random receivers
RANDOM_AREA = ((44.0, 46.0), (7.0, 10.0))  # latitude and longitude range of random receivers, degrees
MAX_EXTENT_KM = 2_000.0  # widest network; the delay tables grow with it


@dataclass(frozen=True, slots=True)
class Station:
    """A receiver site; alt is the height of the ground above the WGS-84 ellipsoid, metres."""

    name: str
    lat: float
    lon: float
    alt: float


BUILTIN_STATIONS = (
    Station("Aquila di Giaveno", 45.030, 7.270, 600.0),
    Station("Montanaro", 45.234, 7.857, 300.0),
    Station("Torino", 45.044, 7.672, 250.0),
    Station("Coazze", 45.048, 7.238, 700.0),
    Station("Passo del Giovi", 44.561, 8.956, 480.0),
    Station("Genova", 44.395, 8.956, 100.0),
    Station("Milano-Baggio", 45.478, 9.123, 120.0),
)

# Closed intervals a number must lie in, with the next step for someone who left it.
_RANGES: dict[str, tuple[float, float, str]] = {
    "frequency_mhz": (30.0, 3000.0, "VHF and UHF carriers, in MHz"),
    "tx_power_dbm": (0.0, 50.0, "1 mW to 100 W"),
    "min_snr_db": (-20.0, 60.0, "in the 12.5 kHz channel; 5 is usual"),
    "max_gdop": (1.0, 1e6, "20 is strict, 100 is lenient"),
    "inside_ratio": (0.0, 1.0, "the share of transmitters inside the receivers' bounding box"),
    "tx_antenna_m": (0.0, 200.0, "metres above ground"),
    "rx_antenna_m": (0.0, 200.0, "metres above ground"),
    "tx_gain_dbi": (-30.0, 30.0, "antenna gain in dBi"),
    "rx_gain_dbi": (-30.0, 30.0, "antenna gain in dBi"),
    "loss_exponent": (1.5, 6.0, "slope of log_distance beyond 1 km; free space is 2"),
    "shadowing_db": (0.0, 20.0, "standard deviation in dB; 6 is usual"),
    "noise_figure_db": (0.0, 30.0, "of the receiver, dB"),
    "rician_k_db": (-20.0, 40.0, "direct over scattered power, dB"),
    "max_frequency_offset_hz": (0.0, 500.0, "oscillator offset is uniform within ± this"),
    "clock_sigma_s": (0.0, 1e-3, "seconds; 1e-6 is a GPS-disciplined clock"),
    "duration_s": (0.2, 10.0, "seconds; 1.0 is usual"),
    "seed": (0, 2**63 - 1, "any whole number that is not negative"),
    "samples_per_shard": (1, 1_000_000, "omit it for the default"),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "waveform": get_args(Waveform),
    "loss": get_args(Loss),
    "fading": get_args(Fading),
    "environment": get_args(Environment),
    "dataset_type": get_args(DatasetType),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Everything that decides what a sample looks like; sample i depends on this and on i alone."""

    frequency_mhz: float = 145.0  # carrier
    tx_power_dbm: float = 40.0
    min_snr_db: float = 5.0  # a receiver is present when its link SNR in 12.5 kHz reaches this
    max_gdop: float = 50.0
    min_receivers: int = 3  # two differences of arrival place a transmitter in the plane: three receivers
    use_random_receivers: bool = False  # 5-10 random receivers per sample instead of the stations
    inside_ratio: float = 0.7  # share of transmitters inside the receivers' bounding box
    seed: int = 0
    dataset_type: DatasetType = "feature_based"
    stations: tuple[Station, ...] = BUILTIN_STATIONS

    tx_antenna_m: float = 2.0  # above ground: a hand-held or a car
    rx_antenna_m: float = 30.0  # above ground: a mast
    tx_gain_dbi: float = 0.0
    rx_gain_dbi: float = 0.0
    loss: Loss = "log_distance"
    loss_exponent: float = 3.0  # of log_distance beyond 1 km
    shadowing_db: float = 6.0  # log-normal, per link
    environment: Environment = "residential"  # man-made noise (ITU-R P.372) and Hata's area type
    noise_figure_db: float = 6.0

    waveform: Waveform = "nbfm"
    fading: Fading = "rayleigh"
    rician_k_db: float = 6.0  # direct path only
    max_frequency_offset_hz: float = 50.0  # oscillators, uniform within ± this
    clock_sigma_s: float = 1e-6  # station clock error, drawn anew per sample and receiver
    duration_s: float = 1.0  # of a record at 200 kHz
    samples_per_shard: int = 0  # 0: 512 for features, 8 for iq_raw; fixed by the config, never by the batch size

    def __post_init__(self) -> None:
        _check_types(self)
        object.__setattr__(self, "stations", tuple(self.stations))  # a list would do harm: the config is hashable
        for name, (low, high, hint) in _RANGES.items():
            value = getattr(self, name)
            if name == "samples_per_shard" and value == 0:
                continue
            if not low <= value <= high:  # NaN fails this too
                raise ConfigError(f"{name}={value} must be between {low:g} and {high:g}: {hint}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
        self._check_receivers()
        if abs(self.duration_s * 5 - round(self.duration_s * 5)) > 1e-9:
            raise ConfigError(f"duration_s={self.duration_s} must be a multiple of 0.2 s; 1.0 is usual")

    def _check_receivers(self) -> None:
        if self.min_receivers < 3:
            raise ConfigError(
                f"min_receivers={self.min_receivers} must be at least 3: "
                "fewer cannot place a transmitter in the plane by arrival differences"
            )
        if self.min_receivers > self.max_receivers:
            where = "random receivers" if self.use_random_receivers else "stations"
            raise ConfigError(
                f"min_receivers={self.min_receivers} but a sample has at most {self.max_receivers} {where}; "
                "lower min_receivers or add stations"
            )
        if not self.use_random_receivers:
            check_stations(self.stations, "stations")

    @property
    def max_receivers(self) -> int:
        """R, the receiver axis of a dataset: 10 with random receivers, else the number of stations."""
        return RANDOM_RECEIVERS[1] if self.use_random_receivers else len(self.stations)

    @property
    def num_samples_iq(self) -> int:
        """N, complex samples per IQ record."""
        return round(self.duration_s * SAMPLE_RATE_HZ)

    @property
    def shard_items(self) -> int:
        """Samples per shard."""
        return self.samples_per_shard or (8 if self.dataset_type == "iq_raw" else 512)

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as JSON-able values; `from_mapping` reads it back."""
        out = asdict(self)
        out["stations"] = [asdict(s) for s in self.stations]
        return out


PRESETS: dict[str, dict[str, Any]] = {
    "production": {
        "use_random_receivers": True,
        "tx_power_dbm": 50.0,
        "min_snr_db": 5.0,
        "max_gdop": 100.0,
        "min_receivers": 3,
    },
    "quality": {
        "use_random_receivers": True,
        "tx_power_dbm": 40.0,
        "min_snr_db": 10.0,
        "max_gdop": 20.0,
        "min_receivers": 4,
    },
}


def from_mapping(values: Mapping[str, Any], *, preset: str | None = None, source: str = "config") -> GenerateConfig:
    """A configuration from plain values (TOML, JSON, options) over a preset; unknown names are refused.

    The preset is the argument's or that of the values' own `preset` key.
    """
    values = dict(values)
    own = values.pop("preset", None)
    if own is not None and preset not in (None, own):
        raise ConfigError(f"{source}: preset={own!r} differs from the preset {preset!r} asked for; keep one of them")
    known = [f.name for f in fields(GenerateConfig)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown field {name!r}; {hint}")
    chosen = preset if own is None else own
    merged = {**(preset_values(chosen) if chosen is not None else {}), **values}
    if "stations" in merged:
        merged["stations"] = _stations_from(merged["stations"], source)
    return GenerateConfig(**merged)


def preset_values(name: str) -> dict[str, Any]:
    """The fields a preset sets."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset(name: str, **changes: Any) -> GenerateConfig:
    """The named preset as a configuration, with changes."""
    return replace(GenerateConfig(**preset_values(name)), **changes)


def read_toml(path: Path) -> dict[str, Any]:
    """The fields of a TOML configuration file, for `from_mapping`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {_reason(error)}; give the path of a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}") from error


def read_stations(path: Path) -> tuple[Station, ...]:
    """Stations from a CSV file with the header name,lat,lon,alt."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
            header = list(rows[0]) if rows else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"stations file {path}: {_reason(error)}; expected CSV with name,lat,lon,alt") from error
    if not rows:
        raise ConfigError(f"stations file {path}: no stations; expected the header name,lat,lon,alt and a line each")
    missing = [c for c in ("name", "lat", "lon", "alt") if c not in header]
    if missing:
        raise ConfigError(
            f"stations file {path}: missing column {', '.join(missing)}; the header must be name,lat,lon,alt"
        )
    stations = tuple(_station(row, f"stations file {path}, line {i + 2}") for i, row in enumerate(rows))
    check_stations(stations, f"stations file {path}")
    return stations


def check_stations(stations: tuple[Station, ...], source: str) -> None:
    """Refuse duplicates, impossible coordinates and networks wider than the delay tables."""
    if len(stations) > PATH_STRIDE:
        raise ConfigError(f"{source}: {len(stations)} stations; at most {PATH_STRIDE} can hear one transmission")
    names: set[str] = set()
    places: dict[tuple[float, float], str] = {}
    for s in stations:
        if not -90 <= s.lat <= 90:
            raise ConfigError(f"{source}: station {s.name!r} has lat={s.lat}; expected −90 to 90 degrees")
        if not -180 <= s.lon <= 180:
            raise ConfigError(f"{source}: station {s.name!r} has lon={s.lon}; expected −180 to 180 degrees")
        if not -500 <= s.alt <= 9000:
            raise ConfigError(f"{source}: station {s.name!r} has alt={s.alt}; expected −500 to 9000 metres")
        if not s.name or s.name in names:
            raise ConfigError(f"{source}: station name {s.name!r} is empty or used twice; give each its own")
        if (s.lat, s.lon) in places:
            other = places[s.lat, s.lon]
            raise ConfigError(f"{source}: stations {other!r} and {s.name!r} stand at the same place; keep one")
        names.add(s.name)
        places[s.lat, s.lon] = s.name
    if stations:
        _check_extent(stations, source)


def _check_extent(stations: tuple[Station, ...], source: str) -> None:
    lats, lons = [s.lat for s in stations], [s.lon for s in stations]
    if max(abs(x) for x in lats) > 85:
        raise ConfigError(f"{source}: a station beyond 85 degrees of latitude; the outside margin would cross a pole")
    height_km = (max(lats) - min(lats)) * 111.2
    width_km = (max(lons) - min(lons)) * 111.3 * math.cos(math.radians(min(abs(x) for x in lats)))
    if math.hypot(height_km, width_km) > MAX_EXTENT_KM:
        raise ConfigError(
            f"{source}: the stations span {math.hypot(height_km, width_km):.0f} km; "
            f"at most {MAX_EXTENT_KM:.0f} km can hear one transmission: split the network "
            "(networks across the 180th meridian are not supported)"
        )


def _check_types(config: GenerateConfig) -> None:
    for field in fields(GenerateConfig):
        value = getattr(config, field.name)
        if field.type in (float, "float"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{field.name}={value!r} must be a number")
            object.__setattr__(config, field.name, float(value))
        elif field.type in (int, "int") and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{field.name}={value!r} must be a whole number")
        elif field.type in (bool, "bool") and not isinstance(value, bool):
            raise ConfigError(f"{field.name}={value!r} must be true or false")


def _stations_from(value: Any, source: str) -> tuple[Station, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{source}: stations must be a list of {{name, lat, lon, alt}}")
    return tuple(s if isinstance(s, Station) else _station(s, f"{source}: stations") for s in value)


def _station(row: Any, source: str) -> Station:
    if not isinstance(row, Mapping) or not {"name", "lat", "lon", "alt"} <= set(row):
        raise ConfigError(f"{source}: a station needs name, lat, lon and alt, got {row!r}")
    numbers = []
    for column in ("lat", "lon", "alt"):
        try:
            numbers.append(float(row[column]))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{source}: {column}={row[column]!r} is not a number") from error
        if not math.isfinite(numbers[-1]):
            raise ConfigError(f"{source}: {column}={row[column]!r} is not finite")
    return Station(str(row["name"]).strip(), *numbers)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

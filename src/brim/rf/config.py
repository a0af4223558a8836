"""Settings of the radio workload: what to generate, the receiver stations, the presets, and how a locator is trained.

Nothing here imports torch or NumPy.
"""

import csv
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from brim.config import Doc, Length, Range, Unit, check, nearest, read
from brim.engine.config import (
    CheckpointEveryS,
    EarlyStoppingPatience,
    Epochs,
    LearningRate,
    PrecisionChoice,
    PreloadToGpu,
    TierChoice,
)
from brim.errors import ConfigError

Waveform = Literal["nbfm", "am", "cw", "fsk"]
PathLoss = Literal["free_space", "log_distance", "hata"]
AreaType = Literal["city", "residential", "rural"]
DatasetType = Literal["feature_based", "iq_raw"]

CHANNEL_HZ = 12_500.0  # every SNR and every power in the channel refers to this bandwidth
SAMPLE_RATE_HZ = 200_000  # of the IQ records; the noise fills this band
NUM_CHUNKS = 5  # features are measured per chunk, a fifth of the record each
RANDOM_RECEIVERS = (5, 10)  # fewest and most receivers of a sample with random receivers
RANDOM_AREA = ((44.0, 46.0), (7.0, 10.0))  # latitude and longitude range of random receivers, degrees
MAX_EXTENT_KM = 2_000.0  # widest network; the delay tables grow with it
PATH_STRIDE = 4_096  # random numbers of path p of a receiver are those of receiver + p · this: the most stations


@dataclass(frozen=True, slots=True)
class Station:
    """A receiver site."""

    name: Annotated[str, Length(1, 200), Doc("Name of the station, unique in its network.")]
    lat: Annotated[float, Range(-90, 90), Unit("°"), Doc("Latitude.")]
    lon: Annotated[float, Range(-180, 180), Unit("°"), Doc("Longitude.")]
    alt: Annotated[float, Range(-500, 9000), Unit("m"), Doc("Height of the ground above the WGS-84 ellipsoid.")]

    def __post_init__(self) -> None:
        check(self)


BUILTIN_STATIONS = (
    Station("Aquila di Giaveno", 45.030, 7.270, 600.0),
    Station("Montanaro", 45.234, 7.857, 300.0),
    Station("Torino", 45.044, 7.672, 250.0),
    Station("Coazze", 45.048, 7.238, 700.0),
    Station("Passo del Giovi", 44.561, 8.956, 480.0),
    Station("Genova", 44.395, 8.956, 100.0),
    Station("Milano-Baggio", 45.478, 9.123, 120.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Everything that decides what a sample looks like; sample i depends on this and on i alone."""

    frequency_mhz: Annotated[
        float, Range(30, 3000, note="VHF and UHF carriers"), Unit("MHz"), Doc("Carrier frequency.")
    ] = 145.0
    tx_power_dbm: Annotated[
        float, Range(0, 50, note="1 mW to 100 W"), Unit("dBm"), Doc("Transmitter power; 30 is 1 W, 40 is 10 W.")
    ] = 40.0
    min_snr_db: Annotated[
        float,
        Range(-20, 60, note="in the 12.5 kHz channel; 5 is usual"),
        Unit("dB"),
        Doc("A receiver hears a transmission from this SNR in the 12.5 kHz channel on."),
    ] = 5.0
    max_gdop: Annotated[
        float,
        Range(1, 1e6, note="20 is strict, 100 is lenient"),
        Doc("Samples with a larger geometric dilution of precision are rejected; 20 is strict, 100 is lenient."),
    ] = 50.0
    min_receivers: Annotated[
        int,
        Range(3, PATH_STRIDE, note="fewer cannot place a transmitter in the plane by arrival differences"),
        Doc("Samples that fewer receivers hear are rejected; 3 can place a transmitter in the plane."),
    ] = 3
    use_random_receivers: Annotated[
        bool, Doc("Draw 5 to 10 random receivers for each sample instead of using the stations.")
    ] = False
    inside_ratio: Annotated[
        float,
        Range(0, 1, note="a share of the transmitters"),
        Doc("Share of transmitters inside the receivers' bounding box."),
    ] = 0.7
    seed: Annotated[
        int, Range(0, 2**63 - 1), Doc("Random seed; a sample depends on the configuration and its index alone.")
    ] = 0
    dataset_type: Annotated[
        DatasetType, Doc("feature_based stores each receiver's features; iq_raw their IQ records too, far larger.")
    ] = "feature_based"
    stations: Annotated[tuple[Station, ...], Length(0, PATH_STRIDE), Doc("The receivers.")] = BUILTIN_STATIONS

    tx_antenna_m: Annotated[
        float,
        Range(0, 200),
        Unit("m"),
        Doc("Height of the transmitter's antenna above ground; 2 is a hand-held or a car."),
    ] = 2.0
    rx_antenna_m: Annotated[
        float, Range(0, 200), Unit("m"), Doc("Height of the receivers' antennas above ground; 30 is a mast.")
    ] = 30.0
    tx_gain_dbi: Annotated[float, Range(-30, 30), Unit("dBi"), Doc("Gain of the transmitter's antenna.")] = 0.0
    rx_gain_dbi: Annotated[float, Range(-30, 30), Unit("dBi"), Doc("Gain of the receivers' antennas.")] = 0.0
    loss: Annotated[PathLoss, Doc("Path loss model: how power falls with distance.")] = "log_distance"
    loss_exponent: Annotated[
        float,
        Range(1.5, 6, note="free space is 2"),
        Doc("Slope of the log_distance model beyond 1 km; free space is 2."),
    ] = 3.0
    shadowing_db: Annotated[
        float,
        Range(0, 20, note="6 is usual"),
        Unit("dB"),
        Doc("Standard deviation of the log-normal shadowing of each link."),
    ] = 6.0
    environment: Annotated[AreaType, Doc("Man-made noise (ITU-R P.372), and the area type of the hata model.")] = (
        "residential"
    )
    noise_figure_db: Annotated[float, Range(0, 30), Unit("dB"), Doc("Noise figure of the receivers.")] = 6.0

    waveform: Annotated[Waveform, Doc("What is transmitted.")] = "nbfm"
    fading: Annotated[
        Literal["rayleigh", "rician", "none"],
        Doc("Fading of each link: rician with a direct path, rayleigh without one, or none."),
    ] = "rayleigh"
    rician_k_db: Annotated[float, Range(-20, 40), Unit("dB"), Doc("Direct over scattered power of rician fading.")] = (
        6.0
    )
    max_frequency_offset_hz: Annotated[
        float, Range(0, 500), Unit("Hz"), Doc("Oscillator offsets are uniform within ± this.")
    ] = 50.0
    clock_sigma_s: Annotated[
        float,
        Range(0, 1e-3, note="1e-6 is a GPS-disciplined clock"),
        Unit("s"),
        Doc("Standard deviation of a station's clock, drawn for each sample; 1e-6 is disciplined by GPS."),
    ] = 1e-6
    duration_s: Annotated[
        float, Range(0.2, 10, step=0.2, note="1.0 is usual"), Unit("s"), Doc("Length of a record at 200 kHz.")
    ] = 1.0
    # Fixed by the configuration, never by the batch size, so that shards do not depend on the device
    samples_per_shard: Annotated[
        int, Range(1, 1_000_000, also=0), Doc("Samples in a file; 0: 512, or 8 with IQ records.")
    ] = 0

    def __post_init__(self) -> None:
        check(self)
        if self.min_receivers > self.max_receivers:
            kind = "random receivers" if self.use_random_receivers else "stations"
            raise ConfigError(
                f"is more than the {self.max_receivers} {kind} of a sample",
                field="min_receivers",
                value=self.min_receivers,
                code="conflict",
                hint="lower {min_receivers} or add {stations}",
            )
        if not self.use_random_receivers:
            check_network(self.stations)

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
        return asdict(self) | {"stations": [asdict(station) for station in self.stations]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatorTraining:
    """How a locator is trained."""

    epochs: Epochs = 30
    batch_size: Annotated[int, Range(1), Doc("Samples in a step.")] = 256
    learning_rate: LearningRate = 0.001
    tier: TierChoice = "auto"
    preload_to_gpu: PreloadToGpu = None
    precision: PrecisionChoice = "auto"
    seed: Annotated[
        int, Range(0, 2**63 - 1), Doc("Random seed of the split, the initial weights, the order and the dropout.")
    ] = 0
    val_share: Annotated[
        float, Range(above=0, below=1, note="0.1 is usual"), Doc("Share of the samples held out for validation.")
    ] = 0.1
    hybrid: Annotated[bool, Doc("Start from the solver's answer; false: the network alone.")] = True
    early_stopping_patience: EarlyStoppingPatience = None
    checkpoint_every_s: CheckpointEveryS = 10.0
    num_workers: Annotated[
        int, Range(0), Doc("Accepted for compatibility with data loaders; no worker processes are needed.")
    ] = 0

    def __post_init__(self) -> None:
        check(self)


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


def from_mapping(values: Mapping[str, Any], *, preset: str | None = None, path: str = "") -> GenerateConfig:
    """A configuration from plain values (TOML, JSON, options) over a preset; unknown names are rejected.

    The preset is the argument or the value of the `preset` key. A field in an error begins with path.
    """
    values = dict(values)
    own = values.pop("preset", None)
    if own is not None and preset not in (None, own):
        raise ConfigError(f"differs from the preset {preset}", field="preset", value=own, code="conflict")
    chosen = preset if own is None else own
    return read(GenerateConfig, {**(preset_values(chosen) if chosen is not None else {}), **values}, path)


def preset_values(name: str) -> dict[str, Any]:
    """The fields a preset sets."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"is unknown; {nearest(name, PRESETS)}", field="preset", value=name, code="unknown_choice")
    return PRESETS[name]


def preset(name: str, **changes: Any) -> GenerateConfig:
    """The named preset as a configuration, with changes."""
    return replace(GenerateConfig(**preset_values(name)), **changes)


def read_toml(path: Path) -> dict[str, Any]:
    """The fields of a TOML configuration file, for `from_mapping`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {_reason(error)}", code="unreadable") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}", code="unreadable") from error


def read_stations(path: Path) -> tuple[Station, ...]:
    """Stations from a CSV file with the header name,lat,lon,alt."""
    hint = "the file is CSV with the header name,lat,lon,alt and a line for each station"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"stations file {path}: {_reason(error)}", code="unreadable", hint=hint) from error
    if not rows:
        raise ConfigError(f"stations file {path}: no stations", code="missing", hint=hint)
    missing = [column for column in ("name", "lat", "lon", "alt") if column not in rows[0]]
    if missing:
        raise ConfigError(f"stations file {path}: missing column {', '.join(missing)}", code="missing", hint=hint)
    stations = tuple(_station(row, f"stations file {path}, line {number}") for number, row in enumerate(rows, 2))
    try:
        check_network(stations)
    except ConfigError as failure:
        raise ConfigError(f"stations file {path}: {failure}", code=failure.code) from failure
    return stations


def _station(row: Mapping[str, str], source: str) -> Station:
    try:
        numbers = {column: float(row[column]) for column in ("lat", "lon", "alt")}
        return Station(row["name"].strip(), **numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: lat, lon and alt must be numbers, got {row!r}", code="wrong_type") from error
    except ConfigError as failure:
        raise ConfigError(f"{source}: {failure}", code=failure.code) from failure


def check_network(stations: tuple[Station, ...]) -> None:
    """Reject duplicates and networks wider than the delay tables."""
    names: set[str] = set()
    positions: dict[tuple[float, float], str] = {}
    for station in stations:
        if station.name in names:
            raise _network_error(f"station name {station.name!r} is used twice")
        other = positions.setdefault((station.lat, station.lon), station.name)
        if other != station.name:
            raise _network_error(f"stations {other!r} and {station.name!r} are at the same position")
        names.add(station.name)
    if not stations:
        return
    lats, lons = [station.lat for station in stations], [station.lon for station in stations]
    if max(abs(lat) for lat in lats) > 85:
        raise _network_error("a station is beyond 85° of latitude; the margin around the network would cross a pole")
    height_km = (max(lats) - min(lats)) * 111.2
    width_km = (max(lons) - min(lons)) * 111.3 * math.cos(math.radians(min(abs(lat) for lat in lats)))
    if math.hypot(height_km, width_km) > MAX_EXTENT_KM:
        raise _network_error(
            f"the stations span {math.hypot(height_km, width_km):.0f} km; at most {MAX_EXTENT_KM:.0f} km are supported "
            "(networks across the 180th meridian are not)"
        )


def _network_error(message: str) -> ConfigError:
    return ConfigError(f"stations: {message}", field="stations", code="conflict")


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

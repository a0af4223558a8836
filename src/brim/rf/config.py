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
PathLoss = Literal["free_space", "log_distance", "hata", "cost231", "ground_wave", "two_ray"]
AreaType = Literal["city", "residential", "rural"]
DatasetType = Literal["feature_based", "iq_raw"]
ClockKind = Literal["sample", "station", "drift", "none"]
BoundKind = Literal["all", "timing", "strength"]

CHANNEL_HZ = 12_500.0  # every SNR and every power in the channel refers to this bandwidth
SAMPLE_RATE_HZ = 200_000  # of the IQ records; the noise fills this band
NUM_CHUNKS = 5  # features are measured per chunk, a fifth of the record each
RANDOM_RECEIVERS = (5, 10)  # fewest and most receivers of a sample with random receivers
RANDOM_AREA = ((44.0, 46.0), (7.0, 10.0))  # latitude and longitude range of random receivers, degrees
MAX_EXTENT_KM = 2_000.0  # widest network; the delay tables grow with it
FRACTAL = "fractal"  # terrain drawn from the seed; any other name is a file or folder
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
        float, Range(0.01, 6000, note="10 kHz to 6 GHz"), Unit("MHz"), Doc("Carrier frequency.")
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
    clock: Annotated[
        ClockKind,
        Doc(
            "Clock errors: drawn for each sample, once for each station, or drifting slowly from sample to sample; "
            "none: there is no common clock, and arrival times mean nothing."
        ),
    ] = "sample"
    bound: Annotated[
        BoundKind, Doc("What the Cramér-Rao bound counts: arrivals and strengths (all), or one of them alone.")
    ] = "all"

    # What makes real networks differ from the model above; all of it off by default
    environment_seed: Annotated[
        int | None,
        Range(0, 2**63 - 1),
        Doc(
            "Random seed of what datasets of one place share: fractal terrain, shadowing maps, gains and clocks "
            "of stations; none: the seed."
        ),
    ] = None
    horizon: Annotated[bool, Doc("Add the diffraction loss of the smooth Earth beyond the horizon (ITU-R P.526).")] = (
        False
    )
    terrain: Annotated[
        str | None,
        Length(1, 4096),
        Doc("fractal: hills drawn from the seed; or a height map: GeoTIFF, SRTM .hgt, a folder of them."),
    ] = None
    terrain_relief_m: Annotated[
        float, Range(1, 3000), Unit("m"), Doc("Standard deviation of the heights of fractal terrain.")
    ] = 100.0
    shadowing_distance_m: Annotated[
        float,
        Range(0, 1e5),
        Unit("m"),
        Doc(
            "Shadowing of a station is a map in which it loses correlation over this distance (Gudmundson); 0: drawn "
            "anew for each link."
        ),
    ] = 0.0
    paths: Annotated[
        str | None,
        Length(1, 4096),
        Doc("File of paths that a ray tracer found (.npz or HDF5); they replace loss, shadowing, blocking and echoes."),
    ] = None
    blocked_share: Annotated[float, Range(0, 1), Doc("Share of the links whose direct path is blocked.")] = 0.0
    blocked_delay_us: Annotated[
        float, Range(0, 20), Unit("µs"), Doc("Mean extra delay of a blocked link's first arrival, exponential.")
    ] = 1.0
    blocked_loss_db: Annotated[float, Range(0, 60), Unit("dB"), Doc("Extra loss of a blocked link.")] = 10.0
    echo_spread_us: Annotated[
        float,
        Range(0, 10),
        Unit("µs"),
        Doc("Delay spread of dense echoes, after 3GPP TR 38.901; 0: two or three weak echoes."),
    ] = 0.0
    station_gain_db: Annotated[
        float, Range(0, 20), Unit("dB"), Doc("Standard deviation of each station's own gain error, fixed by the seed.")
    ] = 0.0
    power_spread_db: Annotated[
        float, Range(0, 30), Unit("dB"), Doc("Transmit power of a sample is uniform within ± this of the power given.")
    ] = 0.0
    adc_clip_db: Annotated[
        float,
        Range(0, 150),
        Unit("dB"),
        Doc("Receivers clip I and Q at this level over the noise in the channel; 0: never."),
    ] = 0.0
    agc_step_db: Annotated[
        float, Range(0, 60), Unit("dB"), Doc("Receivers change their gain in a few steps within ± this.")
    ] = 0.0
    phase_noise_deg: Annotated[
        float, Range(0, 180), Unit("°"), Doc("Rms phase noise of the receivers' oscillators, from 1 Hz to 1 kHz.")
    ] = 0.0
    filter_ripple_db: Annotated[
        float, Range(0, 20), Unit("dB"), Doc("Ripple of the receivers' filters, from crest to trough.")
    ] = 0.0
    lost_share: Annotated[float, Range(0, 0.9), Doc("Share of blocks of 20 ms that receivers lose.")] = 0.0
    interferer_share: Annotated[
        float, Range(0, 1), Doc("Share of samples with another carrier on or next to the channel for a while.")
    ] = 0.0
    interferer_db: Annotated[
        float, Range(-20, 80), Unit("dB"), Doc("Median level of that carrier over the noise in the channel.")
    ] = 10.0
    impulses_per_s: Annotated[float, Range(0, 512), Doc("Impulses of noise in a second.")] = 0.0
    impulse_db: Annotated[
        float, Range(0, 120), Unit("dB"), Doc("Mean power of an impulse over the noise in the channel.")
    ] = 40.0
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
        if self.bound == "timing" and (self.clock == "none" or self.waveform == "cw"):
            reason = "without a common clock" if self.clock == "none" else "of a carrier without modulation"
            raise ConfigError(
                f"counts arrival times, which mean nothing {reason}",
                field="bound",
                value=self.bound,
                code="conflict",
                hint="set {bound} to strength or all",
            )
        if self.paths is not None and (self.use_random_receivers or self.terrain is not None):
            other = "random receivers" if self.use_random_receivers else "terrain"
            raise ConfigError(f"excludes {other}: the file says what arrives", field="paths", code="conflict")

    @property
    def place_seed(self) -> int:
        """Random seed of terrain, maps of shadowing, and the gains and clocks of stations."""
        return self.seed if self.environment_seed is None else self.environment_seed

    @property
    def is_fixed_environment(self) -> bool:
        """Whether what a station hears from a place is partly the same in all samples."""
        clocks = self.clock in ("station", "drift") and self.clock_sigma_s > 0
        maps = self.terrain is not None or self.paths is not None or self.shadowing_distance_m > 0
        return not self.use_random_receivers and (maps or clocks or self.station_gain_db > 0)

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
    components: Annotated[int, Range(1, 64), Doc("Number of Gaussians in the posterior.")] = 12
    width: Annotated[int, Range(4, 1024, step=4), Doc("Width of the network.")] = 96
    layers: Annotated[int, Range(1, 32), Doc("Layers of the network.")] = 3
    power: Annotated[
        Literal["unknown", "known"],
        Doc("unknown: transmitters of any power are located, and datasets of different power can be combined."),
    ] = "unknown"
    real_weight: Annotated[
        float,
        Range(above=0, high=1000),
        Doc("Weight of a sample from recordings, relative to a generated one."),
    ] = 1.0
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
    "valley": {
        "environment_seed": 0,
        "terrain": FRACTAL,
        "loss": "free_space",
        "clock": "none",
        "shadowing_db": 4.0,
        "shadowing_distance_m": 500.0,
    },
    "city": {
        "environment": "city",
        "clock_sigma_s": 1e-7,
        "blocked_share": 0.4,
        "blocked_delay_us": 3.0,
        "blocked_loss_db": 10.0,
        "echo_spread_us": 0.5,
        "min_receivers": 4,
    },
    "amateur": {
        "environment_seed": 0,
        "horizon": True,
        "clock": "drift",
        "blocked_share": 0.25,
        "blocked_delay_us": 2.0,
        "station_gain_db": 4.0,
        "power_spread_db": 10.0,
        "shadowing_distance_m": 500.0,
        "adc_clip_db": 45.0,
        "min_receivers": 4,
    },
    "hostile": {
        "environment_seed": 0,
        "terrain": FRACTAL,
        "loss": "free_space",
        "clock": "drift",
        "environment": "city",
        "blocked_share": 0.4,
        "blocked_delay_us": 3.0,
        "echo_spread_us": 0.5,
        "station_gain_db": 4.0,
        "power_spread_db": 10.0,
        "shadowing_distance_m": 500.0,
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
    except (tomllib.TOMLDecodeError, RecursionError) as error:
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
    stations, source = [], ""
    try:
        for number, row in enumerate(rows, 2):
            source = f", line {number}"
            stations.append(Station(row["name"].strip(), float(row["lat"]), float(row["lon"]), float(row["alt"])))
        source = ""
        check_network(tuple(stations))
    except ConfigError as failure:
        raise ConfigError(f"stations file {path}{source}: {failure}", code=failure.code) from failure
    except (TypeError, ValueError, AttributeError) as failure:
        problem = f"lat, lon and alt must be numbers, got {row!r}"
        raise ConfigError(f"stations file {path}{source}: {problem}", code="wrong_type") from failure
    return tuple(stations)


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

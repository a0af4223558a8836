"""Who is where and how well each receiver hears: everything that can be known before any IQ exists.

Axes: B attempts, R receivers, P paths (direct, then up to three echoes). Computed on the host in float64, so that the
scene is the same on every device. Gates are applied here: what can be refused before any IQ exists is refused here.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError
from brim.rf.config import RANDOM_AREA, RANDOM_RECEIVERS, GenerateConfig
from brim.rf.physics.diffraction import smooth_earth_db
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef, enu, gdop
from brim.rf.physics.link import noise_dbm, path_loss_db
from brim.rf.physics.paths import TracedPaths, excess_s, read_paths
from brim.rf.physics.philox import Purpose, normal, uniform
from brim.rf.physics.terrain import HeightMap, terrain_of

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
B1 = NDArray[np.bool_]

NUM_PATHS = 4  # direct and at most three echoes
OUTSIDE_MARGIN_DEG = 0.5  # transmitters outside the box stay within this of it
MAX_HEIGHT_M = 600.0  # of transmitters and random receivers, uniform from 0
ECHO_DELAY_S = (0.5e-6, 5e-6)
ECHO_POWER_DB = (-25.0, -10.0)
COHERENCE_TIME_S = (0.05, 0.2)
DOPPLER_TIMES_COHERENCE = 0.423  # Clarke: f_D = 0.423 / T_c
_LEAST_DRAW = 1e-4  # exponential delays end at 9.2 times their mean, so that the delay tables can hold them
_LONGEST = -float(np.log(_LEAST_DRAW))
_CLUSTER_SCALE, _CLUSTER_SHADOWING_DB = 2.3, 3.0  # r_τ and ζ of 3GPP TR 38.901, urban
_NUM_WAVES = 64  # of a station's map of shadowing, or of its clock's drift
_DRIFT_SAMPLES = 20_000.0  # over which a drifting clock loses its correlation
_DIRECT_S = 10e-9  # a first arrival later than this is not the direct path
_NO_CLOCK_S = 1e-3  # clocks that nothing keeps together are uniform within ± this


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenes:
    """A batch of scenes; every array has the attempts as its leading axis."""

    index: I64  # (B,) attempt numbers
    transmitter: F64  # (B, 3) lat, lon in degrees, alt in metres
    receivers: F64  # (B, R, 3) likewise; 0 where not valid
    valid: B1  # (B, R) a receiver, not padding
    present: B1  # (B, R) heard: link SNR at least min_snr_db
    east: F64  # (B, R) metres from the transmitter to the receiver, level with the transmitter
    north: F64  # (B, R)
    range_m: F64  # (B, R) straight line between the antennas
    loss_db: F64  # (B, R)
    shadowing_db: F64  # (B, R) gain over the median
    power_dbm: F64  # (B, R) mean received power of the link
    snr_db: F64  # (B, R) mean SNR of the link in the 12.5 kHz channel
    clock_error_s: F64  # (B, R)
    frequency_offset_hz: F64  # (B, R)
    coherence_time_s: F64  # (B, R)
    blocked: B1  # (B, R) the direct path does not arrive
    echo_delay_s: F64  # (B, R, P) after the straight line's delay; the first is 0 unless the link is blocked
    path_power: F64  # (B, R, P) linear shares, summing to 1; 0 for an absent echo
    gdop: F64  # (B,)
    enough: B1  # (B,) at least min_receivers present
    tx_power_dbm: F64  # (B,)
    accepted: B1  # (B,)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice | I64 | B1) -> Self:
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def delay_s(self) -> F64:
        """(B, R) propagation delay of the direct path."""
        return self.range_m / SPEED_OF_LIGHT

    @property
    def doppler_hz(self) -> F64:
        """(B, R) maximum Doppler shift."""
        return DOPPLER_TIMES_COHERENCE / self.coherence_time_s


def make_scenes(config: GenerateConfig, index: I64) -> Scenes:
    """Scenes of the given attempts, each a function of (config, attempt number) alone."""
    lat, lon, alt, valid = _receivers(config, index)
    traced = _traced_links(config, index) if config.paths is not None else None
    if traced is not None:
        tx_lat, tx_lon, tx_alt = traced.transmitter.T
    else:
        tx_lat, tx_lon, tx_alt = _transmitters(config, index, lat, lon, valid)
    ground = terrain_of(config)
    if ground is not None:
        alt, tx_alt = ground.at(lat, lon), ground.at(tx_lat, tx_lon)
    rx_height, tx_height = alt + config.rx_antenna_m, (tx_alt + config.tx_antenna_m)[:, None]
    at_tx = (tx_lat[:, None], tx_lon[:, None], tx_height)
    range_m = _straight_line((lat, lon, rx_height), at_tx)
    east, north, _ = enu(lat, lon, rx_height, *at_tx)

    draws = uniform(config.seed, index[:, None], np.arange(lat.shape[1]), Purpose.LINK, 6)
    shadowing = _shadowing_db(config, index, draws, tx_lat, tx_lon)
    here = (lat, lon, rx_height)
    loss = path_loss_db(config, range_m) + _obstruction_db(config, ground, range_m, here, at_tx)
    blocked, excess_s = _blocked(config, index, lat.shape[1])
    echo_delay, path_power = _paths(config, index, lat.shape[1])
    if traced is not None:
        loss, shadowing, excess_s, blocked = traced.loss_db, np.zeros_like(loss), np.zeros_like(loss), traced.blocked
        echo_delay, path_power = traced.echo_delay_s, traced.path_power
    tx_power = _tx_power_dbm(config, index)
    gain = config.tx_gain_dbi + config.rx_gain_dbi + _station_gain_db(config, index, lat.shape[1])
    power = tx_power[:, None] + gain - loss + shadowing
    if traced is None:
        power = power - blocked * config.blocked_loss_db
    snr = power - noise_dbm(config)
    present = valid & (snr >= config.min_snr_db)
    low, high = COHERENCE_TIME_S
    dilution = gdop(east, north, present)
    enough = present.sum(-1) >= config.min_receivers
    return Scenes(
        index=index,
        transmitter=np.stack([tx_lat, tx_lon, tx_alt], -1),
        receivers=np.where(valid[..., None], np.stack([lat, lon, alt], -1), 0.0),
        valid=valid,
        present=present,
        east=east,
        north=north,
        range_m=range_m,
        loss_db=loss,
        shadowing_db=shadowing,
        power_dbm=power,
        snr_db=snr,
        clock_error_s=_clock_error_s(config, index, draws),
        frequency_offset_hz=config.max_frequency_offset_hz * (2 * draws[..., 4] - 1),
        coherence_time_s=low + (high - low) * draws[..., 5],
        blocked=blocked,
        echo_delay_s=echo_delay + excess_s[..., None],
        path_power=path_power,
        gdop=dilution,
        enough=enough,
        tx_power_dbm=tx_power,
        accepted=enough & (dilution <= config.max_gdop),
    )


def max_delay_s(config: GenerateConfig) -> float:
    """Upper bound of a direct path's delay in this configuration; sizes the delay tables."""
    return _extent_m(config, OUTSIDE_MARGIN_DEG) / SPEED_OF_LIGHT


def max_excess_s(config: GenerateConfig) -> float:
    """Upper bound of the delay of a first arrival after the straight line's."""
    if config.paths is not None:
        return float(_traced(config.paths, config)[0].max())
    return _LONGEST * config.blocked_delay_us * 1e-6 if config.blocked_share else 0.0


def max_echo_s(config: GenerateConfig) -> float:
    """Upper bound of what arrives after the straight line's delay."""
    spread = _LONGEST * _CLUSTER_SCALE * config.echo_spread_us * 1e-6
    return max(ECHO_DELAY_S[1], spread) + max_excess_s(config)


def max_clock_s(config: GenerateConfig) -> float:
    """Bound of the clock errors that the delay tables hold."""
    return max(8 * config.clock_sigma_s, _NO_CLOCK_S if config.clock == "none" else 0.0)


def max_baseline_m(config: GenerateConfig) -> float:
    """Upper bound of the distance between two receivers; sizes the search for arrival differences."""
    return _extent_m(config, 0.0)


def baselines_m(scenes: Scenes, config: GenerateConfig, reference: I64) -> F64:
    """(B, R) straight-line distance of each receiver's antenna from the reference's."""
    lat, lon, alt = (np.ascontiguousarray(scenes.receivers[..., k]) for k in range(3))
    row = np.arange(len(scenes))
    here = (lat, lon, alt + config.rx_antenna_m)
    other = tuple(axis[row, reference][:, None] for axis in here)
    return _straight_line(here, (other[0], other[1], other[2]))


def _straight_line(here: tuple[F64, F64, F64], other: tuple[F64, F64, F64]) -> F64:
    x, y, z = (a - b for a, b in zip(ecef(*here), ecef(*other), strict=True))
    return np.asarray(np.sqrt(x * x + y * y + z * z))


def _extent_m(config: GenerateConfig, margin_deg: float) -> float:
    """Diagonal of the area that can hold stations and transmitters, from above."""
    if config.use_random_receivers:
        (lat0, lat1), (lon0, lon1) = RANDOM_AREA
    else:
        lats, lons = [s.lat for s in config.stations], [s.lon for s in config.stations]
        lat0, lat1, lon0, lon1 = min(lats), max(lats), min(lons), max(lons)
    height = (lat1 - lat0 + 2 * margin_deg) * 111_700.0  # metres per degree, at most
    nearest = max(0.0, max(-lat1, lat0) - margin_deg)  # to the equator, where a degree of longitude is longest
    width = (lon1 - lon0 + 2 * margin_deg) * 111_700.0 * float(np.cos(np.radians(nearest)))
    return float(np.hypot(height, width)) + 10_000.0  # and the difference in height


def _receivers(config: GenerateConfig, index: I64) -> tuple[F64, F64, F64, B1]:
    """Latitude, longitude, altitude and validity, each (B, R)."""
    num = config.max_receivers
    if not config.use_random_receivers:
        rows = ([s.lat for s in config.stations], [s.lon for s in config.stations], [s.alt for s in config.stations])
        lat, lon, alt = (np.tile(np.array(row, np.float64), (len(index), 1)) for row in rows)
        return lat, lon, alt, np.ones(lat.shape, bool)
    fewest, most = RANDOM_RECEIVERS
    pick = uniform(config.seed, index, 0, Purpose.SCENE, 1)[:, 0]
    count = fewest + np.floor(pick * (most - fewest + 1)).astype(np.int64)
    draws = uniform(config.seed, index[:, None], np.arange(num), Purpose.RECEIVER, 3)
    (lat0, lat1), (lon0, lon1) = RANDOM_AREA
    return (
        lat0 + (lat1 - lat0) * draws[..., 0],
        lon0 + (lon1 - lon0) * draws[..., 1],
        MAX_HEIGHT_M * draws[..., 2],
        np.arange(num) < count[:, None],
    )


def _transmitters(config: GenerateConfig, index: I64, lat: F64, lon: F64, valid: B1) -> tuple[F64, F64, F64]:
    """Inside the receivers' bounding box with probability inside_ratio, else in the frame around it; each (B,)."""
    draws = uniform(config.seed, index, 0, Purpose.SCENE, 6)  # the first is the receiver count's
    inside, side, u, v, height = (np.ascontiguousarray(draws[:, k]) for k in range(1, 6))
    south, north = np.where(valid, lat, np.inf).min(-1), np.where(valid, lat, -np.inf).max(-1)
    west, east = np.where(valid, lon, np.inf).min(-1), np.where(valid, lon, -np.inf).max(-1)
    in_box = inside < config.inside_ratio
    tall, wide, margin = north - south, east - west, OUTSIDE_MARGIN_DEG
    # The frame is two full-height strips (west, east) and two of the box's width (south, north), chosen by area.
    strip = margin * (tall + 2 * margin)
    share = side * (2 * strip + 2 * margin * wide)
    on_west, on_east = share < strip, (share >= strip) & (share < 2 * strip)
    on_south = (share >= 2 * strip) & (share < 2 * strip + margin * wide)
    frame_lon = np.where(on_west, west - margin * u, np.where(on_east, east + margin * u, west + wide * u))
    below, above = south - margin * v, north + margin * v
    frame_lat = np.where(on_west | on_east, south - margin + (tall + 2 * margin) * v, np.where(on_south, below, above))
    tx_lat = np.where(in_box, south + tall * v, frame_lat)
    tx_lon = np.where(in_box, west + wide * u, frame_lon)
    return tx_lat, tx_lon, MAX_HEIGHT_M * height


# Paths of a ray tracer


class _TracedLinks(NamedTuple):
    """What arrives, by attempt."""

    transmitter: F64  # (B, 3)
    loss_db: F64  # (B, R)
    blocked: B1  # (B, R)
    echo_delay_s: F64  # (B, R, P)
    path_power: F64  # (B, R, P)


def _traced_links(config: GenerateConfig, index: I64) -> _TracedLinks:
    """Every attempt takes one of the file's transmitters, at random."""
    late, traced = _traced(str(config.paths), config)
    draws = uniform(config.seed, index, 0, Purpose.SCENE, 2)[:, 1]
    row = np.minimum((draws * len(traced.transmitter)).astype(np.int64), len(traced.transmitter) - 1)
    gain, total = traced.gain[row], traced.gain[row].sum(-1)
    share = gain / np.where(total > 0, total, 1.0)[..., None]
    return _TracedLinks(
        transmitter=traced.transmitter[row],
        loss_db=-10 * np.log10(np.maximum(total, 1e-30)),
        blocked=late[row][..., 0] > _DIRECT_S,
        echo_delay_s=late[row],
        path_power=np.where(total[..., None] > 0, share, np.eye(1, NUM_PATHS)[0]),
    )


@lru_cache(maxsize=2)
def _traced(source: str, config: GenerateConfig) -> tuple[F64, TracedPaths]:
    traced = read_paths(source, NUM_PATHS)
    lats, lons = [station.lat for station in config.stations], [station.lon for station in config.stations]
    low, high = np.array([min(lats), min(lons)]), np.array([max(lats), max(lons)])
    beyond = np.maximum(low - traced.transmitter[:, :2], traced.transmitter[:, :2] - high).max()
    if beyond > OUTSIDE_MARGIN_DEG:
        raise ConfigError(
            f"has a transmitter {beyond:.2f}° outside the box of the receivers; at most {OUTSIDE_MARGIN_DEG}°",
            field="paths",
            value=source,
            code="out_of_range",
        )
    return excess_s(config, traced), traced


# Effects of real networks


def _obstruction_db(
    config: GenerateConfig,
    ground: HeightMap | None,
    range_m: F64,
    here: tuple[F64, F64, F64],
    at_tx: tuple[F64, F64, F64],
) -> F64:
    """(B, R) loss by hills or by the Earth's curve, beyond the loss of the model."""
    if ground is not None:
        ends = tuple(np.broadcast_to(part, range_m.shape) for part in at_tx)
        return ground.diffraction_db(config.frequency_mhz, range_m, here, (ends[0], ends[1], ends[2]))
    if config.horizon:
        return smooth_earth_db(config.frequency_mhz, range_m, here[2], np.broadcast_to(at_tx[2], range_m.shape))
    return np.zeros_like(range_m)


def _shadowing_db(config: GenerateConfig, index: I64, draws: F64, tx_lat: F64, tx_lon: F64) -> F64:
    """(B, R) gain over the median: drawn for each link, or each station's own map at the transmitter."""
    if not config.shadowing_distance_m:
        return config.shadowing_db * normal(draws[..., 0], draws[..., 1])
    north_m = tx_lat * 111_200.0
    east_m = tx_lon * 111_300.0 * float(np.cos(np.radians(_middle_lat(config))))
    station = np.arange(draws.shape[1])
    key = index if config.use_random_receivers else np.zeros(1, np.int64)  # random receivers have a map per sample
    seed = config.seed if config.use_random_receivers else config.place_seed
    u = uniform(seed, key[:, None], station, Purpose.SHADOWING, 3 * _NUM_WAVES)
    length, turn, phase = (u[..., k * _NUM_WAVES : (k + 1) * _NUM_WAVES] for k in range(3))
    # Waves drawn from the spectrum of exp(−r/d) in the plane: P(wavenumber < k) = 1 − 1/√(1 + (k·d)²).
    number = np.sqrt(1 / (1 - length) ** 2 - 1) / config.shadowing_distance_m
    angle = 2 * np.pi * turn
    along = east_m[:, None, None] * np.cos(angle) + north_m[:, None, None] * np.sin(angle)
    waves = np.cos(number * along + 2 * np.pi * phase)
    return np.asarray(config.shadowing_db * np.sqrt(2 / _NUM_WAVES) * waves.sum(-1))


def _middle_lat(config: GenerateConfig) -> float:
    if config.use_random_receivers:
        return sum(RANDOM_AREA[0]) / 2
    return float(np.mean([station.lat for station in config.stations]))


def _blocked(config: GenerateConfig, index: I64, num_receivers: int) -> tuple[B1, F64]:
    """Which links are blocked, and how much later their first arrival is, each (B, R)."""
    if not config.blocked_share:
        return np.zeros((len(index), num_receivers), bool), np.zeros((len(index), num_receivers))
    draws = uniform(config.seed, index[:, None], np.arange(num_receivers), Purpose.BLOCKED, 2)
    blocked = draws[..., 0] < config.blocked_share
    delay_s = -np.log(np.maximum(draws[..., 1], _LEAST_DRAW)) * config.blocked_delay_us * 1e-6
    return blocked, np.where(blocked, delay_s, 0.0)


def _station_gain_db(config: GenerateConfig, index: I64, num_receivers: int) -> F64:
    """(1 or B, R) each station's own, the same in all samples; of random receivers, drawn with them."""
    if not config.station_gain_db:
        return np.zeros((1, num_receivers))
    key = index if config.use_random_receivers else np.zeros(1, np.int64)
    seed = config.seed if config.use_random_receivers else config.place_seed
    draws = uniform(seed, key[:, None], np.arange(num_receivers), Purpose.STATION, 2)
    return config.station_gain_db * normal(draws[..., 0], draws[..., 1])


def _tx_power_dbm(config: GenerateConfig, index: I64) -> F64:
    if not config.power_spread_db:
        return np.full(len(index), config.tx_power_dbm)
    draws = uniform(config.seed, index, 0, Purpose.POWER, 1)[:, 0]
    return config.tx_power_dbm + config.power_spread_db * (2 * draws - 1)


def _clock_error_s(config: GenerateConfig, index: I64, draws: F64) -> F64:
    """(B, R)"""
    if config.clock == "sample":
        return config.clock_sigma_s * normal(draws[..., 2], draws[..., 3])
    if config.clock == "none":
        return _NO_CLOCK_S * (2 * draws[..., 2] - 1)
    station = np.arange(draws.shape[1])
    if config.clock == "station":
        u = uniform(config.place_seed, np.zeros(1, np.int64), station, Purpose.CLOCK, 2)
        return np.broadcast_to(config.clock_sigma_s * normal(u[..., 0], u[..., 1]), draws.shape[:2])
    u = uniform(config.place_seed, np.zeros(1, np.int64), station, Purpose.CLOCK, 3 * _NUM_WAVES)
    rate = normal(u[:, :_NUM_WAVES], u[:, _NUM_WAVES : 2 * _NUM_WAVES]) / _DRIFT_SAMPLES
    waves = np.cos(index[:, None, None] * rate + 2 * np.pi * u[:, 2 * _NUM_WAVES :])
    return np.asarray(config.clock_sigma_s * np.sqrt(2 / _NUM_WAVES) * waves.sum(-1))


def _paths(config: GenerateConfig, index: I64, num_receivers: int) -> tuple[F64, F64]:
    """Delay after the first arrival and share of the power, each (B, R, P); two or three echoes, or dense ones."""
    if config.echo_spread_us:
        return _dense_paths(config, index, num_receivers)
    draws = uniform(config.seed, index[:, None], np.arange(num_receivers), Purpose.ECHO, 7)
    exists = np.stack([np.ones(draws.shape[:2], bool)] * 2 + [draws[..., 0] < 0.5], -1)
    low, high = ECHO_DELAY_S
    delay = np.where(exists, low + (high - low) * draws[..., 1:4], 0.0)
    weak, strong = ECHO_POWER_DB
    power = np.where(exists, 10 ** ((weak + (strong - weak) * draws[..., 4:7]) / 10), 0.0)
    total = 1 + power[..., 0] + power[..., 1] + power[..., 2]
    first = np.zeros((*delay.shape[:2], 1))
    return np.concatenate([first, delay], -1), np.concatenate([first + 1, power], -1) / total[..., None]


def _dense_paths(config: GenerateConfig, index: I64, num_receivers: int) -> tuple[F64, F64]:
    """Delays drawn from an exponential law, powers that fall with them: the clusters of 3GPP TR 38.901, the first 4."""
    draws = uniform(config.seed, index[:, None], np.arange(num_receivers), Purpose.ECHO, 11)
    spread_s = config.echo_spread_us * 1e-6
    delay = np.zeros((*draws.shape[:2], NUM_PATHS))
    delay[..., 1:] = -np.log(np.maximum(draws[..., :3], _LEAST_DRAW)) * _CLUSTER_SCALE * spread_s
    level_db = _CLUSTER_SHADOWING_DB * normal(draws[..., 3:7], draws[..., 7:11])
    power = np.exp(-delay * (_CLUSTER_SCALE - 1) / (_CLUSTER_SCALE * spread_s)) * 10 ** (level_db / 10)
    total = power[..., 0] + power[..., 1] + power[..., 2] + power[..., 3]
    return delay, power / total[..., None]

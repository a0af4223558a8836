"""Who is where and how well each receiver hears: everything that can be known before any IQ exists.

Axes: B attempts, R receivers, P paths (direct, then up to three echoes). Computed on the host in float64, so that the
scene is the same on every device. Gates are applied here: what can be refused before any IQ exists is refused here.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from brim.rf.config import (
    RANDOM_AREA,
    RANDOM_RECEIVERS,
    GenerateConfig,
)
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef, enu, gdop
from brim.rf.physics.link import noise_dbm, path_loss_db
from brim.rf.physics.philox import Purpose, normal, uniform

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
    echo_delay_s: F64  # (B, R, P) after the direct path, which is 0
    path_power: F64  # (B, R, P) linear shares, summing to 1; 0 for an absent echo
    gdop: F64  # (B,)
    enough: B1  # (B,) at least min_receivers present
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
    tx_lat, tx_lon, tx_alt = _transmitters(config, index, lat, lon, valid)
    rx_height, tx_height = alt + config.rx_antenna_m, (tx_alt + config.tx_antenna_m)[:, None]
    at_tx = (tx_lat[:, None], tx_lon[:, None], tx_height)
    range_m = _straight_line((lat, lon, rx_height), at_tx)
    east, north, _ = enu(lat, lon, rx_height, *at_tx)

    draws = uniform(config.seed, index[:, None], np.arange(lat.shape[1]), Purpose.LINK, 6)
    shadowing = config.shadowing_db * normal(draws[..., 0], draws[..., 1])
    loss = path_loss_db(config, range_m)
    power = config.tx_power_dbm + config.tx_gain_dbi + config.rx_gain_dbi - loss + shadowing
    snr = power - noise_dbm(config)
    present = valid & (snr >= config.min_snr_db)
    low, high = COHERENCE_TIME_S
    echo_delay, path_power = _paths(config, index, lat.shape[1])
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
        clock_error_s=config.clock_sigma_s * normal(draws[..., 2], draws[..., 3]),
        frequency_offset_hz=config.max_frequency_offset_hz * (2 * draws[..., 4] - 1),
        coherence_time_s=low + (high - low) * draws[..., 5],
        echo_delay_s=echo_delay,
        path_power=path_power,
        gdop=dilution,
        enough=enough,
        accepted=enough & (dilution <= config.max_gdop),
    )


def max_delay_s(config: GenerateConfig) -> float:
    """Upper bound of a direct path's delay in this configuration; sizes the delay tables."""
    return _extent_m(config, OUTSIDE_MARGIN_DEG) / SPEED_OF_LIGHT


def max_baseline_m(config: GenerateConfig) -> float:
    """Upper bound of the distance between two receivers; sizes the search for arrival differences."""
    return _extent_m(config, 0.0)


def baselines_m(scenes: Scenes, config: GenerateConfig, reference: I64) -> F64:
    """(B, R) straight-line distance of each receiver's antenna from the reference's."""
    lat, lon, alt = (np.ascontiguousarray(scenes.receivers[..., k]) for k in range(3))
    row = np.arange(len(scenes))
    here = (lat, lon, alt + config.rx_antenna_m)
    there = tuple(axis[row, reference][:, None] for axis in here)
    return _straight_line(here, (there[0], there[1], there[2]))


def _straight_line(here: tuple[F64, F64, F64], there: tuple[F64, F64, F64]) -> F64:
    x, y, z = (a - b for a, b in zip(ecef(*here), ecef(*there), strict=True))
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
        rows = (
            [s.lat for s in config.stations],
            [s.lon for s in config.stations],
            [s.alt for s in config.stations],
        )
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


def _paths(config: GenerateConfig, index: I64, num_receivers: int) -> tuple[F64, F64]:
    """Delay after the direct path and share of the power, each (B, R, P); two or three echoes."""
    draws = uniform(config.seed, index[:, None], np.arange(num_receivers), Purpose.ECHO, 7)
    exists = np.stack([np.ones(draws.shape[:2], bool)] * 2 + [draws[..., 0] < 0.5], -1)
    low, high = ECHO_DELAY_S
    delay = np.where(exists, low + (high - low) * draws[..., 1:4], 0.0)
    weak, strong = ECHO_POWER_DB
    power = np.where(exists, 10 ** ((weak + (strong - weak) * draws[..., 4:7]) / 10), 0.0)
    total = 1 + power[..., 0] + power[..., 1] + power[..., 2]
    first = np.zeros((*delay.shape[:2], 1))
    return np.concatenate([first, delay], -1), np.concatenate([first + 1, power], -1) / total[..., None]

"""Classical location of a transmitter: by centroid, by strength, and by arrival differences with strength.

Axes: B samples, R receivers, S starting points. Positions are metres east and north of the mean position of the present
receivers; everything is masked by `present`, runs on the device of its input and never asks the host for a value.

The transmitter's height cannot be told from stations that are all far to the side. It is taken as TX_HEIGHT_M above the
ellipsoid, the middle of 0-600 m; what that costs is far below the noise, and tested.

Arrival differences are against one reference, whose own time counts as measured: 0, with the error of its clock. Errors
are then independent between receivers, and the emission time is one unknown more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from brim.config import Range, check
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.features import UNKNOWN_SIGMA_US, F
from brim.rf.physics.geometry import SPEED_OF_LIGHT, from_local, to_local
from brim.rf.physics.link import loss_exponent, path_loss_db

SampleRows = dict[str, Tensor]

TX_HEIGHT_M = 300.0  # ground at the transmitter above the ellipsoid
EARTH_RADIUS_M = 6_371_000.0  # the frame is a plane, the ground curves away from it
METRES_PER_US = SPEED_OF_LIGHT * 1e-6
_BREAK_M = 1_000.0  # where loss models may change their slope
_MIN_DISTANCE_M = 10.0
_PER_DECADE = 40  # entries of a table of powers
_MIN_SIGMA_M = 1.0  # no arrival is known better, however good the clocks
_MIN_SIGMA_DB = 0.1
_EMISSION_STEPS = 4
RobustLoss = Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_LEAST_TIMED = 4  # arrivals of which one can be left out
_WORTH_DROPPING = 4.5  # of the cost: three standard deviations
_GRID_ROOT, _GRID_FINER, _GRID_LEVELS = 32, 4, 5  # cells per side, each time finer, so many times
_GRID_WIDTH, _GRID_CELLS = 24, 128  # cells that are divided each time; cells of the answer
_GRID_HELD = 0.97  # of the probability, by the cells of the answer
_GRID_LIMIT = 6.0  # standard deviations beyond which a residual counts linearly
_USUAL_SPREAD_US = 0.4  # of an arrival difference over the chunks, where only the mean is known
_SNR, _FLOOR = F["snr_db"], F["noise_floor_dbm"]
_ARRIVAL, _SIGMA = F["arrival_difference_us"], F["arrival_sigma_us"]
_MEAN, _STD, _MIN = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseModel:
    """How far measured values lie from the link's, beyond clocks and shadowing; `calibrate` fits it to a dataset.

    An arrival has the variance timing_us² + (timing_snr_us² / snr) + (timing_spread · chunk std)² / 5. The defaults
    were fitted to 1 500 samples of the production preset. The estimator's own `arrival_sigma_us` is not in it: beside
    the SNR it told next to nothing about the errors there, the chunks' disagreement did.
    """

    strength_bias_db: float = -1.01  # the mean of fading in dB
    strength_db: Annotated[float, Range(0)] = 1.54  # its spread, added to the shadowing
    timing_us: Annotated[float, Range(0)] = 0.22  # echoes
    timing_snr_us: Annotated[float, Range(0)] = 2.9  # noise, at 0 dB
    timing_spread: Annotated[float, Range(0)] = 1.05  # share of the chunks' disagreement

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverConfig:
    """How the cost is searched; the defaults miss the lowest minimum in none of 500 held-out samples."""

    grid: Annotated[int, Range(3)] = 24  # points per side of the coarse search
    margin_m: Annotated[float, Range(above=0)] = 60_000.0  # around the stations; transmitters lie within half a degree
    starts: Annotated[int, Range(1)] = 5  # lowest local minima of the grid that are refined, besides the centroid
    steps: Annotated[int, Range(1)] = 25  # of Gauss-Newton, whether needed or not: no host decides
    huber: Annotated[float, Range(above=0)] = 3.0  # standard deviations beyond which a residual counts linearly
    redescending: bool = False  # or, after Geman and McClure, hardly at all: beyond the same number

    def __post_init__(self) -> None:
        check(self)


_QUICK = SolverConfig(starts=2, steps=12)  # where many fits are made of the same sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """What a solver sees of a batch, all of one float dtype but the masks."""

    origin: Tensor  # (B, 3) lat, lon, alt of the frame, float64
    stations: Tensor  # (B, R, 3) antennas east, north, up in the frame, m
    present: Tensor  # (B, R) bool
    timed: Tensor  # (B, R) bool: an arrival was measured, or is the reference's, and there is another
    strength_dbm: Tensor  # (B, R) without the noise, fading's mean added
    strength_db: Tensor  # (B, R) its standard deviation
    arrival_m: Tensor  # (B, R) arrival differences times the speed of light
    arrival_sigma_m: Tensor  # (B, R) clock error included
    loss: "StrengthModel"
    blocked_share: float = 0.0  # of the links; their arrivals are late by an exponential law
    blocked_m: float = 0.0  # its mean
    power_known: bool = True  # else one offset of all strengths is unknown, and eliminated

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another float dtype; the origin stays float64."""
        names = ("stations", "strength_dbm", "strength_db", "arrival_m", "arrival_sigma_m")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


@dataclass(frozen=True, slots=True)
class StrengthModel:
    """Strength over distance, as two straight lines over log distance that meet at 1 km; and the height to expect.

    Models with other slopes have a table of the power from 10 m to 10 000 km, in steps of equal ratio.
    """

    power_at_km_dbm: float
    near: float  # exponent below 1 km
    far: float
    tx_height_m: float  # above the ellipsoid, antenna included
    table_dbm: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: GenerateConfig) -> "StrengthModel":
        """The model of a configuration, its transmit power and gains included."""
        total = config.tx_power_dbm + config.tx_gain_dbi + config.rx_gain_dbi
        at_km = float(path_loss_db(config, np.array([_BREAK_M]))[0])
        near, far = loss_exponent(config, np.array([_BREAK_M / 2, _BREAK_M * 2])).tolist()
        table: tuple[float, ...] = ()
        if config.loss in ("ground_wave", "two_ray"):
            table = tuple((total - path_loss_db(config, np.logspace(1, 7, 6 * _PER_DECADE + 1))).tolist())
        return cls(total - at_km, near, far, TX_HEIGHT_M + config.tx_antenna_m, table)

    def power_dbm(self, distance_m: Tensor) -> tuple[Tensor, Tensor]:
        """Median received power, and the exponent there."""
        if self.table_dbm:
            return self._looked_up(distance_m)
        exponent = self.near + (self.far - self.near) * (distance_m > _BREAK_M).to(distance_m.dtype)
        d = distance_m.clamp(min=_MIN_DISTANCE_M)
        return self.power_at_km_dbm - 10 * exponent * torch.log10(d / _BREAK_M), exponent

    def _looked_up(self, distance_m: Tensor) -> tuple[Tensor, Tensor]:
        table = distance_m.new_tensor(self.table_dbm)
        at = _PER_DECADE * (torch.log10(distance_m.clamp(min=_MIN_DISTANCE_M)) - 1)
        low = at.floor().clamp(max=len(table) - 2).long()
        step = table[low + 1] - table[low]
        return table[low] + (at - low) * step, step * (-_PER_DECADE / 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A position for every sample, and how sure."""

    position: Tensor  # (B, 2) east, north, m
    covariance: Tensor  # (B, 2, 2) m²
    cost: Tensor  # (B,) half the sum of squared whitened residuals
    emission_m: Tensor  # (B,) emission time times the speed of light, on the reference's clock


def observe(
    rows: SampleRows, config: GenerateConfig, noise: NoiseModel | None = None, *, power_known: bool = True
) -> Observations:
    """Measurements of a batch in its local frame, in float64.

    rows  features (B, R, F, 4), present (B, R), receivers (B, R, 3), reference (B,), as a dataset holds them
    """
    noise = noise or NoiseModel()
    present, features = rows["present"], rows["features"].double()
    ground = rows["receivers"].double()
    weight = present.to(ground.dtype)[..., None]
    origin = (ground * weight).sum(1) / weight.sum(1).clamp(min=1)  # (B, 3) mean of the present receivers
    antennas = torch.cat([ground[..., :2], ground[..., 2:] + config.rx_antenna_m], -1)
    stations = to_local(antennas, origin[:, None])
    ones = torch.ones_like(stations[..., 0])
    is_reference = torch.arange(present.shape[1], device=present.device) == rows["reference"][:, None]
    unmeasured = (features[..., _ARRIVAL, _MEAN] == 0) & (features[..., _SIGMA, _MIN] >= 0.99 * UNKNOWN_SIGMA_US)
    timed = present & (is_reference | ~unmeasured) & (config.clock != "none")
    snr_db = features[..., _SNR, _MEAN]
    strength = snr_db + features[..., _FLOOR, _MEAN] - noise.strength_bias_db
    sigma_db = max(math.hypot(config.shadowing_db, config.station_gain_db, noise.strength_db), _MIN_SIGMA_DB)
    spread = torch.nan_to_num(features[..., _ARRIVAL, _STD], nan=_USUAL_SPREAD_US)
    spread = spread * (noise.timing_spread / math.sqrt(NUM_CHUNKS))
    variance = (config.clock_sigma_s * 1e6) ** 2 + noise.timing_us**2 + spread.square()
    sigma_us = (variance + noise.timing_snr_us**2 * 10 ** (-snr_db / 10)).sqrt()
    return Observations(
        origin=origin,
        stations=torch.where(present[..., None], stations, 0.0),
        present=present,
        timed=timed & (timed.sum(-1, keepdim=True) > 1),  # one alone determines the emission time and nothing else
        strength_dbm=torch.where(present, strength, 0.0),
        strength_db=sigma_db * ones,
        arrival_m=torch.where(present, METRES_PER_US * features[..., _ARRIVAL, _MEAN], 0.0),
        arrival_sigma_m=torch.where(present, (METRES_PER_US * sigma_us).clamp(min=_MIN_SIGMA_M), 1.0),
        loss=StrengthModel.of(config),
        blocked_share=config.blocked_share if config.blocked_delay_us else 0.0,
        blocked_m=METRES_PER_US * config.blocked_delay_us,
        power_known=power_known,
    )


def target(rows: SampleRows, origin: Tensor, config: GenerateConfig) -> Tensor:
    """(B, 2) the true position in the frame: its latitude and longitude at the height a solver assumes."""
    place = rows["transmitter"].double()
    level = torch.full_like(place[:, 2], StrengthModel.of(config).tx_height_m)
    return to_local(torch.cat([place[:, :2], level[:, None]], -1), origin)[:, :2]


def geographic(position: Tensor, origin: Tensor, height_m: float = TX_HEIGHT_M) -> Tensor:
    """(B, 3) latitude, longitude and height of positions in the frame.

    position  (B, 2)  m
    origin    (B, 3)  of the frame
    """
    level = position.double()
    up = _level_up(level, origin[:, 2], height_m)
    for _ in range(2):  # the sphere is near; what is left of the height is taken off
        place = from_local(torch.cat([level, up[:, None]], -1), origin)
        up = up + height_m - place[:, 2]
    return from_local(torch.cat([level, up[:, None]], -1), origin)


def calibrate(rows: SampleRows, config: GenerateConfig, *, power_known: bool = True) -> NoiseModel:
    """The noise model of a dataset whose transmitters are known: strengths by moments, arrivals by likelihood.

    Where the power is not known, strengths count relative to the mean of their sample.
    """
    seen = observe(rows, config, NoiseModel(strength_bias_db=0.0))
    true = target(rows, seen.origin, config)
    distance = _ranges(seen, true[:, None])[0][:, 0]
    left_db = seen.strength_dbm - seen.loss.power_dbm(distance)[0]
    count = seen.present.sum(-1, keepdim=True).clamp(min=1)
    if not power_known:
        left_db = left_db - torch.where(seen.present, left_db, 0.0).sum(-1, keepdim=True) / count
    free = float((count - 1).sum()) if not power_known else float(seen.present.sum()) - 1
    bias = 0.0 if not power_known else float(left_db[seen.present].mean())
    variance = float((left_db[seen.present] - bias).square().sum()) / max(free, 1.0)
    excess = max(variance - config.shadowing_db**2, 0.0) ** 0.5 if free > 0 else 0.0
    best = NoiseModel(strength_bias_db=bias, strength_db=excess)
    lowest = math.inf
    for factors in (4.0, 2.0, 2**0.5, 2**0.25):  # coordinate search of the three timing terms
        for name in ("timing_us", "timing_snr_us", "timing_spread"):
            value = getattr(best, name)
            for factor in (1 / factors, 1.0, factors):
                trial = replace(best, **{name: value * factor})
                cost = float(_timing_nll(observe(rows, config, trial), distance))
                if cost < lowest:
                    best, lowest = trial, cost
    return best


def _timing_nll(seen: Observations, distance: Tensor) -> Tensor:
    """Negative log likelihood of the arrivals at known distances; the emission time is eliminated, or fitted."""
    if seen.blocked_share:
        emission = _fitted_emission(seen, distance[:, None])
        time = (distance[:, None] + emission[..., None] - seen.arrival_m[:, None]) * (
            seen.timed / seen.arrival_sigma_m
        )[:, None]
        cost = _time_loss(seen, time, math.inf)[0][:, 0].sum(-1) + (seen.timed * seen.arrival_sigma_m.log()).sum(-1)
        return torch.where(seen.timed.sum(-1) > 1, cost, 0.0).mean()
    weight = seen.timed / seen.arrival_sigma_m.square()
    total = weight.sum(-1).clamp(min=1e-30)
    left = seen.arrival_m - distance
    left = left - ((weight * left).sum(-1) / total)[:, None]
    size = (weight * left.square()).sum(-1) + 2 * (seen.timed * seen.arrival_sigma_m.log()).sum(-1) + total.log()
    return torch.where(seen.timed.sum(-1) > 1, size, 0.0).mean()


def centroid(seen: Observations) -> Solution:
    """Mean of the stations, weighted by received power; its covariance is the stations' own scatter."""
    power = torch.where(seen.present, seen.strength_dbm, -1e6)
    weight = torch.softmax(power * (math.log(10) / 10), -1)[..., None]
    place = (weight * seen.stations[..., :2]).sum(1)
    off = (seen.stations[..., :2] - place[:, None]) * seen.present[..., None]
    scatter = off.mT @ off / seen.present.sum(-1).clamp(min=1)[:, None, None]
    nothing = torch.zeros_like(place[:, 0])
    return Solution(position=place, covariance=scatter, cost=nothing, emission_m=nothing)


def by_strength(seen: Observations, config: SolverConfig | None = None) -> Solution:
    return solve(replace(seen, timed=torch.zeros_like(seen.timed)), config)


def solve(seen: Observations, config: SolverConfig | None = None) -> Solution:
    """Gauss-Newton on arrival differences and strength, from several starts; the lowest cost wins."""
    config = config or SolverConfig()
    area = _search_area(seen, config)
    starts = _grid_starts(seen.to(torch.float32), config, area.to(torch.float32)).to(area.dtype)
    place = torch.cat([starts, centroid(seen).position[:, None]], 1)
    at = _linearise(seen, config, place, _emission(seen, place))
    damping = torch.full_like(at.cost, 1e-3)
    for _ in range(config.steps):
        at, damping = _step(seen, config, at, damping, area)
    best = at.cost.argmin(1, keepdim=True)

    def pick(value: Tensor) -> Tensor:
        index = best.reshape(len(best), 1, *[1] * (value.ndim - 2)).expand(-1, 1, *value.shape[2:])
        return value.gather(1, index)[:, 0]

    return Solution(
        position=pick(at.place), covariance=invert(pick(at.normal)), cost=pick(at.cost), emission_m=pick(at.emission)
    )


def drop_one(seen: Observations, config: SolverConfig | None = None) -> Solution:
    """The answer without the one arrival that contradicts the others most, where there is such a one."""
    best, config = solve(seen, config), config or _QUICK
    whole, spare = best.cost, seen.timed.sum(-1) > _LEAST_TIMED
    for number in range(seen.timed.shape[1]):
        dropped = torch.arange(seen.timed.shape[1], device=seen.timed.device) == number
        one = solve(replace(seen, timed=seen.timed & ~dropped), config)
        better = spare & seen.timed[:, number] & (one.cost < torch.minimum(best.cost, whole - _WORTH_DROPPING))
        best = Solution(
            **{
                name: torch.where(better.view(-1, *[1] * (old.ndim - 1)), getattr(one, name), old)
                for name, old in ((item.name, getattr(best, item.name)) for item in fields(best))
            }
        )
    return best


class GridPosterior(NamedTuple):
    """The posterior on the finest grid whose H likeliest cells hold nearly all of it."""

    log_weight: Tensor  # (B, H)
    middle: Tensor  # (B, H, 2) m
    side: Tensor  # (B, H, 2) m


def grid_posterior(seen: Observations, config: SolverConfig | None = None) -> GridPosterior:
    """The likelihood over the search area, on cells that are divided again and again where it is high.

    Arrivals are blurred by the pitch of the grid.
    """
    config, seen = config or SolverConfig(), seen.to(torch.float32)
    area = _search_area(seen, config)
    side = ((area[:, 1] - area[:, 0]) / _GRID_ROOT)[:, None]  # (B, 1, 2) of a cell
    step = torch.arange(_GRID_ROOT, dtype=area.dtype, device=area.device) + 0.5
    place = area[:, None, 0] + side * torch.stack(torch.meshgrid(step, step, indexing="ij"), -1).reshape(1, -1, 2)
    inner = (torch.arange(_GRID_FINER, dtype=area.dtype, device=area.device) + 0.5) / _GRID_FINER - 0.5
    shifts = torch.stack(torch.meshgrid(inner, inner, indexing="ij"), -1).reshape(1, 1, -1, 2)
    posterior: GridPosterior | None = None
    fits = torch.ones_like(seen.present[:, 0])
    for _ in range(_GRID_LEVELS + 1):
        height = _log_likelihood(seen, place, side.amax((-2, -1)))
        best = height.topk(_GRID_CELLS, -1)
        kept = place.gather(1, best.indices[..., None].expand(-1, -1, 2))
        finer = GridPosterior(best.values, kept, side.expand_as(kept))
        if posterior is not None:
            fits = fits & ((best.values.logsumexp(-1) - height.logsumexp(-1)).exp() > _GRID_HELD)
            finer = GridPosterior(
                *(torch.where(fits.view(-1, *[1] * (o.ndim - 1)), n, o) for n, o in zip(finer, posterior, strict=True))
            )
        posterior = finer
        place = (kept[:, :_GRID_WIDTH, None] + shifts * side[:, :, None]).flatten(1, 2)
        side = side / _GRID_FINER
    assert posterior is not None
    return posterior


def _log_likelihood(seen: Observations, place: Tensor, pitch: Tensor) -> Tensor:
    """(B, S) up to a constant, with arrivals blurred by the pitch (B,) of the places."""
    sigma = (seen.arrival_sigma_m.square() + (pitch[:, None] / 3).square()).sqrt()
    blurred = replace(seen, arrival_sigma_m=sigma)
    distance, _ = _ranges(blurred, place)
    strength, _, time, _ = _left(blurred, distance, _emission(blurred, place))
    return -(_huber(strength, _GRID_LIMIT)[0] + _time_loss(blurred, time, _GRID_LIMIT)[0]).sum(-1)


def solver_batch(device: torch.device) -> int:
    """Samples to solve at once: the grid search holds a value per point and receiver; a cache's worth, or a GPU's."""
    return 64 if device.type == "cpu" else 4096


def residuals(seen: Observations, solution: Solution) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of times and strengths in their standard deviations, 0 where there is none; and distances in m.

    Each (B, R).
    """
    distance, _ = _ranges(seen, solution.position[:, None])
    strength, _, time, _ = _left(seen, distance, solution.emission_m[:, None])
    return time[:, 0], strength[:, 0], distance[:, 0]


def invert(matrix: Tensor) -> Tensor:
    """Inverse of symmetric positive 2 x 2 matrices, (..., 2, 2); nearly singular ones get a large, finite one."""
    a, b, d = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 1]
    floor = 1e-9 * (a + d)  # 1e-9 of the better axis: no direction is 30 000 times worse known than another
    a, d = a + floor, d + floor
    det = (a * d - b * b).clamp(min=torch.finfo(matrix.dtype).tiny)
    return torch.stack([torch.stack([d, -b], -1), torch.stack([-b, a], -1)], -2) / det[..., None, None]


# The search


class _At(NamedTuple):
    """The cost at a point, and the normal equations with the emission time eliminated; leading axes (B, S)."""

    place: Tensor  # (B, S, 2)
    emission: Tensor  # (B, S)
    cost: Tensor  # (B, S)
    normal: Tensor  # (B, S, 2, 2)
    slope: Tensor  # (B, S, 2) gradient
    emission_terms: Tensor  # (B, S, 4): gradient, two mixed terms, stiffness


def _level_up(level: Tensor, origin_alt: Tensor, height_m: float) -> Tensor:
    """Height in the frame of points at a height above the ground, which curves away from the frame's plane."""
    return height_m - origin_alt - level.square().sum(-1) / (2 * EARTH_RADIUS_M)


def _ranges(seen: Observations, place: Tensor) -> tuple[Tensor, Tensor]:
    """Distances (B, S, R) of places (B, S, 2) to the stations, and their derivatives (B, S, R, 2)."""
    alt = seen.origin[:, 2].to(place.dtype)[:, None]
    up = _level_up(place, alt, seen.loss.tx_height_m)
    off = torch.cat([place, up[..., None]], -1)[:, :, None] - seen.stations[:, None]
    distance = off.square().sum(-1).sqrt().clamp(min=_MIN_DISTANCE_M)
    tilt = -off[..., 2:] * (place / EARTH_RADIUS_M)[:, :, None]
    return distance, (off[..., :2] + tilt) / distance[..., None]


def _left(seen: Observations, distance: Tensor, emission: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whitened residuals of strength and time with their derivatives by distance, each (B, S, R)."""
    expected, exponent = seen.loss.power_dbm(distance)
    weight = (seen.present / seen.strength_db)[:, None]
    strength = (expected - seen.strength_dbm[:, None]) * weight
    if not seen.power_known:
        strength = strength - weight * _level(strength, weight)
    per_metre = -10 * exponent / (math.log(10) * distance) * weight
    certain = (seen.timed / seen.arrival_sigma_m)[:, None]
    time = (distance + emission[..., None] - seen.arrival_m[:, None]) * certain
    return strength, per_metre, time, certain


def _linearise(seen: Observations, config: SolverConfig, place: Tensor, emission: Tensor) -> _At:
    distance, slope = _ranges(seen, place)
    strength, per_metre, time, certain = _left(seen, distance, emission)
    robust = _geman_mcclure if config.redescending else _huber
    cost_s, pull_s, weight_s = robust(strength, config.huber)
    cost_t, pull_t, weight_t = _time_loss(seen, time, config.huber, robust)
    rows_s = slope * per_metre[..., None]  # (B, S, R, 2)
    if not seen.power_known:
        weight = (seen.present / seen.strength_db)[:, None, :, None]
        rows_s = rows_s - weight * _level(rows_s, weight, -2)
    normal_s, grad_s = _normal(rows_s, pull_s, weight_s)
    normal_t, grad_t = _normal(slope * certain[..., None], pull_t, weight_t)
    # The emission time is eliminated: what it would take up of a step is taken off the arrivals' share.
    own = weight_t * certain
    mixed = (slope * certain[..., None] * own[..., None]).sum(-2)
    stiff, pull = (own * certain).sum(-1), (certain * pull_t).sum(-1)
    share = mixed / stiff.clamp(min=1e-30)[..., None]
    terms = torch.cat([pull[..., None], mixed, stiff[..., None]], -1)
    normal = normal_s + (normal_t - share[..., :, None] * mixed[..., None, :])
    slope_t = grad_t - share * pull[..., None]
    return _At(place, emission, (cost_s + cost_t).sum(-1), normal, grad_s + slope_t, terms)


def _level(whitened: Tensor, weight: Tensor, axis: int = -1) -> Tensor:
    """The offset of all strengths that fits best: their weighted mean over the receivers."""
    return (whitened * weight).sum(axis, keepdim=True) / weight.square().sum(axis, keepdim=True).clamp(min=1e-30)


def _normal(rows: Tensor, pull: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Normal matrix and gradient of the position from the loss's derivatives by residual, and those of residuals.

    rows          (B, S, R, 2)  derivatives of whitened residuals by position
    pull, weight  (B, S, R)
    """
    return (rows * weight[..., None]).mT @ rows, (rows * pull[..., None]).sum(-2)


def _step(seen: Observations, config: SolverConfig, at: _At, damping: Tensor, area: Tensor) -> tuple[_At, Tensor]:
    """One damped step from every start, taken where it lowers the cost."""
    lift = torch.diag_embed(at.normal.diagonal(dim1=-2, dim2=-1) * damping[..., None])
    move = -(invert(at.normal + lift) @ at.slope[..., None])[..., 0]
    place = torch.minimum(torch.maximum(at.place + move, area[:, None, 0]), area[:, None, 1])
    pull, mixed, stiff = at.emission_terms[..., 0], at.emission_terms[..., 1:3], at.emission_terms[..., 3]
    later = -(pull + (mixed * (place - at.place)).sum(-1)) / stiff.clamp(min=1e-30)  # the emission time follows
    new = _linearise(seen, config, place, at.emission + torch.where(stiff > 0, later, 0.0))
    better = new.cost < at.cost
    kept = [torch.where(better.reshape(*better.shape, *[1] * (n.ndim - 2)), n, o) for n, o in zip(new, at, strict=True)]
    return _At(*kept), torch.where(better, damping * 0.2, damping * 6).clamp(1e-9, 1e9)


def _huber(left: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cost, derivative and weight of whitened residuals: square up to the limit, linear beyond."""
    size = left.abs()
    cost = torch.where(size <= limit, 0.5 * left.square(), limit * size - 0.5 * limit**2)
    weight = limit / size.clamp(min=limit)
    return cost, weight * left, weight


def _geman_mcclure(left: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a loss that levels off: limit²·r² / (2·(limit² + r²))."""
    share = 1 / (1 + (left / limit).square())
    return 0.5 * left.square() * share, share.square() * left, share.square()


def _time_loss(
    seen: Observations, time: Tensor, limit: float, robust: RobustLoss = _huber
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for arrivals (B, S, R); where links may be blocked, the likelihood of a mixture: normal, or later by an
    exponential delay."""
    if not seen.blocked_share:
        return robust(time, limit) if math.isfinite(limit) else (0.5 * time.square(), time, torch.ones_like(time))
    rate = (seen.arrival_sigma_m / seen.blocked_m)[:, None]
    late = -time - rate
    below = torch.special.log_ndtr(late)
    clear = (
        math.log1p(-seen.blocked_share) - 0.5 * time.square() - _HALF_LOG_2PI if seen.blocked_share < 1 else -math.inf
    )
    blocked = math.log(seen.blocked_share) + rate.log() + 0.5 * rate.square() + rate * time + below
    total = torch.logaddexp(torch.as_tensor(clear, dtype=time.dtype, device=time.device), blocked)
    share = (blocked - total).exp()  # how likely this link is blocked
    hazard = (-0.5 * late.square() - _HALF_LOG_2PI - below).exp()
    pull = (1 - share) * time - share * (rate - hazard)
    weight = (1 - share) + share * (hazard * (hazard + late)).clamp(1e-3, 1.0)
    return torch.where(seen.timed[:, None], -total, 0.0), pull, weight


def _emission(seen: Observations, place: Tensor) -> Tensor:
    """(B, S) emission time in metres that fits best at given places."""
    return _fitted_emission(seen, _ranges(seen, place)[0])


def _fitted_emission(seen: Observations, distance: Tensor) -> Tensor:
    """(B, S) likewise, at given distances (B, S, R): the weighted mean, refined where links may be blocked."""
    certain = (seen.timed / seen.arrival_sigma_m)[:, None]
    early = (seen.arrival_m[:, None] - distance) * certain
    emission = (early * certain).sum(-1) / certain.square().sum(-1).clamp(min=1e-30)
    for _ in range(_EMISSION_STEPS if seen.blocked_share else 0):
        _, pull, weight = _time_loss(seen, emission[..., None] * certain - early, math.inf)
        stiff = (weight * certain.square()).sum(-1).clamp(min=1e-30)
        emission = emission - (certain * pull).sum(-1) / stiff
    return emission


def _search_area(seen: Observations, config: SolverConfig) -> Tensor:
    """(B, 2, 2) lowest and highest east and north."""
    flat, here = seen.stations[..., :2], seen.present[..., None]
    low = torch.where(here, flat, math.inf).amin(1) - config.margin_m
    high = torch.where(here, flat, -math.inf).amax(1) + config.margin_m
    area = torch.stack([low, high], 1)
    return torch.where(seen.present.any(-1)[:, None, None], area, 0.0)


def _grid_starts(seen: Observations, config: SolverConfig, area: Tensor) -> Tensor:
    """(B, starts, 2) lowest local minima of the cost on a grid, arrivals blurred by its pitch."""
    size = config.grid
    step = torch.linspace(0, 1, size, dtype=area.dtype, device=area.device)
    share = torch.stack(torch.meshgrid(step, step, indexing="ij"), -1).reshape(-1, 2)
    place = area[:, None, 0] + (area[:, None, 1] - area[:, None, 0]) * share  # (B, G, 2)
    pitch = ((area[:, 1] - area[:, 0]).amax(-1) / (size - 1))[:, None]
    blurred = replace(seen, arrival_sigma_m=(seen.arrival_sigma_m.square() + (pitch / 2).square()).sqrt())
    distance, _ = _ranges(blurred, place)
    strength, _, time, _ = _left(blurred, distance, _emission(blurred, place))
    cost = (_huber(strength, config.huber)[0] + _time_loss(blurred, time, config.huber)[0]).sum(-1)
    image = -cost.reshape(-1, 1, size, size)
    peak = torch.nn.functional.max_pool2d(image, 3, 1, 1) == image
    height = torch.where(peak, image, image - 1e6).flatten(1)  # others only when minima run out
    index = height.topk(config.starts, -1).indices
    return place.gather(1, index[..., None].expand(-1, -1, 2))

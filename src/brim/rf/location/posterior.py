"""Where one transmission came from, as a probability over the map: arrivals and strengths, with what may be wrong.

Axes: G points, R stations. A probability density is computed on cells of latitude and longitude: first on a coarse grid
of the whole area, with arrivals blurred by its pitch, then on finer and finer ones wherever a cell holds much of the
probability, be that one place or several.

The emission time and, unless it is known, the power are unknowns with flat priors, eliminated in closed form. Three
things may be wrong with the standard deviations, each a hypothesis with a small prior probability; the answer is the
average over them, weighted by how well each explains the measurements:

    scale    all arrivals are worse than claimed by one factor from 1 to 88, larger ones less likely. With several
             degrees of freedom their disagreement tells the factor, so that regions widen by χ² per degree of freedom
             as Student's distribution has it; with none, the prior alone keeps a tail.
    station  the arrival at one station is wrong by anything up to 10 ms. Only with four or more stations: among
             three no one can be found out.
    strength as scale, for the strengths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef

F64 = NDArray[np.float64]
B1 = NDArray[np.bool_]
PathLengths = Callable[[F64, F64], F64]  # latitude and longitude (G,) to distances (G, R), m

LEVELS = {"50": 0.50, "90": 0.90, "95": 0.95}  # probability inside the regions
SCALES: F64 = np.power(1.75, np.arange(9.0))  # 1 to 88
SCALE_PRIOR = 0.04  # that the standard deviations of the arrivals are too small
STATION_PRIOR = 0.10  # that one station's clock is wrong, all stations together
STRENGTH_SCALES = np.array([1.0, 1.5, 2.2, 3.3])
STRENGTH_PRIOR = 0.05
REACH = 0.3  # rms distances of the stations from their middle by which a place outside of them is less likely
MIN_REACH_M = 20_000.0
WRONG_US = (1.0, 1e4)  # least and greatest error of a wrong clock, log-uniform
ROOT = 2  # blocks per side of the coarsest grid
BLOCK = 32  # cells per side of a block
_FINER = 4  # times finer is the next grid, in those quarters of a block's side where it is needed
_MUCH = 0.003  # probability of a cell that is refined
_SOME = 1e-4  # of one that is refined because its pitch blurs the arrivals
_MAX_LEVELS, _MAX_BLOCKS = 9, 600
_EARTH_M = 6_371_000.0
_US_PER_M = 1e6 / SPEED_OF_LIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One transmission as measured by R stations."""

    name: str
    stations: tuple[str, ...]
    lat: F64  # (R,) degrees
    lon: F64
    timed: B1  # (R,) its arrival counts
    arrival_us: F64  # (R,) on clocks with one common, unknown offset
    arrival_sigma_us: F64  # (R,) independent between stations
    heard: B1  # (R,) its strength counts
    strength_db: F64  # (R,)
    strength_sigma_db: F64  # (R,)
    travel_us: Callable[[F64], F64]  # time over distances in m
    travel_sigma_us: Callable[[F64], F64]  # what the propagation model does not know, over distances in m
    lengths: PathLengths
    power_dbm: Callable[[F64], F64]  # median received power over distances, up to a constant if the power is unknown
    power_known: bool
    margin_m: float  # around the stations


@dataclass(frozen=True, slots=True)
class Cells:
    """The posterior on cells that do not overlap and fill the area searched."""

    lat: F64  # (N,) centres, degrees
    lon: F64
    tall: F64  # (N,) degrees
    wide: F64
    log_density: F64  # (N,) per m², the highest is 0

    @property
    def area_m2(self) -> F64:
        degree = math.pi / 180 * _EARTH_M
        return self.tall * self.wide * degree**2 * np.cos(np.radians(self.lat))

    @property
    def mass(self) -> F64:
        return np.exp(self.log_density) * self.area_m2

    def at(self, index: Any) -> "Cells":
        return Cells(*(getattr(self, name)[index] for name in ("lat", "lon", "tall", "wide", "log_density")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What is known about the place."""

    sighting: Sighting
    cells: Cells
    highest: float  # log density of the likelihood where that of the cells is 0
    thresholds: dict[str, float]  # log density at the edge of the regions, by level
    region_m2: dict[str, float]
    covariance_m2: F64  # (2, 2) east and north
    wrong: F64  # (R,) probability that the station's arrival is wrong
    at_edge: float  # probability at the edge of the area that was searched

    def log_density(self, lat: F64, lon: F64) -> F64:
        """(G,) at places, on the scale of the cells."""
        return Likelihood(self.sighting)(lat, lon) - self.highest


def locate_sighting(sighting: Sighting) -> Posterior:
    """The posterior of one transmission."""
    likelihood = Likelihood(sighting)
    cells = _refined(likelihood, sighting)
    highest = float(cells.log_density.max())
    cells = replace(cells, log_density=cells.log_density - highest)
    mass, area = cells.mass, cells.area_m2
    total = float(mass.sum())
    order = np.argsort(-cells.log_density)
    inside = np.cumsum(mass[order]) / total
    ends = {name: min(int(np.searchsorted(inside, level)), len(order) - 1) for name, level in LEVELS.items()}
    return Posterior(
        sighting=sighting,
        cells=cells,
        highest=highest,
        thresholds={name: float(cells.log_density[order[end]]) for name, end in ends.items()},
        region_m2={name: float(area[order[: end + 1]].sum()) for name, end in ends.items()},
        covariance_m2=_covariance(cells, float(cells.log_density[order[ends["95"]]])),
        wrong=_wrong(likelihood, cells),
        at_edge=_edge_share(sighting, cells),
    )


# The likelihood


class Likelihood:
    """Log densities of a sighting's measurements at places; constants that no hypothesis changes are left out."""

    def __init__(self, sighting: Sighting) -> None:
        self._seen = sighting
        self._num_timed = int(sighting.timed.sum())
        self._num_heard = int(sighting.heard.sum())
        lat, lon = sighting.lat, sighting.lon
        self._box = float(lat.min()), float(lat.max()), float(lon.min()), float(lon.max())
        spread = np.hypot(lat - lat.mean(), (lon - lon.mean()) * np.cos(np.radians(lat)))
        self._reach_m = max(REACH * math.radians(float(np.sqrt((spread**2).mean()))) * _EARTH_M, MIN_REACH_M)
        bad = STATION_PRIOR if self._num_timed >= 4 else 0.0
        self._log_station = math.log(bad / self._num_timed) if bad else -math.inf
        self._log_good = math.log1p(-bad)

    def __call__(self, lat: F64, lon: F64, blur_m: float = 0.0) -> F64:
        """(G,) log density up to a constant, averaged over the hypotheses; blurred by the pitch of a grid."""
        good, wrong = self.hypotheses(lat, lon, blur_m)
        return np.logaddexp(good, _log_sum(wrong))

    def hypotheses(self, lat: F64, lon: F64, blur_m: float = 0.0) -> tuple[F64, F64]:
        """Log densities if all clocks are right (G,), and if one is wrong, by station (G, R)."""
        distance = self._seen.lengths(lat, lon)  # (G, R)
        base = self._prior(lat, lon) + self._strength(distance)
        good, wrong = self._timing(distance, blur_m)
        return base + good, base[:, None] + wrong

    def is_blurred(self, cells: "Cells", pitch_m: float) -> B1:
        """(N,) whether a grid of this pitch changes the density: its blur is a good part of an arrival's sigma."""
        least = np.where(self._seen.timed, self._seen.arrival_sigma_us, np.inf).min()
        blur_us = pitch_m / 2 * _US_PER_M
        if blur_us < 0.4 * least:
            return np.zeros(len(cells.lat), bool)
        _, variance = self._arrivals(self._seen.lengths(cells.lat, cells.lon), 0.0)
        return np.asarray(blur_us**2 > 0.16 * np.where(self._seen.timed, variance, np.inf).min(-1))

    def _prior(self, lat: F64, lon: F64) -> F64:
        """Uniform between the stations, falling with the fourth power of the distance from the box around them."""
        low, high, west, east = self._box
        outside = np.maximum(np.maximum(low - lat, lat - high), 0.0)
        beside = np.maximum(np.maximum(west - lon, lon - east), 0.0) * np.cos(np.radians(lat))
        squared: F64 = (outside**2 + beside**2) * (math.pi / 180 * _EARTH_M / self._reach_m) ** 2
        return -2 * np.log1p(squared)

    def _strength(self, distance: F64) -> F64:
        seen = self._seen
        unknown = 0 if seen.power_known else 1
        if self._num_heard <= unknown:
            return np.zeros(len(distance))
        left = np.where(seen.heard, seen.strength_db - seen.power_dbm(distance), 0.0)
        weight = seen.heard / seen.strength_sigma_db**2
        squares = (weight * left**2).sum(-1)
        if unknown:
            squares = squares - (weight * left).sum(-1) ** 2 / weight.sum()
        return _scaled(squares, self._num_heard - unknown, STRENGTH_SCALES, STRENGTH_PRIOR)

    def _timing(self, distance: F64, blur_m: float) -> tuple[F64, F64]:
        seen, none = self._seen, np.full(distance.shape, -np.inf)
        if self._num_timed < 2:
            return np.zeros(len(distance)), none
        left, variance = self._arrivals(distance, blur_m)
        weight = seen.timed / variance
        total, pull, squares = weight.sum(-1), (weight * left).sum(-1), (weight * left**2).sum(-1)
        norm = 0.5 * np.where(seen.timed, np.log(weight.clip(1e-300)), 0.0)  # (G, R)
        fit = squares - pull**2 / total
        good = norm.sum(-1) - 0.5 * np.log(total) + _scaled(fit, self._num_timed - 1, SCALES, SCALE_PRIOR)
        if self._log_station == -math.inf:
            return good + self._log_good, none
        # Without station j: the same sums less its term; its error has the log-uniform density.
        rest = (total[:, None] - weight).clip(1e-300)
        rest_pull = pull[:, None] - weight * left
        rest_fit = squares[:, None] - weight * left**2 - rest_pull**2 / rest
        off = np.abs(left - rest_pull / rest).clip(WRONG_US[0])
        density = -np.log(2 * off * math.log(WRONG_US[1] / WRONG_US[0]))
        one = norm.sum(-1)[:, None] - norm - 0.5 * (np.log(rest) + rest_fit) + density + 0.5 * math.log(2 * math.pi)
        return good + self._log_good, np.where(seen.timed, one + self._log_station, -np.inf)

    def _arrivals(self, distance: F64, blur_m: float) -> tuple[F64, F64]:
        """Arrivals less travel times, and their variances, µs (G, R)."""
        seen = self._seen
        left = np.where(seen.timed, seen.arrival_us - seen.travel_us(distance), 0.0)
        variance = seen.arrival_sigma_us**2 + seen.travel_sigma_us(distance) ** 2 + (blur_m / 2 * _US_PER_M) ** 2
        return left, variance

    def fit(self, lat: float, lon: float, wrong: F64) -> "Fit":
        """How well one place explains the measurements, without stations more likely wrong than right.

        wrong  (R,)  probability that the arrival is wrong
        """
        seen = self._seen
        distance = seen.lengths(np.array([lat]), np.array([lon]))
        left, variance = (part[0] for part in self._arrivals(distance, 0.0))
        used = seen.timed & (wrong <= 0.5)
        good = used / variance
        others = good.sum() - good
        mean = ((good * left).sum() - good * left) / np.where(others > 0, others, 1.0)
        off = np.where(seen.timed & (others > 0), left - mean, 0.0)
        chi2, dof = 0.0, -2
        if used.sum() > 1:
            chi2 += float((good * left**2).sum() - (good * left).sum() ** 2 / good.sum())
            dof += int(used.sum()) - 1
        unknown = 0 if seen.power_known else 1
        if self._num_heard > unknown:
            level = np.where(seen.heard, seen.strength_db - seen.power_dbm(distance)[0], 0.0)
            certain = seen.heard / seen.strength_sigma_db**2
            chi2 += float((certain * level**2).sum() - unknown * (certain * level).sum() ** 2 / certain.sum())
            dof += self._num_heard - unknown
        return Fit(off, np.sqrt(variance), distance[0], chi2, max(dof, 0))


@dataclass(frozen=True, slots=True)
class Fit:
    """Measurements against one place."""

    off_us: F64  # (R,) arrival minus what the other stations say
    sigma_us: F64  # (R,) standard deviation of the arrival, propagation included
    distance_m: F64  # (R,)
    chi2: float
    dof: int


def _scaled(squares: F64, count: int, scales: F64, prior: float) -> F64:
    """Log of the mean over scales k of k^−count · exp(−squares / 2k²).

    The first has the weight 1 − prior, the others share the prior in inverse proportion to them.
    """
    share = prior / scales / (1 / scales[1:]).sum()
    share[0] = 1 - prior
    log_weight = np.log(share) - count * np.log(scales)
    best = -0.5 * squares + log_weight[0]
    for scale, log in zip(scales[1:], log_weight[1:], strict=True):
        best = np.logaddexp(best, -0.5 * squares / scale**2 + log)
    return np.asarray(best)


def _log_sum(values: F64) -> F64:
    """Log of the sum of exponentials along the last axis; minus infinity where there is none."""
    high = values.max(-1)
    safe = np.where(np.isfinite(high), high, 0.0)
    total: F64 = np.exp(values - safe[..., None]).sum(-1)
    return np.where(np.isfinite(high), safe + np.log(total.clip(1e-300)), -np.inf)


# Cells


def search_area(sighting: Sighting) -> tuple[float, float, float, float]:
    """South, north, west and east of the stations and their surroundings."""
    lift = math.degrees(sighting.margin_m / _EARTH_M)
    south, north = max(float(sighting.lat.min()) - lift, -89.0), min(float(sighting.lat.max()) + lift, 89.0)
    side = lift / max(math.cos(math.radians(max(abs(south), abs(north)))), 0.02)
    return south, north, float(sighting.lon.min()) - side, float(sighting.lon.max()) + side


def _refined(likelihood: Likelihood, sighting: Sighting) -> Cells:
    """Cells of which none holds much; a level's blocks are computed at once."""
    south, north, west, east = search_area(sighting)
    rows, columns = (axis.ravel() for axis in np.meshgrid(np.arange(ROOT), np.arange(ROOT), indexing="ij"))
    tall, wide = (north - south) / ROOT, (east - west) / ROOT
    corner = np.stack([south + tall * rows, west + wide * columns], -1)  # (blocks, 2)
    done: list[Cells] = []
    mass_done = 0.0
    highest = -math.inf
    for level in range(_MAX_LEVELS):
        side = wide * math.cos(math.radians((south + north) / 2))
        pitch_m = math.radians(max(tall, side) / BLOCK) * _EARTH_M
        cells = _block_cells(likelihood, corner, tall, wide, pitch_m)
        top = float(cells.log_density.max())
        mass_done *= math.exp(highest - max(highest, top)) if done else 0.0
        highest = max(highest, top)
        mass = np.exp(cells.log_density - highest) * cells.area_m2
        share = mass / (mass_done + mass.sum())
        heavy = (share > _MUCH) | ((share > _SOME) & likelihood.is_blurred(cells, pitch_m))
        part = BLOCK // _FINER
        split = (len(corner), _FINER, part, _FINER, part)
        again = heavy.reshape(split).any((2, 4))  # (blocks, 4, 4)
        if level + 1 == _MAX_LEVELS or again.sum() > _MAX_BLOCKS:
            again[:] = False
        stays = ~np.broadcast_to(again[:, :, None, :, None], split).reshape(-1)
        done.append(cells.at(stays))
        mass_done += float(mass[stays].sum())
        if not again.any():
            break
        tall, wide = tall / _FINER, wide / _FINER
        block, row, column = np.nonzero(again)
        corner = corner[block] + np.stack([row * tall, column * wide], -1)
    names = ("lat", "lon", "tall", "wide", "log_density")
    return Cells(*(np.concatenate([getattr(part, name) for part in done]) for name in names))


def _block_cells(likelihood: Likelihood, corner: F64, tall: float, wide: float, pitch_m: float) -> Cells:
    """All cells of blocks with these south-western corners (blocks, 2), block after block, row after row."""
    middle = (np.arange(BLOCK) + 0.5) / BLOCK
    shape = (len(corner), BLOCK, BLOCK)
    lat = np.broadcast_to((corner[:, :1] + tall * middle)[:, :, None], shape).ravel()
    lon = np.broadcast_to((corner[:, 1:] + wide * middle)[:, None, :], shape).ravel()
    step = np.full(len(lat), tall / BLOCK), np.full(len(lat), wide / BLOCK)
    return Cells(lat, lon, *step, likelihood(lat, lon, pitch_m))


def _covariance(cells: Cells, threshold: float) -> F64:
    """Of the 95 % region, enlarged by what a normal distribution has beyond it; thin tails would hide it."""
    weight = np.where(cells.log_density >= threshold, cells.mass, 0.0)
    weight = weight / weight.sum()
    lat, lon = float(weight @ cells.lat), float(weight @ cells.lon)
    degree = math.pi / 180 * _EARTH_M
    north, east = (cells.lat - lat) * degree, (cells.lon - lon) * degree * math.cos(math.radians(lat))
    own = (
        weight @ (cells.tall * degree) ** 2 / 12,
        weight @ (cells.wide * degree * math.cos(math.radians(lat))) ** 2 / 12,
    )
    mixed = float(weight @ (north * east))
    inner = np.array([[weight @ east**2 + own[1], mixed], [mixed, weight @ north**2 + own[0]]])
    return inner / (1 + math.log(0.05) * 0.05 / 0.95)


def _wrong(likelihood: Likelihood, cells: Cells) -> F64:
    """(R,) probability that a station's arrival is wrong, from the cells that hold nearly all."""
    order = np.argsort(-cells.mass)
    inside = np.cumsum(cells.mass[order])
    some = cells.at(order[: int(np.searchsorted(inside, 0.995 * inside[-1])) + 1])
    good, wrong = likelihood.hypotheses(some.lat, some.lon)
    together = np.logaddexp(good, _log_sum(wrong))
    share: F64 = np.exp(wrong - together[:, None]) * some.mass[:, None]
    return np.asarray(share.sum(0) / some.mass.sum())


def _edge_share(sighting: Sighting, cells: Cells) -> float:
    """Probability in the outermost cells of the search area."""
    south, north, west, east = search_area(sighting)
    edge = (cells.lat - south < cells.tall) | (north - cells.lat < cells.tall)
    edge |= (cells.lon - west < cells.wide) | (east - cells.lon < cells.wide)
    return float(cells.mass[edge].sum() / cells.mass.sum())


# Paths


def straight_lengths(lat: F64, lon: F64, alt: F64, height_m: float) -> PathLengths:
    """Straight lines to antennas (R,) from points at a height above the ellipsoid."""
    antennas = np.stack(ecef(lat, lon, alt), -1)  # (R, 3)

    def lengths(at_lat: F64, at_lon: F64) -> F64:
        place = np.stack(ecef(at_lat, at_lon, np.full_like(at_lat, height_m)), -1)
        return np.sqrt(sum((place[:, None, axis] - antennas[None, :, axis]) ** 2 for axis in range(3)))

    return lengths

"""How good positions and ellipses are, and how they leave and enter as JSON.

Axes: B samples, R receivers. Metrics are computed on the device of their input and come back as plain numbers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.errors import ConfigError
from brim.report.page import metres
from brim.rf.config import GenerateConfig
from brim.rf.features import FEATURES, MIN_SNR, STATISTICS, UNKNOWN_SIGMA_US, F
from brim.rf.location.fingerprints import Fingerprints
from brim.rf.location.model import Estimate, mixture_nll
from brim.rf.location.regions import MixtureRegion, draw_mixture, mixture_modes, mixture_regions
from brim.rf.location.solver import (
    NoiseModel,
    SampleRows,
    SolverConfig,
    by_strength,
    centroid,
    drop_one,
    geographic,
    grid_posterior,
    observe,
    solve,
    solver_batch,
    target,
)
from brim.rf.measurement import STATION_KEYS
from brim.rf.physics.link import noise_dbm

LEVELS = {"50": 0.50, "90": 0.90, "95": 0.95}  # probability inside the ellipses
WORST = 0.01  # share left out of crlb_ratio_trimmed
SNR_EDGES_DB = (10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0)
MIN_STATIONS = 3
_DRAWS = 500  # positions per sample that tell the regions of a mixture
_DRAWN_AT_ONCE = 1_024  # samples
_STRETCH_STEPS, _MOST_STRETCH = 4, 4.0
_STRETCH_CHANCE = 1.6  # two standard deviations of its logarithm, times the root of the samples
PLAIN_NAMES = {
    "centroid": "the centroid of the stations",
    "strength": "strength alone",
    "arrival_strength": "the solver",
    "geman_mcclure": "the solver with Geman-McClure loss",
    "drop_one": "the solver without its worst arrival",
    "unknown_power": "the solver with unknown power",
    "mixture": "the solver with the law of blocked paths",
    "grid": "the posterior on a grid",
    "fingerprint": "fingerprinting",
}
SAME = 0.01  # relative difference of median errors that is none


# Metrics


def metrics(estimate: Estimate, true: Tensor, crlb_m: Tensor) -> dict[str, Any]:
    """Errors in metres, against the bound, and coverage of the regions.

    true    (B, 2)  m
    crlb_m  (B,)    m
    """
    if not len(true):
        raise ConfigError("nothing to evaluate: the split has no samples; give a dataset with at least one")
    error = (estimate.position_en.double() - true.double()).norm(dim=-1)
    squares = (error / crlb_m.double()).square().sort().values
    kept = max(1, len(squares) - math.ceil(WORST * len(squares))) if len(squares) > 1 else 1
    return {
        "median_error_m": float(error.quantile(0.5)),
        "mean_error_m": float(error.mean()),
        "p95_error_m": float(error.quantile(0.95)),
        "crlb_ratio": float(squares.mean().sqrt()),
        "crlb_ratio_trimmed": float(squares[:kept].mean().sqrt()),
        "crlb_ratio_median": float(error.quantile(0.5) / crlb_m.double().quantile(0.5)),
        "coverage": coverage(estimate, true),
    }


def coverage(estimate: Estimate, true: Tensor) -> dict[str, float]:
    """Share of true positions inside the 50, 90 and 95 % regions."""
    level = levels_of(estimate, true)
    return {name: float((level <= share).double().mean()) for name, share in LEVELS.items()}


def levels_of(estimate: Estimate, true: Tensor) -> Tensor:
    """(B,) probability of the smallest region that holds the true position, float64; of mixtures by drawing from it."""
    if estimate.weights.shape[1] == 1:
        squares = mahalanobis(estimate.means[:, 0], estimate.roots[:, 0] @ estimate.roots[:, 0].mT, true)
        return -torch.expm1(-0.5 * squares)
    parts, draws = [], _DRAWS // (1 + estimate.weights.shape[1] // 64)
    for at in range(0, len(true), _DRAWN_AT_ONCE):
        part = Estimate(*(value[at : at + _DRAWN_AT_ONCE].cpu() for value in estimate))
        density = mixture_nll(part, true[at : at + _DRAWN_AT_ONCE].cpu().float())
        wide = Estimate(*(value.repeat_interleave(draws, 0) for value in part))
        drawn = draw_positions(part, draws, at)
        others = mixture_nll(wide, drawn.flatten(0, 1)).view(len(density), draws)
        parts.append((others < density[:, None]).double().mean(-1))
    return torch.cat(parts).to(true.device)


def fitted_stretch(estimate: Estimate, true: Tensor) -> float:
    """Factor on the standard deviations of the components with which the regions hold about what they say.

    It is exact where −log(1 − share), which grows with the square of a Gaussian's radius, is off by one factor; 1 where
    chance alone would do as much.
    """
    stretch = 1.0
    for _ in range(_STRETCH_STEPS):
        shares = coverage(estimate._replace(roots=estimate.roots * stretch), true)
        off = [math.log1p(-LEVELS[name]) / math.log1p(-min(max(held, 0.01), 0.999)) for name, held in shares.items()]
        stretch *= math.sqrt(sum(off) / len(off))
    if abs(math.log(stretch)) < _STRETCH_CHANCE / math.sqrt(len(true)):
        return 1.0
    return min(max(stretch, 1 / _MOST_STRETCH), _MOST_STRETCH)


def draw_positions(estimate: Estimate, count: int, number: int = 0) -> Tensor:
    """(B, count, 2) positions drawn from mixtures, the same each time."""
    rng = stream(0, "draws", number, device=torch.device("cpu"))
    pick = torch.multinomial(estimate.weights.float(), count, replacement=True, generator=rng)  # (B, count)
    noise = torch.randn(*pick.shape, 2, 1, generator=rng)
    row = torch.arange(len(pick))[:, None]
    return estimate.means[row, pick].float() + (estimate.roots[row, pick].float() @ noise)[..., 0]


def mahalanobis(position: Tensor, covariance: Tensor, true: Tensor) -> Tensor:
    """(B,) squared error in the ellipse's own units, float64."""
    east, north = (true.double() - position.double()).unbind(-1)
    a, b, d = (covariance[..., i, j].double() for i, j in ((0, 0), (0, 1), (1, 1)))
    det = (a * d - b * b).clamp(min=1e-30)
    return (d * east * east - 2 * b * east * north + a * north * north) / det


def ellipse_scale(level: float) -> float:
    """Half-axes of the ellipse that holds this probability, in standard deviations: in the plane √(−2 ln(1 − p))."""
    return math.sqrt(-2 * math.log1p(-level))


def breakdown(estimate: Estimate, true: Tensor, rows: SampleRows) -> dict[str, Any]:
    """Coverage by thirds of arrival sigma and of GDOP; error by mean SNR and by number of receivers."""
    here = rows["present"]
    count = here.sum(-1)

    def mean(column: str) -> Tensor:
        values = torch.where(here, rows["features"][..., F[column], 0].double(), 0.0)
        return values.sum(-1) / count.clamp(min=1)

    sigma = torch.where(here, rows["features"][..., F["arrival_sigma_us"], 2].double(), math.nan).nanmedian(-1).values
    snr, edges = mean("snr_db"), torch.tensor(SNR_EDGES_DB, dtype=torch.float64, device=here.device)
    inner = [f"{low:g}–{high:g}" for low, high in pairwise(SNR_EDGES_DB)]
    ranges = [f"<{SNR_EDGES_DB[0]:g}", *inner, f"≥{SNR_EDGES_DB[-1]:g}"]
    data = (estimate, true, rows["crlb_m"])
    return {
        "coverage_by_arrival_sigma": _by(_thirds(sigma), ("low", "middle", "high"), data),
        "coverage_by_gdop": _by(_thirds(rows["gdop"].double()), ("low", "middle", "high"), data),
        "error_by_snr_db": _by(torch.bucketize(snr, edges), ranges, data),
        "error_by_receivers": _by(count, [str(n) for n in range(here.shape[1] + 1)], data),
    }


def _thirds(values: Tensor) -> Tensor:
    """(B,) 0, 1 or 2 by rank; ties fall where the sort puts them."""
    return values.argsort(stable=True).argsort() * 3 // max(len(values), 1)


def _by(group: Tensor, names: Any, data: tuple[Estimate, Tensor, Tensor]) -> dict[str, Any]:
    """Metrics of every group that has samples, with their number."""
    out = {}
    for number, name in enumerate(names):
        inside = group == number
        if bool(inside.any()):
            estimate, true, bound = Estimate(*(part[inside] for part in data[0])), data[1][inside], data[2][inside]
            out[name] = {"samples": int(inside.sum())} | metrics(estimate, true, bound)
    return out


def baselines(
    rows: SampleRows,
    config: GenerateConfig,
    noise: NoiseModel | None = None,
    *,
    power_known: bool = True,
    fingerprints: Fingerprints | None = None,
) -> dict[str, Estimate]:
    """Classical answers by name, in the frame that `prepare` uses.

    centroid, strength, arrival_strength   stations weighted by power; robust fits, losses after Huber
    geman_mcclure, drop_one                the last with another loss, and without its worst arrival
    unknown_power                          the last of the first line where the power is known
    mixture                                with the law of blocked paths
    grid                                   the posterior on a grid, with that law
    fingerprint                            regression on the training data's strengths, in a fixed network
    """
    parts: dict[str, list[Estimate]] = {}
    names = ("features", "present", "receivers", "reference")
    step = solver_batch(rows["present"].device)
    for at in range(0, len(rows["present"]), step):
        part = {name: rows[name][at : at + step] for name in names}
        seen = observe(part, config, noise, power_known=power_known)
        unblocked = replace(seen, blocked_share=0.0)
        answers = {"centroid": centroid(seen), "strength": by_strength(seen), "arrival_strength": solve(unblocked)}
        answers["geman_mcclure"] = solve(unblocked, SolverConfig(redescending=True))
        if config.clock != "none":
            answers["drop_one"] = drop_one(unblocked)
        if power_known:
            answers["unknown_power"] = solve(replace(unblocked, power_known=False))
        if seen.blocked_share:
            answers["mixture"] = solve(seen)
        for name, one in answers.items():
            root = torch.linalg.cholesky_ex(one.covariance)[0]
            parts.setdefault(name, []).append(Estimate.single(one.position, root, seen.origin))
        cells = grid_posterior(seen)
        roots = torch.diag_embed(cells.side / math.sqrt(12))
        parts.setdefault("grid", []).append(Estimate.mixed(cells.log_weight, cells.middle, roots, seen.origin))
        if fingerprints is not None:
            parts.setdefault("fingerprint", []).append(fingerprints.locate(part, seen.origin))
    return {name: Estimate(*map(torch.cat, zip(*each, strict=True))) for name, each in parts.items()}


def evaluate(
    estimate: Estimate, rows: SampleRows, config: GenerateConfig, compared: Mapping[str, Estimate]
) -> dict[str, Any]:
    """The whole report as JSON-able values: the model's metrics and breakdown, and the metrics of other answers."""
    true = target(rows, estimate.origin, config)
    own = metrics(estimate, true, rows["crlb_m"])
    others = {name: metrics(one, true, rows["crlb_m"]) for name, one in compared.items()}
    return {
        **own,
        "samples": len(true),
        "baselines": others,
        "best_baseline": best_baseline(others),
        "verdict": verdict(own, others),
        **breakdown(estimate, true, rows),
    }


def best_baseline(others: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The name of the answer with the lowest median error."""
    return min(others, key=lambda name: others[name]["median_error_m"], default=None)


def verdict(learned: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether training was worth it, in a sentence: the metrics of the network, and of all that needs none."""
    best = best_baseline(others)
    if best is None:
        return "There is nothing to compare with."
    ours, theirs = learned["median_error_m"], others[best]["median_error_m"]
    name = PLAIN_NAMES.get(best, best)
    figures = f"median error {metres(ours)}, {name} {metres(theirs)}".replace("\u00a0", " ")
    ratio = ours / max(theirs, 1e-9)
    if ratio < 1 - SAME:
        return f"The network improves on {name} by {100 * (1 - ratio):.0f} %: {figures}."
    if ratio <= 1 + SAME:
        return f"The network adds nothing to {name} on this data: {figures}."
    return f"The network is worse than {name}, which needs no training: {figures}."


# GeoJSON


def geojson(
    estimate: Estimate, names: list[str] | None = None, stations: Sequence[list[str]] | None = None
) -> dict[str, Any]:
    """A FeatureCollection: per sample a Point and the 50, 90 and 95 % regions, longitude first.

    Those of one Gaussian are ellipses, those of a mixture have the shape they have, perhaps in several parts.

    stations  names of those that each sample was located by
    """
    estimate = Estimate(*(part.detach().cpu().double() for part in estimate))
    position, covariance, origin = estimate.position_en, estimate.covariance, estimate.origin
    names = names or [str(n) for n in range(len(position))]
    points = geographic(position, origin)
    root = torch.linalg.cholesky(covariance)
    area = math.pi * root[:, 0, 0] * root[:, 1, 1]  # of the ellipse of one standard deviation
    single = estimate.weights.shape[1] == 1
    rings = {name: ellipse_rings(position, root, origin, level) for name, level in LEVELS.items()} if single else {}
    features = []
    for n, name in enumerate(names):
        about = {
            "id": name,
            "sigma_east_m": float(covariance[n, 0, 0].sqrt()),
            "sigma_north_m": float(covariance[n, 1, 1].sqrt()),
            "covariance_m2": covariance[n].tolist(),
            "region_km2": {level: float(f"{area[n] * ellipse_scale(p) ** 2 / 1e6:.5g}") for level, p in LEVELS.items()},
        }
        about |= {} if stations is None else {"stations": stations[n], "left_out": []}
        about["modes"] = [{"lat": float(points[n, 0]), "lon": float(points[n, 1]), "weight": 1.0}]
        features.append(_feature("Point", [float(points[n, 1]), float(points[n, 0])], about))
        if not single:
            drawn = draw_mixture(*(getattr(estimate, field)[n].numpy() for field in ("weights", "means", "roots")))
            regions = mixture_regions(drawn)
            about["region_km2"] = {level: float(f"{one.area_m2 / 1e6:.5g}") for level, one in regions.items()}
            about["modes"] = [_mode(mode, origin[n]) for mode in mixture_modes(drawn)]
            features += [_region_feature(one, origin[n], name, LEVELS[level]) for level, one in regions.items()]
            continue
        features += [
            _feature("Polygon", [ring[n].tolist()], {"id": name, "probability": LEVELS[level]})
            for level, ring in rings.items()
        ]
    return {"type": "FeatureCollection", "features": features}


def _mode(mode: tuple[float, float, float], origin: Tensor) -> dict[str, float]:
    east, north, weight = mode
    lat, lon = geographic(torch.tensor([[east, north]], dtype=torch.float64), origin[None])[0, :2].tolist()
    return {"lat": round(lat, 7), "lon": round(lon, 7), "weight": round(weight, 4)}


def _region_feature(region: MixtureRegion, origin: Tensor, name: str, probability: float) -> dict[str, Any]:
    polygons = []
    for polygon in region.polygons:
        placed = []
        for ring in polygon:
            flat = torch.from_numpy(ring)
            places = geographic(flat, origin.expand(len(flat), 3))
            placed.append([[round(float(lon), 7), round(float(lat), 7)] for lat, lon in places[:, :2]])
        polygons.append(placed)
    kind, coordinates = ("Polygon", polygons[0]) if len(polygons) == 1 else ("MultiPolygon", polygons)
    return _feature(kind, coordinates, {"id": name, "probability": probability})


def ellipse_rings(position: Tensor, root: Tensor, origin: Tensor, level: float, points: int = 64) -> Tensor:
    """(B, points + 1, 2) longitude and latitude along ellipses that hold a probability; counter-clockwise, closed.

    root  (B, 2, 2)  m, any root of the covariance
    """
    angle = torch.arange(points + 1, dtype=torch.float64) % points * (2 * math.pi / points)
    circle = ellipse_scale(level) * torch.stack([angle.cos(), angle.sin()], -1)
    around = position[:, None] + circle @ root.mT
    flat = geographic(around.flatten(0, 1), origin.repeat_interleave(len(angle), 0))
    return flat[:, [1, 0]].reshape(len(position), len(angle), 2)


def _feature(kind: str, coordinates: Any, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": properties}


# Observations


def read_observations(path: Path, config: GenerateConfig) -> tuple[list[str], SampleRows]:
    """Observations from a JSON file; see `parse_observations`."""
    return parse_observations(read_document(path), config, f"observations {path}")


def read_document(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"observations {path}: {reason}; give the path of a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"observations {path}: not valid JSON: {error}") from error


def parse_observations(
    value: Any, config: GenerateConfig, source: str = "observations", *, min_stations: int = MIN_STATIONS
) -> tuple[list[str], SampleRows]:
    """Names and rows as a dataset has them, from `{"observations": [{"id", "reference", "stations": […]}, …]}`.

    One observation, or a list of them, may stand alone. A station has `lat`, `lon`, `alt` (ground, metres), optionally
    a `name`, and measurements by the names of the features, in `features` or beside the coordinates: a number, or
    `{"mean", "std", "min", "max"}` over the chunks. `rssi_dbm` or `snr_db` is needed, and `arrival_difference_us`
    unless the strength alone shall do. What is not given is left unknown, or follows from the configuration's noise.
    `reference` names the station the differences are against; without it the one whose difference is 0.
    """
    listed = _listed(value)
    if not listed:
        raise ConfigError(f"{source}: no observations; expected an object with stations, or a list of such")
    names, rows = zip(
        *(_observation(one, config, f"{source}, number {n + 1}", min_stations) for n, one in enumerate(listed)),
        strict=True,
    )
    columns = {key: [each[key] for each in rows] for key in rows[0]}
    padded = {
        key: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) if values[0].ndim else torch.stack(values)
        for key, values in columns.items()
    }
    return [name or str(n) for n, name in enumerate(names)], padded


def station_names(value: Any) -> list[list[str]]:
    """Names of the stations of each observation that `parse_observations` has read; without one, the number."""
    return [[str(station.get("name", n)) for n, station in enumerate(one["stations"])] for one in _listed(value)]


def _listed(value: Any) -> list[Any]:
    listed = value.get("observations", value) if isinstance(value, Mapping) else value
    listed = [listed] if isinstance(listed, Mapping) else listed
    return listed if isinstance(listed, list) else []


def _observation(one: Any, config: GenerateConfig, source: str, min_stations: int) -> tuple[str, SampleRows]:
    stations = one.get("stations") if isinstance(one, Mapping) else None
    if not isinstance(stations, list) or not all(isinstance(station, Mapping) for station in stations):
        raise ConfigError(f"{source}: no list of stations; each needs lat, lon, alt and what it measured")
    if len(stations) < min_stations:
        raise ConfigError(
            f"{source}: {len(stations)} stations; at least {min_stations} must have heard the transmission"
        )
    labels = [str(station.get("name", n)) for n, station in enumerate(stations)]
    where = [f"{source}, station {label!r}" for label in labels]
    places = [_place(station, at) for station, at in zip(stations, where, strict=True)]
    features = torch.stack([_measured(station, config, at) for station, at in zip(stations, where, strict=True)])
    rows = {
        "features": features,
        "present": torch.ones(len(stations), dtype=torch.bool),
        "receivers": torch.tensor(places, dtype=torch.float64),
        "reference": torch.tensor(_reference(one, labels, features, source)),
    }
    return str(one.get("id", "")), rows


def _place(station: Mapping[str, Any], source: str) -> list[float]:
    limits = {"lat": (-90, 90), "lon": (-180, 180), "alt": (-500, 9000)}
    out = []
    for name, (low, high) in limits.items():
        value = _number(station.get(name), f"{source}: {name}")
        if not low <= value <= high:
            raise ConfigError(f"{source}: {name}={value} must be between {low} and {high}")
        out.append(value)
    return out


def _measured(station: Mapping[str, Any], config: GenerateConfig, source: str) -> Tensor:
    """(F, 4) float32, NaN where nothing is known; a solver's inputs are always numbers."""
    measured = station.get("features", {})
    if not isinstance(measured, Mapping):
        raise ConfigError(f"{source}: features must be an object of values by name")
    beside = {name: value for name, value in station.items() if name not in STATION_KEYS or name == "snr_db"}
    measured = beside | dict(measured)
    known = [name for name, _ in FEATURES]
    out = torch.full((len(known), len(STATISTICS)), math.nan)
    for name, value in measured.items():
        if name not in known:
            raise ConfigError(f"{source}: unknown feature {name!r}; known: {', '.join(known)}")
        out[F[name]] = torch.tensor(_statistics(value, f"{source}: {name}"))
    if "rssi_dbm" not in measured and "snr_db" not in measured:
        raise ConfigError(f"{source}: neither rssi_dbm nor snr_db; a station that heard must say how strong")
    return _completed(out, set(measured), noise_dbm(config))


def _completed(out: Tensor, measured: set[str], floor_dbm: float) -> Tensor:
    """Strength, noise and SNR from each other; an arrival not given is one that could not be measured."""
    if "noise_floor_dbm" not in measured:
        out[F["noise_floor_dbm"], 0] = floor_dbm
    floor = out[F["noise_floor_dbm"], 0]
    if "snr_db" not in measured:
        excess = 10 ** ((out[F["rssi_dbm"], 0] - floor) / 10) - 1
        out[F["snr_db"], 0] = 10 * torch.log10(excess.clamp(min=MIN_SNR))
    if "rssi_dbm" not in measured:
        out[F["rssi_dbm"], 0] = 10 * torch.log10(10 ** (out[F["snr_db"], 0] / 10) + 1) + floor
    if "arrival_difference_us" not in measured:
        out[F["arrival_difference_us"]] = 0.0
        out[F["arrival_sigma_us"]] = torch.tensor([UNKNOWN_SIGMA_US, 0.0, UNKNOWN_SIGMA_US, UNKNOWN_SIGMA_US])
    return out


def _statistics(value: Any, source: str) -> list[float]:
    """mean, std, min, max of a measurement; a plain number is the mean, the others are unknown."""
    if not isinstance(value, Mapping):
        return [_number(value, source), math.nan, math.nan, math.nan]
    missing = [name for name in STATISTICS if name not in value]
    if missing:
        raise ConfigError(f"{source}: missing {', '.join(missing)}; give a number or all of {', '.join(STATISTICS)}")
    return [_number(value[name], f"{source} {name}") for name in STATISTICS]


def _number(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{source} is {value!r}; expected a finite number")
    return float(value)


def _reference(one: Mapping[str, Any], labels: list[str], features: Tensor, source: str) -> int:
    named = one.get("reference")
    if named is not None:
        if str(named) not in labels:
            raise ConfigError(f"{source}: reference {named!r} is none of the stations {', '.join(labels)}")
        return labels.index(str(named))
    timed = ~(features[:, F["arrival_sigma_us"], 2] >= UNKNOWN_SIGMA_US)  # one that is not given is NaN
    zero = timed & (features[:, F["arrival_difference_us"], 0] == 0)
    if bool(timed.any()) and not bool(zero.any()):
        raise ConfigError(f"{source}: no station has arrival_difference_us 0; say which is the reference")
    strength = features[:, F["rssi_dbm"], 0]
    return int(torch.where(zero, strength, strength - 1e3).argmax())

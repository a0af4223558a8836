"""How good positions and ellipses are, and how they leave and enter as JSON.

Axes: B samples, R receivers. Metrics are computed on the device of their input and come back as plain numbers.
"""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.errors import ConfigError
from brim.rf.config import GenerateConfig
from brim.rf.features import FEATURES, MIN_SNR, STATISTICS, UNKNOWN_SIGMA_US, F
from brim.rf.location.model import Estimate
from brim.rf.location.solver import (
    TX_HEIGHT_M,
    NoiseModel,
    SampleRows,
    SolverConfig,
    by_strength,
    centroid,
    geographic,
    observe,
    solve,
    solver_batch,
    target,
)
from brim.rf.physics.link import noise_dbm

LEVELS = {"50": 0.50, "90": 0.90, "95": 0.95}  # probability inside the ellipses
WORST = 0.01  # share left out of crlb_ratio_trimmed
SNR_EDGES_DB = (10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0)
MIN_STATIONS = 3
_ELLIPSE_POINTS = 64


# Metrics


def metrics(position: Tensor, covariance: Tensor, true: Tensor, crlb_m: Tensor) -> dict[str, Any]:
    """Errors in metres, against the bound, and coverage of the ellipses.

    position, true  (B, 2)     m
    covariance      (B, 2, 2)  m²
    crlb_m          (B,)       m
    """
    if not len(position):
        raise ConfigError("nothing to evaluate: the split has no samples; give a dataset with at least one")
    error = (position.double() - true.double()).norm(dim=-1)
    squares = (error / crlb_m.double()).square().sort().values
    kept = max(1, len(squares) - math.ceil(WORST * len(squares))) if len(squares) > 1 else 1
    return {
        "median_error_m": float(error.quantile(0.5)),
        "mean_error_m": float(error.mean()),
        "p95_error_m": float(error.quantile(0.95)),
        "crlb_ratio": float(squares.mean().sqrt()),
        "crlb_ratio_trimmed": float(squares[:kept].mean().sqrt()),
        "crlb_ratio_median": float(error.quantile(0.5) / crlb_m.double().quantile(0.5)),
        "coverage": coverage(position, covariance, true),
    }


def coverage(position: Tensor, covariance: Tensor, true: Tensor) -> dict[str, float]:
    """Share of true positions inside the 50, 90 and 95 % ellipses."""
    distance = mahalanobis(position, covariance, true)
    return {name: float((distance <= ellipse_scale(level) ** 2).double().mean()) for name, level in LEVELS.items()}


def mahalanobis(position: Tensor, covariance: Tensor, true: Tensor) -> Tensor:
    """(B,) squared error in the ellipse's own units, float64."""
    east, north = (true.double() - position.double()).unbind(-1)
    a, b, d = (covariance[..., i, j].double() for i, j in ((0, 0), (0, 1), (1, 1)))
    det = (a * d - b * b).clamp(min=1e-30)
    return (d * east * east - 2 * b * east * north + a * north * north) / det


def ellipse_scale(level: float) -> float:
    """Half-axes of the ellipse that holds this probability, in standard deviations: in the plane √(−2 ln(1 − p))."""
    return math.sqrt(-2 * math.log1p(-level))


def breakdown(position: Tensor, covariance: Tensor, true: Tensor, rows: SampleRows) -> dict[str, Any]:
    """Coverage by thirds of arrival sigma and of GDOP; error by mean SNR and by number of receivers."""
    here = rows["present"]
    count = here.sum(-1)

    def mean(column: str) -> Tensor:
        values = torch.where(here, rows["features"][..., F[column], 0].double(), 0.0)
        return values.sum(-1) / count.clamp(min=1)

    sigma = torch.where(here, rows["features"][..., F["arrival_sigma_us"], 2].double(), math.nan).nanmedian(-1).values
    snr, edges = mean("snr_db"), torch.tensor(SNR_EDGES_DB, dtype=torch.float64, device=here.device)
    data = (position, covariance, true, rows["crlb_m"])
    return {
        "coverage_by_arrival_sigma": _by(_thirds(sigma), ("low", "middle", "high"), data),
        "coverage_by_gdop": _by(_thirds(rows["gdop"].double()), ("low", "middle", "high"), data),
        "error_by_snr_db": _by(torch.bucketize(snr, edges), _ranges(SNR_EDGES_DB), data),
        "error_by_receivers": _by(count, [str(n) for n in range(here.shape[1] + 1)], data),
    }


def _thirds(values: Tensor) -> Tensor:
    """(B,) 0, 1 or 2 by rank; ties fall where the sort puts them."""
    rank = values.argsort(stable=True).argsort()
    return rank * 3 // max(len(values), 1)


def _ranges(edges: tuple[float, ...]) -> list[str]:
    inner = [f"{low:g}–{high:g}" for low, high in pairwise(edges)]
    return [f"<{edges[0]:g}", *inner, f"≥{edges[-1]:g}"]


def _by(group: Tensor, names: Any, data: tuple[Tensor, ...]) -> dict[str, Any]:
    """Metrics of every group that has samples, with their number."""
    out = {}
    for number, name in enumerate(names):
        inside = group == number
        if bool(inside.any()):
            out[name] = {"samples": int(inside.sum())} | metrics(*(part[inside] for part in data))
    return out


def baselines(
    rows: SampleRows, config: GenerateConfig, noise: NoiseModel | None = None, solver: SolverConfig | None = None
) -> dict[str, Estimate]:
    """Classical answers by name, in the frame that `prepare` uses."""
    parts: dict[str, list[Estimate]] = {"centroid": [], "strength": [], "arrival_strength": []}
    names = ("features", "present", "receivers", "reference")
    step = solver_batch(rows["present"].device)
    for at in range(0, len(rows["present"]), step):
        seen = observe({name: rows[name][at : at + step] for name in names}, config, noise)
        found = (centroid(seen), by_strength(seen, solver), solve(seen, solver))
        for estimates, one in zip(parts.values(), found, strict=True):
            root = torch.linalg.cholesky_ex(one.covariance)[0]
            estimates.append(Estimate(one.position, one.covariance, seen.origin, root))
    return {name: Estimate(*map(torch.cat, zip(*parts[name], strict=True))) for name in parts}


def evaluate(
    estimate: Estimate,
    rows: SampleRows,
    config: GenerateConfig,
    noise: NoiseModel | None = None,
    solver: SolverConfig | None = None,
    others: Mapping[str, Estimate] | None = None,
) -> dict[str, Any]:
    """The whole report as JSON-able values: the model's metrics and breakdown, then those of every baseline.

    others are further answers to compare, such as a pure network's; they are listed among the baselines.
    """
    true = target(rows, estimate.origin, config)
    compared = baselines(rows, config, noise, solver) | dict(others or {})
    return {
        **metrics(estimate.position_en, estimate.covariance, true, rows["crlb_m"]),
        "samples": len(true),
        "baselines": {
            name: metrics(one.position_en, one.covariance, true, rows["crlb_m"]) for name, one in compared.items()
        },
        **breakdown(estimate.position_en, estimate.covariance, true, rows),
    }


# GeoJSON


def geojson(
    position: Tensor,
    covariance: Tensor,
    origin: Tensor,
    names: list[str] | None = None,
    height_m: float = TX_HEIGHT_M,
) -> dict[str, Any]:
    """A FeatureCollection: per sample a Point and the 50, 90 and 95 % ellipses as Polygons, longitude first.

    position    (B, 2)     m east and north of the origin
    covariance  (B, 2, 2)  m²
    origin      (B, 3)     lat, lon, alt
    """
    names = names or [str(n) for n in range(len(position))]
    position, covariance, origin = (part.detach().cpu().double() for part in (position, covariance, origin))
    points = geographic(position, origin, height_m)
    rings = {name: _ring(position, covariance, origin, level, height_m) for name, level in LEVELS.items()}
    features = []
    for n, name in enumerate(names):
        about = {
            "id": name,
            "sigma_east_m": float(covariance[n, 0, 0].sqrt()),
            "sigma_north_m": float(covariance[n, 1, 1].sqrt()),
            "covariance_m2": covariance[n].tolist(),
        }
        features.append(_feature("Point", [float(points[n, 1]), float(points[n, 0])], about))
        features += [
            _feature("Polygon", [ring[n].tolist()], {"id": name, "probability": LEVELS[level]})
            for level, ring in rings.items()
        ]
    return {"type": "FeatureCollection", "features": features}


def _ring(position: Tensor, covariance: Tensor, origin: Tensor, level: float, height_m: float) -> Tensor:
    """(B, 65, 2) longitude and latitude along an ellipse, counter-clockwise, the first point again at the end."""
    angle = torch.arange(_ELLIPSE_POINTS + 1, dtype=torch.float64) % _ELLIPSE_POINTS * (2 * math.pi / _ELLIPSE_POINTS)
    circle = ellipse_scale(level) * torch.stack([angle.cos(), angle.sin()], -1)
    around = position[:, None] + circle @ torch.linalg.cholesky(covariance).mT
    flat = geographic(around.flatten(0, 1), origin.repeat_interleave(len(angle), 0), height_m)
    return flat[:, [1, 0]].reshape(len(position), len(angle), 2)


def _feature(kind: str, coordinates: Any, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": properties}


# Observations


def read_observations(path: Path, config: GenerateConfig) -> tuple[list[str], SampleRows]:
    """Observations from a JSON file; see `parse_observations`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"observations {path}: {error}; give the path of a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"observations {path}: not valid JSON: {error}") from error
    return parse_observations(value, config, f"observations {path}")


def parse_observations(
    value: Any, config: GenerateConfig, source: str = "observations"
) -> tuple[list[str], SampleRows]:
    """Names and rows as a dataset has them, from `{"observations": [{"id", "reference", "stations": […]}, …]}`.

    One observation, or a list of them, may stand alone. A station has `lat`, `lon`, `alt` (ground, metres), optionally
    a `name`, and measurements by the names of the features, in `features` or beside the coordinates: a number, or
    `{"mean", "std", "min", "max"}` over the chunks. `rssi_dbm` or `snr_db` is needed, and `arrival_difference_us`
    unless the strength alone shall do. What is not given is left unknown, or follows from the configuration's noise.
    `reference` names the station the differences are against; without it the one whose difference is 0.
    """
    listed = value.get("observations", value) if isinstance(value, Mapping) else value
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{source}: no observations; expected an object with stations, or a list of such")
    found = [_observation(one, config, f"{source}, number {n + 1}") for n, one in enumerate(listed)]
    most = max(len(rows["present"]) for _, rows in found)
    padded = [_pad(rows, most) for _, rows in found]
    names = [name or str(n) for n, (name, _) in enumerate(found)]
    return names, {key: torch.stack([rows[key] for rows in padded]) for key in padded[0]}


def _pad(rows: SampleRows, most: int) -> SampleRows:
    def grow(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])

    return {name: grow(tensor) if tensor.ndim else tensor for name, tensor in rows.items()}


def _observation(one: Any, config: GenerateConfig, source: str) -> tuple[str, SampleRows]:
    stations = one.get("stations") if isinstance(one, Mapping) else None
    if not isinstance(stations, list) or not all(isinstance(station, Mapping) for station in stations):
        raise ConfigError(f"{source}: no list of stations; each needs lat, lon, alt and what it measured")
    if len(stations) < MIN_STATIONS:
        raise ConfigError(
            f"{source}: {len(stations)} stations; at least {MIN_STATIONS} must have heard the transmission"
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
    given = station.get("features", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source}: features must be an object of values by name")
    given = dict(given) | {name: value for name, value in station.items() if name not in _STATION_KEYS}
    known = [name for name, _ in FEATURES]
    out = torch.full((len(known), len(STATISTICS)), math.nan)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{source}: unknown feature {name!r}; known: {', '.join(known)}")
        out[F[name]] = torch.tensor(_statistics(value, f"{source}: {name}"))
    if "rssi_dbm" not in given and "snr_db" not in given:
        raise ConfigError(f"{source}: neither rssi_dbm nor snr_db; a station that heard must say how strong")
    return _completed(out, set(given), noise_dbm(config))


_STATION_KEYS = ("name", "lat", "lon", "alt", "features")


def _completed(out: Tensor, given: set[str], floor_dbm: float) -> Tensor:
    """Strength, noise and SNR from each other; an arrival not given is one that could not be measured."""
    if "noise_floor_dbm" not in given:
        out[F["noise_floor_dbm"], 0] = floor_dbm
    floor = out[F["noise_floor_dbm"], 0]
    if "snr_db" not in given:
        excess = 10 ** ((out[F["rssi_dbm"], 0] - floor) / 10) - 1
        out[F["snr_db"], 0] = 10 * torch.log10(excess.clamp(min=MIN_SNR))
    if "rssi_dbm" not in given:
        out[F["rssi_dbm"], 0] = 10 * torch.log10(10 ** (out[F["snr_db"], 0] / 10) + 1) + floor
    if "arrival_difference_us" not in given:
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

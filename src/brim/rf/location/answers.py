"""Where transmissions came from, as GeoJSON: a point with what is known about it, and the regions around it.

Without a run the posterior answers; with one the network does, and the posterior says which stations disagree.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brim.errors import ConfigError
from brim.rf.location.evaluate import LEVELS, MIN_STATIONS, geojson, parse_observations, read_document
from brim.rf.location.posterior import Fit, Likelihood, Posterior, locate_sighting
from brim.rf.location.regions import PositionMode, modes_of, region_geometry, wrap
from brim.rf.location.run import LocatorRun, load_run
from brim.rf.location.sightings import LeftOutNames, PreparedPairs, check_sky_wave, prepare_sightings
from brim.rf.measurement import MeasureConfig, measure
from brim.rf.physics.propagation import is_ground_wave
from brim.rf.recordings import Site, read_sites

_WRONG = 0.5  # probability of a wrong arrival from which a station counts as left out
_TESTABLE = 4  # stations among which a wrong one can be found
_SURE = 0.99  # from which the others are looked at again without it
_MAX_WRONG = 3  # stations left out one after the other
_DIFFERS = 3.0  # standard deviations of χ² from which a network's ellipse is widened


@dataclass(frozen=True, slots=True)
class Located:
    """One transmission's answer."""

    prepared: PreparedPairs
    posterior: Posterior
    modes: list[PositionMode]
    fit: Fit
    left_out: LeftOutNames
    features: list[dict[str, Any]]  # GeoJSON: the point, then the regions


def locate_documents(
    documents: Sequence[tuple[str, Any]],
    *,
    run: Path | str | LocatorRun | None = None,
    power_dbm: float | None = None,
    stations: Sequence[Site] = (),
) -> list[Located]:
    """Positions from documents of observations, each with the name of its source.

    run        the directory of a trained locator, which then answers
    power_dbm  of the transmitter; None: unknown
    """
    loaded = load_run(run) if isinstance(run, Path | str) else run
    model: dict[str, Any] = {}
    if loaded is not None:
        model = {"config": loaded.generation, "noise": loaded.noise, "min_stations": MIN_STATIONS}
    prepared = [
        one
        for source, value in documents
        for one in prepare_sightings(value, power_dbm=power_dbm, stations=stations, source=source, **model)
    ]
    return [_located(one, loaded) for one in prepared]


def locate_inputs(
    inputs: Sequence[Path],
    stations: Path | None = None,
    power_dbm: float | None = None,
    *,
    measuring: MeasureConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Located]:
    """Positions from files: documents of observations, recordings of one transmission, or both; a run may come first.

    stations   a CSV file of positions and calibration
    measuring  how recordings are measured
    """
    files, run = list(inputs), None
    if files and files[0].is_dir():
        run = load_run(files.pop(0))
    if not files:
        raise ConfigError("nothing to locate", hint="give files of observations or recordings after the run")
    sites = () if stations is None else read_sites(stations)
    documents = [(f"observations {file}", read_document(file)) for file in files if is_document(file)]
    recordings = [file for file in files if not is_document(file)]
    metas = {file.with_suffix("") for file in recordings if file.suffix == ".sigmf-meta"}
    recordings = [file for file in recordings if file.suffix != ".sigmf-data" or file.with_suffix("") not in metas]
    if recordings:
        measured = measure(recordings, sites, measuring, progress=progress)
        documents.append(("recordings", measured.observation.as_dict()))
    return locate_documents(documents, run=run, power_dbm=power_dbm, stations=sites)


def is_document(file: Path) -> bool:
    """Whether a file holds observations: JSON that is not the metadata of a recording."""
    return file.suffix.lower() in (".json", ".geojson") or not (file.suffix or file.exists())


def collection(located: Sequence[Located]) -> dict[str, Any]:
    """All answers as a GeoJSON FeatureCollection."""
    return {"type": "FeatureCollection", "features": [feature for one in located for feature in one.features]}


def _located(prepared: PreparedPairs, run: LocatorRun | None) -> Located:
    whole = prepared.sighting
    prepared, posterior, gone = settled(prepared)
    modes = modes_of(posterior)
    best = modes[0]
    check_sky_wave(prepared, best.lat, best.lon)
    fit = Likelihood(whole).fit(best.lat, best.lon, posterior.wrong)
    left_out = prepared.left_out + [{"name": name, "reason": _reason(fit, number, p)} for name, number, p in gone]
    about = _about(prepared, posterior, modes, fit, left_out)
    features = _regions(posterior, best, about) if run is None else _by_network(run, prepared, fit, left_out, about)
    return Located(prepared, posterior, modes, fit, left_out, features)


def settled(prepared: PreparedPairs) -> tuple[PreparedPairs, Posterior, list[tuple[str, int, float]]]:
    """The posterior, and the stations whose arrivals it considers wrong: name, index, probability.

    Those that certainly are no longer count.
    """
    gone: list[tuple[str, int, float]] = []
    for _ in range(_MAX_WRONG):
        posterior = locate_sighting(prepared.sighting)
        worst = int(posterior.wrong.argmax())
        probability = float(posterior.wrong[worst])
        if probability <= _WRONG:
            break
        gone.append((prepared.sighting.stations[worst], worst, probability))
        timed = prepared.sighting.timed.copy()
        timed[worst] = False
        if probability < _SURE or timed.sum() < _TESTABLE:
            break
        prepared = replace(prepared, sighting=replace(prepared.sighting, timed=timed))
    wrong = posterior.wrong.copy()
    for _, number, probability in gone:  # of arrivals that no longer count, the last posterior says nothing
        wrong[number] = probability
    return prepared, replace(posterior, wrong=wrong), gone


def _reason(fit: Fit, station: int, probability: float) -> str:
    off = fit.off_us[station]
    word = "later" if off > 0 else "earlier"
    return (
        f"its arrival is {abs(off):.3g} µs {word} than the other stations say "
        f"(wrong with a probability of {probability:.2f})"
    )


def _about(
    prepared: PreparedPairs, posterior: Posterior, modes: list[PositionMode], fit: Fit, left_out: LeftOutNames
) -> dict[str, Any]:
    """Properties of the point."""
    seen, covariance = prepared.sighting, posterior.covariance_m2
    gone = {entry["name"] for entry in left_out}
    timed = [name for name, is_timed in zip(seen.stations, seen.timed, strict=True) if is_timed and name not in gone]
    return {
        "id": seen.name,
        "sigma_east_m": math.sqrt(covariance[0, 0]),
        "sigma_north_m": math.sqrt(covariance[1, 1]),
        "covariance_m2": covariance.tolist(),
        "region_km2": {name: _rounded(area / 1e6) for name, area in posterior.region_m2.items()},
        "stations": [name for name in seen.stations if name not in gone],
        "left_out": left_out,
        "modes": [
            {"lat": round(mode.lat, 7), "lon": round(wrap(mode.lon), 7), "weight": round(mode.weight, 4)}
            for mode in modes
        ],
        "chi2_dof": _rounded(fit.chi2 / fit.dof) if fit.dof > 0 else None,
        "dof": fit.dof,
        "method": "arrivals and strength" if len(timed) > 1 else "strength",
        "power": "known" if seen.power_known else "unknown",
        "propagation": "ground wave" if is_ground_wave(prepared.frequency_mhz) else "line of sight",
        "search_edge": _rounded(posterior.at_edge),
    }


def _regions(posterior: Posterior, best: PositionMode, about: dict[str, Any]) -> list[dict[str, Any]]:
    point = {"type": "Point", "coordinates": [round(wrap(best.lon), 7), round(best.lat, 7)]}
    regions = [
        _feature(region_geometry(posterior, name), {"id": about["id"], "probability": level})
        for name, level in LEVELS.items()
    ]
    return [_feature(point, about), *regions]


def _by_network(
    run: LocatorRun, prepared: PreparedPairs, fit: Fit, left_out: LeftOutNames, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """The network's answer without the stations that were left out, wider where the solver's residuals say so."""
    gone = {entry["name"] for entry in left_out}
    kept = [station for station in prepared.document["stations"] if station["name"] not in gone]
    document = {**prepared.document, "stations": kept}
    if str(document.get("reference")) in gone:
        raise ConfigError(
            f"observation {about['id']!r}: the reference {document['reference']!r} is left out "
            f"({next(entry['reason'] for entry in left_out if entry['name'] == str(document['reference']))})",
            hint="measure again with another reference, or locate without a run",
        )
    _, rows = parse_observations(document, run.generation, f"observation {about['id']!r}")
    widened = 1.0
    if fit.dof > 0 and fit.chi2 > fit.dof + _DIFFERS * math.sqrt(2 * fit.dof):
        widened = fit.chi2 / fit.dof
    features: list[dict[str, Any]] = geojson(run.predict(rows).widened(widened), [about["id"]])["features"]
    features[0]["properties"] = {**about, **features[0]["properties"], "widened": widened}
    return features


def _feature(geometry: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")

"""Metrics against distributions whose answers are known; GeoJSON and observations against their descriptions."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from gaussian_rows import EXACT, PRODUCTION, gaussian_rows, solver_estimate
from geographiclib.geodesic import Geodesic

from brim.errors import ConfigError
from brim.rf.config import preset
from brim.rf.features import F
from brim.rf.location.evaluate import (
    baselines,
    best_baseline,
    coverage,
    ellipse_scale,
    evaluate,
    geojson,
    mahalanobis,
    metrics,
    parse_observations,
    verdict,
)
from brim.rf.location.model import Estimate, prepare
from brim.rf.location.solver import geographic, observe, solve, target

KEYS = {"median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio", "coverage"}
SPREAD = torch.tensor([[300.0, 0.0], [200.0, 90.0]], dtype=torch.float64)


def normal(num, seed=1):
    """Positions at 0 with errors of the covariance SPREAD @ SPREADᵀ."""
    rng = torch.Generator().manual_seed(seed)
    true = torch.randn(num, 2, dtype=torch.float64, generator=rng) @ SPREAD.mT
    return torch.zeros(num, 2), (SPREAD @ SPREAD.mT).expand(num, 2, 2), true


def gaussian(position, covariance, origin=None):
    """An estimate of one Gaussian."""
    origin = torch.zeros(len(position), 3) if origin is None else origin
    return Estimate.single(position, torch.linalg.cholesky(covariance), origin)


@pytest.fixture(scope="module")
def rows():
    return gaussian_rows(attempts=150)


@pytest.fixture(scope="module")
def compared(rows):
    return baselines(rows, PRODUCTION, EXACT)


@pytest.fixture(scope="module")
def report(rows, compared):
    return evaluate(solver_estimate(prepare(rows, PRODUCTION, EXACT)), rows, PRODUCTION, compared)


# Metrics


def test_coverage_of_the_right_covariance_is_nominal():
    position, covariance, true = normal(40_000)
    for level, share in coverage(gaussian(position, covariance), true).items():
        assert share == pytest.approx(int(level) / 100, abs=0.01)


def test_ellipse_scale_is_the_textbooks():
    assert [ellipse_scale(p) for p in (0.5, 0.9, 0.95)] == pytest.approx([1.1774, 2.1460, 2.4477], abs=1e-4)


def test_mahalanobis_is_the_quadratic_form():
    position, covariance, true = normal(50)
    expected = torch.stack([t @ torch.linalg.inv(c) @ t for t, c in zip(true, covariance, strict=True)])

    assert mahalanobis(position, covariance, true) == pytest.approx(expected, rel=1e-9)


def test_errors_and_ratios_of_a_hand_made_case():
    size = torch.arange(1.0, 101.0) ** 2  # 1, 4, …, 10 000 m against bounds of 2, 4, …, 200 m
    true = torch.stack([0.6 * size, -0.8 * size], -1)[torch.randperm(100, generator=torch.Generator().manual_seed(1))]
    bound = 2 * true.norm(dim=-1).sqrt()
    found = metrics(gaussian(torch.zeros(100, 2), torch.eye(2).expand(100, 2, 2)), true, bound)

    assert found["median_error_m"] == pytest.approx((50**2 + 51**2) / 2)
    assert found["mean_error_m"] == pytest.approx(100 * 101 * 201 / 6 / 100)
    assert found["p95_error_m"] == pytest.approx(95**2 + 0.05 * (96**2 - 95**2))
    assert found["crlb_ratio"] == pytest.approx(math.sqrt(100 * 101 * 201 / 6 / 100) / 2)
    assert found["crlb_ratio_trimmed"] == pytest.approx(math.sqrt(99 * 100 * 199 / 6 / 99) / 2)
    assert found["crlb_ratio_median"] == pytest.approx((50**2 + 51**2) / 2 / 101)


@pytest.mark.parametrize(
    ("error_m", "said"),
    [
        (90.0, "improves on strength alone by 10 %: median error 90 m, strength alone 100 m"),
        (100.5, "adds nothing to strength alone"),
        (99.5, "adds nothing"),
        (120.0, "worse than strength alone, which needs no training"),
    ],
)
def test_the_verdict_is_that_of_the_best_answer_without_training(error_m, said):
    others = {"centroid": {"median_error_m": 300.0}, "strength": {"median_error_m": 100.0}}
    assert said in verdict({"median_error_m": error_m}, others)
    assert best_baseline(others) == "strength"


def test_one_sample_can_be_evaluated_and_none_is_an_error():
    position, covariance, true = normal(1)
    assert metrics(gaussian(position, covariance), true, torch.ones(1))["mean_error_m"] > 0

    with pytest.raises(ConfigError, match="no samples"):
        metrics(gaussian(position[:0], covariance[:0]), true[:0], torch.ones(0))


def test_report_has_the_agreed_keys_and_is_json(report):
    assert set(report) >= KEYS | {"baselines"}
    assert set(report["coverage"]) == {"50", "90", "95"}
    assert set(report["baselines"]) == {
        "centroid", "strength", "arrival_strength", "geman_mcclure", "drop_one", "unknown_power", "grid",
    }  # fmt: skip
    assert all(set(one) >= KEYS for one in report["baselines"].values())
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_groups_hold_every_sample_once(report, rows):
    for name in ("coverage_by_arrival_sigma", "coverage_by_gdop", "error_by_snr_db", "error_by_receivers"):
        assert sum(group["samples"] for group in report[name].values()) == len(rows["present"])
    thirds = [group["samples"] for group in report["coverage_by_gdop"].values()]
    assert max(thirds) - min(thirds) <= 1


def test_groups_by_snr_are_of_the_mean_over_those_that_heard(report, rows):
    snr = np.ma.array(rows["features"][..., F["snr_db"], 0], mask=~rows["present"]).mean(-1)
    counts, _ = np.histogram(snr, [-100, 10, 15, 20, 25, 30, 35, 40, 200])
    names = ["<10", "10–15", "15–20", "20–25", "25–30", "30–35", "35–40", "≥40"]
    expected = {name: count for name, count in zip(names, counts.tolist(), strict=True) if count}

    assert {name: group["samples"] for name, group in report["error_by_snr_db"].items()} == expected
    assert len(expected) > 2


def test_errors_grow_with_gdop(report):
    by = report["coverage_by_gdop"]

    assert by["low"]["median_error_m"] < by["middle"]["median_error_m"] < by["high"]["median_error_m"]


# GeoJSON


def test_geojson_has_a_point_and_three_closed_rings_around_it(rows):
    batch = prepare(rows, PRODUCTION, EXACT)
    found = solver_estimate(batch)
    features = geojson(type(found)(*(part[:2] for part in found)), ["a", "b"])["features"]
    place = geographic(found.position_en[:1], found.origin[:1])[0]

    assert [f["geometry"]["type"] for f in features] == ["Point", "Polygon", "Polygon", "Polygon"] * 2
    assert features[0]["geometry"]["coordinates"] == pytest.approx([float(place[1]), float(place[0])])
    assert [f["properties"].get("probability") for f in features[:4]] == [None, 0.5, 0.9, 0.95]
    lon, lat = features[0]["geometry"]["coordinates"]
    assert features[0]["properties"]["modes"] == [{"lat": lat, "lon": lon, "weight": 1.0}]
    for feature in features[1:4]:
        (ring,) = feature["geometry"]["coordinates"]
        assert ring[0] == ring[-1]
        assert len(ring) == 65
        assert sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise(ring)) > 0  # counter-clockwise


def test_ellipse_has_its_size_and_direction_on_the_ground():
    covariance = torch.diag(torch.tensor([1_000.0**2, 200.0**2])).expand(1, 2, 2)
    origin = torch.tensor([[45.0, 8.0, 300.0]])
    point, _, _, wide = geojson(gaussian(torch.tensor([[3_000.0, -400.0]]), covariance, origin))["features"]
    lon, lat = point["geometry"]["coordinates"]
    lines = [Geodesic.WGS84.Inverse(lat, lon, y, x) for x, y in wide["geometry"]["coordinates"][0]]
    longest, shortest = (choose(lines, key=lambda line: line["s12"]) for choose in (max, min))
    about = point["properties"]

    assert Geodesic.WGS84.Inverse(45.0, 8.0, lat, lon)["azi1"] == pytest.approx(97.6, abs=0.1)
    assert longest["s12"] == pytest.approx(1_000 * 2.4477, rel=1e-3)
    assert abs(longest["azi1"]) == pytest.approx(90, abs=1)
    assert shortest["s12"] == pytest.approx(200 * 2.4477, rel=1e-3)
    assert (about["sigma_east_m"], about["sigma_north_m"]) == pytest.approx((1_000, 200))
    assert about["region_km2"] == pytest.approx({"50": 0.87103, "90": 2.8935, "95": 3.7646}, rel=1e-3)  # π·a·b·χ²


# Observations


def observation(rows, n=0, **changes):
    """One sample as JSON with strength and arrival differences alone."""
    stations = [
        {
            "name": f"S{r}",
            **dict(zip(("lat", "lon", "alt"), rows["receivers"][n, r].tolist(), strict=True)),
            "rssi_dbm": float(rows["features"][n, r, F["rssi_dbm"], 0]),
            "arrival_difference_us": float(rows["features"][n, r, F["arrival_difference_us"], 0]),
        }
        for r in range(rows["present"].shape[1])
        if rows["present"][n, r]
    ]
    return {"id": f"case {n}", "stations": stations} | changes


def test_observations_are_located_like_the_rows_they_came_from(rows):
    config = replace(PRODUCTION, min_snr_db=30.0)  # strong signals: rssi is the signal's strength
    strong = gaussian_rows(config, attempts=40, noisy=False, level=True)
    names, parsed = parse_observations({"observations": [observation(strong, n) for n in range(10)]}, config)
    seen = observe(parsed, config)
    true = target({"transmitter": strong["transmitter"][:10]}, seen.origin, config)

    assert names == [f"case {n}" for n in range(10)]
    assert float((solve(seen).position - true).norm(dim=-1).median()) < 60  # the strength's bias of fading is assumed


def test_features_by_name_with_statistics_equal_the_dataset(rows):
    one = observation(rows)
    for r, station in enumerate(one["stations"]):
        values = {
            name: dict(zip(("mean", "std", "min", "max"), rows["features"][0, r, F[name]].tolist(), strict=True))
            for name in F
        }
        station.pop("rssi_dbm")
        station.pop("arrival_difference_us")
        station["features"] = values
    one["reference"] = f"S{int(rows['reference'][0])}"
    _, parsed = parse_observations(one, PRODUCTION)
    num = len(one["stations"])

    assert torch.equal(parsed["features"][0], rows["features"][0, :num])
    assert parsed["reference"].tolist() == rows["reference"][:1].tolist()


def test_what_is_not_given_follows_from_what_is(rows):
    stations = observation(rows)["stations"][:3]
    for station, strength in zip(
        stations, ({"rssi_dbm": -116.711}, {"snr_db": 0.0}, {"rssi_dbm": -130.0}), strict=True
    ):
        del station["rssi_dbm"], station["arrival_difference_us"]
        station |= strength
    _, parsed = parse_observations({"stations": stations}, PRODUCTION)
    rssi, snr, floor = (parsed["features"][0, :, F[name], 0] for name in ("rssi_dbm", "snr_db", "noise_floor_dbm"))

    assert floor.tolist() == pytest.approx([-119.721] * 3, abs=0.002)
    assert snr.tolist() == pytest.approx([0.0, 0.0, -20.0], abs=0.002)  # 3.01 dB above the noise: as much signal
    assert rssi.tolist() == pytest.approx([-116.711, -116.711, -130.0], abs=0.002)
    assert parsed["reference"].tolist() == [0]  # the strongest
    assert not observe(parsed, PRODUCTION).timed.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop("stations"), "no list of stations"),
        (lambda one: one["stations"].__delitem__(slice(2, None)), "2 stations; at least 3"),
        (lambda one: one["stations"][1].pop("lat"), "'S1': lat is None"),
        (lambda one: one["stations"][1].update(lon=1e3), "lon=1000.0 must be between"),
        (lambda one: one["stations"][0].update(loudness=3), "unknown feature 'loudness'"),
        (lambda one: one["stations"][0].pop("rssi_dbm"), "neither rssi_dbm nor snr_db"),
        (lambda one: one["stations"][0].update(rssi_dbm=math.inf), "rssi_dbm is inf"),
        (lambda one: one["stations"][0].update(rssi_dbm={"mean": 1.0}), "missing std, min, max"),
        (lambda one: one.update(reference="Nowhere"), "reference 'Nowhere' is none of"),
        (lambda one: [s.update(arrival_difference_us=4.0) for s in one["stations"]], "say which is the reference"),
    ],
)
def test_what_is_missing_or_wrong_is_named(rows, change, message):
    one = observation(rows)
    change(one)

    with pytest.raises(ConfigError) as caught:
        parse_observations(one, preset("production"))

    assert message in str(caught.value)

"""Positions without a run: where the truth is, what the regions hold, who is left out, what is refused."""

import dataclasses
import json
import math
import re
import struct
import zlib
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from brim.cli import main
from brim.errors import ConfigError
from brim.rf.location import LEVELS, inside_level, locate_documents, locate_inputs
from brim.rf.location.posterior import Likelihood, locate_sighting
from brim.rf.location.regions import label, picture, polygons_of, rings_of
from brim.rf.location.sightings import arrivals_of_pairs, prepare_sightings
from brim.rf.measurement import PairMeasurement
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef, geodesic_m

STATIONS = (("A", 45.0, 7.6, 250.0), ("B", 45.2, 7.4, 310.0), ("C", 44.9, 7.9, 180.0), ("D", 45.25, 7.8, 270.0))
MORE = (*STATIONS, ("E", 45.1, 8.1, 150.0), ("F", 44.8, 7.5, 240.0), ("G", 45.3, 7.6, 400.0))
WIDE = (("A", 44.8, 7.4, 250.0), ("B", 45.3, 7.5, 310.0), ("C", 45.0, 8.1, 180.0))
PLACE = (45.06, 7.70)


def travel_us(stations, place=PLACE, height_m=302.0):
    """Straight lines, as the generator computes them."""
    here = np.array(ecef(*(np.float64(v) for v in (*place, height_m))))
    there = np.array([ecef(*(np.float64(v) for v in (lat, lon, alt + 30))) for _, lat, lon, alt in stations])
    return np.linalg.norm(there - here, axis=-1) / SPEED_OF_LIGHT * 1e6


def document(stations=STATIONS, *, sigma_us=1.0, late_us=None, rng=None, place=PLACE, **changes):
    """An observation as measuring writes it, with a difference for every pair."""
    rng = rng or np.random.default_rng(5)
    travel = travel_us(stations, place)
    arrival = travel + rng.normal(0, sigma_us, len(stations))
    for name, late in (late_us or {}).items():
        arrival[[one[0] for one in stations].index(name)] += late
    strength = -90 - 30 * np.log10(travel / 100) + rng.normal(0, 6, len(stations))
    names = [one[0] for one in stations]
    return {
        "id": "call",
        "stations": [
            {"name": name, "lat": lat, "lon": lon, "alt": alt, "strength_db": float(strength[n]), "snr_db": 20.0}
            for n, (name, lat, lon, alt) in enumerate(stations)
        ],
        "pairs": [
            {"reference": names[a], "station": names[b], "difference_us": float(arrival[b] - arrival[a]),
             "sigma_us": math.sqrt(2) * sigma_us}
            for a in range(len(names)) for b in range(a + 1, len(names))
        ],
        **changes,
    }  # fmt: skip


def located(value):
    (one,) = locate_documents([("observations", value)])
    return one


def properties(value):
    return located(value).features[0]["properties"]


def error_m(one, place=PLACE):
    lon, lat = one.features[0]["geometry"]["coordinates"]
    return float(geodesic_m(*(np.float64(v) for v in (lat, lon, *place))))


# Where


def test_a_position_is_near_the_truth_and_has_all_properties():
    one = located(document(MORE, sigma_us=0.3))
    about = one.features[0]["properties"]

    assert error_m(one) < 200
    assert set(about["region_km2"]) == {"50", "90", "95"}
    assert about["region_km2"]["50"] < about["region_km2"]["90"] < about["region_km2"]["95"] < 1
    assert about["stations"] == [name for name, *_ in MORE]
    assert about["left_out"] == []
    assert about["modes"][0].keys() == {"lat", "lon", "weight"}
    assert about["chi2_dof"] < 3
    assert about["search_edge"] < 1e-9
    assert about["power"] == "unknown"
    assert [feature["geometry"]["type"] for feature in one.features] == ["Point", *["Polygon"] * 3]
    assert [feature["properties"].get("probability") for feature in one.features] == [None, 0.5, 0.9, 0.95]


def test_the_area_of_a_polygon_is_the_regions():
    one = located(document(MORE, sigma_us=1.0))
    ring = np.array(one.features[3]["geometry"]["coordinates"][0])

    x = np.radians(ring[:, 0]) * 6371 * math.cos(math.radians(PLACE[0]))
    y = np.radians(ring[:, 1]) * 6371
    area = 0.5 * float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum())  # positive: counter-clockwise

    assert area == pytest.approx(one.features[0]["properties"]["region_km2"]["95"], rel=0.05)


STRIP = tuple((name, lat, 7.6 + (lon - 7.6) / 3, alt) for name, lat, lon, alt in MORE)  # far worse to the east


@pytest.mark.parametrize("stations", [MORE, STRIP])
def test_the_region_of_many_stations_is_the_ellipse_of_the_bound(stations):
    one = located(document(stations, sigma_us=1.0, place=(45.06, 7.63)))
    bound = bound_m2(stations, one.fit.distance_m, (45.06, 7.63))
    ellipse = math.pi * math.sqrt(np.linalg.det(bound)) * -2 * math.log(0.05)
    about = one.features[0]["properties"]

    cells = one.posterior.cells
    for level, share in (("50", 0.5), ("90", 0.9), ("95", 0.95)):
        inside = cells.log_density >= one.posterior.thresholds[level]
        assert cells.mass[inside].sum() / cells.mass.sum() == pytest.approx(share, abs=0.01)
        assert cells.area_m2[inside].sum() == pytest.approx(one.posterior.region_m2[level])
    assert one.posterior.region_m2["95"] == pytest.approx(ellipse, rel=0.25)  # wider: the sigmas may be wrong
    assert np.array(about["covariance_m2"]) == pytest.approx(bound, rel=0.3, abs=0.1 * bound.max())
    assert about["sigma_east_m"] == pytest.approx(math.sqrt(bound[0, 0]), rel=0.15)
    assert about["sigma_north_m"] == pytest.approx(math.sqrt(bound[1, 1]), rel=0.15)


def test_the_picture_of_two_places_is_dark_at_both_with_north_above():
    one = located(document(STATIONS[:3], sigma_us=0.2, place=(44.8, 7.3)))
    content, (south, north, west, east) = picture(one.posterior)
    columns, rows = struct.unpack(">II", content[16:24])
    body = zlib.decompress(content[content.index(b"IDAT") + 4 : -16])
    image = np.frombuffer(body, np.uint8).reshape(rows, 1 + 3 * columns)[:, 1:].reshape(rows, columns, 3)
    row, column = np.argwhere((image != 255).any(-1)).T + 0.5
    lat, lon = north - row / rows * (north - south), west + column / columns * (east - west)
    modes = one.features[0]["properties"]["modes"]
    away = [np.hypot((lat - mode["lat"]) / (north - south), (lon - mode["lon"]) / (east - west)) for mode in modes]

    assert len(modes) == 2
    assert np.min(away, 0).max() < 0.15


def test_a_network_across_the_180th_meridian_stays_together():
    value, moved = document(MORE), document(MORE)
    for station in moved["stations"]:
        station["lon"] = (station["lon"] + 172.3 + 180) % 360 - 180
    (lon, lat), (other_lon, other_lat) = (located(one).features[0]["geometry"]["coordinates"] for one in (value, moved))

    assert {station["lon"] > 0 for station in moved["stations"]} == {True, False}
    assert (other_lon, other_lat) == pytest.approx((lon + 172.3, lat), abs=1e-5)


def test_what_is_left_over_is_counted_in_standard_deviations():
    one = located(document(MORE))
    seen, about = one.prepared.sighting, one.features[0]["properties"]
    left = seen.arrival_us - seen.travel_us(one.fit.distance_m)
    level = seen.strength_db - seen.power_dbm(one.fit.distance_m)
    chi2 = len(left) * (left / seen.arrival_sigma_us).var() + len(level) * (level / seen.strength_sigma_db).var()

    assert about["dof"] == (7 - 1) + (7 - 1) - 2
    assert about["chi2_dof"] == pytest.approx(chi2 / 10, rel=0.02)  # stations are alike


def test_two_places_that_fit_are_both_listed():
    outside = (44.8, 7.3)  # behind a station: the hyperbolas of three stations cross twice
    one = located(document(STATIONS[:3], sigma_us=0.2, place=outside))
    modes = one.features[0]["properties"]["modes"]
    nearest = min(float(geodesic_m(*(np.float64(v) for v in (m["lat"], m["lon"], *outside)))) for m in modes)

    assert len(modes) == 2
    assert nearest < 1_000
    cells = one.posterior.cells
    inside = cells.at(cells.log_density >= one.posterior.thresholds["95"])
    first = np.hypot(inside.lat - modes[0]["lat"], inside.lon - modes[0]["lon"]) < 0.2
    assert modes[0]["weight"] == pytest.approx(inside.mass[first].sum() / inside.mass.sum(), abs=0.02)
    assert sum(mode["weight"] for mode in modes) == pytest.approx(1, abs=0.02)
    assert one.features[3]["geometry"]["type"] == "MultiPolygon"
    assert inside_level(one.posterior, *outside)["95"]


def test_strength_alone_says_so_and_claims_little():
    about = properties(document(MORE, pairs=[]))

    assert about["method"] == "strength"
    assert about["region_km2"]["95"] > 500
    assert about["search_edge"] > 1e-9


def test_the_power_makes_no_difference_unless_it_is_given():
    quiet, loud = document(MORE, pairs=[]), document(MORE, pairs=[])
    for station in loud["stations"]:
        station["strength_db"] += 10

    assert properties(quiet)["modes"] == properties(loud)["modes"]


# The likelihood


def sighting_of(stations, **changes):
    (prepared,) = prepare_sightings(document(stations))
    return dataclasses.replace(prepared.sighting, **changes)


@pytest.mark.parametrize("power_known", [False, True])
def test_the_likelihood_is_the_average_over_scales_emission_times_and_powers(power_known):
    """By summing over all of them; of three stations none can be wrong alone."""
    seen = sighting_of(STATIONS[:3], power_known=power_known, travel_sigma_us=lambda metres: metres * 2e-5)
    lat, lon = np.array([45.06, 45.062, 45.05, 45.1]), np.array([7.7, 7.69, 7.71, 7.6])
    metres = seen.lengths(lat, lon)
    time_us, power_db = np.linspace(-1500, 1500, 60_001), np.linspace(-300, 300, 20_001)
    time_us += float((seen.arrival_us - seen.travel_us(metres)).mean())
    power_db += float((seen.strength_db - seen.power_dbm(metres)).mean())

    def averaged(left, sigma, unknown, scales, prior):
        share = np.r_[1 - prior, prior / scales[1:] / (1 / scales[1:]).sum()]
        each = [
            stats.norm.logpdf(left[:, None], unknown, scale * sigma[:, None]).sum(0) + np.log(part)
            for scale, part in zip(scales, share, strict=True)
        ]
        return np.logaddexp.reduce(np.concatenate(each))

    expected = []
    for row in metres:
        sigma = np.hypot(seen.arrival_sigma_us, seen.travel_sigma_us(row))
        arrivals = averaged(seen.arrival_us - seen.travel_us(row), sigma, time_us, 1.75 ** np.arange(9), 0.04)
        level = np.zeros(1) if power_known else power_db
        strengths = seen.strength_db - seen.power_dbm(row)
        expected.append(
            arrivals + averaged(strengths, seen.strength_sigma_db, level, np.array([1.0, 1.5, 2.2, 3.3]), 0.05)
        )
    found = Likelihood(seen)(lat, lon)
    assert found - found[0] == pytest.approx(np.array(expected) - expected[0], abs=2e-3)
    assert np.ptp(found) > 3


def test_places_outside_the_network_are_less_likely_with_the_fourth_power_of_the_distance():
    silent = np.zeros(7, bool)
    likelihood = Likelihood(sighting_of(MORE, timed=silent, heard=silent))
    north_deg = np.array([0.0, 0.05, 0.5, 1.0])
    density = np.exp(likelihood(45.3 + north_deg, np.full(4, 7.7)))
    lat, lon = np.array(MORE)[:, 1].astype(float), np.array(MORE)[:, 2].astype(float)
    rms_deg = np.sqrt((lat.var()) + (((lon - lon.mean()) * np.cos(np.radians(lat))) ** 2).mean())
    reach_deg = max(0.3 * rms_deg, 20 / 111.19)

    assert density / density[0] == pytest.approx((1 + (north_deg / reach_deg) ** 2) ** -2, rel=1e-3)
    assert np.ptp(likelihood(np.array([45.0, 45.2]), np.array([7.5, 8.0]))) == 0


def test_the_density_holds_the_truth_as_often_as_it_says_over_thousands_of_draws():
    """On a grid of the bound's standard deviations, without what locating adds to it."""
    seen = sighting_of(MORE, heard=np.zeros(7, bool))
    travel, rng = seen.travel_us(seen.lengths(*(np.array([value]) for value in PLACE)))[0], np.random.default_rng(8)
    root = np.linalg.cholesky(bound_m2(MORE, seen.lengths(*(np.array([v]) for v in PLACE))[0]))
    sides = np.stack(np.meshgrid(*[np.linspace(-6, 6, 31)] * 2), -1).reshape(-1, 2) @ root.T / 111.19e3
    lat = np.r_[PLACE[0], PLACE[0] + sides[:, 1]]
    lon = np.r_[PLACE[1], PLACE[1] + sides[:, 0] / math.cos(math.radians(PLACE[0]))]
    metres = seen.lengths(lat, lon)
    seen = dataclasses.replace(seen, lengths=lambda *_: metres, arrival_sigma_us=np.ones(7))
    levels = []
    for _ in range(2_500):
        arrival_us = travel + rng.standard_normal(7)
        density = Likelihood(dataclasses.replace(seen, arrival_us=arrival_us))(lat, lon)
        mass = np.exp(density[1:] - density.max())
        levels.append(mass[density[1:] > density[0]].sum() / mass.sum())

    for level in LEVELS.values():
        assert np.mean(np.array(levels) <= level) == pytest.approx(level, abs=0.03)


def bound_m2(stations, distance_m, place=PLACE):
    """(2, 2) covariance of a position by arrivals with 1 µs each, east and north."""
    lat, lon = (np.array([station[k] for station in stations]) for k in (1, 2))
    north, east = (lat - place[0]) * 111.2e3, (lon - place[1]) * 111.2e3 * math.cos(math.radians(place[0]))
    rows = np.stack([east / distance_m, north / distance_m, np.ones(len(stations))], -1)
    return np.linalg.inv(rows.T @ rows)[:2, :2] * SPEED_OF_LIGHT**2 * 1e-12


# Honest regions


@pytest.mark.parametrize(
    ("stations", "sigma_us", "wrong"),
    [
        (MORE, 1.0, False), (MORE, 1.0, True),
        *(pytest.param(*case, False, marks=pytest.mark.long) for case in ((WIDE, 1.0), (MORE, 10.0))),
    ],
)  # fmt: skip
def test_regions_hold_the_truth_as_often_as_they_say(stations, sigma_us, wrong):
    rng = np.random.default_rng(11)
    draws, inside = 25, []
    for _ in range(draws):
        edge = 0.0 if rng.random() < 0.7 else 0.5  # as transmitters of a dataset lie
        place = rng.uniform(44.8 - edge, 45.3 + edge), rng.uniform(7.4 - edge, 8.1 + edge)
        late = {"D": rng.choice([-1, 1]) * rng.uniform(20, 60)} if wrong else None
        value = document(stations, sigma_us=sigma_us, rng=rng, place=place, late_us=late)
        (prepared,) = prepare_sightings(value)
        inside.append([inside_level(locate_sighting(prepared.sighting), *place)[level] for level in LEVELS])

    for share, level in zip(np.mean(inside, 0), LEVELS.values(), strict=True):
        assert share == pytest.approx(level, abs=max(3 * math.sqrt(level * (1 - level) / draws), 0.05))


@pytest.mark.parametrize(("stations", "late_us"), [(MORE, 100.0), (MORE, -15.0), (MORE[:5], 60.0)])
def test_one_wrong_clock_is_found_and_named(stations, late_us):
    one = located(document(stations, late_us={"C": late_us}))
    about = one.features[0]["properties"]

    assert [entry["name"] for entry in about["left_out"]] == ["C"]
    off_us, word = re.match(r"its arrival is ([\d.]+) µs (\w+) than", about["left_out"][0]["reason"]).groups()
    assert float(off_us) == pytest.approx(abs(late_us), abs=5)
    assert word == ("later" if late_us > 0 else "earlier")
    assert one.posterior.wrong[2] > 0.5 > np.delete(one.posterior.wrong, 2).max()
    assert "C" not in about["stations"]
    assert about["chi2_dof"] < 4
    assert error_m(one) < 2_000


def test_a_difference_that_light_cannot_explain_leaves_its_station_out():
    one = located(document(MORE, late_us={"C": 150_000.0}))

    assert [entry["name"] for entry in one.left_out] == ["C"]
    assert "light takes" in one.left_out[0]["reason"]
    assert error_m(one) < 2_000


# Along the ground


DCF77 = (50.0152, 9.0112)
EUROPE = (("HB9ODP", 46.499351, 8.798828), ("JO51xl", 51.466044, 11.977189), ("pa0rdt", 51.5005, 3.60069))


def ground_document(frequency_hz, errors_us=(2.0, -3.0, 4.0), sigma_us=1.0):
    distance = np.array([float(geodesic_m(*(np.float64(v) for v in (*DCF77, lat, lon)))) for _, lat, lon in EUROPE])
    arrival = distance / SPEED_OF_LIGHT * 1e6 + np.array(errors_us)
    names = [name for name, *_ in EUROPE]
    return {
        "frequency_hz": frequency_hz,
        "stations": [
            {"name": name, "lat": lat, "lon": lon, "alt": 0.0, "strength_db": -60.0, "snr_db": 30.0}
            for name, lat, lon in EUROPE
        ],
        "pairs": [
            {"reference": names[a], "station": names[b], "difference_us": float(arrival[b] - arrival[a]),
             "sigma_us": sigma_us}
            for a, b in ((0, 1), (0, 2), (1, 2))
        ],
    }  # fmt: skip


def test_a_long_wave_is_located_over_the_ellipsoid_with_an_honest_region():
    one = located(ground_document(77_500.0) | {"start": "2026-06-21T12:00:00Z"})
    about = one.features[0]["properties"]

    assert error_m(one, DCF77) < 3_000
    assert about["propagation"] == "ground wave"
    assert 50 < about["region_km2"]["95"] < 2_000  # the propagation of a long wave is not known to a microsecond
    assert inside_level(one.posterior, *DCF77)["95"]


def test_by_night_the_sky_wave_makes_regions_of_long_waves_wider():
    day, night, unknown = (
        located(ground_document(77_500.0) | start).features[0]["properties"]["region_km2"]["95"]
        for start in ({"start": "2026-06-21T12:00:00Z"}, {"start": "2026-06-21T23:30:00Z"}, {})
    )

    assert night > 2 * day
    assert unknown == night


def test_sky_waves_are_refused():
    with pytest.raises(ConfigError, match=r"7\.1 MHz over \d+ km to \w+ is a sky wave"):
        located(ground_document(7_100_000.0))


# Pairs


def test_pairs_become_arrivals_with_each_stations_own_sigma():
    own = {"A": 0.5, "B": 2.0, "C": 1.0}
    times = {"A": 0.0, "B": 30.0, "C": -12.0}
    pairs = tuple(
        PairMeasurement(
            reference=a, station=b, difference_us=times[b] - times[a], sigma_us=math.hypot(own[a], own[b]),
            kind="complex", peak=1.0, ambiguity=0.0,
        )
        for a, b in (("A", "B"), ("A", "C"), ("B", "C"))
    )  # fmt: skip

    timed, arrival, sigma = arrivals_of_pairs(["A", "B", "C", "D"], pairs)

    assert timed.tolist() == [True, True, True, False]
    assert (arrival - arrival[0])[:3] == pytest.approx([0, 30, -12])
    assert sigma[:3] == pytest.approx(list(own.values()), rel=0.02)


def pair(reference, station, difference_us, sigma_us=1.0, **changes):
    facts = {"kind": "complex", "peak": 1.0, "ambiguity": 0.0} | changes
    return PairMeasurement(
        reference=reference, station=station, difference_us=difference_us, sigma_us=sigma_us, **facts
    )


def test_a_pair_whose_peak_may_be_another_is_less_certain():
    """With a probability of 4 % it is 50 µs off: 10 µs rms beside its own."""
    doubtful = pair("A", "B", 30.0, ambiguity=0.04, alternatives_us=(-20.0, 40.0))
    _, _, sigma = arrivals_of_pairs(["A", "B"], (doubtful,))
    assert math.hypot(*sigma) == pytest.approx(math.hypot(1.0, 10.0), rel=1e-3)


def test_differences_that_contradict_each_other_widen_their_sigmas():
    """30 − 10 is not 26: least squares spreads the 6 µs, which are √12 standard deviations of one degree of freedom."""
    timed, arrival, sigma = arrivals_of_pairs(
        ["A", "B", "C"], (pair("A", "B", 30), pair("A", "C", 10), pair("C", "B", 26))
    )
    assert timed.all()
    assert arrival - arrival[0] == pytest.approx([0, 32, 8])
    assert np.hypot(sigma[:2], sigma[1:]) == pytest.approx([math.sqrt(12)] * 2, rel=0.01)


def test_sigmas_of_the_short_form_are_those_of_differences():
    facts = zip(STATIONS, (0.0, 9.0, -7.0, 3.0), (0.0, 2.0, 3.0, 4.0), strict=True)
    stations = [
        {"name": name, "lat": lat, "lon": lon, "alt": alt, "rssi_dbm": -90.0, "arrival_difference_us": later,
         "arrival_sigma_us": sigma}
        for (name, lat, lon, alt), later, sigma in facts
    ]  # fmt: skip
    (prepared,) = prepare_sightings({"stations": stations, "reference": "A"})
    own = prepared.sighting.arrival_sigma_us

    assert np.hypot(own[0], own[1:]) == pytest.approx([2.0, 3.0, 4.0], rel=1e-4)
    assert own[0] == pytest.approx(math.sqrt(2))  # as much as the best of the others


# Shapes


def test_contours_of_a_ring_have_a_hole_and_its_area():
    y, x = np.mgrid[-30:31, -30:31].astype(float)
    radius = np.hypot(x, y)
    polygons = polygons_of(rings_of(-np.abs(radius - 15), -5.0))

    assert [len(polygon) for polygon in polygons] == [2]
    areas = [0.5 * sum(a[1] * b[0] - b[1] * a[0] for a, b in pairwise(ring)) for ring in polygons[0]]
    assert areas[0] == pytest.approx(math.pi * 20**2, rel=0.02)
    assert areas[1] == pytest.approx(-math.pi * 10**2, rel=0.02)


def test_labels_tell_parts_apart():
    image = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 1]], bool)

    assert label(image).tolist() == [[1, 1, 0, 0], [0, 0, 0, 2], [3, 0, 2, 2]]


# The command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "observations.json"
    value = document(MORE)
    value["pairs"][0]["curve"] = {"start_us": -60.0, "step_us": 30.0, "values": [0.1, 0.2, 0.9, 0.2, 0.1]}
    path.write_text(json.dumps(value))
    return path


def test_the_command_prints_geojson_and_draws_a_map(file, tmp_path, capsys):
    assert main(["rf", "locate", str(file), "--map", str(tmp_path / "map.html"), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    page = (tmp_path / "map.html").read_text()
    assert found["features"][0]["properties"]["id"] == "call"
    assert "χ² per degree of freedom" in page
    (explained,) = re.findall(r"The place found explains (-?[\d.]+) µs", page)
    travel = travel_us(MORE)
    assert float(explained) == pytest.approx(travel[1] - travel[0], abs=3)
    assert "data:image/png;base64," in page
    assert main(["rf", "locate", str(file), "--map", str(tmp_path / "map.png"), "--json"]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_short_observations_need_no_run(tmp_path, capsys):
    travel = travel_us(STATIONS)
    stations = [
        {"name": name, "lat": lat, "lon": lon, "alt": alt, "rssi_dbm": -90.0, "arrival_difference_us": float(later)}
        for (name, lat, lon, alt), later in zip(STATIONS, travel - travel[0], strict=True)
    ]
    (tmp_path / "short.json").write_text(json.dumps({"stations": stations}))

    assert main(["rf", "locate", str(tmp_path / "short.json"), "--json"]) == 0

    lon, lat = json.loads(capsys.readouterr().out)["features"][0]["geometry"]["coordinates"]
    assert float(geodesic_m(*(np.float64(v) for v in (lat, lon, *PLACE)))) < 500


def test_positions_may_come_from_the_stations_file(tmp_path):
    value = document(MORE)
    for station in value["stations"]:
        del station["lat"], station["lon"], station["alt"]
    (tmp_path / "o.json").write_text(json.dumps(value))
    lines = [f"{name},{lat},{lon},{alt}" for name, lat, lon, alt in MORE[:-1]]
    (tmp_path / "s.csv").write_text("\n".join(["name,lat,lon,alt", *lines]))

    (one,) = locate_inputs([tmp_path / "o.json"], tmp_path / "s.csv")

    assert error_m(one) < 2_000
    assert one.left_out == [{"name": "G", "reason": "it has no position"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda value: [station.pop("lat") for station in value["stations"][:2]],
            "2 of 4 stations have a position",
        ),
        (lambda value: value["stations"].__delitem__(slice(1, None)), "1 stations; at least 2"),
        (lambda value: value["stations"][1].update(name="A"), "station 'A' is there twice"),
        (lambda value: value["pairs"][0].update(sigma_us=None), "sigma_us is None"),
    ],
)
def test_bad_observations_are_refused_in_words(change, words):
    value = document(STATIONS)
    change(value)
    with pytest.raises(ConfigError, match=words):
        located(value)


def test_three_stations_of_which_one_cannot_be_right_are_refused():
    with pytest.raises(ConfigError, match="its arrival differs by 150"):
        located(document(STATIONS[:3], late_us={"B": 150_000.0}))

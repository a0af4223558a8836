"""Positions without a run: where the truth is, what the regions hold, who is left out, what is refused."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from brim.cli import main
from brim.errors import ConfigError
from brim.rf.location import LEVELS, inside_level, locate_documents, locate_inputs
from brim.rf.location.posterior import locate_sighting
from brim.rf.location.regions import label, polygons_of, rings_of
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


def test_the_region_of_many_stations_is_the_ellipse_of_the_bound():
    one = located(document(MORE, sigma_us=1.0))
    travel = one.fit.distance_m
    lat, lon = (np.array([station[k] for station in MORE]) for k in (1, 2))
    north, east = (lat - PLACE[0]) * 111.2e3, (lon - PLACE[1]) * 111.2e3 * math.cos(math.radians(PLACE[0]))
    rows = np.stack([east / travel, north / travel, np.ones(len(MORE))], -1)
    covariance = np.linalg.inv(rows.T @ rows)[:2, :2] * SPEED_OF_LIGHT**2 * 1e-12
    ellipse = math.pi * math.sqrt(np.linalg.det(covariance)) * -2 * math.log(0.05)

    assert one.posterior.region_m2["95"] == pytest.approx(ellipse, rel=0.25)  # wider: the sigmas may be wrong


def test_two_places_that_fit_are_both_listed():
    outside = (44.8, 7.3)  # behind a station: the hyperbolas of three stations cross twice
    one = located(document(STATIONS[:3], sigma_us=0.2, place=outside))
    modes = one.features[0]["properties"]["modes"]
    nearest = min(float(geodesic_m(*(np.float64(v) for v in (m["lat"], m["lon"], *outside)))) for m in modes)

    assert len(modes) == 2
    assert nearest < 1_000
    assert sum(mode["weight"] for mode in modes) == pytest.approx(1, abs=0.02)
    assert one.features[3]["geometry"]["type"] == "MultiPolygon"
    assert inside_level(one.posterior, *outside)["95"]


def test_strength_alone_says_so_and_claims_little():
    about = properties(document(MORE, pairs=[]))

    assert about["method"] == "strength"
    assert about["region_km2"]["95"] > 500


def test_the_power_makes_no_difference_unless_it_is_given():
    quiet, loud = document(MORE, pairs=[]), document(MORE, pairs=[])
    for station in loud["stations"]:
        station["strength_db"] += 10

    assert properties(quiet)["modes"] == properties(loud)["modes"]


def test_a_known_power_narrows_strength_alone():
    value = document(MORE, pairs=[])
    for station in value["stations"]:
        station["strength_absolute"] = True
    unknown = properties(value)["region_km2"]["95"]
    (known,) = locate_documents([("observations", value)], power_dbm=32.0)

    assert known.features[0]["properties"]["power"] == "known"
    assert known.features[0]["properties"]["region_km2"]["95"] < unknown


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
    draws, inside = 40, []
    for _ in range(draws):
        edge = 0.0 if rng.random() < 0.7 else 0.5  # as transmitters of a dataset lie
        place = rng.uniform(44.8 - edge, 45.3 + edge), rng.uniform(7.4 - edge, 8.1 + edge)
        late = {"D": rng.choice([-1, 1]) * rng.uniform(20, 60)} if wrong else None
        value = document(stations, sigma_us=sigma_us, rng=rng, place=place, late_us=late)
        (prepared,) = prepare_sightings(value)
        inside.append([inside_level(locate_sighting(prepared.sighting), *place)[level] for level in LEVELS])

    for share, level in zip(np.mean(inside, 0), LEVELS.values(), strict=True):
        assert share == pytest.approx(level, abs=max(3 * math.sqrt(level * (1 - level) / draws), 0.05))


def test_errors_beyond_the_sigmas_widen_the_regions():
    agree = document(MORE, sigma_us=1.0, rng=np.random.default_rng(2))
    clash = document(MORE, sigma_us=10.0, rng=np.random.default_rng(2))
    for pair in clash["pairs"]:
        pair["sigma_us"] = math.sqrt(2)

    one, other = located(agree), located(clash)

    assert other.features[0]["properties"]["chi2_dof"] > 5
    assert other.posterior.region_m2["95"] > 20 * one.posterior.region_m2["95"]
    assert inside_level(other.posterior, *PLACE)["95"]


@pytest.mark.parametrize(("stations", "late_us"), [(MORE, 100.0), (MORE, -15.0), (MORE[:5], 60.0)])
def test_one_wrong_clock_is_found_and_named(stations, late_us):
    one = located(document(stations, late_us={"C": late_us}))
    about = one.features[0]["properties"]

    assert [entry["name"] for entry in about["left_out"]] == ["C"]
    assert "µs" in about["left_out"][0]["reason"]
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


def test_geodesics_are_those_of_the_survey():
    flinders, buninyong = (-37.95103341666667, 144.42486788888888), (-37.65282113888889, 143.92649552777777)

    assert float(geodesic_m(*(np.float64(v) for v in (*flinders, *buninyong)))) == pytest.approx(54972.271, abs=0.001)
    assert float(geodesic_m(*(np.float64(v) for v in (0, 0, 0, 1)))) == pytest.approx(111319.4908, abs=0.001)


# The command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "observations.json"
    path.write_text(json.dumps(document(MORE)))
    return path


def test_the_command_prints_geojson_and_draws_a_map(file, tmp_path, capsys):
    assert main(["rf", "locate", str(file), "--map", str(tmp_path / "map.html"), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    page = (tmp_path / "map.html").read_text()
    assert found["features"][0]["properties"]["id"] == "call"
    assert "χ² per degree of freedom" in page
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


def broken(kind):
    value = document(STATIONS)
    if kind == "positions":
        for station in value["stations"][:2]:
            del station["lat"]
    elif kind == "one":
        value["stations"] = value["stations"][:1]
    elif kind == "twice":
        value["stations"][1]["name"] = "A"
    elif kind == "beyond":
        value = document(STATIONS[:3], late_us={"B": 150_000.0})
    elif kind == "sigma":
        value["pairs"][0]["sigma_us"] = None
    return value


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("positions", "2 of 4 stations have a position, A, B none"),
        ("one", "1 stations; at least 2"),
        ("twice", "station 'A' is there twice"),
        ("beyond", "its arrival differs by 150"),
        ("sigma", "sigma_us is None"),
    ],
)
def test_bad_observations_are_one_sentence(tmp_path, capsys, kind, words):
    (tmp_path / "bad.json").write_text(json.dumps(broken(kind)))

    assert main(["rf", "locate", str(tmp_path / "bad.json")]) == 2

    message = capsys.readouterr().err
    assert words in message
    assert len(message.strip().splitlines()) == 1


@pytest.mark.parametrize("options", [["--power-dbm", "loud"], ["--power-dbm", "500"], ["--map", "map.tif"]])
def test_bad_options_are_refused(file, options, capsys):
    assert main(["rf", "locate", str(file), *options]) == 2
    assert options[0] in capsys.readouterr().err

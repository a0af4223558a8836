"""Calibration and datasets from recordings whose transmitters are known, through the command line."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from geographiclib.geodesic import Geodesic
from made_recordings import EPOCH, Scene, write_sigmf

from brim.engine.storage import Dataset
from brim.errors import ConfigError
from brim.rf.datasets import inspect
from brim.rf.features import FEATURES
from brim.rf.generation import TRUTH
from brim.rf.measurement import calibrate, dataset_from, measure
from brim.rf.measurement.labelled import read_known
from brim.rf.recordings import Site, read_sites, sites_text

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

PLACES = {"ALFA": (45.03, 7.27, 600.0), "BRAVO": (45.23, 7.86, 300.0), "CHARLIE": (44.6, 8.4, 250.0)}
DELAYS_US = {"ALFA": 0.0, "BRAVO": 3.2, "CHARLIE": -1.4}
GAINS_DB = {"ALFA": 60.0, "BRAVO": 63.5, "CHARLIE": 58.0}
TRANSMITTERS = {"first": (45.0, 7.7), "second": (44.9, 8.1)}
RATE_HZ = 50_000.0


def received_dbm(distance_m):
    """Of 30 dBm at 145 MHz, by free space."""
    return 30 - 32.45 - 20 * np.log10(145 * distance_m / 1e3)


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    """Two transmitters at known places, heard by three stations whose cables delay them."""
    folder = tmp_path_factory.mktemp("known")
    lines = ["file,transmission,tx_lat,tx_lon,tx_power_dbm"]
    for number, (name, (lat, lon)) in enumerate(TRANSMITTERS.items()):
        scene = Scene(1.2, 8_000.0, "fm", seed=number, snr_db=25.0)
        for station, place in PLACES.items():
            distance_m = Geodesic.WGS84.Inverse(lat, lon, *place[:2])["s12"]
            iq = scene.receive(RATE_HZ, 0.0, distance_m / 299_792_458 + DELAYS_US[station] * 1e-6)
            iq = iq * 10 ** ((received_dbm(distance_m) + GAINS_DB[station]) / 20)
            path = folder / f"{name}_{station}"
            write_sigmf(path, iq, RATE_HZ, f"{EPOCH}.000000000Z", place=place,
                        centre_hz=145e6, station=station)  # fmt: skip
            lines.append(f"{path.name}.sigmf-meta,{name},{lat},{lon},30")
    (folder / "recordings.csv").write_text("\n".join(lines) + "\n")
    return folder / "recordings.csv"


def test_delays_of_stations_are_found(listing, tmp_path):
    taken_off = {"ALFA": 5.0, "BRAVO": 1.0, "CHARLIE": -9.0}
    places = [dict(zip(("lat", "lon", "alt"), place, strict=True)) for place in PLACES.values()]
    before = [
        Site(name=name, delay_us=us, **place) for (name, us), place in zip(taken_off.items(), places, strict=True)
    ]

    sites, report = calibrate(listing, before)

    for site in sites:  # the first keeps its own, and the others are relative to it
        assert site.delay_us == pytest.approx(5 + DELAYS_US[site.name], abs=0.6)
    assert report["transmissions"] == 2
    (tmp_path / "s.csv").write_text(sites_text(sites))
    assert read_sites(tmp_path / "s.csv") == sites


def test_gains_of_stations_are_found_and_turn_levels_into_powers_at_the_antenna(listing):
    sites, _ = calibrate(listing)
    assert {site.name: site.gain_db for site in sites} == pytest.approx(GAINS_DB, abs=0.3)
    stations = measure(sorted(listing.parent.glob("first_*.sigmf-meta")), sites).observation.stations

    assert len(stations) == 3
    for station in stations:
        distance_m = Geodesic.WGS84.Inverse(*TRANSMITTERS["first"], station.lat, station.lon)["s12"]
        assert station.strength_absolute
        assert station.strength_db == pytest.approx(received_dbm(distance_m), abs=0.4)
        assert station.noise_db == pytest.approx(station.strength_db - 25, abs=2.5)
        assert station.features["rssi_dbm"]["mean"] == pytest.approx(station.strength_db, abs=0.5)


def test_known_transmissions_become_a_dataset(listing, tmp_path):
    report = dataset_from(listing, tmp_path / "real")

    assert report["samples"] == 2
    rows = Dataset(tmp_path / "real").load()
    assert rows["transmitter"][:, :2].tolist() == [list(place) for place in TRANSMITTERS.values()]
    assert bool(rows["present"].all())
    assert bool(rows["features"].isfinite().all())
    assert inspect(tmp_path / "real").as_dict()["samples"] == 2
    names = [name for name, _ in TRUTH]
    ends = zip(TRANSMITTERS.values(), rows["truth"], rows["reference"].tolist(), strict=True)
    for row, ((lat, lon), truth, reference) in enumerate(ends):
        far = np.array([Geodesic.WGS84.Inverse(lat, lon, *place[:2])["s12"] for place in PLACES.values()])
        assert truth[:, names.index("distance_m")].numpy() == pytest.approx(far, rel=1e-3)
        later_us = truth[:, names.index("arrival_difference_us")].numpy()
        assert later_us == pytest.approx((far - far[reference]) / 299.792458, abs=0.1)
        azimuth = np.radians([Geodesic.WGS84.Inverse(lat, lon, *place[:2])["azi1"] for place in PLACES.values()])
        design = np.stack([np.sin(azimuth), np.cos(azimuth), np.ones(3)], 1)
        sigma_us = rows["features"][row, :, list(dict(FEATURES)).index("arrival_sigma_us"), 0].numpy()
        scaled = design / np.maximum(sigma_us * 299.792458, 30)[:, None]  # m
        bound_m = np.sqrt(np.trace(np.linalg.inv(scaled.T @ scaled)[:2, :2]))
        assert rows["crlb_m"][row] == pytest.approx(bound_m, rel=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,tx_lon\na.wav,7\n", "no tx_lat"),
        ("file,tx_lat,tx_lon\na.wav,95,7\n", "not on Earth"),
    ],
)
def test_a_list_without_places_is_refused(tmp_path, text, words):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(ConfigError) as failure:
        read_known(tmp_path / "r.csv")
    assert words in str(failure.value)


def test_the_commands_write_what_they_say(listing, tmp_path):
    from cli_commands import answer, refused

    assert len(answer("rf", "calibrate", listing, "--out", tmp_path / "s.csv")["stations"]) == 3
    with (tmp_path / "s.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == list(PLACES)
    files = sorted(listing.parent.glob("first_*.sigmf-meta"))
    document = answer("rf", "measure", *files, "--out", tmp_path / "o.json")
    assert len(document["pairs"]) == 3
    assert "3 are needed" in refused(
        "rf", "measure", *files[:2], listing.parent / "none.wav", "--out", tmp_path / "x.json"
    )
    assert not (tmp_path / "x.json").exists()

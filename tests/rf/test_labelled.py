"""Calibration and datasets from recordings whose transmitters are known, through the command line."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from made_recordings import EPOCH, Scene, write_sigmf

from brim.engine.storage import Dataset
from brim.errors import ConfigError
from brim.rf.datasets import inspect
from brim.rf.measurement import calibrate, dataset_from
from brim.rf.measurement.labelled import read_known
from brim.rf.physics.geometry import geodesic_m
from brim.rf.recordings import read_sites, sites_text

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

PLACES = {"ALFA": (45.03, 7.27, 600.0), "BRAVO": (45.23, 7.86, 300.0), "CHARLIE": (44.6, 8.4, 250.0)}
DELAYS_US = {"ALFA": 0.0, "BRAVO": 3.2, "CHARLIE": -1.4}
TRANSMITTERS = {"first": (45.0, 7.7), "second": (44.9, 8.1)}
RATE_HZ = 50_000.0


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    """Two transmitters at known places, heard by three stations whose cables delay them."""
    folder = tmp_path_factory.mktemp("known")
    lines = ["file,transmission,tx_lat,tx_lon"]
    for number, (name, (lat, lon)) in enumerate(TRANSMITTERS.items()):
        scene = Scene(1.2, 8_000.0, "fm", seed=number, snr_db=25.0)
        for station, place in PLACES.items():
            light_s = float(geodesic_m(*(np.array(value) for value in (lat, lon, *place[:2])))) / 299_792_458
            iq = scene.receive(RATE_HZ, 0.0, light_s + DELAYS_US[station] * 1e-6)
            path = folder / f"{name}_{station}"
            write_sigmf(path, iq / np.abs(iq).max() / 2, RATE_HZ, f"{EPOCH}.000000000Z", place=place,
                        centre_hz=145e6, station=station)  # fmt: skip
            lines.append(f"{path.name}.sigmf-meta,{name},{lat},{lon}")
    (folder / "recordings.csv").write_text("\n".join(lines) + "\n")
    return folder / "recordings.csv"


def test_delays_of_stations_are_found(listing, tmp_path):
    sites, report = calibrate(listing)

    for site in sites:
        assert site.delay_us == pytest.approx(DELAYS_US[site.name], abs=0.6)
    assert report["transmissions"] == 2
    (tmp_path / "s.csv").write_text(sites_text(sites))
    assert read_sites(tmp_path / "s.csv") == sites


def test_known_transmissions_become_a_dataset(listing, tmp_path):
    report = dataset_from(listing, tmp_path / "real")

    assert report["samples"] == 2
    rows = Dataset(tmp_path / "real").load(("features", "present", "transmitter", "truth"))
    assert rows["transmitter"][:, :2].tolist() == [list(place) for place in TRANSMITTERS.values()]
    assert bool(rows["present"].all())
    assert bool(rows["features"].isfinite().all())
    assert inspect(tmp_path / "real").as_dict()["samples"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,tx_lon\na.wav,7\n", "no tx_lat"),
        ("file,tx_lat,tx_lon\na.wav,95,7\n", "not on Earth"),
        ("file,tx_lat,tx_lon,colour\na.wav,45,7,red\n", "unknown column 'colour'"),
        ("tx_lat,tx_lon\n45,7\n", "missing column file"),
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

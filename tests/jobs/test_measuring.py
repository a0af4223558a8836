"""Recordings of a dataset, measured and located in a process of its own."""

import json

import numpy as np
import pytest

from brim.errors import ConfigError
from brim.jobs.kinds import Stopped
from brim.jobs.measuring import measure_confined
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef

PLACE = (45.06, 7.70)
STATIONS = {"HILL": (45.0, 7.5, 250.0), "TOWER": (45.25, 7.75, 310.0), "FIELD": (44.9, 7.9, 180.0)}
RATE_HZ = 25_000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A second of noise at each station, delayed by the way from the transmitter, and where the stations are."""
    path, rng, num = tmp_path_factory.mktemp("recordings"), np.random.default_rng(3), 25_000
    frequency = np.fft.fftfreq(num, 1 / RATE_HZ)
    spectrum = (rng.normal(size=num) + 1j * rng.normal(size=num)) * (np.abs(frequency) < 5_000)
    here = np.array(ecef(*map(np.array, (*PLACE, 302.0))))
    for name, (lat, lon, alt) in STATIONS.items():
        way_m = np.linalg.norm(np.array(ecef(*map(np.array, (lat, lon, alt + 30)))) - here)
        signal = np.fft.ifft(spectrum * np.exp(-2j * np.pi * frequency * way_m / SPEED_OF_LIGHT))
        signal += 0.05 * signal.std() * (rng.normal(size=num) + 1j * rng.normal(size=num))
        (path / f"{name}.sigmf-data").write_bytes((signal / signal.std() / 8).astype("<c8").tobytes())
        about = {"core:datatype": "cf32_le", "core:sample_rate": RATE_HZ, "core:version": "1.2.0"}
        capture = {"core:sample_start": 0, "core:frequency": 145e6, "core:datetime": "2026-01-31T12:00:00Z"}
        meta = {"global": about, "captures": [capture], "annotations": []}
        (path / f"{name}.sigmf-meta").write_text(json.dumps(meta))
    lines = [f"{name},{','.join(map(str, place))}" for name, place in STATIONS.items()]
    (path / "stations.csv").write_text("\n".join(["name,lat,lon,alt", *lines]))
    return path


def test_recordings_are_located_by_the_places_of_their_stations(folder):
    told = []

    answers = measure_confined(folder, {}, None, lambda done, total: told.append((done, total)))

    point = answers["position"]["features"][0]
    assert point["geometry"]["coordinates"][::-1] == pytest.approx(PLACE, abs=0.02)
    assert sorted(point["properties"]["stations"]) == sorted(STATIONS)
    assert told[-1][0] == told[-1][1] > 0
    assert told == sorted(told)
    assert answers["map"].startswith("<!")


def test_what_cannot_be_measured_is_named_without_where_it_is(tmp_path):
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(b"RIFF" + bytes(40))

    def refused():
        with pytest.raises(ConfigError) as caught:
            measure_confined(tmp_path, {}, None, lambda done, total: None)
        return str(caught.value)

    assert "a.wav" in refused()
    (tmp_path / "stations.csv").write_text("name,lat,lon,alt\nHILL,,7.5,250\n")
    assert refused().startswith("stations file stations.csv, line 2: no lat")


def test_who_raises_in_between_ends_the_process(folder):
    def stop(done, total):
        raise Stopped

    with pytest.raises(Stopped):
        measure_confined(folder, {}, None, stop)

"""Recordings over HTTP: uploaded, measured in the reader, located; what is wrong with them is said, nothing stays."""

import hashlib
import json

import numpy as np
import pytest
from live_api import FORM, Part, multipart

from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef

PLACE = (45.06, 7.70)
STATIONS = {"HILL": (45.0, 7.5, 250.0), "TOWER": (45.25, 7.75, 310.0), "FIELD": (44.9, 7.9, 180.0)}
RATE_HZ, SECONDS, CENTRE_HZ = 25_000.0, 4.0, 145_000_000.0


@pytest.fixture(scope="module")
def recordings() -> list[Part]:
    """Two files for each station: noise of 10 kHz, delayed by the way from the transmitter."""
    rng = np.random.default_rng(3)
    num = int(RATE_HZ * SECONDS)
    frequency = np.fft.fftfreq(num, 1 / RATE_HZ)
    spectrum = (rng.normal(size=num) + 1j * rng.normal(size=num)) * (np.abs(frequency) < 5_000)
    here = np.array(ecef(*(np.array(v) for v in (*PLACE, 302.0))))
    parts: list[Part] = []
    for name, (lat, lon, alt) in STATIONS.items():
        there = np.array(ecef(*(np.array(v) for v in (lat, lon, alt + 30))))
        delay_s = np.linalg.norm(there - here) / SPEED_OF_LIGHT
        signal = np.fft.ifft(spectrum * np.exp(-2j * np.pi * frequency * delay_s))
        noise = 0.05 * signal.std() * (rng.normal(size=num) + 1j * rng.normal(size=num))
        data = ((signal + noise) / signal.std() / 8).astype("<c8").tobytes()
        place = {"type": "Point", "coordinates": [lon, lat, alt]}
        capture = {"core:sample_start": 0, "core:frequency": CENTRE_HZ, "core:datetime": "2026-01-31T12:00:00Z"}
        about = {"core:datatype": "cf32_le", "core:sample_rate": RATE_HZ, "core:version": "1.2.0",
                 "core:sha512": hashlib.sha512(data).hexdigest()}  # fmt: skip
        meta = {"global": about, "captures": [{**capture, "core:geolocation": place}], "annotations": []}
        parts += [("files", f"{name}.sigmf-meta", json.dumps(meta).encode()), ("files", f"{name}.sigmf-data", data)]
    return parts


def test_recordings_become_a_position_and_are_deleted(shared, recordings):
    answer = shared.send("/api/locate", *recordings)

    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/geo+json"
    about = answer.json["features"][0]["properties"]
    lon, lat = answer.json["features"][0]["geometry"]["coordinates"]
    assert (lat, lon) == pytest.approx(PLACE, abs=0.02)
    assert sorted(about["stations"]) == sorted(STATIONS)
    assert about["region_km2"]["95"] < 100
    page = shared.ask("POST", "/api/locate", multipart([*recordings, ("format", None, b"html")]), headers=FORM)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "HILL to TOWER" in page.body.decode() or "TOWER to HILL" in page.body.decode()
    assert "<script" not in page.body.decode()
    assert shared.uploads() == []


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda parts: [], 422, "files is missing"),
        (lambda parts: parts[:2], 422, "1"),
        (lambda parts: [*parts, ("colour", None, b"red")], 422, "colour"),
        (lambda parts: [("files", "../x.wav", b"RIFF"), *parts], 422, "name"),
        (lambda parts: [*parts, ("stations", "s.csv", b"name,lat,lon,alt,colour\nA,1,2,3,4\n")], 422, "colour"),
    ],
)
def test_what_cannot_be_located_is_one_sentence_without_paths(shared, recordings, change, status, words):
    answer = shared.send("/api/locate", *change(recordings))

    assert answer.status == status, answer.body
    assert words in answer.json["detail"]
    assert str(shared.settings.data) not in answer.json["detail"]
    assert shared.uploads() == []


# Large ones: a dataset, for a job


def test_recordings_are_uploaded_as_a_dataset(shared, recordings):
    named: list[Part] = [("name", None, b"calls"), ("kind", None, b"recordings")]
    files = [("recordings", name, content) for _, name, content in recordings]

    made = shared.send("/api/datasets", *named, *files)

    assert made.status == 201, made.body
    assert (made.json["kind"], made.json["items"]) == ("recordings", 3)
    preview = shared.get(f"/api/datasets/{made.json['id']}/preview").json["items"]
    assert [one["name"] for one in preview] == sorted(f"{name}.sigmf-meta" for name in STATIONS)
    assert shared.get(f"/api/datasets/{made.json['id']}/statistics").json["items"] == 3

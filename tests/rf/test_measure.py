"""Measured arrival differences against those that made the recordings; what cannot be measured says why."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from made_recordings import (
    CENTRE_HZ,
    EPOCH,
    STATIONS,
    Scene,
    modulated,
    to_int16,
    write_kiwi,
    write_sigmf,
    write_sites,
)
from small_dataset import write_dataset

from brim.errors import ConfigError
from brim.rf.config import GenerateConfig
from brim.rf.datasets import export
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation import TRUTH
from brim.rf.location.answers import locate_documents
from brim.rf.measurement import MeasureConfig, Observation, measure
from brim.rf.measurement.arrival import fit_delay
from brim.rf.measurement.spectra import Spectra
from brim.rf.measurement.streams import Band
from brim.rf.physics.geometry import geodesic_m
from brim.rf.recordings import read_sites
from real_data import real_files

DELAYS_S = {"ALFA": 1.31e-3, "BRAVO": 0.873e-3, "CHARLIE": 1.402e-3, "DELTA": 1.1e-3}
RATES_HZ = {"ALFA": 12_001.0843, "BRAVO": 12_000.9713, "CHARLIE": 12_001.1402, "DELTA": 12_001.05}
STARTS_S = {"ALFA": 0.25, "BRAVO": 0.8131, "CHARLIE": 0.05, "DELTA": 0.4}


def kiwi_file(folder, scene, name, **more):
    rate, start = RATES_HZ[name], STARTS_S[name]
    iq = scene.receive(rate, start, DELAYS_S[name])
    return write_kiwi(folder / f"20260131T120000Z_{CENTRE_HZ:.0f}_{name}_iq.wav", iq, rate, start, **more)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Three KiwiSDR files of 6 s at 12 kHz, with clocks of their own, and their stations."""
    folder = tmp_path_factory.mktemp("kiwi")
    scene = Scene(6.0, 2_400.0)
    paths = [kiwi_file(folder, scene, name, jitter_s=1e-7) for name in ("ALFA", "BRAVO", "CHARLIE")]
    return paths, read_sites(write_sites(folder / "stations.csv"))


def check_pairs(observation: Observation, sigmas: float = 4.0) -> None:
    assert observation.pairs
    for pair in observation.pairs:
        expected_us = (DELAYS_S[pair.station] - DELAYS_S[pair.reference]) * 1e6
        assert abs(pair.difference_us - expected_us) < sigmas * pair.sigma_us + 0.05, pair
        assert pair.sigma_us < 3.0
        assert pair.ambiguity < 1e-3


def test_receivers_with_drifting_clocks_agree_with_the_truth(recorded):
    paths, sites = recorded

    observation = measure(paths, sites).observation

    check_pairs(observation)
    assert observation.frequency_hz == pytest.approx(CENTRE_HZ, abs=200)
    assert observation.bandwidth_hz == pytest.approx(2_400, rel=0.35)
    for station in observation.stations:
        assert station.time.model == "gnss"
        assert station.time.rate_hz == pytest.approx(RATES_HZ[station.name], rel=1e-7)
        assert station.snr_db == pytest.approx(25, abs=2.5)
        assert station.problems == ("2 stale time stamps at the start",)
        later_us = (DELAYS_S[station.name] - DELAYS_S[observation.reference]) * 1e6
        assert station.features["arrival_difference_us"] == pytest.approx(later_us, abs=2.0)
        assert (station.features["arrival_sigma_us"] == 0) == (station.name == observation.reference)


def test_the_document_survives_a_file(recorded):
    paths, sites = recorded
    observation = measure(paths, sites, MeasureConfig(seconds=2.0)).observation

    again = Observation.from_dict(json.loads(json.dumps(observation.as_dict())))

    assert again.as_dict() == observation.as_dict()


def test_part_of_the_time_and_a_band_can_be_asked_for(recorded):
    paths, sites = recorded
    config = MeasureConfig(frequency_mhz=CENTRE_HZ / 1e6, bandwidth_khz=2.0, start="1.0", seconds=3.0)

    observation = measure(paths, sites, config).observation

    check_pairs(observation)
    assert (observation.bandwidth_hz, observation.seconds) == (2_000.0, 3.0)
    assert observation.start.startswith("2026-01-31T12:00:01.8984")  # after the stale blocks of the latest


def test_formats_rates_and_oscillators_can_differ(tmp_path):
    scene = Scene(2.0, 9_000.0, "ofdm", snr_db=15.0)
    for name, rate, kind, shift in (("ALFA", 48_000.0, "ci16_le", 0.0), ("BRAVO", 31_250.0, "cf32_be", 12.0),
                                    ("CHARLIE", 200_000.0, "cu8", -14.5)):  # fmt: skip
        iq = scene.receive(rate, STARTS_S[name], DELAYS_S[name], shift_hz=shift)
        iq = iq / np.abs(iq).max()
        start = f"{EPOCH}.{round(STARTS_S[name] * 1e9):09d}Z"
        write_sigmf(tmp_path / name, iq, rate, start, datatype=kind, place=STATIONS[name], station=name)

    observation = measure(sorted(tmp_path.glob("*.sigmf-meta"))).observation

    check_pairs(observation)


@pytest.mark.parametrize("kind", ["am", "fm", "psk", "fsk", "ofdm"])
def test_errors_are_at_the_cramer_rao_bound(kind):
    """Pairs of streams at 10 and 20 dB, 300 Hz to 6 kHz wide: weights, fit and chunks lose nothing."""
    ratios, claimed = [], []
    for trial in range(12):
        rng = np.random.default_rng([trial, len(kind)])
        width, snr_db = (300.0, 6_000.0)[trial % 2], (10.0, 20.0)[trial // 2 % 2]
        rate, seconds = 2.5 * width, 3_000 / width + 1.0
        num = int(rate * seconds)
        signal = modulated(kind, num + 64, rate, width, rng)
        delay = rng.uniform(-0.005, 0.005) / width  # streams are aligned when they are compared
        late = np.fft.ifft(np.fft.fft(signal) * np.exp(-2j * np.pi * np.fft.fftfreq(num + 64, 1 / rate) * delay))
        density = 10 ** (-snr_db / 10) / width
        pair = [part[32:-32] + white(rng, num, density * rate) for part in (signal, late * np.exp(0.7j))]
        band = Band(centre_hz=0.0, width_hz=1.3 * width, rate_hz=rate)
        adder = Spectra("complex", band, 0.05 if width > 1_000 else 0.5, 2, 1, torch.device("cpu"))
        adder.add(torch.from_numpy(np.array(pair, np.complex64)), 0)
        found = fit_delay(adder.sums(), 0, 0, 1, 4 / width)
        ratios.append((found.delay_s - delay) / bound_s(signal, rate, width, density))
        claimed.append(found.sigma_s / bound_s(signal, rate, width, density))

    assert 0.9 < np.median(claimed) < 1.5
    assert math.sqrt(np.mean(np.square(ratios))) <= 1.2 + 2 * 1.2 / math.sqrt(2 * len(ratios))


@pytest.mark.parametrize("kind", ["complex", "envelope"])
def test_a_carrier_alone_tells_no_delay(kind):
    rng = np.random.default_rng(4)
    rate, num = 3_000.0, 60_000
    carrier = np.exp(2j * np.pi * 100.3 * np.arange(num) / rate)
    pair = np.array([carrier + white(rng, num, 0.1), carrier * np.exp(0.7j) + white(rng, num, 0.1)], np.complex64)
    adder = Spectra(kind, Band(centre_hz=0.0, width_hz=1_500.0, rate_hz=rate), 0.25, 2, 1, torch.device("cpu"))

    adder.add(torch.from_numpy(pair), 0)

    assert fit_delay(adder.sums(), 0, 0, 1, 2e-3) is None


def test_the_noise_of_a_keyed_carrier_is_not_taken_for_its_sidebands():
    """While it is off, the envelope is noise, in the same moments everywhere: far fewer values than are counted."""
    rate, seconds, worst = 6_000.0, 30, 0.0
    for trial in range(4):
        rng = np.random.default_rng([4, trial])
        frequency = np.fft.fftfreq(int(rate * seconds), 1 / rate)
        on = np.convolve((np.arange(len(frequency)) % 6_000) > 600, np.exp(-np.arange(60) / 6.4) / 6.9)[
            : len(frequency)
        ]
        inside = np.clip((2_250 - np.abs(frequency)) / 750, 0, 1)
        pair = [np.fft.ifft(np.fft.fft(on + white(rng, len(on), 0.3)) * inside) for _ in range(2)]
        adder = Spectra("envelope", Band(centre_hz=0.0, width_hz=3_000.0, rate_hz=rate), 0.5, 2, 1, torch.device("cpu"))
        adder.add(torch.from_numpy(np.array(pair, np.complex64)), 0)
        found = fit_delay(adder.sums(), 0, 0, 1, 1.3e-3)
        worst = max(worst, 0.0 if found is None else abs(found.delay_s) / found.sigma_s)

    assert worst < 4


def test_weak_sidebands_of_a_carrier_tell_the_delay(tmp_path):
    """As time signals have them: 13° of phase noise, 13 dB below the carrier, in noise that hides them."""
    scene = Scene(20.0, 1_300.0, "noise", snr_db=4.0)
    scene.signal = np.exp(0.23j * np.sign(scene.signal.real))
    paths = [kiwi_file(tmp_path, scene, name) for name in ("ALFA", "BRAVO", "CHARLIE")]

    observation = measure(paths, read_sites(write_sites(tmp_path / "stations.csv"))).observation

    assert len(observation.pairs) == 3
    for pair in observation.pairs:
        expected_us = (DELAYS_S[pair.station] - DELAYS_S[pair.reference]) * 1e6
        assert abs(pair.difference_us - expected_us) < 4 * pair.sigma_us < 400, pair


def test_narrow_receivers_are_tuned_to_what_is_meant(tmp_path):
    """A stronger neighbour 3 kHz away, from elsewhere, is neither located nor heard by the demodulators."""
    scene, other = Scene(6.0, 1_500.0), Scene(6.0, 700.0, "fsk", seed=9, snr_db=60.0)
    paths = []
    for n, name in enumerate(("ALFA", "BRAVO", "CHARLIE")):
        rate, start = RATES_HZ[name], STARTS_S[name]
        iq = scene.receive(rate, start, DELAYS_S[name])
        neighbour = other.receive(rate, start, 1e-3 - n * 3e-4) * np.exp(6e3j * np.pi * np.arange(len(iq)) / rate)
        file = tmp_path / f"20260131T120000Z_{CENTRE_HZ:.0f}_{name}_iq.wav"
        paths.append(write_kiwi(file, iq + 2 * neighbour, rate, start))

    check_pairs(measure(paths, read_sites(write_sites(tmp_path / "stations.csv"))).observation)


def white(rng, num, power):
    return (rng.normal(size=num) + 1j * rng.normal(size=num)) * math.sqrt(power / 2)


def bound_s(signal, rate_hz, width_hz, density):
    """Cramér-Rao bound of the delay between two noisy receivers of an unknown signal, phase unknown."""
    power = np.abs(np.fft.fft(signal)) ** 2 / len(signal) / rate_hz
    frequency = np.fft.fftfreq(len(signal), 1 / rate_hz)
    order = np.argsort(frequency)
    near = max(1, int(len(signal) / rate_hz * width_hz / 200))
    ratio = np.convolve(power[order], np.ones(near) / near, "same") / density
    frequency = frequency[order]
    inside = np.abs(frequency) <= 0.65 * width_hz
    weight = (2 * ratio**2 / (1 + 2 * ratio))[inside]
    away = frequency[inside] - (weight * frequency[inside]).sum() / weight.sum()
    return 1 / math.sqrt((weight * (2 * np.pi * away) ** 2).sum())


# What goes wrong


def bad(kind, folder, scene):
    """A fourth recording that is bad in some way; the station is DELTA."""
    name = f"20260131T120000Z_{CENTRE_HZ:.0f}_DELTA_iq.wav"
    rate, num = RATES_HZ["DELTA"], 72_000
    if kind == "cut off":
        path = kiwi_file(folder, scene, "DELTA")
        path.write_bytes(path.read_bytes()[:-7])
        return path
    if kind == "its header says":
        return kiwi_file(folder, scene, "DELTA", stated_hz=11_000)
    if kind == "silent":
        return write_kiwi(folder / name, np.zeros((num, 2), "<i2"), rate, 0.4)
    if kind == "clipped":
        loud = np.clip(to_int16(scene.receive(rate, 0.4, 0.0)).astype(int) * 8, -32768, 32767).astype("<i2")
        return write_kiwi(folder / name, loud, rate, 0.4)
    if kind == "do not overlap":
        return write_kiwi(folder / name, scene.receive(rate, 0.4, 0.0), rate, 400.0)
    if kind == "another transmission":
        other = Scene(6.0, 2_400.0, seed=99)
        return write_kiwi(folder / name, other.receive(rate, 0.4, 0.0), rate, 0.4)
    if kind == "tuned to":
        return write_kiwi(folder / name.replace("7100000", "9100000"), scene.receive(rate, 0.4, 0.0), rate, 0.4)
    if kind == "second recording":
        return kiwi_file(folder, scene, "DELTA").rename(folder / "again_ALFA_iq.wav")
    if kind == "no position":
        return kiwi_file(folder, scene, "DELTA").rename(folder / "nobody.wav")
    return kiwi_file(folder, scene, "DELTA", edit=lambda old: [(s + n % 9, ns) for n, (s, ns) in enumerate(old)])


@pytest.mark.parametrize(
    "kind",
    [
        "cut off", "its header says", "silent", "clipped", "do not overlap", "another transmission", "tuned to",
        "second recording", "no position", "time stamps",
    ],
)  # fmt: skip
def test_a_bad_recording_is_left_out_and_said_or_ends_the_run(recorded, tmp_path, kind):
    paths, sites = recorded
    scene = Scene(6.0, 2_400.0)
    scene.rng = np.random.default_rng(77)  # the same transmission, other noise
    extra = bad(kind, tmp_path, scene)
    config = MeasureConfig(seconds=2.0)

    observation = measure([*paths, extra], sites, config).observation

    check_pairs(observation)
    assert [one.name for one in observation.stations] == ["ALFA", "BRAVO", "CHARLIE"]
    (dropped,) = observation.left_out
    assert kind in dropped.reason
    assert dropped.name == {"second recording": extra.name, "no position": extra.name}.get(kind, "DELTA")
    with pytest.raises(ConfigError, match="3 are needed") as failure:  # without enough good ones it is an error
        measure([*paths[:2], extra], sites, config)
    assert kind in str(failure.value)


def test_a_recording_without_a_time_gives_its_strength_alone(recorded, tmp_path):
    paths, sites = recorded
    iq = Scene(6.0, 2_400.0).receive(24_000.0, 0.0, 0.0)
    extra = write_sigmf(tmp_path / "DELTA", iq / np.abs(iq).max(), 24_000.0, None)

    observation = measure([*paths, extra], sites, MeasureConfig(seconds=2.0)).observation

    assert observation.stations[-1].time.model == "none"
    assert {name for pair in observation.pairs for name in (pair.reference, pair.station)} == {
        "ALFA",
        "BRAVO",
        "CHARLIE",
    }
    check_pairs(observation)


def test_recordings_that_do_not_say_where_they_are_tuned_have_no_frequency(tmp_path):
    scene = Scene(2.0, 2_400.0)
    for name in ("ALFA", "BRAVO", "CHARLIE"):
        data = to_int16(scene.receive(12_000.0, 0.0, DELAYS_S[name])).tobytes()
        head = b"WAVEfmt " + struct.pack("<IHHIIHH4sI", 16, 1, 2, 12_000, 48_000, 4, 16, b"data", len(data))
        (tmp_path / f"{name}.wav").write_bytes(b"RIFF" + struct.pack("<I", len(head) + len(data)) + head + data)

    observation = measure(sorted(tmp_path.glob("*.wav")), read_sites(write_sites(tmp_path / "s.csv"))).observation

    assert observation.frequency_hz is None
    (located,) = locate_documents([("recordings", observation.as_dict())])
    assert located.features[0]["properties"]["method"] == "strength"


def test_a_time_outside_the_recordings_is_refused(recorded):
    paths, sites = recorded
    with pytest.raises(ConfigError, match="outside what the recordings share"):
        measure(paths, sites, MeasureConfig(start="2026-02-01T00:00:00Z"))
    with pytest.raises(ConfigError, match="outside what the recordings share"):
        measure(paths, sites, MeasureConfig(frequency_mhz=8.0))


# Recordings of real receivers, where they are at hand


def test_real_receivers_agree_with_the_truth(tmp_path):
    (tmp_path / "s.csv").write_text(
        "name,lat,lon,alt\nHB9ODP,46.499351,8.798828,0\nJO51xl,51.466044,11.977189,0\npa0rdt,51.500500,3.600690,0\n"
    )
    expected_us = {("HB9ODP", "JO51xl"): -423.4, ("HB9ODP", "pa0rdt"): 82.1, ("JO51xl", "pa0rdt"): 505.5}

    observation = measure(real_files("recordings/*_iq.wav"), read_sites(tmp_path / "s.csv")).observation

    assert len(observation.pairs) == 3
    for pair in observation.pairs:
        assert abs(pair.difference_us - expected_us[pair.reference, pair.station]) < 5.0


# Simulated samples as recordings


@pytest.mark.parametrize("waveform", ["nbfm", "fsk"])
def test_an_exported_sample_is_measured_as_it_was_stored(tmp_path, waveform):
    config = GenerateConfig(
        dataset_type="iq_raw",
        waveform=waveform,
        tx_power_dbm=45.0,
        min_snr_db=15.0,
        fading="none",
        seed=5,
        max_gdop=30.0,
    )
    rows = write_dataset(tmp_path / "data", config, attempts=2, shard=4)
    export(tmp_path / "data", tmp_path / "sigmf", "sigmf")
    index = int(rows["index"][0])

    observation = measure(sorted((tmp_path / "sigmf").glob(f"sample_{index}_rx*.sigmf-meta"))).observation

    names = [station.name for station in config.stations]
    assert observation.reference == names[int(rows["reference"][0])]
    for station in observation.stations:
        stored = rows["features"][0, names.index(station.name)]
        for k, (name, _) in enumerate(FEATURES):
            measured = [station.features[name][statistic] for statistic in STATISTICS]
            np.testing.assert_allclose(measured, stored[k].numpy(), rtol=0.01, atol=1e-3, err_msg=name)
        assert station.strength_absolute
    truth = rows["truth"][0, :, [name for name, _ in TRUTH].index("arrival_difference_us")]
    for pair in observation.pairs:
        expected_us = float(truth[names.index(pair.station)] - truth[names.index(pair.reference)])
        assert abs(pair.difference_us - expected_us) < 4 * pair.sigma_us + 1.5, pair  # echoes come up to 3 µs later


# Receivers that share only a beacon


def test_a_beacon_ties_receivers_without_clocks(tmp_path):
    """Dongles at 96 kHz, tens of ppm off and started by hand: a beacon 20 kHz below the target gives them one clock."""
    beacon_at, rate = (47.0, 8.0), 96_000.0
    places = {"ALFA": (46.5, 8.8), "BRAVO": (46.8, 7.4), "CHARLIE": (47.3, 8.5)}
    light_s = {name: arc_m(*place, *beacon_at) / 299_792_458 for name, place in places.items()}
    target, beacon = Scene(2.5, 6_000.0, "fsk", seed=2, snr_db=20.0), Scene(2.5, 9_000.0, "fm", seed=3, snr_db=25.0)
    for name, ppm, begin in (("ALFA", 4.0, 0.0), ("BRAVO", 31.0, 0.0713), ("CHARLIE", -18.0, 0.0327)):
        true_hz, lo = rate * (1 + ppm * 1e-6), 145e6 * ppm * 1e-6
        time_s = begin + np.arange(int(2.3 * rate)) / true_hz
        iq = target.receive(true_hz, begin, DELAYS_S[name], num=len(time_s)) * np.exp(2j * np.pi * (1e4 - lo) * time_s)
        iq = iq + beacon.receive(true_hz, begin, light_s[name], num=len(time_s)) * np.exp(
            2j * np.pi * (-1e4 - lo) * time_s
        )
        write_sigmf(tmp_path / name, iq / np.abs(iq).max(), rate, None, datatype="ci16_le", place=(*places[name], 0.0),
                    centre_hz=145e6, station=name)  # fmt: skip
    config = MeasureConfig(frequency_mhz=145.01, bandwidth_khz=8.0, beacon="mast=47.0,8.0@144.99")

    measured = measure(sorted(tmp_path.glob("*.sigmf-meta")), (), config)
    observation = measured.observation

    tuned = [one.centre_hz - 145e6 for one in measured.receivers]  # their oscillators are off by as much as their rates
    assert tuned == pytest.approx([4 * 145, 31 * 145, -18 * 145], abs=100)
    check_pairs(observation, sigmas=5.0)
    assert {station.time.model for station in observation.stations} == {"beacon"}
    rates = {station.name: station.time.rate_hz for station in observation.stations}
    assert rates["BRAVO"] / rates["ALFA"] - 1 == pytest.approx(27e-6, abs=5e-7)


def arc_m(lat, lon, to_lat, to_lon):
    return float(geodesic_m(*(np.array(value) for value in (lat, lon, to_lat, to_lon))))


@pytest.mark.parametrize("text", ["mast", "mast=1,2", "mast=91,2@100", "mast=a,2@100"])
def test_a_beacon_that_is_none_is_refused(recorded, text):
    with pytest.raises(ConfigError, match="NAME=LAT,LON@MHZ"):
        measure(*recorded, MeasureConfig(frequency_mhz=7.1, beacon=text))

"""The parts of a measurement one by one, where its numbers are known in closed form."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made_recordings import CENTRE_HZ, EPOCH, modulated, write_kiwi, write_sigmf, write_sites

from brim.rf.measurement import MeasureConfig, Observation
from brim.rf.measurement.acquisition import SURE, Coarse, acquire, residual_shift_hz
from brim.rf.measurement.arrival import Delay, fit_delay
from brim.rf.measurement.document import make_measurement, solve_arrivals
from brim.rf.measurement.labelled import KnownTransmission, _delays, read_known
from brim.rf.measurement.observations import PairMeasurement
from brim.rf.measurement.receivers import choose_time, clipped_share, open_receivers, share_time, utc
from brim.rf.measurement.run import _limit_s
from brim.rf.measurement.spectra import CrossSums, live_chunks, windows
from brim.rf.measurement.streams import Band, Receiver, extract
from brim.rf.measurement.transmission import BandSpectrum, Transmission, find_transmission
from brim.rf.recordings import Recording, Site, open_recordings, read_sites
from brim.rf.recordings.clock import steady_clock
from brim.rf.recordings.recording import Samples

LIGHT_M_US = 299.792458
ONE_DEGREE_M = 111_164.0  # of latitude at 46.5°, on the ellipsoid


def cross_sums(frequency, delays_s, share, values):
    """A pair in groups that differ in delay alone; share of amplitude that both hear, values of each band in all."""
    turned = np.exp(-2j * np.pi * np.outer(delays_s, frequency))  # what comes later falls in phase with frequency
    power = torch.ones(len(delays_s), 2, len(frequency), dtype=torch.float64)
    return CrossSums(  # 0.98 values per second and hertz are independent
        kind="complex", chunk_s=0.05, frequency_hz=torch.from_numpy(frequency), band_hz=1 / 0.98,
        cross=torch.from_numpy(share * turned)[:, None], power=power, seconds=power[:, 0, 0] * values / len(delays_s),
    )  # fmt: skip


def test_a_mean_over_groups_is_as_certain_as_their_scatter_says():
    rng, frequency = np.random.default_rng(2), np.linspace(-3_000, 3_000, 121)
    errors, claims = [], []
    for _ in range(24):
        found = fit_delay(cross_sums(frequency, 1e-4 + rng.normal(size=16) * 5e-6, 0.9, 800), 0, 0, 1, 1e-3)
        errors.append(found.delay_s - 1e-4)
        claims.append(found.sigma_s)

    assert np.sqrt(np.mean(np.square(claims))) == pytest.approx(5e-6 / 4, rel=0.25)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(5e-6 / 4, rel=0.45)
    assert (found.chunks, found.peak) == (16, pytest.approx(0.9, abs=0.01))


def test_what_else_a_delay_could_be_is_as_likely_as_its_peaks_are_high():
    """Three tones 1 kHz apart, each hardly spread, look alike every millisecond."""
    frequency = np.concatenate([tone + np.linspace(-20, 20, 7) for tone in (-1_000, 0, 1_000)])

    found = fit_delay(cross_sums(frequency, np.zeros(1), 0.205, 100), 0, 0, 1, 1.5e-3)

    assert sorted(found.alternatives_s) == pytest.approx([-1e-3, 1e-3], abs=4e-5)
    away = np.outer(found.alternatives_s, frequency)
    odds = np.exp(-found.information * (1 - np.cos(2 * np.pi * away)).mean(1)).sum()
    assert found.ambiguity == pytest.approx(odds / (1 + odds), rel=1e-6)
    assert found.delay_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("lag", "shift_hz"), [(25, 12.4), (-31, -17.7)])
def test_a_first_look_says_by_how_much_the_station_is_later_and_higher(lag, shift_hz):
    rng, rate = np.random.default_rng(3), 8_000.0
    signal = modulated("noise", 40_000, rate, 3_000.0, rng)
    turned = np.exp(2j * np.pi * shift_hz * np.arange(40_000) / rate)
    first, second = (torch.from_numpy(part.astype(np.complex64)) for part in (signal, np.roll(signal, lag) * turned))
    band = Band(centre_hz=0.0, width_hz=3_000.0, rate_hz=rate)

    found = acquire(first, second, band, 8e-3, 40.0)

    assert (found.kind, found.lag_s) == ("complex", lag / rate)
    assert found.shift_hz == pytest.approx(shift_hz, abs=0.5)
    assert found.sure > SURE
    slow = first * torch.polar(torch.ones(40_000), torch.arange(40_000) * (2 * math.pi * shift_hz / 40 / rate))
    assert residual_shift_hz(first, slow, band) == pytest.approx(shift_hz / 40, abs=0.03)


def test_arrivals_can_be_as_far_apart_as_light_and_clocks_allow():
    first, second = receiver("A", sigma_s=3e-3), receiver("B", sigma_s=4e-3, lat=47.0)
    for frequency_hz, slack_s in ((145e6, 30e-6), (7e6, 2e-3)):
        expected_s = ONE_DEGREE_M / LIGHT_M_US * 1.01e-6 + slack_s + 5 * 5e-3
        assert _limit_s(first, second, frequency_hz) == pytest.approx(expected_s, rel=1e-4)  # of a sphere


# Spectra and streams


def test_windows_fill_the_time_and_a_chunk_is_live_where_half_of_the_receivers_hear_it():
    assert list(windows(10.0, 7.0, 2.0)) == [(10.0, 1.75), (11.75, 1.75), (13.5, 1.75), (15.25, 1.75)]
    assert list(windows(0.0, 4.0, 2.0)) == [(0.0, 2.0), (2.0, 2.0)]
    streams = torch.zeros(4, 400, dtype=torch.complex64)
    streams[:2, 200:] = 3.0
    streams[2, :100] = 3.0
    band = Band(centre_hz=0.0, width_hz=500.0, rate_hz=1_000.0)

    live = live_chunks(streams, band, 0.1, torch.ones(4), overlap=1)

    assert live.tolist() == [False, False, True, True]


def test_a_stream_is_what_was_received_at_its_times_without_the_cable(tmp_path):
    tone = np.exp(2j * np.pi * 1_234 * np.arange(48_000) / 48_000) / 2
    (recording,), _ = open_recordings([write_sigmf(tmp_path / "x", tone, 48_000.0, None)])
    one = receiver("A", recording=recording, start_s=2.0, late_s=7.0, delay_us=40.0)
    band = Band(centre_hz=CENTRE_HZ + 1_000, width_hz=2_000.0, rate_hz=4_000.0)

    stream = extract(one, band, 9.3, 4_000, lag_s=0.01, shift_hz=100.0).numpy()

    since_s = np.arange(4_000) / 4_000
    cycles = 1_234 * (0.3 + 0.01 + 40e-6 + since_s) - 1_100 * since_s  # 7 s and 2 s after the epoch it began
    inside = slice(100, 2_600)
    np.testing.assert_allclose(stream[inside], np.exp(2j * np.pi * cycles[inside]) / 2, atol=0.005)
    assert np.abs(stream[2_860:]).max() < 0.01  # the recording ends after a second


def band_spectrum(*signals, floor=1.0):
    """Power over noise in a band of 20 kHz; signals are centre (Hz off), width and power."""
    frequency = CENTRE_HZ + np.arange(-10_000, 10_001, 10.0)
    power = np.full(len(frequency), floor)
    for centre, width, height in signals:
        power[np.abs(frequency - CENTRE_HZ - centre) <= width / 2] += height
    return BandSpectrum(frequency_hz=frequency, power=power, floor=floor)


def test_the_transmission_is_the_strongest_that_most_receivers_hear():
    shared, quiet = (4_000, 4_000, 30.0), (-5_000, 4_000, 8.0)
    spectra = [band_spectrum(shared, quiet), band_spectrum(shared, quiet), band_spectrum((-1_000, 1_000, 1e4), quiet)]

    found = find_transmission(spectra, None, None)
    assert found.centre_hz - CENTRE_HZ == pytest.approx(4_000, abs=60)
    assert found.width_hz == pytest.approx(4_000, abs=300)
    given = find_transmission(spectra, CENTRE_HZ - 5_000, None)
    assert (given.centre_hz, given.width_hz) == (pytest.approx(CENTRE_HZ - 5_000), pytest.approx(4_000, abs=300))
    narrow = find_transmission(spectra, None, 1_000.0)
    assert (narrow.centre_hz - CENTRE_HZ, narrow.width_hz) == (pytest.approx(4_000, abs=60), pytest.approx(1_000))
    tuned = find_transmission(spectra, None, None, tuned_hz=CENTRE_HZ - 5_000)
    assert tuned.centre_hz - CENTRE_HZ == pytest.approx(-5_000, abs=60)


# The document


def receiver(name, *, lat=46.0, recording=None, start_s=0.0, late_s=0.0, sigma_s=0.0, **site):
    if recording is None:
        samples = Samples(Path(name), "<f4", [0], [12_000])
        recording = Recording(path=Path(name), format="raw", samples=samples, rate_hz=12_000.0, centre_hz=CENTRE_HZ)
    place = Site(name=name, lat=lat, lon=8.0, alt=0.0, **site)
    clock = steady_clock(len(recording.samples), start_s, recording.rate_hz)
    return Receiver(name=name, recording=recording, site=place, clock=clock, late_s=late_s, sigma_s=sigma_s)


def delay(delay_s=0.0, sigma_s=1e-6, coherence=0.5):
    return Delay(
        kind="complex", delay_s=delay_s, plain_delay_s=delay_s, sigma_s=sigma_s, plain_s=sigma_s, peak=0.7,
        information=100.0, ambiguity=0.0, alternatives_s=(5e-6,), chunks=16, spread_s=2e-6, order=1, misfit=1.0,
        chunk_s=0.05, curve=(-4e-6, 1e-6, (0.1, 0.7)), coherence=coherence,
    )  # fmt: skip


def document(receivers, delays, lags_us=(0, 0, 0), powers=(1, 1, 1), reference=0):
    spectra = [band_spectrum((0, 2_000, power / 201), floor=1e-12) for power in powers]
    rough = [Coarse(lag * 1e-6, 0.0, 9.0, "complex") for lag in lags_us]
    transmission = Transmission(centre_hz=CENTRE_HZ, width_hz=2_000.0)
    band = Band(centre_hz=CENTRE_HZ, width_hz=2_000.0, rate_hz=4_000.0)
    return make_measurement(receivers, spectra, transmission, band, rough, delays, [], 0.0, 1.0, reference)


def test_a_pair_has_the_errors_of_its_delay_and_of_both_clocks():
    receivers = [receiver("A", sigma_s=4e-6), receiver("B", sigma_s=12e-6), receiver("C")]

    pairs = document(receivers, {(0, 1): delay(7e-6, 3e-6), (1, 2): delay(0, 5e-6)}, (-20, 100, 0), reference=2)

    first, second = pairs.observation.pairs
    assert (first.reference, first.station) == ("A", "B")
    assert first.difference_us == pytest.approx(127)
    assert (first.sigma_us, second.sigma_us) == (pytest.approx(13), pytest.approx(13))  # 3, 4, 12 and 5, 12
    assert first.alternatives_us == (125.0,)
    assert (first.curve["start_us"], first.curve["step_us"], first.spread_us) == (116.0, 1.0, 2.0)
    arrivals = [one.features["arrival_difference_us"] for one in pairs.observation.stations]
    assert arrivals == pytest.approx([-27, 100, 0])  # the reference is the last


def test_pairs_that_contradict_each_other_give_way_by_their_variances():
    pairs = [
        PairMeasurement(reference=a, station=b, difference_us=us, sigma_us=sigma, kind="complex", peak=1, ambiguity=0)
        for a, b, us, sigma in (("A", "B", 6, 1), ("A", "C", 10, 2), ("B", "C", 10, 2))
    ]
    receivers = [receiver(name) for name in "ABC"]

    # the three do not close by 6 µs, of which 1/9, 4/9 and 4/9 are theirs
    assert solve_arrivals(3, 0, receivers, pairs)[1] == pytest.approx((6 - 6 / 9, 1))
    assert solve_arrivals(3, 0, receivers, pairs)[2] == pytest.approx((10 + 24 / 9, 2))
    assert solve_arrivals(3, 2, receivers, pairs)[1] == pytest.approx((-10 + 24 / 9, 2))


def test_levels_are_those_of_what_others_hear_too_and_relative_without_a_gain():
    shares, powers = (0.9, 0.8, 0.5), (1.0, 0.1, 0.01)
    delays = {(i, j): delay(coherence=shares[i] * shares[j]) for i, j in ((0, 1), (0, 2), (1, 2))}
    gains = (60.0, 50.0, 20.0)
    known = [receiver(name, gain_db=gain) for name, gain in zip("ABC", gains, strict=True)]

    stations = document(known, delays, powers=powers).observation.stations
    relative = document([*known[:2], receiver("C")], delays, powers=powers).observation.stations

    for n, one in enumerate(stations):
        assert one.snr_db == pytest.approx(10 * math.log10(shares[n] / (1 - shares[n])), abs=0.01)
        assert one.strength_db == pytest.approx(10 * math.log10(powers[n] * shares[n]) - gains[n], abs=0.01)
        assert one.strength_db - one.noise_db == pytest.approx(one.snr_db, abs=0.01)
    assert [one.strength_absolute for one in (*stations, *relative)] == [True] * 3 + [False] * 3
    assert max(one.strength_db for one in relative) == 0
    assert relative[0].strength_db - relative[1].strength_db == pytest.approx(10.51 - 10, abs=0.01)


def test_a_document_of_stations_alone_has_pairs_with_its_reference():
    timed = {"A": (0.0, 0.1), "B": (-4.5, {"mean": 0.7}), "C": (9.0, None), "D": (3.0, 1e6)}
    facts = {"lat": 1.0, "lon": 2.0, "alt": 0.0, "snr_db": 12.0, "noise_floor_dbm": {"mean": -120.0}}
    rows = [{"name": n, "arrival_difference_us": us, "arrival_sigma_us": sigma} for n, (us, sigma) in timed.items()]

    read = Observation.from_dict({"stations": [row | facts for row in rows]})

    found = [(one.reference, one.station, one.difference_us, one.sigma_us) for one in read.pairs]
    assert found == [("A", "B", -4.5, 0.7), ("A", "C", 9.0, 1.0)]  # D has not heard it
    assert (read.stations[0].strength_db, read.stations[0].strength_absolute) == (-108.0, True)


# Times and samples


def test_recordings_share_the_time_from_the_last_start_to_the_first_end(tmp_path):
    iq = np.random.default_rng(2).normal(size=6_000) + 0.5j
    starts = {"A": f"{EPOCH}.25Z", "B": "2026-01-31T13:00:02+01:00", "C": "2026-01-31T11:59:59.500000000Z"}
    paths = [write_sigmf(tmp_path / name, iq, 1_000.0, start, place=(46, 8, 0)) for name, start in starts.items()]
    paths.append(write_sigmf(tmp_path / "D", iq, 1_000.0, "2026-01-31T12:01:00Z", place=(46, 8, 0)))

    receivers, left_out = open_receivers(paths, [])
    kept, apart, low, high = share_time(receivers)

    assert left_out == []
    assert [one.name for one in kept] == ["A", "B", "C"]
    assert "its 6.0 s from 2026-01-31T12:01:00.000000Z" in apart[0].reason
    assert [utc(one, low)[11:] for one in kept] == ["12:00:02.000000Z"] * 3
    assert high - low == pytest.approx(3.5)
    assert receivers[0].sigma_s == pytest.approx(0.01 / math.sqrt(12))  # hundredths of a second
    assert [utc(one, one.start_s)[17:] for one in kept] == ["00.250000Z", "02.000000Z", "59.500000Z"]
    begin, length = choose_time(kept, low, high, f"{EPOCH[:-2]}03.5Z", None)
    assert (begin - low, length) == (pytest.approx(1.5), pytest.approx(2.0))
    assert choose_time(kept, low, high, "0", 1.0) == (low, 1.0)


def test_a_line_through_stamps_is_more_certain_than_one_of_them(tmp_path):
    iq = np.random.default_rng(2).normal(size=102_400) + 0.5j
    path = write_kiwi(tmp_path / "20260131T120000Z_77500_ALFA_iq.wav", iq, 12_000.0, 0.25, jitter_s=2e-6, age=0)

    (one,), _ = open_receivers([path], read_sites(write_sites(tmp_path / "s.csv")))

    assert one.clock.residual_s == pytest.approx(2e-6, rel=0.2)
    assert one.sigma_s == pytest.approx(2e-6 / math.sqrt(200), rel=0.2)


@pytest.mark.parametrize(("bad", "refused"), [(80, False), (120, True)])
def test_a_sample_is_clipped_with_either_of_its_parts(tmp_path, bad, refused):
    parts = np.random.default_rng(2).integers(-9_000, 9_000, (10_000, 2)).astype("<i2")
    parts[:bad, 0], parts[1_000 : 1_000 + bad, 1] = 32_767, -32_768
    (tmp_path / "a.bin").write_bytes(parts.tobytes())
    listing = tmp_path / "list.csv"
    listing.write_text("file,station,lat,lon,rate_hz,format\na.bin,A,1,2,48000,cs16\n")

    receivers, left_out = open_receivers([listing], [])

    said = [one.reason for one in left_out] if refused else receivers[0].problems[:1]
    assert said[0].endswith("% of its samples are clipped")
    assert clipped_share(open_recordings([listing])[0][0]) == 2 * bad / 10_000


# Known transmissions


def test_a_list_of_known_transmissions_keeps_their_files_and_units_apart(tmp_path):
    (tmp_path / "r.csv").write_text(
        "file,transmission,tx_lat,tx_lon,tx_alt,tx_power_dbm,frequency_mhz,bandwidth_khz\n"
        "a.wav,one,46,8,,30,7.1,2.5\nb.wav,two,47,9,500,,,\nc.wav,one,0,0,,,,\n"
    )

    one, two = read_known(tmp_path / "r.csv")

    assert [file.path.name for file in one.files] == ["a.wav", "c.wav"]
    assert (one.lat, one.lon, one.alt, one.power_dbm) == (46.0, 8.0, 0.0, 30.0)
    assert one.config == MeasureConfig(frequency_mhz=7.1, bandwidth_khz=2.5)
    assert (two.name, two.lat, two.lon, two.alt, two.power_dbm) == ("two", 47.0, 9.0, 500.0, None)


def test_constant_delays_are_told_from_clocks_that_differ_from_one_transmission_to_the_next():
    """Both beside A, 370.8 µs of light from B, whose clock is 2 µs late once and early once."""
    receivers = [receiver("A"), receiver("B", lat=47.0)]
    config = MeasureConfig()
    known = KnownTransmission(name="x", files=[], lat=46.0, lon=8.0, alt=0.0, power_dbm=None, config=config)
    later_us = [ONE_DEGREE_M / LIGHT_M_US + 5.0 + clock_us for clock_us in (2.0, -2.0)]
    measured = [document(receivers, {(0, 1): delay(late * 1e-6)}, (0, 0), (1, 1)) for late in later_us]

    delays, clocks = _delays([(known, one) for one in measured], ["A", "B"], {one.name: one.site for one in receivers})

    assert delays.tolist() == pytest.approx([0, 5], abs=0.1)
    assert [left.tolist() for left in clocks] == [[0, pytest.approx(2)], [0, pytest.approx(-2)]]

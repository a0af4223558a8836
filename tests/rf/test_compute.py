"""SampleRows of a batch: what is where, what agrees with what, and that no number is ever lost to infinity."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from columns import feature, truth, truth_chunks

from brim.rf.config import GenerateConfig, Station, preset
from brim.rf.generation.backend import CpuBackend, make_transmissions
from brim.rf.generation.rows import TRUTH, crlb_m
from brim.rf.generation.stages import generate_batch
from brim.rf.physics.geometry import ecef
from brim.rf.physics.scene import make_scenes

SHORT = {"duration_s": 0.2, "max_gdop": 1e6}
NOISE_DBM = -119.721  # residential, 145 MHz, a noise figure of 6 dB, in 12.5 kHz
UP = np.array([0.0, 0.0, 1.0])
LINK_COLUMNS = ["link_power_dbm", "link_snr_db", "delay_s", "frequency_offset_hz"]
REALISED_COLUMNS = ["power_dbm", "snr_db", "rssi_dbm", "power_record_dbm", "snr_record_db", "bandwidth_hz"]


@pytest.fixture(scope="module")
def gated(gated_config):
    return generate_batch(gated_config, range(60), chunks=True)


@pytest.fixture(scope="module")
def iq_rows():
    config = GenerateConfig(dataset_type="iq_raw", tx_power_dbm=30.0, min_snr_db=5.0, max_gdop=1e6, seed=9)
    return generate_batch(config, range(4), chunks=True)


def network(*places, alt=100.0):
    return tuple(Station(f"S{k}", lat, lon, alt) for k, (lat, lon) in enumerate(places))


def in_band_mw(iq, low_hz, high_hz, num_chunks=5):
    """(..., chunks) power between two distances from the carrier, from the record itself."""
    chunk = iq.reshape(*iq.shape[:-1], num_chunks, -1)
    power = torch.fft.fft(chunk).abs().double().square() / chunk.shape[-1] ** 2
    frequency = torch.fft.fftfreq(chunk.shape[-1], 1 / 200_000).abs()
    return power[..., (frequency >= low_hz) & (frequency < high_hz)].sum(-1)


def decibel(power):
    return 10 * torch.log10(power)


# Layout


def test_shapes_and_types_are_those_of_the_contract(gated):
    n = len(gated["index"])
    shapes = {
        "features": ((n, 7, 20, 4), torch.float32),
        "valid": ((n, 7), torch.bool),
        "present": ((n, 7), torch.bool),
        "receivers": ((n, 7, 3), torch.float64),
        "transmitter": ((n, 3), torch.float64),
        "truth": ((n, 7, len(TRUTH)), torch.float32),
        "reference": ((n,), torch.int64),
        "gdop": ((n,), torch.float32),
        "crlb_m": ((n,), torch.float32),
        "index": ((n,), torch.int64),
        "features_chunks": ((n, 7, 5, 20), torch.float32),
        "truth_chunks": ((n, 7, 5, 4), torch.float32),
    }
    assert {name: (tuple(t.shape), t.dtype) for name, t in gated.items()} == shapes


def test_a_batch_returns_the_accepted_attempts_in_the_order_given(gated_config):
    order = [40, 3, 17, 5, 59, 0, 22]
    accepted = make_scenes(gated_config, np.array(order)).accepted
    rows = generate_batch(gated_config, order)
    assert rows["index"].tolist() == [i for i, ok in zip(order, accepted, strict=True) if ok]
    assert 0 < accepted.sum() < len(order)


def test_features_exist_for_present_receivers_only(gated):
    absent = ~gated["present"]
    assert absent.any()
    for name in ("features", "features_chunks", "truth_chunks"):
        assert not gated[name][absent].any(), name
        assert gated[name][gated["present"]].flatten(1).any(1).all(), name


def test_truth_keeps_the_link_of_receivers_that_heard_nothing(gated):
    absent = gated["valid"] & ~gated["present"]
    for name in LINK_COLUMNS:
        assert truth(gated, name)[absent].all(), name
    for name in REALISED_COLUMNS:
        assert not truth(gated, name)[absent].any(), name


# Agreement


def test_the_link_columns_agree_with_each_other_and_with_the_map(gated):
    rows = gated
    tx, rx = rows["transmitter"].numpy()[:, None], rows["receivers"].numpy()
    points = [ecef(p[..., 0].copy(), p[..., 1].copy(), p[..., 2] + h) for p, h in ((tx, 2.0), (rx, 30.0))]
    distance = np.sqrt(sum((a - b) ** 2 for a, b in zip(*points, strict=True)))
    loss = 75.677 + 30 * np.log10(distance / 1e3)
    assert np.allclose(truth(rows, "delay_s"), distance / 299_792_458, rtol=1e-6)
    assert np.allclose(truth(rows, "loss_db"), loss, atol=0.01)
    assert np.allclose(truth(rows, "link_power_dbm"), 20 - loss + truth(rows, "shadowing_db").numpy(), atol=0.01)
    assert np.allclose(truth(rows, "link_snr_db"), truth(rows, "link_power_dbm") - NOISE_DBM, atol=0.002)


def test_the_other_truth_is_that_of_the_scene(gated, gated_config):
    scenes = make_scenes(gated_config, gated["index"].numpy())
    share, late_us = scenes.path_power, scenes.echo_delay_s * 1e6
    mean = np.average(late_us, axis=-1, weights=share)
    spread_us = np.sqrt(np.average((late_us - mean[..., None]) ** 2, axis=-1, weights=share))
    expected = {
        "delay_spread_us": spread_us, "distance_m": scenes.range_m, "shadowing_db": scenes.shadowing_db,
        "coherence_time_s": scenes.coherence_time_s, "doppler_hz": 0.423 / scenes.coherence_time_s,
        "clock_error_s": scenes.clock_error_s, "frequency_offset_hz": scenes.frequency_offset_hz,
    }  # fmt: skip
    for name, values in expected.items():
        assert truth(gated, name).numpy() == pytest.approx(values, rel=1e-5, abs=1e-12), name
    beta = truth(gated, "rms_frequency_hz")[:, 0].double().numpy()
    assert gated["crlb_m"].numpy() == pytest.approx(crlb_m(gated_config, scenes, beta), rel=1e-5)
    assert gated["gdop"].numpy() == pytest.approx(scenes.gdop, rel=1e-5)


def test_truth_is_the_mean_of_the_chunks_in_db_and_of_the_record_in_milliwatts(nbfm_rows):
    here = nbfm_rows["present"]
    for name in ("power_dbm", "snr_db", "rssi_dbm", "bandwidth_hz"):
        mean = truth_chunks(nbfm_rows, name).double().mean(-1)
        assert torch.allclose(truth(nbfm_rows, name).double(), mean, rtol=1e-5, atol=1e-4), name
    linear = (10 ** (truth_chunks(nbfm_rows, "snr_db").double() / 10)).mean(-1)
    assert torch.allclose(truth(nbfm_rows, "snr_record_db").double()[here], decibel(linear)[here], atol=1e-3)
    noise = truth(nbfm_rows, "power_record_dbm") - truth(nbfm_rows, "snr_record_db")
    assert torch.allclose(noise[here], torch.tensor(NOISE_DBM), atol=0.002)
    together = 10 ** (truth_chunks(nbfm_rows, "power_dbm").double() / 10) + 10 ** (NOISE_DBM / 10)
    assert torch.allclose(truth_chunks(nbfm_rows, "rssi_dbm").double()[here], decibel(together)[here], atol=0.003)


@pytest.mark.parametrize("waveform", ["nbfm", "am", "fsk", "cw"])
def test_without_fading_and_echoes_the_snr_is_the_requested_one(waveform):
    config = GenerateConfig(waveform=waveform, fading="none", tx_power_dbm=30.0, dataset_type="iq_raw", max_gdop=1e6)
    scenes = make_scenes(config, np.arange(1))
    direct = np.zeros_like(scenes.path_power)
    direct[..., 0] = 1
    work = make_transmissions(config, replace(scenes, path_power=direct))
    with CpuBackend(config) as backend:
        iq = backend.measure(work, iq=True).iq
    noise = in_band_mw(iq, 25_000, 100_000).mean(-1) / 150_000 * 12_500
    snr_db = decibel(in_band_mw(iq, 0, 6_250).mean(-1) / noise - 1)
    wanted = torch.from_numpy(scenes.snr_db[scenes.present])
    strong = wanted > 3
    assert (snr_db - wanted)[strong].abs().max() < 0.25
    assert (snr_db - wanted)[strong].mean().abs() < 0.1


def test_truth_is_what_the_record_holds(iq_rows):
    here = iq_rows["present"]
    total = decibel(in_band_mw(iq_rows["iq"][here], 0, 6_250))
    error = (total - truth_chunks(iq_rows, "rssi_dbm")[here]).abs()
    assert error.quantile(0.95) < 0.3
    assert error.max() < 0.6


# Nothing is lost to infinity

CLOSE = network((45.0, 7.0), (45.0, 7.0004), (45.0003, 7.0), (45.0003, 7.0004))
WIDE = network((40.0, -5.0), (48.0, 2.0), (41.0, 12.0), (50.0, 10.0))
EXTREMES = {
    "whisper": {"tx_power_dbm": 0.0, "min_snr_db": -20.0, "frequency_mhz": 30.0},
    "shout beside the mast": {"tx_power_dbm": 50.0, "stations": CLOSE, "inside_ratio": 1.0, "tx_gain_dbi": 30.0},
    "poor clocks and oscillators": {"clock_sigma_s": 1e-3, "max_frequency_offset_hz": 500.0},
    "2000 km": {"stations": WIDE, "tx_power_dbm": 50.0, "min_snr_db": -20.0, "loss": "free_space"},
    "ten seconds": {"duration_s": 10.0},
    "perfect and near": {"shadowing_db": 0.0, "clock_sigma_s": 0.0, "stations": CLOSE, "inside_ratio": 1.0},
    "rician am": {"waveform": "am", "fading": "rician"},
    "rician fsk": {"waveform": "fsk", "fading": "rician"},
    "a carrier": {"waveform": "cw", "fading": "none"},
    "microwaves": {"frequency_mhz": 3000.0, "noise_figure_db": 0.0, "environment": "rural", "min_snr_db": -20.0},
    "hata": {"loss": "hata", "environment": "city", "tx_power_dbm": 50.0, "min_snr_db": -20.0},
    "late index and seed": {"seed": 2**63 - 1},
}


@pytest.mark.parametrize("case", EXTREMES)
def test_extreme_configurations_give_finite_numbers(case):
    config = GenerateConfig(**SHORT | EXTREMES[case])
    first = 2**40 if case.startswith("late") else 0
    rows = generate_batch(config, range(first, first + 20 if config.duration_s < 1 else 1), chunks=True)

    assert len(rows["index"]) > 0
    for name, values in rows.items():
        if values.is_floating_point():
            assert torch.isfinite(values).all(), name


def test_the_strongest_pairs_do_not_overflow():
    near = network((45.0, 7.0), (45.0, 7.1), (45.1, 7.0), (45.1, 7.1))
    rows = generate_batch(GenerateConfig(stations=near, tx_power_dbm=50.0, inside_ratio=1.0, max_gdop=1e6), range(6))
    snr = truth(rows, "snr_record_db")
    strong = rows["present"] & (snr > 50)
    strong[torch.arange(len(strong)), rows["reference"]] = False
    assert strong.sum() > 10
    assert feature(rows, "arrival_sigma_us", "max")[strong].max() < 100


def test_arrivals_are_right_across_2000_km():
    config = GenerateConfig(stations=WIDE, tx_power_dbm=50.0, loss="free_space", clock_sigma_s=0.0, max_gdop=1e6)
    rows = generate_batch(config, range(3), chunks=True)
    assert truth(rows, "arrival_difference_us").abs().max() > 1_000
    here = rows["present"] & (truth(rows, "snr_record_db") > 20)
    error = (feature(rows, "arrival_difference_us") - truth(rows, "arrival_difference_us"))[here]
    assert error.abs().max() < 10


# Reproducible


@pytest.mark.parametrize("config", [GenerateConfig(**SHORT), preset("production", duration_s=0.2, waveform="am")])
def test_a_batch_equals_its_rows_one_at_a_time(config):
    whole = generate_batch(config, range(10), chunks=True)
    for n, index in enumerate(whole["index"].tolist()):
        alone = generate_batch(config, [index], chunks=True)
        for name, rows in whole.items():
            assert torch.equal(alone[name][0], rows[n]), name

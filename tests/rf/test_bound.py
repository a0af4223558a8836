"""The Cramér-Rao bound against maximum-likelihood positions from simulated strengths and arrival times."""

from dataclasses import replace

import numpy as np
import pytest

from brim.rf.config import GenerateConfig
from brim.rf.generation.rows import crlb_m, time_sigma_s
from brim.rf.physics.scene import make_scenes

LIGHT = 299_792_458.0
BETA_HZ = 900.0
DRAWS = 4_000
BASE = GenerateConfig(tx_power_dbm=50.0, min_snr_db=0.0, inside_ratio=1.0, max_gdop=3.0, loss="free_space", seed=5)
CASES = {
    "times": {"shadowing_db": 20.0, "clock_sigma_s": 1e-7},
    "times without clock error": {"shadowing_db": 20.0, "clock_sigma_s": 0.0, "tx_power_dbm": 30.0},
    "strengths": {"shadowing_db": 0.1, "clock_sigma_s": 1e-3},
    "both": {"shadowing_db": 0.1, "clock_sigma_s": 3e-6, "loss": "log_distance"},
}


def accepted(config, num=6):
    scenes = make_scenes(config, np.arange(400))
    kept = np.nonzero(scenes.accepted & (scenes.range_m.min(-1) > 5_000))[0][:num]
    return scenes[kept]


def ranges(scenes, n, east, north):
    """(draws, R) distances when the transmitter of scene n moves level by so many metres."""
    here = scenes.present[n]
    up = np.sqrt(np.maximum(scenes.range_m[n] ** 2 - scenes.east[n] ** 2 - scenes.north[n] ** 2, 0))[here]
    return np.sqrt((scenes.east[n][here] - east) ** 2 + (scenes.north[n][here] - north) ** 2 + up**2)


def solve(scenes, n, strengths, times, sigma_db, sigma_s, exponent):
    """Gauss-Newton for east, north and emission time, all draws at once, from the truth on."""
    at = np.zeros((DRAWS, 3))
    for _ in range(4):
        d = ranges(scenes, n, at[:, :1], at[:, 1:2])
        slope_e = -(scenes.east[n][scenes.present[n]] - at[:, :1]) / d
        slope_n = -(scenes.north[n][scenes.present[n]] - at[:, 1:2]) / d
        per_metre = 10 * exponent / (np.log(10) * d)
        rows = [np.stack([-per_metre * slope_e, -per_metre * slope_n, 0 * d], -1) / sigma_db]
        rows += [np.stack([slope_e / LIGHT, slope_n / LIGHT, 1 / LIGHT + 0 * d], -1) / sigma_s[:, None]]
        left = [(strengths + 10 * exponent * np.log10(d)) / sigma_db]
        left += [(times - d / LIGHT - at[:, 2:] / LIGHT) / sigma_s]
        h, y = np.concatenate(rows, 1), np.concatenate(left, 1)
        at = at + np.linalg.solve(h.mT @ h, (h.mT @ y[..., None]))[..., 0]
    return at[:, :2]


def squared_errors(config, scenes, n, rng):
    """(draws,) squared horizontal error of scene n, from measurements drawn as the issue states them."""
    here, exponent = scenes.present[n], 3.0 if config.loss == "log_distance" else 2.0
    energy = 2 * 12_500 * config.duration_s * 10 ** (scenes.snr_db[n][here] / 10)
    sigma_s = np.sqrt(config.clock_sigma_s**2 + 1 / ((2 * np.pi * BETA_HZ) ** 2 * energy))
    d = scenes.range_m[n][here]
    strengths = -10 * exponent * np.log10(d) + config.shadowing_db * rng.standard_normal((DRAWS, len(d)))
    times = d / LIGHT + sigma_s * rng.standard_normal((DRAWS, len(d)))
    found = solve(scenes, n, strengths, times, config.shadowing_db, sigma_s, exponent)
    return (found**2).sum(-1)


@pytest.mark.parametrize("case", CASES)
def test_maximum_likelihood_reaches_the_bound(case):
    config = replace(BASE, **CASES[case])
    scenes, rng = accepted(config), np.random.default_rng(8)
    assert len(scenes) == 6
    bound = crlb_m(config, scenes, np.full(len(scenes), BETA_HZ))
    for n in range(len(scenes)):
        ratio = np.sqrt(squared_errors(config, scenes, n, rng).mean()) / bound[n]
        assert ratio == pytest.approx(1, abs=0.05)


def test_time_sigma_is_the_stated_formula():
    config = GenerateConfig(clock_sigma_s=1e-6)
    # 20 dB over 12.5 kHz · 1 s: 1/((2π·1000)²·2·12500·100) = (1.0066e-7 s)²
    got = time_sigma_s(config, np.array([[20.0]]), np.array([1_000.0]))
    assert got[0, 0] == pytest.approx(np.hypot(1e-6, 1.00658e-7), rel=1e-5)


def test_the_bound_at_the_built_in_network_is_the_missions():
    scenes = make_scenes(GenerateConfig(inside_ratio=1.0, min_snr_db=-20.0, max_gdop=1e6), np.arange(2_000))
    beta = np.full(len(scenes), BETA_HZ)
    strength = crlb_m(GenerateConfig(shadowing_db=8.0, clock_sigma_s=1e-3), scenes, beta * 1e-6)
    times = crlb_m(GenerateConfig(shadowing_db=20.0, clock_sigma_s=1e-6, duration_s=10.0), scenes, beta)
    assert np.median(strength) == pytest.approx(33_000, rel=0.35)
    assert np.median(times) == pytest.approx(300, rel=0.5)


def test_a_receiver_that_is_not_present_tells_nothing():
    config = GenerateConfig(min_snr_db=15.0, tx_power_dbm=30.0)
    scenes = accepted(replace(config, max_gdop=1e6))
    assert not scenes.present.all()
    before = crlb_m(config, scenes, np.full(len(scenes), BETA_HZ))
    snr = np.where(scenes.present, scenes.snr_db, 70.0)
    range_m = np.where(scenes.present, scenes.range_m, 123.0)
    changed = replace(scenes, snr_db=snr, range_m=range_m, east=np.where(scenes.present, scenes.east, 77.0))
    assert np.array_equal(crlb_m(config, changed, np.full(len(scenes), BETA_HZ)), before)


def test_every_further_receiver_lowers_the_bound():
    config = GenerateConfig(tx_power_dbm=50.0)
    scenes = make_scenes(config, np.arange(300))
    beta = np.full(len(scenes), BETA_HZ)
    bounds = []
    for count in range(3, 8):
        bounds.append(crlb_m(config, replace(scenes, present=np.tile(np.arange(7) < count, (300, 1))), beta))
    assert (np.diff(bounds, axis=0) < 0).all()


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"shadowing_db": 3.0}, {"shadowing_db": 6.0}),
        ({"clock_sigma_s": 0.0}, {"clock_sigma_s": 1e-6}),
        ({"duration_s": 2.0, "clock_sigma_s": 0.0}, {"duration_s": 1.0, "clock_sigma_s": 0.0}),
    ],
)
def test_better_measurements_lower_the_bound(better, worse):
    scenes = make_scenes(GenerateConfig(tx_power_dbm=50.0), np.arange(100))
    beta = np.full(len(scenes), BETA_HZ)
    assert (crlb_m(GenerateConfig(**better), scenes, beta) < crlb_m(GenerateConfig(**worse), scenes, beta)).all()


def test_an_unmodulated_carrier_is_bounded_by_strengths_alone():
    config = GenerateConfig(tx_power_dbm=50.0)
    scenes = accepted(replace(config, max_gdop=1e6))
    carrier = crlb_m(config, scenes, np.zeros(len(scenes)))
    clocks_off = crlb_m(replace(config, clock_sigma_s=1e-3), scenes, np.full(len(scenes), 1e-3))
    assert np.isfinite(carrier).all()
    assert np.allclose(carrier, clocks_off, rtol=1e-3)

"""The Cramér-Rao bound against maximum-likelihood positions from simulated strengths and arrival times."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from brim.errors import ConfigError
from brim.rf.config import GenerateConfig
from brim.rf.generation.rows import crlb_m, strength_sigma_db, time_sigma_s
from brim.rf.physics.scene import make_scenes

LIGHT = 299_792_458.0
BETA_HZ = 900.0
DOPPLER_HZ = 3.0
DRAWS = 1_500
BASE = GenerateConfig(tx_power_dbm=50.0, min_snr_db=0.0, inside_ratio=1.0, max_gdop=3.0, loss="free_space", seed=5)
CASES = {
    **{f"clocks of {us} us": {"shadowing_db": 20.0, "clock_sigma_s": us * 1e-6} for us in (0, 1, 10)},
    "weak": {"shadowing_db": 20.0, "clock_sigma_s": 0.0, "tx_power_dbm": 30.0},
    "rician": {"shadowing_db": 20.0, "clock_sigma_s": 0.0, "fading": "rician"},
    "strengths": {"shadowing_db": 0.1, "clock_sigma_s": 1e-3},
    "both": {"shadowing_db": 0.1, "clock_sigma_s": 3e-6, "loss": "log_distance"},
    "timing alone": {"shadowing_db": 0.1, "clock_sigma_s": 1e-7, "bound": "timing"},
}


def accepted(config, num=2):
    scenes = make_scenes(config, np.arange(400))
    kept = scenes[np.nonzero(scenes.accepted & (scenes.range_m.min(-1) > 5_000))[0][:num]]
    return replace(kept, coherence_time_s=np.full_like(kept.range_m, 0.423 / DOPPLER_HZ))


def ranges(scenes, n, east, north):
    """(draws, R) distances when the transmitter of scene n moves level by so many metres."""
    here = scenes.present[n]
    up = np.sqrt(np.maximum(scenes.range_m[n] ** 2 - scenes.east[n] ** 2 - scenes.north[n] ** 2, 0))[here]
    return np.sqrt((scenes.east[n][here] - east) ** 2 + (scenes.north[n][here] - north) ** 2 + up**2)


def solve(scenes, n, strengths, times, sigma_db, sigma_s, exponent):
    """Gauss-Newton for east, north and emission time, all draws at once, from the truth on.

    Strengths that fade place a transmitter within tens of km, over which nothing is straight: one step, to first order.
    """
    at = np.zeros((DRAWS, 3))
    for _ in range(1 if sigma_s.min() > 1e-4 else 4):
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


@lru_cache(maxsize=3)
def faded(fading, draws):
    """Excess delays in s and strengths of records of 1 s, echoes and fading of 3 Hz drawn anew for each, (draws,).

    The signal is so narrow that it follows the sum of its paths and arrives with their power-weighted delay, here to
    first order in the fading.
    """
    rng, time_s = np.random.default_rng(4), (np.arange(24) + 0.5) / 24
    late = rng.uniform(0.5e-6, 5e-6, (draws, 3))
    power = 10 ** (rng.uniform(-25, -10, (draws, 3)) / 10)
    power[:, 2] *= rng.random(draws) < 0.5
    late, power = np.pad(late, ((0, 0), (1, 0))), np.pad(power, ((0, 0), (1, 0)), constant_values=1.0)
    power /= power.sum(1, keepdims=True)
    paths = np.zeros((draws, 4, 24), complex)
    for _ in range(32):  # plane waves of random directions and phases
        hertz = DOPPLER_HZ * np.cos(2 * np.pi * rng.random((draws, 4, 1)))
        paths += np.exp(2j * np.pi * (hertz * time_s + rng.random((draws, 4, 1)))) / np.sqrt(32)
    still = np.exp(2j * np.pi * rng.random((draws, 4, 1)))
    if fading == "rician":
        k = 10**0.6
        paths[:, 0] = np.sqrt(1 / (k + 1)) * paths[:, 0] + np.sqrt(k / (k + 1)) * still[:, 0]
    if fading == "none":
        paths = still + 0 * paths
    paths *= np.sqrt(power)[..., None]
    mean = (power * late).sum(1)
    whole, off = paths.sum(1), (paths * (late - mean[:, None])[..., None]).sum(1)
    return mean + (off * whole.conj()).real.mean(-1), np.square(np.abs(whole)).mean(-1)


def squared_errors(config, scenes, n, rng):
    """(draws,) squared horizontal error of scene n: clocks, noise, echoes and shadowing drawn, fading simulated."""
    here, exponent = scenes.present[n], 3.0 if config.loss == "log_distance" else 2.0
    d = scenes.range_m[n][here]
    energy = 2 * 12_500 * config.duration_s * 10 ** (scenes.snr_db[n][here] / 10)
    known_s = np.sqrt(config.clock_sigma_s**2 + 1 / ((2 * np.pi * BETA_HZ) ** 2 * energy))
    late_s, strength = (part.reshape(DRAWS, 7)[:, here] for part in faded(config.fading, DRAWS * 7))
    fade_db = 10 / np.log(10) * (strength - 1)
    sigma_db = 1e6 if config.bound == "timing" else np.hypot(config.shadowing_db, fade_db.std())
    strengths = -10 * exponent * np.log10(d) + fade_db + config.shadowing_db * rng.standard_normal((DRAWS, len(d)))
    times = d / LIGHT + late_s - late_s.mean() + known_s * rng.standard_normal((DRAWS, len(d)))
    return (solve(scenes, n, strengths, times, sigma_db, np.hypot(known_s, late_s.std()), exponent) ** 2).sum(-1)


@pytest.mark.parametrize("case", CASES)
def test_maximum_likelihood_reaches_the_bound(case):
    config = replace(BASE, **CASES[case])
    scenes, rng = accepted(config), np.random.default_rng(8)
    assert len(scenes) == 2
    bound = crlb_m(config, scenes, np.full(len(scenes), BETA_HZ))
    for n in range(len(scenes)):
        ratio = np.sqrt(squared_errors(config, scenes, n, rng).mean()) / bound[n]
        assert ratio == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("fading", ["rayleigh", "rician", "none"])
def test_echoes_and_fading_scatter_arrivals_and_strengths_as_the_bound_says(fading):
    config = GenerateConfig(fading=fading, clock_sigma_s=0.0, shadowing_db=0.0)
    scenes = make_scenes(config, np.arange(1))
    scenes = replace(scenes, coherence_time_s=np.full((1, 7), 0.423 / DOPPLER_HZ), snr_db=np.full((1, 7), 90.0))
    late_s, strength = faded(fading, DRAWS * 7)
    assert time_sigma_s(config, scenes, np.array([BETA_HZ]))[0, 0] == pytest.approx(late_s.std(), rel=0.1)
    sigma_db = strength_sigma_db(config, scenes)[0, 0]
    assert sigma_db == pytest.approx(10 / np.log(10) * strength.std(), rel=0.1)


def test_noise_and_clocks_add_to_what_echoes_do():
    scenes = replace(make_scenes(GenerateConfig(), np.arange(1)), snr_db=np.full((1, 7), 20.0))
    silent, noisy = (
        time_sigma_s(GenerateConfig(clock_sigma_s=sigma_s), scenes, np.array([beta]))
        for sigma_s, beta in ((0.0, 1e9), (1e-6, 1_000.0))
    )
    # 20 dB over 12.5 kHz · 1 s: 1/((2π·1000)²·2·12500·100) = (1.0066e-7 s)²
    assert np.sqrt(noisy**2 - silent**2) == pytest.approx(np.hypot(1e-6, 1.00658e-7), rel=1e-4)


@pytest.mark.parametrize("changes", [{"clock": "none"}, {"waveform": "cw"}])
def test_a_bound_of_timing_needs_something_to_time(changes):
    with pytest.raises(ConfigError, match="arrival times, which mean nothing"):
        GenerateConfig(bound="timing", **changes)
    strength, whole = (
        crlb_m(GenerateConfig(bound=bound, **changes), make_scenes(GenerateConfig(), np.arange(3)), np.zeros(3))
        for bound in ("strength", "all")
    )
    assert strength == pytest.approx(whole)


def test_a_blocked_link_is_as_uncertain_as_its_exponential_delay():
    config = GenerateConfig(blocked_share=0.5, blocked_delay_us=3.0)
    scenes = make_scenes(config, np.arange(50))
    assert 0 < scenes.blocked.mean() < 1
    free, blocked = (
        time_sigma_s(config, replace(scenes, blocked=np.full_like(scenes.blocked, is_so)), np.full(50, BETA_HZ))
        for is_so in (False, True)
    )
    assert np.sqrt(blocked**2 - free**2) == pytest.approx(np.full_like(free, 3e-6))  # its mean is its deviation
    mixed = time_sigma_s(config, scenes, np.full(50, BETA_HZ))
    assert mixed == pytest.approx(np.where(scenes.blocked, blocked, free))


def around(config, azimuths_deg, distance_m=20e3):
    """A scene whose transmitter stands level with the built-in number of receivers, in these directions."""
    azimuth = np.radians(np.array([azimuths_deg], float))
    scenes = make_scenes(config, np.arange(1))
    return replace(
        scenes, present=np.ones((1, 7), bool), range_m=np.full((1, 7), distance_m),
        east=distance_m * np.sin(azimuth), north=distance_m * np.cos(azimuth), coherence_time_s=np.full((1, 7), 0.1),
    )  # fmt: skip


def test_the_bound_in_the_middle_of_a_ring_is_the_textbooks():
    """Each kind of measurement alone has J = 7/2·slope²/σ² along both axes; information adds up."""
    config = GenerateConfig(shadowing_db=8.0, clock_sigma_s=1e-4, loss="free_space")
    scenes, beta = around(config, np.arange(7) * 360 / 7), np.array([BETA_HZ])
    sigma_db = strength_sigma_db(config, scenes)[0, 0]
    assert sigma_db == pytest.approx(8.0, abs=0.5)
    timing, strength, whole = (
        crlb_m(replace(config, bound=bound), scenes, beta)[0] for bound in ("timing", "strength", "all")
    )
    assert timing == pytest.approx(2 / np.sqrt(7) * LIGHT * 1e-4, rel=1e-3)
    assert strength == pytest.approx(2 / np.sqrt(7) * sigma_db * np.log(10) * 20e3 / 20, rel=1e-6)
    assert whole == pytest.approx((timing**-2 + strength**-2) ** -0.5, rel=1e-6)


@pytest.mark.parametrize("spread_db", [0.0, 5.0, 30.0])
def test_an_unknown_power_is_one_unknown_more_with_the_variance_of_its_range(spread_db):
    config = GenerateConfig(power_spread_db=spread_db, shadowing_db=3.0, clock_sigma_s=3e-5)
    azimuths = np.array([0, 20, 45, 50, 110, 130, 160])
    scenes, beta = around(config, azimuths), np.array([BETA_HZ])
    sigma_m = LIGHT * time_sigma_s(config, scenes, beta)[0]
    sigma_db = strength_sigma_db(config, scenes)[0]
    slope = -np.stack([np.sin(np.radians(azimuths)), np.cos(np.radians(azimuths))], -1)
    times = np.column_stack([slope, np.ones(7), np.zeros(7)]) / sigma_m[:, None]
    strengths = np.column_stack([slope * -30 / np.log(10) / 20e3, np.zeros(7), np.ones(7)]) / sigma_db[:, None]
    known = [0, 0, 0, np.sqrt(3) / spread_db if spread_db else 1e9]  # a uniform number on ± s varies by s²/3
    rows = np.concatenate([times, strengths, [known]])
    expected = np.sqrt(np.trace(np.linalg.inv(rows.T @ rows)[:2, :2]))
    assert crlb_m(config, scenes, beta)[0] == pytest.approx(expected, rel=1e-6)


def test_a_receiver_that_is_not_present_tells_nothing():
    config = GenerateConfig(min_snr_db=15.0, tx_power_dbm=30.0)
    scenes = accepted(replace(config, max_gdop=1e6))
    assert not scenes.present.all()
    before = crlb_m(config, scenes, np.full(len(scenes), BETA_HZ))
    snr = np.where(scenes.present, scenes.snr_db, 70.0)
    range_m = np.where(scenes.present, scenes.range_m, 123.0)
    changed = replace(scenes, snr_db=snr, range_m=range_m, east=np.where(scenes.present, scenes.east, 77.0))
    assert np.array_equal(crlb_m(config, changed, np.full(len(scenes), BETA_HZ)), before)


def test_an_unmodulated_carrier_is_bounded_by_strengths_alone():
    config = GenerateConfig(tx_power_dbm=50.0)
    scenes = accepted(replace(config, max_gdop=1e6))
    carrier = crlb_m(config, scenes, np.zeros(len(scenes)))
    clocks_off = crlb_m(replace(config, clock_sigma_s=1e-3), scenes, np.full(len(scenes), 1e-3))
    assert np.isfinite(carrier).all()
    assert np.allclose(carrier, clocks_off, rtol=1e-3)

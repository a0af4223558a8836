"""Loss models and noise against the published formulas, numbers worked from them by hand, and other solutions."""

import logging

import numpy as np
import pytest
import torch
from scipy.special import ai_zeros, airy, wofz

from brim.rf.config import GenerateConfig
from brim.rf.location.solver import StrengthModel
from brim.rf.physics.ground_wave import CONDUCTIVITY, PERMITTIVITY, attenuation_db
from brim.rf.physics.link import free_space_db, hata_db, loss_exponent, noise_dbm, path_loss_db, warn_outside_validity

KM = np.array([1.0, 2.0, 5.0, 10.0, 20.0])
LIGHT = 299_792_458.0


def loss_db(config, *distances_km):
    return path_loss_db(config, 1e3 * np.array(distances_km, float))


@pytest.mark.parametrize("frequency_mhz", [30.0, 433.0, 1_500.0])
def test_free_space_is_itu_r_p_525(frequency_mhz):
    d_km = np.array([0.05, 0.5, 1.0, 30.0, 300.0])
    expected = 32.45 + 20 * np.log10(frequency_mhz) + 20 * np.log10(d_km)
    assert free_space_db(frequency_mhz, d_km * 1e3) == pytest.approx(expected, abs=0.01)
    config = GenerateConfig(loss="free_space", frequency_mhz=frequency_mhz)
    assert path_loss_db(config, d_km * 1e3) == pytest.approx(expected, abs=0.01)


def test_log_distance_is_free_space_to_1_km_and_slope_3_beyond():
    config = GenerateConfig(loss="log_distance")
    # 32.45 + 20·log10(145) = 75.677 dB at 1 km
    assert loss_db(config, 0.1, 0.5, 1.0) == pytest.approx([55.677, 69.656, 75.677], abs=0.01)
    assert loss_db(config, 2, 10, 100) == pytest.approx([84.708, 105.677, 135.677], abs=0.01)


@pytest.mark.parametrize("loss", ["free_space", "log_distance", "hata", "cost231", "two_ray", "ground_wave"])
def test_losses_grow_with_distance_and_the_bound_has_their_slope(loss):
    config = GenerateConfig(loss=loss, frequency_mhz=7.1 if loss == "ground_wave" else 433.0, loss_exponent=3.7)
    step = np.diff(path_loss_db(config, np.geomspace(20.0, 1e6, 2_000)))
    assert np.isfinite(step).all()
    assert (step[1:] > 0).all()
    d = np.array([200.0, 900.0, 1_100.0, 5e4])
    slope = (path_loss_db(config, d * 1.0001) - path_loss_db(config, d)) / (10 * np.log10(1.0001))
    assert loss_exponent(config, d) == pytest.approx(slope, rel=0.01)


@pytest.mark.parametrize(
    ("environment", "at_1_km"),
    [("city", 126.403), ("residential", 116.460), ("rural", 97.896)],  # urban, −9.943 suburban, −28.507 open
)
def test_hata_at_900_mhz_is_the_textbook_line(environment, at_1_km):
    # 69.55 + 77.283 − 20.414 − 0.016, slope 44.9 − 6.55·log10 30 = 35.225 dB per decade
    got = hata_db(900.0, KM * 1e3, 30.0, 1.5, environment)
    assert got == pytest.approx(at_1_km + 35.225 * np.log10(KM), abs=0.005)
    config = GenerateConfig(loss="hata", frequency_mhz=900, rx_antenna_m=30, tx_antenna_m=1.5, environment=environment)
    assert path_loss_db(config, KM * 1e3) == pytest.approx(got)


@pytest.mark.parametrize(("frequency_mhz", "base_m", "mobile_m"), [(150, 30, 1.5), (450, 70, 2.0), (1500, 200, 10.0)])
def test_hata_is_itu_r_p_529s_field_strength_turned_into_loss(frequency_mhz, base_m, mobile_m):
    f, h = np.log10(frequency_mhz), np.log10(base_m)
    mobile = (1.1 * f - 0.7) * mobile_m - (1.56 * f - 0.8)
    field = 69.82 - 6.16 * f + 13.82 * h + mobile - (44.9 - 6.55 * h) * np.log10(KM)  # dB(µV/m) for 1 kW e.r.p.
    expected = 139.3 - field + 20 * f
    assert hata_db(frequency_mhz, KM * 1e3, base_m, mobile_m, "city") == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("environment", "at_1_km"), [("city", 139.197), ("residential", 136.197), ("rural", 136.197)])
def test_cost_231_at_1800_mhz_is_the_textbook_line(environment, at_1_km):
    # 46.3 + 110.354 − 20.414 − 0.043, in a metropolitan centre 3 dB more; slope 35.225 dB per decade
    config = GenerateConfig(
        loss="cost231", frequency_mhz=1_800, rx_antenna_m=30, tx_antenna_m=1.5, environment=environment
    )
    assert path_loss_db(config, KM * 1e3) == pytest.approx(at_1_km + 35.225 * np.log10(KM), abs=0.005)


def test_two_rays_fall_by_forty_decibels_a_decade_beyond_the_turn():
    config = GenerateConfig(frequency_mhz=900.0, loss="two_ray", rx_antenna_m=30.0, tx_antenna_m=2.0)

    # 40·log10 d − 20·log10(h₁·h₂) beyond 4π·60 m²/0.333 m = 2 263 m, free space before it
    assert loss_db(config, 10, 100) == pytest.approx([160 - 35.563, 200 - 35.563], abs=0.001)
    assert loss_db(config, 1) == pytest.approx([91.53], abs=0.01)
    assert loss_exponent(config, np.array([200.0, 1e4])) == pytest.approx([2, 4], abs=0.01)


@pytest.mark.parametrize("mhz", [0.3, 1.0, 3.0, 10.0])
def test_near_by_the_ground_wave_is_nortons_exact_one(mhz):
    distance = np.array([1e3, 5e3, 2e4])
    ground = PERMITTIVITY - 1j * CONDUCTIVITY / (2e6 * np.pi * mhz * 8.8541878e-12)
    root = np.sqrt(-1e6j * np.pi * mhz / LIGHT * distance * (ground - 1) / ground**2)  # of the numerical distance
    exact = -20 * np.log10(np.abs(1 - 1j * np.sqrt(np.pi) * root * wofz(-root)))
    assert attenuation_db(mhz, distance) == pytest.approx(exact, abs=2.7)
    assert (attenuation_db(mhz, distance) - exact).mean() == pytest.approx(0, abs=0.7)


@pytest.mark.parametrize("mhz", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_behind_the_horizon_the_ground_wave_is_the_residue_series_of_airy_functions(mhz):
    distance, radius = np.array([3e5, 6e5]), 4 / 3 * 6_371e3
    scale = (np.pi * mhz * 1e6 / LIGHT * radius) ** (1 / 3)
    ground = PERMITTIVITY + 1j * CONDUCTIVITY / (2e6 * np.pi * mhz * 8.8541878e-12)
    q, turn = 1j * scale * np.sqrt(ground - 1) / ground, np.exp(2j * np.pi / 3)
    zeros, stationary, _, _ = ai_zeros(24)
    t = -stationary * np.exp(1j * np.pi / 3) if abs(q) < 1 else -zeros * np.exp(1j * np.pi / 3) + 1 / q
    for _ in range(30):  # Newton's method for w'(t) = q·w(t)
        w, slope, _, _ = airy(t * turn)
        t = t - (turn * slope - q * w) / (turn * turn * t * turn * w - q * turn * slope)
    x = scale * distance / radius
    series = (np.exp(1j * x[:, None] * t) / (t - q * q)).sum(-1)
    expected = -20 * np.log10(np.sqrt(np.pi * x) * np.abs(series))
    assert attenuation_db(mhz, distance) == pytest.approx(expected, abs=0.05)


def test_the_ground_wave_is_free_space_and_its_attenuation():
    config = GenerateConfig(frequency_mhz=0.0775, loss="ground_wave")
    assert loss_db(config, 1, 500) == pytest.approx(
        free_space_db(0.0775, np.array([1e3, 5e5])) + attenuation_db(0.0775, np.array([1e3, 5e5]))
    )


@pytest.mark.parametrize("loss", ["ground_wave", "two_ray", "hata", "log_distance"])
def test_the_solvers_strengths_are_the_generators(loss):
    config = GenerateConfig(loss=loss, frequency_mhz=7.1 if loss == "ground_wave" else 900.0, tx_gain_dbi=3.0)
    distance = torch.tensor([300.0, 999.0, 1_001.0, 5_000.0, 40_000.0, 250_000.0], dtype=torch.float64)
    power, exponent = StrengthModel.of(config).power_dbm(distance)

    assert power.numpy() == pytest.approx(config.tx_power_dbm + 3 - path_loss_db(config, distance.numpy()), abs=0.05)
    assert exponent.numpy() == pytest.approx(loss_exponent(config, distance.numpy()), abs=0.3)


@pytest.mark.parametrize(
    ("loss", "frequency_mhz", "reach_m", "said"),
    [
        ("hata", 145.0, 15e3, "150-1500 MHz"), ("hata", 433.0, 21e3, "links up to 21 km"), ("hata", 433.0, 19e3, ""),
        ("cost231", 1_400.0, 15e3, "1500-2000 MHz"), ("free_space", 433.0, 90e3, ""), ("log_distance", 433.0, 90e3, ""),
    ],
)  # fmt: skip
def test_a_model_outside_its_range_warns_once(caplog, loss, frequency_mhz, reach_m, said):
    with caplog.at_level(logging.WARNING, logger="brim"):
        warn_outside_validity(GenerateConfig(loss=loss, frequency_mhz=frequency_mhz), reach_m)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("environment", "expected_dbm"),
    # ITU-R P.372 at 145 MHz: F_am = 16.930, 12.630, 7.330 dB; with f_r = 3.981 and kT₀B = −133.007 dBm.
    [("city", -115.821), ("residential", -119.721), ("rural", -123.769)],
)
def test_noise_is_man_made_noise_and_the_receivers_own(environment, expected_dbm):
    assert noise_dbm(GenerateConfig(environment=environment)) == pytest.approx(expected_dbm, abs=0.002)


def test_noise_falls_with_frequency_to_the_external_noise_alone_of_a_perfect_receiver():
    perfect = GenerateConfig(noise_figure_db=0.0, environment="residential")
    assert noise_dbm(perfect) == pytest.approx(-133.007 + 12.630, abs=0.002)
    low = GenerateConfig(frequency_mhz=50.0, environment="rural")
    assert noise_dbm(low) == pytest.approx(-133.007 + 20.139 + 0.125, abs=0.01)  # (103.26 + 2.981)/103.26 is 0.124 dB

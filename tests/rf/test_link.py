"""Loss models and noise against the published formulas, and numbers worked from them by hand."""

import logging

import numpy as np
import pytest
import torch

from brim.rf.config import GenerateConfig
from brim.rf.location.solver import StrengthModel
from brim.rf.physics import ground_wave
from brim.rf.physics.link import free_space_db, hata_db, loss_exponent, noise_dbm, path_loss_db, warn_outside_validity

KM = np.array([1.0, 2.0, 5.0, 10.0, 20.0])


def loss_db(config, *distances_km):
    return path_loss_db(config, 1e3 * np.array(distances_km, float))


@pytest.mark.parametrize("frequency_mhz", [30.0, 145.0, 433.0, 1_500.0])
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


@pytest.mark.parametrize("loss", ["free_space", "log_distance", "hata"])
def test_losses_are_continuous_and_grow_with_distance(loss):
    config = GenerateConfig(loss=loss, frequency_mhz=433.0)
    d = np.geomspace(20.0, 4e5, 20_000)
    step = np.diff(path_loss_db(config, d))
    assert (step > 0).all()
    assert step.max() < 0.03


@pytest.mark.parametrize("loss", ["free_space", "log_distance", "hata"])
def test_the_slope_in_the_bound_is_the_slope_of_the_loss(loss):
    config = GenerateConfig(loss=loss, frequency_mhz=433.0, loss_exponent=3.7)
    d = np.array([200.0, 900.0, 1_100.0, 5e4])
    ratio = 1.0001
    slope = (path_loss_db(config, d * ratio) - path_loss_db(config, d)) / (10 * np.log10(ratio))
    assert loss_exponent(config, d) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("environment", "at_1_km"),
    [("city", 126.403), ("residential", 116.460), ("rural", 97.896)],  # urban, −9.943 suburban, −28.507 open
)
def test_hata_at_900_mhz_is_the_textbook_line(environment, at_1_km):
    # 69.55 + 77.283 − 20.414 − 0.016, slope 44.9 − 6.55·log10 30 = 35.225 dB per decade
    got = hata_db(900.0, KM * 1e3, 30.0, 1.5, environment)
    assert got == pytest.approx(at_1_km + 35.225 * np.log10(KM), abs=0.005)


@pytest.mark.parametrize(("frequency_mhz", "base_m", "mobile_m"), [(150, 30, 1.5), (450, 70, 2.0), (1500, 200, 10.0)])
def test_hata_is_itu_r_p_529s_field_strength_turned_into_loss(frequency_mhz, base_m, mobile_m):
    f, h = np.log10(frequency_mhz), np.log10(base_m)
    mobile = (1.1 * f - 0.7) * mobile_m - (1.56 * f - 0.8)
    field = 69.82 - 6.16 * f + 13.82 * h + mobile - (44.9 - 6.55 * h) * np.log10(KM)  # dB(µV/m) for 1 kW e.r.p.
    expected = 139.3 - field + 20 * f
    assert hata_db(frequency_mhz, KM * 1e3, base_m, mobile_m, "city") == pytest.approx(expected, abs=0.1)


def test_the_environment_orders_hatas_losses():
    losses = [hata_db(450.0, KM * 1e3, 50.0, 2.0, e) for e in ("city", "residential", "rural")]
    assert (losses[0] > losses[1]).all()
    assert (losses[1] > losses[2]).all()


def test_hata_stands_on_the_configured_antennas():
    config = GenerateConfig(loss="hata", frequency_mhz=900, rx_antenna_m=30, tx_antenna_m=1.5, environment="city")
    assert loss_db(config, 1, 10) == pytest.approx([126.403, 161.628], abs=0.005)


@pytest.mark.parametrize(("frequency_mhz", "reach_m"), [(145.0, 15e3), (1_600.0, 15e3), (433.0, 90e3), (145.0, 90e3)])
def test_hata_outside_its_range_warns_once(caplog, frequency_mhz, reach_m):
    with caplog.at_level(logging.WARNING, logger="brim"):
        warn_outside_validity(GenerateConfig(loss="hata", frequency_mhz=frequency_mhz), reach_m)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "150-1500 MHz" in caplog.text


@pytest.mark.parametrize(("loss", "reach_m"), [("free_space", 90e3), ("log_distance", 90e3), ("hata", 19e3)])
def test_a_model_inside_its_range_does_not_warn(caplog, loss, reach_m):
    with caplog.at_level(logging.WARNING, logger="brim"):
        warn_outside_validity(GenerateConfig(loss=loss, frequency_mhz=433.0), reach_m)
    assert not caplog.records


@pytest.mark.parametrize(
    ("environment", "expected_dbm"),
    # ITU-R P.372 at 145 MHz: F_am = 16.930, 12.630, 7.330 dB; with f_r = 3.981 and kT₀B = −133.007 dBm.
    [("city", -115.821), ("residential", -119.721), ("rural", -123.769)],
)
def test_noise_is_man_made_noise_and_the_receivers_own(environment, expected_dbm):
    assert noise_dbm(GenerateConfig(environment=environment)) == pytest.approx(expected_dbm, abs=0.002)


def test_noise_of_a_perfect_receiver_is_the_external_noise_alone():
    config = GenerateConfig(noise_figure_db=0.0, environment="residential")
    assert noise_dbm(config) == pytest.approx(-133.007 + 12.630, abs=0.002)


def test_noise_falls_with_frequency_to_the_receivers_own():
    levels = [noise_dbm(GenerateConfig(frequency_mhz=f, environment="rural")) for f in (50.0, 145.0, 450.0, 2_900.0)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] == pytest.approx(-133.007 + 20.139 + 0.125, abs=0.01)  # (103.26 + 2.981)/103.26 is 0.124 dB


# Other frequencies


def test_the_two_theories_of_the_ground_wave_agree_where_they_meet():
    for mhz in (0.0775, 0.3, 1.0, 3.0, 10.0):
        x = np.array([0.25, 0.4, 0.6])
        distance = x / ground_wave._scale(mhz) * ground_wave._RADIUS_M
        flat = -20 * np.log10(ground_wave._flat(mhz, distance))
        sphere = -20 * np.log10(ground_wave._sphere(mhz, x))
        assert np.abs(flat - sphere).max() < 4.5, mhz


def test_the_ground_wave_falls_faster_at_higher_frequencies_and_beyond_the_horizon():
    distance = np.array([1e4, 1e5, 5e5])
    low, high = (ground_wave.attenuation_db(mhz, distance) for mhz in (0.1, 3.0))

    assert (high > low + 5).all()
    assert (np.diff(high) > 0).all()
    assert low[0] < 1  # long waves near by spread as on a perfect conductor


@pytest.mark.parametrize("frequency_mhz", [0.01, 0.0775, 7.1, 145.0, 6000.0])
@pytest.mark.parametrize("loss", ["free_space", "log_distance", "ground_wave", "two_ray", "cost231"])
def test_all_frequencies_have_a_loss_that_grows_with_distance(frequency_mhz, loss):
    config = GenerateConfig(frequency_mhz=frequency_mhz, loss=loss)
    distance = np.logspace(3, 6, 61)

    db = path_loss_db(config, distance)

    assert np.isfinite(db).all()
    assert (np.diff(db) > 0).all()


def test_two_rays_fall_by_forty_decibels_a_decade_beyond_the_turn():
    config = GenerateConfig(frequency_mhz=900.0, loss="two_ray", rx_antenna_m=30.0, tx_antenna_m=2.0)

    assert np.diff(path_loss_db(config, np.array([1e4, 1e5])))[0] == pytest.approx(40)
    assert path_loss_db(config, np.array([1e4]))[0] == pytest.approx(40 * 4 - 20 * np.log10(60), abs=0.1)
    assert loss_exponent(config, np.array([200.0, 1e4])) == pytest.approx([2, 4], abs=0.01)


@pytest.mark.parametrize("loss", ["ground_wave", "two_ray"])
def test_the_solvers_table_is_the_generators_loss(loss):
    config = GenerateConfig(loss=loss, frequency_mhz=7.1 if loss == "ground_wave" else 900.0)
    distance = torch.tensor([300.0, 5_000.0, 40_000.0, 250_000.0], dtype=torch.float64)
    power, exponent = StrengthModel.of(config).power_dbm(distance)

    assert power.numpy() == pytest.approx(config.tx_power_dbm - path_loss_db(config, distance.numpy()), abs=0.05)
    assert exponent.numpy() == pytest.approx(loss_exponent(config, distance.numpy()), abs=0.3)

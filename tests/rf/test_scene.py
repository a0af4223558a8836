"""Who is where: the statistics of scenes, their links and the gates."""

import numpy as np
import pytest
from scipy import stats

from brim.rf.config import GenerateConfig, Station, preset
from brim.rf.physics.geometry import ecef
from brim.rf.physics.scene import make_scenes, max_baseline_m, max_delay_s

ATTEMPTS = np.arange(20_000)
NETWORKS = ["stations", "random"]


@pytest.fixture(scope="module", params=NETWORKS)
def config(request):
    return GenerateConfig(use_random_receivers=request.param == "random", seed=21)


@pytest.fixture(scope="module")
def scenes(config):
    return make_scenes(config, ATTEMPTS)


@pytest.fixture(scope="module")
def gated():
    """A network that refuses some for either reason."""
    config = GenerateConfig(tx_power_dbm=20.0, max_gdop=4.0, min_receivers=4)
    return config, make_scenes(config, ATTEMPTS)


def box(scenes):
    """South, north, west, east of the receivers, each (B, 1)."""
    lat, lon = (np.where(scenes.valid, scenes.receivers[..., k], np.nan) for k in range(2))
    edges = np.nanmin(lat, 1), np.nanmax(lat, 1), np.nanmin(lon, 1), np.nanmax(lon, 1)
    return tuple(e[:, None] for e in edges)


def within(scenes, margin):
    south, north, west, east = (e[:, 0] for e in box(scenes))
    lat, lon = scenes.transmitter[:, 0], scenes.transmitter[:, 1]
    margin = margin + 1e-9
    return (lat >= south - margin) & (lat <= north + margin) & (lon >= west - margin) & (lon <= east + margin)


def test_seven_in_ten_transmitters_stand_inside_the_box_and_all_within_half_a_degree_of_it(scenes):
    assert within(scenes, 0.0).mean() == pytest.approx(0.7, abs=0.011)
    assert within(scenes, 0.5).all()


def test_outside_transmitters_fill_the_frame_evenly():
    scenes = make_scenes(GenerateConfig(inside_ratio=0.0, seed=3), ATTEMPTS)
    south, north, west, east = (e[0, 0] for e in box(scenes))
    lat, lon = scenes.transmitter[:, 0], scenes.transmitter[:, 1]
    tall, wide = north - south, east - west
    area = (tall + 1) * (wide + 1) - tall * wide
    assert not within(scenes, -1e-6).any()
    for corner in ((lat > north) & (lon > east), (lat < south) & (lon < west)):
        assert corner.mean() == pytest.approx(0.25 / area, abs=0.006)
    assert ((lat > north) & (lon > west) & (lon < east)).mean() == pytest.approx(0.5 * wide / area, abs=0.011)
    assert ((lon < west) & (lat > south) & (lat < north)).mean() == pytest.approx(0.5 * tall / area, abs=0.011)


def test_inside_transmitters_fill_the_box_evenly():
    scenes = make_scenes(GenerateConfig(inside_ratio=1.0), ATTEMPTS)
    south, north, west, east = (e[:, 0] for e in box(scenes))
    for place, low, high in ((0, south, north), (1, west, east)):
        assert stats.kstest((scenes.transmitter[:, place] - low) / (high - low), "uniform").pvalue > 0.01


def test_five_to_ten_random_receivers_fill_their_area():
    scenes = make_scenes(preset("production"), ATTEMPTS)
    assert scenes.valid.shape == (len(ATTEMPTS), 10)
    share = np.bincount(scenes.valid.sum(-1), minlength=11) / len(ATTEMPTS)
    assert share[:5].sum() == 0
    assert share[5:] == pytest.approx(np.full(6, 1 / 6), abs=0.011)
    here = scenes.receivers[scenes.valid]
    for place, low, high in ((0, 44, 46), (1, 7, 10), (2, 0, 600)):
        assert stats.kstest((here[:, place] - low) / (high - low), "uniform").pvalue > 0.01


def test_ranges_are_straight_lines_between_the_antennas(config, scenes):
    tx = scenes.transmitter + np.array([0, 0, config.tx_antenna_m])
    rx = scenes.receivers + np.array([0, 0, config.rx_antenna_m])
    one = np.stack(ecef(*(tx[:, None, k] for k in range(3))), -1)
    two = np.stack(ecef(*(rx[..., k] for k in range(3))), -1)
    expected = np.linalg.norm(one - two, axis=-1)
    assert np.allclose(scenes.range_m[scenes.valid], expected[scenes.valid], rtol=1e-9)
    assert np.allclose(scenes.delay_s[scenes.valid], expected[scenes.valid] / 299_792_458.0, rtol=1e-9, atol=0)


def test_no_delay_or_baseline_exceeds_what_the_tables_are_sized_for(config, scenes):
    assert scenes.delay_s[scenes.valid].max() < max_delay_s(config)
    at = np.stack(ecef(*(scenes.receivers[:500, :, k] for k in range(3))), -1)
    both = scenes.valid[:500, :, None] & scenes.valid[:500, None]
    assert np.linalg.norm(at[:, :, None] - at[:, None], axis=-1)[both].max() < max_baseline_m(config)


def test_received_power_is_transmit_power_plus_gains_minus_loss():
    config = GenerateConfig(tx_gain_dbi=3.0, rx_gain_dbi=5.5, tx_power_dbm=33.0, shadowing_db=0.0)
    scenes = make_scenes(config, ATTEMPTS[:200])
    loss = 75.677 + 30 * np.log10(scenes.range_m / 1e3)
    far = scenes.range_m > 1e3
    assert scenes.power_dbm[far] == pytest.approx((33 + 3 + 5.5 - loss)[far], abs=0.01)
    assert scenes.snr_db == pytest.approx(scenes.power_dbm + 119.721, abs=0.002)


def test_the_numbers_of_a_link_have_their_laws(scenes):
    here, power = scenes.valid, scenes.path_power[scenes.valid]
    echoes = power[:, 1:] > 0
    late_us = scenes.echo_delay_s[here][:, 1:][echoes] * 1e6
    level_db = 10 * np.log10((power[:, 1:] / power[:, :1])[echoes])
    laws = {
        "shadowing of 6 dB": (scenes.shadowing_db[here] / 6, "norm"),
        "clocks of 1 µs": (scenes.clock_error_s[here] * 1e6, "norm"),
        "oscillators within 50 Hz": ((scenes.frequency_offset_hz[here] + 50) / 100, "uniform"),
        "coherence over 50 to 200 ms": ((scenes.coherence_time_s[here] - 0.05) / 0.15, "uniform"),
        "echoes 0.5 to 5 µs later": ((late_us - 0.5) / 4.5, "uniform"),
        "echoes 10 to 25 dB weaker": ((level_db + 25) / 15, "uniform"),
        "transmitters up to 600 m high": (scenes.transmitter[:, 2] / 600, "uniform"),
    }
    for name, (values, law) in laws.items():
        assert stats.kstest(values, law).pvalue > 0.003, name
    assert set(np.unique(echoes.sum(-1))) == {2, 3}
    assert not scenes.echo_delay_s[..., 0].any()
    assert np.allclose(scenes.doppler_hz[here], 0.423 / scenes.coherence_time_s[here], rtol=1e-12)
    unshadowed = scenes.power_dbm - scenes.shadowing_db + scenes.loss_db
    assert unshadowed[here] == pytest.approx(40.0, abs=1e-9)


@pytest.mark.parametrize("name", ["shadowing_db", "clock_error_s"])
def test_links_are_independent_between_receivers_and_attempts(name):
    drawn = getattr(make_scenes(GenerateConfig(), ATTEMPTS), name)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(7)).max() < 0.03
    assert abs(np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1]) < 0.03


def test_the_draws_of_a_link_are_independent_of_each_other():
    s = make_scenes(GenerateConfig(), ATTEMPTS)
    drawn = [s.shadowing_db, s.clock_error_s, s.frequency_offset_hz, s.coherence_time_s, s.echo_delay_s[..., 1]]
    drawn += [s.echo_delay_s[..., 2], s.path_power[..., 0], np.repeat(s.transmitter[:, 2:], 7, 1)]
    correlation = np.corrcoef([d.ravel() for d in drawn]) - np.eye(len(drawn))
    assert np.abs(correlation).max() < 0.02


def test_present_means_a_link_snr_of_at_least_the_minimum(gated):
    config, scenes = gated
    assert (scenes.present == (scenes.valid & (scenes.snr_db >= config.min_snr_db))).all()
    assert 0.2 < scenes.present.mean() < 0.8


def test_the_receivers_gate_comes_first_and_gdop_is_of_the_present(gated):
    config, scenes = gated
    enough = scenes.present.sum(-1) >= config.min_receivers
    assert (scenes.enough == enough).all()
    both = ~enough & ~(scenes.gdop <= config.max_gdop)
    assert both.any()  # these count under receivers: not enough, whatever their geometry
    assert (scenes.accepted == (enough & (scenes.gdop <= config.max_gdop))).all()
    for n in np.nonzero(enough)[0][:200]:
        azimuth = np.arctan2(scenes.east[n], scenes.north[n])[scenes.present[n]]
        h = np.stack([np.sin(azimuth), np.cos(azimuth), np.ones_like(azimuth)], -1)
        assert scenes.gdop[n] == pytest.approx(np.sqrt(np.trace(np.linalg.inv(h.T @ h))), rel=1e-6)


def test_directions_are_those_of_geodesics_at_the_transmitter():
    from geographiclib.geodesic import Geodesic

    scenes = make_scenes(GenerateConfig(), ATTEMPTS[:20])
    for n in range(20):
        for r in range(7):
            line = Geodesic.WGS84.Inverse(*scenes.transmitter[n, :2], *scenes.receivers[n, r, :2])
            azimuth = np.degrees(np.arctan2(scenes.east[n, r], scenes.north[n, r]))
            assert abs((azimuth - line["azi1"] + 180) % 360 - 180) < 0.05


def test_stations_of_the_southern_hemisphere_have_their_transmitters_around_them():
    south = tuple(Station(f"S{k}", -33.0 - k / 3, 18.0 + k % 2, 100.0) for k in range(4))
    scenes = make_scenes(GenerateConfig(stations=south), ATTEMPTS[:2_000])
    assert within(scenes, 0.5).all()
    assert within(scenes, 0.0).mean() == pytest.approx(0.7, abs=0.035)

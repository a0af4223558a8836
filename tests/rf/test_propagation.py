"""How long waves travel and what is not known of it, against numbers worked by hand and the sun's almanac."""

import math
from datetime import UTC, datetime

import numpy as np
import pytest

from brim.rf.physics.propagation import ground_range_m, hop_delay_us, sun_elevation_deg, travel_sigma_us, travel_us


def test_waves_travel_at_the_speed_of_light_and_along_the_ground_at_that_in_air():
    distance = np.array([299_792.458])
    assert travel_us(145.0, distance) == pytest.approx(1_000.0, abs=1e-9)
    assert travel_us(30.0, distance) == pytest.approx(1_000.0, abs=1e-9)
    assert travel_us(None, distance) == pytest.approx(1_000.0, abs=1e-9)
    assert travel_us(0.0775, distance) == pytest.approx(1_000.315, abs=1e-9)


def test_a_hop_is_as_much_longer_as_its_triangle():
    # Flat Earth: 2·√(50² + 70²) − 100 = 72.05 km; over the round one a little more at 1 000 km
    assert hop_delay_us(np.array([100e3]), 70e3) == pytest.approx(72.05e3 / 299.792, rel=0.01)
    angle, radius = 1_000 / 6_371 / 2, 6_371.0
    ground, top = radius * np.array([math.sin(angle), math.cos(angle)]), np.array([0.0, radius + 90])
    longer_km = 2 * float(np.linalg.norm(top - ground)) - 1_000
    assert hop_delay_us(np.array([1e6]), 90e3) == pytest.approx(longer_km * 1e3 / 299.792458)


@pytest.mark.parametrize(
    ("frequency_mhz", "night", "distance_m", "equal_m", "height_m"),
    [
        (0.0775, False, 400e3, 700e3, 70e3),
        (0.0775, True, 400e3, 600e3, 90e3),
        (1.0, True, 100e3, 200e3, 90e3),
        (1.0, False, 100e3, 700e3, 70e3),
    ],
)
def test_the_sky_wave_blurs_long_and_medium_waves(frequency_mhz, night, distance_m, equal_m, height_m):
    ground_us = 0.5 * distance_m / 100e3
    sky_us = (distance_m / equal_m) ** 2 / math.sqrt(2) * hop_delay_us(np.array([distance_m]), height_m)
    sigma = travel_sigma_us(frequency_mhz, np.array([distance_m]), night=night)
    assert sigma == pytest.approx(np.hypot(ground_us, sky_us))


def test_short_waves_are_blurred_with_the_square_of_the_distance_and_straight_lines_are_not():
    distance = np.array([200e3, 400e3])
    assert travel_sigma_us(7.1, distance) == pytest.approx(np.hypot([1.0, 2.0], [13 / 4, 13.0]))
    assert travel_sigma_us(145.0, distance).tolist() == [0, 0]
    assert travel_sigma_us(None, distance).tolist() == [0, 0]


def test_the_ground_wave_reaches_less_at_higher_frequencies():
    assert [ground_range_m(mhz) for mhz in (3.0, 12.0)] == pytest.approx([400e3, 200e3])
    assert [ground_range_m(mhz) for mhz in (None, 0.0775, 2.9, 30.0)] == [math.inf] * 4


@pytest.mark.parametrize(
    ("when", "lat", "lon", "elevation_deg"),
    [
        ("2026-03-20T12:00:00", 0.0, 0.0, 90.0),  # equinox, noon in Greenwich
        ("2026-03-20T06:00:00", 0.0, 90.0, 90.0),  # noon in Dhaka comes six hours earlier
        ("2026-03-20T18:00:00", 30.0, -90.0, 60.0),  # and in New Orleans six hours later
        ("2026-06-21T12:00:00", 23.44, 0.0, 90.0),  # the tropic of Cancer
        ("2026-12-21T12:00:00", 50.0, 0.0, 16.56),
        ("2026-06-21T00:00:00", 70.0, 0.0, 3.44),  # midnight sun
        ("2026-03-20T00:00:00", 0.0, 0.0, -90.0),
    ],
)
def test_the_sun_stands_where_the_almanac_has_it(when, lat, lon, elevation_deg):
    unix_s = datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp()
    assert sun_elevation_deg(unix_s, np.array(lat), np.array(lon)) == pytest.approx(elevation_deg, abs=2.5)

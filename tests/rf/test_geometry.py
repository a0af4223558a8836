"""Ranges, the local frame and the dilution of precision against geodesics and hand-worked cases."""

import numpy as np
import pytest
from geographiclib.geodesic import Geodesic

from brim.rf.physics.geometry import ecef, enu, gdop

A, B = 6_378_137.0, 6_356_752.314245179  # WGS-84 semi-axes, m


def points(*rows):
    return tuple(np.array(column, float) for column in zip(*rows, strict=True))


def straight_line(here, there):
    return np.linalg.norm(np.subtract(ecef(*here), ecef(*there)), axis=0)


def directions(*azimuths_deg, distance_m=10_000.0):
    """East and north, (1, R), of receivers around a transmitter."""
    azimuth = np.radians(np.array([azimuths_deg], float))
    return distance_m * np.sin(azimuth), distance_m * np.cos(azimuth)


def dilution(*azimuths_deg, distance_m=10_000.0):
    east, north = directions(*azimuths_deg, distance_m=distance_m)
    return gdop(east, north, np.ones(east.shape, bool))[0]


def test_ecef_is_the_ellipsoid_at_its_axes():
    got = np.transpose(ecef(*points((0, 0, 0), (0, 90, 0), (90, 0, 0), (-90, 0, 100), (0, 180, 50))))
    expected = [[A, 0, 0], [0, A, 0], [0, 0, B], [0, 0, -B - 100], [-A - 50, 0, 0]]
    assert got == pytest.approx(np.array(expected), abs=1e-6)


def test_ecef_at_45_degrees_is_the_textbook_formula_worked_by_hand():
    # N = a / sqrt(1 − e² sin² 45°) = 6 388 838.290 m; e² = 0.00669437999014
    x, y, z = (float(v[0]) for v in ecef(*points((45.0, 0.0, 0.0))))
    assert (x, y, z) == pytest.approx((4_517_590.879, 0.0, 4_487_348.409), abs=1e-3)


@pytest.mark.parametrize("lat", [0.0, 30.0, 45.0, -60.0])
def test_straight_lines_are_within_a_hundredth_of_a_percent_of_geodesics_over_300_km(lat):
    for azimuth in range(0, 360, 30):
        for distance_m in (1_000.0, 50_000.0, 300_000.0):
            end = Geodesic.WGS84.Direct(lat, 7.0, azimuth, distance_m)
            line = straight_line(points((lat, 7.0, 0.0)), points((end["lat2"], end["lon2"], 0.0)))[0]
            assert line == pytest.approx(distance_m, rel=1e-4)
            assert line <= distance_m + 1e-6  # a chord is never longer than its arc


def test_a_difference_in_height_lengthens_the_line():
    low, high = points((45.0, 7.0, 0.0)), points((45.0, 7.0, 600.0))
    assert straight_line(low, high)[0] == pytest.approx(600.0, abs=1e-6)


def test_enu_of_hand_cases():
    origin = points((0, 0, 0))
    got = np.transpose(enu(*points((0, 90, 0), (90, 0, 0), (0, 0, 250), (0, 0, -10)), *origin))
    assert got == pytest.approx(np.array([[A, 0, -A], [0, B, -A], [0, 0, 250], [0, 0, -10]]), abs=1e-6)


def test_enu_is_level_and_turned_to_north():
    origin = points((45.0, 7.5, 200.0))
    for azimuth in (0, 37, 90, 180, 270, 333):
        end = Geodesic.WGS84.Direct(45.0, 7.5, azimuth, 20_000)
        east, north, up = (float(v[0]) for v in enu(*points((end["lat2"], end["lon2"], 200.0)), *origin))
        assert abs((np.degrees(np.arctan2(east, north)) - azimuth + 180) % 360 - 180) < 0.01
        assert up == pytest.approx(-(20_000**2) / (2 * 6.37e6), rel=0.02)  # the Earth curves away
        assert np.hypot(east, north) == pytest.approx(20_000, rel=1e-4)


@pytest.mark.parametrize(
    ("azimuths", "trace"),
    [
        ((0, 120, 240), 5 / 3),  # HᵀH = diag(1.5, 1.5, 3)
        ((0, 90, 180, 270), 5 / 4),  # diag(2, 2, 4)
        ((90, 0, 270), 5 / 2),  # [[2,0,0],[0,1,1],[0,1,3]]: 1/2 + (3 + 1)/2
        ((0, 60, 120, 180, 240, 300), 5 / 6),  # diag(3, 3, 6)
    ],
)
def test_gdop_of_hand_worked_cases(azimuths, trace):
    assert dilution(*azimuths) == pytest.approx(np.sqrt(trace), rel=1e-12)


def test_gdop_depends_on_directions_not_distances():
    east, north = directions(10, 100, 200, 310)
    stretch = np.array([[1.0, 3.0, 0.01, 20.0]])
    mask = np.ones((1, 4), bool)
    assert gdop(east * stretch, north * stretch, mask) == pytest.approx(gdop(east, north, mask), rel=1e-12)


@pytest.mark.parametrize("azimuths", [(), (20,), (20, 140), (50, 50, 50), (50, 230, 50), (0, 180, 0, 180, 180)])
def test_gdop_is_infinite_when_singular(azimuths):
    east, north = directions(*azimuths)
    assert gdop(east.reshape(1, -1), north.reshape(1, -1), np.ones((1, len(azimuths)), bool))[0] == np.inf


def test_gdop_counts_masked_receivers_only():
    east, north = directions(0, 120, 240, 33, 77)
    mask = np.array([[True, True, True, False, False]])
    assert gdop(east, north, mask)[0] == pytest.approx(np.sqrt(5 / 3), rel=1e-12)


def test_gdop_equals_the_matrix_formula_for_any_directions():
    rng = np.random.default_rng(1)
    azimuth, mask = rng.uniform(0, 2 * np.pi, (500, 10)), rng.random((500, 10)) < 0.7
    mask[:, :3] = True
    got = gdop(5e4 * np.sin(azimuth), 5e4 * np.cos(azimuth), mask)
    for n in range(500):
        h = np.stack([np.sin(azimuth[n]), np.cos(azimuth[n]), np.ones(10)], -1)[mask[n]]
        assert got[n] == pytest.approx(np.sqrt(np.trace(np.linalg.inv(h.T @ h))), rel=1e-6)


def test_gdop_is_smooth_under_small_moves():
    receivers = np.array([[0, 0], [40_000, 5_000], [15_000, 60_000], [-30_000, 20_000]], float)
    path = np.array([-80_000.0, -37_000.0]) + np.linspace(0, 1, 20_001)[:, None] * np.array([170_000.0, 110_000.0])
    delta = receivers[None] - path[:, None]
    value = gdop(delta[..., 0].copy(), delta[..., 1].copy(), np.ones(delta.shape[:2], bool))
    step = np.abs(np.diff(np.log(value)))
    assert np.isfinite(value).all()
    assert step.max() < 0.02  # 10 m moves
    assert np.abs(np.diff(np.log(value[::2]))).max() > 1.5 * step.max()  # halving the move halves the change: no jump


def test_gdop_grows_without_limit_towards_the_singular_geometry():
    values = [dilution(0, angle, 180) for angle in (10, 1, 0.1, 0.01)]
    ratios = np.divide(values[1:], values[:-1])
    assert np.isfinite(values).all()
    assert (ratios > 5).all()

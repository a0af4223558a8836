"""Ranges, the local frame and the dilution of precision against geodesics and hand-worked cases."""

import numpy as np
import pytest
import torch
from geographiclib.geodesic import Geodesic

from brim.rf.physics.geometry import ecef, enu, from_local, gdop, geodesic_m, to_local

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


def test_geodesics_are_those_of_geographiclib_everywhere():
    rng = np.random.default_rng(3)
    lat, lon = rng.uniform(-89, 89, (2, 60)), rng.uniform(-180, 180, (2, 60))
    lat[1, :20], lon[1, :20] = lat[0, :20] + 0.3, lon[0, :20] + 0.5  # some across the 180th meridian, or near a pole
    lat[1, -1], lon[1, -1] = lat[0, -1], lon[0, -1]
    expected = [Geodesic.WGS84.Inverse(*ends)["s12"] for ends in zip(lat[0], lon[0], lat[1], lon[1], strict=True)]
    near = np.array(expected) < 19e6
    assert geodesic_m(lat[0], lon[0], lat[1], lon[1])[near] == pytest.approx(np.array(expected)[near], abs=1e-3)
    assert near.sum() > 50


def test_straight_lines_are_within_a_hundredth_of_a_percent_of_geodesics_over_300_km():
    for azimuth in range(0, 360, 30):
        end = Geodesic.WGS84.Direct(-60.0, 7.0, azimuth, 300_000.0)
        line = straight_line(points((-60.0, 7.0, 0.0)), points((end["lat2"], end["lon2"], 0.0)))[0]
        assert line == pytest.approx(300_000.0, rel=1e-4)
        assert line < 300_000.0  # a chord is shorter than its arc


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


def test_the_solvers_frame_is_the_same_and_has_an_inverse():
    place = torch.tensor([[45.3, 8.1, 250.0], [44.1, 9.9, 0.0], [-33.0, 170.0, 600.0]], dtype=torch.float64)
    origin = torch.tensor([[45.0, 8.5, 300.0], [45.0, 8.5, 300.0], [-33.4, 170.5, 20.0]], dtype=torch.float64)
    expected = np.stack(enu(*place.T.numpy(), *origin.T.numpy()), -1)

    local = to_local(place, origin)

    assert local.numpy() == pytest.approx(expected, abs=1e-6)
    assert from_local(local, origin).numpy() == pytest.approx(place.numpy(), abs=1e-7)


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


@pytest.mark.parametrize("azimuths", [(), (20,), (20, 140), (50, 50, 50), (50, 230, 50), (0, 180, 0, 180, 180)])
def test_gdop_is_infinite_when_singular(azimuths):
    east, north = directions(*azimuths)
    assert gdop(east.reshape(1, -1), north.reshape(1, -1), np.ones((1, len(azimuths)), bool))[0] == np.inf


def test_gdop_equals_the_matrix_formula_for_any_directions():
    rng = np.random.default_rng(1)
    azimuth, mask = rng.uniform(0, 2 * np.pi, (500, 10)), rng.random((500, 10)) < 0.7
    mask[:, :3] = True
    distance = rng.uniform(100, 9e4, (500, 10))  # which makes no difference
    got = gdop(distance * np.sin(azimuth), distance * np.cos(azimuth), mask)
    for n in range(500):
        h = np.stack([np.sin(azimuth[n]), np.cos(azimuth[n]), np.ones(10)], -1)[mask[n]]
        assert got[n] == pytest.approx(np.sqrt(np.trace(np.linalg.inv(h.T @ h))), rel=1e-6)

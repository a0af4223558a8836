"""Land, coasts and borders of maps."""

import numpy as np
import pytest

from brim.report.land import land_areas, land_lines


@pytest.mark.parametrize(("lat", "lon", "is_border"), [(44.40, 8.93, False), (45.90, 6.99, True), (51.13, 1.33, False)])
def test_known_coasts_and_borders_are_where_they_are(lat, lon, is_border):
    """Genova's shore, the Col du Géant between France and Italy, Dover."""
    lines = [line for line in land_lines(lat - 1, lat + 1, lon - 1, lon + 1) if line.is_border == is_border]
    apart = [
        np.hypot(along - lat, (across - lon) * np.cos(np.radians(lat))).min()
        for line in lines
        for along, across in [
            (np.interp(np.arange(0, len(line.lat) - 0.99, 0.1), np.arange(len(line.lat)), v) for v in line[1:])
        ]
    ]
    assert min(apart) * 111 < 6


def test_lines_end_at_the_edges_and_the_interior_has_no_coast():
    lines = land_lines(44.0, 46.0, 7.0, 10.0)
    assert lines
    for line in lines:
        assert line.lat.min() >= 44 - 1e-9
        assert line.lat.max() <= 46 + 1e-9
        assert line.lon.min() >= 7 - 1e-9
        assert line.lon.max() <= 10 + 1e-9
    assert not [line for line in land_lines(45.0, 45.4, 8.0, 9.0) if not line.is_border]
    assert land_lines(-45.0, -40.0, -30.0, -25.0) == []  # the open Atlantic


@pytest.mark.parametrize("around_deg", [1.5, 12.0])
@pytest.mark.parametrize(
    ("lat", "lon", "is_land"),
    [
        (45.07, 7.69, True), (43.9, 8.9, False), (42.2, 9.1, True), (43.0, 15.5, False), (38.5, -98.0, True),
        (42.0, 50.5, False), (66.0, 175.0, True), (66.0, -175.0, True), (-33.5, 150.5, True), (-45.0, -30.0, False),
    ],
)  # fmt: skip
def test_areas_cover_land_and_neither_sea_nor_lakes(lat, lon, is_land, around_deg):
    """Torino, off Genova, Corsica, the Adriatic, Kansas, the Caspian Sea, both sides of 180°, Australia, open sea."""
    rings = land_areas(lat - around_deg, lat + around_deg, lon - around_deg, lon + around_deg)

    assert _is_inside(rings, lat, lon) == is_land
    for ring in rings:
        assert len(ring) < 3000  # what lies outside takes no points
        assert (np.abs(ring - (lat, lon)) <= around_deg + 1e-9).all()


def test_areas_are_cut_at_the_edges_and_not_before():
    """The map of the built-in network is as narrow as its points."""
    tight, wide = land_areas(43.9, 45.9, 6.7, 9.7), land_areas(40.0, 50.0, 0.0, 15.0)
    places = np.random.default_rng(0).uniform((43.9, 8.0), (44.4, 9.7), (300, 2))

    inside = [_is_inside(tight, lat, lon) for lat, lon in places]
    assert inside == [_is_inside(wide, lat, lon) for lat, lon in places]
    assert 50 < sum(inside) < 250


def _is_inside(rings, lat, lon):
    crossings = 0
    for ring in rings:
        (south, west), (north, east) = ring[:-1].T, ring[1:].T
        is_passed = (south > lat) != (north > lat)
        at = west + (lat - south) * (east - west) / np.where(is_passed, north - south, 1.0)
        crossings += int((is_passed & (lon < at)).sum())
    return crossings % 2 == 1

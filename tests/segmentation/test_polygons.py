"""Outlines along pixel edges, checked against shapely and scipy, which know nothing of our rings."""

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage

from brim.errors import ConfigError
from brim.segmentation.objects import Polygon, Prediction, fill, to_polygons
from brim.segmentation.objects import rings as outlines
from brim.segmentation.objects.rings import find_rings, trace


def picture(*rows: str) -> np.ndarray:
    return np.array([[letter == "#" for letter in row] for row in rows])


def corners(ring: np.ndarray) -> set[tuple[int, int]]:
    return {(int(x), int(y)) for x, y in ring}


def check(mask: np.ndarray) -> list[Polygon]:
    """Everything that has to hold for any mask."""
    probability = np.random.default_rng(mask.size).random(mask.shape, np.float32)
    polygons, (labels, num_parts) = trace(mask, probability), ndimage.label(mask)
    assert len(polygons) == num_parts
    np.testing.assert_array_equal(fill(polygons, *mask.shape), mask)
    for polygon in polygons:
        inside = fill([polygon], *mask.shape)
        assert len(np.unique(labels[inside])) == 1
        assert polygon.area == inside.sum()
        assert polygon.confidence == pytest.approx(float(probability[inside].mean()), abs=1e-6)
        shape = shapely.Polygon(polygon.points, polygon.holes)
        assert shape.is_valid
        assert shape.area == polygon.area
        for ring in (polygon.points, *polygon.holes):
            check_ring(ring)
    return polygons


def check_ring(ring: np.ndarray) -> None:
    steps = np.roll(ring, -1, 0) - ring
    level = steps[:, 1] == 0
    assert ring.dtype == np.int32
    assert ((steps != 0).sum(1) == 1).all()  # every step has one direction: no repeats, nothing slanting
    assert (level != np.roll(level, 1)).all()  # and every point is a corner


def test_a_single_pixel_is_a_unit_square():
    (polygon,) = check(picture("....", "..#.", "...."))

    assert corners(polygon.points) == {(2, 1), (3, 1), (3, 2), (2, 2)}
    assert polygon.area == 1


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (0, 5), (5, 0)])
def test_an_empty_mask_has_no_polygons(shape):
    assert trace(np.zeros(shape, bool)) == []
    assert not fill([], *shape).any()


def test_a_hole_is_a_ring_of_its_own():
    (polygon,) = check(picture("####", "#..#", "####"))

    assert [corners(hole) for hole in polygon.holes] == [{(1, 1), (3, 1), (3, 2), (1, 2)}]
    assert polygon.area == 10


def test_an_island_in_a_hole_is_an_object_and_may_have_holes():
    polygons = check(picture("#######", "#.....#", "#.###.#", "#.#.#.#", "#.###.#", "#.....#", "#######"))

    assert [(p.area, len(p.holes)) for p in polygons] == [(24, 1), (8, 1)]


@given(st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(lambda shape: hnp.arrays(bool, shape)))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_small_mask_comes_back_whole(mask):
    check(mask)


@pytest.mark.parametrize("density", [0.03, 0.2, 0.5, 0.6, 0.8, 0.97])
def test_noise_comes_back_whole(density):
    check(np.random.default_rng(7).random((60, 45)) < density)


@pytest.mark.parametrize("density", [0.2, 0.5, 0.7, 0.9])
def test_without_holes_an_outline_stands_for_all_it_encloses(density):
    mask = np.random.default_rng(11).random((40, 50)) < density
    labels, num_parts = ndimage.label(mask)
    expected = np.any([ndimage.binary_fill_holes(labels == part) for part in range(1, num_parts + 1)], axis=0)

    polygons = trace(mask, detect_holes=False)

    np.testing.assert_array_equal(fill(polygons, *mask.shape), expected)
    assert len(polygons) == ndimage.label(expected)[1]
    assert not any(polygon.holes for polygon in polygons)


def test_without_holes_the_confidence_counts_what_is_filled():
    mask = picture("###", "#.#", "###")
    probability = np.where(mask, 1.0, 0.1)

    (polygon,) = trace(mask, probability, detect_holes=False)

    assert polygon.area == 9
    assert polygon.confidence == pytest.approx(8.1 / 9)


def test_without_holes_what_lies_in_a_hole_at_any_depth_is_gone_and_what_lies_beside_stays():
    distance = np.abs(np.indices((9, 9)) - 4).max(0)
    rings, gap = distance % 2 == 0, np.zeros((9, 1), bool)  # a dot in a ring in a ring
    mask = np.hstack([rings, gap, rings, gap, np.ones((9, 5), bool)])

    polygons = trace(mask, detect_holes=False)

    assert [(p.points[0].tolist(), p.holes) for p in polygons] == [([0, 0], ()), ([10, 0], ()), ([20, 0], ())]
    assert [p.area for p in polygons] == [81, 81, 45]
    assert [len(p.holes) for p in trace(mask)] == [1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("band", [1, 60, 500])
@pytest.mark.parametrize("detect_holes", [True, False])
def test_bands_leave_no_seam(band, detect_holes, monkeypatch):
    random = np.random.default_rng(2)
    mask, probability = random.random((33, 47)) < 0.6, random.random((33, 47), np.float32)
    probability[20, 5] = np.nan
    whole = trace(mask, probability, detect_holes=detect_holes)

    monkeypatch.setattr(outlines, "_BAND_PIXELS", band)
    banded = trace(mask, probability, detect_holes=detect_holes)

    assert_alike(banded, whole)


@pytest.mark.parametrize("detect_holes", [True, False])
def test_masks_traced_together_give_what_each_gives_alone(detect_holes):
    random = np.random.default_rng(4)
    sizes = [(33, 47), (1, 1), (47, 33), (20, 20), (64, 64)]
    masks = [random.random(size) < share for size, share in zip(sizes, (0.6, 1, 0.9, 0, 0.97), strict=True)]
    probabilities = [random.random(size, np.float32) for size in sizes]
    alone = [trace(*pair, detect_holes=detect_holes) for pair in zip(masks, probabilities, strict=True)]

    together = [to_polygons(rings) for rings in find_rings(masks, probabilities, detect_holes=detect_holes)]

    for found, expected in zip(together, alone, strict=True):
        assert_alike(found, expected)


def assert_alike(found: list[Polygon], expected: list[Polygon]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.points.tolist(), one.area) == (other.points.tolist(), other.area)
        assert [hole.tolist() for hole in one.holes] == [hole.tolist() for hole in other.holes]
        assert one.confidence == pytest.approx(other.confidence, abs=1e-9)


def test_an_outline_starts_at_its_upper_left_and_goes_down_and_objects_follow_by_it():
    polygons = check(picture(".....##", "..##.##", ".###...", ".##...#"))

    assert [p.points[:2].tolist() for p in polygons] == [[[5, 0], [5, 2]], [[2, 1], [2, 2]], [[6, 3], [6, 4]]]


def test_images_wider_than_16_bits_count():
    mask = np.zeros((2, 70_000), bool)
    mask[:, 3::9], mask[1, 65_530:65_541] = True, True

    polygons = trace(mask, np.full(mask.shape, 0.25, np.float32))

    assert len(polygons) == ndimage.label(mask)[1]
    np.testing.assert_array_equal(fill(polygons, *mask.shape), mask)
    assert {p.confidence for p in polygons} == {0.25}


def test_a_nan_outside_does_not_reach_an_object():
    probability = np.full((4, 4), 0.5, np.float32)
    probability[0, 0] = np.nan

    (polygon,) = trace(picture("....", ".##.", ".##.", "...."), probability)

    assert polygon.confidence == pytest.approx(0.5)


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(ConfigError, match=r"\(2, 3\) with probabilities \(3, 2\)"):
        trace(np.ones((2, 3)), np.ones((3, 2)))
    with pytest.raises(ConfigError, match=r"\(1, 2, 3\)"):
        trace(np.ones((1, 2, 3)))


def test_fill_takes_polygons_of_any_slope_direction_and_overlap_by_pixel_centres():
    triangle = Polygon(np.array([[0, 0], [8, 0], [0, 8]], np.int32), (), 0, 0)
    turned = Polygon(triangle.points[::-1], (), 0, 0)
    y, x = np.mgrid[:6, :9] + 0.5

    np.testing.assert_array_equal(fill([triangle, turned], 6, 9), x + y < 8)


def test_fill_ignores_what_lies_outside_the_image():
    square = Polygon(np.array([[-2, -2], [2, -2], [2, 9], [-2, 9]], np.int32), (), 0, 0)

    np.testing.assert_array_equal(fill([square], 4, 5), np.arange(5) < np.full((4, 1), 2))


def test_a_predictions_confidence_weighs_its_polygons_by_area():
    ring = np.zeros((4, 2), np.int32)
    polygons = (Polygon(ring, (), 30.0, 0.9), Polygon(ring, (), 10.0, 0.5))

    assert Prediction("a", 9, 9, polygons).confidence == pytest.approx(0.8)
    assert Prediction("a", 9, 9).confidence is None

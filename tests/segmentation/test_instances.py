"""From labels to maps and back, outlines of labels, and scores of objects, against plain references."""

import numpy as np
import pytest
import shapely
import torch
from scipy import ndimage

import brim
from brim.segmentation.objects.contours import find_rings
from brim.segmentation.objects.instances import heights, to_labels
from brim.segmentation.objects.measuring import find_objects
from brim.segmentation.objects.rings import trace
from brim.segmentation.objects.scores import ObjectScores
from brim.segmentation.scenes.drawing import draw


@pytest.fixture(scope="module")
def labels() -> torch.Tensor:
    """(6, 128, 128) int32, objects 4-connected."""
    drawn = draw(("nuclei", "phase", "cytoplasm"), 3, torch.arange(6, dtype=torch.int32), 128, 128).labels.numpy()
    parts = np.zeros_like(drawn)
    for image, own in zip(drawn, parts, strict=True):
        for number in np.unique(image)[1:]:
            pieces, count = ndimage.label(image == number)
            for piece in range(1, count + 1):
                own[pieces == piece] = own.max() + 1
    return torch.from_numpy(parts)


def test_height_is_the_distance_to_the_edge(labels):
    found = heights(labels, int(labels.max()))
    assert int((labels.amax((1, 2)) > 0).sum()) >= 3  # images with objects
    for image, height in zip(labels.numpy(), found.numpy(), strict=True):
        expected = np.zeros(image.shape)
        for number in np.unique(image)[1:]:
            inside = np.pad(image == number, 1, mode="edge")
            distance = ndimage.distance_transform_edt(inside)[1:-1, 1:-1] * (image == number)
            expected += distance / max(1, distance.max())
        np.testing.assert_allclose(height, expected, atol=1e-6)


def test_labels_come_back_from_their_maps(labels):
    scores = ObjectScores()
    found = to_labels((labels > 0).float(), heights(labels, int(labels.max())), min_area=1)
    for true, predicted in zip(labels.numpy(), found.numpy(), strict=True):
        scores.add(true, predicted)
        assert ndimage.label(predicted > 0)[1] <= predicted.max()
    assert scores.as_dict()["ap50"] > 0.93  # an outline with a waist has two peaks


def test_small_objects_are_left_out_and_numbers_have_no_gaps():
    foreground = torch.zeros(1, 20, 20)
    foreground[0, 2:4, 2:4] = foreground[0, 8:16, 8:16] = 1
    found = to_labels(foreground, heights((foreground > 0).int(), 1), min_area=16)
    assert found.unique().tolist() == [0, 1]
    assert int((found > 0).sum()) == 64


@pytest.mark.parametrize(
    ("second", "valley", "areas"),
    [
        (0.8, 0.69, [48]),  # rises 0.11 above the valley: part of the first
        (0.8, 0.67, [26, 22]),
        (0.41, 0.1, [26, 22]),
        (0.39, 0.1, [26]),  # too low for an object
    ],
)
def test_peaks_are_objects_where_they_rise_far_enough(second, valley, areas):
    height = torch.from_numpy(np.interp(np.arange(24), [0, 6, 12, 18, 23], [0.05, 1, valley, second, 0.04]))
    found = to_labels(torch.ones(1, 2, 24), height.float().expand(1, 2, 24), min_area=1)
    assert np.bincount(found.flatten())[1:].tolist() == areas


def test_an_object_of_the_least_area_counts_and_its_pixels_are_above_the_threshold():
    foreground = torch.zeros(1, 20, 20)
    foreground[0, 2:6, 2:6], foreground[0, 10:13, 10:15], foreground[0, 16:, 2:8] = 0.51, 0.51, 0.5
    found = to_labels(foreground, heights((foreground > 0).int(), 1), min_area=16)
    assert np.bincount(found.flatten())[1:].tolist() == [16]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_image_of_one_value(value):
    found = to_labels(torch.full((2, 16, 16), value), torch.full((2, 16, 16), value))
    assert found.amax((1, 2)).tolist() == [value, value]


def test_neighbours_share_their_border_and_diagonal_pixels_do_not():
    image = torch.zeros(1, 6, 8, dtype=torch.int32)
    image[0, 1:5, 1:5], image[0, 2, 2], image[0, 2:4, 5], image[0, 5, 6] = 1, 0, 2, 3
    rings = find_rings(image)
    points = [rings.points[a:b].tolist() for a, b in zip(rings.first[:-1], rings.first[1:], strict=True)]
    assert points == [
        [[1, 1], [1, 5], [5, 5], [5, 1]],
        [[2, 2], [3, 2], [3, 3], [2, 3]],
        [[5, 2], [5, 4], [6, 4], [6, 2]],
        [[6, 5], [6, 6], [7, 6], [7, 5]],
    ]
    assert rings.hole.tolist() == [False, True, False, False]
    assert rings.label.tolist() == [1, 1, 2, 3]


def test_scores_count_matches_merges_and_splits():
    """Two pairs of true objects are one each, one is two, and one is as it should be."""
    true, predicted = np.zeros((10, 60), np.int32), np.zeros((10, 60), np.int32)
    for number, (start, end) in enumerate([(0, 8), (8, 16), (20, 30), (32, 36), (36, 40), (44, 50)]):
        true[:, start:end] = 5 + 3 * number  # with gaps
    for number, (start, end) in enumerate([(0, 16), (20, 25), (25, 30), (32, 40), (44, 50)], 1):
        predicted[:, start:end] = number
    scores = ObjectScores()
    scores.add(true, predicted)
    values = scores.as_dict()
    assert (values["merges"], values["splits"]) == (2, 1)
    assert values["ap50"] == pytest.approx(1 / (6 + 5 - 1))


def test_contours_are_public_and_one_for_each_label():
    image = np.zeros((9, 12), np.uint16)
    image[1:4, 1:4], image[2, 2], image[1:4, 4:6], image[7:, 10], image[0, 11] = 7, 0, 3, 9, 9

    outlines, rings = brim.contours(image), brim.contours(torch.from_numpy(image.astype(np.int16)), holes=True)

    assert [outline.tolist() for outline in outlines] == [
        [[4, 1], [4, 4], [6, 4], [6, 1]],
        [[1, 1], [1, 4], [4, 4], [4, 1]],
        [[10, 7], [10, 9], [11, 9], [11, 7]],
    ]
    assert [len(own) for own in rings] == [1, 2, 2]
    assert brim.contours(np.zeros((0, 5), int)) == brim.contours(np.zeros((2, 5), bool)) == []


def test_rings_are_those_of_the_masks_tracer_and_valid():
    rng = np.random.default_rng(0)
    for share in (0.3, 0.5, 0.7, 0.85) * 8:
        mask = rng.random(rng.integers(1, 16, 2)) < share
        labels, _ = ndimage.label(mask)
        found = [
            (rings[0].tolist(), sorted(_from_smallest(ring) for ring in rings[1:]))
            for rings in brim.contours(labels, holes=True)
        ]
        wanted = [
            (polygon.points.tolist(), sorted(_from_smallest(hole) for hole in polygon.holes)) for polygon in trace(mask)
        ]
        assert sorted(found) == sorted(wanted)
        assert all(shapely.Polygon(outline, holes).is_valid for outline, holes in found)


def _from_smallest(ring: np.ndarray) -> list[list[float]]:
    points = ring.tolist()
    start = points.index(min(points))
    return points[start:] + points[:start]


def test_measurements_are_those_of_the_pixels(labels):
    rng = torch.Generator().manual_seed(1)
    foreground = torch.rand(labels.shape, generator=rng)
    images = torch.randint(0, 256, (len(labels), 3, *labels.shape[1:]), dtype=torch.uint8, generator=rng)

    found = find_objects(labels, foreground, images)

    for image in range(len(labels)):
        numbers, rows = (
            found.labels[image].numpy(),
            found.table[found.object_ends[image] : found.object_ends[image + 1]],
        )
        assert len(rows) == numbers.max() == len(labels[image].unique()) - 1
        for number, (area, x, y, _, eccentricity, confidence, *means) in enumerate(rows.tolist(), 1):
            down, right = np.nonzero(numbers == number)
            spread = np.cov(np.stack([right, down]), bias=True) + np.eye(2) / 12 if len(down) > 1 else np.eye(2) / 12
            short, long = np.linalg.eigvalsh(spread)
            assert (area, x, y) == pytest.approx((len(down), right.mean() + 0.5, down.mean() + 0.5))
            assert eccentricity == pytest.approx(np.sqrt(1 - short / long), abs=1e-6)
            assert confidence == pytest.approx(float(foreground[image][down, right].mean()), abs=1e-4)
            assert means == pytest.approx(images[image].numpy()[:, down, right].mean(1).tolist())


@pytest.mark.parametrize("radius", [6, 20, 70])
def test_the_perimeter_of_a_disc(radius):
    rows, columns = torch.meshgrid(torch.arange(160), torch.arange(160), indexing="ij")
    disc = ((rows - 79.7) ** 2 + (columns - 80.2) ** 2 < radius**2).int()

    assert float(find_objects(disc[None]).table[0, 3]) == pytest.approx(2 * np.pi * radius, rel=0.02)

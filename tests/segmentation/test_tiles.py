import itertools

import pytest
import torch
from torch import Tensor

from brim.segmentation.prediction.patches import Blend, TileAxis, TileGrid, padded, usable_tile


def blended(grid: TileGrid, values: Tensor) -> Tensor:
    """The image put together again from its own windows."""
    blend = Blend(grid, grid.rows.weights(), grid.columns.weights())
    for window in grid:
        bottom, right = window.top + grid.rows.size, window.left + grid.columns.size
        blend.add(window, values[window.top : bottom, window.left : right])
    return blend.total


SIZES = [(300, 300, 128, None), (129, 1000, 128, None), (128, 257, 128, 64), (97, 65, 64, 0), (333, 200, 64, 1)]


@pytest.mark.parametrize(("height", "width", "tile", "overlap"), SIZES)
def test_an_image_comes_back_from_its_windows(height, width, tile, overlap):
    values = torch.rand(height, width)
    torch.testing.assert_close(blended(TileGrid(height, width, tile, overlap), values), values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 120, 121, 500])
def test_weights_are_above_zero_and_sum_to_one_everywhere(length):
    axis = TileAxis(length, 64, 8)
    total = torch.zeros(length)
    for start, weights in zip(axis.starts, axis.weights(), strict=True):
        assert weights.min() > 0
        total[start : start + axis.size] += weights
    torch.testing.assert_close(total, torch.ones(length), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [65, 120, 121, 500, 1024])
def test_windows_overlap_and_the_last_ends_at_the_border(length):
    starts = TileAxis(length, 64, 8).starts
    assert starts[0] == 0
    assert starts[-1] + 64 == length
    assert all(0 < after - before <= 56 for before, after in itertools.pairwise(starts))


def test_windows_overlap_by_an_eighth_of_the_tile():
    grid = TileGrid(2000, 1024, 1024)
    assert (grid.rows.starts, grid.columns.starts) == ((0, 896, 976), (0,))


def test_a_local_network_in_windows_equals_the_whole_image():
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(1, 1, 3, padding=1)
    image, grid = torch.rand(200, 310), TileGrid(200, 310, 96, 24)
    with torch.no_grad():
        whole = convolution(image[None, None])[0, 0]
        blend = Blend(grid, grid.rows.weights(), grid.columns.weights())
        for window in grid:
            part = image[window.top : window.top + 96, window.left : window.left + 96]
            blend.add(window, convolution(part[None, None])[0, 0])
    near_a_border = torch.zeros_like(image, dtype=torch.bool)
    for start in grid.rows.starts:
        near_a_border[[start, start + 95]] = True
    for start in grid.columns.starts:
        near_a_border[:, [start, start + 95]] = True
    error = (blend.total - whole).abs()
    assert error[~near_a_border].max() < 1e-6
    assert error.max() < 0.05  # the zeros beyond a window's border weigh little there


def test_sides_are_padded_to_multiples_of_32():
    assert [padded(side) for side in (1, 20, 32, 33, 1000, 1024)] == [32, 32, 32, 64, 1024, 1024]
    assert [usable_tile(tile) for tile in (32, 100, 1000, 1024)] == [32, 96, 992, 1024]

"""Scenes drawn by the batch: reproducible, and true to their labels."""

import numpy as np
import pytest
import torch

from brim.segmentation.scenes.drawing import QUANTITIES, DrawnScenes, draw
from brim.segmentation.scenes.kinds import KINDS


def scenes(
    *kinds: str, seed: int = 7, first: int = 0, count: int = 4, height: int = 96, width: int = 128
) -> DrawnScenes:
    return draw(kinds, seed, torch.arange(first, first + count, dtype=torch.int32), height, width)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_the_same_in_any_batch(kind: str) -> None:
    together, alone = scenes(kind), scenes(kind, first=2, count=1)
    assert together.images.shape == (4, 3, 96, 128)
    assert torch.equal(together.images[2:3], alone.images)
    assert torch.equal(together.labels[2:3], alone.labels)


def test_seeds_and_numbers_give_other_images() -> None:
    image = scenes("nuclei", count=1).images
    assert not torch.equal(image, scenes("nuclei", seed=8, count=1).images)
    assert not torch.equal(image, scenes("nuclei", first=1, count=1).images)


def test_every_kind_names_every_quantity() -> None:
    assert {kind: set(ranges) for kind, ranges in KINDS.items()} == {kind: set(QUANTITIES) for kind in KINDS}
    assert all(low <= high for ranges in KINDS.values() for low, high in ranges.values())


def test_nuclei_are_brighter_than_what_surrounds_them() -> None:
    drawn = scenes("nuclei", count=24)
    grey, inside = drawn.images.float().mean(1), drawn.labels > 0
    shown = inside.flatten(1).any(1)
    contrast = [
        float(image[mask].mean() - image[~mask].mean()) for image, mask in zip(grey[shown], inside[shown], strict=True)
    ]
    assert np.mean(np.array(contrast) > 0) > 0.95


def test_some_objects_touch() -> None:
    labels = scenes("nuclei", count=24).labels
    left, right = labels[:, :, :-1], labels[:, :, 1:]
    assert int(((left != right) & (left > 0) & (right > 0)).sum()) > 50

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from brim.engine.device.devices import stream
from brim.errors import ConfigError
from brim.segmentation.config import CropAugmentation
from brim.segmentation.training import augment

CPU = torch.device("cpu")
STILL = CropAugmentation(turn=False, affine=0, brightness=0, contrast=0, gamma=0, noise=0)
MOVES = replace(STILL, turn=True, affine=1.0)


def blobs(count: int, size: int = 48) -> torch.Tensor:
    """(B, 1, S, S) bool, smooth shapes of many pixels."""
    coarse = torch.rand(count, 1, 5, 5, generator=stream(3, "blobs", device=CPU))
    return F.interpolate(coarse, (size, size), mode="bicubic") > 0.5


def painted(masks: torch.Tensor) -> torch.Tensor:
    return masks.expand(-1, 3, -1, -1).to(torch.uint8) * 255


def change(images, masks, config, seed=0):
    return augment(images, masks, stream(seed, "test", device=CPU), config)


def test_image_and_mask_move_together():
    masks = blobs(32)

    images, moved = change(painted(masks), masks, MOVES)

    wrong = (images[:, :1] > 127) != moved
    assert not torch.equal(moved, masks)
    assert wrong.float().mean() < 0.01  # half a pixel at the edges: one is interpolated, the other not
    deep = F.max_pool2d(images[:, :1].float(), 3, 1, 1) == -F.max_pool2d(-images[:, :1].float(), 3, 1, 1)
    assert not (wrong & deep).any()


def test_turns_and_mirrors_give_exact_pixels_and_all_eight_come():
    image = torch.randint(0, 256, (1, 3, 37, 37), dtype=torch.uint8, generator=stream(0, "x", device=CPU))
    views = {
        bytes(view.contiguous().numpy().tobytes())
        for turns in range(4)
        for view in (image.rot90(turns, (2, 3)), image.rot90(turns, (2, 3)).flip(3))
    }

    found, masks = change(
        image.expand(200, -1, -1, -1), image[:, :1].expand(200, -1, -1, -1), replace(STILL, turn=True)
    )

    assert {bytes(one.contiguous().numpy().tobytes()) for one in found} == views
    assert torch.equal(found[:, :1], masks)


def test_without_changes_crops_stay_as_they_are():
    masks = blobs(4)
    images = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8, generator=stream(0, "y", device=CPU))

    found, kept = change(images, masks, STILL)

    assert torch.equal(found, images)
    assert torch.equal(kept, masks)


def test_light_changes_images_and_leaves_masks():
    masks = blobs(16)
    images = painted(masks) // 2 + 60

    found, kept = change(images, masks, replace(CropAugmentation(), turn=False, affine=0))

    shift = (found.float() - images.float()).mean((1, 2, 3))
    assert torch.equal(kept, masks)
    assert shift.unique().numel() == 16
    assert 3 < shift.abs().max() < 64


def test_every_crop_draws_its_own_numbers_from_the_stream():
    masks = blobs(1).expand(8, -1, -1, -1)
    first, again, other = (change(painted(masks), masks, CropAugmentation(), seed=seed) for seed in (1, 1, 2))

    assert len({one.numpy().tobytes() for one in first[0]}) == 8
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_mask_values_are_moved_never_mixed():
    masks = blobs(16).to(torch.uint8) * 3

    _, moved = change(painted(blobs(16)), masks, MOVES)

    assert moved.dtype == torch.uint8
    assert set(moved.unique().tolist()) == {0, 3}


@pytest.mark.parametrize(
    "wrong", [{"affine": 1.5}, {"scale": -0.1}, {"scale": 1.0}, {"rotation_deg": 181.0}, {"noise": float("nan")}]
)
def test_a_value_that_cannot_work_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CropAugmentation(**wrong)

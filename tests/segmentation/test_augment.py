from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from brim.engine.device.devices import stream
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


def test_crops_are_moved_as_far_as_the_settings_say():
    """Crops whose red is the column and whose green is the row tell where each pixel came from."""
    side, count, middle = 64, 2000, slice(24, 40)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    place = torch.stack([3 * columns, 3 * rows, 0 * rows]).to(torch.uint8).expand(count, -1, -1, -1)

    def moved(**changes):
        found, _ = change(place, place[:, :1], replace(STILL, affine=1.0, **changes))
        x, y = found[:, :2, middle, middle].double().unbind(1)
        down, right = (part[:, 8:].mean((1, 2)) - part[:, :8].mean((1, 2)) for part in (y / 24, y.mT / 24))
        return torch.rad2deg(torch.atan2(right, down)), torch.hypot(down, right), x.mean((1, 2)) / 3 - 31.5

    angle, _, _ = moved(rotation_deg=20.0, scale=0, shift=0)
    _, factor, _ = moved(rotation_deg=0, scale=0.15, shift=0)
    _, _, right = moved(rotation_deg=0, scale=0, shift=0.06)
    for found, middle_value, most in ((angle, 0, 20), (factor, 1, 0.15), (right, 0, 0.06 * side)):
        away = (found - middle_value).abs()
        assert 0.95 * most < away.max() < 1.05 * most
        assert (found - middle_value).mean().abs() < 0.06 * most  # of 2000 uniform draws: deviation 0.013
        assert away.mean() == pytest.approx(most / 2, rel=0.06)


def test_only_the_share_of_crops_that_the_settings_say_is_moved():
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).expand(2000, -1, -1, -1)

    found, _ = change(images, images[:, :1], replace(STILL, affine=0.3))

    assert (found != images).flatten(1).any(1).float().mean() == pytest.approx(0.3, abs=0.04)


def test_light_changes_as_much_as_the_settings_say():
    grey = torch.full((2000, 3, 8, 8), 102, dtype=torch.uint8)
    striped = grey.clone()
    striped[:, :, ::2] = 152

    brighter = change(grey, grey, replace(STILL, brightness=0.1))[0].double().mean((1, 2, 3)) - 102
    harder = change(striped, grey, replace(STILL, contrast=0.2))[0].double()
    curved = change(grey, grey, replace(STILL, gamma=0.2))[0].double().mean((1, 2, 3)) / 255
    noisy = change(grey, grey, replace(STILL, noise=0.02))[0].double().std((1, 2, 3))

    assert brighter.abs().max() == pytest.approx(25.5, rel=0.04)
    assert brighter.abs().mean() == pytest.approx(25.5 / 2, rel=0.06)
    steps = (harder[:, :, ::2] - harder[:, :, 1::2]).mean((1, 2, 3)) / 50
    assert (steps.min(), steps.max()) == (pytest.approx(0.8, abs=0.02), pytest.approx(1.2, abs=0.02))
    assert harder.mean((1, 2, 3)).sub(127).abs().max() < 1
    exponent = curved.log() / np.log(0.4)
    assert (exponent.min(), exponent.max()) == (pytest.approx(np.exp(-0.2), 0.01), pytest.approx(np.exp(0.2), 0.01))
    assert noisy.mean() == pytest.approx(0.02 * 255 / 2, rel=0.06)

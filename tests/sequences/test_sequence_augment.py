from dataclasses import replace

import pytest
import torch
from torch import Tensor

from brim.engine.device import stream
from brim.sequences import Augmentation
from brim.sequences.batches.augmentation import (
    add_noise,
    augment,
    crop,
    feature_mask,
    hidden_spans,
    span_mask,
    two_views,
)
from brim.sequences.model import frame_mask

CPU = torch.device("cpu")
NONE = Augmentation(crop=0, noise=0, time_masks=0, feature_masks=0)


def rng(seed: int = 0) -> torch.Generator:
    return stream(seed, "test", device=CPU)


def numbered(length: Tensor, num_frames: int, dim: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every valid frame holds its own number, counted from 1."""
    frames = torch.arange(1, num_frames + 1).expand(len(length), -1) * frame_mask(length, num_frames)
    return frames.unsqueeze(-1).repeat(1, 1, dim).to(dtype)


LENGTHS = torch.tensor([40, 1, 2, 13, 27] * 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_frames_change_in_place_and_padding_stays_zero(dtype):
    frames = numbered(LENGTHS, 48, dtype=dtype)
    before, place = frames.clone(), frames.data_ptr()

    length = augment(frames, LENGTHS, rng(), Augmentation(), mean=torch.full((4,), 9.0), std=torch.ones(4))

    assert frames.data_ptr() == place
    assert not torch.equal(frames, before)
    assert not frames[~frame_mask(length, 48)].any()


def test_a_crop_is_a_part_of_the_sequence_moved_to_the_front():
    frames = numbered(LENGTHS, 48)

    length = crop(frames, LENGTHS, rng(), 0.5)

    first, last = frames[:, 0, 0], frames[torch.arange(len(length)), length - 1, 0]
    assert torch.equal(last - first + 1, length.float())
    assert (first >= 1).all()
    assert (last <= LENGTHS).all()
    assert ((length >= 1) & (length >= (0.5 * LENGTHS).round()) & (length <= LENGTHS)).all()
    assert not frames[~frame_mask(length, 48)].any()
    long = LENGTHS == 40
    assert len(set(length[long].tolist())) > 5
    assert len(set(first[long].tolist())) > 5


def test_noise_is_in_units_of_each_feature_and_each_sequence_draws_its_strength():
    frames = torch.zeros(400, 100, 2)

    add_noise(frames, rng(), 0.5, torch.tensor([1.0, 10.0]))

    spread = frames.std(1)
    assert torch.allclose(spread[:, 1] / spread[:, 0], torch.tensor(10.0), rtol=0.5)
    assert spread[:, 0].max() < 0.7
    assert abs(spread[:, 0].mean() - 0.25) < 0.03


def test_time_masks_are_relative_to_each_length():
    length = torch.tensor([100] * 300 + [10] * 300)

    masked = span_mask(length, 120, rng(), 1, 0.2)

    share = masked.sum(1) / length
    assert not masked[~frame_mask(length, 120)].any()
    assert share.max() <= 0.2
    assert abs(share[:300].mean() - 0.1) < 0.02
    assert abs(share[300:].mean() - 0.1) < 0.03
    assert ((masked[:, 1:] & ~masked[:, :-1]).sum(1) <= 1).all()
    assert masked.any(0)[:100].all()  # anywhere
    assert not span_mask(torch.ones(99, dtype=torch.int64), 3, rng(), 4, 1.0).any()  # a single frame is left


def test_feature_masks_hide_a_band_in_every_frame():
    frames = torch.ones(50, 6, 40)
    config = replace(NONE, feature_masks=1, feature_width=0.5)

    augment(frames, torch.full((50,), 6), rng(), config, mean=torch.full((40,), 7.0))

    hidden = frames[:, 0] == 7
    assert torch.equal(frames == 7, hidden.unsqueeze(1).expand(-1, 6, -1))
    assert 0 < hidden.float().mean() < 0.5
    assert feature_mask(frames, rng(), NONE).sum() == 0


def test_hidden_spans_cover_their_share_but_neither_none_nor_all():
    masked = hidden_spans(LENGTHS, 48, rng(), 0.3, 4)
    long = hidden_spans(torch.full((64,), 1000), 1000, rng(), 0.3, 8)

    hidden = masked.sum(1)
    assert ((hidden >= 1) == (LENGTHS > 1)).all()
    assert (hidden < LENGTHS).all()
    assert not masked[~frame_mask(LENGTHS, 48)].any()
    assert abs(long.float().mean() - 0.3) < 0.02


def test_two_views_differ_and_the_target_is_the_first_without_noise():
    batch = {"frames": numbered(LENGTHS, 48), "length": LENGTHS, "label": torch.arange(len(LENGTHS))}
    before = batch["frames"].clone()
    config = Augmentation(noise=0.0, feature_masks=0, time_masks=0)

    made = two_views(batch, rng(), config, hidden=0.2, span=2)

    first, length = made["view"][:, 0], made["view_length"][:, 0]
    assert list(made) == ["view", "view_length", "target", "hidden", "label"]
    assert torch.equal(batch["frames"], before)
    assert torch.equal(first, made["target"] * ~made["hidden"].unsqueeze(-1))
    assert bool((made["target"][made["hidden"]] > 0).all())  # what is to be predicted is still there
    assert not made["target"][~frame_mask(length, 48)].any()
    assert not made["view"].flatten(0, 1)[~frame_mask(made["view_length"].flatten(), 48)].any()
    assert not torch.equal(made["view_length"][:, 0], made["view_length"][:, 1])


def test_noise_and_masks_of_views_leave_what_is_to_be_predicted_as_it_was():
    batch = {"frames": torch.full((64, 50, 2), 7.0), "length": torch.full((64,), 50)}
    config, mean = Augmentation(crop=0, noise=0.5, time_masks=0, feature_masks=0), torch.tensor([3.0, -4.0])

    made = two_views(batch, rng(), config, mean=mean, std=torch.tensor([0.01, 10.0]))

    first, hidden = made["view"][:, 0], made["hidden"]
    noise = first[~hidden] - 7
    assert torch.equal(made["target"], batch["frames"])
    assert torch.equal(first[hidden], mean.expand(int(hidden.sum()), 2))
    assert 0.001 < float(noise[:, 0].std()) < 0.005
    assert 1 < float(noise[:, 1].std()) < 5

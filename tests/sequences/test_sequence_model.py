from dataclasses import replace

import pytest
import torch
from torch import Tensor

from brim.sequences import Classifier, Encoder, SequenceConfig
from brim.sequences.model import BroughtClassifier, frame_mask
from brim.sequences.model.network import AttentionPool

SMALL = SequenceConfig(dim=12, channels=16, hidden=8, attention=8, embedding=10, dropout=0.0)
LENGTHS = torch.tensor([19, 1, 7, 20, 2])


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def make(**changes) -> Encoder:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Encoder(replace(SMALL, **changes))


def padded(length: Tensor, num_frames: int, dim: int, seed: int = 0) -> Tensor:
    frames = torch.randn(len(length), num_frames, dim, generator=torch.Generator().manual_seed(seed))
    return frames * frame_mask(length, num_frames).unsqueeze(-1)


@pytest.mark.parametrize("reverse", ["gate", "gather"])
@pytest.mark.parametrize(("dim", "front", "stride"), [(1, "plain", 1), (12, "plain", 3), (12, "residual", 1)])
def test_a_sequence_gives_the_same_alone_and_in_a_longer_batch(dim, front, stride, reverse):
    encoder = make(dim=dim, reverse=reverse, front=front, stride=stride)
    frames = padded(LENGTHS, 32, dim)
    encoder(frames, LENGTHS)  # statistics of a batch
    encoder.eval()

    whole = encoder(frames, LENGTHS)

    for item, length in enumerate(LENGTHS.tolist()):
        alone = encoder(frames[item : item + 1, :length], LENGTHS[item : item + 1])
        assert (alone.embedding - whole.embedding[item]).abs().max() < 1e-5
        steps = -(-length // stride)
        assert (alone.states[0] - whole.states[item, :steps]).abs().max() < 1e-5
        assert not whole.states[item, steps:].any()


def test_statistics_of_a_batch_are_of_the_frames_that_exist():
    encoder = make(front="residual")
    norm = encoder.convolutions[0].norm
    short, long = (padded(LENGTHS, num_frames, 12) for num_frames in (20, 40))
    long[:, :20] = short

    first = encoder(short, LENGTHS)
    mean = norm.mean.clone()
    second = encoder(long, LENGTHS)

    assert (first.embedding - second.embedding).abs().max() < 1e-5
    assert mean.any()
    torch.testing.assert_close(norm.mean, mean * 1.9)  # the same statistics twice, a tenth of the rest each time


@pytest.mark.parametrize("normalise", [True, False])
def test_not_even_nan_behind_the_end_leaks(normalise):
    encoder = make(normalise=normalise)
    frames = padded(LENGTHS, 24, 12)
    spoilt = frames.masked_fill(~frame_mask(LENGTHS, 24).unsqueeze(-1), torch.nan)

    clean, found = encoder(frames, LENGTHS), encoder(spoilt, LENGTHS)

    assert torch.equal(clean.embedding, found.embedding)
    assert torch.equal(clean.states, found.states)


def test_gradients_do_not_reach_padding():
    encoder = make()
    frames = padded(LENGTHS, 24, 12).requires_grad_()

    encoder(frames, LENGTHS).embedding.sum().backward()

    outside = ~frame_mask(LENGTHS, 24)
    assert not frames.grad[outside].any()
    assert (frames.grad[~outside].abs().sum(-1) > 0).all()


def test_statistics_make_the_scale_of_the_features_irrelevant():
    plain, encoder = make(), make()
    frames = padded(LENGTHS, 24, 12)
    mean, std = torch.linspace(-3, 50, 12), torch.linspace(0.1, 20, 12)
    encoder.set_statistics(mean, std)

    found = encoder(frames * std + mean, LENGTHS)

    assert (found.embedding - plain(frames, LENGTHS).embedding).abs().max() < 1e-4
    assert torch.equal(encoder.state_dict()["scale"], 1 / std)


def test_a_network_that_somebody_brings_gets_normalised_frames_and_zeros_behind_the_end():
    class Total(torch.nn.Module):
        def forward(self, frames, length):
            return torch.stack([frames.sum((1, 2)), length.float()], 1)

    brought = BroughtClassifier(Total(), 2, 2)
    brought.set_statistics(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 0.0]))
    frames = torch.tensor([[[3.0, 6.0], [7.0, 5.0], [9.0, torch.nan]]])

    assert brought(frames, torch.tensor([2])).tolist() == [[1 + 1 + 3 + 0, 2]]


def test_layers_are_summed_by_learned_weights_that_begin_equal():
    encoder = make(stack=3)
    frames = padded(LENGTHS, 20, 12)

    assert encoder.layer_weights.tolist() == pytest.approx([1 / 3] * 3)
    with torch.no_grad():
        encoder.layer_scores.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
    mixed = 0.5 * frames[..., :4] + 0.3 * frames[..., 4:8] + 0.2 * frames[..., 8:]
    torch.testing.assert_close(encoder._mixed(frames), mixed)
    encoder(frames, LENGTHS).embedding.sum().backward()
    assert bool(encoder.layer_scores.grad.abs().sum() > 0)


def test_attention_is_safe_in_half_precision_and_without_frames():
    pool = AttentionPool(8, 4).bfloat16()
    states = (100 * torch.randn(3, 6, 8)).bfloat16().requires_grad_()
    valid = frame_mask(torch.tensor([6, 1, 0]), 6)

    weights = pool.weights(states, valid)
    pool(states, valid).sum().backward()

    assert torch.allclose(weights.sum(1), torch.tensor([1.0, 1.0, 0.0]), atol=1e-6)
    assert not weights[~valid].any()
    assert torch.isfinite(states.grad).all()


def test_only_the_head_of_a_frozen_classifier_learns():
    classifier = Classifier(make(dropout=0.5), 3, linear=True, frozen=True).train()
    frames = padded(LENGTHS, 24, 12)

    first, second = classifier(frames, LENGTHS), classifier(frames, LENGTHS)
    first.sum().backward()

    assert torch.equal(first, second)  # no dropout
    assert num_parameters(classifier) == 3 * (10 + 1)
    assert all(parameter.grad is None for parameter in classifier.encoder.parameters())

import math

import pytest
import torch

from brim.engine.device import stream
from brim.sequences import Augmentation, Classifier, Encoder, SequenceConfig
from brim.sequences.batches.augmentation import two_views
from brim.sequences.config import SelfConfig
from brim.sequences.model import frame_mask
from brim.sequences.training.objectives import (
    SelfSupervised,
    class_weights,
    cross_entropy,
    nt_xent,
    reconstruction,
    regression_loss,
    self_supervised_loss,
)

CPU = torch.device("cpu")


def learner(**options) -> SelfSupervised:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = Encoder(SequenceConfig(dim=6, channels=16, hidden=8, attention=8, embedding=12))
    return SelfSupervised(encoder, SelfConfig(projection=8, **options))


def batch(num_items: int = 8, num_frames: int = 20) -> dict[str, torch.Tensor]:
    rng = stream(0, "objectives", device=CPU)
    length = torch.randint(1, num_frames + 1, (num_items,), generator=rng)
    frames = torch.randn(num_items, num_frames, 6, generator=rng) * frame_mask(length, num_frames).unsqueeze(-1)
    label = torch.arange(num_items) % 3
    return {"frames": frames, "length": length, "label": label}


def test_contrast_equals_its_definition():
    rng = stream(1, "x", device=CPU)
    first, second = torch.randn(2, 5, 7, generator=rng).double()
    views = torch.cat([first, second])
    cosine = torch.nn.functional.cosine_similarity(views[:, None], views[None], dim=-1) / 0.3
    terms = [
        -cosine[i, (i + 5) % 10] + torch.logsumexp(torch.cat([cosine[i, :i], cosine[i, i + 1 :]]), 0) for i in range(10)
    ]

    assert float(nt_xent(first, second, 0.3)) == pytest.approx(float(torch.stack(terms).mean()), rel=1e-5)


def test_contrast_is_float32_and_finite_in_half_precision_down_to_one_item():
    for num_items in (1, 2, 3):
        first = (1000 * torch.randn(num_items, 8)).half().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nt_xent(first, first.detach().flip(0), 0.01)
        loss.backward()

        assert loss.dtype == torch.float32
        assert torch.isfinite(loss)
        assert torch.isfinite(first.grad).all()
    assert float(nt_xent(torch.ones(1, 4), torch.ones(1, 4), 0.1)) == 0


def test_reconstruction_counts_hidden_frames_only_and_every_sequence_alike():
    target = torch.zeros(3, 4, 2)
    predicted = torch.full((3, 4, 2), 100.0)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[0, 1], hidden[1, :2] = True, True
    predicted[0, 1], predicted[1, 0], predicted[1, 1] = 1.0, 2.0, 4.0

    assert float(reconstruction(predicted, target, hidden)) == pytest.approx((1 + (4 + 16) / 2 + 0) / 3)


def test_the_whole_is_the_weighted_sum_of_its_parts():
    module = learner(contrast=2.0, reconstruction=0.5).eval()
    mean, std = torch.linspace(-3, 5, 6), torch.linspace(0.5, 4, 6)
    module.encoder.set_statistics(mean, std)
    views = two_views(batch(40), stream(0, "v", device=CPU), Augmentation(crop=0.8))

    with torch.no_grad():
        losses = module(views)
        predicted = module.foretell(module.encoder(views["view"][:, 0], views["view_length"][:, 0]).states)

    error = reconstruction(predicted, (views["target"] - mean) / std, views["hidden"])  # as the encoder sees frames
    torch.testing.assert_close(losses["reconstruction"], error)
    assert float(losses["loss"]) == pytest.approx(2 * float(losses["contrast"]) + 0.5 * float(losses["reconstruction"]))
    assert torch.equal(self_supervised_loss(module, views), losses["loss"])


def test_rare_classes_weigh_more_and_a_share_of_the_target_may_be_spread():
    labels = torch.tensor([0, 1, 1, 1, 1])
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    first, second = math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1))

    weight = class_weights(labels, 3, 0.5)

    assert weight[:2].tolist() == pytest.approx([5 / 3, 5 / 6])  # 1 and 1 / √4, of mean 1 over the items
    assert float(cross_entropy(logits, labels[:2])) == pytest.approx((first + second) / 2)
    assert float(cross_entropy(logits, labels[:2], 0.0, weight)) == pytest.approx((5 / 3 * first + 5 / 6 * second) / 2)
    spread = 0.9 * first + 0.1 * (first + 2 + first) / 2  # half of the share goes to each class
    assert float(cross_entropy(logits[:1], labels[:1], 0.1)) == pytest.approx(spread)
    assert class_weights(labels, 2, 0.0) is None


def test_numbers_are_judged_by_their_squared_error():
    module = Classifier(learner().encoder, 1, is_regression=True).eval()
    frames, length = batch()["frames"], batch()["length"]
    numbers = module(frames, length)[:, 0].detach()
    wrong = {"frames": frames, "length": length, "label": numbers + torch.arange(8.0)}

    assert float(regression_loss(module, wrong).detach()) == pytest.approx(140 / 8)
    module.rescale(100.0, 15.0)
    torch.testing.assert_close(module(frames, length)[:, 0], 100 + 15 * numbers)

"""Rocket features against their definitions, alone and in batches; the head against plain ridge regressions."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from brim.errors import ConfigError
from brim.sequences import SequenceConfig
from brim.sequences.model import Classifier, Encoder
from brim.sequences.rocket import MiniRocket, Rocket, RocketBlend, RocketFeatures, fit_rocket
from brim.sequences.rocket.fit import calibrate, mixture, principal_axes
from brim.sequences.rocket.hydra import KERNELS, Hydra
from brim.sequences.rocket.kernels import _count_bytes, longest_of, spread_dilations
from brim.sequences.rocket.ridge import PENALTIES, Ridge, _least_error, block, fit_dual, fit_streamed
from brim.sequences.rocket.summary import summary

torch.set_num_threads(1)


def ragged(lengths, dim, seed=0):
    rng = np.random.default_rng(seed)
    return [np.cumsum(rng.standard_normal((length, dim)), 0).astype(np.float32) for length in lengths]


# Kernels


def plain_minirocket(kernels, x):
    """The method's definition: weights of 2 at three of nine taps and of -1 elsewhere, and shares above thresholds."""
    shares, at = [], 0
    for number, (dilation, count) in enumerate(zip(kernels.dilations, kernels.per_kernel, strict=True)):
        for kernel, taps in enumerate(combinations(range(9), 3)):
            channels = kernels.channels[number * 84 + kernel]
            padded = np.pad(x[:, channels[channels >= 0]].sum(1).astype(np.float64), 4 * dilation)
            weights = np.where(np.isin(np.arange(9), taps), 2, -1)
            response = sum(w * padded[tap * dilation :][: len(x)] for tap, w in enumerate(weights))
            if (number + kernel) % 2 and len(x) > 8 * dilation:  # every other kernel does not see the padding
                response = response[4 * dilation : -4 * dilation]
            shares += [(response > threshold).mean() for threshold in kernels.thresholds[at : at + count]]
            at += count
    return np.float32(shares)


@pytest.mark.parametrize("dim", [1, 12])
def test_features_are_what_their_definition_says(dim):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(-9, 9, (length, dim)).astype(np.float32) for length in (61, 61, 33, 9, 8, 1)]

    kernels = MiniRocket.fit(sequences, num_features=700)

    assert kernels.num_features == 672
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in kernels.channels)
    assert {len(set(row[row >= 0])) for row in kernels.channels} == ({1} if dim == 1 else set(range(1, 10)))
    for found, sequence in zip(kernels.features(sequences), sequences, strict=True):
        np.testing.assert_array_equal(found, plain_minirocket(kernels, sequence))


def test_dilations_are_spread_by_their_logarithm_and_one_long_sequence_does_not_stretch_them():
    assert [list(part) for part in spread_dilations(129, 84 * 5)] == [[1, 2, 4, 8, 16], [1] * 5]
    assert [list(part) for part in spread_dilations(129, 84 * 10)] == [[1, 2, 3, 4, 6, 8, 11, 16], [3] + [1] * 7]
    assert [list(part) for part in spread_dilations(5, 84 * 7)] == [[1], [7]]
    assert longest_of(np.array([30, 40, 50, 10_000])) == 180
    assert longest_of(np.array([30, 40, 50])) == 50


def test_thresholds_are_quantiles_of_a_training_sequence_at_multiples_of_the_golden_ratio():
    (x,) = ragged([50], 1)

    kernels = MiniRocket.fit([x], num_features=3 * 84)

    padded = np.pad(x[:, 0], 4)
    taps = [padded[tap : tap + 50] for tap in range(9)]
    first = 3 * (taps[0] + taps[1] + taps[2]) - sum(taps)  # the first kernel, at dilation 1
    golden = np.arange(1, int(kernels.per_kernel[0]) + 1) * 1.618033988749895 % 1
    np.testing.assert_allclose(kernels.thresholds[: len(golden)], np.quantile(first, golden), atol=1e-4)


# Batches


@pytest.fixture(scope="module")
def features():
    lengths = [1, 2, 7, 8, 9, 25, 26, 150, 151]
    sequences = ragged(lengths, 3, seed=1)
    return RocketFeatures.fit(sequences, torch.zeros(3), torch.ones(3), 500, 0), sequences


def test_a_sequence_has_the_same_features_alone_and_in_any_batch(features):
    rocket, sequences = features
    together = rocket.of(sequences, torch.device("cpu"))

    for order in (range(0, 9, 2), range(8, -1, -1), [5]):
        part = rocket.of([sequences[row] for row in order], torch.device("cpu"))
        assert torch.equal(part, together[list(order)])
    assert bool(together.isfinite().all())


def test_values_behind_the_end_have_no_influence(features):
    rocket, sequences = features
    one = torch.from_numpy(sequences[5])
    padded = torch.full((2, 40, 3), 1e3)
    padded[:, : len(one)] = one

    assert torch.equal(rocket.of_batch(padded, torch.tensor([len(one)] * 2)), rocket.of([one.numpy()] * 2, one.device))


def test_whole_batches_on_a_device_give_the_same_bits_as_threads_on_the_host(features):
    rocket, sequences = features
    length = torch.tensor([len(one) for one in sequences])
    frames = torch.randn(len(sequences), 160, 3)
    for row, one in enumerate(sequences):
        frames[row, : len(one)] = torch.from_numpy(one)
    kernels = rocket.kernels["frames"]

    assert torch.equal(kernels._on_device(frames, length), torch.from_numpy(kernels.features(sequences)))


def test_of_a_long_sequence_some_frames_are_compared(monkeypatch):
    sequences = ragged([100, 101, 150, 230, 640], 3)
    kernels = MiniRocket.fit(sequences, num_features=500)
    whole = kernels.features(sequences)
    monkeypatch.setattr("brim.sequences.rocket.kernels._MOST", 100)
    length = torch.tensor([len(one) for one in sequences])
    frames = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(one) for one in sequences], batch_first=True)

    some = kernels.features(sequences)

    np.testing.assert_array_equal(kernels._on_device(frames, length).numpy(), some)
    np.testing.assert_array_equal(kernels.features(sequences[3:4]), some[3:4])
    np.testing.assert_array_equal(some[0], whole[0])  # short enough
    assert not np.array_equal(some[1:], whole[1:])
    assert np.abs(some - whole).mean() < 0.02
    assert some.min() >= 0
    assert some.max() <= 1


def test_many_frames_above_a_threshold_are_counted_without_overflow():
    bits = np.random.default_rng(0).random((3, 8 * 2000)) < [[0.5], [0.99], [1.0]]

    assert _count_bytes(bits).tolist() == bits.sum(1).tolist()


# Heads


def plain_ridge(z, y, penalty):
    """Weights and bias of a ridge regression whose intercept takes no penalty."""
    mean = z.mean(0)
    weight = torch.linalg.solve(
        (z - mean).T @ (z - mean) + penalty * torch.eye(z.shape[1]), (z - mean).T @ (y - y.mean(0))
    )
    return weight, y.mean(0) - mean @ weight


def standard(x):
    return ((x - x.mean(0)) / x.std(0, correction=0)).double()


@pytest.mark.parametrize("grouped", [False, True])
def test_left_out_predictions_are_those_of_models_fitted_without_and_choose_the_penalty(grouped):
    torch.manual_seed(0)
    x = standard(torch.randn(30, 7, dtype=torch.float64))  # so that the fit standardises nothing
    y = x[:, :2] + torch.randn(30, 2) + 3
    groups = torch.arange(30) // 5 if grouped else torch.arange(30)

    ridge = fit_dual([block(x)], y, groups if grouped else None)

    predicted = {}
    for penalty in PENALTIES:
        predicted[penalty] = torch.empty(30, 2, dtype=torch.float64)
        for group in groups.unique():
            weight, bias = plain_ridge(x[groups != group], y[groups != group].double(), penalty * 7)
            predicted[penalty][groups == group] = x[groups == group] @ weight + bias
    assert ridge.penalty == min(PENALTIES, key=lambda one: float((predicted[one] - y).square().mean()))
    assert PENALTIES[0] < ridge.penalty < PENALTIES[-1]
    torch.testing.assert_close(ridge.left_out, predicted[ridge.penalty], rtol=1e-6, atol=1e-8)


def test_blocks_of_features_weigh_the_same_however_many_they_have(monkeypatch):
    monkeypatch.setattr("brim.sequences.rocket.ridge.PENALTIES", (0.1,))
    torch.manual_seed(0)
    parts = [torch.randn(20, width) * 4 + 1 for width in (9, 3)]
    y = torch.randn(20, 2).double()

    ridge = fit_dual([block(part) for part in parts], y)

    z = torch.cat([standard(part) / (part.shape[1] * 2) ** 0.5 for part in parts], 1)
    weight, bias = plain_ridge(z, y, 0.1)
    torch.testing.assert_close(ridge(torch.cat(parts, 1)).double(), z @ weight + bias, rtol=1e-4, atol=1e-4)


def test_what_passes_by_once_is_fitted_as_in_memory(monkeypatch):
    monkeypatch.setattr("brim.sequences.rocket.ridge.PENALTIES", (0.1,))
    torch.manual_seed(0)
    x, aside = torch.randn(64, 9) * 3 + 1, torch.arange(64) % 8 == 1
    y = x[:, :2] - 2 * x[:, 3:5] + 1

    chunks = ((x[at : at + 10], y[at : at + 10], aside[at : at + 10]) for at in range(0, 64, 10))
    streamed, whole = fit_streamed(chunks, 9, 2, torch.device("cpu")), fit_dual([block(x)], y)

    torch.testing.assert_close(streamed.weight, whole.weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(streamed.bias, whole.bias, rtol=1e-3, atol=1e-3)
    rest = x[~aside]
    weight, bias = plain_ridge(standard(rest), y[~aside].double(), 0.1 * 9)
    expected = ((x[aside] - rest.mean(0)) / rest.std(0, correction=0)).double() @ weight + bias
    torch.testing.assert_close(streamed.left_out, expected, rtol=1e-3, atol=1e-3)
    assert streamed.rows.tolist() == list(range(1, 64, 8))


@pytest.mark.parametrize("least", [0.0, 0.05])
@pytest.mark.parametrize("best", [1e-4, 1e-2, 10.0])
def test_the_best_penalty_is_found_with_few_fits(best, least):
    fitted = []

    def solve(penalty):
        fitted.append(penalty)
        nothing = torch.empty(0)
        return None if penalty < least else Ridge(nothing, nothing, penalty, nothing, nothing)

    ridge = _least_error(solve, lambda one: abs(np.log(one.penalty / best)))

    assert ridge.penalty == (best if best >= least else min(one for one in PENALTIES if one >= least))
    assert len(fitted) <= 8


# Hydra


def slow_hydra(hydra, frames, stride=1):
    """The definition, frame by frame, in whole numbers."""
    x = torch.from_numpy(frames)
    found = []
    for view, values in enumerate((x, (x[1:] - x[:-1]) * hydra.scale)):
        for number, dilation in enumerate(hydra.dilations.tolist()):
            size = (*hydra.weights.shape[2:4],)
            gain, count = np.zeros(size), np.zeros(size)
            frames_seen = range(0, len(values), stride)
            for group, channels in enumerate(hydra.channels[view, number].tolist()):
                mixed = values[:, channels[0]]
                for other in channels[1:]:
                    mixed = mixed + values[:, other]
                grid = ((mixed / float(len(channels)) ** 0.5).clamp(-8, 8) * 4096).round().numpy().astype(np.int64)
                padded = np.pad(grid, 4 * dilation)
                for frame in frames_seen:
                    taps = padded[frame : frame + 8 * dilation + 1 : dilation]
                    answers = hydra.weights[view, number, group].numpy().astype(np.int64) @ taps
                    gain[group] += np.where(answers == answers.max(), answers, 0) / (4096 * 256)
                    count[group] += answers == answers.min()
            for side in (gain, count):
                found.append(np.sqrt(np.maximum(side, 0) / max(1, len(frames_seen))).flatten())
    return np.concatenate(found).astype(np.float32)


@pytest.mark.parametrize("dim", [1, 5])
def test_hydra_is_what_its_definition_says(dim):
    sequences = ragged([60, 33, 60, 1], dim)
    hydra = Hydra.fit(sequences, num_features=800)
    frames = torch.full((4, 64, dim), torch.nan)
    for row, one in enumerate(sequences):
        frames[row, : len(one)] = torch.from_numpy(one)

    found = hydra.features_on(frames, torch.tensor([60, 33, 60, 1]))

    assert found.shape == (4, hydra.num_features)
    assert hydra.num_features == 2 * 2 * len(hydra.dilations) * hydra.weights.shape[2] * KERNELS
    for row, one in enumerate(sequences):
        np.testing.assert_array_equal(found[row].numpy(), slow_hydra(hydra, one))


def test_of_a_long_sequence_hydra_sees_some_frames(monkeypatch):
    sequences = ragged([250], 2)
    monkeypatch.setattr("brim.sequences.rocket.hydra._MOST", 100)
    hydra = Hydra.fit(sequences, num_features=400)

    found = hydra.features_on(torch.from_numpy(sequences[0])[None], torch.tensor([250]))

    np.testing.assert_array_equal(found[0].numpy(), slow_hydra(hydra, sequences[0], stride=3))


# Fitting


def waves(count, classes=3, dim=2, seed=0):
    """Ragged sequences whose frequency tells the class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    lengths = rng.integers(30, 60, count)
    phases = rng.uniform(0, 6, (count, dim))
    return [
        (np.sin(0.3 * (label + 1) * np.arange(length)[:, None] + phase)
         + 0.1 * rng.standard_normal((length, dim))).astype(np.float32)
        for label, length, phase in zip(labels, lengths, phases, strict=True)
    ], torch.from_numpy(labels)  # fmt: skip


def test_copies_within_a_group_tell_nothing_when_groups_are_left_out():
    """Each group repeats one wave, whose label is drawn: what is learned from the others is chance."""
    rng = np.random.default_rng(3)
    one_each, _ = waves(24, classes=24)
    sequences = [one + 0.01 * rng.standard_normal(one.shape).astype(np.float32) for one in one_each for _ in range(3)]
    groups, labels = torch.arange(72) // 3, torch.from_numpy(rng.permutation(24) % 2).repeat_interleave(3)

    alone = fit_rocket(sequences, labels, num_features=168)
    apart = fit_rocket(sequences, labels, groups=groups, num_features=168)

    assert min(head.score for head in alone.heads) > 0.95
    assert max(head.score for head in apart.heads) < 0.8
    assert alone.rows.tolist() == list(range(72))


def test_of_a_large_corpus_whole_groups_choose_the_penalty(monkeypatch):
    monkeypatch.setattr("brim.sequences.rocket.fit.MAX_DUAL", 30)
    sequences, labels = waves(90)
    groups = torch.arange(90) % 20

    fit = fit_rocket(sequences, labels, groups=groups, num_features=84, heads=["statistics"])

    chosen = set(groups[fit.rows].tolist())
    assert len(chosen) == 3  # 15 % of 20
    assert fit.rows.tolist() == [row for row in range(90) if row % 20 in chosen]


def test_heads_are_weighed_by_what_each_alone_explains():
    of_truth = torch.tensor([[0.9] * 6 + [0.0] * 2, [0.0] * 6 + [0.9] * 2])

    assert mixture(of_truth, torch.tensor([1.0, 3.0])).tolist() == pytest.approx([7 / 12, 5 / 12])


def test_scores_are_sharpened_to_the_least_cross_entropy():
    torch.manual_seed(0)
    truth = torch.randint(3, (200,))
    scores = 0.1 * torch.randn(200, 3).double()
    scores[torch.arange(200), truth] += 0.1

    factor, probability = calibrate(scores, truth)

    def entropy(one):
        return -float((scores * one).log_softmax(-1)[torch.arange(200), truth].mean())

    assert factor == pytest.approx(minimize_scalar(entropy, (1, 10)).x, rel=0.15)
    assert 1 < factor < 100
    torch.testing.assert_close(probability, (scores * factor).softmax(-1))


def test_embeddings_are_coordinates_along_the_principal_axes():
    torch.manual_seed(0)
    sample = torch.randn(80, 100) * 5 + 2

    axes = principal_axes(sample)

    left, size, _ = torch.linalg.svd(standard(sample) / 100**0.5, full_matrices=False)
    found = (sample - axes["middle"]) @ axes["plane"]
    torch.testing.assert_close(found.abs().double(), (left * size).abs()[:, :64], rtol=1e-3, atol=1e-4)


def test_heads_and_networks_are_averaged_by_their_shares():
    features = RocketFeatures(torch.zeros(1), torch.ones(1), {})
    width = features.widths["statistics"]
    heads = {
        "weight": torch.randn(2, width, 3), "bias": torch.randn(2, 3), "share": torch.tensor([0.8, 0.2]),
        "middle": torch.zeros(width), "plane": torch.zeros(width, 2),
    }  # fmt: skip
    rocket, x = Rocket(features, heads), torch.randn(4, width)
    encoder = Encoder(SequenceConfig(dim=1, channels=4, hidden=2, attention=2, embedding=2))
    network = Classifier(encoder, 3).eval()

    one, two = ((x @ heads["weight"][head] + heads["bias"][head]).softmax(-1) for head in (0, 1))
    torch.testing.assert_close(rocket.head(x).exp(), 0.8 * one + 0.2 * two)
    frames, length = torch.randn(2, 9, 1), torch.tensor([9, 4])
    both = 0.75 * rocket(frames, length).exp() + 0.25 * network(frames, length).softmax(-1)
    torch.testing.assert_close(RocketBlend(rocket, network, 0.25)(frames, length).exp(), both)


def test_statistics_are_those_of_numpy():
    (x,) = ragged([23], 2)
    padded = torch.full((1, 30, 2), 1e3)
    padded[0, :23] = torch.from_numpy(x)

    (found,) = summary(padded, torch.tensor([23])).numpy()

    steps = np.diff(x, axis=0)
    quantiles = np.quantile(x, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1], axis=0)
    parts = [x.mean(0), x.std(0), steps.std(0), np.abs(steps).mean(0), x[0], x[-1], *quantiles, [np.log(23)]]
    np.testing.assert_allclose(found, np.concatenate(parts), atol=2e-4)


def test_classes_are_learned_and_left_out_scores_tell_the_truth():
    sequences, labels = waves(36)
    fit = fit_rocket(sequences, labels, num_features=500)

    others, truth = waves(60, seed=1)
    probability = fit.predict_proba(others)

    assert float((probability.argmax(1) == truth).double().mean()) >= 0.95
    torch.testing.assert_close(probability.sum(1), torch.ones(60))
    assert max(head.score for head in fit.heads) >= 0.95
    assert sum(head.weight for head in fit.heads) == pytest.approx(1)


def test_numbers_are_predicted():
    sequences, labels = waves(45)
    fit = fit_rocket(sequences, labels * 2.5 - 1, task="regression", num_features=500)

    others, truth = waves(30, seed=1)
    error = fit.predict(others)[:, 0] - (truth * 2.5 - 1)

    assert float(error.square().mean()) < 0.1 * float((truth * 2.5).var())
    assert 0.9 < max(head.score for head in fit.heads) <= 1  # R² of the sequences left out


def test_more_sequences_than_memory_allows_are_fitted_in_one_pass(monkeypatch):
    monkeypatch.setattr("brim.sequences.rocket.fit.MAX_DUAL", 30)
    sequences, labels = waves(90)

    fit = fit_rocket(sequences, labels, num_features=168)
    chosen = fit_rocket(sequences, labels, num_features=168, aside=torch.arange(90) % 9 == 4)

    others, truth = waves(60, seed=1)
    assert float((fit.predict(others) == truth).double().mean()) >= 0.9
    assert len(fit.rows) < 30
    assert chosen.rows.tolist() == list(range(4, 90, 9))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s, y: (s, y * 0), "at least two classes"),
        (lambda s, y: ([*s[:-1], s[-1] * np.nan], y), "NaN or Inf"),
        (lambda s, y: ([*s[:-1], s[-1][:, :1]], y), "expected (T, 2)"),
    ],
)
def test_what_cannot_be_fitted_is_said(change, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        fit_rocket(*change(*waves(6)), num_features=84)


def test_odd_sequences_are_fitted():
    sequences, labels = waves(9)
    sequences[0] = sequences[0][:1]  # one frame
    sequences = [np.concatenate([one, np.full_like(one[:, :1], 7)], 1) for one in sequences]  # a constant channel
    sequences[1] = np.resize(sequences[1], (100_000, 3))  # much longer than the others

    fit = fit_rocket(sequences, labels, num_features=84)
    single = fit_rocket(sequences[:3], labels[:3], num_features=84)  # one sequence per class

    assert bool(fit.predict_proba(sequences).isfinite().all())
    assert bool(single.predict_proba(sequences).isfinite().all())

"""Rocket features against aeon's source, alone and in batches; the head against ridge regressions fitted one by one."""

import importlib.util
import pkgutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.errors import ConfigError
from brim.sequences.rocket import MiniRocket, Rocket, RocketFeatures, fit_rocket
from brim.sequences.rocket.hydra import KERNELS, Hydra
from brim.sequences.rocket.ridge import PENALTIES, Ridge, _least_error, block, fit_dual, fit_streamed

torch.set_num_threads(1)


def ragged(lengths, dim, seed=0):
    rng = np.random.default_rng(seed)
    return [np.cumsum(rng.standard_normal((length, dim)), 0).astype(np.float32) for length in lengths]


@pytest.fixture(scope="module")
def aeon():
    """aeon's own MiniRocket, run by the interpreter: its compiler, numba, may not be installed."""
    spec = importlib.util.find_spec("aeon")
    if spec is None or spec.origin is None:
        pytest.skip("needs the source of aeon: pip install --no-deps aeon==1.6.0")

    def undecorated(*args, **_):
        return args[0] if args and callable(args[0]) else lambda function: function

    names = {
        "numba": {
            "njit": undecorated, "vectorize": lambda *_, **__: np.vectorize, "prange": range,
            "get_num_threads": int, "set_num_threads": int,
        },
        "sklearn": {}, "sklearn.utils": {"check_random_state": np.random.RandomState},
        "aeon": {}, "aeon.utils": {}, "aeon.utils.validation": {"check_n_jobs": int},
        "aeon.transformations": {}, "aeon.transformations.collection": {"BaseCollectionTransformer": object},
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in names}
    file = Path(spec.origin).parent / "transformations/collection/convolution_based/_minirocket.py"
    try:
        for name, values in names.items():
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(values)
        loaded = importlib.util.spec_from_file_location("aeon_minirocket", file)
        module = importlib.util.module_from_spec(loaded)
        loaded.loader.exec_module(module)
    finally:
        for name, value in before.items():
            sys.modules.pop(name) if value is None else sys.modules.update({name: value})
    module._PPV = lambda values, threshold: values > threshold
    return module


@pytest.mark.parametrize(
    ("length", "dim", "num_features"), [(150, 1, 2_000), (9, 1, 500), (61, 12, 1_000), (40, 3, 84)]
)
def test_features_equal_those_of_aeon(aeon, length, dim, num_features):
    sequences = ragged([length] * 4, dim)
    stacked = np.stack([one.T for one in sequences])
    parameters = aeon._static_fit(stacked, num_features, 32, 7)
    transform = aeon._static_transform_uni if dim == 1 else aeon._static_transform_multi
    expected = transform(stacked[:, 0] if dim == 1 else stacked, parameters, aeon.MiniRocket._indices)

    rocket = MiniRocket.fit(sequences, num_features=num_features, seed=7)

    np.testing.assert_array_equal(rocket.dilations, parameters[2])
    np.testing.assert_array_equal(rocket.per_kernel, parameters[3])
    np.testing.assert_allclose(rocket.thresholds, parameters[4], rtol=0, atol=1e-5)
    np.testing.assert_allclose(rocket.features(sequences), expected, rtol=0, atol=1e-5)


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


def test_the_way_of_a_gpu_gives_the_same_bits(features):
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


# Heads


def refit(x, y, without):
    """Predictions of the items left out, by a ridge regression with the same penalty on the others."""
    kept = np.setdiff1d(np.arange(len(x)), without)
    z = torch.cat([x, torch.ones(len(x), 1)], 1)
    damping = torch.eye(z.shape[1]) * REFIT_PENALTY * x.shape[1]
    damping[-1, -1] = 0
    return z[without] @ torch.linalg.solve(z[kept].T @ z[kept] + damping, z[kept].T @ y[kept])


REFIT_PENALTY = 0.1


@pytest.mark.parametrize("grouped", [False, True])
def test_left_out_predictions_are_those_of_models_fitted_without(monkeypatch, grouped):
    monkeypatch.setattr("brim.sequences.rocket.ridge.PENALTIES", (REFIT_PENALTY,))
    torch.manual_seed(0)
    x = torch.randn(30, 7, dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0, correction=0)  # so that the fit standardises nothing
    y = x[:, :2] + torch.randn(30, 2) + 3
    groups = torch.arange(30) // 5 if grouped else torch.arange(30)

    ridge = fit_dual([block(x)], y, groups if grouped else None)

    for group in range(int(groups.max()) + 1):
        rows = (groups == group).nonzero().flatten().numpy()
        torch.testing.assert_close(ridge.left_out[rows], refit(x, y, rows), rtol=1e-6, atol=1e-8)


def test_streaming_fits_what_memory_would(monkeypatch):
    monkeypatch.setattr("brim.sequences.rocket.ridge.PENALTIES", (REFIT_PENALTY,))
    torch.manual_seed(0)
    x = torch.randn(64, 9) * 3 + 1
    y = x[:, :2] - 2 * x[:, 3:5] + 1

    aside = torch.arange(64) % 8 == 0
    chunks = ((x[at : at + 10], y[at : at + 10], aside[at : at + 10]) for at in range(0, 64, 10))
    streamed, whole = fit_streamed(chunks, 9, 2, torch.device("cpu")), fit_dual([block(x)], y)

    torch.testing.assert_close(streamed.weight, whole.weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(streamed.bias, whole.bias, rtol=1e-3, atol=1e-3)
    assert streamed.left_out.shape == (8, 2)


@pytest.mark.parametrize("best", [one for one in PENALTIES if one >= 1e-4])
@pytest.mark.parametrize("least", [0.0, 0.05])
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


def test_small_operations_wait_for_no_other_core(monkeypatch):
    """On a busy machine Hydra's took 40 times as long, spinning, where torch divided each among the cores."""
    seen = []
    features = RocketFeatures.fit(ragged([40] * 9, 2), torch.zeros(2), torch.ones(2), 400)
    for place in ("hydra.Hydra._of_block", "model.summary"):
        name = f"brim.sequences.rocket.{place}"
        own = pkgutil.resolve_name(name)
        monkeypatch.setattr(name, lambda *given, own=own: seen.append(torch.get_num_threads()) or own(*given))
    torch.set_num_threads(2)
    try:
        features.of(ragged([40] * 9, 2), torch.device("cpu"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)

    assert set(seen) == {1}


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


def test_a_model_is_read_back_to_the_bit():
    sequences, labels = waves(12)
    module = fit_rocket(sequences, labels, num_features=200).module

    again = Rocket.from_tensors({name: tensor.clone() for name, tensor in module.tensors().items()})

    assert torch.equal(again.predict_proba(sequences), module.predict_proba(sequences))


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
        (lambda s, y: (s[:1], y[:1]), "expected at least 2"),
        (lambda s, y: ([*s[:-1], s[-1] * np.nan], y), "NaN or Inf"),
        (lambda s, y: ([*s[:-1], s[-1][:, :1]], y), "expected (T, 2)"),
        (lambda s, y: ([*s[:-1], s[-1][:0]], y), "T at least 1"),
        (lambda s, y: (s, y[:-1]), "labels for"),
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

"""Rocket on a GPU: the features of the CPU to the bit, alone and in any batch; heads fitted and applied there."""

import numpy as np
import pytest
import torch

from brim.sequences.rocket import MiniRocket, RocketFeatures, fit_rocket
from brim.sequences.rocket.hydra import Hydra

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

CUDA = torch.device("cuda:0")
LENGTHS = [1, 2, 9, 40, 41, 200, 300]


def ragged(lengths: list[int], dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [np.cumsum(rng.standard_normal((length, dim)), 0).astype(np.float32) for length in lengths]


@pytest.mark.parametrize("dim", [1, 12])
def test_kernels_count_as_on_the_cpu(dim):
    sequences = ragged(LENGTHS, dim)
    rocket = MiniRocket.fit(sequences, num_features=2_000)
    frames = torch.full((len(sequences), 320, dim), 1e3, device=CUDA)
    for row, one in enumerate(sequences):
        frames[row, : len(one)] = torch.from_numpy(one)

    found = rocket.features_on(frames, torch.tensor(LENGTHS, device=CUDA))

    np.testing.assert_array_equal(found.cpu().numpy(), rocket.features(sequences))


@pytest.mark.parametrize("dim", [1, 12])
def test_hydra_has_the_bits_of_the_cpu(dim):
    sequences = ragged(LENGTHS, dim)
    hydra = Hydra.fit(sequences)
    frames = torch.full((len(sequences), 320, dim), 1e3)
    for row, one in enumerate(sequences):
        frames[row, : len(one)] = torch.from_numpy(one)
    length = torch.tensor(LENGTHS)

    found = hydra.features_on(frames.to(CUDA), length.to(CUDA))

    assert torch.equal(found.cpu(), hydra.features_on(frames, length))


def test_a_sequence_has_the_same_features_alone_and_in_any_batch():
    sequences = ragged(LENGTHS, 3)
    features = RocketFeatures.fit(sequences, torch.zeros(3), torch.ones(3), 1_000)
    together = features.of(sequences, CUDA)

    for order in ([5], [6, 0, 3], list(range(6, -1, -1))):
        assert torch.equal(features.of([sequences[row] for row in order], CUDA), together[order])
    torch.testing.assert_close(together.cpu(), features.of(sequences, torch.device("cpu")), rtol=1e-5, atol=1e-5)


def test_heads_are_fitted_as_on_the_cpu():
    rng = np.random.default_rng(0)
    labels = torch.arange(60) % 3
    sequences = [
        np.sin((0.3 + 0.3 * label) * np.arange(rng.integers(40, 80))[:, None] + rng.uniform(0, 6, 2)).astype(np.float32)
        for label in labels.tolist()
    ]

    here, there = (
        fit_rocket(sequences, labels, num_features=1_000, device=device) for device in (CUDA, torch.device("cpu"))
    )

    found = here.module.to(CUDA).predict_proba(sequences)
    torch.testing.assert_close(found.cpu(), there.predict_proba(sequences), rtol=1e-2, atol=1e-3)
    assert float((found.cpu().argmax(1) == labels).double().mean()) > 0.95

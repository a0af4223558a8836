import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from brim.engine.device import stream
from brim.errors import ConfigError
from brim.sequences.evaluation.scores import (
    best_matching,
    cluster_scores,
    contingency,
)


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ((0, 0, 1, 1), (1, 1, 0, 0), 1.0),
        ((0, 0, 1, 2), (0, 0, 1, 1), 4 / 7),  # pairs: 1 kept by both, 1 and 2 by each, 6 in all
        ((0, 0, 1, 1), (0, 1, 0, 1), -0.5),
        ((5, 5, 5), (2, 2, 2), 1.0),
        ((0,), (4,), 1.0),
        ((0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2), (2 - 6 * 3 / 15) / (4.5 - 6 * 3 / 15)),
    ],
)
def test_adjusted_rand_index_of_known_partitions(predicted, truth, expected):
    assert cluster_scores(labels(*predicted), labels(*truth))["ari"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ((0, 0, 1, 1), (1, 1, 0, 0), 1.0),
        ((0, 0, 1, 2), (0, 0, 1, 1), 0.8),  # 1 bit in common, 1.5 and 1 bits of entropy
        ((0, 0, 0, 0), (0, 1, 2, 3), 0.0),
        ((5, 5, 5), (2, 2, 2), 1.0),
        # entropies ln 2 and ln 3; jointly 2 cells of 1/3 and 2 of 1/6
        (
            (0, 0, 0, 1, 1, 1),
            (0, 0, 1, 1, 2, 2),
            2 * (math.log(6) - (2 / 3 * math.log(3) + 1 / 3 * math.log(6))) / math.log(6),
        ),
    ],
)
def test_normalised_mutual_information_of_known_partitions(predicted, truth, expected):
    assert cluster_scores(labels(*predicted), labels(*truth))["nmi"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ((7, 7, 3, 3), (0, 0, 1, 1), 1.0),
        ((0, 0, 1, 2), (0, 0, 1, 1), 3 / 4),  # more clusters than classes: one stays without
        ((0, 0, 0, 0), (0, 0, 1, 2), 2 / 4),  # fewer
        ((0, 0, 0, 1, 1, 0, 0), (0, 0, 0, 0, 0, 1, 1), 4 / 7),  # the greedy match, 0 to 0, would give 3
    ],
)
def test_accuracy_under_the_best_matching(predicted, truth, expected):
    assert cluster_scores(labels(*predicted), labels(*truth))["matched_accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(1, 1), (9, 14), (14, 9), (40, 40)])
def test_matchings_are_as_good_as_scipys(shape):
    for seed in range(5):
        gain = torch.randint(0, 30, shape, generator=stream(seed, "gain", device=torch.device("cpu")))

        columns = best_matching(gain)

        used = columns >= 0
        rows, theirs = linear_sum_assignment(gain.numpy(), maximize=True)
        assert int(used.sum()) == min(shape)
        assert len(set(columns[used].tolist())) == min(shape)
        assert int(gain[used, columns[used]].sum()) == int(gain.numpy()[rows, theirs].sum())


def test_chance_scores_nothing():
    rng = stream(0, "chance", device=torch.device("cpu"))
    found = cluster_scores(torch.randint(0, 5, (20_000,), generator=rng), torch.randint(0, 5, (20_000,), generator=rng))

    assert abs(found["ari"]) < 0.002
    assert found["nmi"] < 0.002
    assert abs(found["matched_accuracy"] - 0.2) < 0.02
    assert list(found) == ["ari", "nmi", "matched_accuracy"]


def test_numbers_that_do_not_occur_have_no_place_in_the_table():
    assert contingency(labels(9, 9, 4), labels(0, 7, 7)).tolist() == [[0, 1], [1, 1]]


def test_scores_without_truth_are_refused():
    with pytest.raises(ConfigError, match="a true label is -1"):
        cluster_scores(labels(0, 1), labels(0, -1))

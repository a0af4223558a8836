"""Scores against true labels: accuracy for classes and for a linear probe, and scores for clusters.

Axes: N items, P predicted clusters, C true classes, E embedding. Cluster numbers carry no meaning, so their scores are
computed from the contingency table of clusters and classes, in float64:

    adjusted Rand index  share of pairs on which both agree, 0 for chance and 1 for the same partition
    NMI                  mutual information over the mean of both entropies, from 0 to 1
    matched accuracy     accuracy when each cluster stands for at most one class, under the best matching
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from brim.errors import ConfigError

_PROBE_DECAY = 1e-3  # of squared weights, on embeddings of unit variance
_PROBE_STEPS = 200


def cluster_scores(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """All scores; predicted and truth are (N,) integers of any numbering, truth not negative."""
    table = contingency(predicted, truth)
    return {"ari": _ari(table), "nmi": _nmi(table), "matched_accuracy": _matched(table)}


def accuracy(predicted: Tensor, truth: Tensor) -> float:
    _check(predicted, truth)
    return float((predicted == truth).double().mean())


def contingency(predicted: Tensor, truth: Tensor) -> Tensor:
    """(P, C) int64 on the CPU: items of each class in each cluster; unused numbers have no row or column."""
    _check(predicted, truth)
    rows, columns = (torch.unique(labels.cpu(), return_inverse=True)[1] for labels in (predicted, truth))
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    return torch.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1]).view(shape)


def best_matching(gain: Tensor) -> Tensor:
    """Column of each row of a (P, C) table that maximises the sum, no column twice, (P,) int64; -1: unmatched.

    The Hungarian method with shortest augmenting paths, O(P² C).
    """
    rows, columns = gain.shape
    cost = -gain.double().cpu().numpy()
    if rows > columns:
        matching = torch.full((rows,), -1, dtype=torch.int64)
        matching[torch.from_numpy(_assign(cost.T))] = torch.arange(columns)
        return matching
    return torch.from_numpy(_assign(cost))


def probe_accuracy(known: Tensor, labels: Tensor, test: Tensor, truth: Tensor) -> float:
    """Accuracy on test embeddings of a linear layer fitted to known ones by logistic regression.

    known, test    (n, E)  embeddings; normalised by mean and deviation of the known ones
    labels, truth  (n,)    int64
    """
    mean, std = known.double().mean(0), known.double().std(0, correction=0)
    scale = torch.where(std > 0, 1 / std, 0.0)
    layer = _fit_probe((known.double() - mean) * scale, labels)
    logits = functional.linear((test.double() - mean) * scale, layer[:, :-1], layer[:, -1])
    return accuracy(logits.argmax(-1), truth)


def _fit_probe(points: Tensor, labels: Tensor) -> Tensor:
    """(C, E + 1) weights and biases with the least cross entropy; convex, so the start does not matter."""
    layer = torch.zeros(int(labels.max()) + 1, points.shape[1] + 1, dtype=points.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([layer], max_iter=_PROBE_STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        solver.zero_grad()
        logits = functional.linear(points, layer[:, :-1], layer[:, -1])
        value = functional.cross_entropy(logits, labels) + _PROBE_DECAY * layer[:, :-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    solver.step(loss)  # type: ignore[no-untyped-call]
    return layer.detach()


def _check(predicted: Tensor, truth: Tensor) -> None:
    if predicted.shape != truth.shape or truth.ndim != 1 or not len(truth):
        raise ConfigError(
            f"labels of shape {list(predicted.shape)} against {list(truth.shape)}, expected (N,) for both, N at least 1"
        )
    if int(truth.min()) < 0:
        raise ConfigError(f"a true label is {int(truth.min())}; score only labelled items")


def _ari(table: Tensor) -> float:
    counts = table.double()
    both, ours, theirs = (_pairs(part) for part in (counts, counts.sum(1), counts.sum(0)))
    total = _pairs(counts.sum())
    if total == 0:
        return 1.0
    chance = ours * theirs / total
    most = (ours + theirs) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def _pairs(counts: Tensor) -> float:
    return float((counts * (counts - 1) / 2).sum())


def _nmi(table: Tensor) -> float:
    shares = table.double() / table.sum()
    ours, theirs = _entropy(shares.sum(1)), _entropy(shares.sum(0))
    if ours + theirs == 0:
        return 1.0
    mutual = ours + theirs - _entropy(shares)
    return min(1.0, max(0.0, 2 * mutual / (ours + theirs)))


def _entropy(shares: Tensor) -> float:
    return float(-torch.xlogy(shares, shares).sum().clamp(max=0))


def _matched(table: Tensor) -> float:
    columns = best_matching(table)
    used = columns >= 0
    right = table[used.nonzero().flatten(), columns[used]].sum()
    return float(right.double() / table.sum())


def _assign(cost: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Column of each row with the least total cost; at most as many rows as columns."""
    rows, columns = cost.shape
    row_of = np.full(columns + 1, -1)  # the extra column holds the row being added
    row_price, price = np.zeros(rows), np.zeros(columns + 1)
    for row in range(rows):
        row_of[columns], column = row, columns
        reached, came_from = np.zeros(columns + 1, dtype=bool), np.full(columns + 1, columns)
        least = np.full(columns, np.inf)
        while row_of[column] >= 0:
            reached[column] = True
            here = row_of[column]
            slack = cost[here] - row_price[here] - price[:columns]
            better = ~reached[:columns] & (slack < least)
            least[better], came_from[:columns][better] = slack[better], column
            nearest = int(np.where(reached[:columns], np.inf, least).argmin())
            step = least[nearest]
            row_price[row_of[reached]] += step
            price[reached] -= step
            least[~reached[:columns]] -= step
            column = nearest
        while column != columns:  # back along the path, each column takes the row before it
            row_of[column] = row_of[came_from[column]]
            column = int(came_from[column])
    column_of = np.empty(rows, dtype=np.int64)
    taken = np.flatnonzero(row_of[:columns] >= 0)
    column_of[row_of[taken]] = taken
    return column_of

"""Measures of predictions: classes from a confusion matrix, numbers from sums of products; and their 95 % intervals.

    accuracy   share of sequences with the correct class
    UAR        unweighted average recall: mean over the true classes of the share that is predicted correctly
    macro F1   mean F1 over all classes that occur or are predicted
    CCC        concordance correlation coefficient, 2 cov / (var + var + squared difference of the means)
    RMSE       root mean squared error, in the unit of the labels
    R²         1 - squared error / variance of the labels

Both tables add up over sequences, so an interval needs one table per group: whole groups are drawn with replacement
(sequences where there are no groups), their tables are added and measured again; the interval spans the middle 95 %.
"""

# Axes: … any leading axes, n sequences, G groups, C classes, R resamples

import math
from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.engine.rows import HOST

RESAMPLES = 2000
MAX_DRAWS = 10**8  # resamples × groups; beyond, resamples are fewer, 200 at least
_BLOCK_VALUES = 2**24  # of the tables that are added at once

Measures = dict[str, Tensor]  # name → (…,) float64, NaN where it is not defined


class MeasureInterval(NamedTuple):
    low: float
    high: float


def confusion(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """(C, C) int64: rows are true classes, columns predicted ones."""
    return torch.bincount(truth * num_classes + predicted, minlength=num_classes**2).view(num_classes, num_classes)


def class_measures(table: Tensor) -> Measures:
    """Accuracy, UAR and macro F1 of confusion matrices (…, C, C)."""
    counts = table.double()
    hits, truth, predicted = counts.diagonal(dim1=-2, dim2=-1), counts.sum(-1), counts.sum(-2)
    recall = torch.where(truth > 0, hits / truth, torch.nan)
    f1 = torch.where(truth + predicted > 0, 2 * hits / (truth + predicted), torch.nan)
    return {
        "accuracy": hits.sum(-1) / truth.sum(-1),
        "uar": recall.nanmean(-1),
        "macro_f1": f1.nanmean(-1),
    }


def per_class(table: Tensor) -> dict[str, list[float | None]]:
    """Precision, recall, F1 and number of sequences of each class; None where a class did not occur."""
    counts = table.double()
    hits, truth, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    values = {"precision": hits / predicted, "recall": hits / truth, "f1": 2 * hits / (truth + predicted)}
    out: dict[str, list[float | None]] = {
        name: [None if value != value else value for value in column.tolist()] for name, column in values.items()
    }
    return {**out, "sequences": [int(count) for count in truth.tolist()]}


def sums(predicted: Tensor, truth: Tensor) -> Tensor:
    """(n, 6) float64: one, prediction, truth, and their products; they add up over sequences."""
    predicted, truth = predicted.double(), truth.double()
    return torch.stack(
        [torch.ones_like(truth), predicted, truth, predicted**2, truth**2, predicted * truth], -1
    )  # fmt: skip


def number_measures(table: Tensor) -> Measures:
    """CCC, RMSE and R² of sums (…, 6); predictions and labels are best given relative to the mean label."""
    count, p, t, pp, tt, pt = table.double().unbind(-1)
    mean_p, mean_t = p / count, t / count
    var_p, var_t = pp / count - mean_p**2, tt / count - mean_t**2
    squares = (pp - 2 * pt + tt) / count
    spread = var_p + var_t + (mean_p - mean_t) ** 2
    return {
        "ccc": torch.where(spread > 0, 2 * (pt / count - mean_p * mean_t) / spread, torch.nan),
        "rmse": squares.clamp(min=0).sqrt(),
        "r2": torch.where(var_t > 1e-12 * (tt / count + 1e-30), 1 - squares / var_t, torch.nan),
    }


def intervals(tables: Tensor, seed: int, *, is_regression: bool) -> tuple[dict[str, MeasureInterval], int]:
    """95 % percentile bootstrap of each measure, and the number of resamples.

    tables  (G, C²) float64, sparse: confusion matrix of each group; of numbers (G, 6), dense
    """
    num_groups, num_cells = tables.shape
    resamples = int(max(RESAMPLES // 10, min(RESAMPLES, MAX_DRAWS // num_groups)))
    rng = stream(seed, "intervals", device=HOST)
    block = max(1, _BLOCK_VALUES // max(num_groups, num_cells))
    resampled: dict[str, list[Tensor]] = {}
    for first in range(0, resamples, block):
        num = min(block, resamples - first)
        drawn = torch.randint(num_groups, (num, num_groups), generator=rng)
        weight = torch.zeros(num, num_groups, dtype=torch.float64)
        weight.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        if is_regression:
            measures = number_measures(weight @ tables)
        else:
            side = math.isqrt(num_cells)
            measures = class_measures(torch.sparse.mm(tables.t(), weight.t()).t().reshape(num, side, side))
        for name, values in measures.items():
            resampled.setdefault(name, []).append(values)
    return {name: _middle(torch.cat(parts)) for name, parts in resampled.items()}, resamples


def _middle(values: Tensor) -> MeasureInterval:
    known = values[values.isfinite()]
    if not len(known):
        return MeasureInterval(math.nan, math.nan)
    low, high = torch.quantile(known, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return MeasureInterval(low, high)

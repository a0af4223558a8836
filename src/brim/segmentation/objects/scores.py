"""How well predicted objects agree with true ones.

Two objects match where their intersection over union exceeds a threshold of at least 0.5: each object then has one
partner at most. Counts of several images add up, so a folder has one score.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ObjectLabels = NDArray[np.integer[Any]]
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)


@dataclass(slots=True)
class ObjectScores:
    """Counts over the images added so far."""

    num_true: int = 0
    num_predicted: int = 0
    matched: list[int] = field(default_factory=lambda: [0] * len(THRESHOLDS))  # pairs at each threshold
    iou_sum: float = 0.0  # of the pairs at 0.5
    merges: int = 0  # predicted objects that hold at least half of two or more true ones
    splits: int = 0  # true objects that hold at least half of two or more predicted ones
    count_errors: list[float] = field(default_factory=list)  # |predicted − true| / true of each image with objects

    def add(self, true: ObjectLabels, predicted: ObjectLabels) -> None:
        """true, predicted (H, W) integers, 0 background; numbers may have gaps."""
        overlap, true_area, predicted_area = overlaps(true, predicted)
        iou = overlap / np.maximum(true_area[:, None] + predicted_area[None] - overlap, 1)
        self.num_true += len(true_area)
        self.num_predicted += len(predicted_area)
        for number, threshold in enumerate(THRESHOLDS):
            self.matched[number] += int((iou > threshold).sum())
        self.iou_sum += float(iou[iou > THRESHOLDS[0]].sum())
        self.merges += int(((2 * overlap >= true_area[:, None]).sum(0) > 1).sum())
        self.splits += int(((2 * overlap >= predicted_area[None]).sum(1) > 1).sum())
        if len(true_area):
            self.count_errors.append(abs(len(predicted_area) - len(true_area)) / len(true_area))

    def add_batch(self, true: Tensor, predicted: Tensor) -> None:
        """true, predicted (B, H, W) integers on any device."""
        for one, other in zip(true.cpu().numpy(), predicted.cpu().numpy(), strict=True):
            self.add(one, other)

    def average_precision(self, threshold: float) -> float:
        """Matches over all objects, true or predicted, at a threshold of THRESHOLDS; 1 where there are none."""
        matched = self.matched[THRESHOLDS.index(threshold)]
        total = self.num_true + self.num_predicted - matched
        return matched / total if total else 1.0

    def as_dict(self) -> dict[str, float | int]:
        matched, objects = self.matched[0], self.num_true + self.num_predicted
        precisions = [self.average_precision(threshold) for threshold in THRESHOLDS]
        return {
            "ap50": precisions[0],
            "ap75": self.average_precision(0.75),
            "ap50_90": float(np.mean(precisions)),
            "f1": 2 * matched / objects if objects else 1.0,
            "pq": 2 * self.iou_sum / objects if objects else 1.0,
            "count_error": float(np.mean(self.count_errors)) if self.count_errors else 0.0,
            "merges": self.merges,
            "splits": self.splits,
            "true": self.num_true,
            "predicted": self.num_predicted,
        }


def overlaps(
    true: ObjectLabels, predicted: ObjectLabels
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Shared pixels (T, P) of each pair of objects, and the areas (T,) and (P,)."""
    rows, first = np.unique(true, return_inverse=True)
    columns, second = np.unique(predicted, return_inverse=True)
    shape = len(rows), len(columns)
    joint = np.bincount(first.ravel() * shape[1] + second.ravel(), minlength=shape[0] * shape[1]).reshape(shape)
    true_area, predicted_area = joint.sum(1)[rows > 0], joint.sum(0)[columns > 0]
    return joint[rows > 0][:, columns > 0], true_area, predicted_area

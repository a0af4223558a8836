"""Cross-validation: folds × seeds, each trained by the function that is given, and what their predictions say together.

    plan (corpus/folds.py) ──▶ train_one(data with this fold's split, directory, settings) ──▶ predictions ──▶ report

    RUN/folds/FOLD-seed-SEED/     one run each, as training leaves it
    RUN/folds/….predictions.safetensors   predictions of its held-out sequences; a resumed run reads them

How a model is trained is no concern of this module: train_one gets sequences whose own split marks what is held out,
and returns what it predicts for those.
"""

# Axes: n sequences, K classes, E embedding

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brim.errors import CheckpointError
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import FoldPlan, Sequences, check_labels, plan_folds, split_sequences
from brim.sequences.evaluation.measures import (
    Measures,
    class_measures,
    confusion,
    intervals,
    number_measures,
    per_class,
    sums,
)
from brim.sequences.evaluation.runs import read_tensors, write_tensors

log = logging.getLogger("brim")

FOLDS = "folds"


class FoldPrediction(NamedTuple):
    """Predictions for held-out sequences, sorted by row, on the host."""

    row: Tensor  # (n,) int64
    output: Tensor  # (n, K) float32, probabilities of the classes; of numbers (n, 1), in the unit of the labels
    embedding: Tensor  # (n, E) float32; E may be 0


# (data with the fold's split, directory of the run, settings with the seed, "fold 2 of 5") → predictions of the
# held-out rows; None if training was stopped
TrainOne = Callable[[Sequences, Path, SequenceTraining, str], FoldPrediction | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSummary:
    """A measure over all folds and seeds."""

    mean: float | None
    std: float | None  # sample standard deviation over folds and seeds; None for a single one
    low: float | None  # 95 % interval of the pooled predictions
    high: float | None
    values: list[float | None]  # of each fold of the first seed, then of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldReport:
    """Result of a cross-validation; pooled figures are over the predictions of all folds, summed over seeds."""

    task: str  # classification or regression
    label: str  # column
    groups: str | None  # column
    folds: list[str]
    seeds: list[int]
    sequences: int
    interval: str  # how low and high were found, in words
    scores: dict[str, MeasureSummary]
    classes: list[str]
    per_class: dict[str, list[float | None]]  # precision, recall, f1, sequences; pooled
    confusion: list[list[int]]  # rows are true classes; pooled

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def means(self) -> dict[str, float | None]:
        return {name: score.mean for name, score in self.scores.items()}


class CrossValidation(NamedTuple):
    report: FoldReport
    plan: FoldPlan
    outputs: Tensor  # (seeds, n, K) float32, of all sequences with a label
    first: FoldPrediction  # of the first fold


def cross_validate(data: Sequences, out: Path, config: SequenceTraining, train_one: TrainOne) -> CrossValidation | None:
    """Train on all folds with all seeds; None if stopped.

    data has the labels that config asks for. What is stored in out already is not trained again.
    """
    plan = check_folds(data, config)
    seeds = [config.seed + number for number in range(config.seeds)]
    outputs = torch.empty(0)
    first_fold: FoldPrediction | None = None
    for place, seed in enumerate(seeds):
        single = replace(config, folds=None, seeds=1, seed=seed)
        for number, fold in enumerate(plan.folds):
            name = f"{number + 1}-seed-{seed}"
            file = out / FOLDS / f"{name}.predictions.safetensors"
            predicted = _read(file, fold.rows)
            if predicted is None:
                words = f"fold {number + 1} of {len(plan.folds)}" + (f", seed {seed}" if len(seeds) > 1 else "")
                predicted = train_one(plan.split(data, fold), out / FOLDS / name, single, words)
                if predicted is None:
                    return None
                write_tensors(file, predicted._asdict())
            if not len(outputs):
                outputs = torch.zeros(len(seeds), len(data), predicted.output.shape[1])
            outputs[place, predicted.row] = predicted.output.float()
            first_fold = first_fold or predicted
    assert first_fold is not None
    return CrossValidation(summarise(data, config, plan, outputs), plan, outputs, first_fold)


def check_folds(data: Sequences, config: SequenceTraining) -> FoldPlan:
    """The plan; raises if a fold could not be trained, before any is."""
    plan = plan_folds(data, config)
    for fold in plan.folds:
        divided, single = plan.split(data, fold), replace(config, folds=None, seeds=1)
        parts = split_sequences(divided, single)
        name = f"{data.path}, fold {fold.name}"
        check_labels(data.labels, data.classes, parts, single, name, is_regression=data.targets is not None)
    return plan


def _read(file: Path, rows: Tensor) -> FoldPrediction | None:
    if not file.is_file():
        return None
    tensors = read_tensors(file)
    if set(tensors) != set(FoldPrediction._fields) or not torch.equal(tensors["row"], rows):
        raise CheckpointError(f"{file} belongs to other sequences", hint="restore it, or choose another {out}")
    return FoldPrediction(**tensors)


# Report


def summarise(data: Sequences, config: SequenceTraining, plan: FoldPlan, outputs: Tensor) -> FoldReport:
    """Measures of each fold and seed, and of all predictions; outputs is (seeds, n, K)."""
    is_regression = data.targets is not None
    of_folds = _stack([_measure(data, fold.rows, output) for output in outputs for fold in plan.folds])
    rows = (data.labels >= 0).nonzero().flatten()
    unit = torch.unique(rows if plan.groups is None else plan.groups[rows], return_inverse=True)[1]
    tables = _group_tables(data, rows, unit, outputs)
    ends, resamples = intervals(tables, config.seed, is_regression=is_regression)
    pooled = torch.zeros(0, 0, dtype=torch.int64)
    if not is_regression:
        pooled = sum(
            (confusion(output[rows].argmax(-1), data.labels[rows], len(data.classes)) for output in outputs),
            torch.zeros((), dtype=torch.int64),
        )
    drawn = "sequences" if plan.groups is None else f"groups ({config.groups})"
    return FoldReport(
        task="regression" if is_regression else "classification",
        label=data.label_column,
        groups=config.groups,
        folds=[fold.name for fold in plan.folds],
        seeds=[config.seed + number for number in range(config.seeds)],
        sequences=len(rows),
        interval=f"95 % percentile bootstrap over {drawn} of the pooled predictions, {resamples} resamples",
        scores={
            name: MeasureSummary(
                mean=_known(float(values.nanmean())),
                std=_known(_deviation(values)),
                low=_known(ends[name].low),
                high=_known(ends[name].high),
                values=[_known(value) for value in values.tolist()],
            )
            for name, values in of_folds.items()
        },
        classes=[] if is_regression else list(data.classes),
        per_class={} if is_regression else per_class(pooled),
        confusion=pooled.tolist(),
    )


def _measure(data: Sequences, rows: Tensor, output: Tensor) -> Measures:
    """Measures of some rows, all labelled; output is (n, K) of all sequences."""
    if data.targets is not None:
        return number_measures(_centred_sums(data, rows, output).sum(0))
    return class_measures(confusion(output[rows].argmax(-1), data.labels[rows], len(data.classes)))


def _stack(parts: Sequence[Measures]) -> Measures:
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def _group_tables(data: Sequences, rows: Tensor, unit: Tensor, outputs: Tensor) -> Tensor:
    """What `intervals` needs: confusion matrices (G, C²), sparse, or sums (G, 6) of each group, over all seeds."""
    num_groups = int(unit.max()) + 1
    if data.targets is not None:
        tables = torch.zeros(num_groups, 6, dtype=torch.float64)
        for output in outputs:
            tables.index_add_(0, unit, _centred_sums(data, rows, output))
        return tables
    num = len(data.classes)
    cells = [data.labels[rows] * num + output[rows].argmax(-1) for output in outputs]
    index = torch.stack([unit.repeat(len(cells)), torch.cat(cells)])
    ones = torch.ones(index.shape[1], dtype=torch.float64)
    return torch.sparse_coo_tensor(index, ones, (num_groups, num * num), check_invariants=False).coalesce()


def _centred_sums(data: Sequences, rows: Tensor, output: Tensor) -> Tensor:
    """(n, 6) of the rows; relative to the mean label, because squares far from 0 lose their variance to rounding."""
    assert data.targets is not None
    middle = data.targets.nanmean()
    return sums(output[rows, 0].double() - middle, data.targets[rows] - middle)


def _deviation(values: Tensor) -> float:
    known = values[values.isfinite()]
    return float(known.std()) if len(known) > 1 else math.nan


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def fold_lines(result: Mapping[str, Any]) -> list[str]:
    """A report as `as_dict` gives it, for a terminal: a line per measure."""
    lines = []
    for name, score in result["scores"].items():
        mean, std, low, high = (
            "–" if score[key] is None else f"{score[key]:.3f}" for key in ("mean", "std", "low", "high")
        )
        lines.append(f"{MEASURE_NAMES[name]:<9} {mean} ± {std}   95 % interval {low} to {high}")
    return lines


MEASURE_NAMES = {
    "accuracy": "accuracy", "uar": "UAR", "macro_f1": "macro F1", "ccc": "CCC", "rmse": "RMSE", "r2": "R²",
}  # fmt: skip

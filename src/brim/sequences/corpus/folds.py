"""Folds of a cross-validation: which sequences each of them holds out.

Every labelled sequence is held out once. With groups, all sequences of a group are in the same fold, and folds have
classes in similar proportions as far as the groups allow it. The plan is a function of labels, groups and seed.
"""

# Axes: n sequences, G groups, C classes, F folds

from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.engine.rows import HOST
from brim.errors import DatasetError
from brim.sequences.config import LEAVE_ONE_OUT, SequenceTraining
from brim.sequences.corpus.labels import number_classes
from brim.sequences.corpus.sequences import Sequences
from brim.sequences.corpus.splits import number_groups


class Fold(NamedTuple):
    name: str  # number from 1, the left-out group, or the value of the column that defines folds
    rows: Tensor  # (…,) int64, sorted: the sequences held out


class FoldPlan(NamedTuple):
    folds: tuple[Fold, ...]
    groups: Tensor | None  # (n,) int64

    def split(self, data: Sequences, fold: Fold) -> Sequences:
        """The data, divided as this fold says; what has no label is trained on by nobody."""
        parts = ["train"] * len(data)
        for row in fold.rows.tolist():
            parts[row] = "test"
        return data.with_split(parts)


def plan_folds(data: Sequences, config: SequenceTraining) -> FoldPlan:
    """The folds that the settings ask for."""
    labelled = data.labels >= 0
    if not bool(labelled.any()):
        raise DatasetError(
            f"{data.path} has no labels, which a cross-validation needs", code="no_labels", hint="pack it with {labels}"
        )
    groups = None if config.groups is None else number_groups(data, config.groups)
    if isinstance(config.folds, str) and config.folds != LEAVE_ONE_OUT and not config.folds.isdecimal():
        folds = _from_column(data, config.folds, groups)
    elif config.folds == LEAVE_ONE_OUT:
        assert groups is not None, "checked by SequenceTraining"
        names = number_classes(data.column(str(config.groups), "groups"))[0]
        folds = _collect(groups, names, labelled)
    else:
        num_folds = int(config.folds or 0)
        seed = config.seed
        number = _deal(data, num_folds, seed) if groups is None else _deal_groups(data, groups, num_folds, seed)
        folds = _collect(number, [str(fold + 1) for fold in range(num_folds)], labelled)
    if len(folds) < 2:
        raise DatasetError(
            f"{data.path}: all sequences are in one fold, so none is left to train on",
            field="folds",
            hint="give several groups or folds in labels.csv",
        )
    _check_learnable(data, folds)
    return FoldPlan(tuple(folds), groups)


def _collect(number: Tensor, names: tuple[str, ...] | list[str], labelled: Tensor) -> list[Fold]:
    folds = [Fold(name, ((number == fold) & labelled).nonzero().flatten()) for fold, name in enumerate(names)]
    return [fold for fold in folds if len(fold.rows)]


def _from_column(data: Sequences, column: str, groups: Tensor | None) -> list[Fold]:
    values = data.column(column, "folds")
    if "" in values:
        raise DatasetError(
            f"{data.path}: {data.ids[values.index('')]} has no {column}",
            field="folds",
            hint="give every sequence one in labels.csv, and pack again",
        )
    names, numbers = number_classes(values)
    number = torch.tensor(numbers)
    if groups is not None:
        for group in torch.unique(groups).tolist():
            inside = torch.unique(number[groups == group]).tolist()
            if len(inside) > 1:
                row = int((groups == group).nonzero()[0])
                raise DatasetError(
                    f"{data.path}: the group of {data.ids[row]} is in {len(inside)} folds, such as {names[inside[0]]} "
                    f"and {names[inside[1]]}, so it would be trained on and tested on",
                    field="groups",
                    hint=f"correct the column {column} of labels.csv, or set {{folds}} to a number",
                )
    return _collect(number, names, data.labels >= 0)


def _deal(data: Sequences, num_folds: int, seed: int) -> Tensor:
    """(n,) int64: each class, in random order, dealt to the folds in turn; -1 without a label."""
    labelled = int((data.labels >= 0).sum())
    if num_folds > labelled:
        raise DatasetError(
            f"{data.path}: {num_folds} folds are more than the {labelled} labelled sequences",
            field="folds",
            hint=f"set {{folds}} to at most {labelled}",
        )
    number, dealt = torch.full((len(data),), -1), 0
    for label in range(len(data.classes)):
        rows = (data.labels == label).nonzero().flatten()
        order = torch.randperm(len(rows), generator=stream(seed, "folds", label, device=HOST))
        number[rows[order]] = (dealt + torch.arange(len(rows))) % num_folds
        dealt += len(rows)  # the next class goes on where this one ended: folds differ by one sequence at most
    return number


def _deal_groups(data: Sequences, groups: Tensor, num_folds: int, seed: int) -> Tensor:
    """(n,) int64: the fold of each sequence. Large groups first, each to the fold that it keeps most even."""
    labelled = data.labels >= 0
    present = torch.unique(groups[labelled])
    if num_folds > len(present):
        raise DatasetError(
            f"{data.path}: {num_folds} folds are more than the {len(present)} groups",
            field="folds",
            hint=f"set {{folds}} to at most {len(present)}, or to {LEAVE_ONE_OUT}",
        )
    shape = (int(groups.max()) + 1, len(data.classes))
    counts = torch.bincount(groups[labelled] * shape[1] + data.labels[labelled], minlength=shape[0] * shape[1])
    table = counts.view(shape)[present].double()  # (G, C) sequences
    share = table / table.sum(0).clamp(min=1)
    order = torch.randperm(len(present), generator=stream(seed, "folds", device=HOST))
    order = order[torch.argsort(table.sum(1)[order], descending=True, stable=True)]
    filled = torch.zeros(num_folds, shape[1], dtype=torch.float64)
    sizes = torch.zeros(num_folds, dtype=torch.int64)
    fold_of = torch.full((shape[0],), -1)
    for place, group in enumerate(order.tolist()):
        left = len(order) - place
        empty = (sizes == 0).nonzero().flatten().tolist()
        options = empty if len(empty) >= left else range(num_folds)  # every fold gets a group
        spreads = {fold: _spread(filled, fold, share[group]) for fold in options}
        best = min(spreads, key=lambda fold: (spreads[fold], int(sizes[fold])))
        filled[best] += share[group]
        sizes[best] += int(table[group].sum())
        fold_of[present[group]] = best
    return fold_of[groups]


def _spread(filled: Tensor, fold: int, share: Tensor) -> float:
    """How uneven classes are over the folds once this one has the share too."""
    tried = filled.clone()
    tried[fold] += share
    return round(float(tried.var(0, correction=0).sum()), 12)


def _check_learnable(data: Sequences, folds: list[Fold]) -> None:
    """Raise if a class lies in a single fold: when that is held out, nothing can have learned it."""
    if data.targets is not None:
        return
    seen: dict[int, str] = {}
    several: set[int] = set()
    for fold in folds:
        for label in torch.unique(data.labels[fold.rows]).tolist():
            if label in seen:
                several.add(label)
            seen[label] = fold.name
    alone = sorted(set(seen) - several)
    if alone:
        raise DatasetError(
            f"{data.path}: the class {data.classes[alone[0]]!r} is in fold {seen[alone[0]]} alone, so nothing has "
            "learned it when that fold is held out",
            code="class_unseen",
            hint="add sequences of it, in other groups if there are groups, or leave the class out of labels.csv",
        )

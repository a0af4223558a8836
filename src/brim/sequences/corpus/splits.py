"""The split: which sequences are trained on, which select the best weights, and which are held out for scoring.

Sequences held out take no part in training, validation, clustering or statistics. The split is a function of the
labels, the groups, the corpus's own split and the seed. No group is in two parts.
"""

# Axes: n sequences

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.engine.rows import HOST
from brim.errors import ConfigError, DatasetError
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus.labels import number_classes
from brim.sequences.corpus.sequences import Sequences


class SequenceSplit(NamedTuple):
    """Disjoint rows of a corpus, each (…,) int64 and sorted."""

    train: Tensor
    validation: Tensor  # part of the training items, in supervised mode
    held_out: Tensor


def split_sequences(data: Sequences, config: SequenceTraining, name: str | None = None) -> SequenceSplit:
    """Divide a corpus as the settings say; name is what an error calls it."""
    groups = None
    if config.groups is not None:
        groups = number_groups(data, config.groups)
    return split(data.labels, data.split, config, name=name or str(data.path), groups=groups)


def number_groups(data: Sequences, column: str) -> Tensor:
    """(n,) int64: the group of each sequence, in natural order; one without a group is an error."""
    values = data.column(column, "groups")
    if "" in values:
        raise DatasetError(
            f"{data.path}: {data.ids[values.index('')]} has no {column}",
            field="groups",
            hint="give every sequence one in labels.csv, and pack again",
        )
    return torch.tensor(number_classes(values)[1])


def split(
    labels: Tensor,
    own: Sequence[str],
    config: SequenceTraining,
    *,
    name: str = "the corpus",
    groups: Tensor | None = None,
) -> SequenceSplit:
    """Divide sequences; own is the corpus's own split: "train", "validation", "test" or "".

    labels  (n,)  int64  -1 for none
    groups  (n,)  int64  no group is divided
    """
    if config.mode == "supervised" and not bool((labels >= 0).any()):
        raise ConfigError(
            f"{name} has no labels, which supervised mode needs",
            code="conflict",
            hint="pack it with {labels} or set {mode} to self",
        )
    held = torch.tensor([part == "test" for part in own])
    if not any(own):
        held[_draw(labels, groups, config.holdout, config.seed, "hold out")] = True
    pool = ~held
    if config.mode == "supervised":
        pool &= labels >= 0
    rest = pool.nonzero().flatten()
    if not len(rest):
        raise DatasetError(
            f"{name}: all {len(labels)} sequences are held out, none is left to train on; mark some as train"
        )
    chosen = torch.tensor([own[row] == "validation" for row in rest.tolist()])
    if config.mode == "supervised" and not bool(chosen.any()):
        of_rest = None if groups is None else groups[rest]
        chosen[_draw(labels[rest], of_rest, config.val_fraction, config.seed, "validation")] = True
    parts = SequenceSplit(rest[~chosen], rest[chosen], held.nonzero().flatten())
    if groups is not None:
        _check_apart(parts, groups, name)
    return parts


def _draw(labels: Tensor, groups: Tensor | None, share: float, seed: int, purpose: str) -> Tensor:
    if groups is None:
        return stratified(labels, share, seed, purpose)
    return grouped(labels, groups, share, seed, purpose)


def _check_apart(parts: SequenceSplit, groups: Tensor, name: str) -> None:
    """Raise if a group is in two parts of the corpus's own split."""
    for first, second in ((0, 2), (1, 2), (0, 1)):
        shared = set(groups[parts[first]].tolist()) & set(groups[parts[second]].tolist())
        if shared:
            row = int(parts[second][groups[parts[second]] == min(shared)][0])
            words = ("training", "validation", "test")
            raise DatasetError(
                f"{name}: {len(shared)} groups are in both the {words[first]} and the {words[second]} part, such as "
                f"that of sequence {row}",
                field="groups",
                hint="correct the column split in labels.csv, or leave it out and set {folds}",
            )


def grouped(labels: Tensor, groups: Tensor, share: float, seed: int, purpose: str) -> Tensor:
    """Rows of whole groups, (…,) int64, sorted, that hold about a share of the labelled rows.

    Groups are drawn in random order. One is left out if too many rows would be chosen, or a class would have none left;
    the last group always stays.
    """
    labelled = labels >= 0
    target = share * int(labelled.sum())
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    numbers = torch.unique(groups[labelled])
    order = numbers[torch.randperm(len(numbers), generator=stream(seed, purpose, "groups", device=HOST))]
    classes = set(labels[labelled].tolist())
    for number in order.tolist():
        tried = chosen | (groups == number)
        rows = int((tried & labelled).sum())
        if target <= 0 or int((chosen & labelled).sum()) >= target:
            break
        if set(labels[labelled & ~tried].tolist()) == classes and (rows <= 1.5 * target or not bool(chosen.any())):
            chosen = tried
    return chosen.nonzero().flatten()


def stratified(labels: Tensor, share: float, seed: int, purpose: str) -> Tensor:
    """A stratified share of the labelled rows, (…,) int64, sorted; every class keeps at least one row.

    Parts are rounded by largest remainders, so that their sum is the share of all.
    """
    counts = torch.bincount(labels[labels >= 0])
    total = int(counts.sum())
    target = max(1, round(share * total)) if total and share > 0 else 0
    quota = share * counts.double()
    parts = quota.floor().long().minimum((counts - 1).clamp(min=0))
    order = torch.argsort(quota - quota.floor(), descending=True, stable=True).tolist()
    while int(parts.sum()) < target and bool((parts < counts - 1).any()):
        for number in order:
            if int(parts.sum()) < target and parts[number] < counts[number] - 1:
                parts[number] += 1
    chosen = [
        rows[torch.randperm(len(rows), generator=stream(seed, purpose, number, device=HOST))[:num]]
        for number, num in enumerate(parts.tolist())
        for rows in [(labels == number).nonzero().flatten()]
    ]
    return torch.cat([*chosen, torch.empty(0, dtype=torch.int64)]).sort().values


def check_labels(
    labels: Tensor,
    classes: Sequence[str],
    parts: SequenceSplit,
    config: SequenceTraining,
    name: str,
    *,
    is_regression: bool = False,
) -> None:
    """Raise if the training items cannot teach what is asked for: too few classes, numbers or sequences."""
    num_items = len(parts.train)
    if config.mode == "supervised" and is_regression:
        if num_items < 2:
            raise DatasetError(f"{name} has {num_items} sequences with a number to train on; label more sequences")
        return
    if config.mode == "supervised":
        _check_classes(labels, classes, parts, name)
        if len(torch.unique(labels[parts.train])) < 2:
            raise ConfigError(
                f"{name} has classes, {len(classes)} in all, but fewer than two among the sequences to train on",
                field="mode",
                code="conflict",
                hint="label more sequences, or set {mode} to self",
            )
        return
    clusters = config.num_clusters(len(classes))
    if clusters > num_items:
        raise ConfigError(
            f"{name}: clusters={clusters} is more than the {num_items} sequences to train on",
            code="conflict",
            hint=f"set {{clusters}} to 2 to {num_items}" if num_items > 1 else "pack more sequences",
        )


def _check_classes(labels: Tensor, classes: Sequence[str], parts: SequenceSplit, name: str) -> None:
    """Raise if a class cannot be learned or, having one sequence like all others, not be scored."""
    learned, held = (set(labels[rows].tolist()) for rows in (torch.cat(parts[:2]), parts.held_out))
    unseen = sorted(held - learned - {-1})
    if unseen:
        more = f" and {len(unseen) - 1} more are" if len(unseen) > 1 else " is"
        raise DatasetError(
            f"{name}: the class {classes[unseen[0]]!r}{more} only in the held-out part, so nothing can learn it",
            code="class_unseen",
            hint="move a sequence of it to the training part, or leave the class out of labels.csv",
        )
    counts = torch.bincount(labels[labels >= 0])
    if len(classes) > 1 and not held and int(counts.max()) == 1:
        raise DatasetError(
            f"{name}: each of the {len(classes)} classes has one sequence, so nothing can be held out for scoring",
            code="too_few",
            hint="add sequences, or check that the label is the right column of labels.csv",
        )

"""The split: which sequences are trained on, which select the best weights, and which are held out for scoring.

Sequences held out take no part in training, validation, clustering or statistics. The split is a function of the
labels, the corpus's own split and the seed.
"""

# Axes: n sequences

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.errors import ConfigError, DatasetError
from brim.sequences.config import SequenceTraining

_HOST = torch.device("cpu")


class SequenceSplit(NamedTuple):
    """Disjoint rows of a corpus, each (…,) int64 and sorted."""

    train: Tensor
    validation: Tensor  # part of the training items, in supervised mode
    held_out: Tensor


def split(labels: Tensor, own: Sequence[str], config: SequenceTraining, *, name: str = "the corpus") -> SequenceSplit:
    """Divide sequences; labels is (n,) int64 with -1 for none, own the corpus's own split: "train", "test" or ""."""
    if config.mode == "supervised" and not bool((labels >= 0).any()):
        raise ConfigError(
            f"{name} has no labels, which supervised mode needs",
            code="conflict",
            hint="pack it with {labels} or set {mode} to self",
        )
    held = torch.tensor([part == "test" for part in own])
    if not any(own):
        held[stratified(labels, config.holdout, config.seed, "hold out")] = True
    pool = ~held
    if config.mode == "supervised":
        pool &= labels >= 0
    rest = pool.nonzero().flatten()
    if not len(rest):
        raise DatasetError(
            f"{name}: all {len(labels)} sequences are held out, none is left to train on; mark some as train"
        )
    chosen = torch.zeros(len(rest), dtype=torch.bool)
    if config.mode == "supervised":
        chosen[stratified(labels[rest], config.val_fraction, config.seed, "validation")] = True
    return SequenceSplit(rest[~chosen], rest[chosen], held.nonzero().flatten())


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
        rows[torch.randperm(len(rows), generator=stream(seed, purpose, number, device=_HOST))[:num]]
        for number, num in enumerate(parts.tolist())
        for rows in [(labels == number).nonzero().flatten()]
    ]
    return torch.cat([*chosen, torch.empty(0, dtype=torch.int64)]).sort().values


def check_labels(
    labels: Tensor, classes: Sequence[str], parts: SequenceSplit, config: SequenceTraining, name: str
) -> None:
    """Raise if the training items have too few classes, or are fewer than the clusters."""
    num_items = len(parts.train)
    if config.mode == "supervised":
        if len(torch.unique(labels[parts.train])) < 2:
            raise ConfigError(
                f"{name} has {len(classes)} classes, and fewer than two among the sequences to train on",
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

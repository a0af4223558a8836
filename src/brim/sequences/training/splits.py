"""Which sequences are trained on, which choose the best weights, and which only score.

The last are kept out of everything else: training, validation, clusters and statistics. A function of labels, the
corpus's own split and the seed.
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


class Split(NamedTuple):
    """Rows of a corpus, sorted, (…,) int64; none is in two of them."""

    train: Tensor
    validation: Tensor  # part of the training items, in supervised mode
    held_out: Tensor


def split(labels: Tensor, given: Sequence[str], config: SequenceTraining, *, name: str = "the corpus") -> Split:
    """Divide sequences; labels (n,) int64 with -1 for none, given the corpus's own "train", "test" or nothing."""
    if config.mode == "supervised" and not bool((labels >= 0).any()):
        raise ConfigError(
            f"{name} has no labels, which mode=supervised needs; pack it with --labels or train with --mode self"
        )
    held = torch.tensor([part == "test" for part in given])
    if not any(given):
        held[stratified(labels, config.holdout, config.seed, "hold out")] = True
    pool = ~held
    if config.mode == "supervised":
        pool &= labels >= 0
    rest = pool.nonzero().flatten()
    if not len(rest):
        raise DatasetError(
            f"{name}: all {len(labels)} sequences are held out, none is left to train on: mark some as train"
        )
    chosen = torch.zeros(len(rest), dtype=torch.bool)
    if config.mode == "supervised":
        chosen[stratified(labels[rest], config.val_fraction, config.seed, "validation")] = True
    return Split(rest[~chosen], rest[chosen], held.nonzero().flatten())


def stratified(labels: Tensor, share: float, seed: int, purpose: str) -> Tensor:
    """Rows that make a share of the labelled ones, (…,) int64, sorted; every class gives its part and keeps one.

    Parts are rounded so that their sum is the share of all: by largest remainders.
    """
    counts = torch.bincount(labels[labels >= 0])
    total = int(counts.sum())
    wanted = max(1, round(share * total)) if total and share > 0 else 0
    quota = share * counts.double()
    parts = quota.floor().long().minimum((counts - 1).clamp(min=0))
    order = torch.argsort(quota - quota.floor(), descending=True, stable=True).tolist()
    while int(parts.sum()) < wanted and bool((parts < counts - 1).any()):
        for number in order:
            if int(parts.sum()) < wanted and parts[number] < counts[number] - 1:
                parts[number] += 1
    chosen = [
        rows[torch.randperm(len(rows), generator=stream(seed, purpose, number, device=_HOST))[:num]]
        for number, num in enumerate(parts.tolist())
        for rows in [(labels == number).nonzero().flatten()]
    ]
    return torch.cat([*chosen, torch.empty(0, dtype=torch.int64)]).sort().values


def check_labels(labels: Tensor, classes: Sequence[str], found: Split, config: SequenceTraining, name: str) -> None:
    """Raise where a mode asks for what the training items do not have."""
    if config.mode == "supervised":
        if len(torch.unique(labels[found.train])) < 2:
            raise ConfigError(
                f"{name} has {len(classes)} classes, and less than two among the sequences to train on; "
                "supervised mode needs something to tell apart: label more, or train with --mode self"
            )
        return
    clusters = config.num_clusters(len(classes))
    if clusters > len(found.train):
        step = f"choose --clusters 2 to {len(found.train)}" if len(found.train) > 1 else "pack more sequences"
        raise ConfigError(f"{name}: clusters={clusters} of {len(found.train)} sequences to train on; {step}")

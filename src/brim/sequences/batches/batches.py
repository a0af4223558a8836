"""Batches of sequences on a device: from a packed corpus held in a memory tier, or read by the workers of a DataLoader.

Axes: n sequences, B of a batch, T frames, D features.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from brim.engine.device import stream, worker_count
from brim.engine.rows import Buckets, Epoch, RaggedResident, RaggedTensors
from brim.engine.training import BatchSource, Ranks, Transform, resolve_precision
from brim.sequences.batches.dataloader import SequenceLoader
from brim.sequences.config import LoaderConfig, SequenceTraining
from brim.sequences.corpus import Corpus, Sequences

log = logging.getLogger("brim")

_FEW_VALUES = 1 << 26  # of a folder: reading them takes less time than starting workers


class SequenceBatches:
    """Makes batches with "frames", "length", "item" (the row of the data) and "label", inside its with block.

    A packed corpus is held once in a memory tier, for all orders and labels. A folder of .npy files is read by the
    workers of a DataLoader, a separate one for each view.
    """

    def __init__(
        self,
        data: Sequences,
        config: SequenceTraining,
        device: torch.device,
        rows: Tensor | None = None,  # of a packed corpus only these are loaded
        ranks: Ranks | None = None,
        own: Tensor | None = None,  # (n,) bool: the sequences that this one of several ranks holds
    ) -> None:
        self.data, self.config, self.device, self.ranks, self.own = data, config, device, ranks, own
        # a CPU has no fast half precision: convert once instead of in every layer
        self.dtype = torch.float32 if device.type == "cpu" else None
        self._rows = rows
        self._resident: RaggedResident | None = None
        self._num_workers = min(config.num_workers, worker_count())
        if config.num_workers == SequenceTraining().num_workers and int(data.lengths.sum()) * data.dim <= _FEW_VALUES:
            self._num_workers = 0
        if self._num_workers and ranks is not None:
            self._num_workers = max(1, self._num_workers // ranks.size)  # the ranks of a machine share its cores
        self._fixed, self._shuffled = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        """Choose the tier of a corpus, and load it."""
        if isinstance(self.data, Corpus):
            reserve_bytes = step_bytes(self.data, self.config, self.device, self.ranks.size if self.ranks else 1)
            resident = RaggedResident(
                self.data, buckets=self.config.buckets(), device=self.device, tier=self.config.tier,
                rows=self._rows, ranks=self.ranks, own=self.own, dtype=self.dtype, reserve_bytes=reserve_bytes,
            )  # fmt: skip
            self._resident = self._fixed.enter_context(resident)
        else:
            who = f"{self._num_workers} workers read it" if self._num_workers else "it is read file by file"
            log.info("%s is not packed: %s; training on a packed corpus is faster", self.data.path, who)
        return self

    def __exit__(self, *_: object) -> None:
        self._shuffled.close()
        self._fixed.close()

    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> BatchSource:
        """Batches of these rows, from buckets of similar length; label (n,) replaces the data's own.

        A new shuffled view of a folder ends the workers of the one before.
        """
        fields = None if label is None else {"label": label}
        if self._resident is not None:
            return self._resident.view(rows=rows, fields=fields, seed=seed, shuffle=shuffle)
        config = LoaderConfig(
            num_workers=self._num_workers, prefetch_factor=self.config.prefetch_factor,
            buckets=self.config.buckets(), persistent_workers=shuffle,
        )  # fmt: skip
        if shuffle:
            self._shuffled.close()
        loader = SequenceLoader(
            self.data, config, device=self.device, seed=seed, rows=rows, shuffle=shuffle, fields=fields,
            dtype=self.dtype, ranks=self.ranks, own=self.own,
        )  # fmt: skip
        return (self._shuffled if shuffle else self._fixed).enter_context(loader)

    def plain(self, rows: Tensor, label: Tensor | None = None) -> BatchSource | None:
        """Batches, in a fixed order, of those rows that this rank holds; None if it holds none of them."""
        held = rows if self.own is None else rows[self.own[rows]]
        return self.view(held, label=label, shuffle=False) if len(held) else None


def step_bytes(corpus: Corpus, config: SequenceTraining, device: torch.device, num_ranks: int = 1) -> int:
    """Upper estimate of the device memory for weights, gradients and a step, besides the data."""
    shape = config.shape(corpus.dim)
    frames = -(-Buckets(corpus.lengths, config.buckets()).max_batch_frames // num_ranks)
    views = 2 if config.mode == "self" else 1
    width = 4 if resolve_precision(config.precision, device) == "fp32" else 2
    kept = 4 * shape.dim + 6 * shape.channels * shape.convolutions + 24 * shape.hidden * shape.layers
    inputs = 16 * frames * shape.dim * corpus.dtype.itemsize  # of captured steps, one for each of up to 32 shapes
    return width * views * frames * kept + inputs + (256 << 20)


# Augmented copies


class Variants(BatchSource):
    """Augmented copies of the same items as one source: epoch e has the batches of copy e mod K.

    They trade memory and variety for time where augmentation is expensive; on a GPU it is not.
    """

    def __init__(self, copies: list[RaggedResident]) -> None:
        """All copies have the same number of items, in batches of one size."""
        self._copies = copies
        first = copies[0]
        self.num_items, self.num_batches, self.batch_size = first.num_items, first.num_batches, first.batch_size
        self.padding_share = sum(copy.padding_share for copy in copies) / len(copies)

    @property
    def tier(self) -> str:
        return self._copies[0].tier

    def epoch(self, number: int, start_batch: int = 0) -> Epoch:
        """Batches of an epoch from start_batch on; "item" counts the training items."""
        return self._copies[number % len(self._copies)].epoch(number, start_batch)


@contextmanager
def make_variants(
    batches: SequenceBatches, rows: Tensor, labels: Tensor, augmented: Transform, seeds: list[int]
) -> Iterator[Variants]:
    """Augment the rows once for each seed, which orders that copy; labels is (n,) int64 of all the data."""
    config, device = batches.config, batches.device
    buckets = replace(config.buckets(), multiple=8)  # so that batches of different copies have shapes in common
    copies = []
    for number, seed in enumerate(seeds):
        rng = stream(config.seed, "variants", number, device=device)
        frames_of: dict[int, Tensor] = {}
        with closing(batches.view(rows, shuffle=False).epoch(0)) as epoch:  # type: ignore[type-var]
            for batch in epoch:
                changed = augmented(batch, rng) or batch
                frames, lengths = changed["frames"].cpu(), changed["length"].tolist()
                for place, (row, length) in enumerate(zip(changed["item"].tolist(), lengths, strict=True)):
                    frames_of[row] = frames[place, :length].clone()
        sequences = RaggedTensors([frames_of[row] for row in rows.tolist()], {"label": labels[rows]})
        copies.append(RaggedResident(sequences, buckets=buckets, device=device, tier=config.tier, seed=seed))
    with ExitStack() as stack:
        yield Variants([stack.enter_context(copy) for copy in copies])

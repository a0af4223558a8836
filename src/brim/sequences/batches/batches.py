"""Batches of sequences on a device: from a packed corpus held in a memory tier, or read by the workers of a DataLoader.

Axes: n sequences, B of a batch, T frames, D features.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from brim.engine.device import stream, worker_count
from brim.engine.rows import Buckets, Epoch, RaggedResident, RaggedTensors
from brim.engine.training import BatchSource, Ranks, Transform, resolve_precision
from brim.sequences.batches.dataloader import SequenceLoader
from brim.sequences.config import LoaderConfig, SequenceTraining
from brim.sequences.corpus import Corpus, SequenceFolder, Sequences

log = logging.getLogger("brim")


class SequenceBatches(ABC):
    """Makes batches with "frames", "length", "item" (the row of the data) and "label", inside a with block."""

    def __init__(
        self, config: SequenceTraining, device: torch.device, ranks: Ranks | None = None, own: Tensor | None = None
    ) -> None:
        """With several ranks each holds the sequences that own, (n,) bool, marks."""
        self.config, self.device, self.ranks, self.own = config, device, ranks, own
        # a CPU has no fast half precision: convert once instead of in every layer
        self.dtype = torch.float32 if device.type == "cpu" else None

    @abstractmethod
    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> BatchSource:
        """Batches of these rows, from buckets of similar length; label (n,) int64 replaces the data's own."""

    def plain(self, rows: Tensor) -> BatchSource | None:
        """Batches, in a fixed order, of those rows that this rank holds; None if it holds none of them."""
        held = rows if self.own is None else rows[self.own[rows]]
        return self.view(held, shuffle=False) if len(held) else None

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_batches(
    data: Sequences,
    config: SequenceTraining,
    device: torch.device,
    rows: Tensor | None = None,
    ranks: Ranks | None = None,
    own: Tensor | None = None,
) -> SequenceBatches:
    """Batches of these sequences; of a packed corpus only the given rows are loaded."""
    if isinstance(data, Corpus):
        return _CorpusBatches(data, config, device, rows, ranks, own)
    assert isinstance(data, SequenceFolder)
    return _FolderBatches(data, config, device, ranks, own)


class _CorpusBatches(SequenceBatches):
    """A packed corpus in a memory tier, held once for all orders and labels."""

    def __init__(
        self,
        corpus: Corpus,
        config: SequenceTraining,
        device: torch.device,
        rows: Tensor | None,
        ranks: Ranks | None,
        own: Tensor | None,
    ) -> None:
        super().__init__(config, device, ranks, own)
        self._corpus, self._rows = corpus, rows
        self._resident: RaggedResident | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Choose the tier and load."""
        self._resident = self._opened.enter_context(
            RaggedResident(
                self._corpus.source(), buckets=self.config.buckets(), device=self.device, tier=self.config.tier,
                rows=self._rows, ranks=self.ranks, own=self.own, dtype=self.dtype,
                reserve_bytes=step_bytes(self._corpus, self.config, self.device, self.ranks.size if self.ranks else 1),
            )
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> BatchSource:
        assert self._resident is not None, "batches are made inside the with block"
        fields = None if label is None else {"label": label}
        return self._resident.view(rows=rows, fields=fields, seed=seed, shuffle=shuffle)


class _FolderBatches(SequenceBatches):
    """A folder of .npy files, read by the workers of a DataLoader; each view has its own workers."""

    def __init__(
        self,
        folder: SequenceFolder,
        config: SequenceTraining,
        device: torch.device,
        ranks: Ranks | None,
        own: Tensor | None,
    ) -> None:
        super().__init__(config, device, ranks, own)
        self._folder = folder
        self._fixed, self._shuffled = ExitStack(), ExitStack()
        num_workers = min(config.num_workers, worker_count())
        if num_workers and ranks is not None:
            num_workers = max(1, num_workers // ranks.size)  # the ranks of a machine share its cores
        self._loading = LoaderConfig(
            num_workers=num_workers, prefetch_factor=config.prefetch_factor, buckets=config.buckets()
        )

    def __enter__(self) -> Self:
        log.info(
            "%s is not packed: %d workers read it; training on a packed corpus is faster",
            self._folder.path,
            self._loading.num_workers,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shuffled.close()
        self._fixed.close()

    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> BatchSource:
        """A new shuffled view ends the workers of the one before."""
        if shuffle:
            self._shuffled.close()
        loader = SequenceLoader(
            self._folder, replace(self._loading, persistent_workers=shuffle), device=self.device, seed=seed, rows=rows,
            shuffle=shuffle, fields=None if label is None else {"label": label}, dtype=self.dtype, ranks=self.ranks,
            own=self.own,
        )  # fmt: skip
        return (self._shuffled if shuffle else self._fixed).enter_context(loader)


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
    with ExitStack() as stack:
        copies = [_augmented_copy(batches, rows, labels, augmented, k, seed) for k, seed in enumerate(seeds)]
        yield Variants([stack.enter_context(copy) for copy in copies])


def _augmented_copy(
    batches: SequenceBatches, rows: Tensor, labels: Tensor, augmented: Transform, number: int, seed: int
) -> RaggedResident:
    config = batches.config
    rng = stream(config.seed, "variants", number, device=batches.device)
    frames_of: dict[int, Tensor] = {}
    with closing(batches.view(rows, shuffle=False).epoch(0)) as epoch:  # type: ignore[type-var]
        for batch in epoch:
            changed = augmented(batch, rng) or batch
            frames, lengths = changed["frames"].cpu(), changed["length"].tolist()
            for place, (row, length) in enumerate(zip(changed["item"].tolist(), lengths, strict=True)):
                frames_of[row] = frames[place, :length].clone()
    sequences = RaggedTensors([frames_of[row] for row in rows.tolist()], {"label": labels[rows]})
    buckets = replace(config.buckets(), multiple=8)  # so that batches of different copies have shapes in common
    return RaggedResident(sequences, buckets=buckets, device=batches.device, tier=config.tier, seed=seed)

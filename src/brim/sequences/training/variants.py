"""Augmentation made once: K changed copies of the training items in memory, used in turn, one each epoch.

It trades memory and variety for time where augmentation is dear; on a GPU it is not.
"""

# Axes: K copies, B sequences of a batch, T frames, D features

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from torch import Tensor

from brim.engine.device import stream
from brim.engine.rows import Epoch, RaggedResident, RaggedTensors
from brim.engine.training import BatchSource, Transform
from brim.sequences.training.data import Source
from brim.sequences.training.phases import Job


@contextmanager
def with_variants(job: Job, source: Source, change: Transform | None) -> Iterator[tuple[Source, Transform | None]]:
    """What a phase trains on, and what it does to a batch: as given, or copies changed now and nothing later."""
    if not job.config.variants or change is None:
        yield source, change
        return
    with ExitStack() as stack:
        made = [_make(job, number, change) for number in range(job.config.variants)]
        yield Variants([stack.enter_context(copy) for copy in made]), None


class Variants(BatchSource):
    """Copies of the same items as one source: epoch e has the batches of copy e mod K."""

    def __init__(self, copies: list[RaggedResident]) -> None:
        """Store; all have the same number of items in batches of one size."""
        self._copies = copies
        first = copies[0]
        self.num_items, self.num_batches, self.batch_size = first.num_items, first.num_batches, first.batch_size
        self.padding_share = sum(copy.padding_share for copy in copies) / len(copies)

    @property
    def tier(self) -> str:
        return self._copies[0].tier

    def epoch(self, number: int, start_batch: int = 0) -> Epoch:
        """Batches of an epoch, from one of them on; "item" counts the training items."""
        return self._copies[number % len(self._copies)].epoch(number, start_batch)


def _make(job: Job, number: int, change: Transform) -> RaggedResident:
    """One changed copy of the training items, a function of the seed and its number."""
    rng = stream(job.config.seed, "variants", number, device=job.device)
    found: dict[int, Tensor] = {}
    with closing(job.batches.view(job.split.train, shuffle=False).epoch(0)) as batches:  # type: ignore[type-var]
        for batch in batches:
            changed = change(batch, rng) or batch
            frames, lengths = changed["frames"].cpu(), changed["length"].tolist()
            for place, (row, length) in enumerate(zip(changed["item"].tolist(), lengths, strict=True)):
                found[row] = frames[place, :length].clone()
    rows = job.split.train
    sequences = RaggedTensors([found[row] for row in rows.tolist()], {"label": job.data.labels[rows]})
    seed = job.seed("variants", number, "order")
    buckets = replace(job.config.buckets(), multiple=8)  # so that batches of different copies have shapes in common
    return RaggedResident(sequences, buckets=buckets, device=job.device, tier=job.config.tier, seed=seed)

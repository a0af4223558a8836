"""Batches of one epoch, counted, so that one which would end early raises; and epochs in place of a DataLoader."""

import itertools
import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from brim.engine.rows.layout import Batch
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.engine.rows.resident import Resident


class Epoch(Iterator[Batch]):
    """Batches of one epoch; ends after the number it promised or with an exception, never silently early."""

    def __init__(self, batches: Generator[Batch], num_batches: int) -> None:
        """Store; nothing is gathered before the first batch is asked for."""
        self._batches = batches
        self._left = num_batches
        self._cut = ""

    def __next__(self) -> Batch:
        """Next batch; its tensors stay as they are for as long as the caller keeps them, unless out was given."""
        if self._cut and self._left:
            raise RuntimeError(f"epoch ended {self._left} batches early: {self._cut}")
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._left:
                self._cut = "no more batches came"
                raise RuntimeError(f"epoch ended {self._left} batches early; results are missing") from None
            raise
        except BaseException as failure:
            self._cut = f"{type(failure).__name__}: {failure}"
            raise
        self._left -= 1
        return batch

    def __len__(self) -> int:
        """Batches left."""
        return self._left

    def cut(self, why: str) -> None:
        """Stop the threads of this epoch; asking it for more batches raises."""
        self._cut = self._cut or why
        self._batches.close()

    def close(self) -> None:
        """Stop the threads of this epoch."""
        self.cut("it was closed")


class OpenEpochs:
    """The epochs of one source that someone still holds."""

    def __init__(self) -> None:
        """None yet."""
        self._all: weakref.WeakSet[Epoch] = weakref.WeakSet()

    def begin(self, batches: Generator[Batch], start_batch: int, num_batches: int, *, alone: str = "") -> Epoch:
        """An epoch of num_batches from start_batch on; alone is why no other can go on beside it."""
        if not 0 <= start_batch <= num_batches:
            raise ConfigError(f"start_batch={start_batch} must be from 0 to {num_batches}, the batches of an epoch")
        if alone:
            self.cut(alone)
        epoch = Epoch(batches, num_batches - start_batch)
        self._all.add(epoch)
        return epoch

    def cut(self, why: str) -> None:
        """End all of them."""
        for epoch in list(self._all):
            epoch.cut(why)


class ResidentLoader:
    """A Resident where a PyTorch or Lightning loop expects a DataLoader: every iteration is the next epoch."""

    def __init__(self, resident: "Resident", epochs: Iterator[int]) -> None:
        """Store; epochs gives the number of each epoch."""
        self.dataset = resident
        self.batch_size = resident.batch_size
        self.drop_last = resident.drop_last
        self._epochs = epochs

    def __iter__(self) -> Iterator[Batch]:
        """Batches of the next epoch."""
        return self.dataset.epoch(next(self._epochs))

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.dataset.num_batches


def as_dataloader(resident: "Resident", epoch_counter: Iterator[int] | int = 0) -> ResidentLoader:
    """Adapter for loops that want a DataLoader; epoch_counter is the first epoch, or an iterator of their numbers."""
    counter = itertools.count(epoch_counter) if isinstance(epoch_counter, int) else epoch_counter
    return ResidentLoader(resident, counter)

"""The contract between the trainer and the data: batches on the device, in an order fixed by (seed, epoch)."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Protocol

from torch import Tensor

from brim.engine.training.rank_share import Share

Batch = dict[str, Tensor]


class StepInputs(Protocol):
    """Inputs of captured steps, which a source may write batches into to save a copy."""

    def inputs(self, num_items: int) -> Batch | None:
        """Inputs for batches of that many items, once a step for them is captured."""

    def inputs_with(self, name: str, shape: tuple[int, ...]) -> Batch | None:
        """Inputs for batches whose field of that name has that shape, once a step for them is captured."""


class BatchSource(ABC):
    """Batches that the trainer trains on. A source implements `epoch`; the rest has defaults."""

    num_items: int
    num_batches: int  # of every epoch
    batch_size: int  # items of the largest batch
    copy_s: float = 0.0  # seconds this source has waited for copies to the device, if it measures them
    padding_share: float = 0.0  # share of the values in an epoch's batches that is padding
    divides_batches: bool = False  # with several ranks each gets its part of every batch, as `share` describes

    @property
    def tier(self) -> str:
        """Where the data is held; appears in the report."""
        return "custom"

    @abstractmethod
    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from start_batch on."""

    def epoch_into(self, number: int, start_batch: int, step: StepInputs) -> Generator[Batch]:
        """As epoch, but a batch may be written into the step's inputs and yielded as that same dict."""
        yield from self.epoch(number, start_batch)

    def share(self, epoch: int, batch: int) -> Share | None:
        """The items of a batch that this rank has; None: all of them."""
        return None

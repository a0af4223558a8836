"""The contract between the trainer and the data: batches on the device, in an order fixed by (seed, epoch)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch import Tensor

from brim.engine.training.rank_share import Share

Batch = dict[str, Tensor]


# (field, shape) → inputs of the captured step for batches whose field has that shape, or None: saves a copy
InputsFor = Callable[[str, tuple[int, ...]], Batch | None]


class Fetcher(ABC):
    """Gathers full batches on the device into two inputs by turns, so that a captured step can fetch the next one.

    What is fetched next is counted on the device: the host begins an epoch, and has nothing to hand over after that.
    """

    inputs: tuple[Batch, Batch]

    @abstractmethod
    def fetch(self, turn: int) -> None:
        """Gather the next full batch into inputs[turn]; nothing in it needs the host, so it can be captured."""

    @abstractmethod
    def epoch(self, number: int, start_batch: int) -> Generator[Batch]:
        """The batches of an epoch from start_batch on, if whoever trains on inputs[turn] calls fetch(1 - turn).

        Full batches are the inputs by turns, beginning with the first; a short last batch is one of its own.
        """


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

    @property
    def opens_ahead(self) -> bool:
        """Whether the next epoch may be opened before the model is evaluated on other data."""
        return False

    @abstractmethod
    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from start_batch on."""

    def epoch_into(self, number: int, start_batch: int, inputs: InputsFor) -> Generator[Batch]:
        """As epoch, but a batch may be written into the inputs of a captured step and yielded as that same dict."""
        yield from self.epoch(number, start_batch)

    def fetcher(self) -> Fetcher | None:
        """A new Fetcher of these batches; None if a captured step cannot gather them."""
        return None

    def as_given(self, batch: Batch) -> Any:
        """A batch as the loss gets it: the form in which the data was given, by default the dict itself."""
        return batch

    def share(self, epoch: int, batch: int) -> Share | None:
        """The items of a batch that this rank has; None: all of them."""
        return None

"""A torch DataLoader, or anything that iterates over batches and has a length, as a source of batches.

The order of an epoch is a function of (seed, epoch) if it comes from torch's random numbers, as DataLoader's own does:
a run over it then resumes exactly. Batches before the point of a resumed epoch are read and dropped.
"""

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.engine.rows import Form, as_given
from brim.engine.training import Batch, BatchSource
from brim.errors import ConfigError, DatasetError, with_article

_HOST = torch.device("cpu")


class LoaderSource(BatchSource):
    """Batches of a loader, copied to the device."""

    def __init__(self, loader: Any, device: torch.device, seed: int = 0) -> None:
        """Read the lengths; no batch yet."""
        self.loader, self.device, self.seed = loader, device, seed
        self.form: Form = "dict"
        name = type(loader).__name__
        try:
            self.num_batches = len(loader)
        except (TypeError, NotImplementedError) as failure:
            raise ConfigError(
                f"the {name} has no length, so an epoch has no end", hint="read a map-style dataset, or give its rows"
            ) from failure
        self.batch_size = int(
            getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 1) or 1
        )
        try:
            num_items = len(loader.dataset)
        except (TypeError, AttributeError, NotImplementedError):
            num_items = self.num_batches * self.batch_size
        self.num_items = min(num_items, self.num_batches * self.batch_size) if self.batch_size > 1 else num_items
        if self.num_batches < 1:
            raise DatasetError(
                f"the {name} has no batches; nothing to train on", hint="check drop_last and the dataset"
            )

    @property
    def tier(self) -> str:
        return "loader"

    def as_given(self, batch: Batch) -> Any:
        return as_given(batch, self.form)

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Any]:
        for batch in self.epoch_into(number, start_batch, lambda name, shape: None):
            yield self.as_given(batch)

    def epoch_into(self, number: int, start_batch: int, inputs: Any) -> Generator[Batch]:
        for place in ("sampler", "batch_sampler"):
            if callable(advance := getattr(getattr(self.loader, place, None), "set_epoch", None)):
                advance(number)
        self._seed(number, 0)
        batches = iter(self.loader)
        for index in range(self.num_batches):
            self._seed(number, index)
            try:
                batch = next(batches)
            except StopIteration:
                return
            if index >= start_batch:
                yield self._to_device(batch)

    def _seed(self, epoch: int, batch: int) -> None:
        """Set the streams from which loader and dataset draw; the step sets torch's own again."""
        value = stream(self.seed, "loader", epoch, batch, device=_HOST).initial_seed()
        torch.default_generator.manual_seed(value)
        if batch == 0 and isinstance(own := getattr(self.loader, "generator", None), torch.Generator):
            own.manual_seed(value)

    def _to_device(self, batch: Any) -> Batch:
        if isinstance(batch, Mapping):
            self.form, parts = "dict", dict(batch)
        elif isinstance(batch, tuple | list):
            self.form, parts = "tuple", {str(place): part for place, part in enumerate(batch)}
        else:
            self.form, parts = "single", {"0": batch}
        for name, part in parts.items():
            if not isinstance(part, Tensor):
                raise DatasetError(
                    f'"{name}" of a batch is {with_article(part)}, not a tensor',
                    hint="collate into tensors, in a flat dict or tuple",
                )
        return {name: part.to(self.device, non_blocking=True) for name, part in parts.items()}

"""What a packed corpus and a folder of .npy files have in common: a table of sequences, and reading one of them."""

# Axes: n sequences, T frames, D features

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.errors import ConfigError

CountProgress = Callable[[int, int], None]  # (done, total)


class Sequences(ABC):
    """Sequences on disk. Sent to another process, it takes its table along and opens its files again there."""

    path: Path
    ids: tuple[str, ...]  # paths below the folder of .npy files
    lengths: Tensor  # (n,) int64, frames
    labels: Tensor  # (n,) int64, number of the class, -1 without a label
    classes: tuple[str, ...]  # names by number
    split: tuple[str, ...]  # of each sequence: "train", "test" or ""
    dim: int  # features of a frame
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.ids)

    @property
    @abstractmethod
    def identity(self) -> dict[str, str | None]:
        """Digests by which a run recognises its data."""

    @abstractmethod
    def read_item(self, index: int, out: Tensor) -> None:
        """Fill out, (T, D) of any float dtype on the host, with one sequence."""

    @abstractmethod
    def verify(self, progress: CountProgress | None = None) -> None:
        """Read everything once and raise if it is damaged, or not what it was when it was opened."""

    def is_same_data(self, known: Any) -> bool:
        """Whether a run that stored this identity was trained on these sequences, packed in whatever way.

        One equal digest is enough: taking training items for new ones would be worse than the reverse.
        """
        return isinstance(known, dict) and any(
            value is not None and known.get(name) == value for name, value in self.identity.items()
        )

    def table_digest(self) -> str:
        """Digest of ids, lengths, class names and split."""
        names = [self.classes[number] if number >= 0 else "" for number in self.labels.tolist()]
        return digest([self.ids, self.lengths.tolist(), names, self.split])

    def rows(self, chosen: Sequence[int] | Tensor | None) -> Tensor:
        """The numbers of sequences as (…,) int64, checked; None: all."""
        if chosen is None:
            return torch.arange(len(self))
        index = torch.as_tensor(chosen, dtype=torch.int64).reshape(-1)
        if not len(index) or int(index.min()) < 0 or int(index.max()) >= len(self):
            raise ConfigError(f"rows of {self.path} must be one or more numbers from 0 to {len(self) - 1}")
        return index


def digest(values: Sequence[Any]) -> str:
    """SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(values, ensure_ascii=False).encode()).hexdigest()

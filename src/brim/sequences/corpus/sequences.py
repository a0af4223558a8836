"""What a packed corpus and a folder of .npy files have in common: a table of sequences, and reading one of them."""

# Axes: n sequences, T frames, D features

import copy
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from brim.errors import ConfigError, DatasetError
from brim.sequences.corpus.labels import LABEL, number_classes

MIN_NUMBERS = 10  # different labels with decimals, from which they are taken for numbers to predict

LabelTask = Literal["auto", "classification", "regression"]
CountProgress = Callable[[int, int], None]  # (done, total)


class Sequences(ABC):
    """Sequences on disk. Sent to another process, it takes its table along and opens its files again there."""

    path: Path
    ids: tuple[str, ...]  # paths below the folder of .npy files
    lengths: Tensor  # (n,) int64, frames
    labels: Tensor  # (n,) int64, number of the class, -1 without a label
    classes: tuple[str, ...]  # names by number
    split: tuple[str, ...]  # of each sequence: "train", "validation", "test" or ""
    columns: dict[str, tuple[str, ...]]  # what else labels.csv says of each sequence, by column: groups, other labels
    label_column: str = LABEL  # name of the column that labels are from
    targets: Tensor | None = None  # (n,) float64, numbers to predict, NaN for none; then classes is the column's name
    dim: int  # features of a frame; of L layers, those of all, one layer after the other
    layers: int = 1  # L: a network learns their weights
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
        return digest([self.ids, self.lengths.tolist(), self.label_names(), self.split])

    def label_names(self) -> list[str]:
        """The label of each sequence as it was written, empty without one."""
        if self.targets is not None:
            return ["" if math.isnan(value) else repr(value) for value in self.targets.tolist()]
        return [self.classes[number] if number >= 0 else "" for number in self.labels.tolist()]

    def column(self, name: str, purpose: str) -> tuple[str, ...]:
        """A column of labels.csv; purpose is the setting that names it."""
        name = name.lower()  # as they are stored
        if name == self.label_column and any(names := self.label_names()):
            return tuple(names)
        if name not in self.columns:
            known = ", ".join(sorted(self.columns)) or "none besides the label"
            raise DatasetError(
                f"{self.path} has no column {name!r}; its columns: {known}",
                field=purpose,
                hint="add it to labels.csv, and pack again",
            )
        return self.columns[name]

    def with_labels(self, column: str | None = None, task: LabelTask = "auto") -> Self:
        """The same sequences, with labels from another column, or with labels that are numbers to predict."""
        column = None if column is None else column.lower()
        names = self.label_names() if column is None else list(self.column(column, "label"))
        values = [_number(name) for name in names]
        is_number = task == "regression" or (task == "auto" and _are_numbers(values))
        if not is_number and self.targets is None and column in (None, self.label_column):
            return self
        labelled = self._copy()
        if column not in (None, self.label_column):
            own = {self.label_column: tuple(self.label_names())} if self.label_column else {}
            labelled.columns = {**self.columns, **own}
            labelled.columns.pop(str(column))
            labelled.label_column = str(column)
        if is_number:
            for name, value, sequence in zip(names, values, self.ids, strict=True):
                if name and (value is None or not math.isfinite(value)):
                    raise DatasetError(
                        f"{self.path}: {sequence} has the label {name!r}, regression needs a number",
                        field="task",
                        hint="correct it, or set {task} to classification",
                    )
            labelled.targets = torch.tensor([math.nan if value is None else value for value in values]).double()
            labelled.classes = (labelled.label_column,)
            labels = torch.where(labelled.targets.isnan(), -1, 0)
        else:
            labelled.targets = None
            labelled.classes, numbers = number_classes(names)
            labels = torch.tensor(numbers)
        labelled._set_labels(labels)
        return labelled

    def with_split(self, split: Sequence[str]) -> Self:
        """The same sequences, divided in another way."""
        divided = self._copy()
        divided.split = tuple(split)
        return divided

    def _copy(self) -> Self:
        twin = copy.copy(self)
        twin.__dict__.pop("identity", None)  # cached
        return twin

    def _set_labels(self, labels: Tensor) -> None:
        self.labels = labels

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


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _are_numbers(values: Sequence[float | None]) -> bool:
    """Whether labels are measured numbers, not names of classes that happen to be digits."""
    known = {value for value in values if value is not None}
    return len(known) >= MIN_NUMBERS and None not in values and any(value != round(value) for value in known)

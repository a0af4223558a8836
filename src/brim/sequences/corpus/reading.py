"""Sequences by their number, one at a time, in any process: a folder of .npy files as it is, or a packed corpus.

Both are sent to other processes as little more than a path.
"""

# Axes: n sequences, T frames, D features

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from brim.engine.storage import MANIFEST
from brim.errors import DatasetError
from brim.sequences.corpus.folder import survey
from brim.sequences.corpus.labels import number_classes
from brim.sequences.corpus.packed import Corpus

_FLOATS = {"float16": torch.float16, "float32": torch.float32}


class Readable(Protocol):
    """What a DataLoader reads."""

    path: Path
    ids: tuple[str, ...]
    lengths: Tensor  # (n,) int64
    labels: Tensor  # (n,) int64, -1 without one
    classes: tuple[str, ...]
    split: tuple[str, ...]
    dim: int
    dtype: torch.dtype

    def read_item(self, index: int, out: Tensor) -> None:
        """Fill out, (T, D) of any float dtype on the host, with one sequence."""


def open_sequences(path: Path | str) -> "Readable":
    """A packed corpus, or a folder of .npy files."""
    return PackedSequences(path) if (Path(path) / MANIFEST).is_file() else SequenceFolder(path)


class SequenceFolder:
    """A folder of .npy files that is not packed; every header is read here, and checked as packing checks it."""

    def __init__(self, path: Path | str, labels: Path | str | None = None) -> None:
        self.path = Path(path)
        found = survey(self.path, labels)
        known = [found.labels.of[file.id] for file in found.files]
        self.ids = tuple(file.id for file in found.files)
        self.lengths = torch.tensor([file.length for file in found.files])
        self.classes, numbers = number_classes([label.name for label in known])
        self.labels = torch.tensor(numbers)
        self.split = tuple(label.split for label in known)
        self.dim, self.fingerprint = found.dim, found.fingerprint
        kinds = {file.dtype.newbyteorder("=").name for file in found.files}
        # one dtype for all batches: that of the files where they agree on one that training uses
        self.dtype = _FLOATS.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32

    def __len__(self) -> int:
        """Sequences."""
        return len(self.ids)

    def read_item(self, index: int, out: Tensor) -> None:
        """Load one file; one that is not what its header said, or holds NaN or Inf, is an error that names it."""
        file = self.path / self.ids[index]
        try:
            frames: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as failure:
            reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
            raise DatasetError(f"{file} cannot be read: {reason}; mend or remove it, and start again") from failure
        if frames.shape != tuple(out.shape):
            raise DatasetError(
                f"{file} has shape {list(frames.shape)}, it had {list(out.shape)} when the run began; start again"
            )
        with np.errstate(over="ignore"):  # what is too large becomes Inf, which is refused below
            np.copyto(out.numpy(), frames, casting="unsafe")  # integers and float64 become the dtype of the batches
        low, high = torch.aminmax(out)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            frame = int((~torch.isfinite(out)).any(1).int().argmax())
            raise DatasetError(
                f"{file}: frame {frame} holds NaN, Inf or what {str(out.dtype)[6:]} cannot; mend or remove it"
            )


class PackedSequences:
    """A packed corpus, mapped by each process for itself; its frames were checked when it was packed."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._corpus: Corpus | None = Corpus.open(self.path)
        corpus = self._corpus
        self.ids, self.lengths, self.labels = corpus.ids, corpus.lengths, corpus.labels
        self.classes, self.split, self.dim, self.dtype = corpus.classes, corpus.split, corpus.dim, corpus.dtype

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps: they belong to this process."""
        return self.__dict__ | {"_corpus": None}

    def __len__(self) -> int:
        """Sequences."""
        return len(self.ids)

    def read_item(self, index: int, out: Tensor) -> None:
        """Copy one sequence out of the maps."""
        if self._corpus is None:
            self._corpus = Corpus.open(self.path)
        frames = self._corpus.sequence(index)
        np.copyto(out.numpy(), frames.numpy(), casting="same_kind")

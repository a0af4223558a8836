"""A folder of .npy sequences that is read without packing it."""

# Axes: T frames, D features

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import worker_count
from brim.engine.rows import load_npy
from brim.errors import DatasetError
from brim.sequences.corpus.labels import merge_columns, number_classes
from brim.sequences.corpus.npy import NpyFile
from brim.sequences.corpus.sequences import CountProgress, Sequences
from brim.sequences.corpus.source import STORED
from brim.sequences.corpus.survey import survey

_REPAIR = "repair or remove the file, then start again"


class SequenceFolder(Sequences):
    """A folder of .npy files that is not packed; every header is read and checked when it is opened."""

    def __init__(self, path: Path | str, labels: Path | str | None = None) -> None:
        self.path = Path(path)
        folder = survey(self.path, labels)
        self._files = [file for file in folder.files if isinstance(file, NpyFile)]
        if len(self._files) < len(folder.files):
            raise DatasetError(f"{self.path} holds no .npy files", hint="pack it with {sequence pack}")
        known = [folder.labels.of[file.id] for file in folder.files]
        self.ids = tuple(file.id for file in folder.files)
        self.lengths = torch.tensor([file.length for file in folder.files])
        self.classes, numbers = number_classes([label.name for label in known])
        self.labels = torch.tensor(numbers)
        self.split = tuple(label.split for label in known)
        self.columns, self.label_column = merge_columns(known), folder.labels.column
        self.dim, self.fingerprint = folder.dim, folder.fingerprint
        self.layers, self.notes = folder.layers, folder.notes
        kinds = {file.dtype.newbyteorder("=").name for file in self._files}
        # one dtype for all batches: that of the files if they agree on one that training uses
        self.dtype = STORED.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32

    @cached_property
    def identity(self) -> dict[str, str | None]:
        return {
            "content_sha256": None,
            "source_sha256": self.fingerprint["sha256"],
            "items_sha256": self.table_digest(),
        }

    def read_item(self, index: int, out: Tensor) -> None:
        """Load one file; one that differs from its header, or holds NaN or Inf, is an error that names it."""
        file = self.path / self.ids[index]
        try:
            frames = load_npy(file)
        except (OSError, ValueError, EOFError) as failure:
            reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
            raise DatasetError(f"{file} cannot be read: {reason}", hint=_REPAIR) from failure
        shape = frames.shape
        if frames.ndim == 3:  # of layers, side by side as when packed
            frames = frames.transpose(1, 0, 2).reshape(frames.shape[1], -1)
        elif self._files[index].is_transposed:
            frames = frames.T
        if frames.shape != tuple(out.shape):
            raise DatasetError(f"{file} has shape {list(shape)}, it had another when it was opened; start again")
        with np.errstate(over="ignore"):  # too large a value becomes Inf, which is rejected below
            np.copyto(out.numpy(), frames, casting="unsafe")  # integers and float64 become the dtype of the batches
        low, high = torch.aminmax(out)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            frame = int((~torch.isfinite(out)).any(1).int().argmax())
            raise DatasetError(
                f"{file}: frame {frame} holds NaN, Inf or a value beyond {str(out.dtype)[6:]}", hint=_REPAIR
            )

    def verify(self, progress: CountProgress | None = None) -> None:
        """Read every file, looking for frames that are not finite."""

        def check(index: int) -> None:
            self.read_item(index, torch.empty(int(self.lengths[index]), self.dim, dtype=self.dtype))

        with ThreadPoolExecutor(worker_count()) as pool:
            for done, _ in enumerate(pool.map(check, range(len(self))), 1):
                if progress is not None:
                    progress(done, len(self))

"""What the workers of a DataLoader do: make whole padded batches of the sequences they are told.

Everything here is sent to, or imported by, other processes.

Axes: B sequences, T frames, D features.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from brim.engine.device import stream
from brim.engine.rows import HOST
from brim.errors import BrimError, DatasetError
from brim.sequences.config import Augmentation
from brim.sequences.corpus.reading import Readable
from brim.sequences.training.augment import augment

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A batch to make: how long it is padded, and which sequences."""

    epoch: int
    length: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker answers instead of a batch: raised there, it would arrive with a traceback for a message."""

    error: BrimError


class Tasks:
    """What the workers are to make next; a DataLoader asks anew at every epoch."""

    def __init__(self) -> None:
        self.all: list[Task] = []

    def __iter__(self) -> Iterator[Task]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


class Batches(Dataset[Any]):
    """Makes whole padded batches; lives in the workers."""

    def __init__(
        self, sequences: Readable, dtype: torch.dtype, columns: Batch, augmentation: Augmentation | None, seed: int
    ) -> None:
        self.sequences, self.dtype, self.columns = sequences, dtype, columns
        self.augmentation, self.seed = augmentation, seed

    def __getitem__(self, task: Task) -> Batch | Failure:
        """A batch, or what is wrong with one of its files."""
        try:
            return self._make(task)
        except BrimError as failure:
            return Failure(failure)

    def _make(self, task: Task) -> Batch:
        frames = torch.zeros(len(task.rows), task.length, self.sequences.dim, dtype=self.dtype)
        length = torch.empty(len(task.rows), dtype=torch.int64)
        for place, row in enumerate(task.rows):
            length[place] = self._fill(task.epoch, row, frames[place])
        item = torch.tensor(task.rows)
        return {"frames": frames, "length": length, "item": item} | {
            name: column[item] for name, column in self.columns.items()
        }

    def _fill(self, epoch: int, row: int, out: Tensor) -> int:
        """One sequence at the front of out; returns its frames after augmentation."""
        num = int(self.sequences.lengths[row])
        try:
            self.sequences.read_item(row, out[:num])
            if self.augmentation is None:
                return num
            rng = stream(self.seed, "augment", epoch, row, device=HOST)
            return int(augment(out[None, :num], torch.tensor([num]), rng, self.augmentation))
        except BrimError:
            raise
        except Exception as failure:  # whatever it is, it has to say which file it was
            name = self.sequences.path / self.sequences.ids[row]
            raise DatasetError(f"{name}: {type(failure).__name__}: {failure}; mend or remove it") from failure


def worker_context() -> BaseContext:
    """How workers are started; see dataloader.py."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])  # once, in the server; not in each worker
    return context


def as_it_is(batch: Any) -> Any:
    """The batch; it was put together where it was read."""
    return batch


def leave_with_parent(number: int) -> None:
    """End this worker when the training process is gone, however it went, and not by a Ctrl-C meant for that one.

    torch's own watch looks for another parent. A worker's is the fork server, which in turn lives as long as a worker
    does: after a SIGKILL of the training process both would stay for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers too
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), name=f"brim-watch-{number}", daemon=True).start()


def _leave_after(parent: Any) -> None:
    parent.join()
    os._exit(1)  # not sys.exit: that would end this thread alone

"""The usual way to feed a GPU: a torch DataLoader whose workers read, augment and pad; for data that is not packed.

It is the baseline that packed data is measured against, so it is as fast as such a loader gets: a worker reads straight
into the padded batch it hands over, and nothing is copied twice. As every batch source its order is fixed by
(seed, epoch), and so is each item's augmentation, whoever reads it.

Workers come from a fork server. A plain fork would copy this process in whatever state its threads and CUDA are, which
may hang the copy; a fresh start of each would import torch again, some seconds for each worker and epoch. The server
does so once, has neither CUDA nor threads, and ends with this process. As with any fresh start, a script that uses
workers needs the usual `if __name__ == "__main__":`.

Axes: B sequences, T frames, D features.
"""

import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from brim.engine.device import stream, worker_count
from brim.engine.rows import HOST, Bucketed, Buckets, Epoch, OpenEpochs, check_columns, part_of
from brim.engine.training import BatchSource, Ranks, Share
from brim.errors import ConfigError, DatasetError
from brim.sequences.config import LoaderConfig
from brim.sequences.corpus.reading import Readable
from brim.sequences.training.loader_workers import (
    Batch,
    Batches,
    Failure,
    Task,
    Tasks,
    as_it_is,
    leave_with_parent,
    worker_context,
)

log = logging.getLogger("brim")

_SHARED = "/dev/shm"
_SHARED_SHARE = 0.8  # of shared memory that batches on their way may fill


class SequenceLoader(BatchSource):
    """A batch source of engine.trainer; inside its with block epoch() gives batches on the device."""

    divides_batches = True
    tier = "loader"  # as the trainer reports it

    def __init__(
        self,
        sequences: Readable,
        config: LoaderConfig,
        *,
        device: torch.device,
        seed: int = 0,
        rows: Sequence[int] | Tensor | None = None,
        dtype: torch.dtype | None = None,
        shuffle: bool = True,
        fields: Mapping[str, Tensor] | None = None,
        ranks: Ranks | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Store and check; workers start with the first epoch.

        rows     numbers of sequences, by default all
        dtype    of the frames in batches; by default that of the files
        shuffle  False: always the same order, for evaluation
        fields   columns with a row for each of all sequences, instead of their labels
        ranks    among whom each batch is divided
        own      (n,) bool: which of all sequences this rank reads
        """
        self._ranks = ranks if ranks is not None and not ranks.alone else None
        self._own = None if self._ranks is None else own
        self.sequences, self.device, self.seed, self.shuffle = sequences, device, seed, shuffle
        self.rows = _chosen(sequences, rows)
        self.dtype = dtype or sequences.dtype
        self.lengths = sequences.lengths[self.rows]
        self.num_items = len(self.rows)
        self._buckets = self._make_buckets(config)
        self.batch_size = self._buckets.batch_size if self._buckets else min(config.batch_size, self.num_items)
        self.num_batches = self._buckets.num_batches if self._buckets else -(-self.num_items // config.batch_size)
        self.config = self._fitted(config)
        self.copy_s = 0.0  # waited for copies, where they are not non_blocking
        columns = check_columns({"label": sequences.labels} if fields is None else fields, len(sequences.ids))
        self._made = Batches(sequences, self.dtype, columns, config.augmentation, seed)
        self._tasks = Tasks()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        self._opened = OpenEpochs()
        self.padding_share = self._buckets.padding_share if self._buckets else self._unsorted_padding()

    def __enter__(self) -> Self:
        """Make the DataLoader."""
        if self._loader is None:
            self._loader = DataLoader(self._made, batch_size=None, sampler=self._tasks, **self._options())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the epochs under way and all workers."""
        self._opened.cut("its SequenceLoader was closed")
        self._end_workers()
        self._loader = None

    def order(self, epoch: int) -> list[Task]:
        """The batches of an epoch: how long they are padded, and the rows of the sequences in them."""
        if self._buckets:
            return [
                Task(epoch, batch.length, tuple(self.rows[batch.items].tolist()))
                for batch in self._buckets.epoch(epoch)
            ]
        parts = self._unsorted_batches(epoch)
        return [Task(epoch, int(self.lengths[part].max()), tuple(self.rows[part].tolist())) for part in parts]

    def _unsorted_batches(self, epoch: int) -> Sequence[Tensor]:
        line = torch.arange(self.num_items)
        if self.shuffle:
            line = torch.randperm(self.num_items, generator=stream(self.seed, "loader", epoch, device=HOST))
        return torch.split(line, self.config.batch_size)

    def _unsorted_padding(self) -> float:
        """Share of padding in epoch 0 without buckets."""
        padded = sum(int(self.lengths[part].max()) * len(part) for part in self._unsorted_batches(0))
        return 1 - int(self.lengths.sum()) / padded

    def share(self, epoch: int, batch: int) -> Share | None:
        """Which items of a batch are this rank's; None: all of them."""
        if self._ranks is None or self._own is None:
            return None
        rows = torch.tensor(self.order(epoch)[batch].rows)
        return Share(self._ranks, len(rows), self._own[rows].nonzero().flatten())

    def _part(self, task: Task) -> Task:
        if self._own is None:
            return task
        part = part_of(Bucketed(task.length, torch.tensor(task.rows)), self._own, self.sequences.lengths)
        return Task(task.epoch, part.length, tuple(part.items.tolist()))

    def epoch(self, number: int, start_batch: int = 0) -> Epoch:
        """Batches of an epoch from start_batch on, on the device; it ends the epoch before.

        frames  (B, T, D)  zeros behind the end of an item
        length  (B,)       int64  frames of each item, at most T
        item    (B,)       int64  its row in the sequences
        …       (B, …)     label, or the fields given
        """
        return self._open(number, start_batch, on_host=False)

    def host_epoch(self, number: int, start_batch: int = 0) -> Epoch:
        """The same batches where the workers left them, for loops that copy by themselves."""
        return self._open(number, start_batch, on_host=True)

    def to_device(self, batch: Batch) -> Batch:
        """A batch of host_epoch on the device."""
        if self.config.non_blocking:
            return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        began_s = time.perf_counter()
        moved = {name: tensor.to(self.device) for name, tensor in batch.items()}
        self.copy_s += time.perf_counter() - began_s
        return moved

    # Epochs

    def _open(self, number: int, start_batch: int, *, on_host: bool) -> Epoch:
        if self._loader is None:
            raise RuntimeError("SequenceLoader has its workers inside its with block only")
        batches, alone = self._batches(number, start_batch, on_host), "another epoch began"  # the workers are the same
        return self._opened.begin(batches, start_batch, self.num_batches, alone=alone)

    def _batches(self, number: int, start_batch: int, on_host: bool) -> Generator[Batch]:
        tasks = [self._part(task) for task in self.order(number)[start_batch:]]
        if not tasks:
            return
        batches = self._start(tasks)
        try:
            for task in tasks:
                batch = self._next(batches, task)
                yield batch if on_host else self.to_device(batch)
        finally:
            if not self.config.persistent_workers:
                self._end_workers()

    def _start(self, tasks: list[Task]) -> Iterator[Any]:
        assert self._loader is not None
        self._tasks.all = tasks
        try:
            self._iterator = iter(self._loader)
        except (RuntimeError, OSError, EOFError) as failure:
            raise self._ended(failure, tasks[0]) from failure
        batches: Iterator[Any] = self._iterator
        return batches

    def _next(self, batches: Iterator[Any], task: Task) -> Batch:
        try:
            made = next(batches)
        except (RuntimeError, OSError, EOFError) as failure:  # a worker is gone
            raise self._ended(failure, task) from failure
        if isinstance(made, Failure):
            raise made.error
        batch: Batch = made
        return batch

    def _ended(self, failure: BaseException, task: Task) -> DatasetError:
        self._end_workers()
        said = (str(failure).splitlines() or [type(failure).__name__])[0].rstrip(".")
        reason = said if "worker" in said else f"a DataLoader worker ended ({said})"
        file, more = self.sequences.path / self.sequences.ids[task.rows[0]], len(task.rows) - 1
        return DatasetError(
            f"{file} and {more} more were not read: {reason}; use fewer num_workers or a smaller batch_size if memory "
            'is short, num_workers=0 to see more, and if __name__ == "__main__": in a script'
        )

    def _end_workers(self) -> None:
        """End the workers now; torch would do so when the last reference is gone, and a traceback may hold one."""
        iterator, self._iterator = self._iterator, None
        if self._loader is not None:
            self._loader._iterator = None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

    # Settings

    def _make_buckets(self, config: LoaderConfig) -> Buckets | None:
        return Buckets(self.lengths, config.buckets, seed=self.seed, shuffle=self.shuffle) if config.buckets else None

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_workers": self.config.num_workers,
            "pin_memory": self.config.pin_memory and self.device.type == "cuda",
            "collate_fn": as_it_is,
            "generator": torch.Generator(),  # for its workers' seeds: those of training stay untouched
        }
        if self.config.num_workers:
            options |= {
                "prefetch_factor": self.config.prefetch_factor,
                "persistent_workers": self.config.persistent_workers,
                "multiprocessing_context": worker_context(),
                "worker_init_fn": leave_with_parent,
            }
        return options

    def _fitted(self, config: LoaderConfig) -> LoaderConfig:
        """With no more workers than cores, and no more batches on their way than shared memory holds."""
        cores = worker_count()
        if config.num_workers > cores:
            log.warning("num_workers=%d: there are %d cores, so many are used", config.num_workers, cores)
            config = replace(config, num_workers=cores)
        frames = self._buckets.max_batch_frames if self._buckets else self.batch_size * int(self.lengths.max())
        batch_bytes = frames * self.sequences.dim * self.dtype.itemsize
        fitted = _fit_shared(config, batch_bytes, shared_bytes())
        if fitted != config:
            log.warning(
                "shared memory (%s) is small: num_workers=%d, prefetch_factor=%d instead of %d and %d",
                _SHARED, fitted.num_workers, fitted.prefetch_factor, config.num_workers, config.prefetch_factor,
            )  # fmt: skip
        return fitted if fitted.num_workers else replace(fitted, persistent_workers=False)


def shared_bytes() -> int:
    """Free bytes of the shared memory through which workers hand over batches."""
    with suppress(OSError, AttributeError):
        found = os.statvfs(_SHARED)
        return found.f_bavail * found.f_frsize
    return 2**62


def _fit_shared(config: LoaderConfig, batch_bytes: int, free: int) -> LoaderConfig:
    """Fewer batches ahead, then fewer workers: a worker that writes beyond shared memory is killed without a word."""
    if not config.num_workers:
        return config
    room = int(_SHARED_SHARE * free / max(1, batch_bytes))  # batches, of which each worker has one in the making
    num_workers = min(config.num_workers, room // 2)
    if not num_workers:
        return replace(config, num_workers=0)
    prefetch = min(config.prefetch_factor, room // num_workers - 1)
    return replace(config, num_workers=num_workers, prefetch_factor=prefetch)


def _chosen(sequences: Readable, rows: Sequence[int] | Tensor | None) -> Tensor:
    num = len(sequences.ids)
    if rows is None:
        return torch.arange(num)
    index = torch.as_tensor(rows, dtype=torch.int64).reshape(-1)
    if not len(index) or int(index.min()) < 0 or int(index.max()) >= num:
        raise ConfigError(f"rows of {sequences.path} must be some from 0 to {num - 1}, the sequences there")
    return index

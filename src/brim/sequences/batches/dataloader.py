"""A torch DataLoader whose workers read, augment and pad sequences: for data that is not packed.

It is the baseline that packed data is measured against, so it is as fast as such a loader gets: a worker reads straight
into the padded batch it hands over, and nothing is copied twice. As in every batch source, (seed, epoch) fixes the
order and each item's augmentation, whichever worker reads it.

Workers come from a fork server. A plain fork would copy this process with the state of its threads and CUDA, which may
hang the copy; a fresh process for each worker would import torch again, some seconds for each worker and epoch. The
server does so once, has neither CUDA nor threads, and ends with this process. A script that uses workers needs the
usual `if __name__ == "__main__":`.

Axes: B sequences, T frames, D features.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from brim.engine.device import stream, worker_count
from brim.engine.rows import HOST, Bucketed, Buckets, Epoch, OpenEpochs, check_columns, part_of
from brim.engine.training import Batch, BatchSource, Ranks, Share
from brim.errors import BrimError, DatasetError
from brim.sequences.batches.augmentation import augment
from brim.sequences.config import Augmentation, LoaderConfig
from brim.sequences.corpus import Sequences

log = logging.getLogger("brim")

_SHARED = "/dev/shm"
_SHARED_SHARE = 0.8  # of shared memory that batches in flight may fill


class SequenceLoader(BatchSource):
    """A batch source for the trainer; inside its with block epoch() gives batches on the device."""

    divides_batches = True
    tier = "loader"

    def __init__(
        self,
        sequences: Sequences,
        config: LoaderConfig,
        *,
        device: torch.device,
        seed: int = 0,
        rows: Sequence[int] | Tensor | None = None,  # numbers of sequences; None: all
        dtype: torch.dtype | None = None,  # of the frames in batches; None: that of the files
        shuffle: bool = True,  # False: always the same order, for evaluation
        fields: Mapping[str, Tensor] | None = None,  # columns with one row per sequence, instead of the labels
        ranks: Ranks | None = None,  # which share each batch
        own: Tensor | None = None,  # (n,) bool: the sequences that this rank reads
    ) -> None:
        self._ranks = ranks if ranks is not None and not ranks.alone else None
        self._own = None if self._ranks is None else own
        self.sequences, self.device, self.seed, self.shuffle = sequences, device, seed, shuffle
        self.rows = sequences.rows(rows)
        self.dtype = dtype or sequences.dtype
        self.lengths = sequences.lengths[self.rows]
        self.num_items = len(self.rows)
        self._buckets = config.buckets and Buckets(self.lengths, config.buckets, seed=seed, shuffle=shuffle)
        self.batch_size = self._buckets.batch_size if self._buckets else min(config.batch_size, self.num_items)
        self.num_batches = self._buckets.num_batches if self._buckets else -(-self.num_items // config.batch_size)
        self.config = self._fitted(config)
        self.copy_s = 0.0  # time spent waiting for blocking copies
        columns = check_columns({"label": sequences.labels} if fields is None else fields, len(sequences.ids))
        self._reader = _BatchReader(sequences, self.dtype, columns, config.augmentation, seed)
        self._plans: list[BatchPlan] = []  # the DataLoader's sampler: it iterates over it at every epoch
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        self._opened = OpenEpochs()
        padded = sum(plan.length * len(plan.rows) for plan in self.order(0)) if not self._buckets else 0
        self.padding_share = self._buckets.padding_share if self._buckets else 1 - int(self.lengths.sum()) / padded

    def __enter__(self) -> Self:
        if self._loader is not None:
            return self
        options: dict[str, Any] = {}
        if self.config.num_workers:
            options = {
                "prefetch_factor": self.config.prefetch_factor,
                "persistent_workers": self.config.persistent_workers,
                "multiprocessing_context": _worker_context(),
                "worker_init_fn": _end_with_parent,
            }
        self._loader = DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._plans,
            num_workers=self.config.num_workers,
            pin_memory=self.config.pin_memory and self.device.type == "cuda",
            generator=torch.Generator(),  # for the workers' seeds: the global one belongs to training
            **options,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.cut("its SequenceLoader was closed")
        self._end_workers()
        self._loader = None

    def order(self, epoch: int) -> list["BatchPlan"]:
        """The batches of an epoch: padded lengths and rows."""
        if self._buckets:
            parts = [(batch.length, batch.items) for batch in self._buckets.epoch(epoch)]
        else:
            items = torch.arange(self.num_items)
            if self.shuffle:
                items = torch.randperm(self.num_items, generator=stream(self.seed, "loader", epoch, device=HOST))
            parts = [(int(self.lengths[part].max()), part) for part in torch.split(items, self.config.batch_size)]
        return [BatchPlan(epoch, length, tuple(self.rows[items].tolist())) for length, items in parts]

    def share(self, epoch: int, batch: int) -> Share | None:
        """This rank's items of a batch; None: all of them."""
        if self._ranks is None or self._own is None:
            return None
        rows = torch.tensor(self.order(epoch)[batch].rows)
        return Share(self._ranks, len(rows), self._own[rows].nonzero().flatten())

    def _part(self, plan: "BatchPlan") -> "BatchPlan":
        assert self._own is not None
        part = part_of(Bucketed(plan.length, torch.tensor(plan.rows)), self._own, self.sequences.lengths)
        return BatchPlan(plan.epoch, part.length, tuple(part.items.tolist()))

    def epoch(self, number: int, start_batch: int = 0) -> Epoch:
        """Batches of an epoch from start_batch on, on the device; it ends the previous epoch.

        frames  (B, T, D)  zeros behind the end of an item
        length  (B,)       int64  frames of each item, at most T
        item    (B,)       int64  its row in the sequences
        …       (B, …)     label, or the fields given
        """
        return self._open(number, start_batch, on_host=False)

    def host_epoch(self, number: int, start_batch: int = 0) -> Epoch:
        """The same batches in host memory, for loops that copy them."""
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
            raise RuntimeError("SequenceLoader has workers only inside its with block")
        batches, alone = self._batches(number, start_batch, on_host), "another epoch began"  # epochs share the workers
        return self._opened.begin(batches, start_batch, self.num_batches, alone=alone)

    def _batches(self, number: int, start_batch: int, on_host: bool) -> Generator[Batch]:
        plans = self.order(number)[start_batch:]
        if self._own is not None:
            plans = [self._part(plan) for plan in plans]
        if not plans:
            return
        assert self._loader is not None
        self._plans[:] = plans
        try:
            batches: Iterator[Any] | None = None
            for plan in plans:
                try:
                    if batches is None:
                        batches = self._iterator = iter(self._loader)
                    batch = next(batches)
                except (RuntimeError, OSError, EOFError) as failure:  # a worker is gone
                    raise self._worker_lost(failure, plan) from failure
                if isinstance(batch, BrimError):
                    raise batch
                yield batch if on_host else self.to_device(batch)
        finally:
            if not self.config.persistent_workers:
                self._end_workers()

    def _worker_lost(self, failure: BaseException, plan: "BatchPlan") -> DatasetError:
        self._end_workers()
        first_line = (str(failure).splitlines() or [type(failure).__name__])[0].rstrip(".")
        file, more = self.sequences.path / self.sequences.ids[plan.rows[0]], len(plan.rows) - 1
        return DatasetError(
            f"{file} and {more} more were not read, a DataLoader worker ended: {first_line}",
            code="worker_lost",
            hint="lower {num_workers} or {batch_size} if memory is short, set {num_workers} to 0 to see more, and "
            'guard a script with if __name__ == "__main__":',
        )

    def _end_workers(self) -> None:
        """End the workers now; torch waits for the last reference, which a traceback may hold."""
        iterator, self._iterator = self._iterator, None
        if self._loader is not None:
            self._loader._iterator = None
        if iterator is not None and self.config.num_workers:
            iterator._shutdown_workers()

    # Settings

    def _fitted(self, config: LoaderConfig) -> LoaderConfig:
        """Limit workers to the cores, and batches in flight to what shared memory holds."""
        cores = worker_count()
        if config.num_workers > cores:
            log.warning("num_workers=%d is more than the %d cores; using %d", config.num_workers, cores, cores)
            config = replace(config, num_workers=cores)
        frames = self._buckets.max_batch_frames if self._buckets else self.batch_size * int(self.lengths.max())
        fitted = _fit_shared(config, frames * self.sequences.dim * self.dtype.itemsize, shared_bytes())
        if fitted != config:
            log.warning(
                "shared memory (%s) is small: num_workers=%d, prefetch_factor=%d instead of %d and %d",
                _SHARED, fitted.num_workers, fitted.prefetch_factor, config.num_workers, config.prefetch_factor,
            )  # fmt: skip
        return fitted if fitted.num_workers else replace(fitted, persistent_workers=False)


def shared_bytes() -> int:
    """Free bytes of shared memory, through which workers hand over batches."""
    with suppress(OSError, AttributeError):
        status = os.statvfs(_SHARED)
        return status.f_bavail * status.f_frsize
    return 2**62


def _fit_shared(config: LoaderConfig, batch_bytes: int, free: int) -> LoaderConfig:
    """Fewer batches ahead, then fewer workers: a worker that writes beyond shared memory is killed silently."""
    if not config.num_workers:
        return config
    room = int(_SHARED_SHARE * free / max(1, batch_bytes))  # batches; each worker is making one of them
    num_workers = min(config.num_workers, room // 2)
    if not num_workers:
        return replace(config, num_workers=0)
    prefetch = min(config.prefetch_factor, room // num_workers - 1)
    return replace(config, num_workers=num_workers, prefetch_factor=prefetch)


# In the workers


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A batch to read: its padded length and the rows of its sequences."""

    epoch: int
    length: int
    rows: tuple[int, ...]


class _BatchReader(TorchDataset[Any]):
    """Reads whole padded batches; runs in the workers."""

    def __init__(
        self, sequences: Sequences, dtype: torch.dtype, columns: Batch, augmentation: Augmentation | None, seed: int
    ) -> None:
        self.sequences, self.dtype, self.columns = sequences, dtype, columns
        self.augmentation, self.seed = augmentation, seed

    def __getitem__(self, plan: BatchPlan) -> Batch | BrimError:
        """A batch, or the error: raised here, it would arrive with a traceback as its message."""
        frames = torch.zeros(len(plan.rows), plan.length, self.sequences.dim, dtype=self.dtype)
        item = torch.tensor(plan.rows)
        try:
            length = [self._fill(plan.epoch, row, out) for row, out in zip(plan.rows, frames, strict=True)]
        except BrimError as failure:
            return failure
        columns = {name: column[item] for name, column in self.columns.items()}
        return {"frames": frames, "length": torch.tensor(length), "item": item} | columns

    def _fill(self, epoch: int, row: int, out: Tensor) -> int:
        """Read one sequence to the front of out; returns its frames after augmentation."""
        num = int(self.sequences.lengths[row])
        try:
            self.sequences.read_item(row, out[:num])
            if self.augmentation is None:
                return num
            rng = stream(self.seed, "augment", epoch, row, device=HOST)
            return int(augment(out[None, :num], torch.tensor([num]), rng, self.augmentation))
        except BrimError:
            raise
        except Exception as failure:  # any error has to name the file
            name = self.sequences.path / self.sequences.ids[row]
            raise DatasetError(f"{name}: {type(failure).__name__}: {failure}; repair or remove it") from failure


def _worker_context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])  # once in the server, not in each worker
    return context


def _end_with_parent(number: int) -> None:
    """End this worker when the training process is gone, but not by a Ctrl-C meant for that process.

    torch watches a worker's parent, which is the fork server, and that lives as long as its workers do: after a SIGKILL
    of the training process both would stay forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers too
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)  # sys.exit would end only this thread

        threading.Thread(target=watch, name=f"brim-watch-{number}", daemon=True).start()

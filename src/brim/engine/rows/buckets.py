"""Sequences of variable length → buckets → batches with little padding, in an order fixed by (seed, epoch).

Items are sorted by length, the longest first, and cut into batches; a bucket is a run of neighbouring batches, padded
to its longest item. So every batch but the last is full, no two buckets share a batch, and an epoch has few shapes, the
same in every epoch. Buckets are chosen to minimise padding; of all choices within max_waste the one with the fewest
buckets is taken, because items are shuffled within a bucket and fewer buckets mix more. Padded lengths are multiples
of 8 if that keeps max_waste, else of 4, 2 or 1. Items far longer than the others come in smaller batches: one of a
hundred times the mean length would pad all its neighbours. Nothing here reads, copies or knows a device.

Axes: n items, m cells (consecutive batches of the same padded length).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brim.engine.config import BucketConfig
from brim.engine.device import stream
from brim.engine.rows.order import HOST
from brim.errors import ConfigError, DatasetError

_MAX_CELLS = 512  # the search takes m² steps for each bucket: 512 cells about 30 ms in all, for each multiple
_MULTIPLES = (8, 4, 2, 1)  # a larger multiple gives fewer lengths and better alignment
_MORE_WASTE = 0.01  # waste that a larger multiple may add if none keeps max_waste

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Bucketed:
    """One batch: which items, and how long they are padded."""

    length: int  # frames of each padded item
    items: Tensor  # (B,) int64, positions in the lengths


@dataclass(frozen=True, slots=True)
class _BatchRun:
    """A bucket: a range of the sorted items, cut into batches."""

    length: int  # padded
    size: int  # items of a batch
    start: int  # in the sorted items
    stop: int  # a whole number of batches later, but for the last bucket


@dataclass(frozen=True, slots=True)
class _MaxBatch:
    """How many items of a padded length make a batch."""

    batch_size: int | None  # at most
    max_frames: int  # at most, but for one item that has more

    def __call__(self, length: int) -> int:
        return min(self.batch_size or self.max_frames, max(1, self.max_frames // length))


class Buckets:
    """Batches over items of known lengths; every item once per epoch, batches in random order."""

    def __init__(
        self,
        lengths: Tensor,
        config: BucketConfig,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Choose the edges.

        lengths    (n,)  int64  frames of each item, on the host
        shuffle    False keeps the items of a bucket in their order, the buckets from long to short
        drop_last  leaves out the last batch when it is short: other items in every epoch, but short ones
        """
        frames = _checked(lengths)
        self.config, self.seed, self.shuffle = config, seed, shuffle
        self.num_items = len(frames)
        line = np.argsort(-frames, kind="stable")
        self.multiple, runs = _choose(frames[line], config)
        self.edges = tuple(run.length for run in reversed(runs))
        bucket = np.empty(self.num_items, np.int16)
        bucket[line] = np.repeat(np.arange(len(runs)), [run.stop - run.start for run in runs])
        self._bucket = torch.from_numpy(bucket)  # 0: the longest
        self._spans = [span for run in runs for span in _spans(run, drop_last)]
        self.num_batches = len(self._spans)
        if not self._spans:
            raise ConfigError(
                f"drop_last leaves no batch: {self.num_items} items do not fill one", hint="use a smaller batch"
            )
        self.batch_size = max(stop - start for _, start, stop in self._spans)  # items of the largest
        self.num_frames = int(frames.sum())
        self.max_batch_frames = max(length * (stop - start) for length, start, stop in self._spans)  # with padding
        self.padding_share = _waste(runs, self.num_frames)

    def __len__(self) -> int:
        return self.num_batches

    @property
    def shapes(self) -> dict[tuple[int, int], int]:
        """(items, padded length) of a batch → how many an epoch has: one for each edge at most, and the last batch."""
        counts: dict[tuple[int, int], int] = {}
        for length, start, stop in self._spans:
            counts[stop - start, length] = counts.get((stop - start, length), 0) + 1
        return counts

    def epoch(self, number: int) -> list[Bucketed]:
        """The batches of an epoch, those of all buckets mixed; a function of lengths, config, seed and number."""
        if not self.shuffle:
            line = torch.argsort(self._bucket, stable=True)
            return [Bucketed(length, line[start:stop]) for length, start, stop in self._spans]
        rng = stream(self.seed, "buckets", number, device=HOST)
        mixed = torch.randperm(self.num_items, generator=rng)
        line = mixed[torch.argsort(self._bucket[mixed], stable=True)]
        turns = torch.randperm(self.num_batches, generator=rng).tolist()
        return [Bucketed(length, line[start:stop]) for length, start, stop in map(self._spans.__getitem__, turns)]


def _checked(lengths: Tensor) -> Array:
    if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise ConfigError(f"lengths is {lengths.dtype} {list(lengths.shape)}, expected one whole number for each item")
    frames: Array = lengths.to(HOST, torch.int64).numpy()
    if not len(frames):
        raise ConfigError("lengths is empty: no items to make batches of", hint="choose at least one")
    shortest = int(frames.argmin())
    if frames[shortest] < 1:
        raise DatasetError(f"item {shortest} has {frames[shortest]} frames, expected at least 1", hint="leave it out")
    return frames


# Buckets


def _choose(line: Array, config: BucketConfig) -> tuple[int, list[_BatchRun]]:
    """The largest multiple that pads little enough, or little more than the best of them, and its buckets."""
    longest, num_frames = int(line[0]), int(line.sum())
    arrangements: dict[int, list[_BatchRun]] = {}
    for multiple in (config.multiple,) if config.multiple else _MULTIPLES:
        room = -(-longest // multiple) * multiple
        if config.max_frames is not None and config.max_frames < room:
            continue
        runs = _arrange(-(-line // multiple) * multiple, num_frames, config)
        if arrangements and not _mixes(runs, next(iter(arrangements.values()))):
            continue
        arrangements[multiple] = runs
        if _waste(runs, num_frames) <= config.max_waste:
            return multiple, runs
    if not arrangements:
        raise ConfigError(
            f"max_frames={config.max_frames} cannot hold the longest item, {longest} frames padded to {room}; "
            f"give at least {room}"
        )
    enough = min(_waste(runs, num_frames) for runs in arrangements.values()) + _MORE_WASTE
    return next((multiple, runs) for multiple, runs in arrangements.items() if _waste(runs, num_frames) <= enough)


def _mixes(runs: list[_BatchRun], usual: list[_BatchRun]) -> bool:
    """Whether items still mix: a bucket of one batch gives the same batch in every epoch."""
    num_batches = sum(-(-(run.stop - run.start) // run.size) for run in runs)
    return len(runs) <= max(len(usual), num_batches // 2)


def _arrange(padded: Array, num_frames: int, config: BucketConfig) -> list[_BatchRun]:
    """The fewest buckets that pad little enough, or those that pad least; of lengths that fall."""
    size_of, best = _size_of(padded, config), None
    for stops in _least_padding(*_cells(padded, size_of), config.max_buckets):
        runs = min((_cut(padded, stops, size_of, more) for more in (True, False)), key=_padded_frames)
        if best is None or _padded_frames(runs) < _padded_frames(best):
            best = runs
        if _waste(runs, num_frames) <= config.max_waste:
            break
    assert best is not None
    return best


def _size_of(padded: Array, config: BucketConfig) -> _MaxBatch:
    if config.batch_size is None:
        return _MaxBatch(None, config.max_frames or 0)
    mean = float(padded[min(len(padded) - 1, -(-len(padded) // 20)) :].mean())  # outliers would raise their own limit
    return _MaxBatch(config.batch_size, int(config.max_stretch * config.batch_size * mean))


def _cells(padded: Array, size_of: _MaxBatch) -> tuple[Array, Array]:
    """Padded length and number of items of each cell, from long to short."""
    rising, num_items, start = padded[::-1], len(padded), 0
    lengths, stops = [], []
    while start < num_items:
        length = int(padded[start])
        size = size_of(length)
        alike = num_items - int(np.searchsorted(rising, length)) - start  # items of just this length, from here on
        start = min(num_items, start + -(-alike // size) * size)
        lengths.append(length)
        stops.append(start)
    kept = _thinned(np.array(lengths), np.array(stops))
    firsts = np.r_[0, kept[:-1] + 1]  # cells joined are padded to the first of them
    return np.array(lengths)[firsts], np.diff(np.array(stops)[kept], prepend=0)


def _thinned(lengths: Array, stops: Array) -> Array:
    """Cells that a bucket may end with: all, or so many that the search stays short."""
    if len(lengths) <= _MAX_CELLS:
        return np.arange(len(lengths))
    # half of them where the items are, half where the lengths are: a long tail has few items and many frames
    items = np.searchsorted(stops, np.linspace(1, stops[-1], _MAX_CELLS // 2))
    spread = np.searchsorted(-lengths, -np.geomspace(lengths[0], lengths[-1], _MAX_CELLS // 2))
    return np.unique(np.r_[items, spread.clip(max=len(lengths) - 1), len(lengths) - 1])


def _least_padding(lengths: Array, counts: Array, max_buckets: int) -> Iterator[list[int]]:
    """For 1, 2, … buckets of whole cells those that pad least, as the places in the line where each stops.

    A bucket of cells i … j pads all their items to the length of i; cost[j] is the least for all cells up to j.
    """
    stops = counts.cumsum()
    bucket = lengths[:, None] * (stops[None, :] - (stops - counts)[:, None])  # (m, m) padded frames of cells i … j
    bucket[np.tril_indices(len(lengths), -1)] = np.iinfo(np.int64).max // 4
    cost, ends_before = bucket[0], []
    yield stops[-1:].tolist()
    for _ in range(1, min(max_buckets, len(lengths))):
        total = cost[:-1, None] + bucket[1:]  # a bucket that begins with cell i after others that end with i - 1
        ends_before.append(total.argmin(0))
        cost = total.min(0)
        ends = [len(lengths) - 1]
        for before in reversed(ends_before):
            ends.append(int(before[ends[-1]]))
        yield stops[ends[::-1]].tolist()


def _cut(padded: Array, stops: list[int], size_of: _MaxBatch, more: bool) -> list[_BatchRun]:
    """Buckets of whole batches that stop near the given places: at or after them with more, else at the nearest.

    With a fixed number of items a place is a whole number of batches; with a fixed number of frames it is one only for
    the batches of its own cell.
    """
    runs: list[_BatchRun] = []
    start, num_items = 0, len(padded)
    for stop in stops:
        if start >= stop:
            continue  # they already fill the last batch of the previous bucket
        length = int(padded[start])
        size = size_of(length)
        full, rest = divmod(stop - start, size)
        num = full + (rest > 0 if more or stop == num_items else 2 * rest >= size) or 1
        end = min(num_items, start + num * size)
        if runs and runs[-1].length == length:
            runs[-1] = replace(runs[-1], stop=end)
        else:
            runs.append(_BatchRun(length, size, start, end))
        start = end
    return runs


def _padded_frames(runs: list[_BatchRun]) -> int:
    return sum(run.length * (run.stop - run.start) for run in runs)


def _waste(runs: list[_BatchRun], num_frames: int) -> float:
    return 1 - num_frames / _padded_frames(runs)


def _spans(run: _BatchRun, drop_last: bool) -> list[tuple[int, int, int]]:
    """(padded length, start, stop) of every batch."""
    starts = range(run.start, run.stop - run.size + 1 if drop_last else run.stop, run.size)
    return [(run.length, start, min(run.stop, start + run.size)) for start in starts]

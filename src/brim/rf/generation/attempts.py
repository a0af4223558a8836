"""Which attempts become samples, and in which shard: known from the gates alone, before any IQ exists.

    attempts ──blocks, gated in any order──▶ RangeBook ──ranges, one for each shard──▶ any worker

A range names its accepted attempts and the totals after them, so a worker needs nothing else: the shard's bytes are the
same on every worker, in every order and on every try.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from brim.errors import NothingAccepted
from brim.rf.config import GenerateConfig
from brim.rf.physics.scene import Scenes, make_scenes

REASONS = ("receivers", "gdop")  # a sample that fails both counts under the first
MAX_TRIES = 200_000  # attempts in a row without an accepted one before the run gives up
BLOCK = 4_096  # scenes made at once, at most: some tens of ms
THREAD_BLOCK = 1_024  # by each of several threads
FIRST_BLOCK = 1_024  # attempts of the first block at most, doubled from block to block: the first shard starts soon
LAST_BLOCK = 8 * BLOCK  # attempts: about 0.15 s of a core, so that handing it out costs nothing in comparison

Totals = dict[str, NDArray[np.int64]]
Verdicts = NDArray[np.uint8]  # of each attempt of a block: 0 accepted, else 1 + its position in REASONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Accepted scenes with the running totals after each: attempts, and rejections by reason."""

    scenes: Scenes
    totals: Totals

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, rows: slice) -> "Accepted":
        return Accepted(scenes=self.scenes[rows], totals={name: values[rows] for name, values in self.totals.items()})


def accepted_batches(
    config: GenerateConfig, num_samples: int, start: dict[str, int], batch_size: Callable[[], int], threads: int = 1
) -> Iterator[Accepted]:
    """The next `num_samples` accepted samples in batches, after the totals of an earlier run.

    batch_size is called before every batch: it may have shrunk to fit the memory. With several threads, scenes are
    drawn ahead for two batches.
    """
    rejected = {reason: start.get(reason, 0) for reason in REASONS}
    pending, in_a_row = _gate(make_scenes(config, np.arange(0)), rejected)[0], 0
    with ThreadPoolExecutor(threads, "brim-scene") as pool:
        blocks = _SceneBlocks(config, start.get("attempted", 0), pool, threads)
        try:
            while num_samples > 0:
                size = max(1, min(batch_size(), num_samples))
                ahead = min(num_samples, 2 * size) if threads > 1 else size
                while len(pending) < size:
                    scenes = blocks.next(ahead - len(pending), in_a_row)
                    more, rejected = _gate(scenes, rejected)
                    in_a_row = 0 if len(more) else in_a_row + len(scenes)
                    if in_a_row >= MAX_TRIES:
                        raise nothing_accepted(config, in_a_row, rejected)
                    pending = _join(pending, more)
                blocks.draw(ahead - len(pending), in_a_row)
                yield pending[:size]
                pending, num_samples = pending[size:], num_samples - size
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _SceneBlocks:
    """Scenes of one attempt after the other in blocks, drawn by threads."""

    def __init__(self, config: GenerateConfig, first: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self.config, self.pool, self.threads = config, pool, threads
        self._frontier = first  # first attempt of no block
        self._under_way: deque[tuple[int, Future[Scenes]]] = deque()
        self._tried = self._kept = 0

    def next(self, wanted: int, in_a_row: int) -> Scenes:
        """The next block; others are begun until about `wanted` samples are under way."""
        self.draw(wanted, in_a_row)
        if not self._under_way:
            self._begin(wanted, in_a_row)
        size, drawn = self._under_way.popleft()
        scenes = drawn.result()
        self._tried, self._kept = self._tried + size, self._kept + int(scenes.accepted.sum())
        return scenes

    def draw(self, wanted: int, in_a_row: int) -> None:
        """Begin blocks until about `wanted` samples are under way, the larger the more were rejected in a row."""
        while len(self._under_way) < 2 * self.threads:
            rate = (self._kept + 0.5) / (self._tried + 0.5)
            missing = wanted - rate * sum(size for size, _ in self._under_way)
            if missing <= 0:
                return
            self._begin(math.ceil(missing), in_a_row)
            if self.threads == 1:
                return

    def _begin(self, missing: int, in_a_row: int) -> None:
        size = min(BLOCK if self.threads == 1 else THREAD_BLOCK, max(2 * missing + 16, in_a_row))
        index = np.arange(self._frontier, self._frontier + size)
        self._under_way.append((size, self.pool.submit(make_scenes, self.config, index)))
        self._frontier += size


def first_accepted(config: GenerateConfig) -> Scenes:
    """The first accepted sample; raises NothingAccepted if the gates reject everything."""
    return next(accepted_batches(config, 1, {}, lambda: 1)).scenes


def _gate(scenes: Scenes, rejected: dict[str, int]) -> tuple[Accepted, dict[str, int]]:
    """The accepted attempts, and the rejections after the last attempt."""
    keep = np.nonzero(scenes.accepted)[0]
    few = rejected["receivers"] + np.cumsum(~scenes.enough)
    wide = rejected["gdop"] + np.cumsum(scenes.enough & ~scenes.accepted)
    totals = {"attempted": scenes.index[keep] + 1, "receivers": few[keep], "gdop": wide[keep]}
    after = {"receivers": int(few[-1]), "gdop": int(wide[-1])} if len(scenes) else rejected
    return Accepted(scenes=scenes[keep], totals=totals), after


def _join(first: Accepted, second: Accepted) -> Accepted:
    def both(name: str) -> NDArray[np.float64]:
        return np.concatenate([getattr(first.scenes, name), getattr(second.scenes, name)])

    return Accepted(
        scenes=Scenes(**{field.name: both(field.name) for field in fields(Scenes)}),  # type: ignore[arg-type]
        totals={name: np.concatenate([first.totals[name], second.totals[name]]) for name in first.totals},
    )


def nothing_accepted(config: GenerateConfig, tried: int, rejected: dict[str, int]) -> NothingAccepted:
    """The error for this many attempts in a row that were rejected."""
    counts = ", ".join(f"{reason} {rejected[reason]}" for reason in REASONS)
    message = f"none of {tried} attempts in a row was accepted (rejected so far: {counts}); mostly because"
    if rejected["gdop"] > rejected["receivers"]:
        field, reason = "max_gdop", f"the GDOP was above max_gdop={config.max_gdop:g}"
        hint = "raise {max_gdop} or spread the stations"
    else:
        field, reason = (
            "min_receivers",
            (
                f"fewer than min_receivers={config.min_receivers} heard the transmission at "
                f"min_snr_db={config.min_snr_db:g} with tx_power_dbm={config.tx_power_dbm:g}"
            ),
        )
        hint = "raise {tx_power_dbm}, or lower {min_snr_db} or {min_receivers}"
    return NothingAccepted(f"{message} {reason}", field=field, code="conflict", hint=hint)


# Ranges for several workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """The accepted attempts of one shard."""

    number: int  # of the shard
    index: NDArray[np.int64]  # (n,) attempt numbers, ascending
    totals: dict[str, int]  # running totals after the last of them

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Block:
    """Attempts first to stop - 1."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def gate_block(config: GenerateConfig, block: Block) -> Verdicts:
    """The verdict on every attempt of a block; makes scenes, no IQ."""
    out = np.empty(len(block), np.uint8)
    for first in range(block.first, block.stop, BLOCK):
        scenes = make_scenes(config, np.arange(first, min(first + BLOCK, block.stop)))
        part = np.where(scenes.enough, np.where(scenes.accepted, 0, 2), 1)
        out[first - block.first :][: len(part)] = part
    return out


class RangeBook:
    """Takes gated blocks in any order and gives ranges in order, each once, until there are enough samples."""

    def __init__(self, config: GenerateConfig, samples: int, *, number: int = 0, start: dict[str, int]) -> None:
        """samples are those still to make, number is the first shard's, start the totals before it."""
        self.config, self.samples = config, samples
        self._number = number
        self._next = self._frontier = start.get("attempted", 0)  # first attempt not booked, and not given out
        self._rejected = {reason: start.get(reason, 0) for reason in REASONS}
        self._pending: dict[int, tuple[Block, Verdicts]] = {}
        self._returned: list[Block] = []  # gating failed
        self._open: set[Block] = set()
        self._size = FIRST_BLOCK
        self._accepted: deque[NDArray[np.int64]] = deque()  # (3, k) attempt, rejected by reason up to it
        self._left = samples  # not yet in a range
        self._booked = 0  # accepted and booked, not yet in a range
        self._tried = self._kept = 0  # attempts and accepted ones of this book: their ratio says how many to gate
        self._in_a_row = 0
        self._ready: deque[ShardRange] = deque()

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def remaining(self) -> int:
        """Ranges that were not taken yet, ready or not."""
        return len(self._ready) + -(-self._left // self.config.shard_items)

    def next_block(self, ahead: int) -> Block | None:
        """Attempts to gate; None if those under way suffice for `ahead` ready ranges, or for all samples."""
        if self._left == 0:
            return None
        if self._returned:
            block = self._returned.pop()
        else:
            wanted = min(self._left, (ahead - len(self._ready)) * self.config.shard_items)
            rate = (self._kept + 0.5) / (self._tried + 0.5)  # half an attempt as a prior
            under_way = self._frontier - self._next
            if self._booked + under_way * rate >= wanted:
                return None
            block = Block(first=self._frontier, stop=self._frontier + self._size)
            self._frontier, self._size = block.stop, min(2 * self._size, LAST_BLOCK)
        self._open.add(block)
        return block

    def put_back(self, block: Block) -> None:
        """Return a block whose worker is gone."""
        if block in self._open:
            self._open.remove(block)
            self._returned.append(block)

    def add(self, block: Block, verdicts: Verdicts) -> None:
        """Book a gated block; a second time changes nothing. Raises NothingAccepted if the gates reject everything."""
        if block not in self._open:
            return
        self._open.remove(block)
        self._pending[block.first] = block, verdicts
        while self._left and (entry := self._pending.pop(self._next, None)) is not None:
            self._book(*entry)
            self._cut()
        if self._left == 0:
            self._pending.clear()
            self._accepted.clear()

    def take(self, most: int) -> list[ShardRange]:
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def _book(self, block: Block, verdicts: Verdicts) -> None:
        keep = np.nonzero(verdicts == 0)[0]
        few, wide = (self._rejected[reason] + np.cumsum(verdicts == 1 + k) for k, reason in enumerate(REASONS))
        self._rejected = {"receivers": int(few[-1]), "gdop": int(wide[-1])}
        self._next = block.stop
        self._tried, self._kept = self._tried + len(block), self._kept + len(keep)
        self._in_a_row = int(len(block) - 1 - keep[-1]) if len(keep) else self._in_a_row + len(block)
        if len(keep):
            self._accepted.append(np.stack([block.first + keep, few[keep], wide[keep]]))
            self._booked += len(keep)
        elif self._in_a_row >= MAX_TRIES:
            raise nothing_accepted(self.config, self._in_a_row, self._rejected)

    def _cut(self) -> None:
        if self._booked < min(self.config.shard_items, self._left):
            return
        booked, at = np.concatenate(self._accepted, axis=1), 0
        while self._left and booked.shape[1] - at >= (size := min(self.config.shard_items, self._left)):
            part = booked[:, at : at + size]
            totals = {"attempted": int(part[0, -1]) + 1, "receivers": int(part[1, -1]), "gdop": int(part[2, -1])}
            self._ready.append(ShardRange(number=self._number, index=part[0].copy(), totals=totals))
            self._number, self._left, at = self._number + 1, self._left - size, at + size
        self._accepted = deque([booked[:, at:]])
        self._booked = booked.shape[1] - at

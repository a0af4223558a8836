"""Work for many devices: which attempts make which shard, known from the gates alone before any IQ exists.

attempts ──blocks, gated by anyone in any order──▶ RangeBook ──ranges, a shard each──▶ make_ranges on some device

A range names its accepted attempts and the totals behind them, so whoever makes it needs nothing of the others: the
shard's bytes are the same on every worker, in every order and at every try.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.errors import NothingAccepted
from brim.rf.config import GenerateConfig
from brim.rf.generation.gates import BLOCK, MAX_TRIES, REASONS, complaint
from brim.rf.generation.stages import Rows, Stages, join
from brim.rf.physics.scene import Scenes, make_scenes

FIRST_BLOCK = 1_024  # attempts of the first block at most, doubled from block to block: the first shard starts soon
LAST_BLOCK = 8 * BLOCK  # attempts: about 0.15 s of a core, so that handing it out costs nothing beside it

Outcome = NDArray[np.uint8]  # of each attempt of a block: 0 accepted, else 1 + its place in REASONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The accepted attempts of one shard."""

    number: int  # of the shard
    index: NDArray[np.int64]  # (n,) attempt numbers, ascending
    totals: dict[str, int]  # running totals after the last of them

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Block:
    """Attempts to gate."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def gate_block(config: GenerateConfig, block: Block) -> Outcome:
    """What the gates say of every attempt of a block; scenes only, no IQ."""
    out = np.empty(len(block), np.uint8)
    for first in range(block.first, block.stop, BLOCK):
        scenes = make_scenes(config, np.arange(first, min(first + BLOCK, block.stop)))
        said = np.where(scenes.enough, np.where(scenes.accepted, 0, 2), 1)
        out[first - block.first :][: len(said)] = said
    return out


class RangeBook:
    """Gated blocks in, in any order; ranges out, in order and each once, until there are as many samples as wanted."""

    def __init__(self, config: GenerateConfig, samples: int, *, number: int = 0, start: dict[str, int]) -> None:
        """Store; samples are those still to make, number is the first shard's, start the totals before it."""
        self.config, self.samples = config, samples
        self._number = number
        self._next = self._frontier = start.get("attempted", 0)  # first attempt not booked, and not given out
        self._refused = {reason: start.get(reason, 0) for reason in REASONS}
        self._waiting: dict[int, tuple[Block, Outcome]] = {}
        self._returned: list[Block] = []  # whose gating failed
        self._open: set[Block] = set()
        self._size = FIRST_BLOCK
        self._accepted: deque[NDArray[np.int64]] = deque()  # (3, k) attempt, refused by reason up to it
        self._left = samples  # not yet in a range
        self._booked = 0  # accepted and booked, not yet in a range
        self._tried = self._kept = 0  # attempts and accepted ones of this book: their ratio says how many to gate
        self._in_vain = 0
        self._ready: deque[Range] = deque()

    @property
    def ready(self) -> int:
        """Ranges that can be taken."""
        return len(self._ready)

    @property
    def remaining(self) -> int:
        """Ranges that were not taken yet, ready or not."""
        return len(self._ready) + -(-self._left // self.config.shard_items)

    @property
    def is_empty(self) -> bool:
        """Whether every range was taken."""
        return not self._ready and self._left == 0

    def next_block(self, ahead: int) -> Block | None:
        """Attempts to gate, unless those under way will do for so many ranges ready, or for all that are wanted."""
        if self._left == 0:
            return None
        if self._returned:
            block = self._returned.pop()
        else:
            wanted = min(self._left, (ahead - len(self._ready)) * self.config.shard_items)
            # half of one more stands for what is not known yet
            rate = (self._kept + 0.5) / (self._tried + 0.5)
            under_way = self._frontier - self._next
            if self._booked + under_way * rate >= wanted:
                return None
            block = Block(first=self._frontier, stop=self._frontier + self._size)
            self._frontier, self._size = block.stop, min(2 * self._size, LAST_BLOCK)
        self._open.add(block)
        return block

    def put_back(self, block: Block) -> None:
        """Give a block to someone else: whoever had it is gone."""
        if block in self._open:
            self._open.remove(block)
            self._returned.append(block)

    def add(self, block: Block, outcome: Outcome) -> None:
        """Book a gated block; a second time changes nothing. NothingAccepted when the gates refuse everything."""
        if block not in self._open:
            return
        self._open.remove(block)
        self._waiting[block.first] = block, outcome
        while self._left and (entry := self._waiting.pop(self._next, None)) is not None:
            self._book(*entry)
            self._cut()
        if self._left == 0:
            self._waiting.clear()
            self._accepted.clear()

    def take(self, most: int) -> list[Range]:
        """The next ranges, at most so many."""
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def _book(self, block: Block, outcome: Outcome) -> None:
        keep = np.nonzero(outcome == 0)[0]
        few, wide = (self._refused[reason] + np.cumsum(outcome == 1 + k) for k, reason in enumerate(REASONS))
        self._refused = {"receivers": int(few[-1]), "gdop": int(wide[-1])}
        self._next = block.stop
        self._tried, self._kept = self._tried + len(block), self._kept + len(keep)
        self._in_vain = int(len(block) - 1 - keep[-1]) if len(keep) else self._in_vain + len(block)
        if len(keep):
            self._accepted.append(np.stack([block.first + keep, few[keep], wide[keep]]))
            self._booked += len(keep)
        elif self._in_vain >= MAX_TRIES:
            raise NothingAccepted(complaint(self.config, self._in_vain, self._refused))

    def _cut(self) -> None:
        """Make ranges of what is booked, as far as it goes."""
        if self._booked < min(self.config.shard_items, self._left):
            return
        booked, at = np.concatenate(self._accepted, axis=1), 0
        while self._left and booked.shape[1] - at >= (size := min(self.config.shard_items, self._left)):
            part = booked[:, at : at + size]
            totals = {"attempted": int(part[0, -1]) + 1, "receivers": int(part[1, -1]), "gdop": int(part[2, -1])}
            self._ready.append(Range(number=self._number, index=part[0].copy(), totals=totals))
            self._number, self._left, at = self._number + 1, self._left - size, at + size
        self._accepted = deque([booked[:, at:]])
        self._booked = booked.shape[1] - at


# Making


def make_ranges(
    stages: Stages, tasks: Iterable[Sequence[Range]], end: Callable[[], None] = lambda: None
) -> Iterator[tuple[Range, Rows]]:
    """The rows of every range, in the order of the tasks; batches run across the ranges of a task.

    tasks is read in a thread of its own and may wait: the device works on the ranges of earlier tasks meanwhile.
    `end` is called when no more are wanted, after a failure too: it must make tasks that wait come to their end.
    """
    with stages.run(_batches(stages, tasks)) as results:
        parts: list[Rows] = []
        try:
            for made in results:
                at = 0
                for whole, count, is_last in made.tag:
                    parts.append({name: tensor[at : at + count] for name, tensor in made.rows.items()})
                    at += count
                    if is_last:
                        yield whole, join(parts)
                        parts = []
        finally:
            end()


def _batches(
    stages: Stages, tasks: Iterable[Sequence[Range]]
) -> Iterator[tuple[Scenes, list[tuple[Range, int, bool]]]]:
    """Scenes of a batch with its ranges: how many rows of each, and whether those are its last."""
    for task in tasks:
        waiting = deque((one, 0) for one in task)
        while waiting:
            room, index, pieces = max(1, stages.next_batch()), [], []
            while waiting and room:
                one, begin = waiting.popleft()
                end = min(len(one), begin + room)
                index.append(one.index[begin:end])
                pieces.append((one, end - begin, end == len(one)))
                room -= end - begin
                if end < len(one):
                    waiting.appendleft((one, end))
            yield make_scenes(stages.config, np.concatenate(index)), pieces

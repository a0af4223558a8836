"""How long things take, learned as they run: batches by key and size, and a pool of threads.

Quantiles of a short window, not means: one slow batch (a page fault, a neighbour) must not shut the door on requests.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from brim.errors import ConfigError

WINDOW = 32  # batches remembered by size: half a second of a busy device
FORGET = 16  # batches after which the first guess no longer counts as one of them
QUANTILE = 0.75  # of the window: a promise made on the median would be broken every other time
MAX_KEYS = 1024  # keys remembered; images come in any shape
TRIES = 3  # batches of a size before it is judged, where nothing was expected of it
GAIN = 0.03  # a larger batch must be this much quicker a part, or it only costs latency
STALE = 2000  # batches of a key after which a size that lost is tried once more: its samples may have been bad luck


@dataclass(frozen=True, slots=True)
class Ladder:
    """The batch sizes of a key that are worth running now, with their seconds."""

    sizes: tuple[int, ...]  # all that may run, ascending from 1
    useful: tuple[int, ...]  # those that are quicker a part than every smaller one
    seconds: dict[int, float]
    best: tuple[int, ...]  # by number of parts that wait, up to the largest useful size: the size to run

    def size_for(self, parts: int) -> int:
        """The largest useful size that so many parts fill."""
        best = self.best
        return best[parts] if parts < len(best) else best[-1]


@dataclass(slots=True)
class _Size:
    guess_s: float | None = None
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tried_at: int = 0  # batches of the key before it

    def seconds(self) -> float | None:
        known = sorted(self.samples)
        if self.guess_s is not None and len(known) < FORGET:
            insort(known, self.guess_s)
        return known[min(len(known) - 1, int(QUANTILE * len(known)))] if known else None


@dataclass(slots=True)
class _Key:
    sizes: dict[int, _Size] = field(default_factory=dict)
    batches: int = 0
    ladder: Ladder | None = None


class ServiceTimes:
    """Seconds of a batch by key and size: measured, else guessed beforehand, else on the line of its neighbours."""

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]]) -> None:
        self._sizes = sizes
        self._keys: OrderedDict[Hashable, _Key] = OrderedDict()

    def expect(self, key: Hashable, size: int, seconds: float) -> None:
        """A guess, until the first batch of that size has run."""
        known = self._key(key)
        known.sizes.setdefault(size, _Size()).guess_s = seconds
        known.ladder = None

    def note(self, key: Hashable, size: int, seconds: float) -> None:
        """A batch took so long."""
        known = self._key(key)
        known.batches += 1
        measured = known.sizes.setdefault(size, _Size())
        measured.samples.append(max(0.0, seconds))
        measured.tried_at = known.batches
        known.ladder = None

    def knows(self, key: Hashable) -> bool:
        """Whether anything was measured or guessed of this key."""
        return key in self._keys and bool(self._keys[key].sizes)

    def ladder(self, key: Hashable) -> Ladder:
        """The sizes of a key, worth running or not, as far as is known now."""
        known = self._key(key)
        if known.ladder is None:
            known.ladder = self._make(key, known)
        return known.ladder

    def _key(self, key: Hashable) -> _Key:
        known = self._keys.get(key)
        if known is None:
            known = self._keys[key] = _Key()
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        else:
            self._keys.move_to_end(key)
        return known

    def _make(self, key: Hashable, known: _Key) -> Ladder:
        sizes = tuple(self._sizes(key))
        if not sizes or sizes[0] != 1 or any(low >= high for low, high in pairwise(sizes)):
            raise ConfigError(f"batch sizes {list(sizes)} of {key!r} must ascend from 1: what is left over runs alone")
        points = sorted((size, took_s) for size, at in known.sizes.items() if (took_s := at.seconds()) is not None)
        seconds = {size: _read_off(points, size) for size in sizes}
        useful: list[int] = []
        quickest = float("inf")
        for size in sizes:
            if seconds[size] / size <= quickest * (1 - GAIN) or self._untried(known, size):
                useful.append(size)
            quickest = min(quickest, seconds[size] / size)
        best = tuple(useful[bisect_right(useful, max(1, parts)) - 1] for parts in range(useful[-1] + 1))
        return Ladder(sizes, tuple(useful), seconds, best)

    @staticmethod
    def _untried(known: _Key, size: int) -> bool:
        at = known.sizes.get(size)
        if at is None:
            return True
        if at.guess_s is None and len(at.samples) < TRIES:
            return True
        return known.batches - at.tried_at >= STALE


def _read_off(points: list[tuple[int, float]], size: int) -> float:
    """Seconds of a size from those known: its own, on the line between its neighbours, or beyond the last of them."""
    if not points:
        return 0.0  # nothing is known: the first request of a key is always let in, and tells
    place = bisect_right(points, (size, float("inf")))
    if place and points[place - 1][0] == size:
        return points[place - 1][1]
    if place == 0:
        return points[0][1]  # not above that of a larger batch
    low, low_s = points[place - 1]
    if place < len(points):
        high, high_s = points[place]
        return low_s + (high_s - low_s) * (size - low) / (high - low)
    if len(points) == 1:
        return low_s * size / low  # batching buys nothing until it has shown that it does
    before, before_s = points[-2]
    slope = (low_s - before_s) / (low - before)
    return low_s + min(max(slope, 0.0), low_s / low) * (size - low)


class PoolTimes:
    """How long a task would spend in a pool of threads that work down one queue.

    A task has a key, and a group of keys that stands in for one that was never seen.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.inside = 0  # queued or at work
        self._work = Windows(0.5)
        self._stay = Windows(QUANTILE)

    def enter(self) -> None:
        """A task joins the pool's queue."""
        self.inside += 1

    def leave(
        self, key: Hashable, seconds: float | None, group: Hashable = None, *, stay_s: float | None = None
    ) -> None:
        """A task is done after so long at work; None: it never worked, or failed.

        stay_s: from joining to being done, where tasks come in bursts: what stands behind a batch is not yet there
        when its requests are promised an answer.
        """
        self.inside -= 1
        for name in (("key", key), ("group", group)):
            if seconds is not None:
                self._work.note(name, seconds)
            if stay_s is not None:
                self._stay.note(name, stay_s)

    def expected_s(self, key: Hashable, group: Hashable = None) -> float:
        """Seconds until a task of this key that joins now would be done, behind those inside; 0 when never seen."""
        behind = max(0, self.inside - self.workers + 1)
        stay_s = self._stay.get(("key", key), ("group", group))
        return max(stay_s, self.work_s(key, group) * (1 + behind / self.workers))

    def work_s(self, key: Hashable, group: Hashable = None) -> float:
        """Seconds of work of one task of this key; 0 when never seen."""
        return self._work.get(("key", key), ("group", group))


class Windows:
    """A quantile of the last few times, by name."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._times: OrderedDict[Hashable, deque[float]] = OrderedDict()
        self._values: dict[Hashable, float] = {}

    def note(self, name: Hashable, seconds: float) -> None:
        """It took so long."""
        window = self._times.setdefault(name, deque(maxlen=WINDOW))
        self._times.move_to_end(name)
        window.append(seconds)
        self._values[name] = sorted(window)[int(self._share * len(window))]
        if len(self._times) > MAX_KEYS:
            self._values.pop(self._times.popitem(last=False)[0], None)

    def get(self, *names: Hashable) -> float:
        """Of the first of these that was ever noted; 0 when none was."""
        return next((self._values[name] for name in names if name in self._values), 0.0)

"""How long things take, learned while they run: batches by key and size, and tasks of a thread pool.

Estimates are quantiles of a short window, not means: one slow batch (a page fault, a busy neighbour) must not make the
policy reject requests.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from brim.errors import ConfigError

WINDOW = 32  # batches remembered per size: half a second of a busy device
FORGET = 16  # measured batches after which the first guess no longer counts
QUANTILE = 0.75  # of the window: a promise made on the median would be broken every other time
MAX_KEYS = 1024  # keys remembered; images come in any shape
TRIES = 3  # batches of a size before it is judged, if there was no guess for it
GAIN = 0.03  # a larger batch must be this much faster per part, or it only adds latency
STALE = 2000  # batches of a key after which a rejected size is tried again: its samples may have been outliers


@dataclass(frozen=True, slots=True)
class StepTable:
    """The batch sizes of a key and the time of a step of each."""

    sizes: tuple[int, ...]  # all that may run, ascending from 1
    useful: tuple[int, ...]  # those that are faster per part than every smaller one
    seconds: dict[int, float]
    best: tuple[int, ...]  # best[n] is the size to run when n parts wait, up to the largest useful size

    def size_for(self, parts: int) -> int:
        """The largest useful size that this many parts fill."""
        return self.best[parts] if parts < len(self.best) else self.best[-1]

    def work_s(self, parts: int) -> float:
        """Device time of this many parts when nothing else runs."""
        seconds = 0.0
        while parts > 0:
            size = self.size_for(parts)
            seconds += self.seconds[size]
            parts -= size
        return seconds


@dataclass(slots=True)
class _Size:
    guess_s: float | None = None
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tried_at: int = 0  # number of the key's batch that last had this size

    def seconds(self) -> float | None:
        known = sorted(self.samples)
        if self.guess_s is not None and len(known) < FORGET:
            insort(known, self.guess_s)
        return known[min(len(known) - 1, int(QUANTILE * len(known)))] if known else None


@dataclass(slots=True)
class _Key:
    sizes: dict[int, _Size] = field(default_factory=dict)
    batches: int = 0
    table: StepTable | None = None


class ServiceTimes:
    """Step times by key and batch size: measured, else guessed, else interpolated between neighbouring sizes."""

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]]) -> None:
        self._sizes = sizes
        self._keys: OrderedDict[Hashable, _Key] = OrderedDict()

    def expect(self, key: Hashable, size: int, seconds: float) -> None:
        """Set a first guess, which measurements replace."""
        known = self._key(key)
        known.sizes.setdefault(size, _Size()).guess_s = seconds
        known.table = None

    def note(self, key: Hashable, size: int, seconds: float) -> None:
        known = self._key(key)
        known.batches += 1
        measured = known.sizes.setdefault(size, _Size())
        measured.samples.append(max(0.0, seconds))
        measured.tried_at = known.batches
        known.table = None

    def knows(self, key: Hashable) -> bool:
        """Whether anything was measured or guessed for this key."""
        return key in self._keys and bool(self._keys[key].sizes)

    def is_measured(self, key: Hashable) -> bool:
        return key in self._keys and any(size.samples for size in self._keys[key].sizes.values())

    def table(self, key: Hashable) -> StepTable:
        known = self._key(key)
        if known.table is None:
            known.table = self._make(key, known)
        return known.table

    def _key(self, key: Hashable) -> _Key:
        known = self._keys.get(key)
        if known is None:
            known = self._keys[key] = _Key()
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        else:
            self._keys.move_to_end(key)
        return known

    def _make(self, key: Hashable, known: _Key) -> StepTable:
        sizes = tuple(self._sizes(key))
        if not sizes or sizes[0] != 1 or any(low >= high for low, high in pairwise(sizes)):
            raise ConfigError(
                f"batch sizes {list(sizes)} of {key!r} must ascend from 1: a single part must be able to run"
            )
        points = sorted((size, took_s) for size, at in known.sizes.items() if (took_s := at.seconds()) is not None)
        seconds = {size: _read_off(points, size) for size in sizes}
        useful: list[int] = []
        quickest = float("inf")
        for size in sizes:
            at = known.sizes.get(size)
            is_untried = at is None or (at.guess_s is None and len(at.samples) < TRIES)
            is_stale = at is not None and known.batches - at.tried_at >= STALE
            if seconds[size] / size <= quickest * (1 - GAIN) or is_untried or is_stale:
                useful.append(size)
            quickest = min(quickest, seconds[size] / size)
        best = tuple(useful[bisect_right(useful, max(1, parts)) - 1] for parts in range(useful[-1] + 1))
        return StepTable(sizes, tuple(useful), seconds, best)


def _read_off(points: list[tuple[int, float]], size: int) -> float:
    """Step time of a size: measured, interpolated between its neighbours, or extrapolated beyond the largest."""
    if not points:
        return 0.0  # nothing is known: the first request of a key is always admitted and measured
    place = bisect_right(points, (size, float("inf")))
    if place and points[place - 1][0] == size:
        return points[place - 1][1]
    if place == 0:
        return points[0][1]  # at most the time of a larger batch
    low, low_s = points[place - 1]
    if place < len(points):
        high, high_s = points[place]
        return low_s + (high_s - low_s) * (size - low) / (high - low)
    if len(points) == 1:
        return low_s * size / low  # assume no gain from batching until it is measured
    before, before_s = points[-2]
    slope = (low_s - before_s) / (low - before)
    return low_s + min(max(slope, 0.0), low_s / low) * (size - low)


class PoolTimes:
    """How long a task would spend in a thread pool with one queue.

    A task has a key and belongs to a group, whose times are used while those of the key are unknown.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.inside = 0  # queued or at work
        self._work = Windows(0.5)
        self._stay = Windows(QUANTILE)

    def enter(self) -> None:
        self.inside += 1

    def leave(
        self, key: Hashable, seconds: float | None, group: Hashable = None, *, stay_s: float | None = None
    ) -> None:
        """A task left the pool after `seconds` of work; None: it did not run, or failed.

        stay_s: time from joining to leaving, for tasks that arrive in bursts: the tasks behind a batch have not
        joined yet when its requests are promised an answer.
        """
        self.inside -= 1
        for name in (("key", key), ("group", group)):
            if seconds is not None:
                self._work.note(name, seconds)
            if stay_s is not None:
                self._stay.note(name, stay_s)

    def expected_s(self, key: Hashable, group: Hashable = None) -> float:
        """Seconds until a task that joins now would leave, behind those inside; 0 if the key was never seen."""
        behind = max(0, self.inside - self.workers + 1)
        stay_s = self._stay.get(("key", key), ("group", group))
        return max(stay_s, self.work_s(key, group) * (1 + behind / self.workers))

    def work_s(self, key: Hashable, group: Hashable = None) -> float:
        """Seconds of work of one task; 0 if the key was never seen."""
        return self._work.get(("key", key), ("group", group))


class Windows:
    """A quantile of the latest times, per name."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._times: OrderedDict[Hashable, deque[float]] = OrderedDict()
        self._values: dict[Hashable, float] = {}

    def note(self, name: Hashable, seconds: float) -> None:
        window = self._times.setdefault(name, deque(maxlen=WINDOW))
        self._times.move_to_end(name)
        window.append(seconds)
        self._values[name] = sorted(window)[int(self._share * len(window))]
        if len(self._times) > MAX_KEYS:
            self._values.pop(self._times.popitem(last=False)[0], None)

    def get(self, *names: Hashable) -> float:
        """The value of the first name that has any; 0 if none has."""
        return next((self._values[name] for name in names if name in self._values), 0.0)

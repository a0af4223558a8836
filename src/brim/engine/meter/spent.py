"""Where the time of a whole command goes, from Enter to its result: work, and overhead by cause.

Every moment belongs to one cause, that of the innermost `within` of the thread that opened the account, so the parts
add up to the whole. Imports no torch: the command line opens the account before anything heavy is imported.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORK = "work"  # what was asked for: steps, batches, samples
IMPORT = "import"  # the interpreter and its modules
DEVICE = "device"  # finding and starting it
OTHER = "other"

_STAT = Path("/proc/self/stat")
_START_TICKS = 19  # index in /proc/self/stat of the start time, after the name in parentheses


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a command: wall_s is work_s plus all overhead, startup_s the part of it before the first action."""

    wall_s: float
    startup_s: float
    work_s: float
    overhead: dict[str, float]  # by cause, largest first

    def as_dict(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s, "startup_s": self.startup_s, "work_s": self.work_s, "overhead": dict(self.overhead),
        }  # fmt: skip

    def line(self) -> str:
        """In words, with the largest cause of overhead."""
        text = f"{self.wall_s:.1f} s in all: {self.work_s:.1f} s of work"
        if not self.overhead:
            return text
        cause, seconds = next(iter(self.overhead.items()))
        return f"{text}, {sum(self.overhead.values()):.1f} s of overhead, most of it {cause} ({seconds:.1f} s)"


class Account:
    """Seconds by cause since a moment."""

    def __init__(
        self, cause: str = OTHER, *, clock: Callable[[], float] = time.perf_counter, age_s: float = 0.0
    ) -> None:
        """age_s: how long ago the account begins."""
        self._clock = clock
        self._since_s = clock() - age_s
        self._causes = [cause]
        self._seconds: dict[str, float] = {}

    @contextmanager
    def within(self, cause: str) -> Iterator[None]:
        """Charge the body of a with statement to a cause, except for the spans inside it."""
        self._settle()
        self._causes.append(cause)
        try:
            yield
        finally:
            self._settle()
            self._causes.pop()

    def begin(self) -> None:
        """End of the start: what no span names is other overhead from here on."""
        if self._causes[0] == IMPORT:
            self._settle()
            self._causes[0] = OTHER

    def move(self, seconds: float, cause: str) -> None:
        """Charge seconds of work to another cause: they were measured in another thread."""
        self._settle()
        seconds = min(seconds, self._seconds.get(WORK, 0.0))
        if seconds > 0:
            self._seconds[WORK] -= seconds
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds

    def spent(self) -> Spent:
        self._settle()
        rounded = {cause: round(seconds, 4) for cause, seconds in self._seconds.items()}
        work_s = rounded.pop(WORK, 0.0)
        overhead = dict(sorted(((cause, s) for cause, s in rounded.items() if s > 0), key=lambda pair: -pair[1]))
        startup_s = overhead.get(IMPORT, 0.0) + overhead.get(DEVICE, 0.0)
        wall_s = round(work_s + sum(overhead.values()), 4)
        return Spent(wall_s=wall_s, startup_s=round(startup_s, 4), work_s=work_s, overhead=overhead)

    def _settle(self) -> None:
        now_s, cause = self._clock(), self._causes[-1]
        self._seconds[cause] = self._seconds.get(cause, 0.0) + now_s - self._since_s
        self._since_s = now_s


_open: ContextVar[Account | None] = ContextVar("brim_account", default=None)  # per thread; others start with none


@contextmanager
def accounting(account: Account | None = None) -> Iterator[Account]:
    """The account that is open in this thread, else this one or a new one until the with block ends."""
    current = _open.get()
    if current is not None and account is None:
        yield current
        return
    token = _open.set(account or Account())
    try:
        yield _open.get()  # type: ignore[misc]
    finally:
        _open.reset(token)


@contextmanager
def within(cause: str) -> Iterator[None]:
    """Charge the body of a with statement to a cause, where an account is open."""
    account = _open.get()
    if account is None:
        yield
        return
    with account.within(cause):
        yield


def current_account() -> Account | None:
    return _open.get()


def of_this_process() -> Account:
    """An account that begins when the operating system started this process."""
    return Account(IMPORT, age_s=_process_age_s())


def _process_age_s() -> float:
    """Seconds since this process was started; 0.0 where that is not known."""
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[_START_TICKS])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return 0.0

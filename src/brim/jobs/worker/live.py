"""What a worker's job is doing this second, in a small file that the API reads: `workers/NAME.live` of the data folder.

Written about once a second by the thread that watches the job, not by the one that works. The file is replaced
atomically, and not synced, since it is worthless after a crash. Nothing depends on it.
"""

import json
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from brim.jobs.status import Flow
from brim.jobs.worker.process import cores

WINDOW: Final = 10  # reports, a second apart, to average over: fewer would jump with every log and checkpoint
STALE_S: Final = 10.0  # a report this old is that of a worker that died
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """What a worker reported last."""

    at: float  # seconds since 1970
    job_id: str
    ceiling_share: float | None  # None: not known
    stalls: dict[str, float] = field(default_factory=dict)  # share of the time, by cause
    cpu_share: float | None = None  # of all cores, used by the worker since its last report


class LiveFile:
    """The file of one worker, for one attempt at a job."""

    def __init__(self, data: Path, worker: str) -> None:
        self._file = _file(data, worker)
        self._shares = Shares()
        self._used = (time.monotonic(), _cpu_s())

    def tell(self, job_id: str, flow: Flow | None) -> None:
        """Write what the job is doing; on a disk error the file stays as it was."""
        ceiling_share, stalls = self._shares.add(flow)
        (before_s, before_cpu_s), self._used = self._used, (time.monotonic(), _cpu_s())
        passed_s = self._used[0] - before_s
        cpu_share = _share((self._used[1] - before_cpu_s) / cores(), passed_s) if passed_s > 0 else None
        word = LiveStatus(
            at=time.time(), job_id=job_id, ceiling_share=ceiling_share, stalls=stalls, cpu_share=cpu_share
        )  # fmt: skip
        new = self._file.with_suffix(".live-new")
        with suppress(OSError):
            new.write_text(json.dumps(asdict(word)), encoding="utf-8")
            new.replace(self._file)

    def clear(self) -> None:
        """Remove the file: the job has ended."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def read_live(data: Path, worker: str) -> LiveStatus | None:
    """What a worker's job is doing; None if it has none or has not reported for STALE_S."""
    try:
        word = LiveStatus(**json.loads(_file(data, worker).read_bytes()))
        return word if abs(time.time() - word.at) < STALE_S else None
    except (OSError, ValueError, TypeError):
        return None


class Shares:
    """Shares of the last seconds, from totals since the start."""

    def __init__(self) -> None:
        self._flows: deque[Flow] = deque(maxlen=WINDOW + 1)

    def add(self, flow: Flow | None) -> tuple[float | None, dict[str, float]]:
        """Share of the ceiling, and of the time that was waited by each cause; None and none while that is not known.

        What computes is at its ceiling when it never waits: so the share of the time in which it did not.
        """
        if flow is None or (self._flows and flow.seconds < self._flows[-1].seconds):  # not yet, or a phase of its own
            self._flows.clear()
        if flow is None:
            return None, {}
        self._flows.append(flow)
        first = self._flows[0]
        seconds = flow.seconds - first.seconds
        if seconds <= 0:  # the first word, or it does something else, such as evaluating
            return None, {}
        stalls = {
            cause: _share(waited - first.waiting.get(cause, 0.0), seconds) for cause, waited in flow.waiting.items()
        }
        return round(max(0.0, 1 - sum(stalls.values())), _DIGITS), stalls


def _share(part_s: float, whole_s: float) -> float:
    """Between 0 and 1: a GPU reports waiting time later than it happened."""
    return round(min(1.0, max(0.0, part_s / whole_s)), _DIGITS)


def _cpu_s() -> float:
    """CPU time of this process and of its ended children."""
    return sum(os.times()[:4])


def _file(data: Path, worker: str) -> Path:
    return data / "workers" / f"{worker}.live"

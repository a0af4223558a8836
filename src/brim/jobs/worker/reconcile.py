"""Reconciles catalogue and queue: completes what a killed process left half done between the two databases.

API, workers and supervisor each write the catalogue first and then the queue (or the other way round), and any of
them may die in between. `decide` compares a job's row with the queue's state and says what is missing; doing it twice,
or at the same time as a process that was only slow, changes nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

from brim.errors import Conflict, Unavailable
from brim.jobs.durable import DbosState, Queue
from brim.jobs.registry.outputs import output_of
from brim.jobs.status import UNFINISHED
from brim.jobs.store import Catalogue, JobRow

SLOW_S: Final = 2.0  # an API process that has not queued its job by then is gone
LOST_S: Final = 10.0  # a job without an update for so long is not in the middle of a change
STUCK_S: Final = 5.0  # after which the worker of a job that should stop is killed; its own patience is shorter
MAX_DEATHS: Final = 10  # of workers in a row, without the job getting further
MAX_KILLS: Final = 100  # the same by SIGKILL: somebody's doing, or the kernel's when memory ran out
KEEP_S: Final = 3600.0  # of a completed job's records in the queue

Action = Literal["submit", "show queued", "resume", "cancel", "settle", "kill", "give up"]

_log = logging.getLogger("brim.jobs")


def decide(job: JobRow, state: DbosState | None, quiet_s: float, stopping_s: float) -> Action | None:
    """What to do about an unfinished job, given the queue's state of it; None: nothing.

    quiet_s     since its row was last seen to change
    stopping_s  since it was seen that it should stop
    """
    known = None if state is None else state.status
    if job.wanted != "run":
        if known in ("ENQUEUED", "PENDING"):
            return "cancel"
        if job.status != "running":
            return "settle"  # no worker holds it
        return "kill" if stopping_s > STUCK_S else None
    if known is None:
        return "submit" if quiet_s > (LOST_S if job.status == "running" else SLOW_S) else None
    if known == "ENQUEUED":
        late = job.status == "pending" or (job.status == "running" and quiet_s > LOST_S)
        return "show queued" if late else None
    if known in ("CANCELLED", "ERROR", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"):
        if job.status != "running":
            return "resume" if quiet_s > SLOW_S else None  # by an API process that died before it told the queue
        return "give up" if quiet_s > LOST_S else None
    return None  # a worker has it, or has just completed it


def is_leftover(job: JobRow | None, quiet_s: float) -> bool:
    """Whether a job should not be in the queue: it was stopped, has failed, or no longer exists."""
    if job is None:
        return True
    if job.wanted != "run":
        return job.status not in UNFINISHED and job.status != "completed"
    return job.status == "failed" and quiet_s > LOST_S  # before that its worker is about to record it


class Reconciler:
    """Looks after the jobs for the supervisor; a job that kills its workers again and again is failed.

    How long a job has not changed is measured by this process's own clock: the machine's may be set back or forth.
    """

    def __init__(
        self, catalogue: Catalogue, queue: Queue, data: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._catalogue, self._queue, self._data, self._clock = catalogue, queue, data, clock
        self._seen: dict[tuple[str, str], tuple[Any, float]] = {}  # (job, what) → its value, and since when
        self._counted: dict[str, int] = {}  # job → the attempt whose death was counted last

    def once(self) -> list[str]:
        """Complete what is missing for unfinished jobs; names of workers to kill.

        Call `died` for workers that ended before this, so that none is killed twice for one job.
        """
        now_s, seen = self._clock(), dict[tuple[str, str], tuple[Any, float]]()

        def age_s(job_id: str, what: str, value: Any) -> float:
            known = self._seen.get((job_id, what), (None, now_s))
            seen[job_id, what] = known if known[0] == value else (value, now_s)
            return now_s - seen[job_id, what][1]

        jobs = self._catalogue.jobs.unfinished()
        active = self._queue.active()
        states = active | self._queue.states([job.id for job in jobs if job.id not in active])
        condemned = []
        for job in jobs:
            stopping_s = age_s(job.id, "stopping", job.wanted != "run")
            action = decide(job, states.get(job.id), age_s(job.id, "updated", job.updated_at), stopping_s)
            if action == "kill" and job.worker is not None:
                condemned.append(job.worker)
            elif action is not None:
                with _apart(job.id):
                    self._mend(action, job)
        for job_id in active.keys() - {job.id for job in jobs}:
            row = self._catalogue.jobs.get(job_id)
            if is_leftover(row, age_s(job_id, "updated", row and row.updated_at)):
                self._queue.cancel(job_id)
        for job_id in self._queue.succeeded_before(time.time() - KEEP_S):
            self._queue.forget(job_id)
        self._seen = seen
        return condemned

    def died(self, worker: str, reason: str) -> None:
        """A worker ended: its job that was to stop has stopped, another is counted a death.

        Only the first death of an attempt counts: a worker that cannot even start is no fault of the job.
        """
        settle_stopped(self._catalogue, self._queue, self._catalogue.jobs.of_worker(worker), self._data)
        for job in self._catalogue.jobs.of_worker(worker):
            if job.status != "running" or job.wanted != "run" or job.attempts <= self._counted.get(job.id, 0):
                continue
            self._counted[job.id] = job.attempts
            deaths = self._catalogue.jobs.died(job.id)
            if deaths >= (MAX_KILLS if reason == "signal 9" else MAX_DEATHS):
                self._queue.cancel(job.id)
                self._fail(job, f"its worker died {deaths} times in a row without getting further; last: {reason}")

    def _mend(self, action: Action, job: JobRow) -> None:
        _log.info("job %s is %s and wanted to %s: %s", job.id, job.status, job.wanted, action)
        if action == "submit":
            self._queue.submit(job.id)
        elif action == "cancel":
            self._queue.cancel(job.id)
        elif action == "resume":
            with suppress(Conflict):  # the API was only slow, and a worker has it by now
                self._queue.resume(job.id, failed=True)
        elif action == "settle":
            self._catalogue.jobs.settle(job.id, output_of(self._data, job))
        elif action == "give up":
            self._fail(job, "its record in the queue ended without a word; resume the job")
        if action in ("submit", "show queued"):
            self._catalogue.jobs.move(job.id, "queued", of=["pending", "running"])

    def _fail(self, job: JobRow, error: str) -> None:
        output = output_of(self._data, job)
        self._catalogue.jobs.move(job.id, "failed", of=["running"], output=output, error=error)
        _log.warning("job %s is given up: %s", job.id, error)


def adopt_orphans(catalogue: Catalogue, queue: Queue, live: set[str], data: Path) -> int:
    """Queue the jobs of workers that no longer exist, and end those that were to stop; how many.

    For the start of a service alone, when no worker runs.
    """
    stopped = settle_stopped(catalogue, queue, catalogue.jobs.unfinished(), data)
    lost = queue.orphans(live)
    for job_id in lost:
        with _apart(job_id):
            queue.adopt(job_id)
    return stopped + len(lost)


def settle_stopped(catalogue: Catalogue, queue: Queue, jobs: list[JobRow], data: Path) -> int:
    """Settle those of a dead worker's jobs that should stop; how many."""
    stopped = [job for job in jobs if job.wanted != "run"]
    for job in stopped:
        with _apart(job.id):
            queue.cancel(job.id)
            catalogue.jobs.settle(job.id, output_of(data, job))
    return len(stopped)


@contextmanager
def _apart(job_id: str) -> Iterator[None]:
    """What goes wrong with one job keeps nobody from looking after the others; a database that is away does."""
    try:
        yield
    except Unavailable:
        raise
    except Exception:
        _log.exception("job %s cannot be looked after", job_id)

"""Reconciles catalogue and queue: completes what a killed process left half done between the two databases.

API, workers and supervisor each write the catalogue first and then the queue (or the other way round), and any of
them may die in between. `decide` compares a job's row with the queue's state and says what is missing; doing it twice,
or at the same time as a process that was only slow, changes nothing.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from brim.errors import Conflict
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


def decide(job: JobRow, state: DbosState | None, now_s: float) -> Action | None:
    """What to do about an unfinished job, given the queue's state of it; None: nothing."""
    quiet_s = now_s - job.updated_at
    known = None if state is None else state.status
    if job.wanted != "run":
        return _decide_stopping(job, known, now_s)
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


def _decide_stopping(job: JobRow, known: str | None, now_s: float) -> Action | None:
    if known in ("ENQUEUED", "PENDING"):
        return "cancel"
    if job.status != "running":
        return "settle"  # no worker holds it
    since_s = job.updated_at if job.stopping_at is None else job.stopping_at
    return "kill" if now_s - since_s > STUCK_S else None


def once(catalogue: Catalogue, queue: Queue, now_s: float, data: Path) -> list[str]:
    """Complete what is missing for unfinished jobs; names of workers to kill.

    Call `Deaths.note` for workers that ended before this, so that none is killed twice for one job.
    """
    jobs = catalogue.jobs.unfinished()
    active = queue.active()
    states = active | queue.states([job.id for job in jobs if job.id not in active])
    condemned = []
    for job in jobs:
        action = decide(job, states.get(job.id), now_s)
        if action == "kill" and job.worker is not None:
            condemned.append(job.worker)
        elif action is not None:
            _mend(action, job, catalogue, queue, data)
    for job_id in active.keys() - {job.id for job in jobs}:
        if is_leftover(catalogue.jobs.get(job_id), now_s):
            queue.cancel(job_id)
    for job_id in queue.succeeded_before(now_s - KEEP_S):
        queue.forget(job_id)
    return condemned


def is_leftover(job: JobRow | None, now_s: float) -> bool:
    """Whether a job should not be in the queue: it was stopped, has failed, or no longer exists."""
    if job is None:
        return True
    if job.wanted != "run":
        return job.status not in UNFINISHED and job.status != "completed"
    return job.status == "failed" and now_s - job.updated_at > LOST_S  # before that its worker is about to record it


def orphans(catalogue: Catalogue, queue: Queue, live: set[str], data: Path) -> int:
    """Queue the jobs of workers that no longer exist, and end those that were to stop; how many.

    For the start of a service alone, when no worker runs.
    """
    stopped = [job for job in catalogue.jobs.unfinished() if job.wanted != "run"]
    for job in stopped:
        queue.cancel(job.id)
        catalogue.jobs.settle(job.id, output_of(data, job))
    lost = queue.orphans(live)
    for job_id in lost:
        queue.adopt(job_id)
    return len(stopped) + len(lost)


class Deaths:
    """Counts deaths of workers; a job that kills its workers again and again is failed."""

    def __init__(self, catalogue: Catalogue, queue: Queue, data: Path) -> None:
        self._catalogue, self._queue, self._data = catalogue, queue, data
        self._counted: dict[str, int] = {}  # job → the attempt whose death was counted last

    def note(self, worker: str, reason: str) -> None:
        """A worker ended: its job that was to stop has stopped, another is counted a death.

        Only the first death of an attempt counts: a worker that cannot even start is no fault of the job.
        """
        settle_stopped(self._catalogue, self._queue, worker, self._data)
        for job in self._catalogue.jobs.of_worker(worker):
            if job.status == "running" and job.wanted == "run" and job.attempts > self._counted.get(job.id, 0):
                self._counted[job.id] = job.attempts
                self._count(job, reason)

    def _count(self, job: JobRow, reason: str) -> None:
        deaths = self._catalogue.jobs.died(job.id)
        if deaths < (MAX_KILLS if reason == "signal 9" else MAX_DEATHS):
            return
        text = f"its worker died {deaths} times in a row without getting further; last: {reason}"
        self._queue.cancel(job.id)
        self._catalogue.jobs.move(job.id, "failed", of=["running"], output=output_of(self._data, job), error=text)
        _log.warning("job %s is given up: %s", job.id, text)


def settle_stopped(catalogue: Catalogue, queue: Queue, worker: str, data: Path) -> None:
    """Settle the jobs that a dead worker had been told to stop."""
    for job in catalogue.jobs.of_worker(worker):
        if job.wanted != "run":
            queue.cancel(job.id)
            catalogue.jobs.settle(job.id, output_of(data, job))


def _mend(action: Action, job: JobRow, catalogue: Catalogue, queue: Queue, data: Path) -> None:
    _log.info("job %s is %s and wanted to %s: %s", job.id, job.status, job.wanted, action)
    if action == "submit":
        queue.submit(job.id)
    elif action == "cancel":
        queue.cancel(job.id)
    elif action == "resume":
        with suppress(Conflict):  # the API was only slow, and a worker has it by now
            queue.resume(job.id, failed=True)
    elif action == "settle":
        catalogue.jobs.settle(job.id, output_of(data, job))
    elif action == "give up":
        text = "its record in the queue ended without a word; resume the job"
        catalogue.jobs.move(job.id, "failed", of=["running"], output=output_of(data, job), error=text)
    if action in ("submit", "show queued"):
        catalogue.jobs.move(job.id, "queued", of=["pending", "running"])

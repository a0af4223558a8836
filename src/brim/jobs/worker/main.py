"""A worker: `python -m brim.jobs.worker.main NAME BEAT LIFELINE`, one job at a time on one device.

The queue's thread runs the workflow, whose steps only wait and write; the workload itself runs in the main thread.
A worker always ends as it would in a crash, without cleaning up: what is on disk is valid up to the last shard or
checkpoint, and the next worker of this name continues from there.
"""

import logging
import os
import queue
import signal
import sys
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from brim.errors import BrimError, StorageError
from brim.jobs.durable import Queue, is_database_error, run_step, take_jobs
from brim.jobs.registry.outputs import output_of
from brim.jobs.status import UNFINISHED
from brim.jobs.store import Catalogue
from brim.jobs.worker.joblog import LOGGER
from brim.jobs.worker.process import FileLock, Heartbeat, die_with_supervisor, give_way_to_others, read_settings, urls
from brim.jobs.worker.reconcile import settle_stopped
from brim.jobs.worker.redact import Redactor
from brim.jobs.worker.run import Attempt, JobRecord, WorkerSettings, failed, surely

IDLE_S: Final = 0.25  # between two heartbeats without a job
LOCK_S: Final = 60.0  # for the process that had this name to end

_log = logging.getLogger("brim.jobs")


class JobFailed(Exception):
    """What the queue stores of a failed job: its error message."""


class Worker:
    """Runs jobs from the queue until told to leave."""

    def __init__(self, settings: WorkerSettings, catalogue: Catalogue, jobs_url: str) -> None:
        self._settings, self._catalogue, self._jobs_url = settings, catalogue, jobs_url
        self._queue = Queue(jobs_url)
        self._attempt: Attempt | None = None
        self._inbox = queue.Queue[Attempt]()  # for the main thread
        self._leaving = self._is_worn = False

    def serve(self, facts: dict[str, Any]) -> None:
        """Store what this worker computes on, then run jobs until `leave`."""
        self._catalogue.devices.put(self._settings.worker, facts)
        take_jobs(self._jobs_url, self._settings.worker, self._job)
        while not self._leaving:
            with suppress(queue.Empty):
                self._inbox.get(timeout=IDLE_S).run()
            self._settings.beat()

    def leave(self, *_: object) -> None:
        """Stop at the next batch and exit; the next worker of this name continues the job."""
        self._leaving = True
        if self._attempt is not None:
            self._attempt.leave()

    # The workflow. After a crash it runs again from the records of its steps, so it depends on nothing else.

    def _job(self, job_id: str) -> JobRecord:
        try:
            while not (record := run_step("slice", partial(self._run, job_id)))["ended"]:
                pass  # an earlier brim recorded a job's progress in slices, and of `publish` nothing
            if record["error"] is None:
                record |= run_step("publish", partial(self._publish, job_id, record["result"])) or {}
            if record["error"] is not None:
                run_step("fail", partial(self._fail, job_id, record["error"], record.get("failure")))
                raise JobFailed(record["error"])
            result: JobRecord = record["result"]
            return result
        except JobFailed:
            raise
        except Exception as failure:
            if is_database_error(failure):  # it took no record, as on a full disk: end as a crash would
                _log.exception("job %s: the queue takes no record; its worker is ended and goes on later", job_id)
                os._exit(1)
            record = self._failed(failure)  # as an earlier brim recorded it: it would be raised again at every start
            self._fail(job_id, record["error"], record["failure"])
            raise JobFailed(record["error"]) from failure
        except BaseException:  # cancelled, or in other hands by now: the queue's own way to end a workflow
            self._settle(job_id)
            raise

    # Its steps. An exception would be recorded and raised again for ever, so what fails is part of the record.

    def _run(self, job_id: str) -> JobRecord:
        """Run the job in the main thread until it ends; the record is all that the queue stores."""
        if self._is_worn:  # by the job before, which failed in a way nobody foresaw: a new process takes this one
            os._exit(0)
        job = surely(partial(self._catalogue.jobs.get, job_id))
        running = partial(self._catalogue.jobs.move, job_id, "running", of=UNFINISHED, worker=self._settings.worker)
        if job is None or not surely(running):
            surely(partial(self._queue.cancel, job_id))  # the queue refuses this record and ends the workflow
            return {"ended": False}
        try:
            with closing(Attempt(job, self._settings, self._catalogue)) as attempt:
                self._attempt = attempt
                if self._leaving:
                    attempt.leave()
                self._inbox.put(attempt)
                record = attempt.wait(partial(self._queue.is_cancelled, job_id))
                self._is_worn |= attempt.is_unexpected
        except Exception as failure:
            _log.exception("job %s cannot be run", job_id)
            record = self._failed(failure)
        if self._leaving:  # by our own wish: no record, as in a crash, and the next worker goes on
            os._exit(0)
        return record

    def _publish(self, job_id: str, result: JobRecord) -> JobRecord:
        """Mark the job as completed, unless a stop was requested at the last moment."""
        try:
            job = surely(partial(self._catalogue.jobs.get, job_id))
            if job is None:
                return {}
            output = output_of(self._settings.data, job)
            if output.items is None:
                raise StorageError("what it has written is damaged; submit the job again")
            if job.makes == "run":
                output = replace(output, about={**output.about, **result})
            done = partial(self._catalogue.jobs.move, job_id, "completed", of=UNFINISHED, output=output, result=result)
            if not surely(done) and job.status in UNFINISHED:
                surely(partial(self._queue.cancel, job_id))  # refuses the record of this step; then _settle
            return {}
        except Exception as failure:
            _log.exception("job %s cannot be listed", job_id)
            return self._failed(failure)

    def _fail(self, job_id: str, error: str, failure: JobRecord | None) -> None:
        """Mark the job as failed; its output so far stays."""
        job = surely(partial(self._catalogue.jobs.get, job_id))
        if job is not None:
            output = output_of(self._settings.data, job)
            move = partial(self._catalogue.jobs.move, job_id, "failed", of=UNFINISHED, error=error, failure=failure)
            surely(partial(move, output=output))

    def _failed(self, failure: Exception) -> JobRecord:
        redact = Redactor({self._settings.data: "(data)"})
        return dict(redact.values(failed(failure)))

    def _settle(self, job_id: str) -> None:
        """Mark the job as paused or cancelled, unless another worker has it."""
        state = surely(partial(self._queue.states, [job_id])).get(job_id)
        job = surely(partial(self._catalogue.jobs.get, job_id))
        if job is not None and (state is None or state.status == "CANCELLED"):
            surely(partial(self._catalogue.jobs.settle, job_id, output_of(self._settings.data, job)))


def main(argv: list[str]) -> int:
    """Run the worker of that name until SIGTERM; the service's settings are on standard input."""
    name, beat, lifeline = argv[0], Heartbeat(int(argv[1])), int(argv[2])
    die_with_supervisor(lifeline)
    settings = read_settings()
    give_way_to_others()
    _set_up_logging(name, settings.get("log_level", "INFO"))
    lock = FileLock(Path(settings["data"]) / "workers" / f"{name}.lock")
    try:
        lock.wait(LOCK_S)
        _run(name, settings, beat)
    except BrimError as failure:
        _log.error("%s", failure)
        return 1
    return 0


def _set_up_logging(name: str, level: str) -> None:
    """Standard error logs at the service's level; a job's own log also gets INFO."""
    shown = logging.StreamHandler()
    shown.setLevel(level)
    logging.basicConfig(handlers=[shown], format=f"{name} %(levelname)s %(message)s")
    logging.getLogger(LOGGER).setLevel(min(logging.INFO, shown.level))


def _run(name: str, settings: dict[str, Any], beat: Heartbeat) -> None:
    data = Path(settings["data"])
    jobs_url, catalogue_url = urls(data, settings.get("database"))
    catalogue = Catalogue.open(catalogue_url)
    with closing(Queue(jobs_url)) as queue:
        settle_stopped(catalogue, queue, catalogue.jobs.of_worker(name), data)  # first: people wait for it

    from brim.engine.device import (  # brings torch, which takes seconds
        describe,
        gpu_uuid,
        keep_to_share,
        resolve_device,
    )

    device, min_free = resolve_device("auto"), settings.get("min_free_bytes")
    keep_to_share(device)
    gpus, own = tuple(settings.get("gpus") or ()), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    worker_settings = WorkerSettings(
        worker=name, data=data, device=device.type, min_free_bytes=min_free, beat=beat,
        gpus=gpus if own in gpus else (), own_gpu=own, cluster=settings.get("cluster"),
    )  # fmt: skip
    worker = Worker(worker_settings, catalogue, jobs_url)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.leave)
    uuid = gpu_uuid(device)
    worker.serve(describe(device) | ({} if uuid is None else {"uuid": uuid}))
    os._exit(0)  # without the queue's threads: they may be waiting for a database


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

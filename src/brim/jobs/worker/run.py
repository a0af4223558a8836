"""One attempt at one job: the workload runs in the main thread, and a workflow's thread watches it in slices.

The main thread, because libraries expect it (signals, CUDA graphs, OpenMP). Slices, because a workflow's history must
stay short while a cancel must be noticed soon; between two slices the workload simply goes on.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from brim.errors import BrimError, NotFound, Unavailable
from brim.jobs.kinds import KINDS, Inputs, Spec, Stopped, Task, job_phrase
from brim.jobs.status import JobProgress
from brim.jobs.store import Catalogue, DatasetRow, JobRow, RunRow
from brim.jobs.worker import disk
from brim.jobs.worker.devices import leased
from brim.jobs.worker.joblog import log_file, logging_to
from brim.jobs.worker.live import Live
from brim.jobs.worker.redact import Redactor

SLICE_SHARE: Final = 0.05  # of the seconds recorded so far: steps grow with the logarithm of a job's length
SLICE_MIN_S: Final = 1.0
SLICE_MAX_S: Final = 600.0
POLL_S: Final = 0.3  # between two checks for a cancel
STOP_S: Final = 3.5  # a workload that does not stop within this is killed: with a poll and a restart, five in all
TELL_S: Final = 0.9  # between two progress reports to the catalogue: at least one a second
MAX_WORDS: Final = 500  # characters of an unexpected failure
RETRY_S: Final = (1.0, 2.0, 5.0, 10.0)  # between tries to write what must not be lost; the last one repeats

_log = logging.getLogger("brim.jobs")
T = TypeVar("T")
SliceRecord = dict[str, Any]  # what the queue keeps of a slice


def slice_s(spent_s: float) -> float:
    """Seconds of the next slice of a job that has run for spent_s: 191 slices in ten hours."""
    return min(SLICE_MAX_S, max(SLICE_MIN_S, SLICE_SHARE * spent_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Where a worker's jobs run."""

    worker: str
    data: Path
    device: str  # "cpu" or "cuda"
    min_free_bytes: int | None = None  # None: from the environment, or the default
    beat: Callable[[], None]
    gpus: tuple[str, ...] = ()  # all of the machine, as CUDA names them
    own_gpu: str = ""  # the worker's, one of these
    cluster: str | None = None  # address of the service's cluster


class Attempt:
    """One attempt at a job; its log is open until `close`."""

    def __init__(self, job: JobRow, settings: WorkerSettings, catalogue: Catalogue) -> None:
        self.job, self._settings, self._catalogue = job, settings, catalogue
        self.progress = JobProgress(message="starting")
        self.is_unexpected = False  # the failure: then the process may be broken too, as after a CUDA error
        self._stop, self._done = threading.Event(), threading.Event()
        self._result: SliceRecord | None = None
        self._failure: BaseException | None = None
        self._is_left = False
        self._redact = Redactor(surely(self._known_paths))
        self._live, self._told_s = Live(settings.data, settings.worker), 0.0
        self._stack = ExitStack()
        self._stack.enter_context(logging_to(log_file(settings.data, job.id), self._redact))
        _log.info(
            "attempt %d at job %s, by worker %s on %s", job.attempts + 1, job.id, settings.worker, settings.device
        )

    # In the main thread

    def run(self) -> None:
        """Do the work; `wait` gives its result or failure."""
        try:
            if not self._stop.is_set():
                self._result = self._work()
        except Stopped:
            pass
        except BaseException as failure:
            self._failure = self._failure or failure
        finally:
            self._done.set()

    def tell(self, progress: JobProgress) -> None:
        self.progress = progress
        self._settings.beat()

    def _work(self) -> SliceRecord:
        job, settings, kind = self.job, self._settings, KINDS[self.job.kind]
        settings.beat()
        spec, inputs, out = Spec(job.kind, job.name, job.config), self._inputs(), settings.data / job.out
        disk.check(out, kind.estimate_bytes(spec, inputs), settings.min_free_bytes)
        settings.beat()  # importing the workload took seconds
        with self._gpus() as gpus:
            task = Task(
                spec=spec,
                inputs=inputs,
                out=out,
                device=settings.device,
                batch_sizes=settings.data / "batch_sizes.json",
                tell=self.tell,
                stop=self._stop.is_set,
                gpus=gpus,
                cluster=settings.cluster,
            )
            return kind.run(task)

    @contextmanager
    def _gpus(self) -> Iterator[tuple[str, ...]]:
        """Hold the job's GPUs; nothing to wait for where the worker has the only one or the job needs none."""
        settings, config = self._settings, self.job.config
        if len(settings.gpus) < 2 or config.get("accelerator") == "cpu" or config.get("cluster"):
            yield settings.gpus
            return
        folder, wanted = settings.data / "workers", config.get("devices", 1)

        def tell(text: str) -> None:
            self.tell(JobProgress(message=text))

        with leased(folder, settings.gpus, settings.own_gpu, wanted, tell, self._stop.is_set) as gpus:
            try:
                yield gpus
            finally:
                free_cached()  # for the next holder

    def _inputs(self) -> Inputs:
        """Paths of what the job reads; it existed at submission and may have been deleted since."""
        names, catalogue = self.job.inputs, self._catalogue
        datasets = [self._path("dataset", id, catalogue.datasets.get) for id in names.get("dataset_ids") or ()]
        run_id = names.get("run_id")
        run = None if run_id is None else self._path("run", run_id, catalogue.runs.get)
        return Inputs(datasets=tuple(datasets), run=run)

    def _path(self, noun: str, id: str, get: Callable[[str], DatasetRow | RunRow | None]) -> Path:
        row = surely(partial(get, id))
        if row is None or not (self._settings.data / row.path).exists():
            raise NotFound(f"the {noun} {id} that the job reads no longer exists; submit the job with another")
        return self._settings.data / row.path

    # In the workflow's thread

    def wait(self, seconds: float, is_cancelled: Callable[[], bool]) -> SliceRecord:
        """Let the work go on for at most so many seconds: {ended, result, error, failure, seconds, progress}."""
        began_s = time.monotonic()
        result = error = failure = None
        if ended := self._watch(began_s + seconds, is_cancelled):
            if self._failure is not None:
                error, failure = self._describe(self._failure)
            elif self._result is not None:
                result = self._redact.values(self._result)
            else:
                error = "it stopped without having been asked to; resume the job"
        self._tell_catalogue()
        return {
            "ended": ended,
            "result": result,
            "error": error,
            "failure": failure,
            "seconds": round(time.monotonic() - began_s, 3),
            "progress": self.progress.as_dict(),
        }

    def leave(self) -> None:
        """Stop because the process ends; a workload that takes long is killed by the supervisor."""
        self._is_left = True
        self._stop.set()

    def close(self) -> None:
        """Stop the work, wait for its end and close the log."""
        self._stop_work()
        self._live.clear()
        self._stack.close()

    def _watch(self, end_s: float, is_cancelled: Callable[[], bool]) -> bool:
        """Wait for the end of the slice, of the work, or for a cancel; whether the work has ended."""
        while not self._done.wait(min(POLL_S, max(0.0, end_s - time.monotonic()))):
            if time.monotonic() - self._told_s >= TELL_S:
                self._check_disk()
                self._tell_catalogue()
            if is_cancelled() or self._stop.is_set():
                self._stop_work()
            elif time.monotonic() >= end_s:
                return False
        return True

    def _stop_work(self) -> None:
        self._stop.set()
        if not self._done.wait(STOP_S) and not self._is_left:
            self._give_up()
        self._done.wait()

    def _give_up(self) -> None:
        """End a process whose workload does not stop, as a crash would: the next one finds everything intact."""
        _log.warning("job %s does not stop; its worker is ended", self.job.id)
        os.kill(os.getpid(), signal.SIGKILL)

    def _check_disk(self) -> None:
        full = disk.watch(self._settings.data, self._settings.min_free_bytes)
        if full is not None:
            self._failure = self._failure or full
            self._stop.set()

    def _tell_catalogue(self) -> None:
        self._told_s = time.monotonic()
        self._live.tell(self.job.id, self.progress.flow)
        try:
            self._catalogue.jobs.tell(self.job.id, _onward(self.job.progress, self.progress))
        except Unavailable as failure:
            _log.warning("the progress of job %s could not be stored: %s", self.job.id, failure)

    def _describe(self, failure: BaseException) -> tuple[str, SliceRecord]:
        """A failure for people, and its field, code and hint; the log gets an unexpected one in full."""
        if isinstance(failure, BrimError):
            text, data = job_phrase(failure, self.job.config)
            _log.error("job %s failed: %s", self.job.id, text)
        else:
            self.is_unexpected = True
            first = next(iter(str(failure).splitlines()), "")[:MAX_WORDS]
            text = f"unexpected {type(failure).__name__}: {first}; the job's log has more"
            data = {"field": None, "code": "unexpected", "hint": ""}
            _log.error("job %s failed unexpectedly", self.job.id, exc_info=failure)
        return self._redact(text), self._redact.values(data)

    def _known_paths(self) -> dict[Path | str, str]:
        """Names for the directories that messages may mention."""
        data, job = self._settings.data, self.job
        known: dict[Path | str, str] = {data: "(data)", data / job.out: f'the {job.makes} "{job.name}"'}
        for id in job.inputs.get("dataset_ids") or ():
            if (dataset := self._catalogue.datasets.get(id)) is not None:
                known[data / dataset.path] = f'the dataset "{dataset.name}"'
        if (run := self._catalogue.runs.get(job.inputs.get("run_id") or "")) is not None:
            known[data / run.path] = f'the run "{run.name}"'
        return known


def free_cached() -> None:
    """Return the GPU memory that torch caches in this process."""
    import torch

    torch.cuda.empty_cache()


def surely(call: Callable[[], T]) -> T:
    """The call's result, retried for as long as the database is away; the queue does the same for its records."""
    tries = 0
    while True:
        try:
            return call()
        except Unavailable as failure:
            wait_s = RETRY_S[min(tries, len(RETRY_S) - 1)]
            _log.warning("%s; trying again in %.0f s", failure, wait_s)
            time.sleep(wait_s)
            tries += 1


def _onward(before: JobProgress, now: JobProgress) -> JobProgress:
    """Until an attempt has found its position, show that of the attempt before."""
    return now if now.total or now.current else replace(now, current=before.current, total=before.total)

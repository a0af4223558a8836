"""One attempt at one job: the workload runs in the main thread, and the queue's thread watches it.

The main thread, because libraries expect it (signals, CUDA graphs, OpenMP).
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from brim.errors import BrimError, NotFound, Unavailable
from brim.jobs.kinds import KINDS, Inputs, Spec, Stopped, Task, job_phrase
from brim.jobs.status import JobProgress
from brim.jobs.store import Catalogue, DatasetRow, JobRow, RunRow
from brim.jobs.worker import disk, member
from brim.jobs.worker.joblog import log_file, logging_to
from brim.jobs.worker.live import LiveFile
from brim.jobs.worker.process import FileLock
from brim.jobs.worker.redact import Redactor

POLL_S: Final = 0.3  # between two checks for a cancel
STOP_S: Final = 3.5  # a workload that does not stop within this is killed: with a poll and a restart, five in all
TELL_S: Final = 0.9  # between two progress reports to the catalogue: at least one a second
LEASE_POLL_S: Final = 0.3
MAX_WORDS: Final = 500  # characters of an unexpected failure
RETRY_S: Final = (1.0, 2.0, 5.0, 10.0)  # between tries to write what must not be lost; the last one repeats

_log = logging.getLogger("brim.jobs")
T = TypeVar("T")
JobRecord = dict[str, Any]  # {ended, result, error, failure}: what the queue keeps of an attempt


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
        self._result: JobRecord | None = None
        self._failure: BaseException | None = None
        self._is_left = False
        self._read = surely(self._look_up)
        out, data = f'the {job.makes} "{job.name}"', settings.data
        names = {data / row.path: f'the {noun} "{row.name}"' for noun, _, row in self._read if row is not None}
        self._redact = Redactor({data: "(data)", data / job.out: out, **names})
        self._live, self._told_s = LiveFile(settings.data, settings.worker), 0.0
        self._stack = ExitStack()
        self._stack.enter_context(logging_to(log_file(settings.data, job.id), self._redact))
        self._stack.callback(self._live.clear)
        device = "the CPU" if settings.device == "cpu" else "a GPU"
        again = f" again, attempt {job.attempts + 1}: continues with what is saved" if job.attempts else ""
        _log.info('the job "%s" starts on %s%s', job.name, device, again)

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

    def _work(self) -> JobRecord:
        job, settings = self.job, self._settings
        settings.beat()
        spec, inputs, out = Spec(job.kind, job.name, job.config), self._inputs(), settings.data / job.out
        disk.check(out, KINDS[job.kind].estimate_bytes(spec, inputs), settings.min_free_bytes)
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
            return member.run(task)

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
        paths: dict[str, list[Path]] = {"dataset": [], "run": []}
        for noun, id, row in self._read:
            if row is None or not (self._settings.data / row.path).exists():
                raise NotFound(f"the {noun} {id} that the job reads no longer exists; submit the job with another")
            paths[noun].append(self._settings.data / row.path)
        return Inputs(datasets=tuple(paths["dataset"]), run=next(iter(paths["run"]), None))

    # In the queue's thread

    def wait(self, is_cancelled: Callable[[], bool]) -> JobRecord:
        """Wait for the end of the work, tell the catalogue of its progress, and stop it when the job is cancelled."""
        while not self._done.wait(POLL_S):
            if time.monotonic() - self._told_s >= TELL_S:
                self._check_disk()
                self._tell_catalogue()
            if self._stop.is_set() or is_cancelled():
                self._stop_work()
        self._tell_catalogue()
        record: JobRecord = {"ended": True, "result": self._result, "error": None, "failure": None}
        if self._failure is not None:
            record = failed(self._failure, self.job.config)
            self.is_unexpected = not isinstance(self._failure, BrimError)
            trace = self._failure if self.is_unexpected else None
            _log.error("job %s failed: %s", self.job.id, record["error"], exc_info=trace)
        elif self._result is None:
            record["error"] = "it stopped without having been asked to; resume the job"
        return dict(self._redact.values(record))

    def leave(self) -> None:
        """Stop because the process ends; a workload that takes long is killed by the supervisor."""
        self._is_left = True
        self._stop.set()

    def close(self) -> None:
        """Stop the work, wait for its end and close the log."""
        self._stop_work()
        self._stack.close()

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
        now, before = self.progress, self.job.progress
        if not now.total and not now.current:  # until it knows its position, show that of the attempt before
            now = replace(now, current=before.current, total=before.total)
        try:
            self._catalogue.jobs.tell(self.job.id, now)
        except Unavailable as failure:
            _log.warning("the progress of job %s could not be stored: %s", self.job.id, failure)

    def _look_up(self) -> list[tuple[str, str, DatasetRow | RunRow | None]]:
        """What the job reads: noun, id, and the catalogue's row if it still has one."""
        ids, catalogue = self.job.inputs, self._catalogue
        rows: list[Any] = [("dataset", id, catalogue.datasets.get(id)) for id in ids.get("dataset_ids") or ()]
        rows += [("run", id, catalogue.runs.get(id)) for id in (ids.get("run_id"),) if id is not None]
        return rows


def failed(failure: BaseException, config: Collection[str] = ()) -> JobRecord:
    """The record of a failure: in words, and its field, code and hint."""
    if isinstance(failure, BrimError):
        text, data = job_phrase(failure, config)
    else:
        first = next(iter(str(failure).splitlines()), "")[:MAX_WORDS]
        text = f"unexpected {type(failure).__name__}: {first}; the job's log has more"
        data = {"field": None, "code": "unexpected", "hint": ""}
    return {"ended": True, "result": None, "error": text, "failure": data}


# GPUs: a lock for each, so that a job on several of them and the other workers' jobs take turns. A worker's job holds
# the worker's own GPU, and others where it asked for more. Everybody takes them in one order and keeps them, so that
# there is no deadlock and no stream of small jobs starves a large one. Locks end with their process.


@contextmanager
def leased(
    folder: Path, gpus: Sequence[str], own: str, wanted: Any, tell: Callable[[str], None], stop: Callable[[], bool]
) -> Iterator[tuple[str, ...]]:
    """Have the GPUs of a job, for as long as the block runs; while others have them, that is told again and again.

    folder  where the locks are, one for all workers
    """
    names = choose(gpus, own, wanted, lambda name: _is_free(folder, name))
    with ExitStack() as stack:
        for name in names:
            lock = FileLock(_lock_file(folder, name))
            while not lock.take():
                tell(f"waiting for GPU {name}, which another job has")
                if stop():
                    raise Stopped
                time.sleep(LEASE_POLL_S)
            stack.callback(lock.release)
        yield names


def choose(gpus: Sequence[str], own: str, wanted: Any, is_free: Callable[[str], bool]) -> tuple[str, ...]:
    """The GPUs for a job of one worker: its own, then free ones, then those that others have now; in their order.

    More than there are is all there are: the task says what is wrong with that.
    """
    count = len(gpus) if wanted == "all" else min(int(wanted), len(gpus))
    others = sorted((name for name in gpus if name != own), key=lambda name: not is_free(name))
    return tuple(sorted((own, *others[: max(0, count - 1)]), key=gpus.index))


def _is_free(folder: Path, name: str) -> bool:
    lock = FileLock(_lock_file(folder, name))
    is_free = lock.take()
    lock.release()
    return is_free


def _lock_file(folder: Path, name: str) -> Path:
    return folder / f"gpu-{''.join(letter if letter.isalnum() else '-' for letter in name)}.lock"


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

"""One attempt at one job: what it reads and where it writes, its log, and what is watched while it runs."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from brim.errors import BrimError, NotFound, Unavailable
from brim.jobs.kinds.registry import KINDS
from brim.jobs.kinds.specs import Spec
from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import Inputs, Task
from brim.jobs.store import Catalogue, DatasetRow, JobRow, RunRow
from brim.jobs.worker import disk
from brim.jobs.worker.joblog import log_file, logging_to
from brim.jobs.worker.leases import leased
from brim.jobs.worker.live import Live
from brim.jobs.worker.redact import Redactor
from brim.jobs.worker.session import Result, Session

TELL_S: Final = 0.9  # between two words to the catalogue: at least one a second
MAX_WORDS: Final = 500  # characters of a failure that nobody put in words for people
RETRY_S: Final = (1.0, 2.0, 5.0, 10.0)  # between tries of what must not be lost; the last again and again

_log = logging.getLogger("brim.jobs")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where jobs are worked on."""

    worker: str
    data: Path
    device: str  # "cpu" or "cuda"
    min_free_bytes: int | None = None  # None: as the environment or the default has it
    beat: Callable[[], None]
    gpus: tuple[str, ...] = ()  # of the machine, as CUDA names them
    own_gpu: str = ""  # of the worker, one of these
    cluster: str | None = None  # address of the service's


class Attempt:
    """A job's session and what belongs to it; its log is open until `close`."""

    def __init__(self, job: JobRow, place: Place, catalogue: Catalogue) -> None:
        """Open the log; the work itself begins when a bench runs the session."""
        self.job, self._place, self._catalogue = job, place, catalogue
        self.session = Session(self._work, place.beat, self._give_up)
        self._redact = Redactor(surely(self._known_paths))
        self._stack = ExitStack()
        self._live, self._told_s = Live(place.data, place.worker), 0.0
        self.is_unforeseen = False  # its failure: then the process may be broken too, as after an error of CUDA
        self._stack.enter_context(logging_to(log_file(place.data, job.id), self._redact))
        _log.info("attempt %d at job %s, by worker %s on %s", job.attempts + 1, job.id, place.worker, place.device)

    def wait(self, seconds: float, is_cancelled: Callable[[], bool]) -> Result:
        """Let it go on for so many seconds at most: {ended, result, error, seconds, progress}."""
        began_s = time.monotonic()
        result = error = None
        try:
            if ended := self.session.wait(seconds, partial(self._look, is_cancelled)):
                result = self._redact.values(self.session.result)
                error = None if result is not None else "it stopped without having been asked to; resume the job"
        except BaseException as failure:
            ended, error = True, self._words(failure)
        self._tell()
        return {
            "ended": ended,
            "result": result,
            "error": error,
            "seconds": round(time.monotonic() - began_s, 3),
            "progress": self.session.progress.as_dict(),
        }

    def close(self) -> None:
        """Stop the work, wait for its end and close the log."""
        self.session.close()
        self._live.clear()
        self._stack.close()

    def _work(self, session: Session) -> Result:
        """The work itself, in the main thread."""
        job, place, kind = self.job, self._place, KINDS[self.job.kind]
        place.beat()
        spec, inputs, out = Spec(job.kind, job.name, job.config), self._inputs(), place.data / job.out
        disk.check(out, kind.estimate_bytes(spec, inputs), place.min_free_bytes)
        place.beat()  # the kind's library was imported meanwhile
        with self._gpus(session) as gpus:
            task = Task(
                spec=spec,
                inputs=inputs,
                out=out,
                device=place.device,
                batch_sizes=place.data / "batch_sizes.json",
                tell=session.tell,
                stop=session.stop.is_set,
                gpus=gpus,
                cluster=place.cluster,
            )
            return kind.run(task)

    @contextmanager
    def _gpus(self, session: Session) -> Iterator[tuple[str, ...]]:
        """Have those of the job; where the worker has the only one, or the job none, there is nothing to wait for."""
        place, config = self._place, self.job.config
        if len(place.gpus) < 2 or config.get("accelerator") == "cpu" or config.get("cluster"):
            yield place.gpus
            return
        folder, wanted = place.data / "workers", config.get("devices", 1)

        def tell(text: str) -> None:
            session.tell(Progress(message=text))

        with leased(folder, place.gpus, place.own_gpu, wanted, tell, session.stop.is_set) as gpus:
            try:
                yield gpus
            finally:
                free_cached()  # for whoever has it next

    def _inputs(self) -> Inputs:
        """Where what it reads lies; all of it was there at submission, and may have been deleted since."""
        read, catalogue = self.job.inputs, self._catalogue
        datasets = [self._path("dataset", id, catalogue.datasets.get) for id in read.get("dataset_ids") or ()]
        run_id = read.get("run_id")
        run = None if run_id is None else self._path("run", run_id, catalogue.runs.get)
        return Inputs(datasets=tuple(datasets), run=run)

    def _path(self, what: str, id: str, get: Callable[[str], DatasetRow | RunRow | None]) -> Path:
        row = surely(partial(get, id))
        if row is None or not (self._place.data / row.path).exists():
            raise NotFound(f"the {what} {id} that the job reads is no longer there; submit the job with another")
        return self._place.data / row.path

    def _look(self, is_cancelled: Callable[[], bool]) -> bool:
        """Watch the session: its progress, the disk, and whether it is to stop."""
        if time.monotonic() - self._told_s >= TELL_S:
            if (full := disk.watch(self._place.data, self._place.min_free_bytes)) is not None:
                self.session.fail(full)
            self._tell()
        return is_cancelled()

    def _tell(self) -> None:
        """Tell the catalogue how far it is, if that answers; from a thread that the work does not wait for."""
        self._told_s = time.monotonic()
        self._live.tell(self.job.id, self.session.progress.flow)
        try:
            self._catalogue.jobs.tell(self.job.id, _onward(self.job.progress, self.session.progress))
        except Unavailable as failure:
            _log.warning("the progress of job %s is not told: %s", self.job.id, failure)

    def _give_up(self) -> None:
        """End a process whose job does not stop, as a crash would: the next one finds everything whole."""
        _log.warning("job %s does not stop; its worker is ended", self.job.id)
        os.kill(os.getpid(), signal.SIGKILL)

    def _words(self, failure: BaseException) -> str:
        """A failure for people; one that no code of ours foresaw goes to the log in full."""
        if isinstance(failure, BrimError):
            text = str(failure)
            _log.error("job %s failed: %s", self.job.id, text)
        else:
            self.is_unforeseen = True
            first = next(iter(str(failure).splitlines()), "")[:MAX_WORDS]
            text = f"unexpected {type(failure).__name__}: {first}; the job's log has more"
            _log.error("job %s failed unexpectedly", self.job.id, exc_info=failure)
        return self._redact(text)

    def _known_paths(self) -> dict[Path | str, str]:
        """What people call the directories that messages may name."""
        data, job = self._place.data, self.job
        known: dict[Path | str, str] = {data: "(data)", data / job.out: f'the {job.makes} "{job.name}"'}
        for id in job.inputs.get("dataset_ids") or ():
            if (dataset := self._catalogue.datasets.get(id)) is not None:
                known[data / dataset.path] = f'the dataset "{dataset.name}"'
        if (run := self._catalogue.runs.get(job.inputs.get("run_id") or "")) is not None:
            known[data / run.path] = f'the run "{run.name}"'
        return known


def free_cached() -> None:
    """Give the GPU's memory back that torch keeps for this process."""
    import torch

    torch.cuda.empty_cache()


def surely(call: Callable[[], T]) -> T:
    """The call's result, however long the databases are away; the queue does the same for its own records."""
    tries = 0
    while True:
        try:
            return call()
        except Unavailable as failure:
            wait_s = RETRY_S[min(tries, len(RETRY_S) - 1)]
            _log.warning("%s; trying again in %.0f s", failure, wait_s)
            time.sleep(wait_s)
            tries += 1


def _onward(before: Progress, now: Progress) -> Progress:
    """While an attempt has not found its place yet, it is at that of the one before."""
    return now if now.total or now.current else replace(now, current=before.current, total=before.total)

"""A job as its kind sees it: what to do, where to read and write, and how to report progress.

A kind's run(task) calls the same function as the command line, in the thread it is called in. It returns the job's
result, raises Stopped if it ended early because stop() said so, and raises a BrimError if it cannot continue.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, CheckpointError, ConfigError, Conflict, DatasetError
from brim.jobs.status import KIND_NAMES, Flow, JobProgress, Spec, jsonable
from brim.jobs.worker.process import cores

if TYPE_CHECKING:
    from brim.engine.training import TrainProgress

QUIET_S = 0.4  # without a report of the workload, after which its last one is repeated
SILENCE_S = 60.0  # for which it is repeated: a job that reports nothing for longer may hang, and must look like it
PATIENCE_S = 15.0  # to wait until the process that wrote the output before has ended


class Stopped(BaseException):
    """Ends a job that was asked to stop; not an Exception, so that no workload takes it for a failure of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Paths of what a job reads, from the catalogue: never from a request."""

    datasets: tuple[Path, ...] = ()  # in the order of dataset_ids
    run: Path | None = None  # of run_id


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """One attempt at a job."""

    spec: Spec
    inputs: Inputs
    out: Path  # datasets/ID, runs/ID or results/JOB: the same at every attempt, so that each continues the last
    device: str  # the worker's own: "cpu" or "cuda"
    batch_sizes: Path  # the file of tuned batch sizes
    tell: Callable[[JobProgress], None]  # may be called from a thread of the task; must not raise
    stop: Callable[[], bool]
    gpus: tuple[str, ...] = ()  # that the job holds, as CUDA names them; none on a CPU
    cluster: str | None = None  # address of the service's
    is_member: bool = False  # whether this process is one of several of the attempt
    last: JobProgress = field(default_factory=lambda: JobProgress(message="starting"))
    _told_s: float = 0.0
    _heard_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def torch_device(self) -> str:
        """The device that the config's accelerator means on this worker."""
        wanted = self.spec.config.get("accelerator", "auto")
        return {"auto": self.device, "cpu": "cpu"}.get(wanted, "cuda")

    @property
    def num_devices(self) -> int:
        """Devices that share the task; "all" on a CPU means one."""
        wanted, on_cpu = self.spec.config.get("devices", 1), self.torch_device == "cpu"
        available = cores() if on_cpu else max(1, len(self.gpus))
        if wanted == "all":
            return 1 if on_cpu else available
        if wanted > available:
            devices = f"{available} {'core' if on_cpu else 'GPU'}{'s' * (available > 1)}"
            raise ConfigError(
                f"is more than the {devices} of this machine; submit the job with fewer",
                field="devices",
                value=wanted,
                code="conflict",
            )
        return int(wanted)

    @property
    def cluster_address(self) -> str:
        if self.cluster is None:  # the service was started anew without it
            raise ConfigError(
                "the service no longer has a cluster", field="cluster", hint="have the service started with one"
            )
        return self.cluster

    def for_member(self) -> dict[str, Any]:
        """The arguments of a task in another process, except how it reports and stops."""
        names = ("spec", "inputs", "out", "device", "batch_sizes", "gpus", "cluster")
        return {name: getattr(self, name) for name in names}

    def result(self, kind: str, report: Mapping[str, Any], *, stopped: bool) -> dict[str, Any]:
        """A workload's report as the job's result: paths are left out, and the id of what it made is added."""
        if stopped:
            raise Stopped
        kept = {name: value for name, value in report.items() if name not in (kind, "weights")}
        return {**kept, f"{kind}_id": self.out.name}

    def report(self, progress: JobProgress) -> None:
        with self._lock:
            self.last, self._heard_s = progress, time.monotonic()
            self._send(progress)

    def say(self, message: str) -> None:
        """Report a new message at the same position."""
        self.report(replace(self.last, message=message))

    def report_or_stop(self, progress: JobProgress) -> None:
        """Report, then raise Stopped if asked to stop: for workloads that have no other way to be stopped."""
        self.report(progress)
        if self.stop():
            raise Stopped

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Report at least once a second: while the workload is silent, its last report and for how long."""
        self.report(self.last)
        done = threading.Event()
        thread = threading.Thread(target=self._repeat, args=[done], name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _repeat(self, done: threading.Event) -> None:
        while not done.wait(QUIET_S / 4):
            with self._lock:
                now_s = time.monotonic()
                silent_s = now_s - self._heard_s
                if now_s - self._told_s >= QUIET_S and silent_s < SILENCE_S:
                    self._send(replace(self.last, message=f"{self.last.message}, for {silent_s:.0f} s"))

    def _send(self, progress: JobProgress) -> None:
        self._told_s = time.monotonic()
        self.tell(progress)


def reporting(task: Task, run: Callable[[Task], dict[str, Any]]) -> dict[str, Any]:
    """Run a task, with a report every second; the result, as plain JSON values.

    Its output may be in use for a moment, by a worker that was killed and still writes.
    """
    until_s = time.monotonic() + PATIENCE_S
    with task.repeating():
        while True:
            try:
                return dict(jsonable(run(task)))
            except (DatasetError, CheckpointError) as failure:
                if failure.code != "in_use" or time.monotonic() > until_s:
                    raise
            task.say("waiting for the previous process to end")
            if task.stop():
                raise Stopped
            time.sleep(0.5)


# Progress of the workloads


def counted(done: int, total: int, message: str, rate: float = 0.0, flow: Flow | None = None) -> JobProgress:
    eta_s = (total - done) / rate if rate > 0 else None
    return JobProgress(current=done, total=total, rate=rate, eta_s=eta_s, message=message, flow=flow)


def flow_of(seconds: float, waiting: Mapping[str, float] | None) -> Flow | None:
    return None if waiting is None else Flow(seconds=seconds, waiting=waiting)


def in_training(progress: "TrainProgress", preparing: str) -> JobProgress:
    """Progress of training, in steps; before the first step only the message changes, so that nothing runs backwards.

    preparing  what the workload does before, such as "solving"
    """
    if progress.phase == "prepare":
        share = f" {progress.step} of {progress.steps}" if progress.steps else ""
        return JobProgress(message=f"{preparing}{share}")
    loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
    return JobProgress(
        current=progress.step,
        total=progress.steps,
        rate=progress.samples_per_s,
        eta_s=progress.eta_s if math.isfinite(progress.eta_s) else None,
        message=f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}{loss}",
        flow=flow_of(progress.seconds, progress.waiting),
    )


# Errors


def job_phrase(failure: BrimError, config: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """An error as jobs say it, and its field, code and hint: settings are those of the config, commands are jobs."""

    def name(word: str) -> str:
        if word in config:
            return f"config.{word}"
        if " " in word:
            kind = word.replace(" ", ".", 1)
            return f"a job of kind {kind}" if kind in KIND_NAMES else f'"{word}"'
        return {"resume": "a resume of the job", "out": "job"}.get(word, word)

    hint, place = failure.phrase_hint(name), failure.field
    return failure.phrase(name), {"field": None if place is None else name(place), "code": failure.code, "hint": hint}


@contextmanager
def checking(field: str, path: Path, config: Collection[str] = ()) -> Iterator[None]:
    """An input that cannot be used becomes a Conflict on its field, or on the setting at fault; no path is named."""
    try:
        yield
    except Conflict:
        raise
    except BrimError as failure:
        text, data = job_phrase(failure, config)
        text = text.replace(f"{path}/", "").replace(str(path), "it")
        if isinstance(failure, ConfigError) and failure.field in config:
            raise Conflict(text, field=data["field"]) from failure
        raise Conflict(f"{field} cannot be used: {text}", field=field) from failure

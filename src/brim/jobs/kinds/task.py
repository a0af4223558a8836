"""One attempt at a job: what a kind is given to work with, and how it tells where it is.

A kind's run(task) calls the same function as the command line, in the thread it is called in. It returns the job's
result, raises Stopped when it ended before that because stop() said so, and raises a BrimError when it cannot go on.
"""

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from brim.errors import BrimError, CheckpointError, Conflict, DatasetError
from brim.jobs.kinds.status import Flow, Progress

if TYPE_CHECKING:
    from brim.engine.training import TrainProgress
    from brim.jobs.kinds.specs import Spec

QUIET_S = 0.4  # without a word from the library, after which its last one is repeated
PATIENCE_S = 15.0  # for which the process that wrote before may take to end
SILENCE_S = 60.0  # for which it is repeated: a job that says nothing for longer may hang, and must look like it


class Stopped(BaseException):
    """Ends a job that was asked to stop; not an Exception: no library function may take it for a failure of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a job reads, as the catalogue knows it: never a path of a request."""

    datasets: tuple[Path, ...] = ()  # in the order of dataset_ids
    run: Path | None = None  # of run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One attempt at a job."""

    spec: "Spec"
    inputs: Inputs
    out: Path  # datasets/ID, runs/ID or results/JOB: the same at every attempt, so that each goes on where it was
    device: str  # the worker's own: "cpu" or "cuda"
    batch_sizes: Path  # the file of tuned batch sizes
    tell: Callable[[Progress], None]  # may be called from a thread of the task's own; must not raise
    stop: Callable[[], bool]
    gpus: tuple[str, ...] = ()  # that the job has, as CUDA names them; none on a CPU
    cluster: str | None = None  # address of the service's
    is_member: bool = False  # whether this process is one of several of the attempt: see crew


class Timed(Protocol):
    """What progress of the library says of its time."""

    @property
    def seconds(self) -> float:
        """Of its work so far."""

    @property
    def waiting(self) -> Mapping[str, float] | None:
        """Of these lost, by cause."""


class Voice:
    """Tells where a task is, at least once a second: where the library is silent, its last word and for how long.

    Inside a with block.
    """

    def __init__(self, task: Task, message: str = "starting") -> None:
        """Store."""
        self._task, self._last = task, Progress(message=message)
        self._told_s = self._heard_s = time.monotonic()
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="voice", daemon=True)

    def __enter__(self) -> Self:
        """Say the first word and begin to listen for silence."""
        self(self._last)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Fall silent."""
        self._done.set()
        self._thread.join()

    def __call__(self, progress: Progress) -> None:
        """Tell what the library said."""
        with self._lock:
            self._last, self._heard_s = progress, time.monotonic()
            self._tell(progress)

    @property
    def last(self) -> Progress:
        """What was told last."""
        return self._last

    def say(self, message: str) -> None:
        """Tell a new message at the same place."""
        self(replace(self._last, message=message))

    def or_stop(self, progress: Progress) -> None:
        """Tell, then leave by Stopped if that was asked for: where the library has no other way to be stopped."""
        self(progress)
        if self._task.stop():
            raise Stopped

    def _tell(self, progress: Progress) -> None:
        self._told_s = time.monotonic()
        self._task.tell(progress)

    def _repeat(self) -> None:
        while not self._done.wait(QUIET_S / 4):
            with self._lock:
                now_s = time.monotonic()
                silent_s = now_s - self._heard_s
                if now_s - self._told_s >= QUIET_S and silent_s < SILENCE_S:
                    self._tell(replace(self._last, message=f"{self._last.message}, for {silent_s:.0f} s"))


# What all kinds share


def attempt(run: Callable[[Task, Voice], dict[str, Any]]) -> Callable[[Task], dict[str, Any]]:
    """A kind's run with a voice, whose errors speak of jobs, not of options."""

    @functools.wraps(run)
    def attempted(task: Task) -> dict[str, Any]:
        try:
            with Voice(task) as voice:
                return dict(_plain(_patiently(run, task, voice)))
        except BrimError as failure:
            if failure.field is not None:
                raise
            raise _reworded(failure) from failure

    return attempted


def _patiently(run: Callable[[Task, Voice], dict[str, Any]], task: Task, voice: Voice) -> dict[str, Any]:
    """What run returns, once whoever still writes the output has ended: a worker that was killed a moment ago."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return run(task, voice)
        except (DatasetError, CheckpointError) as failure:
            if _TAKEN not in str(failure) or time.monotonic() > until_s:
                raise
        voice.say("waiting for the process before")
        if task.stop():
            raise Stopped
        time.sleep(0.5)


def device_of(task: Task) -> str:
    """The device that the config's accelerator means on this worker."""
    wanted = task.spec.config.get("accelerator", "auto")
    return {"auto": task.device, "cpu": "cpu"}.get(wanted, "cuda")


def counted(done: int, total: int, message: str, rate: float = 0.0, flow: Flow | None = None) -> Progress:
    """Progress of things that are counted."""
    eta_s = (total - done) / rate if rate > 0 else None
    return Progress(current=done, total=total, rate=rate, eta_s=eta_s, message=message, flow=flow)


def flow_of(where: Timed) -> Flow | None:
    """Where the time went, as the library's progress has it."""
    return None if where.waiting is None else Flow(seconds=where.seconds, waiting=where.waiting)


def in_training(where: "TrainProgress", preparing: str) -> Progress:
    """Progress of training, in steps; before its first step only the message changes, so that nothing runs backwards.

    preparing  what the library does before, such as "solving"
    """
    if where.phase == "prepare":
        share = f" {where.step} of {where.steps}" if where.steps else ""
        return Progress(message=f"{preparing}{share}")
    loss = "" if where.loss is None else f", loss {where.loss:.4g}"
    message = f"epoch {min(where.epoch + 1, where.epochs)}/{where.epochs}{loss}"
    eta_s = where.eta_s if math.isfinite(where.eta_s) else None
    return Progress(
        current=where.step,
        total=where.steps,
        rate=where.samples_per_s,
        eta_s=eta_s,
        message=message,
        flow=flow_of(where),
    )


_TAKEN = "is being written by another process"
_WORDS = (  # the command line's next step → a job's; the first that fit, in this order
    (r"add --resume to continue it or choose another --out", "resume its job, or submit another"),
    (r"(?:make room|free space|free some space)[^;]* or choose another --out", "free some space, then resume the job"),
    (r"choose another --out(?: FILE\.json)?", "submit another job"),
    (r"in another --out", "by another job"),
    (r"or another --out", "or submit another job"),
    (r'"brim (\w+) (\w+)[^"]*"', r"a job of kind \1.\2"),
    (r"brim (\w+) (\w+)", r"\1.\2"),
    (r"--([a-z][a-z-]*)", r"\1"),
)


def in_words(text: str) -> str:
    """A message of the library as a service says it: its next step is a job, not an option."""
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def refused(field: str, path: Path, failure: BrimError) -> Conflict:
    """An input that cannot be used, in the library's words but without its path."""
    text = in_words(str(failure)).replace(f"{path}/", "").replace(str(path), "it")
    return Conflict(f"{field} cannot be used: {text}", field=field)


def _reworded(failure: BrimError) -> BrimError:
    return type(failure)(in_words(str(failure)))


def _plain(value: Any) -> Any:
    """As JSON and every database take it: no NaN, no infinity, no tuple, no path."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.name if isinstance(value, Path) else value

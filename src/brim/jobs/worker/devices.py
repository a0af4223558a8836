"""A job's devices: which GPUs it holds, and the processes that share its work.

GPUs: a lock for each, so that a job on several of them and the other workers' jobs take turns. A worker's job holds the
worker's own GPU, and others where it asked for more. Everybody takes them in one order and keeps them, so that there is
no deadlock and no stream of small jobs starves a large one. Locks end with their process.

Processes: ranks that train as one, or one that leads several devices or a cluster. They are children of the worker,
which reports their progress, stops them and ends with them. Each writes lines of JSON to a pipe; its task is on its
standard input. When one dies, the others are ended, and all start again from the last checkpoint or shard, a few times.
"""

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from brim.errors import ConfigError, RankLost, from_dict
from brim.jobs.kinds import Stopped, Task
from brim.jobs.status import Flow, JobProgress
from brim.jobs.worker.process import FileLock, cores

RESTARTS: Final = 3  # of an attempt, when members die
GRACE_S: Final = 5.0  # for the others to end by themselves when one has died
POLL_S: Final = 0.1
LEASE_POLL_S: Final = 0.3
LOOPBACK: Final = "127.0.0.1"

_log = logging.getLogger("brim.jobs")

Result = dict[str, Any]
Environment = dict[str, str]


# GPUs


def choose(gpus: Sequence[str], own: str, wanted: Any, is_free: Callable[[str], bool]) -> tuple[str, ...]:
    """The GPUs for a job of one worker: its own, then free ones, then those that others have now; in their order.

    More than there are is all there are: the kind says what is wrong with that.
    """
    count = len(gpus) if wanted == "all" else min(int(wanted), len(gpus))
    others = sorted((name for name in gpus if name != own), key=lambda name: not is_free(name))
    return tuple(sorted((own, *others[: max(0, count - 1)]), key=gpus.index))


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


def _is_free(folder: Path, name: str) -> bool:
    lock = FileLock(_lock_file(folder, name))
    if not lock.take():
        return False
    lock.release()
    return True


def _lock_file(folder: Path, name: str) -> Path:
    return folder / f"gpu-{''.join(letter if letter.isalnum() else '-' for letter in name)}.lock"


# Processes


def num_devices(task: Task) -> int:
    """Devices that share the task; "all" on a CPU means one."""
    wanted, on_cpu = task.spec.config.get("devices", 1), task.torch_device == "cpu"
    have = cores() if on_cpu else max(1, len(task.gpus))
    if wanted == "all":
        return 1 if on_cpu else have
    if wanted > have:
        what = "core" if on_cpu else "GPU"
        raise ConfigError(
            f"is more than the {have} {what}{'s' * (have > 1)} of this machine; submit the job with fewer",
            field="devices",
            value=wanted,
            code="conflict",
        )
    return int(wanted)


def service_cluster(task: Task) -> str:
    """Address of the cluster that the job runs on."""
    if task.cluster is None:  # the service was started anew without it
        raise ConfigError(
            "the service no longer has a cluster", field="cluster", hint="have the service started with one"
        )
    return task.cluster


def by_ranks(task: Task) -> Result | None:
    """Train with one rank per device; None if this process does the work itself."""
    if task.is_member or (count := num_devices(task)) == 1:
        return None
    return _attempts(task, [_rank(task, number, count) for number in range(count)])


def by_leader(task: Task) -> Result | None:
    """Run in one process that leads several devices or a cluster; None if this process does the work itself."""
    if task.is_member or (num_devices(task) == 1 and not task.spec.config.get("cluster")):
        return None
    return _attempts(task, [_visible(task)])


def _attempts(task: Task, members: Sequence[Environment]) -> Result:
    for left in reversed(range(RESTARTS + 1)):
        try:
            return _Group(task, members).work()
        except _Died as death:
            if not left:
                raise RankLost(
                    f"a process of the job died {RESTARTS + 1} times, the last time by {death}; "
                    "look for what ended it, such as memory, then resume the job"
                ) from death
            _log.warning("a process of the job died by %s; all start again from what is on disk", death)
            task.say("starting again")
            if task.stop():
                raise Stopped from death
    raise AssertionError("unreachable")


# Environment of the members


def _visible(task: Task) -> Environment:
    """The GPUs of the job alone; none for a job on the CPU."""
    if task.torch_device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": ",".join(task.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if task.gpus else {}


def _rank(task: Task, number: int, count: int) -> Environment:
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // count))} if task.torch_device == "cpu" else {}
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {**_visible(task), **threads, **{name: str(value) for name, value in place.items()}}


def _meeting() -> Environment:
    """The rendezvous of the ranks: a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(probe.getsockname()[1])}


# Members at work


class _Died(Exception):
    """A member ended without a result or an error; the text says how."""


@dataclass(slots=True, eq=False)
class _Member:
    """A process, and its last message."""

    process: subprocess.Popen[bytes]
    voice: IO[bytes]
    number: int
    rest: bytes = b""  # of a line that is not whole yet
    outcome: Result = field(default_factory=dict)  # result, stopped or error

    def read(self) -> Iterator[Result]:
        """Its messages; closes the pipe at its end."""
        data = os.read(self.voice.fileno(), 1 << 16)
        if not data:
            self.voice.close()
            return
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


class _Group:
    """The processes of one start."""

    def __init__(self, task: Task, environments: Sequence[Environment]) -> None:
        self._task, self._environments = task, environments

    def work(self) -> Result:
        """Start them, read their messages until all have ended, and return the result."""
        with self._started() as (members, stop):
            self._listen(members, stop)
        return _outcome(members)

    @contextmanager
    def _started(self) -> Iterator[tuple[list[_Member], IO[bytes]]]:
        lifeline, stopping = os.pipe(), os.pipe()
        members: list[_Member] = []
        stop = os.fdopen(stopping[1], "wb")
        try:
            shared = _meeting() if len(self._environments) > 1 else {}
            for number, one in enumerate(self._environments):
                members.append(self._start(number, {**shared, **one}, lifeline[0], stopping[0]))
            yield members, stop
        finally:
            for member in members:
                _end(member)
            stop.close()
            for end in (*lifeline, stopping[0]):
                os.close(end)

    def _start(self, number: int, environment: Environment, lifeline: int, stop: int) -> _Member:
        listening, speaking = os.pipe()
        numbers = [str(end) for end in (lifeline, speaking, stop)]
        process = subprocess.Popen(
            [sys.executable, "-m", "brim.jobs.worker.member", *numbers],
            stdin=subprocess.PIPE, stdout=2, env={**os.environ, **environment}, pass_fds=(lifeline, speaking, stop),
        )  # fmt: skip
        os.close(speaking)
        member = _Member(process, os.fdopen(listening, "rb", buffering=0), number)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is seen below
            process.stdin.write(json.dumps(_task_values(self._task)).encode())
            process.stdin.close()
        return member

    def _listen(self, members: Sequence[_Member], stop: IO[bytes]) -> None:
        """Read until every member has ended; soon after one has died, the others are killed."""
        died_s: float | None = None
        with selectors.DefaultSelector() as ears:
            for member in members:
                ears.register(member.voice, selectors.EVENT_READ, member)
            while any(member.process.poll() is None for member in members) or ears.get_map():
                for key, _ in ears.select(POLL_S):
                    self._hear(key.data, ears)
                if self._task.stop() and not stop.closed:
                    stop.close()
                if died_s is None and any(_has_died(member) for member in members):
                    died_s = time.monotonic()
                if died_s is not None and time.monotonic() - died_s > GRACE_S:
                    for member in members:
                        member.process.kill()

    def _hear(self, member: _Member, ears: selectors.BaseSelector) -> None:
        voice = member.voice
        number = voice.fileno()
        for word in member.read():
            if "progress" in word:
                self._task.report(_progress(word["progress"]))
            elif "log" in word:
                _log.log(word["log"][0], "%s", word["log"][1])
            else:
                member.outcome = word
        if voice.closed:
            ears.unregister(number)


def _task_values(task: Task) -> Result:
    """The task as a member reads it: see member.read_task."""
    return {
        "spec": asdict(task.spec),
        "datasets": [str(path) for path in task.inputs.datasets],
        "run": None if task.inputs.run is None else str(task.inputs.run),
        "out": str(task.out),
        "device": task.device,
        "batch_sizes": str(task.batch_sizes),
        "gpus": list(task.gpus),
        "cluster": task.cluster,
    }


def _progress(values: Result) -> JobProgress:
    flow = values.pop("flow", None)
    return JobProgress(**values, flow=None if flow is None else Flow(**flow))


def _has_died(member: _Member) -> bool:
    return member.process.poll() not in (None, 0)


def _end(member: _Member) -> None:
    """End a member that still runs, after a failure of ours."""
    if member.process.poll() is None:
        member.process.kill()
    member.process.wait()
    member.voice.close()


def _outcome(members: Sequence[_Member]) -> Result:
    """The result, or the first reason there is none: an error of a member, a death, what others made of it."""
    wrong = [member.outcome["error"] for member in members if "error" in member.outcome]
    for error in wrong:
        if error.get("type") != RankLost.__name__:
            raise from_dict(error) if "code" in error else RuntimeError(error["message"])
    for member in members:
        if member.process.returncode and "error" not in member.outcome:
            raise _Died(_words(member))
    if wrong:
        raise _Died(wrong[0]["message"])
    outcome = members[0].outcome
    if "result" in outcome:
        return dict(outcome["result"])
    if outcome.get("stopped"):
        raise Stopped
    raise _Died(_words(members[0]))


def _words(member: _Member) -> str:
    code = member.process.returncode
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{ended} (process {member.number})"

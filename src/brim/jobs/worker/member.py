"""Runs a task in this process or, on several devices or a cluster, in processes of its own.

Those are ranks that train as one, or one process that leads several devices or a cluster. They are children of the
worker, which reports their progress, stops them and ends with them. A socket joins each to the worker: it receives the
task, then a word when it is to stop, and sends progress, log records and its result; the socket's end means that the
worker is gone. When a process dies, the others are ended, and all start again from the last checkpoint or shard.

Each runs `python -m brim.jobs.worker.member SOCKET`.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from brim.errors import BrimError, RankLost, from_dict
from brim.jobs.kinds import KINDS, Stopped, Task, reporting
from brim.jobs.status import JobProgress
from brim.jobs.worker.joblog import LOGGER
from brim.jobs.worker.process import cores, die_with_parent

RESTARTS: Final = 3  # when members die again and again without getting further
GRACE_S: Final = 5.0  # for the others to end by themselves when one has died
POLL_S: Final = 0.1
LOOPBACK: Final = "127.0.0.1"
MAX_TRACE: Final = 4000  # characters of an unexpected failure

_log = logging.getLogger("brim.jobs")

MemberOutcome = dict[str, Any]
Environment = dict[str, str]


def run(task: Task) -> MemberOutcome:
    """The task's result; it reports at least once a second, and waits until a previous writer has ended."""
    kind, count = KINDS[task.spec.kind], task.num_devices
    if task.is_member or kind.spread is None or (count == 1 and not task.spec.config.get("cluster")):
        return reporting(task, kind.run)
    alone = [_visible(task)]
    members = [_rank(task, number, count) for number in range(count)] if kind.spread == "ranks" else alone
    return reporting(task, lambda task: _run_members(task, members))


# The worker's side


class _Died(Exception):
    """A member ended without a result or an error; the text says how."""


@dataclass(slots=True, eq=False)
class _Member:
    number: int
    process: subprocess.Popen[bytes]
    connection: "Connection[Any, Any]"
    outcome: MemberOutcome = field(default_factory=dict)  # result, stopped or error

    @property
    def death(self) -> str:
        code = self.process.returncode
        return f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'} (process {self.number})"


def _run_members(task: Task, environments: Sequence[Environment]) -> MemberOutcome:
    """Start them until they end with a result; give up after some deaths without progress in between."""
    deaths, furthest = 0, -1
    while True:
        members: list[_Member] = []
        try:
            shared = _rendezvous() if len(environments) > 1 else {}
            for number, own in enumerate(environments):
                members.append(_start(task, number, {**shared, **own}))
            _listen(task, members)
        finally:
            for member in members:
                member.process.kill()
                member.process.wait()
                member.connection.close()
        try:
            return _outcome(members)
        except _Died as death:
            deaths = deaths + 1 if task.last.current <= furthest else 1
            furthest = max(furthest, task.last.current)
            if deaths > RESTARTS:
                raise RankLost(
                    f"a process of the job died {deaths} times without getting further, the last time by {death}; "
                    "look for what ended it, such as memory, then resume the job"
                ) from death
            _log.warning("a process of the job died by %s; all start again from what is on disk", death)
            task.say("starting again")
            if task.stop():
                raise Stopped from death


def _start(task: Task, number: int, environment: Environment) -> _Member:
    ours, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "brim.jobs.worker.member", str(theirs.fileno())],
        stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, **environment}, pass_fds=(theirs.fileno(),),
    )  # fmt: skip
    theirs.close()
    with suppress(OSError):  # it has ended already, which is seen below
        ours.send(task.for_member())
    return _Member(number, process, ours)


def _listen(task: Task, members: Sequence[_Member]) -> None:
    """Read until every member has ended; soon after one has died, the others are killed."""
    died_s, is_stopping = None, False
    speaking = {member.connection: member for member in members}
    while speaking or any(member.process.poll() is None for member in members):
        for connection in wait(list(speaking), POLL_S):
            assert isinstance(connection, Connection)
            try:
                word = connection.recv()
            except (EOFError, OSError):
                del speaking[connection]
                continue
            if "progress" in word:
                task.report(word["progress"])
            elif "log" in word:
                _log.log(word["log"][0], "%s", word["log"][1])
            else:
                speaking[connection].outcome = word
        if task.stop() and not is_stopping:
            is_stopping = True
            for member in members:
                with suppress(OSError):
                    member.connection.send("stop")
        if died_s is None and any(member.process.poll() not in (None, 0) for member in members):
            died_s = time.monotonic()
        if died_s is not None and time.monotonic() - died_s > GRACE_S:
            for member in members:
                member.process.kill()


def _outcome(members: Sequence[_Member]) -> MemberOutcome:
    """The result, or the first reason there is none: an error of a member, a death, what others made of it."""
    errors = [member.outcome["error"] for member in members if "error" in member.outcome]
    for error in errors:
        if error.get("type") != RankLost.__name__:
            raise from_dict(error) if "code" in error else RuntimeError(error["message"])
    for member in members:
        if member.process.returncode and "error" not in member.outcome:
            raise _Died(member.death)
    if errors:
        raise _Died(errors[0]["message"])
    outcome = members[0].outcome
    if "result" in outcome:
        return dict(outcome["result"])
    if "stopped" in outcome:
        raise Stopped
    raise _Died(members[0].death)


def _visible(task: Task) -> Environment:
    """The GPUs of the job alone; none for a job on the CPU."""
    if task.torch_device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": ",".join(task.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if task.gpus else {}


def _rank(task: Task, number: int, count: int) -> Environment:
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // count))} if task.torch_device == "cpu" else {}
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {**_visible(task), **threads, **{name: str(value) for name, value in place.items()}}


def _rendezvous() -> Environment:
    """Where the ranks meet: a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(probe.getsockname()[1])}


# The member's side


class Speech(logging.Handler):
    """Sends words to the worker: log records, results, and of the first member also progress."""

    def __init__(self, connection: "Connection[Any, Any]", is_first: bool) -> None:
        super().__init__(logging.INFO if is_first else logging.WARNING)
        self._connection, self._is_first, self._sending = connection, is_first, threading.Lock()

    def say(self, **word: Any) -> None:
        with self._sending:
            self._connection.send(word)

    def tell(self, progress: JobProgress) -> None:
        if self._is_first:
            self.say(progress=progress)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self.say(log=[record.levelno, record.getMessage()])


def main(number: str) -> int:
    """Run the task; ending without a message counts as a death."""
    connection: Connection[Any, Any] = Connection(int(number))
    die_with_parent()
    speech = Speech(connection, is_first=os.environ.get("RANK", "0") == "0")
    logger = logging.getLogger(LOGGER)
    logger.addHandler(speech)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        values, stopping = connection.recv(), threading.Event()
        threading.Thread(target=_obey, args=[connection, stopping], name="lifeline", daemon=True).start()
        task = Task(**values, tell=speech.tell, stop=stopping.is_set, is_member=True)
        _keep_to_share(task)
        speech.say(result=run(task))
    except Stopped:
        speech.say(stopped=True)
    except BrimError as failure:
        speech.say(error=failure.as_dict())
        return 1
    except Exception as failure:
        logger.error("%s", traceback.format_exc()[-MAX_TRACE:])
        speech.say(error={"message": f"{type(failure).__name__}: {failure}"})
        return 1
    return 0


def _obey(connection: "Connection[Any, Any]", stopping: threading.Event) -> None:
    """Stop when the worker says so, and end when it is gone."""
    with suppress(EOFError, OSError):
        while connection.recv():
            stopping.set()
    os._exit(1)


def _keep_to_share(task: Task) -> None:
    """Limit this process to the jobs' share of every GPU it sees."""
    if task.device != "cpu" and task.gpus:
        import torch

        from brim.engine.device import keep_to_share

        for number in range(torch.cuda.device_count()):
            keep_to_share(torch.device("cuda", number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

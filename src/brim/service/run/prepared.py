"""A prepared process: torch and the rest are imported once, and workers and predictors are forked from it.

    supervisor ──command, environment, standard input──▶ prepared process ──forks twice──▶ the program

A worker that died is back within two seconds, and all share the memory of the libraries. The program is a child of the
supervisor, as if that had started it: of two forks the first ends at once, and the kernel gives its child to the
nearest "subreaper" above, which the supervisor is meanwhile. The prepared process runs nothing of what it imports: it
has no threads and has not touched a GPU, else it would not fork. Where it is missing, programs are started anew.
"""

import ctypes
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, NoReturn

from brim.jobs.worker.process import die_with_parent

log = logging.getLogger(__name__)

START_S: Final = 60.0  # for the imports, on a busy machine
FORK_S: Final = 20.0  # for a program to report, which takes some 20 ms unless the machine is overloaded
MAX_STARTS: Final = 5  # of the prepared process, in the life of a supervisor
MAX_MESSAGE: Final = 1024 * 1024
ROOM: Final = 512  # bytes for the command line that `ps` shows of a forked program
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkedProcess:
    """A child that was forked elsewhere; as much of `subprocess.Popen` as the supervisor uses."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        end_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if end_s is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif end_s is not None and time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode


class Prepared:
    """The prepared process as the supervisor sees it; used by the main thread alone."""

    def __init__(self, env: Mapping[str, str], lifeline: int) -> None:
        """env is what its programs have in common; nothing is started yet."""
        self._env, self._lifeline = dict(env), lifeline
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready = False
        self._num_starts, self._end_s = 0, 0.0

    def is_starting(self) -> bool:
        """Whether it is worth waiting for; starts it when it is not running."""
        if sys.platform != "linux":
            return False
        if self._process is None or self._process.poll() is not None:
            self._start()
        if self._control is None or self._is_ready:
            return False
        if select.select([self._control], [], [], 0)[0]:
            self._is_ready = self._control.recv(16) == b"ready"
            if not self._is_ready:  # it ended, or found that it must not fork
                self._num_starts = MAX_STARTS
                self.close()
            return False
        return time.monotonic() < self._end_s

    def fork(self, command: Sequence[str], env: Mapping[str, str], beat: int | None) -> ForkedProcess | None:
        """`python -m MODULE WORDS…` as a fork, where "{beat}" is that descriptor; None if that does not work now."""
        if not self._is_ready or self._control is None:
            return None
        theirs, ours = os.pipe()
        message = json.dumps({"command": list(command), "env": dict(env)}).encode()
        try:
            with _subreaper():
                socket.send_fds(self._control, [message], [theirs, *([] if beat is None else [beat])])
                if not select.select([self._control], [], [], FORK_S)[0]:
                    raise TimeoutError("it does not answer")
                pid = int(self._control.recv(16))
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is not our child
        except (OSError, ValueError) as failure:
            log.warning("nothing can be forked from the prepared process: %s", failure)
            self.close()  # and with it what it may have forked, which has not begun
            os.close(ours)
            return None
        finally:
            os.close(theirs)
        return ForkedProcess(pid, os.fdopen(ours, "wb"))

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._control = None
        self._is_ready = False

    def _start(self) -> None:
        self.close()
        if self._num_starts >= MAX_STARTS:
            return
        self._num_starts += 1
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
        with theirs:
            words = [str(theirs.fileno()), str(self._lifeline), " " * ROOM]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "brim.service.run.prepared", *words],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**self._env, "OPENBLAS_NUM_THREADS": "1"},  # else NumPy starts threads
                pass_fds=[theirs.fileno(), self._lifeline],
                process_group=0,
            )
        self._end_s = time.monotonic() + START_S


@contextmanager
def _subreaper() -> Iterator[None]:
    """Meanwhile, processes below this one whose parent ends become children of this one."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no subreaper here")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# In the prepared process


def import_all() -> None:
    """What workers and predictors use: the workloads with torch, and the queue."""
    import torch._dynamo  # noqa: F401  # optimizers import it, which takes a second

    import brim.jobs.worker.main
    import brim.service.prediction.process.main
    from brim import rf, segmentation, sequences

    brim.jobs.durable.import_library()
    for room in (rf, segmentation, sequences):
        for name in room.__all__:  # each is imported with its first use
            getattr(room, name)


def serve(control: socket.socket, lifeline: int) -> None:
    """Fork for each message until the supervisor is gone."""
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, all that is shared
    control.send(b"ready")
    while True:
        ready, _, _ = select.select([control.fileno(), lifeline], [], [])
        is_asked = control.fileno() in ready
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2) if is_asked else (b"", [], 0, None)
        if not message:
            return
        between = os.fork()
        if between == 0:
            parent = os.getpid()  # asked here: the fork may not run before this process has ended
            if os.fork() == 0:
                _become(json.loads(message), fds, control, parent)
            os._exit(0)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become(asked: dict[str, object], fds: list[int], control: socket.socket, parent: int) -> NoReturn:
    """In the fork: turn into the program, with its standard input, environment and arguments."""
    os.setpgid(0, 0)
    while os.getppid() == parent:  # until the supervisor is the parent, whose end will be ours
        time.sleep(0.001)
    die_with_parent()
    os.dup2(fds[0], 0)
    os.close(fds[0])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    command, env = asked["command"], asked["env"]
    assert isinstance(command, list)
    assert isinstance(env, dict)
    words = [str(fds[1]) if word == "{beat}" else str(word) for word in command]
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(env)
    if env.get("OMP_NUM_THREADS", "") != threads and env.get("OMP_NUM_THREADS", "").isdecimal():
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _rename(words)
    sys.argv = words[2:]
    try:
        control.send(b"%d" % os.getpid())
    except OSError:
        os._exit(1)  # nobody waits for it any more
    control.close()
    sys.exit(importlib.import_module(words[2]).main(words[3:]))


def _rename(words: list[str]) -> None:
    """Show this command line to `ps`, over that of the prepared process, which has room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def may_fork() -> bool:
    """Whether this process has one thread and has not initialised CUDA, after its imports."""
    return len(list(Path("/proc/self/task").iterdir())) == 1 and not sys.modules["torch"].cuda.is_initialized()


def main(argv: list[str]) -> int:
    control, lifeline = socket.socket(fileno=int(argv[0])), int(argv[1])
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its socket
    import_all()
    if may_fork():
        serve(control, lifeline)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

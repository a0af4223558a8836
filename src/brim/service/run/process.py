"""One child process of the supervisor: started under a name, watched, restarted when it ends.

Knows processes and pipes, and nothing of jobs, databases or HTTP. Children are started by the supervisor's main
thread only: the kernel kills them with the thread that started them.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from brim.jobs.worker.process import GIVE_UP
from brim.service.run.prepared import ForkedProcess, Prepared

SECRET = ("BRIM_TOKEN", "BRIM_DATABASE", "BRIM_OIDC_CLIENT_SECRET")  # not inherited: children read the settings
SHORT_LIFE_S = 5.0  # a child that ends sooner waits before it is restarted
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
START_S = 180.0  # until the first heartbeat: imports and the database's answer come before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a child runs. {lifeline} and {beat} in the command become the descriptors of its pipes."""

    name: str
    command: Sequence[str]
    stdin: str = field(repr=False)  # the settings, token and all
    env: Mapping[str, str] = field(default_factory=dict)  # over our own environment
    pass_fds: tuple[int, ...] = ()
    hang_s: float | None = None  # silent for longer: killed; None: not watched
    longest_wait_s: float = LONGEST_WAIT_S  # before a restart, after many short lives
    is_forked: bool = False  # from the prepared process, where there is one: then the command is python -m MODULE …


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended."""

    name: str
    code: int  # as in subprocess: negative for a signal
    lived_s: float
    reason: str  # for people: "signal 9, out of memory (the kernel's counter rose)"


class Child:
    """A program that is kept running."""

    def __init__(self, program: Program, lifeline: int, prepared: Prepared | None = None) -> None:
        """lifeline is the reading end of the pipe that ends with this process; nothing is started yet."""
        self.name = program.name
        self.deaths = 0
        self._program, self._lifeline = program, lifeline
        self._prepared = prepared if program.is_forked else None
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._beats: int | None = None  # reading end
        self._started_s = self._beat_s = self._next_s = 0.0
        self._has_beaten = self._hung = self._gave_up = False
        self._wait_s = FIRST_WAIT_S
        self._oom_kills = 0

    @property
    def pid(self) -> int | None:
        """Its process id; None while it waits to be restarted."""
        return None if self._process is None else self._process.pid

    def step(self, now_s: float) -> Death | None:
        """Start it when it is due, kill it if it is silent for too long, and return its death."""
        if self._process is None:
            if now_s >= self._next_s and not (self._prepared is not None and self._prepared.is_starting()):
                self._start(now_s)
            return None
        if (code := self._ended()) is not None:
            return self._bury(code, now_s)
        if self._is_silent(now_s):
            self._hung = True
            self.kill()
        return None

    def excuse(self, now_s: float) -> None:
        """Count its silence from now: this process was stopped, and perhaps the child too."""
        self._beat_s = now_s

    def terminate(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a stopped process handles no signal

    def kill(self) -> None:
        if self._process is not None:
            _kill_group(self._process.pid)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it still runs after so many seconds."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def _start(self, now_s: float) -> None:
        program, beats, ours = self._program, None, None
        if program.hang_s is not None:
            ours, beats = os.pipe()
            os.set_blocking(ours, False)
        env = {**inherited_env(), **program.env}
        self._process = self._fork(env, beats) or self._execute(env, beats)
        if beats is not None:
            os.close(beats)
        self._beats, self._started_s, self._beat_s = ours, now_s, now_s
        self._has_beaten = self._hung = self._gave_up = False
        self._oom_kills = oom_kills()
        _hand_over(self._process, program.stdin)

    def _fork(self, env: Mapping[str, str], beats: int | None) -> ForkedProcess | None:
        if self._prepared is None:
            return None
        command = [str(self._lifeline) if word == "{lifeline}" else word for word in self._program.command]
        return self._prepared.fork(command, env, beats)

    def _execute(self, env: Mapping[str, str], beats: int | None) -> "subprocess.Popen[bytes]":
        numbers = {"{lifeline}": str(self._lifeline), "{beat}": str(beats)}
        return subprocess.Popen(
            [numbers.get(word, word) for word in self._program.command],
            stdin=subprocess.PIPE,
            stdout=2,  # our standard output holds only the address
            env=env,
            pass_fds=[fd for fd in (self._lifeline, beats, *self._program.pass_fds) if fd is not None],
            process_group=0,  # Ctrl-C in a terminal is for this process alone; and a kill reaches its own children too
        )

    def _ended(self) -> int | None:
        """Its exit code; all it started is killed while its process id is still reserved."""
        assert self._process is not None
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _kill_group(self._process.pid)
        return self._process.wait()

    def _bury(self, code: int, now_s: float) -> Death:
        lived_s = now_s - self._started_s
        if lived_s < SHORT_LIFE_S:
            self._next_s, self._wait_s = now_s + self._wait_s, min(self._program.longest_wait_s, 2 * self._wait_s)
        else:
            self._next_s, self._wait_s = now_s, FIRST_WAIT_S
        if self._beats is not None:
            os.close(self._beats)
        self._process = self._beats = None
        self.deaths += 1
        return Death(self.name, code, lived_s, self._reason(code, now_s))

    def _reason(self, code: int, now_s: float) -> str:
        if self._gave_up:
            return "it hung and asked to be killed"
        if self._hung:
            return f"it hung: no progress for {now_s - self._beat_s:.0f} s"
        if code >= 0:
            return f"exit code {code}"
        lacked = code == -signal.SIGKILL and oom_kills() > self._oom_kills
        return f"signal {-code}" + ", out of memory (the kernel's counter rose)" * lacked

    def _is_silent(self, now_s: float) -> bool:
        if self._beats is None or self._program.hang_s is None:
            return False
        try:
            beats = os.read(self._beats, 65536)
        except BlockingIOError:
            beats = b""
        if GIVE_UP in beats:
            self._gave_up = True
            return True
        if beats:
            self._beat_s, self._has_beaten = now_s, True
        allowed_s = self._program.hang_s if self._has_beaten else max(START_S, self._program.hang_s)
        return now_s - self._beat_s > allowed_s


def inherited_env() -> dict[str, str]:
    """Our environment without what is secret."""
    return {name: value for name, value in os.environ.items() if name not in SECRET}


def stop_all(children: Sequence[Child], seconds: float) -> None:
    """Ask all to end, wait for them together, then kill those that did not."""
    for child in children:
        child.terminate()
    end_s = time.monotonic() + seconds
    for child in children:
        if child.wait(end_s - time.monotonic()) is None:
            child.kill()
            child.wait(5.0)


def oom_kills() -> int:
    """How often the kernel killed a process for lack of memory, on this machine and in our control group."""
    files = ["/proc/vmstat", "/sys/fs/cgroup/memory.events"]
    return sum(_counter(Path(file), "oom_kill") for file in files)


def _counter(file: Path, name: str) -> int:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == name)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the latter: macOS, for one that has ended
        return


def _hand_over(process: subprocess.Popen[bytes] | ForkedProcess, text: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(text.encode())
        process.stdin.close()
    except BrokenPipeError:
        return  # it has ended already, which the next step notices

"""One run of a watched command: started in a session of its own, read while it runs, and ended with all it started."""

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.diagnosis.scratch import scratch
from brim.engine.nvml import close_nvml, find_gpu, open_nvml, quietly
from brim.errors import ConfigError

HOOK = Path(__file__).parent / "hook"
POLL_S = 0.05
FLUSH_S = 4.0  # for a process to write all it knows before it is ended
SETTLE_S = 3.0  # between the first rank that is done and the last
TAIL = 4000  # bytes of the script's output that are kept
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(slots=True)
class Run:
    """What a run left behind."""

    results: list[dict[str, Any]] = field(default_factory=list)  # of the processes that imported torch
    exit_code: int | None = None  # None if it was ended by us
    output: str = ""  # the end of what it wrote to standard error and output
    began_s: float = 0.0  # since the epoch
    elapsed_s: float = 0.0
    left_behind: int = 0  # processes that outlived the script
    powers_w: list[float] = field(default_factory=list)  # of the GPU of the first rank, while it ran

    @property
    def trainers(self) -> list[dict[str, Any]]:
        """Processes that made steps; those of ranks in their order."""
        steps = [result for result in self.results if not result["worker"] and _num_steps(result)]
        return sorted(steps, key=lambda result: (result["rank"] is None, result["rank"] or 0, -_num_steps(result)))

    def watch_power(self) -> None:
        """Read the power of the GPU that the script uses, if it uses one."""
        device = self.trainers[0].get("device") or {} if self.trainers else {}
        if device.get("type") != "cuda" or (nvml := open_nvml()) is None:
            return
        gpu = find_gpu(nvml, device.get("uuid"))
        power_mw = None if gpu is None else quietly(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        self.powers_w += [] if power_mw is None else [power_mw / 1000]
        close_nvml(nvml)

    @property
    def startup_s(self) -> float | None:
        firsts = [result["first_step_s"] for result in self.trainers if result["first_step_s"]]
        return min(firsts) - self.began_s if firsts else None


def _num_steps(result: Mapping[str, Any]) -> int:
    return sum(int(tally["num_steps"]) for tally in result["tallies"].values())


def run(
    command: Sequence[str], plan: Mapping[str, Any], directory: Path, *, start_limit_s: float, limit_s: float,
    is_stopped: Callable[[], bool] = lambda: False, progress: Callable[[str], None] = lambda text: None,
) -> Run:  # fmt: skip
    """Run a command until its probe is done, it ends, or its time is over.

    start_limit_s  from the start to the first step
    limit_s        from there on
    """
    with scratch(directory) as place, tempfile.TemporaryDirectory(prefix="brim-why-") as name:
        out, token = Path(name), secrets.token_hex(8)
        results = out / "results"
        results.mkdir()
        begun, outcome = time.monotonic(), Run(began_s=time.time())
        with _ended(token), (out / "output").open("wb") as output:
            process = _start([*place.prefix, *command], command, place.directory, plan, results, token, output)
            try:
                limits = start_limit_s, limit_s
                outcome.exit_code = _follow(process, results, plan, begun, limits, outcome, is_stopped, progress)
                if outcome.exit_code is None:
                    (results / "finish").touch()
                    _wait_for_whole(results, process)
            finally:
                outcome.left_behind = _end(process, token)
        outcome.results = _read(results)
        outcome.elapsed_s = time.monotonic() - begun
        data = (out / "output").read_bytes()
        outcome.output = data[-TAIL:].decode("utf-8", "replace").strip()
        if place.kind == "copy":
            text = json.dumps(outcome.results).replace(json.dumps(str(place.directory))[1:-1], str(place.original))
            outcome.results = json.loads(text)
    return outcome


def _start(
    line: Sequence[str], command: Sequence[str], directory: Path, plan: Mapping[str, Any], results: Path, token: str,
    output: Any,
) -> subprocess.Popen[bytes]:  # fmt: skip
    paths = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "BRIM_WHY": "1",
        "BRIM_WHY_OUT": str(results), "BRIM_WHY_PLAN": json.dumps(dict(plan)), "BRIM_WHY_RUN": token,
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    try:
        return subprocess.Popen(
            line, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as failure:
        raise ConfigError(
            f"{command[0]}: cannot be started, {failure.strerror}",
            field="command",
            hint="write the command as in a shell, such as python train.py",
        ) from failure


def _follow(
    process: subprocess.Popen[bytes], results: Path, plan: Mapping[str, Any], begun: float,
    limits: tuple[float, float], outcome: Run, is_stopped: Callable[[], bool], progress: Callable[[str], None],
) -> int | None:  # fmt: skip
    """Wait; the exit code if the command ended by itself, as a shell would say it."""
    start_limit_s, limit_s = limits
    measure_s = min((plan["watch_s"] + plan["ceiling_s"]) * 1.5 + 8, limit_s)
    first_s = done_s = None
    while not is_stopped():
        code = process.poll()
        if code is not None:
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        outcome.results = _read(results)
        trainers = outcome.trainers
        if trainers and first_s is None:
            first_s = now
        if trainers and all(result["phase"] == "done" and result["whole"] for result in trainers):
            done_s = done_s or now
            expected = max(result["world"] or 1 for result in trainers)
            if len(trainers) >= expected or now - done_s > SETTLE_S:
                return None
        if (first_s is None and now - begun > start_limit_s) or (first_s is not None and now - first_s > measure_s):
            return None
        if first_s is not None:
            outcome.watch_power()
        progress(max((result["phase"] for result in trainers), key=_PHASES.index, default="start"))
        time.sleep(POLL_S)
    return None


_PHASES = ["start", "warm", "watch", "ceiling", "count", "done"]


def _wait_for_whole(results: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + FLUSH_S
    while time.monotonic() < until and process.poll() is None:
        reports = _read(results)
        if reports and all(report["whole"] for report in reports):
            return
        time.sleep(POLL_S)


def _read(results: Path) -> list[dict[str, Any]]:
    reports = []
    for file in sorted(results.glob("*.json")):
        with suppress(OSError, ValueError):
            reports.append(json.loads(file.read_bytes()))
    return reports


# The end of all processes


@contextmanager
def _ended(token: str) -> Iterator[None]:
    """Orphans of the command become children of this process meanwhile, so that none escapes."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _kill_marked(token)
        if libc is not None:
            libc.prctl(_SUBREAPER, 0, 0, 0, 0)


def _end(process: subprocess.Popen[bytes], token: str) -> int:
    """Kill the command's group and everything that carries its mark; the number of processes that outlived it."""
    left = len(_marked(token)) if process.poll() is not None else 0
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill_marked(token)
    process.wait()
    return left


def _kill_marked(token: str) -> None:
    killed: set[int] = set()
    until = time.monotonic() + 5
    while (marked := _marked(token)) and time.monotonic() < until:
        for pid in marked:
            killed.add(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        for pid in killed:
            with suppress(ChildProcessError, OSError):
                os.waitpid(pid, os.WNOHANG)


def _marked(token: str) -> list[int]:
    """Living processes whose environment has the mark."""
    mark, pids = f"BRIM_WHY_RUN={token}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():  # that of a zombie is empty
                pids.append(int(folder.name))
    return pids

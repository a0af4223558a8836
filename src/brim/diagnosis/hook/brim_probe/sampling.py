"""Where the time goes: the training thread's stack, read now and then; and the file that other processes read."""

import json
import os
import random
import sys
import threading
import time
from typing import Any

from .clock import StepClock
from .watching import is_library

EVERY_S = 0.012
SHARE = 0.006  # of the time in which this thread computes, at most: a sample costs 0.1 ms, and the training's turn
WRITE_S = 0.5
QUICK_S = 1e-5  # after which this thread asks for its turn; a lock that is released meanwhile begins the wait anew
LOGGING = {"logging", "loggers", "tqdm", "tensorboard", "wandb", "mlflow"}  # packages and modules
FILES, WRITING = (
    {"csv", "json", "pickle", "shutil", "npyio", "npyio_impl", "safetensors"},
    ("dump", "save", "write", "copy"),
)
WAITS = ("threading.py", "queue.py", "connection.py", "selectors.py", "popen_fork.py")  # do not say why


def start(clock: StepClock, *, write: bool) -> None:
    state = _Sampler(clock, write)
    state.run_in_thread()
    if write:
        os.register_at_fork(after_in_child=state.begin_in_child)


def finish(clock: StepClock) -> None:
    """The script ends: write what is known."""
    _write(clock, ended=True)


def give_up(clock: StepClock, reason: str) -> None:
    clock.facts["problem"] = reason
    _write(clock, ended=False)


class _Sampler:
    def __init__(self, clock: StepClock, write: bool) -> None:
        self.clock, self.write, self.is_worker = clock, write, False
        self.generation = 0

    def run_in_thread(self) -> None:
        self.generation += 1
        threading.Thread(target=self._run, args=(self.generation,), daemon=True, name="brim-why").start()

    def begin_in_child(self) -> None:
        """A forked child is a loader's worker, or a process of its own."""
        self.clock.tallies = {name: type(tally)() for name, tally in self.clock.tallies.items()}
        self.clock.tally = self.clock.tallies[self.clock.phase]
        self.clock.facts["fetch"] = {"batches": 0, "fetch_s": 0.0, "collate_s": 0.0}
        self.clock.thread = threading.get_ident()
        self.clock.facts["forked"] = True
        self.run_in_thread()

    def _run(self, generation: int) -> None:
        began = written = time.monotonic()
        usual = sys.getswitchinterval()
        while generation == self.generation and self.clock.phase != "closed":
            over_s = time.thread_time() / SHARE - (time.monotonic() - began)
            time.sleep(min(max(EVERY_S, over_s), WRITE_S) * (0.5 + random.random()))
            try:
                # Python gives this thread its turn after 5 ms, or sooner where a library releases the lock: those lines
                # would be seen too often. Beside the script's own threads that stays as it is.
                if self._has_steps():
                    sys.setswitchinterval(QUICK_S if threading.active_count() <= 3 else usual)
                    self._sample()
                if self.write and time.monotonic() - written > WRITE_S:
                    written = time.monotonic()
                    _write(self.clock, whole=self._is_wanted(), ended=False)
            except RuntimeError:
                continue  # a dictionary grew while it was read: next time
            except Exception as failure:  # sampling must never end a training
                self.clock.facts["problem"] = repr(failure)
                return

    def _has_steps(self) -> bool:
        """Not while the script starts or compiles; workers have no steps of their own."""
        return bool(self.clock.kind or self.clock.facts.get("forked") or _is_worker())

    def _is_past(self) -> bool:
        """Whether the loop is between the line of its step and its end: what runs there makes no batch."""
        clock = self.clock
        file, line, function = clock.facts.get("step_sites", {}).get(clock.kind, ("", 0, ""))
        frame = sys._current_frames().get(clock.thread or 0)
        while frame is not None:
            if (frame.f_code.co_filename, frame.f_code.co_name) == (file, function):
                return bool((frame.f_lineno or 0) > line)
            frame = frame.f_back
        return False

    def _is_wanted(self) -> bool:
        """Whether everything is to be written: at the end, or before this process is ended."""
        folder = os.environ.get("BRIM_WHY_OUT", "")
        return self.clock.phase == "done" or os.path.exists(os.path.join(folder, "finish"))  # noqa: PTH110, PTH118

    def _sample(self) -> None:
        clock = self.clock
        if clock.phase not in ("warm", "watch") and not clock.facts.get("forked"):
            return
        frame = sys._current_frames().get(clock.thread or 0)
        if frame is None:
            return
        cause, innermost, logs = clock.cause, "", False
        site = first = None
        while frame is not None and site is None:
            code, name = frame.f_code, frame.f_code.co_filename
            if not is_library(code):
                site = (name, frame.f_lineno or code.co_firstlineno, code.co_name)  # some instructions have no line
            elif name.endswith(_FETCH):  # a library's dataset; below is only the line of the script that forked
                site = first if _is_worker() else None
            elif name.endswith(_WORKER):
                return  # idle
            elif "brim_probe" not in name and not name.endswith(WAITS):
                first = first or (name, frame.f_lineno or code.co_firstlineno, code.co_name)
                innermost = innermost or _module_name(name, code)
            logs = logs or (cause == "after" and site is None and _is_logging(_module_name(name, code)))
            frame = frame.f_back
        if cause == "after":
            cause = "logging" if logs else "past" if self._is_past() else cause
        if site is not None:
            key = (cause, *site, innermost)
            clock.tally.stacks[key] = clock.tally.stacks.get(key, 0) + 1


def _is_logging(module: str) -> bool:
    """Whether a library's function logs or writes files; json.loads or numpy.load make batches."""
    known = _LOGS.get(module)
    if known is None:
        *path, function = (part.strip("_") for part in module.split("."))
        writes = not FILES.isdisjoint(path) and function.startswith(WRITING)
        known = _LOGS[module] = writes or not LOGGING.isdisjoint(path)
    return known


_LOGS: dict[str, bool] = {}  # by library module
_FETCH, _WORKER = os.path.join("_utils", "fetch.py"), os.path.join("_utils", "worker.py")  # noqa: PTH118


def _module_name(file: str, code: Any) -> str:
    """PIL.Image.resize, from …/site-packages/PIL/Image.py."""
    tail = file.replace("\\", "/")
    for root in ("site-packages/", "dist-packages/", f"python{sys.version_info[0]}.{sys.version_info[1]}/"):
        if root in tail:
            tail = tail.split(root)[-1]
            break
    module = tail.rsplit(".py", 1)[0].replace("/", ".").replace(".__init__", "")
    return f"{module}.{getattr(code, 'co_qualname', code.co_name).rsplit('.', 1)[-1]}"


# The file


def result(clock: StepClock, whole: bool = True) -> dict[str, Any]:
    facts = {name: value for name, value in clock.facts.items() if name in _WRITTEN}
    facts["loaders"] = [
        {name: value for name, value in loader.items() if not name.startswith("_")}
        for loader in clock.facts.get("loaders", {}).values()
    ]
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "argv": sys.argv,
        "python": sys.version.split()[0],
        "rank": _number("RANK"),
        "world": _number("WORLD_SIZE"),
        "worker": _is_worker(),
        "kind": clock.kind,
        "phase": clock.phase,
        "started_s": clock.started_s,
        "first_step_s": clock.first_step_s,
        "whole": whole,
        "tallies": {name: tally.as_dict(whole) for name, tally in clock.tallies.items()},
        "drawn": clock.drawn if whole else [],
        "losses": [_float(loss) for loss in clock.losses] if whole else [],
        **facts,
    }


_WRITTEN = ("fetch", "problem", "device", "operations", "forked", "tried", "memory", "starved")


def _write(clock: StepClock, *, ended: bool, whole: bool = True) -> None:
    folder = os.environ.get("BRIM_WHY_OUT")
    if folder is None or not os.path.isdir(folder):  # noqa: PTH112
        return
    values = result(clock, whole or _is_worker())
    values["ended"] = ended
    temporary = os.path.join(folder, f".{os.getpid()}.tmp")  # noqa: PTH118
    try:
        with open(temporary, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(values, file, default=str)
        os.replace(temporary, os.path.join(folder, f"{os.getpid()}.json"))  # noqa: PTH105, PTH118
    except OSError:
        pass


def _is_worker() -> bool:
    loading = sys.modules.get("torch.utils.data")
    return loading is not None and loading.get_worker_info() is not None


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _float(loss: Any) -> float | None:
    try:
        return float(loss)
    except Exception:  # a loss on a device that failed, or None
        return None

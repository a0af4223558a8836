"""Workers as processes of this machine, one for each device; no Ray needed.

A worker is a fresh interpreter at the other end of a socket pair. It ends when its head does: the socket then closes,
however the head died. Ctrl-C and SIGTERM are the head's to hear.
"""

import multiprocessing.connection as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from brim.engine.device import resolve_device, worker_count
from brim.errors import ClusterError, ConfigError, DeviceError
from brim.rf.generation import LEAVE_S, Assignment, PackedError, Pool, PooledWorker, PoolEvent, WorkerHost

_ENTRY = (
    "import sys; from multiprocessing.connection import Connection; here = Connection(int(sys.argv[1])); "
    "sys.path[:] = here.recv(); from brim.cluster.processes import serve; serve(here)"
)


def device_names(devices: str | int) -> tuple[str, ...]:
    """Devices of this machine: "all", "0,1", "cuda:0,cuda:1", "cpu,cpu", or their number; they must be here."""
    num_here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(devices, int):
        if devices < 1:
            raise ConfigError("must be at least 1", field="devices", value=devices, code="out_of_range")
        if num_here and devices > num_here:
            raise DeviceError(f"is more than the {num_here} CUDA devices here", field="devices", value=devices)
        return tuple(f"cuda:{k}" for k in range(devices)) if num_here else ("cpu",) * devices
    if devices == "all":
        return tuple(f"cuda:{k}" for k in range(num_here)) or ("cpu",)
    words = [word.strip() for word in devices.split(",")]
    names = tuple(f"cuda:{int(word)}" if word.isdecimal() and len(word) < 5 else word for word in words)
    for name in names:
        if name != "cpu" and not name.startswith("cuda:"):
            raise ConfigError(
                f'"{name}" is no device',
                field="devices",
                code="unknown_choice",
                hint="set {devices} to all, 0,1 or cpu,cpu",
            )
        resolve_device(name)
        if name != "cpu" and names.count(name) > 1:
            raise ConfigError(
                f"names {name} twice; a GPU takes one worker", field="devices", value=devices, code="conflict"
            )
    return names


@dataclass(slots=True, kw_only=True)
class _Process(PooledWorker):
    device: str
    threads: int | None
    process: "subprocess.Popen[bytes]"
    here: "mp.Connection[Any, Any]"


class ProcessPool(Pool):
    """One process for each of the named devices; CPU workers share the cores."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__()
        if not devices:
            raise ConfigError("devices is empty", field="devices", code="missing")
        self._devices = devices
        self._assignment: Assignment | None = None

    def start(self, assignment: Assignment) -> int:
        self._assignment = assignment
        threads = max(1, worker_count() // max(1, self._devices.count("cpu")))
        for place, device in enumerate(self._devices):
            name = device if self._devices.count(device) == 1 else f"{device}#{self._devices[:place].count(device)}"
            self._launch(name, device, threads if device == "cpu" else None)
        return len(self._devices)

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        workers = {worker.here: worker for worker in self._workers.values()}
        if not workers:
            time.sleep(min(timeout_s, 0.05))
        return [self._read(workers[here]) for here in mp.wait(list(workers), timeout_s)] if workers else []

    def close(self) -> None:
        """Close the sockets; workers that do not end by themselves are killed."""
        for worker in self._workers.values():
            worker.here.close()
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()

    def _launch(self, name: str, device: str, threads: int | None, restarts: int = 0) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(device),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for the result alone
            )
        except OSError as failure:
            ours.close()
            raise ClusterError(f"worker {device} cannot be started: {failure.strerror}") from failure
        finally:
            theirs.close()
        worker = _Process(
            number=next(self._numbers), name=name, restarts=restarts, device=device, threads=threads, process=process,
            here=mp.Connection(ours.detach()),
        )  # fmt: skip
        self._workers[worker.number] = worker
        seen = "cuda:0" if device.startswith("cuda") else device  # it sees its own alone
        with suppress(OSError):  # it died: wait() says so
            worker.here.send(sys.path)
            worker.here.send((self._assignment, seen, threads))

    def _send(self, worker: _Process, ticket: int, task: Any) -> None:
        with suppress(OSError):  # it died: wait() says so
            worker.here.send((ticket, task))

    def _read(self, worker: _Process) -> PoolEvent:
        try:
            kind, ticket, value = worker.here.recv()
        except (EOFError, OSError):
            self._end(worker)
            return self._lose(worker, ClusterError(f"worker {worker.name} died: {_in_words(worker.process.wait())}"))
        return self._event(worker, kind, ticket, value)

    def _end(self, worker: _Process) -> None:
        worker.here.close()
        try:
            worker.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()

    def _replace(self, worker: _Process) -> None:
        self._launch(worker.name, worker.device, worker.threads, worker.restarts + 1)


def _environment(device: str) -> dict[str, str]:
    """That of this process, with one GPU in sight: nothing can touch another one's by accident."""
    if not device.startswith("cuda:"):
        return dict(os.environ)
    number, seen = int(device.removeprefix("cuda:")), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = seen.split(",")[number].strip() if seen else str(number)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": own}


def _in_words(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    reason = "; the system may have run out of memory" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{reason}"


# Within a worker


def serve(here: "mp.Connection[Any, Any]") -> None:
    """Open the work, then serve tasks until the head is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the head decides; when it goes, the socket closes
    lock, host = threading.Lock(), WorkerHost()

    def send(kind: str, ticket: int, value: Any) -> None:
        with lock, suppress(OSError):
            here.send((kind, ticket, value))

    def answer(ticket: int, future: "Future[Any]") -> None:
        failure = future.exception()
        if failure is None:
            send("done", ticket, future.result())
        else:
            send("failed", ticket, PackedError.of(failure))

    with suppress(EOFError, OSError):
        kind, value = host.enter(*here.recv())
        send(kind, 0, value)
        while kind == "ready":
            ticket, task = here.recv()
            host.server.submit(task).add_done_callback(lambda future, ticket=ticket: answer(ticket, future))
    host.leave()
    sys.stdout.flush()
    os._exit(0)  # threads that still compute have nobody to compute for

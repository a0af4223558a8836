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
from dataclasses import dataclass, field
from typing import Any

import torch

from brim.engine.device import resolve_device, worker_count
from brim.errors import BrimError, ClusterError, ConfigError, DeviceError
from brim.rf.generation import Assignment, PackedError, PoolEvent, TaskDone, TaskFailed, WorkerLost, WorkerReady

RESTARTS = 3  # of one device's worker: what dies more often dies of something that stays
LEAVE_S = 3.0  # for a worker to end by itself
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


@dataclass(slots=True)
class _Slot:
    """A device and its worker."""

    device: str
    threads: int | None
    restarts: int = 0
    worker: int = -1
    process: "subprocess.Popen[bytes] | None" = None
    here: "mp.Connection[Any, Any] | None" = None
    is_ready: bool = False
    tickets: set[int] = field(default_factory=set)


class ProcessPool:
    """One process for each of the named devices; CPU workers share the cores."""

    def __init__(self, devices: Sequence[str]) -> None:
        """Store; names as device_names gives them."""
        if not devices:
            raise ConfigError("devices is empty", field="devices", code="missing")
        num_cpu = sum(name == "cpu" for name in devices)
        threads = max(1, worker_count() // max(1, num_cpu))
        self._slots = [_Slot(name, threads if name == "cpu" else None) for name in devices]
        self._assignment: Assignment | None = None
        self._workers = 0
        self._ticket = 0
        self._events: list[PoolEvent] = []

    def start(self, assignment: Assignment) -> int:
        """Start a process for each device."""
        self._assignment = assignment
        for slot in self._slots:
            self._launch(slot)
        return len(self._slots)

    def submit(self, worker: int, task: Any) -> int:
        """Send a task."""
        self._ticket += 1
        slot = self._find(worker)
        if slot is not None and slot.here is not None:
            slot.tickets.add(self._ticket)
            with suppress(OSError):  # it died: wait() says so
                slot.here.send((self._ticket, task))
        return self._ticket

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        """Read what the workers sent."""
        open_slots = {slot.here: slot for slot in self._slots if slot.here is not None}
        if not self._events and open_slots:
            for here in mp.wait(list(open_slots), timeout_s):
                self._read(open_slots[here])  # type: ignore[index]
        elif not self._events:
            time.sleep(min(timeout_s, 0.05))
        events, self._events = self._events, []
        return events

    def expects(self) -> int:
        """Workers that are starting."""
        return sum(slot.here is not None and not slot.is_ready for slot in self._slots)

    def close(self) -> None:
        """Close the sockets; whoever does not end by itself is killed."""
        for slot in self._slots:
            if slot.here is not None:
                slot.here.close()
        deadline = time.monotonic() + LEAVE_S
        for slot in self._slots:
            if slot.process is not None:
                try:
                    slot.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    slot.process.kill()
                    slot.process.wait()
            slot.here, slot.process, slot.is_ready = None, None, False

    # Processes

    def _launch(self, slot: _Slot) -> None:
        here, there = socket.socketpair()
        try:
            command = [sys.executable, "-c", _ENTRY, str(there.fileno())]
            slot.process = subprocess.Popen(
                command,
                pass_fds=[there.fileno()],
                env=_environment(slot.device),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for the result alone
            )
        except OSError as failure:
            here.close()
            raise ClusterError(f"worker {slot.device} cannot be started: {failure.strerror}") from failure
        finally:
            there.close()
        slot.here, slot.is_ready, slot.worker = mp.Connection(here.detach()), False, self._workers
        slot.tickets = set()
        self._workers += 1
        device = "cuda:0" if slot.device.startswith("cuda") else slot.device  # it sees its own alone
        with suppress(OSError):  # it died: wait() says so
            slot.here.send(sys.path)
            slot.here.send((self._assignment, device, slot.threads))

    def _read(self, slot: _Slot) -> None:
        assert slot.here is not None
        try:
            kind, ticket, value = slot.here.recv()
        except (EOFError, OSError):
            self._lose(slot, None)
            return
        slot.tickets.discard(ticket)
        name = self._name(slot)
        if kind == "ready":
            slot.is_ready = True
            self._events.append(WorkerReady(slot.worker, name, value))
        elif kind == "refused":
            self._lose(slot, value.error(name))
        elif kind == "done":
            self._events.append(TaskDone(slot.worker, ticket, value))
        else:
            self._events.append(TaskFailed(slot.worker, ticket, value.error(name)))

    def _lose(self, slot: _Slot, error: BrimError | None) -> None:
        assert slot.here is not None
        assert slot.process is not None
        slot.here.close()
        try:
            code = slot.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            slot.process.kill()
            code = slot.process.wait()
        error = error or ClusterError(f"worker {self._name(slot)} died: {_in_words(code)}")
        self._events.append(WorkerLost(slot.worker, self._name(slot), error, slot.is_ready))
        was_ready, slot.here, slot.process, slot.is_ready = slot.is_ready, None, None, False
        if was_ready and slot.restarts < RESTARTS:
            slot.restarts += 1
            self._launch(slot)

    def _find(self, worker: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.worker == worker), None)

    def _name(self, slot: _Slot) -> str:
        same = [other for other in self._slots if other.device == slot.device]
        return slot.device if len(same) == 1 else f"{slot.device}#{same.index(slot)}"


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
    lock = threading.Lock()

    def send(kind: str, ticket: int, value: Any) -> None:
        with lock, suppress(OSError):
            here.send((kind, ticket, value))

    def told(ticket: int, future: "Future[Any]") -> None:
        failure = future.exception()
        if failure is None:
            send("done", ticket, future.result())
        else:
            send("failed", ticket, PackedError.of(failure))

    with suppress(EOFError, OSError):
        work, device, threads = here.recv()
        try:
            opened = work.open(device, threads)
            server = opened.__enter__()
        except Exception as failure:  # whatever it is, the head must hear it
            send("refused", 0, PackedError.of(failure))
            os._exit(1)
        send("ready", 0, server.facts)
        with suppress(EOFError, OSError):
            while True:
                ticket, task = here.recv()
                server.submit(task).add_done_callback(lambda future, ticket=ticket: told(ticket, future))
        opened.__exit__(None, None, None)
    sys.stdout.flush()
    os._exit(0)  # threads that still compute have nobody to compute for

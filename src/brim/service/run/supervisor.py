"""The parent of the service's processes: starts them, restarts those that end, kills those that hang, drains them.

No torch, no job and no request runs here, so there is little that could fail: this process makes the failures of the
others harmless. What needs a database runs in a thread of its own (`Oversight`), so that a database which does not
answer never delays the restart of a worker.
"""

import errno
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from brim.errors import BrimError, ConfigError
from brim.service.run.process import Child, Death, Program, stop_all

if TYPE_CHECKING:
    from brim.service.settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

MEMORY_SHARE = "BRIM_MEMORY_SHARE"  # share of a device's memory for a process: see engine.device
STEP_S = 0.2
AWAY_S = 5.0  # a longer step: the machine slept or this process was stopped, and the others perhaps too
OVERSEE_S = 1.0
DRAIN_S = 20.0  # for a batch, its shard or checkpoint; then a kill, which is harmless too
API_STOP_S = 8.0
PAGES_STOP_S = 2.0  # nothing is lost with them
PREDICT_STOP_S = 2.0  # nobody sends requests any more when the API has ended
PREDICT_WAIT_S = 2.0  # people wait for it, and a request that killed it twice is not sent again
BACKLOG = 2048  # connections that may wait for an API that restarts or is slow
READER_SILENCE_S = 60.0
PREDICT_SILENCE_S = 30.0  # a predictor notices a forward pass that hangs; this is for a process that stopped altogether
BIND_S = 2.0  # the processes of a killed service may hold its port for a moment

Oversee = Callable[[Sequence[Death]], Sequence[str]]  # deaths since the last call → names of workers to kill


class Programs(NamedTuple):
    """The processes of a service, by group."""

    apis: Sequence[Program]
    workers: Sequence[Program]
    predictors: Sequence[Program] = ()
    pages: Sequence[Program] = ()
    readers: Sequence[Program] = ()


class Supervisor:
    """Runs all processes until told to stop."""

    def __init__(self, programs: "Programs", oversee: Oversee) -> None:
        """oversee looks after the jobs and is called about once a second."""
        self._lifeline = os.pipe()  # the writing end is ours alone: it closes when we end, however we do
        self._apis, self._workers, self._predictors, self._pages, self._readers = (
            [Child(program, self._lifeline[0]) for program in group] for group in programs
        )
        self._oversight = Oversight(oversee)

    def run(self, stop: Callable[[], bool], started: Callable[[], None] = lambda: None) -> None:
        """Keep all running until stop returns True, then drain.

        Workers first, so that people can watch them end; predictors last, so that requests in progress are answered.
        """
        children = self._children()
        self._oversight.start()
        try:
            now_s = self._step(children, time.monotonic())
            started()
            while not stop():
                time.sleep(STEP_S)
                now_s = self._step(children, now_s)
        finally:
            self._oversight.stop()
            stop_all(self._workers, DRAIN_S)
            stop_all(self._pages, PAGES_STOP_S)
            stop_all(self._apis, API_STOP_S)
            stop_all([*self._predictors, *self._readers], PREDICT_STOP_S)
            for end in self._lifeline:
                os.close(end)

    def pids(self) -> dict[str, int | None]:
        """Process ids by name."""
        return {child.name: child.pid for child in self._children()}

    def _children(self) -> list[Child]:
        return [*self._apis, *self._predictors, *self._readers, *self._workers, *self._pages]

    def _step(self, children: Sequence[Child], before_s: float) -> float:
        now_s = time.monotonic()
        for child in children:
            if now_s - before_s > AWAY_S:
                child.excuse(now_s)
            death = child.step(now_s)
            if death is not None:
                log.warning("%s ended after %.1f s: %s", death.name, death.lived_s, death.reason)
                if child in self._workers:
                    self._oversight.died(death)
        for name in self._oversight.condemned():
            log.warning("%s is killed: its job does not stop", name)
            for child in self._workers:
                if child.name == name:
                    child.kill()
        return now_s


class Oversight:
    """A thread that records deaths in the catalogue and asks which workers to kill; outages only delay it."""

    def __init__(self, oversee: Oversee) -> None:
        self._oversee = oversee
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._condemned: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oversight", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End, without waiting long for a call that waits for a database."""
        self._ending.set()
        self._thread.join(2.0)

    def died(self, death: Death) -> None:
        self._deaths.put(death)

    def condemned(self) -> list[str]:
        """Workers to kill, each once."""
        return _drain(self._condemned)

    def _run(self) -> None:
        deaths: list[Death] = []
        healthy = True
        while not self._ending.wait(OVERSEE_S):
            deaths += _drain(self._deaths)
            try:
                names = self._oversee(deaths)
            except Exception as failure:
                if healthy:  # once per outage, not once a second
                    is_ours = isinstance(failure, BrimError)
                    text = str(failure) if is_ours else "an error"
                    log.warning("jobs are not looked after at the moment: %s", text, exc_info=not is_ours)
                healthy = False
                continue
            deaths, healthy = [], True
            for name in names:
                self._condemned.put(name)


def programs(
    settings: "Settings", listening: int, gpus: Sequence[str], pages: int | None = None, reading: int | None = None
) -> Programs:
    """The processes of a service: the API, the reader, and a worker per GPU or so many on the CPU.

    listening, pages and reading are the file descriptors of the sockets of API, dashboard and reader.
    """
    text = settings.to_json()
    common = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
    share = settings.predict_memory / 100
    apis = [
        Program(
            name=f"api{index}" if settings.api_processes > 1 else "api",
            command=[sys.executable, "-m", "brim.service.api.main", "{lifeline}", str(listening)],
            stdin=text,
            env={**common, **_counters(settings), "CUDA_VISIBLE_DEVICES": ""},  # no GPU for the API
            pass_fds=(listening,),
        )
        for index in range(settings.api_processes)
    ]
    workers = [
        Program(
            name=f"w{index}",
            command=[sys.executable, "-m", "brim.jobs.worker.main", f"w{index}", "{beat}", "{lifeline}"],
            stdin=text,
            env={**common, **_device(index, gpus, settings.workers), MEMORY_SHARE: f"{1 - share:g}"},
            hang_s=settings.hang_s,
        )
        for index in range(settings.workers)
    ]
    predictors = [
        Program(
            name=f"predict{index}",
            command=[sys.executable, "-m", "brim.service.prediction.process.main", str(index), "{beat}", "{lifeline}"],
            stdin=text,
            env={**common, **_device(index, gpus, settings.predictors), MEMORY_SHARE: f"{share:g}"},
            hang_s=max(PREDICT_SILENCE_S, settings.predict_hang_s),
            longest_wait_s=PREDICT_WAIT_S,
        )
        for index in range(len(settings.predict_sockets))
    ]
    dashboards = [
        Program(
            name="dashboard",
            command=[sys.executable, "-m", "brim.service.dashboard.main", "{lifeline}", str(pages)],
            stdin=text,
            env={"CUDA_VISIBLE_DEVICES": "", "NICEGUI_STORAGE_PATH": str(settings.data / "dashboard")},
            pass_fds=(pages,),
            longest_wait_s=PREDICT_WAIT_S,
        )
        for pages in ([] if pages is None else [pages])
    ]
    readers = [
        Program(
            name="reader",
            command=[sys.executable, "-m", "brim.service.reader.main", "{lifeline}", "{beat}", str(reading)],
            stdin=json.dumps({"log_level": settings.log_level}),  # no token: it parses untrusted files
            env={**common, "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"},  # no threads, so that it can fork
            pass_fds=(reading,),
            hang_s=READER_SILENCE_S,
            longest_wait_s=PREDICT_WAIT_S,
        )
        for reading in ([] if reading is None else [reading])
    ]
    return Programs(apis, workers, predictors, dashboards, readers)


def listen(host: str, port: int) -> socket.socket:
    """The service's socket, held by the supervisor: the port stays, and clients wait while the API restarts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end_s = time.monotonic() + BIND_S
    while True:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host.strip("[]"), port))
            listening.listen(BACKLOG)
            return listening
        except OSError as failure:
            listening.close()
            if time.monotonic() > end_s or failure.errno != errno.EADDRINUSE:
                reason = failure.strerror or str(failure)
                raise ConfigError(
                    f"cannot listen on {host} port {port}: {reason.lower()}",
                    field="port",
                    hint="choose another {host} or {port}",
                ) from failure
        time.sleep(STEP_S)


def _device(index: int, gpus: Sequence[str], workers: int) -> dict[str, str]:
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus[index], "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # NVML counts in that order
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _counters(settings: "Settings") -> dict[str, str]:
    """The folder for counters of several API processes; prometheus_client reads it when it is imported."""
    return {"PROMETHEUS_MULTIPROC_DIR": str(settings.metrics_folder)} if settings.api_processes > 1 else {}


def _drain(source: "queue.SimpleQueue[T]") -> list[T]:
    items: list[T] = []
    while not source.empty():
        items.append(source.get())
    return items

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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from brim.errors import BrimError, ConfigError
from brim.service.run.prepared import Prepared
from brim.service.run.process import Child, Death, Program, inherited_env, stop_all

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
    prepared_env: Mapping[str, str] | None = None  # of the prepared process; None: all are started the plain way


class Supervisor:
    """Runs all processes until told to stop."""

    def __init__(self, programs: "Programs", oversee: Oversee) -> None:
        """oversee looks after the jobs and is called about once a second."""
        self._lifeline = os.pipe()  # the writing end is ours alone: it closes when we end, however we do
        env, lifeline = programs.prepared_env, self._lifeline[0]
        self._prepared = None if env is None else Prepared({**inherited_env(), **env}, lifeline)
        self._apis, self._workers, self._predictors, self._pages, self._readers = (
            [Child(program, lifeline, self._prepared) for program in group] for group in programs[:5]
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
            if self._prepared is not None:
                self._prepared.close()
            for end in self._lifeline:
                os.close(end)

    def pids(self) -> dict[str, int | None]:
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
    common = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
    no_gpu = {**common, "CUDA_VISIBLE_DEVICES": ""}
    counters = {"PROMETHEUS_MULTIPROC_DIR": str(settings.metrics_folder)} if settings.api_processes > 1 else {}
    share = settings.predict_memory / 100

    def program(name: str, module: str, *words: str, stdin: str = settings.to_json(), **more: Any) -> Program:
        command = [sys.executable, "-m", f"brim.{module}", *words]
        return Program(name=name, command=command, stdin=stdin, **more)

    apis = [
        program(
            f"api{index}" if settings.api_processes > 1 else "api", "service.api.main", "{lifeline}", str(listening),
            env={**no_gpu, **counters}, pass_fds=(listening,),
        )
        for index in range(settings.api_processes)
    ]  # fmt: skip
    workers = [
        program(
            f"w{index}", "jobs.worker.main", f"w{index}", "{beat}", "{lifeline}", hang_s=settings.hang_s,
            env={**common, **_device(index, gpus, settings.workers), MEMORY_SHARE: f"{1 - share:g}"},
            is_forked=True,
        )
        for index in range(settings.workers)
    ]  # fmt: skip
    predictors = [
        program(
            f"predict{index}", "service.prediction.process.main", str(index), "{beat}", "{lifeline}",
            env={**common, **_device(index, gpus, settings.predictors), MEMORY_SHARE: f"{share:g}"},
            hang_s=max(PREDICT_SILENCE_S, settings.predict_hang_s), longest_wait_s=PREDICT_WAIT_S,
            is_forked=True,
        )
        for index in range(len(settings.predict_sockets))
    ]  # fmt: skip
    dashboards, readers = [], []
    if pages is not None:
        env = {"CUDA_VISIBLE_DEVICES": "", "NICEGUI_STORAGE_PATH": str(settings.data / "dashboard")}
        words = ("service.dashboard.main", "{lifeline}", str(pages))
        dashboards = [program("dashboard", *words, env=env, pass_fds=(pages,), longest_wait_s=PREDICT_WAIT_S)]
    if reading is not None:
        readers = [
            program(
                "reader", "service.reader.main", "{lifeline}", "{beat}", str(reading),
                stdin=json.dumps({"log_level": settings.log_level}),  # no token: it parses untrusted files
                env={**no_gpu, "OPENBLAS_NUM_THREADS": "1"},  # no threads, so that it can fork
                pass_fds=(reading,), hang_s=READER_SILENCE_S, longest_wait_s=PREDICT_WAIT_S,
            )
        ]  # fmt: skip
    prepared = {**common, **({} if gpus else _device(0, gpus, settings.workers))} if settings.prepared else None
    return Programs(apis, workers, predictors, dashboards, readers, prepared)


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


def _drain(source: "queue.SimpleQueue[T]") -> list[T]:
    items: list[T] = []
    while not source.empty():
        items.append(source.get())
    return items

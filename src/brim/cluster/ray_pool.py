"""Workers as Ray actors: one for each GPU of the cluster, or for each node where there are none."""

import time
from dataclasses import dataclass, field
from typing import Any

from brim.cluster.ray_connect import RayCluster, first_line, import_ray
from brim.errors import BrimError, ClusterError
from brim.rf.generation import Assignment, PackedError, PoolEvent, TaskDone, TaskFailed, WorkerLost, WorkerReady

RESTARTS = 3  # for each worker there was at the start, all together: what dies more often dies of something that stays
LEAVE_S = 3.0  # for the workers to end what they write
CALLS = 16  # of an actor at once: tasks wait within it, and it must hear of the next


@dataclass(slots=True)
class _Actor:
    """A worker: where it is to be, and what it was asked."""

    handle: Any
    name: str
    has_gpu: bool
    threads: int | None
    opening: Any  # reference to its facts, until it is ready
    tickets: dict[Any, int] = field(default_factory=dict)  # by reference
    is_ready: bool = False


class RayPool:
    """Actors all over a cluster that is connected; see `brim.cluster.ray_connect.connect`."""

    def __init__(self, cluster: RayCluster) -> None:
        """Store."""
        self._cluster = cluster
        self._ray = import_ray()
        self._actors: dict[int, _Actor] = {}
        self._assignment: Any = None  # a reference: it travels to each node once
        self._workers = 0
        self._ticket = 0
        self._restarts = 0

    def start(self, assignment: Assignment) -> int:
        """Start an actor for each GPU; without GPUs one for each node, with all its cores."""
        self._assignment = self._ray.put(assignment)
        nodes = [node for node in self._cluster.nodes if node.gpus >= 1]
        if nodes:
            for node in nodes:
                for _ in range(int(node.gpus)):
                    self._launch(node.host, node.id, has_gpu=True, threads=None)
        else:
            for node in self._cluster.nodes:
                if node.cpus >= 1:
                    self._launch(node.host, node.id, has_gpu=False, threads=int(node.cpus))
        if not self._actors:
            raise ClusterError(
                "has neither GPUs nor CPUs for workers",
                field="cluster",
                value=self._cluster.address,
                code="empty",
                hint="add nodes with ray start",
            )
        self._restarts = RESTARTS * len(self._actors)
        return len(self._actors)

    def submit(self, worker: int, task: Any) -> int:
        """Call the actor."""
        self._ticket += 1
        actor = self._actors.get(worker)
        if actor is not None:
            actor.tickets[actor.handle.call.remote(task)] = self._ticket
        return self._ticket

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        """Ask Ray what ended."""
        waiting = [ref for actor in self._actors.values() for ref in (*self._opening(actor), *actor.tickets)]
        if not waiting:
            time.sleep(min(timeout_s, 0.05))
            return []
        if not self._ray.wait(waiting, num_returns=1, timeout=timeout_s)[0]:
            return []
        ended, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        events: list[PoolEvent] = []
        for ref in ended:
            events += self._read(ref)
        return events

    def expects(self) -> int:
        """Workers that are starting, or wait for a place."""
        return sum(not actor.is_ready for actor in self._actors.values())

    def close(self) -> None:
        """Let the actors end what they write, then kill them."""
        actors = list(self._actors.values())
        leaving = [actor.handle.leave.remote() for actor in actors if actor.is_ready]
        self._actors = {}
        if leaving:
            self._ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        for actor in actors:
            self._ray.kill(actor.handle)

    # Actors

    def _launch(self, host: str, node: str | None, *, has_gpu: bool, threads: int | None) -> None:
        """node None: wherever there is room, as soon as there is."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)
        remote = self._ray.remote(_Host).options(
            num_gpus=int(has_gpu),
            num_cpus=0 if has_gpu else threads,
            max_concurrency=CALLS,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=where,
        )
        handle = remote.remote()
        opening = handle.open.remote([self._assignment], "cuda:0" if has_gpu else "cpu", threads)
        name = f"{host} {'gpu' if has_gpu else 'cpu'}#{self._workers}"
        self._actors[self._workers] = _Actor(handle, name, has_gpu, threads, opening)
        self._workers += 1

    @staticmethod
    def _opening(actor: _Actor) -> list[Any]:
        return [] if actor.is_ready else [actor.opening]

    def _read(self, ref: Any) -> list[PoolEvent]:
        found = [
            (worker, actor)
            for worker, actor in self._actors.items()
            if ref in actor.tickets or (not actor.is_ready and ref == actor.opening)
        ]
        if not found:
            return []  # of one that was lost a moment ago
        worker, actor = found[0]
        try:
            kind, value = self._ray.get(ref)
        except self._ray.exceptions.RayError as failure:
            reason = _reason(failure)
            return [self._lose(worker, actor, ClusterError(f"worker {actor.name} died: {reason}"))]
        ticket = actor.tickets.pop(ref, 0)
        if kind == "refused":
            return [self._lose(worker, actor, value.error(actor.name))]
        if kind == "ready":
            actor.is_ready = True
            return [WorkerReady(worker, actor.name, value)]
        if kind == "done":
            return [TaskDone(worker, ticket, value)]
        return [TaskFailed(worker, ticket, value.error(actor.name))]

    def _lose(self, worker: int, actor: _Actor, error: BrimError) -> WorkerLost:
        del self._actors[worker]
        self._ray.kill(actor.handle)
        if actor.is_ready and self._restarts:
            self._restarts -= 1
            self._launch("another node", None, has_gpu=actor.has_gpu, threads=actor.threads)
        return WorkerLost(worker, actor.name, error, actor.is_ready)


def _reason(failure: BaseException) -> str:
    """The line of Ray's message that says something."""
    lines = [line.strip() for line in str(failure).split("\n") if line.strip()]
    cause = next((line for line in lines if "death" in line.lower() or "node" in line.lower()), "")
    return cause or first_line(failure)


class _Host:
    """Runs in Ray's process: opens the work, serves its tasks; several calls at once, each in a thread of Ray's."""

    def __init__(self) -> None:
        self._opened: Any = None
        self._server: Any = None

    def open(self, work: list[Any], device: str, threads: int | None) -> tuple[str, Any]:
        """Work comes as a reference in a list, so that this is called and can say what is wrong with it."""
        try:
            self._opened = import_ray().get(work[0]).open(device, threads)
            self._server = self._opened.__enter__()
        except Exception as failure:  # whatever it is, the head must hear it
            return "refused", PackedError.of(failure)
        return "ready", self._server.facts

    def call(self, task: Any) -> tuple[str, Any]:
        """One task, to its end."""
        try:
            return "done", self._server.submit(task).result()
        except Exception as failure:  # whatever it is, the head must hear it
            return "failed", PackedError.of(failure)

    def leave(self) -> None:
        """End what is being written."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.__exit__(None, None, None)

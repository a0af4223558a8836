"""Workers as Ray actors: one for each GPU of the cluster, or for each node where there are none."""

import time
from dataclasses import dataclass
from typing import Any

from brim.cluster.ray_connect import RayCluster, first_line, import_ray
from brim.errors import ClusterError
from brim.rf.generation import LEAVE_S, Assignment, PackedError, Pool, PooledWorker, PoolEvent, WorkerHost

CALLS = 16  # of an actor at once: tasks wait within it, and it must hear of the next


@dataclass(slots=True, kw_only=True)
class _Actor(PooledWorker):
    handle: Any
    threads: int | None  # None: on a GPU


class RayPool(Pool):
    """Actors all over a cluster that is connected; see `brim.cluster.ray_connect.connect`."""

    def __init__(self, cluster: RayCluster, *, use_gpus: bool = True) -> None:
        super().__init__()
        self._cluster, self._use_gpus = cluster, use_gpus
        self._ray = import_ray()
        self._assignment: Any = None  # a reference: it travels to each node once
        self._refs: dict[Any, tuple[int, int]] = {}  # what was called → worker and ticket, 0 for its opening

    def start(self, assignment: Assignment) -> int:
        """Start an actor for each GPU; without GPUs one for each node, with all its cores."""
        self._assignment = self._ray.put(assignment)
        nodes = self._cluster.nodes
        for node in nodes if self._use_gpus else ():
            for _ in range(int(node.gpus)):
                self._launch(node.host, node.id, threads=None)
        if not self._workers:
            for node in nodes:
                if node.cpus >= 1:
                    self._launch(node.host, node.id, threads=int(node.cpus))
        if not self._workers:
            raise ClusterError(
                "has neither GPUs nor CPUs for workers",
                field="cluster",
                value=self._cluster.address,
                code="empty",
                hint="add nodes with ray start",
            )
        return len(self._workers)

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        waiting = list(self._refs)
        if not waiting:
            time.sleep(min(timeout_s, 0.05))
            return []
        if not self._ray.wait(waiting, num_returns=1, timeout=timeout_s)[0]:
            return []
        ended, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return [self._read(ref) for ref in ended if ref in self._refs]  # others are of one lost a moment ago

    def close(self) -> None:
        """Let the actors end what they write, then kill them."""
        leaving = [actor.handle.leave.remote() for actor in self._workers.values() if actor.is_ready]
        if leaving:
            self._ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        for actor in self._workers.values():
            self._end(actor)
        self._workers.clear()

    def _launch(self, host: str, node: str | None, *, threads: int | None, restarts: int = 0) -> None:
        """On a node; None: wherever there is room, as soon as there is. Without threads on a GPU."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        has_gpu = threads is None
        handle = (
            self._ray.remote(_Host)
            .options(
                num_gpus=int(has_gpu),
                num_cpus=threads or 0,
                max_concurrency=CALLS,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )
        number = next(self._numbers)
        name = f"{host} {'gpu' if has_gpu else 'cpu'}#{number}"
        self._workers[number] = _Actor(number=number, name=name, restarts=restarts, handle=handle, threads=threads)
        self._refs[handle.open.remote([self._assignment], "cuda:0" if has_gpu else "cpu", threads)] = number, 0

    def _send(self, actor: _Actor, ticket: int, task: Any) -> None:
        self._refs[actor.handle.call.remote(task)] = actor.number, ticket

    def _read(self, ref: Any) -> PoolEvent:
        number, ticket = self._refs.pop(ref)
        actor = self._workers[number]
        try:
            kind, value = self._ray.get(ref)
        except self._ray.exceptions.RayError as failure:
            return self._lose(actor, ClusterError(f"worker {actor.name} died: {_reason(failure)}"))
        return self._event(actor, kind, ticket, value)

    def _end(self, actor: _Actor) -> None:
        self._ray.kill(actor.handle)
        self._refs = {ref: call for ref, call in self._refs.items() if call[0] != actor.number}

    def _replace(self, actor: _Actor) -> None:
        self._launch("another node", None, threads=actor.threads, restarts=actor.restarts + 1)


def _reason(failure: BaseException) -> str:
    """The line of Ray's message that says something."""
    lines = [line.strip() for line in str(failure).split("\n") if line.strip()]
    cause = next((line for line in lines if "death" in line.lower() or "node" in line.lower()), "")
    return cause or first_line(failure)


class _Host(WorkerHost):
    """Runs in Ray's process; several calls at once, each in a thread of Ray's."""

    def open(self, work: list[Any], device: str, threads: int | None) -> tuple[str, Any]:
        """work is a reference in a list, so that this is called and can say what is wrong with it."""
        try:
            assignment = import_ray().get(work[0])
        except Exception as failure:  # such as a class that this node does not have
            return "refused", PackedError.of(failure)
        return self.enter(assignment, device, threads)

    def call(self, task: Any) -> tuple[str, Any]:
        try:
            return "done", self.server.submit(task).result()
        except Exception as failure:  # whatever it is, the head must hear it
            return "failed", PackedError.of(failure)

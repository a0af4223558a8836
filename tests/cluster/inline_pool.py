"""Workers that share one real server of this process and die as chance has it: the head's rules without the wait."""

import random
from typing import Any

from brim.errors import BrimError, ClusterError
from brim.rf.generation.pool import Assignment, PoolEvent, TaskDone, TaskFailed, WorkerLost, WorkerReady
from brim.rf.generation.worker import MakeShards


class InlinePool:
    """Ends tasks in any order, some twice as late as others; loses a worker now and then and replaces it."""

    def __init__(
        self,
        num: int = 3,
        *,
        seed: int = 0,
        losses: float = 0.0,
        poison: int | None = None,
        fail: BrimError | None = None,
        replaces: bool = True,
        kinds: tuple[str, ...] = (),
    ) -> None:
        self.num, self.rng, self.losses, self.poison, self.fail = num, random.Random(seed), losses, poison, fail
        self.replaces, self.kinds = replaces, kinds
        self.alive: dict[int, list[tuple[int, Any]]] = {}
        self.waiting: list[PoolEvent] = []
        self.tickets = self.workers = self.made = self.idle = 0
        self.given: list[tuple[int, Any]] = []
        self.opened: Any = None

    def start(self, work: Assignment) -> int:
        self.opened = work.open("cpu", 1)
        self.server = self.opened.__enter__()
        for _ in range(self.num):
            self.join()
        return self.num

    def join(self) -> None:
        facts = self.server.facts
        if self.kinds:
            facts = type(facts)(
                device="cpu", device_name="cpu", kind=self.kinds[self.workers % len(self.kinds)], batch_size=1
            )
        self.alive[self.workers] = []
        self.waiting.append(WorkerReady(self.workers, f"w{self.workers}", facts))
        self.workers += 1

    def submit(self, worker: int, task: Any) -> int:
        self.tickets += 1
        if worker in self.alive:
            self.alive[worker].append((self.tickets, task))
            self.given.append((worker, task))
        return self.tickets

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        busy = [worker for worker, tasks in self.alive.items() if tasks]
        if busy and not self.waiting:
            self.step(self.rng.choice(busy))
        events, self.waiting = self.waiting, []
        self.idle = 0 if events else self.idle + 1
        assert self.idle < 10_000, "the head waits for what nobody does"
        return events

    def step(self, worker: int) -> None:
        ticket, task = self.alive[worker][0]
        numbers = [one.number for one in task.ranges] if isinstance(task, MakeShards) else []
        done_first = self.rng.random() < 0.5  # it may die with its shards written and nobody told
        if self.rng.random() < self.losses or self.poison in numbers:
            if done_first and self.poison is None:
                self.server.submit(task).result()
            del self.alive[worker]
            self.waiting.append(
                WorkerLost(worker, f"w{worker}", ClusterError(f"worker w{worker} died: of chance"), True)
            )
            if self.replaces:
                self.join()
            return
        self.alive[worker].pop(0)
        if self.fail is not None and numbers:
            self.waiting.append(TaskFailed(worker, ticket, self.fail))
            return
        self.made += len(numbers)
        self.waiting.append(TaskDone(worker, ticket, self.server.submit(task).result()))

    def expects(self) -> int:
        return 0

    def close(self) -> None:
        if self.opened is not None:
            self.opened.__exit__(None, None, None)
            self.opened = None
        self.alive = {}

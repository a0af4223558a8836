"""Workers that make nothing, for bench_scale.py: what is left is what the head and the way to a worker cost."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from brim.engine.storage import ShardEntry, shard_name
from brim.rf.config import GenerateConfig
from brim.rf.generation.accounting import DeviceAccount
from brim.rf.generation.attempts import Block, ShardRange, gate_block
from brim.rf.generation.pool import Assignment, Pool, PooledWorker, PoolEvent, TaskDone, WorkerFacts, WorkerReady
from brim.rf.generation.worker import CloseAccount, MadeShard, MakeShards, ShardsMade

FACTS = WorkerFacts(device="cpu", device_name="paper", kind="paper", batch_size=1)
BYTES_PER_SAMPLE = 3_032


def answer(task: Any, config: GenerateConfig | None = None) -> Any:
    """What a worker would say, without its work."""
    if isinstance(task, MakeShards):
        return ShardsMade(shards=tuple(_shard(one) for one in task.ranges), warnings=())
    if isinstance(task, Block):
        assert config is not None
        return gate_block(config, task)
    assert isinstance(task, CloseAccount)
    return DeviceAccount(ceiling=None, stages={}, batch_size=1, peak_bytes=0)


def _shard(one: ShardRange) -> MadeShard:
    entry = ShardEntry(
        name=shard_name(one.number), items=len(one), bytes=BYTES_PER_SAMPLE * len(one), sha256=f"{one.number:064x}",
        totals=one.totals,
    )  # fmt: skip
    return MadeShard(number=one.number, entry=entry, records=7 * len(one))


@dataclass(frozen=True, slots=True)
class EchoWork:
    """Answers at once, in a real worker of a real pool."""

    @contextmanager
    def open(self, device: str, threads: int | None) -> "Iterator[EchoServer]":
        """Nothing to prepare."""
        yield EchoServer()


class EchoServer:
    """Serves Make."""

    facts = FACTS

    def submit(self, task: Any) -> "Future[Any]":
        """Done at once."""
        done: Future[Any] = Future()
        done.set_result(answer(task))
        return done


class PaperPool(Pool):
    """Workers that are not there: whatever they are given is done when the head next looks."""

    def __init__(self, workers: int, config: GenerateConfig) -> None:
        super().__init__()
        self._num, self._config = workers, config
        self._events: deque[PoolEvent] = deque()
        self.tasks = self.ranges = 0
        self.own_s = 0.0  # CPU time spent here, which is not the head's

    def start(self, assignment: Assignment) -> int:
        """All are ready."""
        for number in range(self._num):
            self._workers[number] = PooledWorker(number=number, name=f"paper#{number}", is_ready=True)
            self._events.append(WorkerReady(number, f"paper#{number}", FACTS))
        return self._num

    def _send(self, worker: PooledWorker, ticket: int, task: Any) -> None:
        began_s = time.thread_time()
        self._events.append(TaskDone(worker.number, ticket, answer(task, self._config)))
        if isinstance(task, MakeShards):
            self.tasks, self.ranges = self.tasks + 1, self.ranges + len(task.ranges)
        self.own_s += time.thread_time() - began_s

    def _end(self, worker: PooledWorker) -> None:
        pass

    def _replace(self, worker: PooledWorker) -> None:
        pass

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        """Everything that was submitted."""
        if not self._events:
            time.sleep(min(timeout_s, 0.001))
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """Nothing to end."""

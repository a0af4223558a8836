"""The head of a pool: hands out ranges to workers and lists the shards they make.

    head: gates → ranges ──tasks──▶ workers: scenes → device → shards, written where all see them
                 manifest ◀──entries──┘

Shards have equal bytes whichever worker makes them, so a range may run again, or twice at once, without harm: that is
all there is to a death or a straggler.
"""

import logging
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from brim.engine.meter import CeilingShare, within
from brim.engine.meter.ceiling import of_several
from brim.engine.meter.spent import WORK
from brim.engine.storage import LocalPlace, Place, ShardWriter
from brim.errors import BrimError, ClusterError, OutOfMemory
from brim.rf.generation.accounting import DeviceAccount, Tally
from brim.rf.generation.attempts import Block, RangeBook, ShardRange, Verdicts, gate_block
from brim.rf.generation.pool import (
    START_S,
    TICK_S,
    Pool,
    PoolEvent,
    TaskDone,
    TaskFailed,
    WorkerFacts,
    WorkerLost,
    WorkerReady,
    start_workers,
)
from brim.rf.generation.rows import dataset_bytes
from brim.rf.generation.worker import CloseAccount, GenerateAssignment, MadeShard, MakeShards, ShardsMade
from brim.rf.physics.scene import Scenes

ACCOUNT_S = 15.0  # for workers to report time, memory and ceiling
STOP_S = 2.0  # that a stop waits for missing shards, without which later ones would be lost
TASK_S = 1.0  # of work in a task, about: the granularity of progress and of lost work
TASKS_EACH = 2  # in a worker's queue: the current one, and the next
MAX_RANGES = 64  # in a task
TASK_BYTES = 64 * 2**20  # of shards in a task whose bytes are sent to the head
TRIES = 4  # of a range; the first failure may have been a neighbour's in the same task, the next are its own
COPIES = 2  # of a range at once, when nothing else is left to do
_log = logging.getLogger("brim")


WorkerTask = MakeShards | Block | CloseAccount


@dataclass(slots=True)
class _Worker:
    """A worker that is ready."""

    name: str
    facts: WorkerFacts
    tasks: dict[int, tuple[WorkerTask, float]] = field(default_factory=dict)  # by ticket, with the time of submission
    ended_s: float = 0.0  # when its last task ended
    rate: float = 0.0  # ranges/s

    def holds(self, kind: type[WorkerTask]) -> int:
        return sum(isinstance(task, kind) for task, _ in self.tasks.values())


@dataclass(slots=True)
class _OpenRange:
    """A range that was handed out and is not done."""

    range: ShardRange
    since_s: float
    holders: set[int] = field(default_factory=set)  # workers
    tries: int = 0


class PoolHead:
    """Makes a dataset with the workers of a pool; closes the pool at the end of the block."""

    def __init__(
        self, assignment: GenerateAssignment, out: Place, pool: Pool, tally: Tally, stop: Callable[[], bool]
    ) -> None:
        self.assignment, self.config, self.out = assignment, assignment.config, out
        self.pool, self.tally, self.stop = pool, tally, stop
        self.num_workers = 0  # that the pool was to start
        self.workers: dict[int, _Worker] = {}
        self.open: dict[int, _OpenRange] = {}  # by number of the shard
        self.again: list[int] = []  # of those, the ones without a worker
        self.ahead: dict[int, MadeShard] = {}  # done, behind one that is not
        self.next = 0  # first shard that is not done
        self.accounts: list[DeviceAccount] = []
        self.last_loss: BrimError | None = None
        self.place = out  # as workers address it
        self.token: str | None = None
        self.alone_since_s: float | None = None  # without any worker
        self.gating: tuple[Block, Future[Verdicts]] | None = None  # in this process
        self.writer: ShardWriter
        self.book: RangeBook

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    @property
    def device_name(self) -> str:
        return ", ".join(sorted({worker.facts.device_name for worker in self.workers.values()}))

    @property
    def device(self) -> str:
        return f"{self.num_workers} × {self.device_name}" if self.workers else "none"

    # Before the first range

    def start(self, first: Scenes, *, allow_mixed: bool) -> None:
        self.tally.message = "starting workers"
        with within("starting workers"):
            for event in start_workers(
                self.pool, self.assignment, allow_mixed=allow_mixed, stop=self.stop, tick=self.tally.tick
            ):
                self._handle(event)
        self.num_workers = len(self.workers)

    def make(self, writer: ShardWriter) -> None:
        """Hand out everything until the samples are made or the run is stopped."""
        self.writer = writer
        self.next = writer.items // self.config.shard_items
        left = self.tally.samples - self.tally.done
        self.book = RangeBook(self.config, left, number=self.next, start=self.tally.totals)
        writer.vacate()
        with self._shared(), ThreadPoolExecutor(1, "brim-gate") as gates, within(WORK):
            self.tally.begin()
            while self.tally.done < self.tally.samples:
                if self.stop():
                    self._leave()
                    break
                self._feed(gates)
                is_short = self.gating is not None and self.book.ready == 0
                for event in self.pool.wait(0.005 if is_short else TICK_S):
                    self._handle(event)
                if self.gating is not None and self.gating[1].done():
                    (block, verdicts), self.gating = self.gating, None
                    self.book.add(block, verdicts.result())
                self._check_workers()
                self.tally.tick()
            self.tally.end()
            if not self.tally.stopped and self.tally.made:
                self._close_accounts()
        self.pool.close()  # before the manifest is finished: nobody writes any more

    def account(self) -> DeviceAccount:
        """The accounts of all workers as one."""
        ceilings = [one.ceiling for one in self.accounts if one.ceiling is not None]
        mean = sum(ceilings) / len(ceilings) if ceilings else 0.0
        return DeviceAccount(
            ceiling=mean * self.num_workers or None,  # workers that are gone had one too
            stages=_sum_stages([one.stages for one in self.accounts], self.tally.seconds),
            batch_size=max((one.batch_size for one in self.accounts), default=0),
            peak_bytes=max((one.peak_bytes for one in self.accounts), default=0),
        )

    def ceiling(self, records: int, seconds: float) -> CeilingShare:
        return of_several(records / max(seconds, 1e-9), self.account().ceiling)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """A file beside the shards by which workers find out whether they see them; an object store is seen by all."""
        if self.out.path is None:
            yield
            return
        self.place = LocalPlace(self.out.path.absolute())
        self.token = f"shards/.999999.{secrets.token_hex(4)}.tmp"  # a name that is swept away after a kill
        self.place.put_bytes(b"", self.token)
        try:
            yield
        finally:
            self.place.remove(self.token)

    # Handing out

    def _feed(self, gates: ThreadPoolExecutor) -> None:
        for number, worker in self.workers.items():
            while worker.holds(MakeShards) < TASKS_EACH:
                ranges = self._next(number, worker)
                if not ranges:
                    break
                self._submit(number, MakeShards(ranges=tuple(ranges), place=self.place, token=self.token))
        ahead = 2 * TASKS_EACH * sum(self._size(worker) for worker in self.workers.values())
        if self.gating is None and (block := self.book.next_block(ahead)) is not None:
            self.gating = block, gates.submit(gate_block, self.config, block)
        # The gates of one core keep some five GPUs busy; beyond that the workers help.
        for number, worker in self.workers.items():
            if self.book.ready >= ahead // 2 or worker.holds(Block) or (block := self.book.next_block(ahead)) is None:
                continue
            self._submit(number, block)

    def _next(self, number: int, worker: _Worker) -> list[ShardRange]:
        """A worker's next ranges: one that was lost, new ones, or the oldest that another worker has."""
        if self.again:
            return [self.open[self.again.pop(0)].range]
        if self.book.ready:
            return self.book.take(self._size(worker))
        if self.book.remaining or worker.holds(MakeShards):
            return []

        def may_copy(entry: _OpenRange) -> bool:  # by a device of the same kind: the copy must be the same bytes
            kinds = {self.workers[holder].facts.kind for holder in entry.holders if holder in self.workers}
            return len(entry.holders) < COPIES and number not in entry.holders and kinds <= {worker.facts.kind}

        late = min(filter(may_copy, self.open.values()), key=lambda entry: entry.since_s, default=None)
        return [late.range] if late is not None else []

    def _size(self, worker: _Worker) -> int:
        """Ranges of a task: about a second of work, less towards the end, so that all workers end together."""
        size = min(MAX_RANGES, max(1, round(worker.rate * TASK_S)))
        if self.token is not None:
            size = min(size, max(1, TASK_BYTES // dataset_bytes(self.config, self.config.shard_items)))
        share = self.book.remaining / (len(self.workers) * TASKS_EACH)
        return max(1, min(size, math.ceil(share)))

    def _submit(self, number: int, task: WorkerTask) -> None:
        now_s = time.monotonic()
        self.workers[number].tasks[self.pool.submit(number, task)] = task, now_s
        if isinstance(task, MakeShards):
            for one in task.ranges:
                self.open.setdefault(one.number, _OpenRange(one, now_s)).holders.add(number)

    # Events

    def _handle(self, event: PoolEvent) -> None:
        if isinstance(event, WorkerReady):
            self.workers[event.worker] = _Worker(event.name, event.facts, ended_s=time.monotonic())
        elif isinstance(event, WorkerLost):
            self._lose(event)
        elif (worker := self.workers.get(event.worker)) is not None and event.ticket in worker.tasks:
            task, submitted_s = worker.tasks.pop(event.ticket)
            if isinstance(event, TaskFailed):
                self._retry(event.worker, task, event.error)
            elif isinstance(task, CloseAccount):
                self.accounts.append(event.value)
            elif isinstance(task, MakeShards):
                self._finish(worker, event.value, submitted_s)
            elif not self.tally.stopped:
                self.book.add(task, event.value)

    def _finish(self, worker: _Worker, result: ShardsMade, submitted_s: float) -> None:
        now_s = time.monotonic()
        rate = len(result.shards) / max(now_s - max(worker.ended_s, submitted_s), 1e-3)
        worker.rate = rate if not worker.rate else (worker.rate + rate) / 2
        worker.ended_s = now_s
        for warning in result.warnings:
            _log.warning("worker %s: %s", worker.name, warning)
        for shard in result.shards:
            self._keep(shard)

    def _keep(self, shard: MadeShard) -> None:
        """List a shard; one that two workers made counts once, and its bytes must be the same."""
        known = self.open.pop(shard.number, None)
        if known is not None and shard.data is not None:
            self.place.put_bytes(shard.data, f"shards/{shard.entry.name}")
        self.writer.adopt(shard.number, shard.entry)
        if known is None:
            return
        if shard.number in self.again:
            self.again.remove(shard.number)
        tally = self.tally
        tally.done, tally.made = tally.done + shard.entry.items, tally.made + shard.entry.items
        tally.records += shard.records
        self.ahead[shard.number] = shard
        while (first := self.ahead.pop(self.next, None)) is not None:
            self.next, tally.listed, tally.totals = self.next + 1, tally.listed + first.entry.items, first.entry.totals

    def _lose(self, event: WorkerLost) -> None:
        self.last_loss = event.error
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            return
        if not self.stop():
            _log.warning("%s; other workers take over its tasks", event.error)
        for task, _ in worker.tasks.values():
            self._retry(event.worker, task, event.error)

    def _retry(self, number: int, task: WorkerTask, error: BrimError) -> None:
        """Hand out a failed task again, unless it would fail in the same way."""
        if not isinstance(error, ClusterError | OutOfMemory):
            raise error
        if isinstance(task, Block):
            self.book.put_back(task)
        elif isinstance(task, MakeShards):
            for one in task.ranges:
                entry = self.open.get(one.number)
                if entry is None or number not in entry.holders:
                    continue
                entry.holders.discard(number)
                entry.tries += 1
                if entry.tries >= TRIES:
                    raise type(error)(f"shard {one.number} failed {entry.tries} times, the last time: {error}")
                if not entry.holders:
                    self.again.append(one.number)

    def _check_workers(self) -> None:
        """Without workers there is nothing to wait for, unless some are starting."""
        if self.workers:
            self.alone_since_s = None
            return
        now_s = time.monotonic()
        self.alone_since_s = self.alone_since_s or now_s
        if not self.pool.expects() or now_s - self.alone_since_s > START_S:
            raise ClusterError(
                f"no worker is left; the last one: {self.last_loss}",
                code="no_workers",
                hint="complete shards stay usable: continue with {resume}",
            )

    def _leave(self) -> None:
        """Stop, after a moment for the shards before those that are done already."""
        self.tally.stopped, self.tally.message = True, "stopping"
        deadline_s = time.monotonic() + STOP_S
        while self.ahead and self.workers and time.monotonic() < deadline_s:
            for event in self.pool.wait(TICK_S / 2):
                if isinstance(event, TaskDone | WorkerReady):
                    self._handle(event)
                elif isinstance(event, WorkerLost):
                    self.workers.pop(event.worker, None)
            self.tally.tick()

    def _close_accounts(self) -> None:
        """Ask the workers for their time and memory, and for the ceiling, all at once as they worked."""
        self.tally.message = "closing the accounts"
        idle = {number for number, worker in self.workers.items() if not worker.tasks}  # others still make a copy
        for number in idle:
            self._submit(number, CloseAccount())
        deadline_s = time.monotonic() + ACCOUNT_S
        while len(self.accounts) < len(idle) and time.monotonic() < deadline_s and not self.stop():
            for event in self.pool.wait(TICK_S):
                if isinstance(event, TaskFailed | WorkerLost):
                    idle.discard(event.worker)
                else:
                    self._handle(event)
            self.tally.tick()


_COMBINED: dict[str, Callable[[list[Any]], Any]] = {"memory_bytes_peak": max, "utilisation_mean": statistics.fmean}


def _sum_stages(accounts: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The stages of all workers as one; shares add up to the number of workers."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for stages in accounts for name in stages):
        parts = [stages[name] for stages in accounts if name in stages]
        total[name] = {}
        for key in parts[0]:
            known = [part[key] for part in parts if part[key] is not None]
            total[name][key] = _COMBINED.get(key, sum)(known) if known else None
        if "busy_s" in total[name]:
            total[name]["share"] = total[name]["busy_s"] / seconds if seconds else 0.0
    return total

"""A dataset made by many workers: the head gates and hands out ranges, and writes the one manifest.

    head: gates → ranges ──tasks──▶ workers: scenes → device → shards, written where all see them
                 manifest ◀──entries──┘

Results are equal bytes whoever makes them, so a range may run again, or twice at once, without harm: that is all there
is to a death or a straggler.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.cluster.pool import Done, Event, Facts, Failed, Lost, Pool, Ready
from brim.cluster.worker import Account, Accounts, Gate, Made, MadeShard, Make, RangeWork
from brim.engine.meter import ceiling_share
from brim.engine.storage import MANIFEST, LocalPlace, Place, ShardWriter, Verify, place_of, verify
from brim.errors import BrimError, ClusterError, DatasetError, OutOfMemory
from brim.rf.config import GenerateConfig
from brim.rf.generation.dataset import (
    Progress,
    Report,
    attend,
    check_gates,
    check_request,
    find_finished,
    open_writer,
    warn_other_device,
)
from brim.rf.generation.gates import REASONS
from brim.rf.generation.ranges import Block, Outcome, Range, RangeBook, gate_block
from brim.rf.generation.rows import dataset_bytes

START_S = 180.0  # for workers to be ready: they import, compile and fit their batch
ACCOUNT_S = 15.0  # for workers to measure their ceiling: about a second each, all at once
STOP_S = 2.0  # that a stop waits for shards which make those behind them usable
TASK_S = 1.0  # of work in a task, about: progress and lost work are measured in it, hand-outs cost nothing beside it
TASKS_EACH = 2  # in a worker's hands: one it makes, and the next
MAX_RANGES = 64  # in a task
TASK_BYTES = 64 * 2**20  # of shards in a task whose bytes travel to the head
TRIES = 4  # of a range; the first failure may have been a neighbour's in the same task, the next are its own
COPIES = 2  # of a range at once, when nothing else is left to do
TICK_S = 0.2
_log = logging.getLogger("brim")


def generate_many(
    config: GenerateConfig,
    out: Path | str | Place,
    samples: int = 1000,
    *,
    pool: Pool,
    batch_size: int | None = None,
    memory: int | None = None,
    resume: bool = True,
    verify: Verify = "all",
    allow_mixed: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Report:
    """Make a dataset of `samples` accepted samples in `out` with all workers of a pool, continuing what is there.

    Shards are the same bytes as those of one device of the same type, whatever the number of
    workers, their order, or how many of them die. batch_size and memory are each worker's. `progress` is called at
    least once a second; `stop` is asked as often, and whole shards made until then stay a usable dataset.
    allow_mixed takes workers of several device types, whose bytes may differ in their last bits. The pool is closed.
    """
    check_request(samples, batch_size, memory)
    head = _Head(config, place_of(out), samples, pool, allow_mixed, verify, progress, stop or (lambda: False))
    try:
        return head.execute(RangeWork(config=config, batch_size=batch_size, memory=memory), resume)
    finally:
        pool.close()


@dataclass(slots=True)
class _Job:
    """A task in a worker's hands."""

    task: Make | Gate | Account
    given_s: float


@dataclass(slots=True)
class _Worker:
    """A worker that is ready."""

    name: str
    facts: Facts
    jobs: dict[int, _Job] = field(default_factory=dict)
    ended_s: float = 0.0  # when its last task ended
    rate: float = 0.0  # ranges/s

    def making(self) -> int:
        return sum(isinstance(job.task, Make) for job in self.jobs.values())

    def is_gating(self) -> bool:
        return any(isinstance(job.task, Gate) for job in self.jobs.values())


@dataclass(slots=True)
class _Open:
    """A range that was handed out and is not done."""

    range: Range
    since_s: float
    holders: set[int] = field(default_factory=set)  # workers
    tries: int = 0


class _Head:
    """One call of generate_many."""

    def __init__(
        self,
        config: GenerateConfig,
        out: Place,
        samples: int,
        pool: Pool,
        allow_mixed: bool,
        verify: Verify,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.out, self.samples, self.pool = config, out, samples, pool
        self.allow_mixed, self.verify, self.progress, self.stop = allow_mixed, verify, progress, stop
        self.workers: dict[int, _Worker] = {}
        self.wanted = 0  # workers
        self.open: dict[int, _Open] = {}  # by number of the shard
        self.again: list[int] = []  # of those, what nobody holds
        self.ahead: dict[int, MadeShard] = {}  # done, behind one that is not
        self.next = 0  # first shard that is not done
        self.totals = {"attempted": 0, **dict.fromkeys(REASONS, 0)}
        self.listed = self.done = self.made = self.records = 0  # samples: before the first gap, in all, of this run
        self.began_s = self.seconds = 0.0
        self.message, self.stopped = "starting workers", False
        self.accounts: list[Accounts] = []
        self.last_loss: BrimError | None = None
        self.place = out  # as workers find it
        self.token: str | None = None
        self.lonely_s: float | None = None  # since when there is no worker
        self.gating: tuple[Block, Future[Outcome]] | None = None  # here, on the head

    def execute(self, work: RangeWork, resume: bool) -> Report:
        """Start the workers, hand everything out, leave the manifest complete or usable."""
        check_gates(self.config)
        if not resume and self.out.exists(MANIFEST):
            raise DatasetError(f"{self.out} is not empty; add --resume to continue it or choose another --out")
        if resume and self._is_finished():
            return self._report()
        self._start(work)
        name = self._device_name()
        warn_other_device(self.config, self.out, name)
        with open_writer(self.config, self.out, name, resume=resume, verify=self.verify) as writer:
            self.listed = self.done = writer.items
            self.next = writer.items // self.config.shard_items
            self.totals.update(writer.totals)
            writer.vacate()
            with self._shared(), ThreadPoolExecutor(1, "brim-gate") as gates:
                self._make(writer, gates)
            self.pool.close()  # before the manifest is finished: nobody writes any more
            report = self._report()
            if not self.stopped:
                writer.finish(report=report.as_dict())
        return report

    # Before the first range

    def _is_finished(self) -> bool:
        found = find_finished(self.config, self.out, self.samples)
        if found is None:
            return False
        self.message = "verifying"
        attend(lambda: verify(found, self.verify), self._tick)
        self.listed = self.done = self.samples
        self.totals = dict(found.shards[-1].totals)
        return True

    def _start(self, work: RangeWork) -> None:
        """Wait until every worker is ready; one that cannot be opened is an error."""
        self.wanted, deadline_s = self.pool.start(work), time.monotonic() + START_S
        while len(self.workers) < self.wanted and not self.stop():
            for event in self.pool.wait(TICK_S):
                if isinstance(event, Lost):
                    raise event.error
                self._hear(event, None)
            self._tick()
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"{len(self.workers)} of {self.wanted} workers were ready after {START_S:.0f} s; "
                    "check that the nodes have free CPUs and GPUs: ray status"
                )
        kinds: dict[str, list[str]] = {}
        for worker in self.workers.values():
            kinds.setdefault(worker.facts.kind, []).append(worker.name)
        if len(kinds) > 1 and not self.allow_mixed:
            named = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in sorted(kinds.items()))
            raise ClusterError(
                f"devices are of {len(kinds)} types ({named}), whose shards differ in their last bits; "
                "use devices of one type, or take that with --allow-mixed"
            )

    def _device_name(self) -> str:
        return ", ".join(sorted({worker.facts.device_name for worker in self.workers.values()}))

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """A file beside the shards by which workers find out whether they see them; an object store is seen by all."""
        if self.out.path is None:
            yield
            return
        self.place = LocalPlace(self.out.path.absolute())
        self.token = f"shards/.999999.{secrets.token_hex(4)}.tmp"  # what is swept away where this process is killed
        self.place.put_bytes(b"", self.token)
        try:
            yield
        finally:
            self.place.remove(self.token)

    # Handing out

    def _make(self, writer: ShardWriter, gates: ThreadPoolExecutor) -> None:
        book = RangeBook(self.config, self.samples - self.done, number=self.next, start=self.totals)
        self.message, self.began_s = "generating", time.perf_counter()
        while self.done < self.samples:
            if self.stop():
                self._leave(writer)
                break
            self._feed(book, gates)
            hungry = self.gating is not None and book.ready == 0
            for event in self.pool.wait(0.005 if hungry else TICK_S):
                self._hear(event, writer, book)
            self._take_gated(book)
            self._check_workers()
            self._tick()
        self.seconds = time.perf_counter() - self.began_s
        if not self.stopped and self.made:
            self._account()

    def _feed(self, book: RangeBook, gates: ThreadPoolExecutor) -> None:
        for number, worker in self.workers.items():
            while worker.making() < TASKS_EACH:
                ranges = self._next(number, worker, book)
                if not ranges:
                    break
                self._give(number, Make(ranges=tuple(ranges), place=self.place, token=self.token))
        ahead = 2 * TASKS_EACH * sum(self._size(worker, book) for worker in self.workers.values())
        if self.gating is None and (block := book.next_block(ahead)) is not None:
            self.gating = block, gates.submit(gate_block, self.config, block)
        # The gates of one core keep some five GPUs busy; from there on the workers help.
        for number, worker in self.workers.items():
            if book.ready >= ahead // 2 or worker.is_gating() or (block := book.next_block(ahead)) is None:
                continue
            self._give(number, Gate(block=block))

    def _next(self, number: int, worker: _Worker, book: RangeBook) -> list[Range]:
        """What a worker makes next: what was lost, what is new, or the oldest that another one has."""
        if self.again:
            return [self.open[self.again.pop(0)].range]
        if book.ready:
            return book.take(self._size(worker, book))
        if book.remaining or worker.making():
            return []
        late = [
            entry
            for entry in self.open.values()
            if len(entry.holders) < COPIES and number not in entry.holders and self._alike(worker, entry)
        ]
        return [min(late, key=lambda entry: entry.since_s).range] if late else []

    def _alike(self, worker: _Worker, entry: _Open) -> bool:
        """Whether a second copy would be the same bytes."""
        kinds = {self.workers[holder].facts.kind for holder in entry.holders if holder in self.workers}
        return kinds <= {worker.facts.kind}

    def _size(self, worker: _Worker, book: RangeBook) -> int:
        """Ranges of a task: about a second of work, less towards the end, so that all end at about the same time."""
        size = min(MAX_RANGES, max(1, round(worker.rate * TASK_S)))
        if self.token is not None:
            size = min(size, max(1, TASK_BYTES // dataset_bytes(self.config, self.config.shard_items)))
        share = book.remaining / (len(self.workers) * TASKS_EACH)
        return max(1, min(size, math.ceil(share)))

    def _give(self, number: int, task: Make | Gate | Account) -> None:
        now_s = time.monotonic()
        self.workers[number].jobs[self.pool.submit(number, task)] = _Job(task, now_s)
        if isinstance(task, Make):
            for one in task.ranges:
                self.open.setdefault(one.number, _Open(one, now_s)).holders.add(number)

    # What happened

    def _hear(self, event: Event, writer: ShardWriter | None, book: RangeBook | None = None) -> None:
        if isinstance(event, Ready):
            self.workers[event.worker] = _Worker(event.name, event.facts, ended_s=time.monotonic())
        elif isinstance(event, Lost):
            self._lose(event, book)
        elif (worker := self.workers.get(event.worker)) is not None:
            job = worker.jobs.pop(event.ticket, None)
            if job is not None and isinstance(event, Failed):
                self._retry(event.worker, job, event.error, book)
            elif job is not None and isinstance(event, Done):
                self._finish(worker, job, event.value, writer, book)

    def _finish(
        self, worker: _Worker, job: _Job, value: Any, writer: ShardWriter | None, book: RangeBook | None
    ) -> None:
        if isinstance(value, Accounts):
            self.accounts.append(value)
        elif isinstance(job.task, Gate):
            if book is not None:
                book.add(job.task.block, value)
        elif isinstance(value, Made) and writer is not None:
            now_s = time.monotonic()
            rate = len(value.shards) / max(now_s - max(worker.ended_s, job.given_s), 1e-3)
            worker.rate = rate if not worker.rate else (worker.rate + rate) / 2
            worker.ended_s = now_s
            for remark in value.remarks:
                _log.warning("worker %s: %s", worker.name, remark)
            for shard in value.shards:
                self._keep(shard, writer)

    def _keep(self, shard: MadeShard, writer: ShardWriter) -> None:
        """List a shard; one that came from two workers counts once, and both must have made the same."""
        known = self.open.pop(shard.number, None)
        if known is not None and shard.data is not None:
            self.place.put_bytes(shard.data, f"shards/{shard.entry.name}")
        writer.adopt(shard.number, shard.entry)
        if known is None:
            return
        if shard.number in self.again:
            self.again.remove(shard.number)
        self.done, self.made = self.done + shard.entry.items, self.made + shard.entry.items
        self.records += shard.records
        self.ahead[shard.number] = shard
        while (first := self.ahead.pop(self.next, None)) is not None:
            self.next, self.listed, self.totals = self.next + 1, self.listed + first.entry.items, first.entry.totals

    def _lose(self, event: Lost, book: RangeBook | None) -> None:
        self.last_loss = event.error
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            return
        if not self.stop():
            _log.warning("%s; its work goes to others", event.error)
        for job in worker.jobs.values():
            self._retry(event.worker, job, event.error, book)

    def _retry(self, number: int, job: _Job, error: BrimError, book: RangeBook | None) -> None:
        """Have what a worker did not make made again, unless that would end in the same way."""
        if not isinstance(error, ClusterError | OutOfMemory):
            raise error
        if isinstance(job.task, Gate) and book is not None:
            book.put_back(job.task.block)
        elif isinstance(job.task, Make):
            for one in job.task.ranges:
                entry = self.open.get(one.number)
                if entry is None or number not in entry.holders:
                    continue
                entry.holders.discard(number)
                entry.tries += 1
                if entry.tries >= TRIES:
                    raise type(error)(f"shard {one.number} failed {entry.tries} times, the last time: {error}")
                if not entry.holders:
                    self.again.append(one.number)

    def _take_gated(self, book: RangeBook) -> None:
        if self.gating is not None and self.gating[1].done():
            block, outcome = self.gating
            self.gating = None
            book.add(block, outcome.result())

    def _check_workers(self) -> None:
        """Without workers there is nothing to wait for, unless some are starting."""
        if self.workers:
            self.lonely_s = None
            return
        now_s = time.monotonic()
        self.lonely_s = self.lonely_s or now_s
        if not self.pool.expects() or now_s - self.lonely_s > START_S:
            raise ClusterError(
                f"no worker is left; the last one: {self.last_loss}; complete shards stay usable: "
                "continue with --resume"
            )

    def _leave(self, writer: ShardWriter) -> None:
        """Stop, after a moment for the shards before those that are done already."""
        self.stopped, self.message = True, "stopping"
        deadline_s = time.monotonic() + STOP_S
        while self.ahead and self.workers and time.monotonic() < deadline_s:
            for event in self.pool.wait(TICK_S / 2):
                if isinstance(event, Done | Ready):
                    self._hear(event, writer)
                elif isinstance(event, Lost):
                    self.workers.pop(event.worker, None)
            self._tick()

    # Telling

    def _account(self) -> None:
        """Ask the workers what it took, and for the ceiling, all at once as they worked."""
        self.message = "measuring the ceiling"
        asked = {number for number, worker in self.workers.items() if not worker.jobs}  # others are still at a copy
        for number in asked:
            self._give(number, Account(ceiling=True))
        deadline_s = time.monotonic() + ACCOUNT_S
        while len(self.accounts) < len(asked) and time.monotonic() < deadline_s and not self.stop():
            for event in self.pool.wait(TICK_S):
                if isinstance(event, Failed | Lost):
                    asked.discard(event.worker)
                else:
                    self._hear(event, None)
            self._tick()

    def _tick(self) -> None:
        if self.progress is None:
            return
        seconds = self.seconds or (time.perf_counter() - self.began_s if self.began_s else 0.0)
        rate = self.made / seconds if seconds else 0.0
        self.progress(
            Progress(
                done=self.done,
                total=self.samples,
                attempted=self.totals["attempted"],
                rate=rate,
                eta_s=(self.samples - self.done) / rate if rate else float("inf"),
                message=self.message,
                seconds=seconds,
            )
        )

    def _report(self) -> Report:
        rate, iq_rate = (count / max(self.seconds, 1e-9) for count in (self.made, self.records))
        ceilings = [one.ceiling for one in self.accounts if one.ceiling is not None]
        ceiling = sum(ceilings) / len(ceilings) * self.wanted if ceilings else 0.0  # one who is gone had one too
        names = sorted({worker.facts.device_name for worker in self.workers.values()})
        return Report(
            dataset=str(self.out),
            accepted=self.listed,
            attempted=self.totals["attempted"],
            rejected={reason: self.totals[reason] for reason in REASONS},
            seconds=self.seconds,
            samples_per_s=rate,
            iq_per_s=iq_rate,
            device=f"{self.wanted} × {', '.join(names)}" if names else "none",
            batch_size=max((one.batch_size for one in self.accounts), default=0),
            ceiling_share=ceiling_share(iq_rate, ceiling) if ceiling and not self.stopped else None,
            stages=_sum_stages([one.stages for one in self.accounts], self.seconds),
            peak_bytes=max((one.peak_bytes for one in self.accounts), default=0),
            workers=self.wanted,
            stopped=self.stopped,
        )


def _sum_stages(accounts: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The stages of all workers as one; shares add up to the number of workers."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for stages in accounts for name in stages):
        parts = [stages[name] for stages in accounts if name in stages]
        total[name] = {key: _combine(key, [part[key] for part in parts]) for key in parts[0]}
        if "busy_s" in total[name]:
            total[name]["share"] = total[name]["busy_s"] / seconds if seconds else 0.0
    return total


def _combine(key: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if key == "memory_bytes_peak":
        return max(known)
    return sum(known) / len(known) if key == "utilisation_mean" else sum(known)

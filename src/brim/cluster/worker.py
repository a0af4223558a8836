"""What generates within a worker: ranges in, shards out, on one device, for whoever holds the manifest.

    tasks ──▶ one thread runs the stages of `brim.rf` over all ranges given ──▶ a few threads write the shards

The stages go on from task to task, so a device whose next task is here already never waits.
"""

import logging
import platform
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from brim.cluster.pool import Facts
from brim.engine.device import PeakMemory, format_size, free_bytes, resolve_device
from brim.engine.meter import BUSY, INPUT, GpuSampler
from brim.engine.storage import LocalPlace, Place, ShardEntry, shard_name, write_shard
from brim.errors import OutOfMemory
from brim.rf.config import GenerateConfig
from brim.rf.generation.gates import first_accepted
from brim.rf.generation.ranges import Block, Outcome, Range, gate_block, make_ranges
from brim.rf.generation.rows import dataset_bytes
from brim.rf.generation.stages import Rows, Stages

WRITERS = 4  # shards written at once: a disk or a store takes its time to be sure of each
HELD_SHARDS = WRITERS + 4  # in a worker's memory at once: made, being written, and the parts of the next


# Tasks and what comes of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Ranges to make into shards of a dataset."""

    ranges: tuple[Range, ...]
    place: Place
    token: str | None  # name of a file there: who sees it writes there itself; None: everyone does


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Attempts to gate."""

    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Say what it took, and measure the ceiling where that is asked for."""

    ceiling: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeShard:
    """A shard that is written, or its bytes where its place cannot be seen from the worker."""

    number: int
    entry: ShardEntry
    records: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """All shards of a task, and what was said meanwhile."""

    shards: tuple[MadeShard, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """What a worker's part of the run took."""

    ceiling: float | None  # records/s of the compute stage alone
    stages: dict[str, Any]
    batch_size: int
    peak_bytes: int


# The worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeWork:
    """Generating, as it travels to a worker."""

    config: GenerateConfig
    batch_size: int | None = None
    memory: int | None = None

    @contextmanager
    def open(self, device: str, threads: int | None) -> Iterator["RangeServer"]:
        """Fit the batch, compile the kernels: from here on it only works."""
        here = resolve_device(device)
        check_memory(self.config)
        with ExitStack() as stack:
            stages = stack.enter_context(Stages(self.config, here, threads=threads))
            peak = stack.enter_context(PeakMemory(here))
            stages.prepare(first_accepted(self.config), self.batch_size, self.memory)
            gpu = stack.enter_context(GpuSampler(here))
            yield stack.enter_context(RangeServer(stages, peak, gpu))


def check_memory(config: GenerateConfig) -> None:
    """Refuse a machine that cannot hold the shards that are under way in one worker."""
    one = dataset_bytes(config, config.shard_items)
    need, free = HELD_SHARDS * one, free_bytes(torch.device("cpu"))
    if free < need:
        raise OutOfMemory(
            f"{platform.node()} has {format_size(free)} of memory free, {format_size(need)} are needed for "
            f"{HELD_SHARDS} shards of {format_size(one)}; free some, leave the node out, or lower samples_per_shard"
        )


@dataclass(slots=True)
class _Task:
    """A task under way: what is written of it."""

    make: Make
    future: "Future[Made]"
    written: "list[Future[MadeShard]]" = field(default_factory=list)


class RangeServer:
    """Serves Make, Gate and Account; its threads end with the block."""

    def __init__(self, stages: Stages, peak: PeakMemory, gpu: GpuSampler) -> None:
        """Store."""
        self.stages, self.peak, self.gpu = stages, peak, gpu
        kind = stages.device_name if stages.on_gpu else _cpu_kind()
        self.facts = Facts(
            device=str(stages.device), device_name=stages.device_name, kind=kind, batch_size=stages.halving.size
        )
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._under_way: deque[_Task] = deque()
        self._ended = threading.Event()  # the stream's: its source must not wait for tasks any more
        self._closed = False
        self._writers = ThreadPoolExecutor(WRITERS, "brim-write")
        self._room = threading.Semaphore(WRITERS)
        self._gates = ThreadPoolExecutor(1, "brim-gate")
        self._thread = threading.Thread(target=self._run, name="brim-ranges", daemon=True)
        self._seen: dict[str, bool] = {}
        self._remarks = _Remarks()

    def __enter__(self) -> "RangeServer":
        """Start."""
        logging.getLogger("brim").addHandler(self._remarks)
        self.stages.meter.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the shards that are being written, begin no other."""
        self._closed = True
        self._end()
        self._gates.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        logging.getLogger("brim").removeHandler(self._remarks)

    def submit(self, task: Any) -> "Future[Any]":
        """Begin a task."""
        if isinstance(task, Gate):
            return self._gates.submit(self._gate, task.block)
        if isinstance(task, Account):
            return self._gates.submit(self._account, task.ceiling)
        assert isinstance(task, Make), task
        made: Future[Made] = Future()
        self._tasks.put(_Task(task, made))
        return made

    # The stream of ranges

    def _run(self) -> None:
        """Make what is asked for; a failure ends the tasks under way, not the worker."""
        while not self._closed:
            self._ended.clear()
            try:
                for one, rows in make_ranges(self.stages, self._ranges(), end=self._end):
                    self._room.acquire()
                    self._write(one, rows)
            except Exception as failure:  # whatever it is, whoever waits must hear it
                while self._under_way:
                    self._fail(self._under_way.popleft(), failure)

    def _ranges(self) -> Iterator[tuple[Range, ...]]:
        while not self._ended.is_set():
            began_s = time.perf_counter()
            task = self._tasks.get()
            waited_s = time.perf_counter() - began_s
            self.stages.meter.add("scene", -waited_s, BUSY)  # this runs within the source's own work
            self.stages.meter.add("scene", waited_s, INPUT)
            if task is not None:
                self._under_way.append(task)
                yield task.make.ranges

    def _end(self) -> None:
        self._ended.set()
        self._tasks.put(None)

    def _write(self, one: Range, rows: Rows) -> None:
        task = self._under_way[0]
        written = self._writers.submit(self._store, task.make, one, rows)
        written.add_done_callback(lambda _: self._room.release())
        task.written.append(written)
        if len(task.written) == len(task.make.ranges):
            self._under_way.popleft()
            self._writers.submit(self._finish, task)

    def _store(self, make: Make, one: Range, rows: Rows) -> MadeShard:
        records = int(rows["present"].sum())
        with self.stages.meter.busy("write"):
            if self._sees(make):
                entry = write_shard(make.place, one.number, rows, one.totals)
                return MadeShard(number=one.number, entry=entry, records=records)
            with tempfile.TemporaryDirectory(prefix="brim-") as folder:
                (Path(folder) / "shards").mkdir()
                entry = write_shard(LocalPlace(Path(folder)), one.number, rows, one.totals)
                data = (Path(folder) / "shards" / shard_name(one.number)).read_bytes()
        return MadeShard(number=one.number, entry=entry, records=records, data=data)

    def _sees(self, make: Make) -> bool:
        if make.token is None:
            return True
        if make.token not in self._seen:
            self._seen[make.token] = make.place.exists(make.token)
        return self._seen[make.token]

    def _finish(self, task: _Task) -> None:
        """Runs after its shards were begun, in the same few threads: those before it are running, none waits for it."""
        try:
            shards = tuple(written.result() for written in task.written)
        except Exception as failure:  # of one of its shards
            self._fail(task, failure)
        else:
            task.future.set_result(Made(shards=shards, remarks=self._remarks.take()))

    @staticmethod
    def _fail(task: _Task, failure: BaseException) -> None:
        task.future.set_exception(failure)

    # The rest

    def _gate(self, block: Block) -> Outcome:
        return gate_block(self.stages.config, block)

    def _account(self, ceiling: bool) -> Accounts:
        self.stages.meter.stop()
        found, gpu = self.stages.meter.summary()["stages"], self.gpu.summary()
        rate = self.stages.ceiling() if ceiling else None
        return Accounts(
            ceiling=rate,
            stages=found | ({"gpu": gpu} if gpu is not None else {}),
            batch_size=self.stages.halving.size,
            peak_bytes=self.peak.bytes,
        )


class _Remarks(logging.Handler):
    """Warnings of this worker on their way to the head."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        said, self._said = self._said, []
        return tuple(said)


def _cpu_kind() -> str:
    """CPUs of one kind run the same instructions, so their bytes are equal."""
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"

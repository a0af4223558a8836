"""A worker of a pool: makes ranges into shards on one device, for the process that holds the manifest.

    tasks ──▶ one thread runs the stages over all their ranges ──▶ a few threads write the shards

The stages run on from task to task, so a device whose next task has arrived never waits.
"""

import logging
import platform
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import PeakMemory, format_size, free_bytes, resolve_device
from brim.engine.meter import BUSY, INPUT, GpuSampler
from brim.engine.storage import LocalPlace, Place, ShardEntry, shard_name, write_shard
from brim.errors import OutOfMemory
from brim.rf.config import GenerateConfig
from brim.rf.generation.accounting import DeviceAccount
from brim.rf.generation.attempts import Block, ShardRange, first_accepted, gate_block
from brim.rf.generation.pool import WorkerFacts
from brim.rf.generation.rows import dataset_bytes
from brim.rf.generation.stages import Stages, join
from brim.rf.physics.scene import Scenes, make_scenes

WRITERS = 4  # shards written at once: a disk or a store takes its time to be sure of each
HELD_SHARDS = WRITERS + 4  # in a worker's memory at once: made, being written, and the parts of the next


# Tasks and their results


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeShards:
    """Ranges to make into shards of a dataset; the result is ShardsMade."""

    ranges: tuple[ShardRange, ...]
    place: Place
    token: str | None  # a file there: a worker that sees it writes there itself, others send bytes; None: all see it


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAccount:
    """Report the ceiling, time and memory; the result is a DeviceAccount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeShard:
    """A shard that is written, or its bytes if the worker cannot see the dataset."""

    number: int
    entry: ShardEntry
    records: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsMade:
    """All shards of a task, and the warnings logged meanwhile."""

    shards: tuple[MadeShard, ...]
    warnings: tuple[str, ...]


# The worker


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateAssignment:
    """Generating, as it is sent to a worker."""

    config: GenerateConfig
    batch_size: int | None = None
    memory: int | None = None

    @contextmanager
    def open(self, device: str, threads: int | None) -> Iterator["RangeServer"]:
        """Fit the batch and compile the kernels, so that tasks only compute."""
        here = resolve_device(device)
        check_memory(self.config)
        with ExitStack() as stack:
            stages = stack.enter_context(Stages(self.config, here, threads=threads))
            peak = stack.enter_context(PeakMemory(here))
            stages.prepare(first_accepted(self.config), self.batch_size, self.memory)
            gpu = stack.enter_context(GpuSampler(here))
            yield stack.enter_context(RangeServer(stages, peak, gpu))


def check_memory(config: GenerateConfig) -> None:
    """Reject a machine that cannot hold the shards that one worker has in memory."""
    one = dataset_bytes(config, config.shard_items)
    need, free = HELD_SHARDS * one, free_bytes(torch.device("cpu"))
    if free < need:
        raise OutOfMemory(
            f"{platform.node()} has {format_size(free)} of memory free, {format_size(need)} are needed for "
            f"{HELD_SHARDS} shards of {format_size(one)}",
            hint="free some, leave the node out, or lower {samples_per_shard}",
        )


@dataclass(slots=True)
class _MakeTask:
    request: MakeShards
    future: "Future[ShardsMade]"
    written: "list[Future[MadeShard]]" = field(default_factory=list)


class RangeServer:
    """Serves MakeShards, CloseAccount, and Blocks to gate; its threads end with the block."""

    def __init__(self, stages: Stages, peak: PeakMemory, gpu: GpuSampler) -> None:
        self.stages, self.peak, self.gpu = stages, peak, gpu
        # CPUs of one kind run the same instructions, so their bytes are equal.
        cpu = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        self.facts = WorkerFacts(
            device=str(stages.device),
            device_name=stages.device_name,
            kind=stages.device_name if stages.on_gpu else cpu,
            batch_size=stages.halving.size,
        )
        self._tasks: queue.SimpleQueue[_MakeTask | None] = queue.SimpleQueue()
        self._under_way: deque[_MakeTask] = deque()
        self._ended = threading.Event()  # the stream's: its source must not wait for tasks any more
        self._closed = False
        self._writers = ThreadPoolExecutor(WRITERS, "brim-write")
        self._room = threading.Semaphore(WRITERS)
        self._gates = ThreadPoolExecutor(1, "brim-gate")
        self._thread = threading.Thread(target=self._run, name="brim-ranges", daemon=True)
        self._visible: dict[str, bool] = {}  # by token
        self._warnings = _WarningLog()

    def __enter__(self) -> "RangeServer":
        logging.getLogger("brim").addHandler(self._warnings)
        self.stages.meter.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the shards that are being written, begin no other."""
        self._closed = True
        self._end()
        self._gates.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        logging.getLogger("brim").removeHandler(self._warnings)

    def submit(self, task: Any) -> "Future[Any]":
        if isinstance(task, Block):
            return self._gates.submit(gate_block, self.stages.config, task)
        if isinstance(task, CloseAccount):
            return self._gates.submit(self._close_account)
        assert isinstance(task, MakeShards), task
        future: Future[ShardsMade] = Future()
        self._tasks.put(_MakeTask(task, future))
        return future

    def _close_account(self) -> DeviceAccount:
        self.stages.meter.stop()
        return self.stages.account(self.peak.bytes, self.gpu.summary())

    # The stream of ranges

    def _run(self) -> None:
        """Make the ranges of all tasks; a failure ends the tasks under way, not the worker."""
        while not self._closed:
            self._ended.clear()
            try:
                for one, rows in make_ranges(self.stages, self._ranges(), end=self._end):
                    self._room.acquire()
                    self._write(one, rows)
            except Exception as failure:  # of any kind: the tasks' owners must hear of it
                while self._under_way:
                    self._under_way.popleft().future.set_exception(failure)

    def _ranges(self) -> Iterator[tuple[ShardRange, ...]]:
        while not self._ended.is_set():
            began_s = time.perf_counter()
            task = self._tasks.get()
            waited_s = time.perf_counter() - began_s
            self.stages.meter.add("scene", -waited_s, BUSY)  # this runs within the source's own work
            self.stages.meter.add("scene", waited_s, INPUT)
            if task is not None:
                self._under_way.append(task)
                yield task.request.ranges

    def _end(self) -> None:
        self._ended.set()
        self._tasks.put(None)

    def _write(self, one: ShardRange, rows: dict[str, Tensor]) -> None:
        task = self._under_way[0]
        written = self._writers.submit(self._store, task.request, one, rows)
        written.add_done_callback(lambda _: self._room.release())
        task.written.append(written)
        if len(task.written) == len(task.request.ranges):
            self._under_way.popleft()
            self._writers.submit(self._finish, task)

    def _store(self, request: MakeShards, one: ShardRange, rows: dict[str, Tensor]) -> MadeShard:
        records = int(rows["present"].sum())
        with self.stages.meter.busy("write"):
            token = request.token
            if token is not None and token not in self._visible:
                self._visible[token] = request.place.exists(token)
            if token is None or self._visible[token]:
                entry = write_shard(request.place, one.number, rows, one.totals)
                return MadeShard(number=one.number, entry=entry, records=records)
            with tempfile.TemporaryDirectory(prefix="brim-") as folder:
                (Path(folder) / "shards").mkdir()
                entry = write_shard(LocalPlace(Path(folder)), one.number, rows, one.totals)
                data = (Path(folder) / "shards" / shard_name(one.number)).read_bytes()
        return MadeShard(number=one.number, entry=entry, records=records, data=data)

    def _finish(self, task: _MakeTask) -> None:
        """Runs in the writers' threads after the task's shards were begun, so none of them waits for it."""
        try:
            shards = tuple(written.result() for written in task.written)
        except Exception as failure:
            task.future.set_exception(failure)
        else:
            task.future.set_result(ShardsMade(shards=shards, warnings=self._warnings.take()))


def make_ranges(
    stages: Stages, tasks: Iterable[Sequence[ShardRange]], end: Callable[[], None] = lambda: None
) -> Iterator[tuple[ShardRange, dict[str, Tensor]]]:
    """The rows of every range, in the order of the tasks; batches run across the ranges of a task.

    tasks is read in a thread of its own and may block: the device works on the ranges of earlier tasks meanwhile.
    `end` is called when no more are wanted, also after a failure: it must make blocked tasks return.
    """
    with stages.run(_batches(stages, tasks)) as results:
        parts: list[dict[str, Tensor]] = []
        try:
            for rows, pieces in results:
                at = 0
                for whole, count, is_last in pieces:
                    parts.append({name: tensor[at : at + count] for name, tensor in rows.items()})
                    at += count
                    if is_last:
                        yield whole, join(parts)
                        parts = []
        finally:
            end()


def _batches(
    stages: Stages, tasks: Iterable[Sequence[ShardRange]]
) -> Iterator[tuple[Scenes, list[tuple[ShardRange, int, bool]]]]:
    """Scenes of a batch with its ranges: how many rows of each, and whether those are its last."""
    for task in tasks:
        pending = deque((one, 0) for one in task)
        while pending:
            room, index, pieces = max(1, stages.next_batch()), [], []
            while pending and room:
                one, begin = pending.popleft()
                end = min(len(one), begin + room)
                index.append(one.index[begin:end])
                pieces.append((one, end - begin, end == len(one)))
                room -= end - begin
                if end < len(one):
                    pending.appendleft((one, end))
            yield make_scenes(stages.config, np.concatenate(index)), pieces


class _WarningLog(logging.Handler):
    """Collects this worker's warnings for the head."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        messages, self._messages = self._messages, []
        return tuple(messages)

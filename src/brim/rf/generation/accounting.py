"""Counts of a run: progress while it runs, and the report at its end."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from brim.engine.meter import Spent
from brim.rf.generation.attempts import REASONS

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateProgress:
    """Where a run is; passed to the caller at least once a second."""

    done: int  # accepted samples
    total: int
    attempted: int
    rate: float  # accepted samples per second so far
    eta_s: float
    message: str
    seconds: float = 0.0  # of generating so far
    waiting: Mapping[str, float] | None = None  # seconds the compute stage waited, by cause; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """The result of a run; times exclude the compilation of kernels."""

    dataset: str
    accepted: int
    attempted: int
    rejected: dict[str, int]
    seconds: float
    samples_per_s: float
    iq_per_s: float
    device: str
    batch_size: int
    ceiling_share: float | None  # rate of the whole run over that of the compute stage alone; None: not known
    stages: dict[str, Any]
    peak_bytes: int
    workers: int | None = None  # workers of the pool; None without a pool
    stopped: bool = False  # on request, before all samples were made
    ceiling_spread: float | None = None  # standard deviation of ceiling_share between measurements
    ceiling_words: str = "ceiling not measured"
    spent: Spent | None = None  # of the whole call, or of the command that it is part of

    def as_dict(self) -> dict[str, Any]:
        left_out = {"stopped", "ceiling_words", "spent"} | ({"workers"} if self.workers is None else set())
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return values | (self.spent.as_dict() if self.spent is not None else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccount:
    """Time and memory of a worker's part of a run, or of all workers together."""

    ceiling: float | None  # records/s of the compute stage alone; None: not measured
    stages: dict[str, Any]
    batch_size: int
    peak_bytes: int


@dataclass(slots=True)
class Tally:
    """What a run has made so far."""

    samples: int
    progress: Callable[[GenerateProgress], None] | None
    message: str = "starting"
    done: int = 0  # accepted samples of the dataset, including shards behind a missing one
    listed: int = 0  # of those, before the first missing shard
    made: int = 0  # of those, by this run
    records: int = 0  # IQ records of the samples made
    totals: dict[str, int] = field(default_factory=lambda: {"attempted": 0, **dict.fromkeys(REASONS, 0)})
    stopped: bool = False
    waiting: Callable[[], Mapping[str, float]] | None = None
    _began_s: float | None = None
    _ended_s: float | None = None

    def begin(self) -> None:
        self.message, self._began_s = "generating", time.perf_counter()

    def end(self) -> None:
        self._ended_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        if self._began_s is None:
            return 0.0
        return (self._ended_s or time.perf_counter()) - self._began_s

    def tick(self) -> None:
        """Tell the caller where the run is."""
        if self.progress is None:
            return
        rate = self.made / self.seconds if self.made else 0.0
        self.progress(
            GenerateProgress(
                done=self.done,
                total=self.samples,
                attempted=self.totals["attempted"],
                rate=rate,
                eta_s=(self.samples - self.done) / rate if rate else float("inf"),
                message=self.message,
                seconds=self.seconds,
                waiting=self.waiting() if self.waiting is not None and self.made else None,
            )
        )

    def attend(self, message: str, work: Callable[[], _Result]) -> _Result:
        """Run something long in a thread, telling the caller at least every 0.25 s that the run is alive."""
        self.message = message
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(work)
            while True:
                self.tick()
                try:
                    return future.result(timeout=0.25)
                except TimeoutError:
                    if future.done():  # the work itself timed out
                        raise

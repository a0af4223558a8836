"""A dataset of N accepted samples on disk: scenes, signals, features and shards, all overlapped.

scene (scenes, gates) → prepare (messages, links) → compute (device) → assemble (rows) → write (shards, the caller)
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from brim import __version__
from brim.engine.device import PeakMemory, resolve_device
from brim.engine.meter import GpuSampler, ceiling_share
from brim.engine.storage import MANIFEST, Dataset, Place, ShardWriter, Verify, place_of, verify
from brim.errors import ConfigError, DatasetError
from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.features.estimators import FEATURES, STATISTICS
from brim.rf.generation.gates import REASONS, Totals, accepted_batches, first_accepted
from brim.rf.generation.rows import TRUTH
from brim.rf.generation.stages import Stages
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.link import noise_dbm, warn_outside_validity
from brim.rf.physics.scene import Scenes, max_delay_s
from brim.rf.physics.waveform import PARAMETERS

_Result = TypeVar("_Result")
_log = logging.getLogger("brim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is; handed to the caller at least once a second."""

    done: int  # accepted samples
    total: int
    attempted: int
    rate: float  # accepted samples per second so far
    eta_s: float
    message: str
    seconds: float = 0.0  # of generating so far
    waiting: Mapping[str, float] | None = None  # of which the compute stage waited, by cause; None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run made and what it took; times do not count the compilation of kernels."""

    dataset: str
    accepted: int
    attempted: int
    rejected: dict[str, int]
    seconds: float
    samples_per_s: float
    iq_per_s: float
    device: str
    batch_size: int
    ceiling_share: float | None  # rate of the whole run over that of the compute stage alone; None when not measured
    stages: dict[str, Any]
    peak_bytes: int
    workers: int | None = None  # devices that shared the work; None where it was one, not shared
    stopped: bool = False  # before all samples were made, by request

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        out = asdict(self)
        del out["stopped"]
        if self.workers is None:
            del out["workers"]
        return out


def generate(
    config: GenerateConfig,
    out: Path | str | Place,
    samples: int = 1000,
    *,
    device: str | torch.device = "auto",
    batch_size: int | None = None,
    memory: int | None = None,
    resume: bool = True,
    verify: Verify = "all",
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Report:
    """Make a dataset of `samples` accepted samples in `out`, a directory or a URL, continuing what is there.

    The same config and seed give the same bytes whatever the batch size, the memory, the number of threads or how
    often the run was stopped or killed. `progress` is called at least once a second, from the caller's thread;
    `stop` is asked at each batch boundary, and what was made until then stays a usable dataset. `verify` "sizes" does
    not read again what is there already, which takes long where that is much.
    """
    check_request(samples, batch_size, memory)
    run = _Run(config, place_of(out), samples, resolve_device(str(device)), verify, progress)
    return run.execute(resume, batch_size, memory, stop)


def check_request(samples: int, batch_size: int | None, memory: int | None) -> None:
    """Refuse counts and sizes that cannot be."""
    if samples < 1:
        raise ConfigError(f"samples={samples} must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1; omit it to fit the memory")
    if memory is not None and memory < 1:
        raise ConfigError(f"memory={memory} must be above 0 bytes; omit it to use what is free")


def open_writer(
    config: GenerateConfig, out: Place, device_name: str, *, resume: bool, verify: Verify = "all"
) -> ShardWriter:
    """The writer of a dataset: what its manifest says, and what must be equal to go on with one."""
    header = {
        "kind": "rf",
        "config": config.as_dict(),
        "seed": config.seed,
        "features": [{"name": name, "unit": unit} for name, unit in FEATURES],
        "truth": [{"name": name, "unit": unit} for name, unit in TRUTH],
        "statistics": list(STATISTICS),
        "waveform": {"name": config.waveform, **PARAMETERS[config.waveform]},
        "noise_dbm": noise_dbm(config),
        "iq": {"unit": "sqrt(mW)", "sample_rate_hz": SAMPLE_RATE_HZ},
        "brim": __version__,
        "torch": torch.__version__,
        "device": device_name,
    }
    return ShardWriter(
        out,
        header,
        items_per_shard=config.shard_items,
        identity=("kind", "config", "features", "truth"),
        resume=resume,
        derived=_counts,
        verify=verify,
    )


def find_finished(config: GenerateConfig, out: Place, samples: int) -> Dataset | None:
    """The dataset that already holds what is asked for, not verified; one that holds more is refused."""
    if not out.exists(MANIFEST):
        return None
    found = Dataset(out)
    if len(found) > samples:
        raise DatasetError(
            f"{out} already holds {len(found)} samples, more than the {samples} asked for; "
            "ask for more or choose another --out"
        )
    if found.manifest.get("kind") != "rf" or found.manifest.get("config") != config.as_dict():
        return None  # the writer says what differs
    return found if found.manifest["complete"] and len(found) == samples else None


def warn_other_device(config: GenerateConfig, out: Place, device_name: str) -> None:
    """Say so when a dataset that is to be continued was begun on another type of device."""
    if not out.exists(MANIFEST):
        return
    found = Dataset(out).manifest
    if found.get("config") == config.as_dict() and found.get("device") != device_name:
        begun = found.get("device")
        _log.warning("%s was begun on %s: shards made on %s differ in their last bits", out, begun, device_name)


def check_gates(config: GenerateConfig) -> Scenes:
    """The first accepted sample, before anything is written: the gates may refuse everything."""
    warn_outside_validity(config, max_delay_s(config) * SPEED_OF_LIGHT)
    return first_accepted(config)


def attend(work: Callable[[], _Result], tick: Callable[[], None]) -> _Result:
    """Run something long in a thread, ticking at least every 0.25 s meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while True:
            tick()
            try:
                return future.result(timeout=0.25)
            except TimeoutError:
                if future.done():  # the work's own
                    raise


class _Run:
    """One call of generate: what its stages share."""

    def __init__(
        self,
        config: GenerateConfig,
        out: Place,
        samples: int,
        device: torch.device,
        verify: Verify,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.verify = verify
        self.config, self.out, self.samples, self.device, self.progress = config, out, samples, device, progress
        self.stages = Stages(config, device)
        self.meter = self.stages.meter
        self.totals = {"attempted": 0, **dict.fromkeys(REASONS, 0)}
        self.done = self.made = self.records = 0  # samples in all, samples and records of this run
        self.began_s = time.perf_counter()
        self.stopped, self.message, self.rate = False, "starting", 0.0

    def execute(
        self, resume: bool, batch_size: int | None, memory: int | None, stop: Callable[[], bool] | None
    ) -> Report:
        """Open everything, run the stages, leave the manifest complete or usable."""
        first = check_gates(self.config)
        if resume and self._is_finished():
            return self._report(0, None)
        with ExitStack() as stack:
            stack.enter_context(self.stages)
            peak = stack.enter_context(PeakMemory(self.device))
            name = self.stages.device_name
            writer = stack.enter_context(open_writer(self.config, self.out, name, resume=resume, verify=self.verify))
            self.done = writer.items
            self.totals.update(writer.totals)
            preparing = "compiling kernels" if batch_size else "fitting the batch"
            self._attend(preparing, lambda: self.stages.prepare(first, batch_size, memory))
            with GpuSampler(self.device) as gpu:
                self._make(writer, stop)
            report = self._report(peak.bytes, gpu.summary())
            if not self.stopped:
                writer.finish(report=report.as_dict())
        return report

    def _is_finished(self) -> bool:
        """Whether the dataset already holds what is asked for, verified then."""
        found = find_finished(self.config, self.out, self.samples)
        if found is None:
            warn_other_device(self.config, self.out, self.stages.device_name)
            return False
        self._attend("verifying", lambda: verify(found, self.verify))
        self.done, self.totals = self.samples, dict(found.shards[-1].totals)
        return True

    def _make(self, writer: ShardWriter, stop: Callable[[], bool] | None) -> None:
        self.message, self.began_s = "generating", time.perf_counter()
        self.meter.start()
        with self.stages.run(self._scenes(), self._tick) as results:
            for made in results:
                rows, totals = made.rows, made.tag
                with self.meter.busy("write"):
                    writer.append(rows, {name: torch.from_numpy(values) for name, values in totals.items()})
                self._count(rows, totals)
                self._tick()
                if stop is not None and self.done < self.samples and stop():
                    self.stopped = True
                    break
            if not self.stopped:
                with self.meter.busy("write"):
                    writer.flush_partial()
        self.meter.stop()

    def _scenes(self) -> Iterator[tuple[Scenes, Totals]]:
        left = self.samples - self.done
        for batch in accepted_batches(self.config, left, self.totals, self.stages.next_batch):
            yield batch.scenes, batch.totals

    def _count(self, rows: dict[str, Tensor], totals: Totals) -> None:
        num = len(rows["index"])
        self.done, self.made = self.done + num, self.made + num
        self.records += int(rows["present"].sum())
        self.totals = {name: int(values[-1]) for name, values in totals.items()}
        self.rate = self.made / max(time.perf_counter() - self.began_s, 1e-9)
        self.meter.count(num)

    # Telling

    def _tick(self) -> None:
        if self.progress is None:
            return
        left = self.samples - self.done
        self.progress(
            Progress(
                done=self.done,
                total=self.samples,
                attempted=self.totals["attempted"],
                rate=self.rate,
                eta_s=left / self.rate if self.rate else float("inf"),
                message=self.message,
                seconds=self.meter.seconds,
                waiting=self._waiting() if self.made else None,
            )
        )

    def _waiting(self) -> dict[str, float]:
        """Seconds that the compute stage waited: for scenes to be prepared, and for its results to be written."""
        spent, workers = self.meter.stage("compute"), self.stages.compute_workers
        return {"preparing": spent["wait_input_s"] / workers, "writing": spent["wait_room_s"] / workers}

    def _attend(self, message: str, work: Callable[[], _Result]) -> _Result:
        self.message = message
        return attend(work, self._tick)

    def _report(self, peak_bytes: int, gpu: dict[str, Any] | None) -> Report:
        summary = self.meter.summary()
        seconds = summary["seconds"]
        rate, iq_rate = (count / max(seconds, 1e-9) for count in (self.made, self.records))
        return Report(
            dataset=str(self.out),
            accepted=self.done,
            attempted=self.totals["attempted"],
            rejected={reason: self.totals[reason] for reason in REASONS},
            seconds=seconds,
            samples_per_s=rate,
            iq_per_s=iq_rate,
            device=str(self.device),
            batch_size=self.stages.halving.size,
            ceiling_share=self._ceiling_share(iq_rate),
            stages=summary["stages"] | ({"gpu": gpu} if gpu is not None else {}),
            peak_bytes=peak_bytes,
            stopped=self.stopped,
        )

    def _ceiling_share(self, iq_rate: float) -> float | None:
        """Rate over that of the compute stage alone; not for someone who asked to stop."""
        if not self.made or self.stopped:
            return None
        ceiling = self._attend("measuring the ceiling", self.stages.ceiling)
        return None if ceiling is None else ceiling_share(iq_rate, ceiling)


def _counts(items: int, totals: dict[str, int]) -> dict[str, Any]:
    """What the manifest says of the attempts behind its samples."""
    rejected = {reason: totals.get(reason, 0) for reason in REASONS}
    return {"counts": {"accepted": items, "attempted": totals.get("attempted", 0), "rejected": rejected}}

"""A dataset of N accepted samples, made by one device of this process or by the workers of a pool.

    check the gates → open the dataset → make: OneDevice here, or PoolHead with a pool → report

Both make the same shards and keep the same counts. One device streams its batches into the writer, so that a stopped
run keeps its last, partial shard; workers of a pool make whole shards wherever they run.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import torch

from brim import __version__
from brim.engine.device import PeakMemory, format_size, resolve_device
from brim.engine.meter import Account, CeilingShare, GpuSampler, accounting, current_account, within
from brim.engine.meter.spent import WORK
from brim.engine.storage import MANIFEST, Dataset, Place, ShardWriter, Verify, place_of
from brim.engine.storage import verify as verify_dataset
from brim.errors import ConfigError, DatasetError
from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.accounting import DeviceAccount, GenerateProgress, GenerateReport, Tally
from brim.rf.generation.attempts import REASONS, accepted_batches, first_accepted
from brim.rf.generation.head import PoolHead
from brim.rf.generation.pool import Pool
from brim.rf.generation.rows import TRUTH
from brim.rf.generation.stages import Stages
from brim.rf.generation.worker import GenerateAssignment
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.link import noise_dbm, warn_outside_validity
from brim.rf.physics.scene import Scenes, max_delay_s
from brim.rf.physics.waveform import PARAMETERS

ROWS_VERSION = 2  # 1: arrivals of unaligned chunks, noise by sixth differences, the truly strongest record as reference
_log = logging.getLogger("brim")


def generate(
    config: GenerateConfig,
    out: Path | str | Place,
    samples: int = 1000,
    *,
    device: str | torch.device = "auto",
    pool: Pool | None = None,
    batch_size: int | None = None,
    memory: int | None = None,
    resume: bool = True,
    verify: Verify = "all",
    allow_mixed: bool = False,
    progress: Callable[[GenerateProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> GenerateReport:
    """Make a dataset of `samples` accepted samples in `out`, a directory or a URL, continuing an existing one.

    The same config and seed give the same bytes whatever the batch size, the memory, the number of threads or workers,
    and however often the run was stopped or killed. With a pool, its workers make the dataset instead of `device`,
    batch_size and memory are each worker's, and the pool is closed at the end; allow_mixed accepts workers of several
    device types, whose bytes may differ in their last bits. `progress` is called at least once a second, from the
    caller's thread; `stop` is called several times a second, and the samples made until then stay a usable dataset.
    `verify` "sizes" does not read existing shards again.
    """
    for name, value in {"samples": samples, "batch_size": batch_size, "memory": memory}.items():
        if value is not None and value < 1:
            raise ConfigError("must be at least 1", field=name, value=value, code="out_of_range")
    least = sample_bytes(config)
    if memory is not None and memory < least:
        raise ConfigError(
            f"is less than one sample needs, {format_size(least)}", field="memory", value=memory, code="out_of_range",
            hint=f"give at least {format_size(least)}, or leave it out",
        )  # fmt: skip
    place, tally, stop = place_of(out), Tally(samples, progress), stop or (lambda: False)
    maker: OneDevice | PoolHead
    if pool is None:
        maker = OneDevice(config, resolve_device(str(device)), batch_size, memory, tally, stop)
    else:
        assignment = GenerateAssignment(config=config, batch_size=batch_size, memory=memory)
        maker = PoolHead(assignment, place, pool, tally, stop)
    with accounting() as account, maker:
        warn_outside_validity(config, max_delay_s(config) * SPEED_OF_LIGHT)
        first = first_accepted(config)  # before anything is written: the gates may reject everything
        begun = _begun(place, samples, resume)
        same = begun is not None and begun.manifest.get("config") == config.as_dict()  # else the writer says so
        if begun is not None and same and begun.manifest["complete"] and len(begun) == samples:
            with within("verifying"):
                tally.attend("verifying", lambda: verify_dataset(begun, verify))
            tally.done = tally.listed = samples
            tally.totals = dict(begun.shards[-1].totals)
            return _report(place, maker, tally, account)
        maker.start(first, allow_mixed=allow_mixed)
        if begun is not None and same and (other := begun.manifest.get("device")) != (here := maker.device_name):
            _log.warning("%s was begun on %s: shards made on %s differ in their last bits", place, other, here)
        with open_writer(config, place, maker.device_name, resume=resume, verify=verify) as writer:
            tally.done = tally.listed = writer.items
            tally.totals.update(writer.totals)
            maker.make(writer)
            report = _report(place, maker, tally, account)
            if not report.stopped:
                writer.finish(report=report.as_dict())
    return report


def sample_bytes(config: GenerateConfig) -> int:
    """Bytes of the IQ of one sample heard by every receiver, signal and noise: no run needs less."""
    return 2 * config.max_receivers * config.num_samples_iq * 8


def _begun(out: Place, samples: int, resume: bool) -> Dataset | None:
    """The dataset that is there already, of fewer samples or as many, not verified."""
    if not out.exists(MANIFEST):
        return None
    if not resume:
        raise DatasetError(
            f"{out} is not empty",
            field="out",
            code="occupied",
            hint="add {resume} to continue it or choose another {out}",
        )
    dataset = Dataset(out)
    if len(dataset) > samples:
        raise DatasetError(
            f"{out} already holds {len(dataset)} samples, more than the {samples} requested",
            field="samples",
            code="occupied",
            hint="raise {samples} or choose another {out}",
        )
    return dataset


def open_writer(
    config: GenerateConfig,
    out: Place,
    device_name: str,
    *,
    resume: bool,
    verify: Verify = "all",
    source: str | None = None,
) -> ShardWriter:
    """The writer of a dataset with its manifest; config, features and truth must be equal to continue one.

    source says where rows come from that were not generated.
    """
    header = {
        "kind": "rf",
        **({} if source is None else {"source": source}),
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
        version=ROWS_VERSION,
    )


def _counts(items: int, totals: dict[str, int]) -> dict[str, Any]:
    """The manifest's counts of the attempts behind its samples."""
    rejected = {reason: totals.get(reason, 0) for reason in REASONS}
    return {"counts": {"accepted": items, "attempted": totals.get("attempted", 0), "rejected": rejected}}


def _report(out: Place, maker: "OneDevice | PoolHead", tally: Tally, whole: Account) -> GenerateReport:
    account, seconds = maker.account(), tally.seconds
    rate, iq_rate = (count / max(seconds, 1e-9) for count in (tally.made, tally.records))
    ceiling = CeilingShare() if tally.stopped else maker.ceiling(tally.records, seconds)
    return GenerateReport(
        dataset=str(out),
        accepted=tally.listed,
        attempted=tally.totals["attempted"],
        rejected={reason: tally.totals[reason] for reason in REASONS},
        seconds=seconds,
        samples_per_s=rate,
        iq_per_s=iq_rate,
        device=maker.device,
        batch_size=account.batch_size,
        ceiling_share=ceiling.share,
        ceiling_spread=ceiling.spread,
        ceiling_words=ceiling.words(),
        stages=account.stages,
        peak_bytes=account.peak_bytes,
        workers=maker.num_workers,
        stopped=tally.stopped,
        spent=whole.spent(),
    )


class _Stop(Exception):
    """The run is to end here."""


class OneDevice:
    """Makes a dataset on one device of this process, in overlapped stages."""

    num_workers = None  # there is no pool

    def __init__(
        self,
        config: GenerateConfig,
        device: torch.device,
        batch_size: int | None,
        memory: int | None,
        tally: Tally,
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.batch_size, self.memory, self.tally, self.stop = config, batch_size, memory, tally, stop
        self.stages = Stages(config, device)
        self.device, self.device_name = str(device), self.stages.device_name
        self.first: Scenes  # sample, to fit the batch with
        self._account = self.stages.account(0, None)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start(self, first: Scenes, *, allow_mixed: bool) -> None:
        self.first = first
        self._open.enter_context(self.stages)

    def make(self, writer: ShardWriter) -> None:
        """Fit the batch, then run the stages until the samples are made or the run is stopped."""
        tally, stages = self.tally, self.stages
        message = "compiling kernels" if self.batch_size else "fitting the batch"
        with PeakMemory(stages.device) as peak:
            with within("compiling" if stages.on_gpu else "fitting"):
                tally.attend(message, lambda: stages.prepare(self.first, self.batch_size, self.memory))
            with GpuSampler(stages.device) as gpu, within(WORK):
                self._run(writer)
            if (account := current_account()) is not None:
                account.move(stages.probe.cost_s, "ceiling")
            self._account = stages.account(peak.bytes, gpu.summary())

    def account(self) -> DeviceAccount:
        return self._account

    def ceiling(self, records: int, seconds: float) -> CeilingShare:
        probe = self.stages.probe
        return probe.share(records / max(seconds - probe.cost_s, 1e-9))

    def _run(self, writer: ShardWriter) -> None:
        tally, meter = self.tally, self.stages.meter
        tally.waiting = self._waiting
        tally.begin()
        meter.start()
        left = tally.samples - tally.done
        batches = accepted_batches(self.config, left, tally.totals, self.stages.next_batch, self.stages.scene_threads)
        scenes = ((batch.scenes, batch.totals) for batch in batches)
        with suppress(_Stop), self.stages.run(scenes, self._tick) as results:
            for rows, totals in results:
                with meter.busy("write"):
                    writer.append(rows, {name: torch.from_numpy(values) for name, values in totals.items()})
                num = len(rows["index"])
                tally.done, tally.made = tally.done + num, tally.made + num
                tally.listed, tally.totals = tally.done, {name: int(values[-1]) for name, values in totals.items()}
                tally.records += int(rows["present"].sum())
                meter.count(num)
                self._tick()
            with meter.busy("write"):
                writer.flush_partial()
        meter.stop()
        tally.end()

    def _tick(self) -> None:
        """Tell the caller where the run is; raise _Stop if it is to end and has made something."""
        self.tally.tick()
        if self.tally.made > 0 and self.tally.done < self.tally.samples and self.stop():
            self.tally.stopped = True
            self.stages.abandon()  # before the threads are joined, which wait for what they compute
            raise _Stop

    def _waiting(self) -> dict[str, float]:
        """Seconds that the compute stage waited: for scenes to be prepared, and for its results to be written."""
        spent, workers = self.stages.meter.stage("compute"), self.stages.compute_workers
        return {"preparing": spent["wait_input_s"] / workers, "writing": spent["wait_room_s"] / workers}

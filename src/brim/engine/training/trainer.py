"""The one training loop: batches from a source, steps, logs, evaluation, checkpoints, exact resume.

It knows no radio and no images: a module, a loss over a dict batch, a source of batches on the device. A phase keeps
everything it writes in its own folder of the run:

    RUN/PHASE/last/         weights, optimiser and state to resume from
    RUN/PHASE/best/         weights with the lowest val_loss
    RUN/PHASE/metrics.jsonl, RUN/PHASE/tensorboard/

Between log points nothing waits for the device: losses stay there in a window that is read as a whole.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from brim.engine.config import TrainConfig, learning_rate_at
from brim.engine.device import PeakMemory, resolve_device
from brim.engine.meter import GpuSampler, StepTimes, mean_times, time_step
from brim.engine.training.checkpoint import PhaseState, locked
from brim.engine.training.rank_share import computing
from brim.engine.training.ranks import Pace, Ranks
from brim.engine.training.report import NoLog, RunLog, TrainProgress, TrainReport, make_report
from brim.engine.training.source import Batch, BatchSource
from brim.engine.training.step import LossFn, Snapshot, Stepper, Transform, batch_items, shape_of
from brim.errors import ConfigError, DatasetError, TrainingDiverged

BAD_ITEMS = ("field", "the transform")  # how causes begin that lie in the items of a batch


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite; waits for the device once."""
    flags = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return bool(torch.stack(flags).all()) if flags else True


def likely_cause(stepper: Stepper, batch: Batch, step: int, learning_rate: float) -> str:
    """Why the loss of a batch is not finite; examined afterwards, so that normal steps need no checks."""
    if name := _first_bad_field(batch):
        return f'field "{name}" of that batch holds NaN or Inf; clean the data'
    stepper.seed(step)
    if name := _first_bad_field(stepper.transformed({key: value.clone() for key, value in batch.items()})):
        return f'the transform makes NaN or Inf of field "{name}"; correct it'
    if stepper.precision == "fp16":
        return "fp16 has likely overflowed; use precision bf16 or fp32, or a lower learning rate"
    return (
        f"its inputs are finite, so the learning rate ({learning_rate:.3g}, clip_norm {stepper.config.clip_norm}) "
        "is likely too high; lower it"
    )


def _first_bad_field(batch: Batch) -> str:
    return next((name for name, tensor in batch.items() if not all_finite([tensor])), "")


log = logging.getLogger("brim")

Evaluate = Callable[[nn.Module], Mapping[str, float]]
CEILING_S = 0.3  # time for measuring the step on fixed batches, in total
RARE = 0.05  # share of the steps: rarer shapes are not measured
PROGRESS_S = 0.5  # half of the promised interval: a step may take as long again


def train(
    module: nn.Module,
    loss_fn: LossFn,
    source: BatchSource,
    *,
    config: TrainConfig,
    out: Path | str,
    evaluate: Evaluate | None = None,
    transform: Transform | None = None,
    phase: str = "train",
    device: str | torch.device = "auto",
    progress: Callable[[TrainProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    resume: bool = True,
    ranks: Ranks | None = None,
) -> TrainReport:
    """Train the module in place, resuming from the phase's last checkpoint; it ends with the last weights.

    loss_fn(module, batch) is the mean over the batch's items. evaluate(module) runs after every epoch, in fp32 and
    without gradients, and returns at least "val_loss". transform(batch, generator) changes a batch on the device.
    Every random number of a step comes from torch's default streams, set by (seed, phase, step), so a run that was
    stopped or killed ends with the same bits on a CPU. `progress` is called at least once a second, `stop`
    after each batch; a run stopped by it can be resumed.

    With several ranks all of them call this with equal arguments and train as one; only rank 0 writes and reports,
    and evaluate must return the same on all of them.
    """
    where = resolve_device(str(device))
    ranks = ranks or Ranks(device=where)
    _check_source(source, ranks)
    if config.early_stopping_patience is not None and evaluate is None:
        raise ConfigError(
            f"early_stopping_patience={config.early_stopping_patience} needs evaluate; give it, or no patience"
        )
    folder = Path(out) / phase
    with ExitStack() as stack:
        if ranks.main:
            stack.enter_context(locked(folder))
        if where.type == "cuda":
            stack.enter_context(torch.cuda.device(where))
        stack.enter_context(torch.random.fork_rng([where.index] if where.type == "cuda" else []))
        peak, power = stack.enter_context(PeakMemory(where)), GpuSampler(where)
        stepper = Stepper(module, loss_fn, config=config, device=where, transform=transform, phase=phase, ranks=ranks)
        state = PhaseState(stepper, source, folder)
        state.open(resume)
        opened = RunLog(folder, tensorboard=config.tensorboard, log_bytes=state.log_bytes, step=state.step)
        with power, opened if ranks.main else NoLog() as logs:
            run = _Run(stepper, source, state, logs, evaluate, progress if ranks.main else None)
            run.execute(stop)
        static = run.time_fixed_batches()
        used = ranks.all_of((peak.bytes, power.summary()))
        return make_report(
            Path(out), run.stopped, stepper, source.num_items, source.tier, state, static,
            max(peak_bytes for peak_bytes, _ in used), _energy_j([summary for _, summary in used]),
        )  # fmt: skip


def _check_source(source: BatchSource, ranks: Ranks) -> None:
    if source.num_items < 1 or source.num_batches < 1:
        raise DatasetError(f"the source has {source.num_items} items; training needs at least one")
    if not ranks.alone and not source.divides_batches:
        raise ConfigError(
            f"{type(source).__name__} does not divide its batches among {ranks.size} ranks; train with one process"
        )


def _energy_j(summaries: Sequence[Mapping[str, Any] | None]) -> float | None:
    """Sum over all ranks; None if unknown for one of them."""
    known = [summary["energy_j"] for summary in summaries if summary is not None]
    return None if len(known) < len(summaries) or None in known else sum(known)


class _Run:
    """One phase of training, from its last checkpoint to its end."""

    def __init__(
        self,
        stepper: Stepper,
        source: BatchSource,
        state: PhaseState,
        logs: "RunLog | NoLog",
        evaluate: Evaluate | None,
        progress: Callable[[TrainProgress], None] | None,
    ) -> None:
        self.stepper, self.source, self.state, self.logs = stepper, source, state, logs
        self.config, self.device, self.module = stepper.config, stepper.device, stepper.module
        self.evaluate, self.progress = evaluate, progress
        self.kinds: dict[Hashable, tuple[Batch, int]] = {}  # by shape: the latest batch and how many there were
        self.last_loss: float | None = None
        self.logged = (state.clock.seconds, state.clock.samples)  # at the last log point
        self.told_at = time.perf_counter()
        self.stopped = False
        self.ranks, self.pace = stepper.ranks, Pace(stepper.ranks, state.step)

    def execute(self, stop: Callable[[], bool] | None) -> None:
        self._tell()
        while self.state.epoch < self.config.epochs and not self._gave_up() and not self.stopped:
            self._train_epoch(stop)
            if not self.stopped:
                self._end_epoch()
        self.state.clock.pause()
        if not self.state.is_saved:
            self.save()
        self._tell()

    def _train_epoch(self, stop: Callable[[], bool] | None) -> None:
        self.module.train()
        with closing(self._batches()) as batches:
            while self.state.batch < self.source.num_batches and not self.stopped:
                self.state.clock.go()
                with self.state.clock.feeding():
                    batch = next(batches)
                self._step(batch)
                self._after_step()
                self.stopped = self.pace.any(self.state.step, stop is not None and stop())
                self.pace.go_on(self.state.step)

    def _batches(self) -> Generator[Batch]:
        with closing(self.source.epoch_into(self.state.epoch, self.state.batch, self.stepper)) as batches:
            for index in range(self.state.batch, self.source.num_batches):
                yield self._next(batches, index)

    def _next(self, iterator: Iterator[Batch], index: int) -> Batch:
        batch = next(iterator, None)
        if batch is None:
            raise DatasetError(
                f"the source ended epoch {self.state.epoch} after {index} of {self.source.num_batches} batches; "
                "its num_batches must hold for every epoch"
            )
        for name, tensor in batch.items():
            if tensor.device != self.device:
                raise ConfigError(f'batch field "{name}" is on {tensor.device}, training runs on {self.device}')
        return batch

    def _step(self, batch: Batch) -> None:
        share = None if self.ranks.alone else self.source.share(self.state.epoch, self.state.batch)
        num_items = batch_items(batch) if share is None else share.count
        if share is None:  # shares have many shapes and are not timed
            shape = shape_of(batch)
            self.kinds[shape] = batch, self.kinds.get(shape, (batch, 0))[1] + 1
        if self.stepper.needs_preparation(batch):
            self.state.clock.pause()
            self.stepper.prepare(batch, share)
            self.state.clock.go()
        with self.state.clock.stepping(num_items):
            rate = learning_rate_at(self.config, self.state.step, self.state.num_steps)
            loss = self.stepper.step(batch, self.state.step, rate, share)
            self.state.losses.add(loss, num_items)
        self.state.step += 1
        self.state.batch += 1

    def _after_step(self) -> None:
        if self.device.type == "cpu":
            self._check_losses(newest_only=True)  # free where the losses are on the host
        if self.state.step % self.config.log_every == 0:
            self._log_window()
        now_s = time.perf_counter()
        if self._at_once(now_s - self.told_at >= PROGRESS_S):
            self._check_losses()
            self._tell()
        every_s, every = self.config.checkpoint_every_s, self.config.checkpoint_every_steps
        is_time = self._at_once(every_s is not None and now_s - self.state.saved_at >= every_s)
        if is_time or (every and self.state.step % every == 0):
            self.save()

    def _at_once(self, is_time: bool) -> bool:
        """Whether it is time by the clock of rank 0, so that all ranks act at the same step."""
        return self.pace.any(self.state.step, is_time and self.ranks.main)

    def _log_window(self) -> None:
        self._check_losses()
        with self.state.clock.losing("logging"):
            seconds, samples = self.state.clock.seconds, self.state.clock.samples
            rate = (samples - self.logged[1]) / max(seconds - self.logged[0], 1e-9)
            self.logged = (seconds, samples)
            self.last_loss = self.state.losses.mean()
            self.state.losses.clear()
            lr = learning_rate_at(self.config, self.state.step - 1, self.state.num_steps)
            values = {"loss": self.last_loss, "lr": lr, "samples_per_s": rate}
            self.logs.write(step=self.state.step, epoch=self.state.epoch, values=values)

    def _end_epoch(self) -> None:
        if self.evaluate is not None:
            self._check_losses()
            self.state.clock.pause()
            self._evaluate(self.evaluate)
        self.state.epoch, self.state.batch = self.state.epoch + 1, 0

    def _evaluate(self, evaluate: Evaluate) -> None:
        self.stepper.seed(-1 - self.state.epoch)
        self.module.eval()
        with torch.no_grad():
            scores = {name: float(value) for name, value in evaluate(self.module).items()}
        if "val_loss" not in scores:
            raise ConfigError(f"evaluate returned {sorted(scores)}, expected val_loss among them")
        self.logs.write(step=self.state.step, epoch=self.state.epoch, values=scores)
        val_loss = scores["val_loss"]
        self.state.stale += 1
        if math.isfinite(val_loss):
            self.state.note(val_loss)
        else:
            log.warning("val_loss is %s after epoch %d; it cannot become the best", val_loss, self.state.epoch)

    def _gave_up(self) -> bool:
        patience = self.config.early_stopping_patience
        return patience is not None and self.state.stale >= patience

    def _tell(self) -> None:
        self.told_at = time.perf_counter()
        if self.progress is None:
            return
        seconds = self.state.clock.seconds
        rate = self.state.clock.samples / seconds if seconds > 0 else 0.0
        left = (self.state.num_steps - self.state.step) * self.source.num_items / self.source.num_batches
        self.progress(
            TrainProgress(
                phase=self.stepper.phase,
                epoch=self.state.epoch,
                epochs=self.config.epochs,
                step=self.state.step,
                steps=self.state.num_steps,
                loss=self.last_loss,
                samples_per_s=rate,
                eta_s=left / rate if rate > 0 else math.inf,
                seconds=seconds,
                waiting=self.state.clock.waiting_now,
            )
        )

    def _check_losses(self, *, newest_only: bool = False) -> None:
        bad = self.state.losses.first_bad(newest_only=newest_only)
        if bad is not None:
            offset, value = bad
            self._diverge(f"loss is {value}", self.state.step - len(self.state.losses.sizes) + offset)

    def _diverge(self, fault: str, step: int) -> NoReturn:
        epoch, index = divmod(step, self.source.num_batches)
        batch = next(iter(self.source.epoch(epoch, index)), {})
        rate = learning_rate_at(self.config, step, self.state.num_steps)
        with computing(None if self.ranks.alone else self.source.share(epoch, index)):
            causes = self.ranks.all_of(likely_cause(self.stepper, batch, step, rate))
        cause = max(causes, key=lambda said: said.startswith(BAD_ITEMS))  # only one rank has the bad items
        saved = self.state.saved_step
        kept = "no checkpoint was written yet" if saved is None else f"the checkpoint of step {saved} stays"
        raise TrainingDiverged(f"{fault} at step {step} (epoch {epoch}, batch {index}): {cause}; {kept}")

    def save(self) -> None:
        """Write a checkpoint, unless weights or losses are not finite."""
        self._check_losses()
        if not all_finite(self.module.state_dict().values()):
            self._diverge("a weight is NaN or Inf", max(0, self.state.step - 1))
        with self.state.clock.losing("checkpoint"):
            self.state.save(self.logs.size_bytes)

    def time_fixed_batches(self) -> StepTimes | None:
        """Time the step on fixed batches over and over, then undo what the steps did.

        One batch of every shape that is not rare; the result is the mean, weighted by how often each shape came.
        """
        if self.stopped or not self.kinds or not self.config.measure_ceiling or not self.ranks.alone:
            return None
        kept, micro = Snapshot(self.stepper), self.stepper.micro
        least = RARE * sum(count for _, count in self.kinds.values())
        common = [(batch, count) for batch, count in self.kinds.values() if count >= least]
        self.module.train()
        try:
            timed = [(self._time(batch, CEILING_S / len(common)), count) for batch, count in common]
        finally:
            kept.restore()
            self.stepper.micro = micro
        return mean_times(timed)

    def _time(self, batch: Batch, budget_s: float) -> StepTimes:
        inputs = self.stepper.inputs_like(batch)
        fixed = inputs or {name: tensor.clone() for name, tensor in batch.items()}
        loss = torch.zeros(1, device=self.device)

        def step() -> None:
            loss[0].copy_(self.stepper.step(fixed, 0, self.config.learning_rate))  # kept, as in the loop

        times = time_step(step, self.device, captured=inputs is not None, budget_s=max(0.05, budget_s))
        return replace(times, items=batch_items(batch))

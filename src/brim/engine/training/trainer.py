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
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from brim.engine.config import TrainConfig, learning_rate_at
from brim.engine.device import PeakMemory, resolve_device
from brim.engine.meter import (
    CeilingProbe,
    GpuSampler,
    StepTimes,
    Times,
    accounting,
    diagnose,
    mean_times,
    time_step,
    within,
)
from brim.engine.meter.ceiling import BUDGET
from brim.engine.meter.spent import WORK
from brim.engine.training.checkpoint import PhaseState, locked
from brim.engine.training.optimization import MakeOptimizer, MakeScheduler
from brim.engine.training.rank_share import computing
from brim.engine.training.ranks import Pace, Ranks
from brim.engine.training.report import RunLog, TrainProgress, TrainReport
from brim.engine.training.source import Batch, BatchSource, Fetcher
from brim.engine.training.step import LossFn, Snapshot, Stepper, Transform, batch_items, shape_of
from brim.errors import ConfigError, DatasetError, TrainingDiverged
from brim.loggers import LogsValues, TensorBoard, current

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
CEILING_S = 0.3  # for timing the step on fixed batches after a run; between its steps a fifth of it at most
LEAST_STEPS = 2  # on a fixed batch, whatever their time
RARE = 0.05  # share of the steps: rarer shapes are not measured
FETCH_STEPS = 100  # fewest steps for which two more captures are made
SCORES_S = 1.0  # between two lines of scores in the log
SAID = 4  # scores of an epoch that are logged; all of them are in the metrics
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
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    scheduler: MakeScheduler | Any = None,
    loggers: Sequence[LogsValues] = (),
) -> TrainReport:
    """Train the module in place, resuming from the phase's last checkpoint; it ends with the last weights.

    loss_fn(module, batch) is the mean over the batch's items. evaluate(module) runs after every epoch, in fp32 and
    without gradients, and returns scores; the weights of the lowest "val_loss", if that is one of them, are kept as the
    best. transform(batch, generator) changes a batch on the device. Every random number of a step comes from torch's
    default streams, set by (seed, phase, step), so a run that was stopped or killed ends with the same bits on a CPU.
    `progress` is called at least once a second, `stop` after each batch; a run stopped by it can be resumed.

    optimizer(parameters) and scheduler(optimizer) replace AdamW with its warm-up and cosine; a scheduler advances after
    every epoch, or after every step if that is how it counts (OneCycleLR, CyclicLR). loggers get what is logged.

    With several ranks all of them call this with equal arguments and train as one; only rank 0 writes and reports,
    and evaluate must return the same on all of them.
    """
    where = resolve_device(str(device))
    ranks = ranks or Ranks(device=where)
    if source.num_items < 1 or source.num_batches < 1:
        raise DatasetError(f"the source has {source.num_items} items", hint="training needs at least one")
    if not ranks.alone and not source.divides_batches:
        raise ConfigError(
            f"{type(source).__name__} does not divide its batches among {ranks.size} ranks",
            hint="train with one process",
        )
    if config.early_stopping_patience is not None and evaluate is None:
        raise ConfigError(
            f"early_stopping_patience={config.early_stopping_patience} needs evaluate", hint="give it, or no patience"
        )
    folder = Path(out) / phase
    with ExitStack() as stack:
        account = stack.enter_context(accounting())
        if ranks.main:
            stack.enter_context(locked(folder))
        if where.type == "cuda":
            stack.enter_context(torch.cuda.device(where))
        stack.enter_context(torch.random.fork_rng([where.index] if where.type == "cuda" else []))
        peak, power = stack.enter_context(PeakMemory(where)), GpuSampler(where)
        stepper = Stepper(
            module, lambda model, batch: loss_fn(model, source.as_given(batch)), config=config, device=where,
            transform=transform, phase=phase, ranks=ranks, optimizer=optimizer, scheduler=scheduler,
        )  # fmt: skip
        if stepper.optimization.needs_val_loss and evaluate is None:
            raise ConfigError("ReduceLROnPlateau needs val_loss", hint="give evaluate")
        state = PhaseState(stepper, source, folder)
        state.open(resume)
        directory = folder if ranks.main else None
        told = list(loggers)
        if config.tensorboard and directory is not None:
            told.append(TensorBoard())
        opened = RunLog(directory, told, others=current(), log_bytes=state.log_bytes, step=state.step)
        with power, opened as logs:
            run = _Run(stepper, source, state, logs, evaluate, progress if ranks.main else None)
            run.execute(stop)
            best = folder / "best" / "model.safetensors"
            logs.keep(best if best.exists() else folder / "last" / "model.safetensors")
        static = run.step_times()
        used = ranks.all_of((peak.bytes, (power.summary() or {}).get("energy_j")))
        energies_j = [energy_j for _, energy_j in used if energy_j is not None]
        energy_j = sum(energies_j) if len(energies_j) == len(used) else None
        report = run.report(Path(out), static, max(peak_bytes for peak_bytes, _ in used), energy_j)
        return replace(report, spent=account.spent())


@dataclass
class _OpenEpoch:
    batches: Generator[Batch]
    fetcher: Fetcher | None  # whose batches they are; None: the source's own
    epoch: int
    first: Batch | None = None  # requested ahead


class _Run:
    """One phase of training, from its last checkpoint to its end."""

    def __init__(
        self,
        stepper: Stepper,
        source: BatchSource,
        state: PhaseState,
        logs: RunLog,
        evaluate: Evaluate | None,
        progress: Callable[[TrainProgress], None] | None,
    ) -> None:
        self.stepper, self.source, self.state, self.logs = stepper, source, state, logs
        self.config, self.device, self.module = stepper.config, stepper.device, stepper.module
        self.evaluate, self.progress = evaluate, progress
        self.kinds: dict[Hashable, tuple[Batch, int]] = {}  # by shape: the latest batch and how many there were
        self.last_loss: float | None = None
        self.logged = (state.clock.seconds, state.clock.samples)  # at the last log point
        self.began = (*self.logged, state.clock.steps)  # of earlier runs
        self.probe, self.timed = CeilingProbe(), list[StepTimes]()
        self.told_at = time.perf_counter()
        self.scored_at = self.told_at
        self.stopped = False
        self.ranks, self.pace = stepper.ranks, Pace(stepper.ranks, state.step)
        self.opened: _OpenEpoch | None = None
        self.asked_fetcher = False

    def execute(self, stop: Callable[[], bool] | None) -> None:
        self._tell()
        try:
            self._train(stop)
        finally:
            self._close()
        self.state.clock.pause()
        if not self.state.is_saved:
            self.save()
        self._tell()

    def _train(self, stop: Callable[[], bool] | None) -> None:
        patience = self.config.early_stopping_patience or math.inf
        while self.state.epoch < self.config.epochs and self.state.stale < patience:
            with within(WORK):
                self._train_epoch(stop)
            if self.stopped:
                break
            with within("validation"):
                val_loss = None if self.evaluate is None else self._evaluate(self.evaluate)
            if self.stepper.optimization.end_epoch(val_loss):
                self.stepper.release_graphs()
            self.state.epoch, self.state.batch = self.state.epoch + 1, 0

    def _train_epoch(self, stop: Callable[[], bool] | None) -> None:
        self.module.train()
        try:
            while self.state.batch < self.source.num_batches and not self.stopped:
                self.state.clock.go()
                with self.state.clock.feeding():
                    batch = self._next()
                self._step(batch)
                self._after_step()
                self.stopped = self.pace.any(self.state.step, stop is not None and stop())
                self.pace.go_on(self.state.step)
        finally:
            self._close()
        if self.source.opens_ahead and not self.stopped and self.state.epoch + 1 < self.config.epochs:
            self._open(self.state.epoch + 1, 0)  # the device still has steps to do, and then the model to evaluate

    def _open(self, epoch: int, batch: int) -> "_OpenEpoch":
        """The batches of an epoch; the first one is requested at once, so that it is ready when it is needed."""
        self._close()
        fetcher = self.stepper.fetcher
        if fetcher is not None:
            batches = fetcher.epoch(epoch, batch)
        else:
            batches = self.source.epoch_into(epoch, batch, self.stepper.inputs_with)
        self.opened = _OpenEpoch(batches, fetcher, epoch)
        self.opened.first = next(batches, None)
        return self.opened

    def _close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.batches.close()

    def _next(self) -> Batch:
        opened = self.opened
        if opened is None or opened.fetcher is not self.stepper.fetcher or opened.epoch != self.state.epoch:
            opened = self._open(self.state.epoch, self.state.batch)
        batch, opened.first = opened.first or next(opened.batches, None), None
        if batch is None:
            done = f"{self.state.batch} of {self.source.num_batches} batches"
            raise DatasetError(
                f"the source ended epoch {self.state.epoch} after {done}",
                hint="its num_batches must hold for every epoch",
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
            with within("compiling"):
                self.stepper.prepare(batch, share)
                self._prepare_fetching(batch)
            self.state.clock.go()
        with self.state.clock.stepping(num_items):
            rate = learning_rate_at(self.config, self.state.step, self.state.num_steps)
            loss = self.stepper.step(batch, self.state.step, rate, share)
            self.state.losses.add(loss, num_items)
        if self.stepper.optimization.end_step():
            self.stepper.release_graphs()
        self.state.step += 1
        self.state.batch += 1

    def _prepare_fetching(self, batch: Batch) -> None:
        """Let captured steps fetch their own batches, if the source can and enough steps follow to pay for it."""
        if self.asked_fetcher or self.stepper.kind != "graph":
            return
        self.asked_fetcher = True
        fetcher = self.source.fetcher() if self.state.num_steps - self.state.step >= FETCH_STEPS else None
        if fetcher is not None:
            self.stepper.prepare_fetching(fetcher, batch)

    def _after_step(self) -> None:
        if self.device.type == "cpu":
            self._check_losses(newest_only=True)  # free where the losses are on the host
        if self.state.step % self.state.log_every == 0:
            self._log_window()
        now_s = time.perf_counter()
        if self._at_once(now_s - self.told_at >= PROGRESS_S):
            self._check_losses()
            self._tell()
        every_s, every = self.config.checkpoint_every_s, self.config.checkpoint_every_steps
        is_time = self._at_once(every_s is not None and now_s - self.state.saved_at >= every_s)
        if is_time or (every and self.state.step % every == 0):
            self.save()
        self._measure_ceiling()

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
            lr = self.stepper.optimization.rate(self.state.step - 1, self.state.num_steps)
            values = {"loss": self.last_loss, "lr": lr, "samples_per_s": rate}
            self.logs.write(step=self.state.step, epoch=self.state.epoch, values=values)

    def _evaluate(self, evaluate: Evaluate) -> float | None:
        """The scores, logged; val_loss, if it is among them, decides which weights are the best."""
        self._check_losses()
        self.state.clock.pause()
        self.stepper.seed(-1 - self.state.epoch)
        self.module.eval()
        with torch.no_grad():
            scores = {name: float(value) for name, value in evaluate(self.module).items()}
        val_loss = scores.get("val_loss")
        if val_loss is None and (self.config.early_stopping_patience or self.stepper.optimization.needs_val_loss):
            hint = "return it, or leave out early_stopping_patience and ReduceLROnPlateau"
            raise ConfigError(f"evaluate returned {sorted(scores)}, without val_loss", hint=hint)
        self.logs.write(step=self.state.step, epoch=self.state.epoch, values=scores)
        self._say_scores(scores)
        self.state.stale += 1
        if val_loss is None:
            return None
        if math.isfinite(val_loss):
            self.state.note(val_loss)
        else:
            log.warning("val_loss is %s after epoch %d; it cannot become the best", val_loss, self.state.epoch)
        return val_loss

    def _say_scores(self, scores: Mapping[str, float]) -> None:
        """Log them for people to read: all epochs of a slow training, about one a second of a fast one."""
        now_s, epoch = time.perf_counter(), self.state.epoch + 1
        if epoch in (1, self.config.epochs) or now_s - self.scored_at >= SCORES_S:
            self.scored_at = now_s
            shown = ", ".join(f"{name} {value:.4g}" for name, value in list(scores.items())[:SAID])
            if len(scores) > SAID:
                shown += f"; {len(scores) - SAID} more in metrics.jsonl"
            log.info("epoch %d of %d: %s", epoch, self.config.epochs, shown)

    def _tell(self) -> None:
        self.told_at = time.perf_counter()
        if self.progress is None:
            return
        seconds = self.state.clock.seconds
        rate = self.state.clock.samples / seconds if seconds > 0 else 0.0
        left = (self.state.num_steps - self.state.step) * self.source.num_items / self.source.num_batches
        self.progress(
            TrainProgress(
                phase=self.stepper.phase, epoch=self.state.epoch, epochs=self.config.epochs, step=self.state.step,
                steps=self.state.num_steps, loss=self.last_loss, samples_per_s=rate,
                eta_s=left / rate if rate > 0 else math.inf, seconds=seconds, waiting=self.state.clock.waiting_now,
            )
        )  # fmt: skip

    def _check_losses(self, *, newest_only: bool = False) -> None:
        bad = self.state.losses.first_bad(newest_only=newest_only)
        if bad is not None:
            offset, value = bad
            self._diverge(f"loss is {value}", self.state.step - len(self.state.losses.sizes) + offset)

    def _diverge(self, fault: str, step: int) -> NoReturn:
        epoch, index = divmod(step, self.source.num_batches)
        with closing(self.source.epoch_into(epoch, index, lambda name, shape: None)) as batches:
            batch = next(batches, {})
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
        with self.state.clock.losing("checkpoint"), within("checkpoint"):
            self.state.save(self.logs.size_bytes)

    # The ceiling

    def _measure_ceiling(self) -> None:
        """Now and then between two steps, time the step on fixed batches: both rates are of the same minutes."""
        if not self.kinds or not self.config.measure_ceiling:  # several ranks keep no batches: shares vary in size
            return
        run_s, steps = self.state.clock.seconds - self.began[0], self.state.clock.steps - self.began[2]
        budget_s = min(CEILING_S / 5, BUDGET / 4 * run_s)
        if not self.probe.due(run_s, max(budget_s, LEAST_STEPS * len(self.kinds) * run_s / max(1, steps))):
            return
        self.state.clock.pause()
        began_s, run_s = time.perf_counter(), self.state.clock.seconds - self.began[0]
        with within("ceiling"):
            times = self._time_fixed_batches(budget_s)
        assert times.step_s is not None
        self.timed.append(times)
        self.probe.add(times.items / max(times.step_s, 1e-9), time.perf_counter() - began_s, run_s)
        self.state.clock.go()

    def step_times(self) -> StepTimes | None:
        """Mean times of the step on fixed batches; a GPU's tell how busy it was, however short the run."""
        if self.timed:
            return mean_times([(times, 1) for times in self.timed])
        if self.stopped or not self.kinds or not self.config.measure_ceiling or self.device.type == "cpu":
            return None
        with within("ceiling"):
            return self._time_fixed_batches(CEILING_S)

    def _time_fixed_batches(self, budget_s: float) -> StepTimes:
        """Time the step on fixed batches over and over, then undo what the steps did.

        One batch of every shape that is not rare; the result is the mean, weighted by how often each shape came.
        """
        kept, micro, training = Snapshot(self.stepper), self.stepper.micro, self.module.training
        least = RARE * sum(count for _, count in self.kinds.values())
        common = [(batch, count) for batch, count in self.kinds.values() if count >= least]
        self.module.train()
        try:
            timed = [(self._time(batch, budget_s / len(common)), count) for batch, count in common]
        finally:
            kept.restore()
            self.stepper.micro = micro
            self.module.train(training)
        return mean_times(timed)

    def _time(self, batch: Batch, budget_s: float) -> StepTimes:
        inputs = self.stepper.inputs_like(batch)
        fixed = inputs or {name: tensor.clone() for name, tensor in batch.items()}
        loss = torch.zeros(1, device=self.device)

        def step() -> None:
            loss[0].copy_(self.stepper.step(fixed, 0, self.config.learning_rate))  # kept, as in the loop

        times = time_step(step, self.device, captured=inputs is not None, budget_s=budget_s)
        return replace(times, items=batch_items(batch))

    def report(self, out: Path, static: StepTimes | None, peak_bytes: int, energy_j: float | None) -> TrainReport:
        """static: times of the step on fixed batches, if measured."""
        state, stepper, clock, waiting = self.state, self.stepper, self.state.clock, self.state.clock.waiting
        known = static or StepTimes(step_s=None)
        if known.syncs and known.step_s is not None and known.device_s is not None:
            waiting["host_sync"] += clock.steps * max(0.0, known.step_s - known.device_s)
        times = Times(
            seconds=clock.seconds, steps=clock.steps, waiting=waiting, step_s=known.step_s, device_s=known.device_s,
            captured=stepper.kind == "graph", syncs=known.syncs,
        )  # fmt: skip
        rate = clock.samples / times.seconds if times.seconds > 0 else 0.0
        ceiling = self.probe.share((clock.samples - self.began[1]) / max(1e-9, clock.seconds - self.began[0]))
        busy_s = clock.step_s if times.device_s is None else times.device_s * clock.steps
        num_here = clock.samples - clock.samples_before
        unfinished = state.epoch < self.config.epochs
        return TrainReport(
            run=str(out), phase=stepper.phase, epochs=state.epoch, steps=state.step, samples_per_s=rate,
            epoch_seconds=self.source.num_items / rate if rate > 0 else 0.0, tier=self.source.tier,
            ceiling_share=ceiling.share, ceiling_spread=ceiling.spread, ceiling_words=ceiling.words(),
            busy_share=min(1.0, busy_s / times.seconds) if times.seconds > 0 else 0.0, waiting=waiting,
            best_val_loss=None if state.best is None else state.best["val_loss"], peak_bytes=peak_bytes,
            joules_per_sample=energy_j / num_here if energy_j is not None and num_here else None,
            step_kind=stepper.kind, micro_batch=stepper.micro, diagnosis=tuple(diagnose(times)),
            stopped=self.stopped and unfinished, stopped_early=not self.stopped and unfinished,
        )  # fmt: skip

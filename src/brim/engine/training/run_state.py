"""Where a phase of training is, and how that is written and found again."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.meter.stalls import RunClock
from brim.engine.training.checkpoint import Groups, copy_in, has_checkpoint, load_checkpoint, save_checkpoint
from brim.engine.training.losses import LossWindow
from brim.engine.training.step import Stepper
from brim.errors import CheckpointError

log = logging.getLogger("brim")

# Changing one of these in mid-run would make another run of it; the others only change what is written when.
_IDENTITY = ("learning_rate", "weight_decay", "warmup", "clip_norm", "precision", "seed")
_SOURCE = ("num_items", "num_batches", "batch_size")


class RunState:
    """Position, best and losses of a phase; its weights are the stepper's."""

    def __init__(self, stepper: Stepper, source: Any, folder: Path) -> None:
        """Stand at the beginning."""
        self._stepper, self._folder = stepper, folder
        self._source = {name: int(getattr(source, name)) for name in _SOURCE}
        self.num_steps = stepper.config.epochs * self._source["num_batches"]
        self.step, self.epoch, self.batch = 0, 0, 0  # steps done; the next batch to train
        self.best: dict[str, Any] | None = None  # val_loss, epoch, step
        self._best_weights: dict[str, Tensor] | None = None  # on the device until the next checkpoint
        self.stale = 0  # evaluations since the best
        self.losses = LossWindow(stepper.config.log_every, stepper.device)
        self.clock = RunClock(stepper.device, source)
        self.log_bytes = 0
        self.saved_step: int | None = None
        self.saved_at = time.perf_counter()
        self._saved: tuple[int, int, int] | None = None

    @property
    def is_saved(self) -> bool:
        """Whether the checkpoint on disk is of this moment."""
        return self._saved == (self.step, self.epoch, self.batch)

    def note(self, val_loss: float) -> None:
        """Keep these weights if they are the best so far."""
        if self.best is not None and val_loss >= self.best["val_loss"]:
            return
        self.best = {"val_loss": val_loss, "epoch": self.epoch, "step": self.step}
        weights = self._stepper.module.state_dict()
        self._best_weights = {name: value.detach().clone() for name, value in weights.items()}
        self.stale = 0

    def save(self, log_bytes: int) -> None:
        """Write best, if it is new, and last; the caller has checked that they are finite. Rank 0 writes."""
        if self._stepper.ranks.main:
            self._write(log_bytes)
        self._best_weights = None
        self.saved_step, self._saved = self.step, (self.step, self.epoch, self.batch)
        self.saved_at = time.perf_counter()

    def _write(self, log_bytes: int) -> None:
        if self._best_weights is not None:  # first: last must not name a best that is not there
            best = {**self._identity(), **(self.best or {})}
            save_checkpoint(self._folder / "best", {"model": self._best_weights}, best)
        weights, moments = self._stepper.module.state_dict(), self._stepper.optimizer_tensors()
        save_checkpoint(self._folder / "last", {"model": weights, "optimizer": moments}, self._as_json(log_bytes))

    def open(self, resume: bool) -> None:
        """Go on from the last checkpoint, if there is one; rank 0 reads it for all."""
        last = self._folder / "last"
        found = self._stepper.ranks.from_main(lambda: self._find(last, resume))
        if found is None:
            return
        groups, state = found
        copy_in(groups.get("model", {}), self._stepper.module.state_dict(), last)
        copy_in(groups.get("optimizer", {}), self._stepper.optimizer_tensors(), last)
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise CheckpointError(f"{last}/state.json lacks a value ({failure!r}); choose another --out") from failure
        log.info("%s: going on from step %d of %d", self._folder, self.step, self.num_steps)

    def _find(self, last: Path, resume: bool) -> tuple[Groups, dict[str, Any]] | None:
        if not has_checkpoint(last):
            return None
        if not resume:
            raise CheckpointError(f"{last} holds a checkpoint; resume it or choose another --out")
        groups, state = load_checkpoint(last)
        self._check_identity(state, last)
        return groups, state

    def _identity(self) -> dict[str, Any]:
        config = asdict(self._stepper.config)
        return {
            "phase": self._stepper.phase,
            "config": config,
            "source": self._source,
            "torch": torch.__version__,
        }

    def _as_json(self, log_bytes: int) -> dict[str, Any]:
        return {
            **self._identity(),
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "best": self.best,
            "stale": self.stale,
            "rng": {"seed": self._stepper.config.seed, "stream": [self._stepper.phase, self.step]},  # of the next step
            "scaler": self._stepper.scaler.state_dict(),
            "micro_batch": self._stepper.micro,
            "window": self.losses.as_state(),
            "log_bytes": log_bytes,
            "clock": self.clock.as_state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.step, self.epoch, self.batch = (int(state[name]) for name in ("step", "epoch", "batch"))
        self.best, self.stale, self.log_bytes = state["best"], int(state["stale"]), int(state["log_bytes"])
        if state["scaler"]:
            self._stepper.scaler.load_state_dict(state["scaler"])
        self._stepper.micro = state["micro_batch"]
        self.losses.load(state["window"])
        self.clock.load(state["clock"])
        self.saved_step, self._saved = self.step, (self.step, self.epoch, self.batch)

    def _check_identity(self, state: dict[str, Any], last: Path) -> None:
        mine = self._identity()
        for part, names in (("source", _SOURCE), ("config", _IDENTITY)):
            found = state.get(part) if isinstance(state.get(part), dict) else {}
            for name in names:
                old, new = (found or {}).get(name), mine[part][name]
                if old != new:
                    raise CheckpointError(
                        f"{last}: {name} was {old} and is {new} now; resume with the same, or choose another --out"
                    )
        old, new = state["config"].get("epochs"), self._stepper.config.epochs
        if old != new:
            log.warning("epochs was %s and is %d now: the learning rate follows the new length", old, new)

"""State of a training run on disk: `model.safetensors`, `optimizer.safetensors` and `state.json` in one directory.

A checkpoint is written whole under another name, synced, then renamed; the one before it stays until then. After a
crash at any moment one of the two is complete. Nothing is pickled: loading runs no code.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from brim.engine.meter import RunClock
from brim.engine.storage import lock_directory, sync
from brim.engine.training.run_directory import check_same
from brim.engine.training.step import Stepper
from brim.errors import CheckpointError, StorageError

FORMAT_VERSION = 1
STATE = "state.json"

Groups = dict[str, dict[str, Tensor]]  # file stem → tensors by name


def save_checkpoint(directory: Path, groups: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Replace the checkpoint in this directory; the old one is kept until the new one is synced."""
    new, old = _beside(directory, "new"), _beside(directory, "old")
    with _refusals(directory):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        files = {}
        for stem, group in groups.items():
            # to("cpu") before clone(): tied weights must not share memory in the file, nor a GPU hold the clone
            host = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in group.items()}
            files[stem] = _write(new / f"{stem}.safetensors", save(host))
        text = json.dumps({"format_version": FORMAT_VERSION, **state, "files": files}, allow_nan=False, indent=1)
        _write(new / STATE, text.encode())
        sync(new)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)  # a directory cannot be replaced in one call: load_checkpoint looks here too
        new.rename(directory)
        sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint, complete or damaged."""
    return directory.is_dir() or _beside(directory, "old").is_dir()


def load_checkpoint(directory: Path) -> tuple[Groups, dict[str, Any]]:
    """Tensors and state of a checkpoint; a missing or damaged one is a CheckpointError."""
    source = directory
    if not directory.is_dir():
        source = _beside(directory, "old")  # killed between two renames
        if not source.is_dir():
            raise CheckpointError(
                f"{directory} has no checkpoint", code="missing", hint="give the directory of a training run"
            )
    state = _read_state(source / STATE)
    return {stem: _read_group(source / f"{stem}.safetensors", sums) for stem, sums in state["files"].items()}, state


def load_weights(
    module: nn.Module, run: Path | str, phase: str = "train", which: Literal["best", "last"] = "best"
) -> dict[str, Any]:
    """Put a run's weights into the module and return the checkpoint's state; "best" is "last" if nothing was evaluated.

    Loads on the device the module is on. Weights of another model are a CheckpointError that names the first
    difference.
    """
    directory = Path(run) / phase / which
    if which == "best" and not has_checkpoint(directory):
        directory = directory.with_name("last")
    groups, state = load_checkpoint(directory)
    copy_in(groups.get("model", {}), module.state_dict(), directory)
    return state


@torch.no_grad()
def copy_in(saved: Mapping[str, Tensor], targets: Mapping[str, Tensor], directory: Path) -> None:
    """Copy saved tensors into those of the same name, in place; a difference raises, and nothing is copied."""
    for name in dict.fromkeys((*targets, *saved)):
        mine, other = (_describe(tensors.get(name)) for tensors in (targets, saved))
        if mine != other:
            raise CheckpointError(
                f'{directory} is of another model: "{name}" is {other} in the checkpoint and {mine} in this model',
                code="differs",
                hint="use the model and the configuration it was trained with, or another directory",
            )
    for name, tensor in saved.items():
        targets[name].copy_(tensor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create the directory and lock it against other writers; the lock ends with the process, however it ends."""
    with _refusals(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = lock_directory(directory, CheckpointError)
    try:
        yield
    finally:
        os.close(handle)


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _beside(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}")


def _write(file: Path, content: bytes) -> dict[str, Any]:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(_read(file))
    except (ValueError, RecursionError) as failure:
        raise _damaged(file, f"is not valid JSON ({failure})") from failure
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {version!r}, expected {FORMAT_VERSION}",
            code="unsupported",
            hint="use the version of brim that wrote it",
        )
    if not isinstance(state.get("files"), dict):
        raise _damaged(file, "lists no files")
    return dict(state)


def _read_group(file: Path, sums: Any) -> dict[str, Tensor]:
    content = _read(file)
    wanted = sums.get("sha256") if isinstance(sums, dict) else None
    if hashlib.sha256(content).hexdigest() != wanted:
        raise _damaged(file, f"({len(content)} bytes) differs from the checksum in {STATE}")
    try:
        return load(content)
    except SafetensorError as failure:
        raise _damaged(file, f"is no safetensors file ({failure})") from failure


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as failure:
        raise _damaged(file, "is missing") from failure
    except OSError as failure:
        raise StorageError(
            f"{file} cannot be read: {failure.strerror or failure}", hint="check its permissions"
        ) from failure


def _damaged(file: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{file} {fault}", code="damaged", hint=f"restore it from a copy, or remove {file.parent} and train again"
    )


@contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(
            f"{directory}: cannot write, {reason}; the previous checkpoint is kept",
            hint="free some space or change the permissions, then {resume}",
        ) from failure


log = logging.getLogger("brim")

# Changing one of these would make it a different run; the other settings only change what is written and when.
_IDENTITY = ("learning_rate", "weight_decay", "warmup", "clip_norm", "precision", "seed")
_SOURCE = ("num_items", "num_batches", "batch_size")


class LossWindow:
    """Losses of the steps since the last log point; reading them waits for the device, adding one does not."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._losses = torch.zeros(size, dtype=torch.float32, device=device)
        self.sizes: list[int] = []  # items of each step

    def add(self, loss: Tensor, num_items: int) -> None:
        self._losses[len(self.sizes)].copy_(loss)
        self.sizes.append(num_items)

    def values(self, start: int = 0) -> list[float]:
        return list(self._losses[start : len(self.sizes)].tolist())

    def first_bad(self, *, newest_only: bool = False) -> tuple[int, float] | None:
        """Position and value of the first loss that is not finite."""
        start = max(0, len(self.sizes) - 1) if newest_only else 0
        return next(((at, loss) for at, loss in enumerate(self.values(start), start) if not math.isfinite(loss)), None)

    def mean(self) -> float:
        """Mean over the items of all steps."""
        total = sum(loss * num for loss, num in zip(self.values(), self.sizes, strict=True))
        return total / sum(self.sizes)

    def clear(self) -> None:
        self.sizes = []

    def as_state(self) -> dict[str, Any]:
        """For a checkpoint; float32 survives JSON exactly."""
        return {"losses": self.values(), "sizes": self.sizes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one with another log_every may hold more losses, of which the newest are kept."""
        room = len(self._losses) - 1
        losses, self.sizes = state["losses"][-room:] if room else [], list(state["sizes"][-room:]) if room else []
        self._losses[: len(losses)] = torch.tensor(losses, dtype=torch.float32)


class PhaseState:
    """Position, best and losses of a phase; its weights are the stepper's."""

    def __init__(self, stepper: Stepper, source: Any, folder: Path) -> None:
        self._stepper, self._folder = stepper, folder
        self._source = {name: int(getattr(source, name)) for name in _SOURCE}
        self.num_steps = stepper.config.epochs * self._source["num_batches"]
        self.step, self.epoch, self.batch = 0, 0, 0  # steps done; the next batch to train
        self.best: dict[str, Any] | None = None  # val_loss, epoch, step
        self._best_weights: dict[str, Tensor] | None = None  # on the device until the next checkpoint
        self.stale = 0  # evaluations since the best
        self.log_every = stepper.config.log_interval(self.num_steps)
        self.losses = LossWindow(self.log_every, stepper.device)
        self.clock = RunClock(stepper.device, source)
        self.log_bytes = 0
        self.saved_step: int | None = None
        self.saved_at = time.perf_counter()
        self._saved: tuple[int, int, int] | None = None

    @property
    def is_saved(self) -> bool:
        """Whether the checkpoint on disk is up to date."""
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
        if self._best_weights is not None:  # first: "last" must not refer to a "best" that does not exist
            best = {**self._identity(), **(self.best or {})}
            save_checkpoint(self._folder / "best", {"model": self._best_weights}, best)
        weights, moments = self._stepper.module.state_dict(), self._stepper.optimization.tensors()
        save_checkpoint(self._folder / "last", {"model": weights, "optimizer": moments}, self._as_json(log_bytes))

    def open(self, resume: bool) -> None:
        """Resume from the last checkpoint, if there is one; rank 0 reads it for all."""
        last = self._folder / "last"
        checkpoint = self._stepper.ranks.from_main(lambda: self._find(last, resume))
        if checkpoint is None:
            return
        groups, state = checkpoint
        copy_in(groups.get("model", {}), self._stepper.module.state_dict(), last)
        optimization, moments = self._stepper.optimization, groups.get("optimizer", {})
        if optimization.own:
            copy_in(moments, optimization.tensors(), last)
        try:
            if not optimization.own:
                optimization.load(moments, state["optimizer"])
            self._load(state)
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise CheckpointError(
                f"{last}/state.json lacks a value ({failure!r})", code="damaged", hint="choose another {out}"
            ) from failure
        log.info("%s: resuming from step %d of %d", self._folder, self.step, self.num_steps)

    def _find(self, last: Path, resume: bool) -> tuple[Groups, dict[str, Any]] | None:
        if not has_checkpoint(last):
            return None
        if not resume:
            hint = "add {resume} to continue it or choose another {out}"
            raise CheckpointError(f"{last} holds a checkpoint", code="occupied", hint=hint)
        groups, state = load_checkpoint(last)
        self._check_identity(state, last)
        return groups, state

    def _identity(self) -> dict[str, Any]:
        config = asdict(self._stepper.config)
        return {"phase": self._stepper.phase, "config": config, "source": self._source, "torch": torch.__version__}

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
            "optimizer": self._stepper.optimization.numbers(),
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
            saved = state.get(part) if isinstance(state.get(part), dict) else {}
            check_same(last, *({name: side.get(name) for name in names} for side in (saved or {}, mine[part])))
        self._stepper.optimization.check(state.get("optimizer") or {}, last)
        old, new = state["config"].get("epochs"), self._stepper.config.epochs
        if old != new:
            log.warning("epochs was %s and is %d now: the learning rate follows the new length", old, new)

"""How a run is trained: the numbers of a recipe, its learning rate at every step, and the precision of a device."""

import importlib.util
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from brim.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Compile = Literal["auto", "none", "compile", "graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The recipe of one phase of training."""

    epochs: int = 10
    learning_rate: float = 1e-3  # AdamW's, at the end of the warm-up
    weight_decay: float = 0.01  # decoupled, per step and learning rate
    warmup: float = 0.05  # share of all steps in which the learning rate rises; the rest is a cosine to 0
    clip_norm: float | None = 1.0  # longest gradient over all parameters; None: not clipped
    precision: Precision = "auto"  # of the forward pass; auto: bf16 where the GPU has it, else fp16; fp32 on a CPU
    early_stopping_patience: int | None = None  # epochs without a better val_loss; None: all epochs are trained
    seed: int = 0  # of dropout and transforms; the source has its own
    compile: Compile = "auto"  # auto: a captured graph on a GPU; compile: torch.compile, captured too on a GPU
    max_graphs: int = 32  # shapes of batches that are captured; each keeps its inputs in memory
    log_every: int = 50  # steps; the device is synchronised once in so many
    checkpoint_every_s: float | None = 60.0  # None: only by steps, when stopped and at the end
    checkpoint_every_steps: int | None = None
    tensorboard: bool = True  # events beside metrics.jsonl
    measure_ceiling: bool = True  # at the end, time the step on one fixed batch

    def __post_init__(self) -> None:
        """Check every value."""
        for name in ("epochs", "log_every", "max_graphs"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("early_stopping_patience", "checkpoint_every_steps"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1, or None")
        for name in ("clip_norm", "checkpoint_every_s"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 < value < math.inf, "above 0, or None")
        _check("learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf, "above 0, such as 0.001")
        _check("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "0 or more, such as 0.01")
        _check("warmup", self.warmup, 0 <= self.warmup < 1, "a share of the steps in [0, 1), such as 0.05")
        for name, kind in (("precision", Precision), ("compile", Compile)):
            choices = get_args(kind)
            _check(name, getattr(self, name), getattr(self, name) in choices, f"one of {', '.join(choices)}")


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} must be {expected}")


def recipe_of(settings: Any, epochs: int) -> TrainConfig:
    """What a workload's settings, a dataclass, say to the trainer: the fields of the same names."""
    names = {field.name for field in fields(TrainConfig)} & {field.name for field in fields(settings)} - {"epochs"}
    events = importlib.util.find_spec("tensorboard") is not None
    return TrainConfig(epochs=epochs, **{name: getattr(settings, name) for name in names}, tensorboard=events)


def learning_rate_at(config: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of a step, counted from 0, in a run of num_steps: a linear warm-up, then a cosine to 0."""
    warm = round(config.warmup * num_steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    share = min(1.0, (step - warm) / max(1, num_steps - warm))
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def resolve_precision(name: Precision, device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    """The precision of the forward pass on a device; one the device does not have is an error."""
    if device.type == "cpu":
        if name == "fp16":
            raise ConfigError('precision="fp16" needs a GPU; use bf16 or fp32 on a CPU')
        return "fp32" if name == "auto" else name
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "bf16" and not has_bf16:
        raise ConfigError(f'precision="bf16": {torch.cuda.get_device_name(device)} has none; use fp16 or fp32')
    return ("bf16" if has_bf16 else "fp16") if name == "auto" else name

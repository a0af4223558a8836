"""brim.tune_batch: the fastest batch and the largest safe one of any module, from one example of its input."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.config import Precision, SweepConfig, TrainConfig
from brim.engine.device import guard, named_device
from brim.engine.training import Batch, MakeOptimizer, Stepper, resolve_precision
from brim.engine.tuning import MakeStep, Sweep, Trial, tune
from brim.errors import BrimError, ConfigError, OutOfMemory, with_article

TuneMode = Literal["train", "predict"]
_MODES = {"train": "train", "predict": "predict", "inference": "predict", "eval": "predict"}
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def tune_batch(
    model: nn.Module,
    example: Any,
    *,
    mode: str = "train",
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    max_batch: int = 4096,
    seconds: float = 30.0,
    progress: Callable[[Trial], None] | None = None,
) -> Sweep:
    """The fastest batch (`.batch`), the largest safe one (`.max_safe`) and a verdict in words; the model is copied.

    example  an input of the model: a batch, such as X[:1], or a single item; a tuple or dict of them also with targets
    mode     "train": forward, backward and update; "predict": forward only
    loss_fn  loss_fn(model, batch), as for train; without it the mean of the squared outputs stands in
    seconds  time for the search; compilation counts separately
    """
    if isinstance(model, type) or not isinstance(model, nn.Module):
        name = getattr(model, "__name__", type(model).__name__)
        raise ConfigError(f"model is {name}, not a module", hint="give a torch.nn.Module")
    if mode not in _MODES:
        raise ConfigError("is unknown", field="mode", value=mode, code="unknown_choice", hint="use train or predict")
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise ConfigError(f"max_batch={max_batch!r} must be a whole number, at least 1")
    where = named_device(device)
    try:
        copied = copy.deepcopy(model).to(where)
    except (TypeError, RuntimeError, ValueError) as failure:
        raise ConfigError(
            f"the model cannot be copied ({str(failure).splitlines()[0]})",
            hint="give one whose parts can be copied, and call it once if its parameters are lazy",
        ) from failure
    with torch.random.fork_rng([where.index or 0] if where.type == "cuda" else []):
        work = _Work(copied, _parts(example, where), type(example), loss_fn)
        config = SweepConfig(limit=max_batch, seconds=seconds)
        if _MODES[mode] == "train":
            recipe = TrainConfig(precision=precision, clip_norm=None, tensorboard=False)
            make_step = _training(work, copied, recipe, optimizer, where)
        else:
            make_step = _predicting(work, copied, precision, where)
        return tune(make_step, where, config, progress=progress)


def _training(
    work: "_Work", model: nn.Module, recipe: TrainConfig, optimizer: MakeOptimizer | None, device: torch.device
) -> MakeStep:
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("the module has no trainable parameters", hint='give mode="predict"')

    least = work.least(model)

    def make_step(batch: int) -> Callable[[], object]:
        stepper = Stepper(model.train(), work.loss, config=recipe, device=device, optimizer=optimizer)
        inputs = work.inputs(max(batch, least))
        if stepper.needs_preparation(inputs):
            stepper.prepare(inputs)
        fixed = stepper.inputs_like(inputs) or inputs

        def step() -> object:
            loss = stepper.step(fixed, 0, 0.0)
            if stepper.micro is not None:  # the trainer would go on in parts: this size does not fit
                raise OutOfMemory(f"a batch of {batch} does not fit")
            return loss

        return step

    return make_step


def _predicting(work: "_Work", model: nn.Module, precision: Precision, device: torch.device) -> MakeStep:
    dtype = _DTYPES[resolve_precision(precision, device)]
    model.eval()

    def make_step(batch: int) -> Callable[[], object]:
        inputs = work.inputs(batch)

        def step() -> object:
            with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
                return work.outputs(model, inputs)

        return step

    return make_step


class _Work:
    """How a module is called with an example repeated to any batch; found by trying."""

    def __init__(self, model: nn.Module, example: Batch, form: type, loss_fn: Any) -> None:
        self._loss_fn, self._form = loss_fn, form
        failures: list[str] = []
        for rows in (_first_rows(example), {name: part[None] for name, part in example.items()}):
            if rows is None:
                continue
            self._rows = rows
            for call in self._calls():
                self._call = call
                try:
                    with guard(), torch.no_grad():
                        self._check(model.eval())
                    return
                except BrimError:
                    raise
                except Exception as failure:  # whatever the user's code raises
                    failures.append((str(failure).strip() or type(failure).__name__).split("\n")[0][:200])
        raise ConfigError(
            f"the model does not run on the example ({failures[0]})",
            hint="give a batch of its inputs, such as X[:1], and loss_fn if a batch is more than that",
        )

    def least(self, model: nn.Module) -> int:
        """Items that a step needs: 2 if a norm refuses one; that size is then measured with two, and is never best."""
        try:
            with torch.no_grad():
                self._call(model.train(), self.inputs(1))
        except ValueError:
            return 2
        return 1

    def inputs(self, batch: int) -> Batch:
        return {name: row.expand(batch, *row.shape[1:]).clone() for name, row in self._rows.items()}

    def outputs(self, model: nn.Module, inputs: Batch) -> Any:
        return self._call(model, inputs)

    def loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        if self._loss_fn is not None:
            loss: Tensor = self._loss_fn(model, self._given(inputs))
            return loss
        values = [value.float().square().mean() for value in _tensors(self._call(model, inputs))]
        return torch.stack(values).sum()

    def _calls(self) -> list[Callable[[nn.Module, Batch], Any]]:
        first = next(iter(self._rows))
        if self._loss_fn is not None:
            return [lambda model, inputs: self._loss_fn(model, self._given(inputs))]
        calls: list[Callable[[nn.Module, Batch], Any]] = [lambda model, inputs: model(self._given(inputs))]
        if self._form is dict:
            calls.append(lambda model, inputs: model(**inputs))
        elif self._form in (tuple, list):
            calls.insert(0, lambda model, inputs: model(*inputs.values()))
        return [*calls, lambda model, inputs: model(inputs[first])]

    def _given(self, inputs: Batch) -> Any:
        if self._form is dict:
            return inputs
        return tuple(inputs.values()) if self._form in (tuple, list) else next(iter(inputs.values()))

    def _check(self, model: nn.Module) -> None:
        results = _tensors(self._call(model, self.inputs(2)))
        if not results:
            raise ValueError("its output holds no tensor")
        if self._loss_fn is None and not any(result.ndim and len(result) == 2 for result in results):
            raise ValueError(f"two items gave outputs of shape {list(results[0].shape)}")


def _parts(example: Any, device: torch.device) -> Batch:
    if isinstance(example, Mapping):
        parts = dict(example)
    elif isinstance(example, tuple | list):
        parts = {str(place): part for place, part in enumerate(example)}
    else:
        parts = {"0": example}
    for name, part in parts.items():
        if not isinstance(part, Tensor | np.ndarray | int | float):
            raise ConfigError(
                f"the example's part {name} is {with_article(part)}", hint="give tensors, or a tuple or dict of them"
            )
    if not parts:
        raise ConfigError("the example is empty", hint="give an input of the model, such as X[:1]")
    return {str(name): torch.as_tensor(part).detach().to(device) for name, part in parts.items()}


def _first_rows(example: Batch) -> Batch | None:
    """The first row of each part, with its batch axis; None if a part has no such axis."""
    if any(part.ndim < 1 or not len(part) for part in example.values()):
        return None
    return {name: part[:1] for name, part in example.items()}


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() or outputs.is_complex() else []
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]

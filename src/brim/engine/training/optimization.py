"""The optimiser of a run and its learning rate: brim's own AdamW with warm-up and cosine, or what the caller brings.

A caller's optimiser is a function of the parameters, a class, or an optimiser made already; a scheduler is a function
of the optimiser, or one made already. Both are saved as tensors and JSON, never pickled, so that a run resumes exactly.

A step can be captured as a CUDA graph only if all that changes between steps is in device tensors. That holds for the
optimisers in `_CAPTURED`, with the learning rate in a tensor; with any other one steps run eagerly.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brim.engine.config import TrainConfig, learning_rate_at
from brim.engine.training.compiler import PlainAdamW, spare_the_compiler
from brim.engine.training.run_directory import check_same
from brim.errors import CheckpointError, ConfigError, with_article

log = logging.getLogger("brim")

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

_CAPTURED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)  # state that begins at zero
_EACH_STEP = (torch.optim.lr_scheduler.OneCycleLR, torch.optim.lr_scheduler.CyclicLR)  # count steps by their contract


class Optimization:
    """Optimiser, learning rate and schedule of the trainable parameters of a module."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        config: TrainConfig,
        device: torch.device,
        optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
        scheduler: MakeScheduler | Any = None,
    ) -> None:
        """Make the optimiser and the scheduler."""
        spare_the_compiler()
        self.params, self.config, self.device = params, config, device
        self.own = optimizer is None and scheduler is None
        on_gpu = device.type == "cuda"
        self._rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        if self.own:
            self.optimizer: torch.optim.Optimizer = PlainAdamW(
                list(params.values()), self._rate, weight_decay=config.weight_decay, fused=True, capturable=on_gpu
            )
        elif optimizer is None:
            self.optimizer = torch.optim.AdamW(
                list(params.values()), config.learning_rate, weight_decay=config.weight_decay
            )
        else:
            self.optimizer = _made(optimizer, params)
        self.can_capture = self.own or (on_gpu and _can_capture(self.optimizer))
        if not self.own and self.can_capture:
            self._move_to_device()
        self.scheduler: Any = None if scheduler is None else _made_scheduler(scheduler, self.optimizer)
        self._constants = self._hyperparameters()
        if self.can_capture:
            self._make_state()

    @property
    def name(self) -> str | None:
        """What a resumed run must have too; None for brim's own."""
        if self.own:
            return None
        schedule = "" if self.scheduler is None else f" with {type(self.scheduler).__name__}"
        return f"{type(self.optimizer).__name__}{schedule}"

    @property
    def needs_val_loss(self) -> bool:
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    # Rates

    def begin_step(self, learning_rate: float) -> None:
        """Set the rate of a step of brim's own schedule; another optimiser keeps its own."""
        if self.own:
            self._rate.fill_(learning_rate)

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, for logs; of a caller's optimiser the current one of its first group."""
        if self.own:
            return learning_rate_at(self.config, step, num_steps)
        return float(self.optimizer.param_groups[0]["lr"])

    def end_step(self) -> bool:
        """Advance a scheduler that counts steps; True if captured steps are no longer valid."""
        return isinstance(self.scheduler, _EACH_STEP) and self._advance()

    def end_epoch(self, val_loss: float | None) -> bool:
        """Advance a scheduler that counts epochs; True if captured steps are no longer valid."""
        if self.scheduler is None or isinstance(self.scheduler, _EACH_STEP):
            return False
        return self._advance(*([val_loss] if self.needs_val_loss else []))

    def _advance(self, *values: Any) -> bool:
        try:
            self.scheduler.step(*values)
        except ValueError as failure:  # OneCycleLR beyond its last step
            raise ConfigError(
                f"the scheduler cannot advance ({failure})", hint="give it all steps of the training"
            ) from failure
        if not self.can_capture:
            return False
        for group, tensor in zip(self.optimizer.param_groups, self._rates, strict=True):
            if group["lr"] is not tensor:  # a scheduler that puts a number there: captured steps read the tensor
                tensor.fill_(float(group["lr"]))
                group["lr"] = tensor
        changed, self._constants = self._constants != self._hyperparameters(), self._hyperparameters()
        return changed

    # State

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser's tensors, as "parameter/name"; their memory, not copies."""
        return {name: value for name, value in self._state() if isinstance(value, Tensor)}

    def numbers(self) -> dict[str, Any]:
        """Everything but tensors, for JSON: other state, the settings of each group, and the scheduler's state."""
        if self.own:
            return {}
        state = {name: value for name, value in self._state() if not isinstance(value, Tensor)}
        scheduler = None if self.scheduler is None else _encode(self.scheduler.state_dict(), "the scheduler")
        groups = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "name": self.name,
            "state": _encode(state, "the optimiser"),
            "groups": _encode(groups, "the optimiser"),
            "scheduler": scheduler,
        }

    def check(self, saved: Mapping[str, Any], where: Path) -> None:
        """Raise CheckpointError if a checkpoint was written with another optimiser."""
        check_same(where, {"optimizer": saved.get("name")}, {"optimizer": self.name})

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what a checkpoint of this optimiser holds; tensors that exist are filled, others are added."""
        state: dict[str, Any] = {**_decode(numbers["state"]), **tensors}
        for name, param in self.params.items():
            mine = self.optimizer.state[param]
            for key in [key for key in state if key.rpartition("/")[0] == name]:
                value, held = state[key], mine.get(key.rpartition("/")[2])
                if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
                    held.copy_(value)
                else:
                    on_device = isinstance(value, Tensor) and (value.ndim > 0 or self._counts_on_device)
                    mine[key.rpartition("/")[2]] = value.to(self.device) if on_device else value
        for group, saved in zip(self.optimizer.param_groups, _decode(numbers["groups"]), strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                elif key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value
        if self.scheduler is not None and numbers["scheduler"] is not None:
            fresh, saved = self.scheduler.state_dict(), _decode(numbers["scheduler"])
            kept = {key: _like(value, fresh.get(key)) for key, value in saved.items()}
            self.scheduler.load_state_dict(kept)
        self._constants = self._hyperparameters()

    def copy(self) -> dict[Tensor, dict[str, Any]]:
        """A copy of the whole state, for `restore`."""
        return {
            param: {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in held.items()}
            for param, held in self.optimizer.state.items()
        }

    def restore(self, kept: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Undo what steps did since `copy`; tensors stay where they are, because captured steps use them."""
        for param, held in self.optimizer.state.items():
            saved = kept.get(param, {})
            for key in list(held):
                if key not in saved:
                    del held[key]
                elif isinstance(held[key], Tensor) and isinstance(saved[key], Tensor):
                    held[key].copy_(saved[key])
                else:
                    held[key] = saved[key]

    def _state(self) -> Iterator[tuple[str, Any]]:
        state = self.optimizer.state
        for name, param in self.params.items():
            for key, value in state.get(param, {}).items():
                yield f"{name}/{key}", value

    def _make_state(self) -> None:
        """Create the state now, by a step that changes nothing, so that it can be loaded, saved and captured."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        values = [float(rate) for rate in rates]
        for rate in rates:
            rate.zero_()
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for tensor in self.tensors().values():
            tensor.zero_()
        for rate, value in zip(rates, values, strict=True):
            rate.fill_(value)

    def _move_to_device(self) -> None:
        """Keep rates and counters on the device, where captured steps read them."""
        self._rates = []
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=self.device)
            self._rates.append(group["lr"])
            if "capturable" in group:
                group["capturable"] = True
            elif isinstance(self.optimizer, torch.optim.SGD):
                group["fused"] = True  # its other implementations read the rate on the host

    @property
    def _counts_on_device(self) -> bool:
        return any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]


# What callers bring


def _made(given: MakeOptimizer | torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        optimizer: Any = given
    elif callable(given):
        try:
            optimizer = given(iter(params.values()))
        except Exception as failure:  # the caller's own function
            raise ConfigError(
                f"making the optimiser failed ({type(failure).__name__}: {failure})",
                hint="give a function of the parameters, as in lambda params: torch.optim.SGD(params, 0.1)",
            ) from failure
    else:
        optimizer = given
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer gave {with_article(optimizer)}, not a torch.optim.Optimizer",
            hint="give a function of the parameters, as in lambda params: torch.optim.SGD(params, 0.1)",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times in a step", hint="use SGD, Adam or another one")
    known = {id(param) for param in params.values()}
    if any(id(param) not in known for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            "the optimiser holds parameters that are not trainable ones of this model",
            hint="give a function of the parameters instead",
        )
    return optimizer


def _made_scheduler(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = given
    if isinstance(given, type) or (callable(given) and not hasattr(given, "step")):
        try:
            scheduler = given(optimizer)
        except Exception as failure:  # the caller's own function
            raise ConfigError(
                f"making the scheduler failed ({type(failure).__name__}: {failure})",
                hint="give a function of the optimiser, as in lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10)",
            ) from failure
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"scheduler gave {with_article(scheduler)}, not a scheduler of torch.optim.lr_scheduler",
            hint="give a function of the optimiser, as in lambda opt: torch.optim.lr_scheduler.StepLR(opt, 10)",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("the scheduler belongs to another optimiser", hint="give a function of the optimiser instead")
    return scheduler


def _can_capture(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) not in _CAPTURED or optimizer.state:
        return False
    return all(not group.get("dampening") and group.get("foreach") is not False for group in optimizer.param_groups)


# JSON


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _encode(values: Any, what: str) -> str:
    """Values as JSON in a string: infinities stay, and so do keys that are numbers."""

    def pairs(value: Any) -> Any:
        value = _plain(value)
        if isinstance(value, Mapping):
            return {"pairs": [[pairs(key), pairs(item)] for key, item in value.items()]}
        return [pairs(item) for item in value] if isinstance(value, list | tuple) else value

    try:
        return json.dumps(pairs(values))
    except (TypeError, ValueError) as failure:
        raise ConfigError(
            f"{what} holds a value that a checkpoint cannot store ({failure})", hint="use one whose state is numbers"
        ) from failure


def _decode(text: str) -> Any:
    def values(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: values(item) for key, item in value["pairs"]}
        return [values(item) for item in value] if isinstance(value, list) else value

    try:
        return values(json.loads(text))
    except (TypeError, ValueError, KeyError) as failure:
        raise CheckpointError(
            f"the state of the optimiser is damaged ({failure})", code="damaged", hint="choose another {out}"
        ) from failure


def _like(value: Any, fresh: Any) -> Any:
    """A value as its new counterpart holds it: a Counter, a tuple."""
    is_other = type(value) is not type(fresh) and isinstance(fresh, dict | tuple) and isinstance(value, dict | list)
    return type(fresh)(value) if is_other else value

"""Losses that stay on the device until they are wanted, and what to say when one is no longer finite."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from brim.engine.training.step import Batch, Stepper

BAD_ITEMS = ("field", "the transform")  # how a cause begins that lies in the items of a batch


class LossWindow:
    """Losses of the steps since the last log point; reading them waits for the device, adding one does not."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Make room for so many steps."""
        self._losses = torch.zeros(size, dtype=torch.float32, device=device)
        self.sizes: list[int] = []  # items of each step

    def add(self, loss: Tensor, num_items: int) -> None:
        """Keep the loss of one more step."""
        self._losses[len(self.sizes)].copy_(loss)
        self.sizes.append(num_items)

    def values(self, start: int = 0) -> list[float]:
        """Losses from one of them on."""
        return list(self._losses[start : len(self.sizes)].tolist())

    def first_bad(self, *, newest_only: bool = False) -> tuple[int, float] | None:
        """Place and value of the first loss that is not finite."""
        start = max(0, len(self.sizes) - 1) if newest_only else 0
        return next(((at, loss) for at, loss in enumerate(self.values(start), start) if not math.isfinite(loss)), None)

    def mean(self) -> float:
        """Mean over the items of all steps."""
        total = sum(loss * num for loss, num in zip(self.values(), self.sizes, strict=True))
        return total / sum(self.sizes)

    def clear(self) -> None:
        """Begin again."""
        self.sizes = []

    def as_state(self) -> dict[str, Any]:
        """For a checkpoint; float32 survives JSON exactly."""
        return {"losses": self.values(), "sizes": self.sizes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's; one with another log_every may hold more, and its newest are kept."""
        room = len(self._losses) - 1
        losses, self.sizes = state["losses"][-room:] if room else [], list(state["sizes"][-room:]) if room else []
        self._losses[: len(losses)] = torch.tensor(losses, dtype=torch.float32)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite; waits for the device once."""
    flags = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return bool(torch.stack(flags).all()) if flags else True


def likely_cause(stepper: Stepper, batch: Batch, step: int, learning_rate: float) -> str:
    """Why the loss of a batch is not finite; looks at it again, so that nothing is checked while all is well."""
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

"""How well masks match the truth: Dice and intersection over union, counted on the device.

With I pixels in both masks, P predicted and T true:

    Dice = 2 I / (P + T)        IoU = I / (P + T − I)

Both are 1 where nothing is true and nothing was predicted. `dice` and `iou` count the pixels of the whole set
together, so a large cell weighs more than a small one; the per-image means weigh every image alike, so an empty image
with one wrong pixel costs a whole image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from brim.errors import ConfigError

_INTERSECTION, _PREDICTED, _TRUE = range(3)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Scores of a set of images, each from 0 to 1."""

    dice: float  # pixels of all images together
    iou: float
    dice_per_image: float  # mean over images
    iou_per_image: float

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Scores:
    """Counts pixels image by image; nothing waits for the device before `result`."""

    def __init__(self, num_images: int, device: torch.device) -> None:
        """Count nothing yet."""
        if num_images < 1:
            raise ConfigError(f"num_images={num_images} must be at least 1")
        self._counts = torch.zeros(num_images, 3, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, true: Tensor, image: Tensor, counted: Tensor | None = None) -> None:
        """Count masks, or parts of them; an image may come in several parts.

        predicted  (B, …)  bool
        true       (B, …)  bool
        image      (B,)    int64  which image each belongs to
        counted    (B, …)  bool   pixels that count; None: all
        """
        if counted is not None:
            predicted, true = predicted & counted, true & counted
        sums = [mask.flatten(1).sum(1, dtype=torch.int64) for mask in (predicted & true, predicted, true)]
        self._counts.index_add_(0, image, torch.stack(sums, 1))

    def result(self) -> Agreement:
        """The scores so far; waits for the device once."""
        per_image = self._counts.double()
        whole = per_image.sum(0, keepdim=True)
        values = torch.stack([ratio(per).mean() for per in (whole, per_image) for ratio in (_dice, _iou)])
        return Agreement(*values.tolist())


def agreement(predicted: Tensor, true: Tensor) -> Agreement:
    """Scores of a batch of whole masks, (B, …) bool each."""
    scores = Scores(len(true), true.device)
    scores.add(predicted, true, torch.arange(len(true), device=true.device))
    return scores.result()


def _dice(counts: Tensor) -> Tensor:
    both = counts[:, _PREDICTED] + counts[:, _TRUE]
    return torch.where(both > 0, 2 * counts[:, _INTERSECTION] / both.clamp(min=1), 1.0)


def _iou(counts: Tensor) -> Tensor:
    union = counts[:, _PREDICTED] + counts[:, _TRUE] - counts[:, _INTERSECTION]
    return torch.where(union > 0, counts[:, _INTERSECTION] / union.clamp(min=1), 1.0)

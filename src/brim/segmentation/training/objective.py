"""What a training step computes and needs: the loss, norms that hold for tiny batches, an estimate of memory.

Axes: B crops, S pixels of a side."""

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brim.engine.training import current
from brim.errors import ConfigError

log = logging.getLogger("brim")

_SMOOTH = 1.0  # pixels: an empty crop without predictions has Dice 1, not 0 / 0
_UNKNOWN_BYTES = 4096  # per pixel of a crop, where a network cannot be tried without data


def item_losses(logits: Tensor, true: Tensor) -> Tensor:
    """Cross entropy plus 1 − soft Dice of each crop, (B,) float32.

    logits  (B, 1, S, S)  any float
    true    (B, 1, S, S)  bool

    Cross entropy makes the probabilities honest, Dice keeps small cells from drowning in the background.
    """
    if logits.shape != true.shape:
        raise ConfigError(
            f"the network gave logits of shape {list(logits.shape)}, expected {list(true.shape)}: one logit per pixel"
        )
    logits, truth = logits.float().flatten(1), true.flatten(1).float()
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(1)
    probability = torch.sigmoid(logits)
    overlap = 2 * (probability * truth).sum(1) + _SMOOTH
    return entropy + 1 - overlap / (probability.sum(1) + truth.sum(1) + _SMOOTH)


def settle_norms(module: nn.Module) -> None:
    """Let batch norms use their running statistics where a channel has a single value, which has no variance.

    That is so for one crop, alone in its batch or in a part of one, at a layer that shrinks it to a pixel; torch
    would refuse.
    """
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.register_forward_pre_hook(_before)
            norm.register_forward_hook(_after, always_call=True)


def _before(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    share, rows = current(), len(inputs[0])
    whole = rows if share is None else share.count * share.repeats(rows)  # of all ranks, over which the norm works
    values = whole * (inputs[0].numel() // max(1, rows * inputs[0].shape[1]))
    norm._brim_settled = norm.training and values <= 1 and norm.running_mean is not None  # type: ignore[assignment]
    if norm._brim_settled:
        norm.training = False


def _after(norm: nn.Module, inputs: Any, output: Any) -> None:
    if getattr(norm, "_brim_settled", False):
        norm.training = True


def step_bytes(module: nn.Module, size: int, batch_size: int) -> int:
    """Bytes of a step on the device: weights, gradients, moments, and what the way back keeps, in float32."""
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return 4 * weights + batch_size * _kept_bytes(module, size)


def _kept_bytes(module: nn.Module, size: int) -> int:
    """What autograd keeps of one crop, found by a forward without data."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    try:
        empty = copy.deepcopy(module).to("meta").train()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            empty(torch.empty(1, 3, size, size, device="meta"))
    except Exception as failure:  # a network may do anything; then an estimate must do
        log.debug("memory of a step not found (%s)", failure)
        return _UNKNOWN_BYTES * size * size
    for parameter in empty.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


_INTERSECTION, _PREDICTED, _TRUE = range(3)


@dataclass(frozen=True, slots=True)
class Agreement:
    """PixelCounts of a set of images, each from 0 to 1."""

    dice: float  # pixels of all images together
    iou: float
    dice_per_image: float  # mean over images
    iou_per_image: float

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


class PixelCounts:
    """Counts pixels image by image; nothing waits for the device before `result`."""

    def __init__(self, num_images: int, device: torch.device) -> None:
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
    """PixelCounts of a batch of whole masks, (B, …) bool each."""
    scores = PixelCounts(len(true), true.device)
    scores.add(predicted, true, torch.arange(len(true), device=true.device))
    return scores.result()


def _dice(counts: Tensor) -> Tensor:
    both = counts[:, _PREDICTED] + counts[:, _TRUE]
    return torch.where(both > 0, 2 * counts[:, _INTERSECTION] / both.clamp(min=1), 1.0)


def _iou(counts: Tensor) -> Tensor:
    union = counts[:, _PREDICTED] + counts[:, _TRUE] - counts[:, _INTERSECTION]
    return torch.where(union > 0, counts[:, _INTERSECTION] / union.clamp(min=1), 1.0)

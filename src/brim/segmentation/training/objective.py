"""The loss of a training step, batch norms for tiny batches, an estimate of memory, and validation scores.

Axes: B crops, S pixels of a side."""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brim.engine.training import current
from brim.errors import ConfigError
from brim.segmentation.objects.instances import heights

log = logging.getLogger("brim")

HEIGHT_WEIGHT = 3.0  # relative to the foreground: its error is small where it matters, between touching objects
_SMOOTH = 1.0  # pixels: an empty crop without predictions has Dice 1, not 0 / 0
_UNKNOWN_BYTES = 4096  # per pixel of a crop, for a network that does not run without data
SMALL = 64  # pixels; side of the crop on which the memory of a step is measured


def losses_of(task: str, maps: Tensor, labels: Tensor, most: int, kinds: Tensor | None = None) -> Tensor:
    """The loss of each crop for a task, (B,) float32; labels (B, S, S) int32 of 0 to `most`, 0 background.

    kinds (B, S, S) is the class of a pixel's object, from 1; 0: not known.
    """
    if task == "mask":
        return item_losses(maps, (labels > 0)[:, None])
    losses = instance_losses(maps[:, :2] if kinds is not None else maps, labels, most)
    return losses if kinds is None else losses + class_losses(maps[:, 2:], kinds)


def item_losses(logits: Tensor, true: Tensor) -> Tensor:
    """Cross entropy plus 1 − soft Dice of each crop, (B,) float32.

    logits  (B, 1, S, S)  any float
    true    (B, 1, S, S)  bool

    Cross entropy calibrates the probabilities, Dice keeps small cells from being outweighed by the background.
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


def instance_losses(maps: Tensor, labels: Tensor, most: int) -> Tensor:
    """As item_losses of the foreground, plus the error of the height; (B,) float32.

    maps    (B, 2, S, S)  foreground and height, as logits
    labels  (B, S, S)     int32 of 0 to `most`, 0 background
    """
    expected = [len(labels), 2, *labels.shape[1:]]
    if list(maps.shape) != expected:
        raise ConfigError(
            f"the network gave maps of shape {list(maps.shape)}, expected {expected}: foreground and height of a pixel"
        )
    losses = item_losses(maps[:, :1], (labels > 0)[:, None])
    height = torch.sigmoid(maps[:, 1].float())
    errors = F.smooth_l1_loss(height, heights(labels, most), beta=0.1, reduction="none")
    return losses + HEIGHT_WEIGHT * errors.flatten(1).mean(1)


def class_losses(maps: Tensor, kinds: Tensor) -> Tensor:
    """Cross entropy of the classes over the pixels whose class is known, (B,) float32; maps (B, classes, S, S)."""
    known = kinds > 0
    errors = F.cross_entropy(maps.float(), (kinds.long() - 1).clamp(min=0), reduction="none") * known
    return errors.flatten(1).sum(1) / known.flatten(1).sum(1).clamp(min=1)


def settle_norms(module: nn.Module, *, always: bool = False) -> None:
    """Let batch norms use their running statistics for channels of a single value, which have no variance.

    That happens with one crop in a batch, or in a part of one, at a layer that shrinks it to a pixel; torch raises.
    With always they keep the running statistics of the weights a training starts from: a few crops would spoil them.
    """

    def before(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        share, rows = current(), len(inputs[0])
        whole = rows if share is None else share.count * share.repeats(rows)  # of all ranks, over which the norm works
        values = whole * (inputs[0].numel() // max(1, rows * inputs[0].shape[1]))
        is_settled = norm.training and (always or values <= 1) and norm.running_mean is not None
        norm._brim_settled = is_settled  # type: ignore[assignment]
        if is_settled:
            norm.training = False

    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.register_forward_pre_hook(before)
            norm.register_forward_hook(_after, always_call=True)


def _after(norm: nn.Module, inputs: Any, output: Any) -> None:
    if getattr(norm, "_brim_settled", False):
        norm.training = True


def step_bytes(module: nn.Module, size: int, batch_size: int) -> int:
    """Bytes of a step on the device: weights, gradients, moments, tensors kept for the backward pass, in float32."""
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return 4 * weights + batch_size * _kept_bytes(module, size)


def _kept_bytes(module: nn.Module, size: int) -> int:
    """Bytes that autograd keeps for one crop, from a forward pass of a small one."""
    for device, side in (("cpu", min(size, SMALL)), ("meta", size)):  # torch loads its compiler for the meta device
        try:
            return round(_kept_on(module, device, side) * (size / side) ** 2)
        except Exception as failure:  # broad on purpose: a user's network may raise anything
            log.debug("the memory of a step cannot be measured on %s: %s", device, failure)
    return _UNKNOWN_BYTES * size * size


def _kept_on(module: nn.Module, device: str, side: int) -> int:
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    copied = copy.deepcopy(module).to(device).train()
    with torch.random.fork_rng([]), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        copied(torch.zeros(1, 3, side, side, device=device))
    for parameter in copied.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class PixelCounts:
    """Counts pixels per image on the device, for Dice and IoU."""

    def __init__(self, num_images: int, device: torch.device) -> None:
        if num_images < 1:
            raise ConfigError(f"num_images={num_images} must be at least 1")
        self._counts = torch.zeros(num_images, 3, dtype=torch.int64, device=device)  # in both, predicted, true

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

    def result(self) -> dict[str, float]:
        """Dice and IoU of all pixels together, and their means over images; an image without any has 1."""
        both, predicted, true = torch.cat([self._counts.sum(0, keepdim=True), self._counts]).double().T
        total = predicted + true
        dice = torch.where(total > 0, 2 * both / total.clamp(min=1), 1.0)
        iou = torch.where(total > 0, both / (total - both).clamp(min=1), 1.0)
        values = torch.stack([dice[0], iou[0], dice[1:].mean(), iou[1:].mean()]).tolist()
        return dict(zip(("dice", "iou", "dice_per_image", "iou_per_image"), values, strict=True))

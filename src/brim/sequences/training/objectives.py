"""Losses: contrastive loss between two augmented views, prediction of masked frames, and cross entropy of classes.

Axes: B sequences, T frames, D features, E embedding, K classes. Every loss is the mean over the sequences of a batch,
as the trainer expects, and is computed in float32 under any autocast.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.training import Batch, gathered, own_rows
from brim.sequences.config import SelfConfig
from brim.sequences.model import Encoder, FrameNorm, frame_mask


class SelfSupervised(nn.Module):
    """An encoder with a projection, in which views are compared, and a head that predicts masked frames."""

    def __init__(self, encoder: Encoder, config: SelfConfig | None = None) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config or SelfConfig()
        width, states = encoder.config.embedding, 2 * encoder.config.hidden
        self.projection = nn.Sequential(
            nn.Linear(width, width), FrameNorm(width), nn.GELU(), nn.Linear(width, self.config.projection)
        )
        self.foretell = nn.Linear(states, encoder.config.dim)  # predicts frames; the name is part of checkpoints

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of a batch of two_views, each () float32: contrast, reconstruction, and loss, their weighted sum."""
        views, lengths = batch["view"], batch["view_length"]
        encoded = self.encoder(views.flatten(0, 1), lengths.flatten())
        projected = self.projection(encoded.embedding).unflatten(0, (-1, 2))
        contrast = nt_xent(projected[:, 0], projected[:, 1], self.config.temperature)
        with torch.no_grad():
            target = self.encoder.normalised(batch["target"], frame_mask(lengths[:, 0], views.shape[2]))
        predicted = self.foretell(encoded.states.unflatten(0, (-1, 2))[:, 0])
        error = reconstruction(predicted, target, batch["hidden"])
        loss = self.config.contrast * contrast + self.config.reconstruction * error
        return {"contrast": contrast, "reconstruction": error, "loss": loss}


def self_supervised_loss(module: nn.Module, batch: Batch) -> Tensor:
    losses: dict[str, Tensor] = module(batch)
    return losses["loss"]


def classification_loss(
    module: nn.Module, batch: Batch, smoothing: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Cross entropy of a Classifier on `frames`, `length` and `label`; weight is (K,), of mean 1 over the items."""
    return cross_entropy(module(batch["frames"], batch["length"]), batch["label"], smoothing, weight)


def regression_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of a Classifier for numbers on `frames`, `length` and `label`, (B,) float."""
    return functional.mse_loss(module(batch["frames"], batch["length"]).float()[:, 0], batch["label"])


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross entropy: each view has to identify its twin among all others of the batch.

    first, second  (B, E)  two views of each sequence; a batch of one has no others, and a loss of 0

    A rank computes it for its own sequences, among those of all ranks.
    """
    with torch.autocast(first.device.type, enabled=False):
        mine = own_rows(len(first), first.device)
        sides = functional.normalize(torch.stack([first, second], 1).float(), dim=2)
        everyone = gathered(sides)  # (B, 2, E) of the whole batch
        num = len(everyone)
        views = torch.cat([everyone[:, 0], everyone[:, 1]])
        logits = torch.cat([sides[:, 0], sides[:, 1]]) @ views.T / temperature
        itself = torch.cat([mine, mine + num])
        twin = torch.cat([mine + num, mine])
        return functional.cross_entropy(logits.scatter(1, itself[:, None], -torch.inf), twin)


def reconstruction(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """Mean squared error of the masked frames of each sequence; 0 for a sequence without any.

    predicted, target  (B, T, D)  any float
    hidden             (B, T)     bool, only existing frames
    """
    errors = functional.mse_loss(predicted.float(), target.float(), reduction="none").mean(-1)
    per_item = (errors * hidden).sum(1) / hidden.sum(1).clamp(min=1)
    return per_item.mean()


def cross_entropy(logits: Tensor, label: Tensor, smoothing: float = 0.0, weight: Tensor | None = None) -> Tensor:
    """Mean cross entropy of logits (B, K) and labels (B,) int64; weight, (K,), multiplies that of each class."""
    if weight is None:
        return functional.cross_entropy(logits.float(), label, label_smoothing=smoothing)
    each = functional.cross_entropy(logits.float(), label, label_smoothing=smoothing, reduction="none")
    return (each * weight[label]).mean()


def class_weights(labels: Tensor, num_classes: int, power: float) -> Tensor | None:
    """(K,) float32: inverse frequency to a power, of mean 1 over the items; None if all are 1."""
    counts = torch.bincount(labels, minlength=num_classes).float()
    weight = counts.clamp(min=1) ** -power
    weight = weight * len(labels) / (weight * counts).sum()
    return None if torch.allclose(weight[counts > 0], torch.ones(())) else weight

"""What training aims at: views of one sequence that meet, hidden frames that are foretold, classes that are right.

Axes: B sequences, T frames, D features, E embedding, K classes. Every loss is the mean over the sequences of a batch,
as engine.trainer wants it, and is computed in float32 under any autocast.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.training import current, gathered, own_rows
from brim.sequences.config import SelfConfig
from brim.sequences.model.network import Encoder, FrameNorm, frame_mask
from brim.sequences.training.augment import Batch


class SelfSupervised(nn.Module):
    """An encoder with what it needs to learn without labels: a projection to compare and a head to foretell."""

    def __init__(self, encoder: Encoder, config: SelfConfig | None = None) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config or SelfConfig()
        width, states = encoder.config.embedding, 2 * encoder.config.hidden
        self.projection = nn.Sequential(
            nn.Linear(width, width), FrameNorm(width), nn.GELU(), nn.Linear(width, self.config.projection)
        )
        self.foretell = nn.Linear(states, encoder.config.dim)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Losses by name of a batch of augment.two_views, each () float32: contrast, reconstruction, loss."""
        views, lengths = batch["view"], batch["view_length"]
        encoded = self.encoder(views.flatten(0, 1), lengths.flatten())
        projected = self.projection(encoded.embedding).unflatten(0, (-1, 2))
        contrast = nt_xent(projected[:, 0], projected[:, 1], self.config.temperature)
        with torch.no_grad():
            target = self.encoder.normalised(batch["target"], frame_mask(lengths[:, 0], views.shape[2]))
        foretold = self.foretell(encoded.states.unflatten(0, (-1, 2))[:, 0])
        missed = reconstruction(foretold, target, batch["hidden"])
        loss = self.config.contrast * contrast + self.config.reconstruction * missed
        return {"contrast": contrast, "reconstruction": missed, "loss": loss}


def self_supervised_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Loss of a SelfSupervised module, for engine.trainer."""
    losses: dict[str, Tensor] = module(batch)
    return losses["loss"]


def classification_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a Classifier on `frames`, `length` and `label`, for engine.trainer."""
    return cross_entropy(module(batch["frames"], batch["length"]), batch["label"])


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross entropy: each view must find its twin among all others of the batch.

    first, second  (B, E)  two views of each sequence; a batch of one has no others, and a loss of 0
    """
    with torch.autocast(first.device.type, enabled=False):
        if current() is not None:
            return _nt_xent_shared(first, second, temperature)
        views = functional.normalize(torch.cat([first, second]).float(), dim=1)
        logits = views @ views.T / temperature
        same = torch.eye(len(views), dtype=torch.bool, device=views.device)
        twin = torch.arange(len(views), device=views.device).roll(len(first))
        return functional.cross_entropy(logits.masked_fill(same, -torch.inf), twin)


def _nt_xent_shared(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """The same of this rank's sequences, among those of all ranks."""
    mine = own_rows(len(first), first.device)
    sides = functional.normalize(torch.stack([first, second], 1).float(), dim=2)
    everyone = gathered(sides)  # (B, 2, E) of the whole batch
    num = len(everyone)
    views = torch.cat([everyone[:, 0], everyone[:, 1]])
    logits = torch.cat([sides[:, 0], sides[:, 1]]) @ views.T / temperature
    itself = torch.cat([mine, mine + num])
    twin = torch.cat([mine + num, mine])
    return functional.cross_entropy(logits.scatter(1, itself[:, None], -torch.inf), twin)


def reconstruction(foretold: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """Mean squared error of the hidden frames of each sequence; one without any counts as 0.

    foretold, target  (B, T, D)  any float
    hidden            (B, T)     bool, only frames that exist
    """
    errors = functional.mse_loss(foretold.float(), target.float(), reduction="none").mean(-1)
    per_item = (errors * hidden).sum(1) / hidden.sum(1).clamp(min=1)
    return per_item.mean()


def cross_entropy(logits: Tensor, label: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy of logits (B, K) and labels (B,) int64."""
    return functional.cross_entropy(logits.float(), label, label_smoothing=smoothing)

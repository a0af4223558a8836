"""A network that somebody brings for sequences: normalised frames and lengths in, one output for each class out.

The factory is called with dim, the features of a frame, and classes; its module takes frames (B, T, dim), zeros behind
each end, and length (B,), and returns logits (B, classes). A traced program has that signature too.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from brim.engine.networks import NetworkSource, ProgramModule, factory_of, find_source, make_module
from brim.errors import ConfigError, with_article
from brim.sequences.model.network import Network, frame_mask

log = logging.getLogger("brim")


class BroughtClassifier(Network):
    """Normalises frames by the statistics of the training items, and leaves the rest to the module."""

    shift: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, dim: int, classes: int) -> None:
        super().__init__()
        self.module, self.classes, self._dim = module, classes, dim
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    @property
    def dim(self) -> int:
        return self._dim

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """mean and std (D,) float; a constant feature is only shifted."""
        self.scale.copy_(torch.where(std > 0, 1 / std, 1.0))
        self.shift.copy_(-mean * self.scale)

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """Logits, (B, K), from frames (B, T, D) and length (B,) int64."""
        valid = frame_mask(length, frames.shape[1]).unsqueeze(-1)
        normalised = torch.addcmul(self.shift, frames.to(self.shift.dtype), self.scale).masked_fill(~valid, 0)
        logits: Tensor = self.module(normalised, length)
        return logits

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """The logits are the embedding too: of what is inside the module, nothing is known."""
        logits = self(frames, length).float()
        return logits, logits


def make_classifier(source: NetworkSource, dim: int, classes: int) -> BroughtClassifier:
    """The network of a source, run once on a small batch to see that it fits."""
    settings: dict[str, Any] = {} if source.kind == "program" else {"dim": dim, "classes": classes}
    module = make_module(factory_of(source), source.reference, **settings)
    if isinstance(module, ProgramModule) and not module.trainable:
        raise ConfigError(f"{source.path} is TorchScript, which can only predict; give a .pt2", field="network")
    brought = BroughtClassifier(module, dim, classes)
    _check(brought, source.reference)
    return brought


@torch.no_grad()
def _check(brought: BroughtClassifier, name: str) -> None:
    was_training = brought.training
    brought.eval()
    for num, frames in ((1, 7), (3, 12)):
        shape = [num, frames, brought.dim]
        try:
            logits = brought(torch.zeros(shape), torch.tensor([frames] * (num - 1) + [frames // 2]))
        except Exception as failure:  # of other people's code
            reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0][:200]}"
            raise ConfigError(f"{name} does not accept frames of shape {shape}: {reason}", field="network") from failure
        got = list(logits.shape) if isinstance(logits, Tensor) else f"{with_article(logits)}"
        if got != [num, brought.classes]:
            raise ConfigError(
                f"{name} turned frames of shape {shape} into {got}, expected {[num, brought.classes]}; return a logit "
                "for each class",
                field="network",
            )
    brought.train(was_training)


def remembered(values: Any, run: Any, *, strict: bool = False) -> NetworkSource | None:
    """The source that a run's description names, as it is today; one that has changed is said, or refused if strict."""
    source = NetworkSource.of(values)
    if source is None:
        return None
    now = find_source(source.package or source.reference)
    if now.sha256 != source.sha256:
        text = f"{now.path} has changed since {run} was trained: its SHA-256 was {source.sha256[:16]} and is " + (
            f"{now.sha256[:16]} now"
        )
        if strict:
            raise ConfigError(text, field="network", code="changed", hint="restore the file, or train again")
        log.warning("%s", text)
    return now

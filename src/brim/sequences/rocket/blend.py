"""The average of rocket's and a network's probabilities, or numbers.

Axes: B sequences, T frames, D channels, E embedding, K classes.
"""

import math

import torch
from torch import Tensor

from brim.sequences.model import Classifier, Committee, Network
from brim.sequences.rocket.model import Rocket


class RocketBlend(Network):
    def __init__(self, rocket: Rocket, network: Classifier | Committee, share: float) -> None:
        """share, between 0 and 1, is the weight of the network."""
        super().__init__()
        self.rocket, self.network, self.share = rocket, network, min(max(share, 1e-6), 1 - 1e-6)
        self.is_regression = rocket.is_regression

    @property
    def dim(self) -> int:
        return self.rocket.dim

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """Log probabilities, (B, K), or numbers, (B, 1)."""
        return self.outputs_of(frames, length)[1]

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Both embeddings side by side, and log probabilities or numbers."""
        ours, logits = self.rocket.outputs_of(frames, length)
        theirs, others = self.network.outputs_of(frames, length)
        embedding = torch.cat([ours, theirs.float()], 1)
        if self.is_regression:
            return embedding, torch.lerp(logits, others.float(), self.share)
        parts = [
            logits.log_softmax(-1) + math.log(1 - self.share),
            others.float().log_softmax(-1) + math.log(self.share),
        ]
        return embedding, torch.stack(parts).logsumexp(0)

"""Convolutions, a bidirectional LSTM and attention pooling that turn a sequence of any length into one vector.

Axes: B sequences, T frames, D features, C channels, H hidden units of a direction, E embedding, K classes. A sequence
gives the same result alone and in any longer batch: every layer that looks at neighbours sees zeros behind the end,
norms work within a frame, and attention weighs only existing frames. Nothing waits for the device and no shape depends
on a value there, so a captured step can contain it.
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.training import Dropout
from brim.errors import ConfigError
from brim.sequences.config import SequenceConfig
from brim.sequences.model.lstm import BiLstm


class Encoded(NamedTuple):
    embedding: Tensor  # (B, E)
    states: Tensor  # (B, T, 2 H), 0 behind each end


class Encoder(nn.Module):
    """Maps frames to an embedding of each sequence and a state of each frame."""

    shift: Tensor
    scale: Tensor

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("shift", torch.zeros(config.dim))
        self.register_buffer("scale", torch.ones(config.dim))
        widths = [config.dim] + config.convolutions * [config.channels]
        self.convolutions = nn.ModuleList(_Convolution(before, after, config) for before, after in pairwise(widths))
        self.lstm = BiLstm(
            config.channels, config.hidden, config.layers,
            dropout=config.dropout, reverse=config.reverse, concurrent=config.concurrent,
        )  # fmt: skip
        self.pool = AttentionPool(2 * config.hidden, config.attention)
        self.dropout = Dropout(config.dropout)
        self.embed = nn.Linear(2 * config.hidden, config.embedding)

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set the normalisation from training data; it is saved with the weights.

        mean  (D,)  float
        std   (D,)  float; a constant feature has 0 and is only shifted
        """
        if mean.shape != self.shift.shape or std.shape != self.shift.shape:
            raise ConfigError(
                f"statistics of {list(mean.shape)} and {list(std.shape)} features, the encoder has {self.config.dim}"
            )
        self.scale.copy_(torch.where(std > 0, 1 / std, 1.0))
        self.shift.copy_(-mean * self.scale)

    def forward(self, frames: Tensor, length: Tensor) -> Encoded:
        """Encode a padded batch; every sequence has at least one frame.

        frames  (B, T, D)  any float; values behind the end have no influence
        length  (B,)       int64
        """
        if frames.shape[-1] != self.config.dim:
            raise ConfigError(f"frames have {frames.shape[-1]} features, the encoder expects {self.config.dim}")
        valid = frame_mask(length, frames.shape[1])
        x = self.normalised(frames, valid)
        for index, convolution in enumerate(self.convolutions):
            if index:
                x = x.masked_fill(~valid.unsqueeze(-1), 0)
            x = convolution(x)
        states = self.lstm(x, length)
        return Encoded(self.embed(self.dropout(self.pool(states, valid))), states)

    def normalised(self, frames: Tensor, valid: Tensor) -> Tensor:
        """Input of the first convolution: in its precision, 0 where valid, (B, T) bool, is false."""
        dtype = _working_dtype(frames, self.shift.dtype)
        if not self.config.normalise:
            return frames.to(dtype).masked_fill(~valid.unsqueeze(-1), 0)
        if frames.requires_grad and torch.is_grad_enabled():
            whole = torch.addcmul(self.shift, frames.to(self.shift.dtype), self.scale).to(dtype)
        else:  # computed in float32, written once: this is the widest tensor
            whole = torch.addcmul(self.shift, frames, self.scale, out=torch.empty_like(frames, dtype=dtype))
        return whole.masked_fill_(~valid.unsqueeze(-1), 0)


class Classifier(nn.Module):
    """An encoder with a classification head: an MLP, or one linear layer as a probe."""

    def __init__(
        self,
        encoder: Encoder,
        classes: int,
        *,
        width: int | None = None,  # of the MLP's hidden layer; None: as the embedding
        linear: bool = False,  # one linear layer instead of the MLP
        dropout: float = 0.2,
        frozen: bool = False,  # the encoder keeps its weights and stays in eval mode; only the head learns
    ) -> None:
        super().__init__()
        if classes < 2:
            raise ConfigError("must be at least 2", field="classes", value=classes, code="out_of_range")
        self.encoder, self.classes, self.frozen = encoder, classes, frozen
        if frozen:
            encoder.requires_grad_(False).eval()
        inputs = encoder.config.embedding
        width = width or inputs
        self.head: nn.Module = nn.Linear(inputs, classes)
        if not linear:
            layers = (FrameNorm(inputs), nn.GELU(), Dropout(dropout), nn.Linear(inputs, width))
            self.head = nn.Sequential(*layers, nn.GELU(), Dropout(dropout), nn.Linear(width, classes))

    def train(self, mode: bool = True) -> Self:
        """A frozen encoder stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """Logits, (B, K); `head` alone takes embeddings."""
        logits: Tensor = self.head(self.embedding(frames, length))
        return logits

    def embedding(self, frames: Tensor, length: Tensor) -> Tensor:
        """(B, E)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            embedding: Tensor = self.encoder(frames, length).embedding
        return embedding


class Committee(nn.Module):
    """An ensemble of separately trained classifiers of one shape, which averages their probabilities."""

    def __init__(self, members: Iterable[Classifier]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    @property
    def encoder(self) -> Encoder:
        first: Encoder = self.members[0].encoder  # type: ignore[assignment]
        return first

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """Log probabilities, (B, K)."""
        return self.head(self.embedding(frames, length))

    def embedding(self, frames: Tensor, length: Tensor) -> Tensor:
        """The embeddings of all members, concatenated: (B, members E)."""
        return torch.cat([member.embedding(frames, length) for member in self.members], 1)  # type: ignore[operator]

    def head(self, embedding: Tensor) -> Tensor:
        """Log probabilities, (B, K), from embeddings."""
        parts = embedding.chunk(len(self.members), 1)
        logits = [member.head(part) for member, part in zip(self.members, parts, strict=True)]  # type: ignore[operator]
        return torch.stack(logits).float().log_softmax(-1).logsumexp(0) - math.log(len(logits))


Network = Classifier | Committee


class AttentionPool(nn.Module):
    """A weighted mean of the existing frames; each weight depends on the frame's own state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, width)
        self.score = nn.Linear(width, 1, bias=False)  # a bias would not change a softmax

    def forward(self, states: Tensor, valid: Tensor) -> Tensor:
        """(B, I) from states (B, T, I) and valid (B, T) bool; zeros where no frame is valid."""
        return torch.bmm(self.weights(states, valid).to(states.dtype).unsqueeze(1), states).squeeze(1)

    def weights(self, states: Tensor, valid: Tensor) -> Tensor:
        """(B, T) float32 that sum to 1 over each sequence's frames and are 0 elsewhere."""
        # the LSTM's output has time as the first axis in memory; in that order linear layers need no copy
        scores = self.score(torch.tanh(self.hidden(states.transpose(0, 1)))).squeeze(-1).transpose(0, 1).float()
        # the lowest number instead of -inf: a row without frames would become NaN
        weights: Tensor = scores.masked_fill(~valid, torch.finfo(torch.float32).min).softmax(-1)
        return weights * valid


class FrameNorm(nn.LayerNorm):
    """Layer norm over the last axis whose output has its input's precision; under autocast it would be float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width)

    def forward(self, input: Tensor) -> Tensor:
        """Mean and variance are still computed in float32."""
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class _Convolution(nn.Module):
    """Convolution over frames, norm, GELU and dropout; (B, T, C) to (B, T, C)."""

    def __init__(self, before: int, after: int, config: SequenceConfig) -> None:
        super().__init__()
        # Two-dimensional with a height of 1: one-dimensional convolutions copy their input to channels-first.
        self.convolution = nn.Conv2d(before, after, (1, config.kernel), padding=(0, config.kernel // 2))
        self.convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = FrameNorm(after)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.convolution(x.transpose(1, 2).unsqueeze(2))  # (B, C, 1, T), channels last in memory
        dropped: Tensor = self.dropout(functional.gelu(self.norm(mixed.squeeze(2).transpose(1, 2).contiguous())))
        return dropped


def frame_mask(length: Tensor, num_frames: int) -> Tensor:
    """(B, T) bool: true for the frames within each length."""
    return torch.arange(num_frames, device=length.device) < length.unsqueeze(-1)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _working_dtype(frames: Tensor, otherwise: torch.dtype) -> torch.dtype:
    kind = frames.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else otherwise

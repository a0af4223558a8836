"""Convolutions, a bidirectional LSTM and attention pooling that turn a sequence of any length into one vector.

Axes: B sequences, T frames, D features, C channels, H hidden units of a direction, E embedding, K classes. A sequence
gives the same result alone and in any longer batch: every layer that looks at neighbours sees zeros behind the end,
norms work within a frame or use stored statistics, and attention weighs only existing frames. Nothing waits for the
device and no shape depends on a value there, so a captured step can contain it.
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

_MOMENTUM = 0.1  # of the statistics of batches that are used after training


class Encoded(NamedTuple):
    embedding: Tensor  # (B, E)
    states: Tensor  # (B, T / stride, 2 H), 0 behind each end


class Encoder(nn.Module):
    """Maps frames to an embedding of each sequence and a state of each frame."""

    shift: Tensor
    scale: Tensor

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("shift", torch.zeros(config.dim))
        self.register_buffer("scale", torch.ones(config.dim))
        self.layer_scores = nn.Parameter(torch.zeros(config.stack)) if config.stack > 1 else None
        widths = [config.dim // config.stack] + config.convolutions * [config.channels]
        self.stride = config.stride or 1
        self.convolutions = nn.ModuleList(
            _Convolution(before, after, config, 1 if number else self.stride)
            for number, (before, after) in enumerate(pairwise(widths))
        )
        self.lstm = BiLstm(
            config.channels, config.hidden, config.layers,
            dropout=config.dropout, reverse=config.reverse, concurrent=config.concurrent,
        )  # fmt: skip
        self.pool = AttentionPool(2 * config.hidden, config.attention)
        self.dropout = Dropout(config.dropout)
        beside = 2 * config.channels if config.front == "residual" else 0
        self.embed = nn.Linear(2 * config.hidden + beside, config.embedding)

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
        x = self._mixed(self.normalised(frames, valid))
        for index, convolution in enumerate(self.convolutions):
            if index:
                x = x.masked_fill(~valid.unsqueeze(-1), 0)
            elif self.stride > 1:
                length = (length + self.stride - 1) // self.stride
                valid = frame_mask(length, -(-x.shape[1] // self.stride))
            shortcut = x if index and self.config.front == "residual" else None
            x = convolution(x, valid)
            x = x if shortcut is None else x + shortcut
        states = self.lstm(x, length)
        pooled = self.pool(states, valid)
        if self.config.front == "residual":
            pooled = torch.cat([pooled, *_mean_and_maximum(x, valid)], 1)
        return Encoded(self.embed(self.dropout(pooled)), states)

    @property
    def layer_weights(self) -> Tensor | None:
        """(L,) float, learned, with sum 1: the share of each layer; None for frames of a single one."""
        return None if self.layer_scores is None else self.layer_scores.softmax(0)

    def _mixed(self, frames: Tensor) -> Tensor:
        """(B, T, D) from (B, T, L D): the weighted sum of the layers."""
        weights = self.layer_weights
        if weights is None:
            return frames
        return torch.einsum("btld,l->btd", frames.view(*frames.shape[:2], len(weights), -1), weights.to(frames.dtype))

    def normalised(self, frames: Tensor, valid: Tensor) -> Tensor:
        """Input of the first convolution: in its precision, 0 where valid, (B, T) bool, is false."""
        kind = frames.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.shift.dtype
        if not self.config.normalise:
            return frames.to(dtype).masked_fill(~valid.unsqueeze(-1), 0)
        if frames.requires_grad and torch.is_grad_enabled():
            whole = torch.addcmul(self.shift, frames.to(self.shift.dtype), self.scale).to(dtype)
        else:  # computed in float32, written once: this is the widest tensor
            whole = torch.addcmul(self.shift, frames, self.scale, out=torch.empty_like(frames, dtype=dtype))
        return whole.masked_fill_(~valid.unsqueeze(-1), 0)


class Network(nn.Module):
    """A trained model: frames and lengths in, embeddings and outputs out."""

    is_regression = False  # outputs are values, else logits of classes or clusters

    @property
    def dim(self) -> int:
        """Features of a frame."""
        raise NotImplementedError

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, E) and outputs (B, K) of a padded batch: frames (B, T, D), length (B,) int64."""
        raise NotImplementedError


class Classifier(Network):
    """An encoder with a head for classes, or for one number: an MLP, or one linear layer as a probe."""

    def __init__(
        self,
        encoder: Encoder,
        classes: int,
        *,
        width: int | None = None,  # of the MLP's hidden layer; None: as the embedding
        linear: bool = False,  # one linear layer instead of the MLP
        dropout: float = 0.2,
        frozen: bool = False,  # the encoder keeps its weights and stays in eval mode; only the head learns
        is_regression: bool = False,  # one output, a number
    ) -> None:
        super().__init__()
        if is_regression:
            classes = 1
        elif classes < 2:
            raise ConfigError("must be at least 2", field="classes", value=classes, code="out_of_range")
        self.is_regression = is_regression
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
        """Logits, (B, K), or numbers, (B, 1); `head` alone takes embeddings."""
        logits: Tensor = self.head(self.embedding(frames, length))
        return logits

    @property
    def dim(self) -> int:
        return self.encoder.config.dim

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embedding(frames, length)
        return embedding, self.head(embedding)

    @torch.no_grad()
    def rescale(self, mean: float, std: float) -> None:
        """Give numbers, learned with mean 0 and deviation 1, in their own unit."""
        last = self.head if isinstance(self.head, nn.Linear) else self.head[-1]  # type: ignore[index]
        last.weight.mul_(std)
        last.bias.mul_(std).add_(mean)

    def embedding(self, frames: Tensor, length: Tensor) -> Tensor:
        """(B, E)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            embedding: Tensor = self.encoder(frames, length).embedding
        return embedding


class Committee(Network):
    """An ensemble of separately trained networks of one shape, which averages their probabilities or numbers."""

    def __init__(self, members: Iterable[Classifier]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.is_regression = bool(self.members[0].is_regression)

    @property
    def encoder(self) -> Encoder:
        first: Encoder = self.members[0].encoder  # type: ignore[assignment]
        return first

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """Log probabilities, (B, K), or numbers, (B, 1)."""
        return self.head(self.embedding(frames, length))

    @property
    def dim(self) -> int:
        return self.encoder.config.dim

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embedding(frames, length)
        return embedding, self.head(embedding)

    def embedding(self, frames: Tensor, length: Tensor) -> Tensor:
        """The embeddings of all members, concatenated: (B, members E)."""
        return torch.cat([member.embedding(frames, length) for member in self.members], 1)  # type: ignore[operator]

    def head(self, embedding: Tensor) -> Tensor:
        """Log probabilities, (B, K), or numbers, (B, 1), from embeddings."""
        parts = embedding.chunk(len(self.members), 1)
        logits = [member.head(part) for member, part in zip(self.members, parts, strict=True)]  # type: ignore[operator]
        if self.is_regression:
            return torch.stack(logits).float().mean(0)
        return torch.stack(logits).float().log_softmax(-1).logsumexp(0) - math.log(len(logits))


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


class MaskedBatchNorm(nn.Module):
    """Normalises each channel by its mean and deviation over the existing frames of a batch, afterwards of training.

    What all sequences have in common is taken away, which lets a few of them show how they differ.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (B, T, C) and valid (B, T) bool; in float32, whatever the precision of x."""
        with torch.autocast(x.device.type, enabled=False):
            values, mean, variance = x.float(), self.mean, self.variance
            if self.training:
                mask, count = valid.unsqueeze(-1), valid.sum().clamp(min=1)
                mean = (values * mask).sum((0, 1)) / count
                variance = ((values - mean) * mask).square().sum((0, 1)) / count
                with torch.no_grad():
                    self.mean.lerp_(mean, _MOMENTUM)
                    self.variance.lerp_(variance, _MOMENTUM)
            scale = self.weight * (variance + 1e-5).rsqrt()
            return torch.addcmul(self.bias - mean * scale, values, scale).to(x.dtype)


def _mean_and_maximum(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C) each, of x (B, T, C) over the frames that exist."""
    mask = valid.unsqueeze(-1)
    mean = (x * mask).sum(1) / valid.sum(1).clamp(min=1).unsqueeze(-1)
    return mean.to(x.dtype), x.masked_fill(~mask, torch.finfo(x.dtype).min).amax(1)


class _Convolution(nn.Module):
    """Convolution over frames, norm, GELU and dropout; (B, T, C) to (B, T / stride, C)."""

    def __init__(self, before: int, after: int, config: SequenceConfig, stride: int = 1) -> None:
        super().__init__()
        kernel = config.kernel if stride == 1 else max(config.kernel, 2 * stride + 1)  # every frame is seen
        # Two-dimensional with a height of 1: one-dimensional convolutions copy their input to channels-first.
        self.convolution = nn.Conv2d(before, after, (1, kernel), stride=(1, stride), padding=(0, kernel // 2))
        self.convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = FrameNorm(after) if config.front == "plain" else MaskedBatchNorm(after)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """valid, (B, T / stride) bool, are the frames that exist afterwards."""
        mixed = self.convolution(x.transpose(1, 2).unsqueeze(2))  # (B, C, 1, T), channels last in memory
        mixed = mixed.squeeze(2).transpose(1, 2).contiguous()
        normed = self.norm(mixed, valid) if isinstance(self.norm, MaskedBatchNorm) else self.norm(mixed)
        dropped: Tensor = self.dropout(functional.gelu(normed))
        return dropped


def frame_mask(length: Tensor, num_frames: int) -> Tensor:
    """(B, T) bool: true for the frames within each length."""
    return torch.arange(num_frames, device=length.device) < length.unsqueeze(-1)

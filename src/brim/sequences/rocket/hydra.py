"""Hydra features of ragged, multivariate sequences: how often a random kernel answers most strongly in its group.

Axes: b sequences of a block, T frames, P positions, D channels, J dilations, G groups of 8 kernels, F features.

A group is eight random kernels of nine weights. At each frame the one with the largest response gains that response,
and the one with the smallest gains a count; half of the groups see the sequence, half its steps. Dempster, Schmidt,
Webb: "Hydra: competing convolutional kernels", Data Mining and Knowledge Discovery 37, 2023, arXiv 2203.13652.

Values are rounded to multiples of 2⁻¹² and weights are whole numbers, so that every response is exact whatever the
order of its sum: the result is the same to the bit alone, in any batch, behind any padding, and on any device. Of a
sequence of more than 2048 frames every second one is a position, of more than 4096 every third, and so on.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from brim.engine.device import CoreThreads
from brim.sequences.rocket.kernels import Floats, Integers, blocks, longest_of, strides_of

KERNELS = 8  # of a group
MAX_GROUPS = 32  # of a view, at each dilation
_TAPS = 9
_MAX_CHANNELS = 8  # summed by one group
GRID = 4096.0
LARGEST = 8.0  # standard deviations; what is beyond is cut off
WEIGHTS = 256  # sum of a kernel's absolute weights, at most: a response is up to 2²³ multiples of the grid
_SPLIT = 4096.0
_MOST = 2048  # positions of a sequence: their shares are known well enough
_VIEWS = 2  # the sequence and its steps
_FRAMES = {"cpu": 2048, "cuda": 1 << 19}  # of sequences convolved at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hydra:
    """Fixed kernels, and the scale of steps in the training data."""

    dilations: Tensor  # (J,) int64
    weights: Tensor  # (2, J, G, 8, 9) float32, whole numbers
    channels: Tensor  # (2, J, G, M) int64 that a group sums
    scale: Tensor  # (D,) float32 of steps

    @property
    def num_features(self) -> int:
        return 2 * self.weights[..., 0].numel()

    @classmethod
    def fit(cls, sequences: Sequence[Floats], *, num_features: int = 10_000, seed: int = 0) -> Self:
        """Draw kernels at dilations up to the length; sequences are (T, D) float32 each, normalised."""
        dim = sequences[0].shape[1]
        longest = longest_of(np.array([len(one) for one in sequences]))
        count = int(np.log2((max(longest, _TAPS) - 1) / (_TAPS - 1))) + 1
        groups = min(MAX_GROUPS, max(1, num_features // (2 * _VIEWS * KERNELS * count)))
        rng = np.random.default_rng(seed)
        weights = rng.standard_normal((_VIEWS, count, groups, KERNELS, _TAPS))
        weights -= weights.mean(-1, keepdims=True)
        weights = np.trunc(weights * (WEIGHTS / np.abs(weights).sum(-1, keepdims=True)))
        weights[..., _TAPS // 2] -= weights.sum(-1)  # the response to a constant is 0
        most = min(_MAX_CHANNELS, max(1, dim // 2))
        channels = rng.permuted(np.tile(np.arange(dim), (_VIEWS, count, groups, 1)), axis=-1)[..., :most]
        steps = [np.square(np.diff(one, axis=0), dtype=np.float64) for one in sequences]
        square = sum(one.sum(0) for one in steps) / max(1, sum(map(len, steps)))
        scale = np.where(square > 0, 1 / np.sqrt(np.maximum(square, 1e-30)), 0.0)
        return cls(
            dilations=2 ** torch.arange(count),
            weights=torch.from_numpy(weights).float(),
            channels=torch.from_numpy(np.ascontiguousarray(channels)),
            scale=torch.from_numpy(scale).float(),
        )

    @torch.no_grad()
    def features_on(self, frames: Tensor, length: Tensor) -> Tensor:
        """(B, F) float32 of a padded batch on its device.

        frames  (B, T, D)  float32, normalised; values behind the end have no influence
        length  (B,)       int64
        """
        out = torch.empty(len(frames), self.num_features, device=frames.device)
        lengths = length.cpu().numpy()

        def of(rows: Integers) -> Tensor:
            own, at = lengths[rows], torch.from_numpy(rows).to(frames.device)
            return self._of_block(frames[at, : own.max()].float().transpose(1, 2), length[at], own)

        parts = list(blocks(lengths, _FRAMES[frames.device.type], _MOST))
        with nullcontext() if frames.is_cuda else CoreThreads() as threads:
            for rows, values in zip(parts, map(of, parts) if threads is None else threads.map(of, parts), strict=True):
                out[torch.from_numpy(rows).to(frames.device)] = values
        return out

    @torch.no_grad()
    def _of_block(self, x: Tensor, length: Tensor, lengths: Integers) -> Tensor:
        """(b, F) of x (b, D, T), of one stride."""
        stride = int(strides_of(lengths, _MOST)[0])
        scale = self.scale.to(x.device)[:, None]
        steps = functional.pad((x[..., 1:] - x[..., :-1]) * scale, (0, 1))
        num_positions = -(-x.shape[2] // stride)
        buffers = torch.empty(3, *self.weights.shape[2:4], len(x), num_positions, device=x.device)
        parts = []
        for view, (values, num) in enumerate(((x, length), (steps, length - 1))):
            inside = torch.arange(x.shape[2], device=x.device) < num[:, None]
            values = values.masked_fill(~inside[:, None], 0).transpose(0, 1).contiguous()
            counted = inside[:, ::stride]
            total = counted.sum(1).clamp(min=1).double()
            for number in range(len(self.dilations)):
                self._respond(values, view, number, stride, buffers[0])
                parts += [(side.double() / total).clamp(min=0).sqrt() for side in _compete(counted, *buffers)]
        return torch.cat([part.float().flatten(0, 1) for part in parts]).T

    def _respond(self, values: Tensor, view: int, number: int, stride: int, out: Tensor) -> None:
        """Writes the responses, multiples of the grid, into out (G, 8, b, P); values is (D, b, T)."""
        weights, dilation = self.weights[view, number].to(values.device), int(self.dilations[number])
        mixed = values
        if len(values) > 1:
            channels = self.channels[view, number].to(values.device)
            mixed = values[channels[:, 0]]  # added one after another: the order is part of the result
            for other in channels.T[1:]:
                mixed = mixed + values[other]
            mixed = mixed / float(channels.shape[1]) ** 0.5
        grid = (mixed.clamp(-LARGEST, LARGEST) * GRID).round()
        padded = functional.pad(grid, (4 * dilation, 4 * dilation))
        spans = [padded[..., tap * dilation :][..., : values.shape[2] : stride] for tap in range(_TAPS)]
        taps = torch.stack(spans, 1).flatten(2)  # (G or 1, 9, b P)
        if values.is_cuda:  # in float32 a user's choice of TF32 would round them
            out.copy_((weights.double() @ taps.double()).view_as(out))
        elif len(values) > 1:
            torch.bmm(weights, taps, out=out.flatten(2))
        else:
            torch.mm(weights.flatten(0, 1), taps[0], out=out.flatten(2).flatten(0, 1))


def _compete(counted: Tensor, response: Tensor, wins: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """What each kernel gains where it is the largest, and how often it is the smallest: (G, 8, b) each.

    counted   (b, P)        bool: positions of the sequence
    response  (G, 8, b, P)  multiples of the grid; wins and spare are overwritten
    """
    largest, smallest = response.amax(1), response.amin(1)
    coarse = (largest / _SPLIT).round()  # float32 adds 2048 numbers of 12 bits exactly
    torch.eq(response, largest.masked_fill(~counted, torch.nan)[:, None], out=wins)
    gain = torch.mul(wins, coarse[:, None], out=spare).sum(-1).double() * _SPLIT
    gain += torch.mul(wins, (largest - coarse * _SPLIT)[:, None], out=spare).sum(-1)
    count = torch.eq(response, smallest.masked_fill_(~counted, torch.nan)[:, None], out=wins).sum(-1)
    return gain / (GRID * WEIGHTS), count

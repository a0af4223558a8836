"""Layers the networks share: convolution with its norm, attention over channels, pixels and skips.

Axes: B images, C channels, H rows, W columns; every layer takes any H and W.
Each attention follows its paper: squeeze-excite (Hu et al., 2018), CBAM (Woo et al., 2018), attention gates
(Oktay et al., 2018), SimAM (Yang et al., 2021), self-attention (Vaswani et al., 2017)."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brim.segmentation.networks import fused
from brim.segmentation.networks.fused import AttentionWeights


class ConvNorm(nn.Module):
    """Convolution, batch norm and ReLU; `residual` is added before the ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.folded = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv = self.conv
        if self.folded:
            bias = cast(Tensor, conv.bias)
            return fused.conv_bias_relu(x, conv.weight, bias, conv.stride[0], conv.kernel_size[0] // 2, residual)
        x = self.norm(conv(x))
        return F.relu(x if residual is None else x + residual)

    def fold(self) -> None:
        """Move the norm's running statistics into the convolution; for inference only, in float32."""
        self.conv.bias = nn.Parameter(_fold(self), requires_grad=False)
        self.folded = True


class ProjectionConv(nn.Module):
    """Convolution and batch norm without ReLU, for a shortcut or branch that changes shape.

    Once folded, it leaves its shift to the layer that adds the result, which saves a pass over memory.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shift: Tensor | None = None  # (outputs,) float32 in every precision, still to be added

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None:
            return cast(Tensor, self.norm(self.conv(x)))
        stride = self.conv.stride[0]
        if self.conv.kernel_size == (1, 1) and stride > 1 and fused.fast(x):
            # cuDNN is slow at strided 1 × 1 convolutions: drop the pixels first
            x = x[:, :, ::stride, ::stride].contiguous(memory_format=torch.channels_last)
            return F.conv2d(x, self.conv.weight)
        return cast(Tensor, self.conv(x))

    def fold(self) -> None:
        """Move the norm's scale into the convolution; for inference only, in float32."""
        self.shift = _fold(self)

    def add_shift(self) -> None:
        """Let the convolution add the shift, after fold: on a CPU that takes no pass of its own."""
        self.conv.bias, self.shift = nn.Parameter(cast(Tensor, self.shift), requires_grad=False), None


def _fold(layer: ConvNorm | ProjectionConv) -> Tensor:
    """Move the norm's scale into the layer's weights; return the norm's shift."""
    scale, shift = affine(layer.norm)
    layer.conv.weight = nn.Parameter(layer.conv.weight.detach() * scale[:, None, None, None], requires_grad=False)
    layer.norm = cast(nn.BatchNorm2d, nn.Identity())
    return shift


class NormReLU(nn.Module):
    """Batch norm and ReLU ahead of a convolution: the pre-activation of a residual unit."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.affine: fused.Affine | None = None  # scale and shift once folded, float32 in every precision

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x)) if self.affine is None else fused.affine_relu(x, *self.affine)

    def fold(self) -> None:
        """Keep the running statistics as one product and one sum; for inference only."""
        self.affine = affine(self.norm)


def affine(norm: nn.BatchNorm2d) -> fused.Affine:
    """Scale and shift, (C,) each, equivalent to the running statistics."""
    scale = norm.weight.detach() * torch.rsqrt(cast(Tensor, norm.running_var) + norm.eps)
    return scale, norm.bias.detach() - cast(Tensor, norm.running_mean) * scale


class PixelScore(nn.Conv2d):
    """A 1 × 1 convolution to a few maps."""

    def __init__(self, channels: int, outputs: int = 1) -> None:
        super().__init__(channels, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not fused.fast(x):
            return super().forward(x)
        # cuDNN has no fast kernel for one output channel
        pixels, weight, bias = x.permute(0, 2, 3, 1), self.weight.flatten(1), cast(Tensor, self.bias)
        if self.out_channels == 1:
            return (pixels @ weight[0] + bias).unsqueeze(1)
        return (pixels @ weight.T + bias).permute(0, 3, 1, 2)


class NoAttention(nn.Module):
    def weigh(self, x: Tensor) -> AttentionWeights:
        return AttentionWeights()


class SqueezeExcite(nn.Module):
    """A weight per channel from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = _mlp(channels)

    def weigh(self, x: Tensor) -> AttentionWeights:
        mean = fused.channel_stats(x).mean if fused.fast(x) else x.mean((2, 3))
        return AttentionWeights(channel=torch.sigmoid(self.mlp(mean.to(x.dtype)).float()))


class CBAM(nn.Module):
    """A weight per channel from means and maxima over pixels, then one per pixel from those over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = _mlp(channels)
        self.spatial = SpatialAttention()

    def weigh(self, x: Tensor) -> AttentionWeights:
        stats = fused.channel_stats(x)
        both = self.mlp(stats.mean.to(x.dtype)) + self.mlp(stats.most.to(x.dtype))
        channel = torch.sigmoid(both.float())
        return AttentionWeights(channel=channel, pixel=self.spatial.score(fused.pixel_stats(x, channel)))


class SpatialAttention(nn.Module):
    """A weight per pixel from the mean and the maximum over channels."""

    def __init__(self, kernel: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, kernel, padding=kernel // 2, bias=False)

    def score(self, seen: Tensor) -> Tensor:
        """Mean and maximum (B, 2, H, W) → weights (B, 1, H, W)."""
        return torch.sigmoid(self.conv(seen))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.score(torch.stack((x.mean(1), x.amax(1)), 1))


class SimAM(nn.Module):
    """A weight per value from its distance to the channel's mean; no parameters."""

    def __init__(self, regularisation: float = 1e-4) -> None:
        super().__init__()
        self.regularisation = regularisation

    def weigh(self, x: Tensor) -> AttentionWeights:
        stats = fused.channel_stats(x)
        return AttentionWeights(channel=1 / (4 * (stats.variance + self.regularisation)), centre=stats.mean)


class AttentionGate(nn.Module):
    """Weights for the pixels of a skip connection from the coarser features it is merged with."""

    def __init__(self, skip: int, gate: int) -> None:
        """Both are compared in half the skip's channels, at the gate's resolution."""
        super().__init__()
        self.skip = nn.Conv2d(skip, skip // 2, 2, 2, bias=False)
        self.gate = nn.Conv2d(gate, skip // 2, 1)
        self.score = PixelScore(skip // 2)

    def forward(self, skip: Tensor, gate: Tensor) -> Tensor:
        """skip (B, C, H, W), gate (B, G, about H/2, about W/2) → weights (B, 1, H/2, W/2) of the skip's pixels."""
        coarse = F.conv2d(gate, self.gate.weight)
        bias = cast(Tensor, self.gate.bias).float()
        half = torch.Size(size // 2 for size in skip.shape[2:])
        compared = fused.merge((fused.halve(skip, self.skip.weight), coarse), half, bias)
        return torch.sigmoid(self.score(compared))


class SelfAttention(nn.Module):
    """Attention of every pixel to every other, for the coarsest level."""

    def __init__(self, channels: int, head_channels: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.heads = channels // head_channels
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) → x plus its attention."""
        batch, channels, height, width = x.shape
        pixels = x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)  # no copy in channels-last
        qkv = self.qkv(self.norm(pixels)).view(batch, height * width, 3, self.heads, channels // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # (B, heads, HW, C/heads) each
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(pixels.shape)
        pixels = pixels + self.out(attended)
        return cast(Tensor, pixels).view(batch, height, width, channels).permute(0, 3, 1, 2)


def _mlp(channels: int, reduction: int = 16) -> nn.Sequential:
    hidden = max(8, channels // reduction)
    return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))


Pieces = Mapping[tuple[int, int], Sequence[tuple[int, int]]]  # (channels, padded) → the same of concatenated tensors


@torch.no_grad()
def embed(source: nn.Module, target: nn.Module, pieces: Pieces) -> nn.Module:
    """Copy a network's tensors into a wider one of the same structure; the extra channels have no effect."""
    device = next(source.parameters()).device
    wide = target.to(device).state_dict()
    for name, tensor in source.state_dict().items():
        place = wide[name]
        if place.shape == tensor.shape:
            place.copy_(tensor)
            continue
        place.fill_(1 if name.endswith("running_var") else 0)
        where = [_places(size, padded, pieces, device) for size, padded in zip(tensor.shape, place.shape, strict=True)]
        place[torch.meshgrid(*where, indexing="ij")] = tensor
    return target


def _places(size: int, padded: int, pieces: Pieces, device: torch.device) -> Tensor:
    """Index of each of `size` channels among the padded ones."""
    parts, start = [], 0
    for own, room in pieces.get((size, padded), [(size, padded)]):
        parts.append(torch.arange(start, start + own, device=device))
        start += room
    return torch.cat(parts)


def pad_channels(images: Tensor, channels: int) -> Tensor:
    """images (B, 3, H, W) → (B, channels, H, W), padded with zeros."""
    missing = channels - images.shape[1]
    return nn.functional.pad(images, (0, 0, 0, 0, 0, missing)) if missing else images

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
        """x (B, C, H, W) → (B, outputs, H/stride, W/stride)."""
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
    """Convolution and batch norm without ReLU: what brings a shortcut or a branch to another's shape.

    Once folded it leaves out its shift, for whoever adds the result to something to add too: on its own that is a
    pass over memory.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shift: Tensor | None = None  # (outputs,) float32 in every precision, still to be added

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) → (B, outputs, H/stride, W/stride)."""
        if self.shift is None:
            return cast(Tensor, self.norm(self.conv(x)))
        stride = self.conv.stride[0]
        if self.conv.kernel_size == (1, 1) and stride > 1 and fused.fast(x):
            # cuDNN is slow at it: leave out the pixels first
            x = x[:, :, ::stride, ::stride].contiguous(memory_format=torch.channels_last)
            return F.conv2d(x, self.conv.weight)
        return cast(Tensor, self.conv(x))

    def fold(self) -> None:
        """Move the norm's scale into the convolution; for inference only, in float32."""
        self.shift = _fold(self)


def _fold(layer: ConvNorm | ProjectionConv) -> Tensor:
    """Scale the layer's weights by what its norm would; return the shift that the norm would add."""
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
        """x (B, C, H, W) → the same shape, not negative."""
        return F.relu(self.norm(x)) if self.affine is None else fused.affine_relu(x, *self.affine)

    def fold(self) -> None:
        """Keep the running statistics as one product and one sum; for inference only."""
        self.affine = affine(self.norm)


def affine(norm: nn.BatchNorm2d) -> fused.Affine:
    """Scale and shift, (C,) each, that the running statistics amount to."""
    scale = norm.weight.detach() * torch.rsqrt(cast(Tensor, norm.running_var) + norm.eps)
    return scale, norm.bias.detach() - cast(Tensor, norm.running_mean) * scale


class PixelScore(nn.Conv2d):
    """One number for each pixel from its channels: a 1 × 1 convolution to one channel."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) → (B, 1, H, W)."""
        if not fused.fast(x):
            return super().forward(x)
        # cuDNN has no fast kernel for one output channel
        return (x.permute(0, 2, 3, 1) @ self.weight.flatten() + cast(Tensor, self.bias)).unsqueeze(1)


class NoAttention(nn.Module):
    """Leaves a map as it is."""

    def weigh(self, x: Tensor) -> AttentionWeights:
        """x (B, C, H, W) → nothing to multiply by."""
        return AttentionWeights()


class SqueezeExcite(nn.Module):
    """A weight for each channel from the mean of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = _mlp(channels)

    def weigh(self, x: Tensor) -> AttentionWeights:
        """x (B, C, H, W) → a weight per channel."""
        mean = fused.channel_stats(x).mean if fused.fast(x) else x.mean((2, 3))
        return AttentionWeights(channel=torch.sigmoid(self.mlp(mean.to(x.dtype)).float()))


class CBAM(nn.Module):
    """Which channels, from their mean and maximum; then which pixels, from the same over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = _mlp(channels)
        self.spatial = SpatialAttention()

    def weigh(self, x: Tensor) -> AttentionWeights:
        """x (B, C, H, W) → a weight per channel and one per pixel."""
        stats = fused.channel_stats(x)
        both = self.mlp(stats.mean.to(x.dtype)) + self.mlp(stats.most.to(x.dtype))
        channel = torch.sigmoid(both.float())
        return AttentionWeights(channel=channel, pixel=self.spatial.score(fused.pixel_stats(x, channel)))


class SpatialAttention(nn.Module):
    """A weight for each pixel from the mean and the maximum over channels."""

    def __init__(self, kernel: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, kernel, padding=kernel // 2, bias=False)

    def score(self, seen: Tensor) -> Tensor:
        """Mean and maximum (B, 2, H, W) → weights (B, 1, H, W)."""
        return torch.sigmoid(self.conv(seen))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) → weighted x."""
        return x * self.score(torch.stack((x.mean(1), x.amax(1)), 1))


class SimAM(nn.Module):
    """A weight for each value from how far it lies from its channel's mean; no parameters."""

    def __init__(self, regularisation: float = 1e-4) -> None:
        super().__init__()
        self.regularisation = regularisation

    def weigh(self, x: Tensor) -> AttentionWeights:
        """x (B, C, H, W) → centre and inverse variance per channel."""
        stats = fused.channel_stats(x)
        return AttentionWeights(channel=1 / (4 * (stats.variance + self.regularisation)), centre=stats.mean)


class AttentionGate(nn.Module):
    """AttentionWeights the pixels of a skip connection by the coarser features that will use it."""

    def __init__(self, skip: int, gate: int) -> None:
        """Compare both in half the skip's channels, at the gate's resolution."""
        super().__init__()
        self.skip = nn.Conv2d(skip, skip // 2, 2, 2, bias=False)
        self.gate = nn.Conv2d(gate, skip // 2, 1)
        self.score = PixelScore(skip // 2)

    def forward(self, skip: Tensor, gate: Tensor) -> Tensor:
        """skip (B, C, H, W), gate (B, G, about H/2, about W/2) → weights (B, 1, H/2, W/2) of the skip's pixels."""
        coarse = F.conv2d(gate, self.gate.weight)
        bias = cast(Tensor, self.gate.bias).float()
        compared = fused.merge((fused.halve(skip, self.skip.weight), coarse), _half(skip), bias)
        return torch.sigmoid(self.score(compared))


class SelfAttention(nn.Module):
    """Every pixel looks at every other; for the coarsest level."""

    def __init__(self, channels: int, head_channels: int = 64) -> None:
        """As many heads as head_channels divide the channels."""
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.heads = channels // head_channels
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) → x plus what it found."""
        batch, channels, height, width = x.shape
        pixels = x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)  # no copy in channels-last
        qkv = self.qkv(self.norm(pixels)).view(batch, height * width, 3, self.heads, channels // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # (B, heads, HW, C/heads) each
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(pixels.shape)
        pixels = pixels + self.out(found)
        return cast(Tensor, pixels).view(batch, height, width, channels).permute(0, 3, 1, 2)


def _mlp(channels: int, reduction: int = 16) -> nn.Sequential:
    hidden = max(8, channels // reduction)
    return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))


def _half(x: Tensor) -> torch.Size:
    return torch.Size(size // 2 for size in x.shape[2:])


Pieces = Mapping[tuple[int, int], Sequence[tuple[int, int]]]  # (channels, padded) → those of each tensor concatenated


@torch.no_grad()
def embed(source: nn.Module, target: nn.Module, pieces: Pieces) -> nn.Module:
    """Copy a network's tensors into a wider one of the same structure; what is left over stays without effect."""
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
    """Where each of `size` channels is among the padded ones."""
    parts, start = [], 0
    for own, room in pieces.get((size, padded), [(size, padded)]):
        parts.append(torch.arange(start, start + own, device=device))
        start += room
    return torch.cat(parts)


def pad_channels(images: Tensor, channels: int) -> Tensor:
    """images (B, 3, H, W) → (B, channels, H, W), zeros behind."""
    missing = channels - images.shape[1]
    return nn.functional.pad(images, (0, 0, 0, 0, 0, missing)) if missing else images

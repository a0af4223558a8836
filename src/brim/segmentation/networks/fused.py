"""Operations between and around convolutions: one pass over memory on a GPU, plain torch elsewhere.

Every function has two implementations: Triton kernels (or cuDNN's fused convolution) for 16-bit channels-last inference
on a GPU, and torch for everything else. Eager torch spends more than half of the time here, with a pass over memory per
addition; compiled torch still resamples slowly: see benchmarks/results/segment_kernels_h200_2026-11-15.md.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = 4096  # in the block of a program: 32 per thread, enough loads in flight
_CHUNK_STEPS = 16  # blocks of pixels that a program of channel_stats sums


Affine = tuple[Tensor, Tensor]  # scale and shift (C,) float32, equivalent to a batch norm


class AttentionWeights(NamedTuple):
    """Factors of an attention; those that do not apply are None."""

    channel: Tensor | None = None  # (B, C) float32
    pixel: Tensor | None = None  # (B, 1, H, W)
    centre: Tensor | None = None  # (B, C) float32: SimAM's mean, channel is then 1 / (4 · variance)


class ChannelStats(NamedTuple):
    """Per channel and image, (B, C) float32 each."""

    mean: Tensor
    variance: Tensor  # over H·W − 1
    most: Tensor


def fast(x: Tensor) -> bool:
    """Whether the GPU kernels accept this tensor."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and x.shape[1] % 8 == 0
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def resize(x: Tensor, size: torch.Size | tuple[int, int]) -> Tensor:
    """x (B, C, h, w) resampled bilinearly; x itself if it has that size."""
    return x if x.shape[2:] == size else F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


# Convolution


@torch.library.custom_op("brim::conv_bias_relu", mutates_args=())
def _conv_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, residual: Tensor | None
) -> Tensor:
    where = ([stride] * 2, [padding] * 2, [1, 1], 1)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *where)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *where)


@_conv_bias_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, residual: Tensor | None) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding)


def conv_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, residual: Tensor | None = None
) -> Tensor:
    """ReLU of convolution plus bias plus residual."""
    if fast(x):
        return cast(Tensor, _conv_bias_relu(x, weight, bias, stride, padding, residual))
    y = F.conv2d(x, weight, bias, stride, padding)
    return F.relu_(y if residual is None else y + residual)


def halve(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, C, H, W) convolved by weight (O, C, 2, 2) with stride 2."""
    batch, channels, height, width = x.shape
    if not fast(x) or height % 2 or width % 2:
        return F.conv2d(x, weight, stride=2)
    # cuDNN does not use tensor cores here. Two neighbours in a row form a vector of 2·C: one product per row parity.
    rows = x.permute(0, 2, 3, 1).view(batch, height // 2, 2, width // 2, 2 * channels)
    matrices = weight.permute(2, 3, 1, 0).reshape(2, 2 * channels, -1)  # (row, column and channel, O)
    count = batch * height // 2
    even, odd = (rows[:, :, parity].view(count, width // 2, 2 * channels) for parity in (0, 1))
    wide = matrices[:, None].expand(2, count, -1, -1)
    y = torch.baddbmm(torch.bmm(even, wide[0]), odd, wide[1])
    return y.view(batch, height // 2, width // 2, -1).permute(0, 3, 1, 2)


# Between convolutions


def affine_relu(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """ReLU of x · scale + shift; scale and shift (C,) float32."""
    if not fast(x):
        return F.relu_(torch.addcmul(shift[:, None, None], x, scale[:, None, None]).to(x.dtype))
    out = torch.empty_like(x)
    channels, blocks, sizes = _blocks(x)
    _kernels().affine_relu[blocks](x, scale, shift, out, _pixels(x), C=channels, **sizes)
    return out


def merge(parts: Sequence[Tensor], size: torch.Size, shift: Tensor | None = None) -> Tensor:
    """ReLU of the sum of up to four maps (B, C, h, w), each resampled to the size, plus a shift (C,)."""
    if not all(map(fast, parts)):
        total = sum((resize(part, size) for part in parts[1:]), resize(parts[0], size))
        return F.relu(total if shift is None else total + shift[:, None, None].to(total.dtype))
    batch, channels = parts[0].shape[:2]
    out = _like(parts[0], (batch, channels, *size))
    _, blocks, sizes = _blocks(out)
    _kernels().merge[blocks](
        *_slots(parts), parts[0] if shift is None else shift, out, _pixels(out), *size, *_sizes(parts),
        C=channels, **_kinds(parts, size), SHIFT=shift is not None, **sizes,
    )  # fmt: skip
    return out


def merge_score(parts: Sequence[Tensor], bias: Tensor, weight: Tensor, size: torch.Size) -> Tensor:
    """Product of weight (C,) with ReLU(sum of resampled maps + bias (C,)) for each pixel: (B, 1, *size) float32."""
    batch, channels = parts[0].shape[:2]
    out = torch.empty((batch, 1, *size), dtype=torch.float32, device=parts[0].device)
    _, _, sizes = _blocks(parts[0])
    sizes["BP"] = 32  # one program handles all channels of a pixel, so fewer pixels leave enough programs
    blocks = (-(-_pixels(out) // sizes["BP"]),)
    _kernels().merge_score[blocks](
        *_slots(parts), bias.float(), weight.float(), out, _pixels(out), *size, *_sizes(parts),
        C=channels, **_kinds(parts, size), **sizes,
    )  # fmt: skip
    return out


def beside(
    low: Tensor, low_shift: Tensor, skip: Tensor, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """`low` upsampled to the skip's size beside the weighted skip, (B, 2C, H, W), and the affine_relu of that.

    low (B, C, h, w) without its low_shift (C,), skip (B, C, H, W), weight (B, 1, h', w'), scale and shift (2C,)
    """
    if not (fast(skip) and fast(low)):
        size = skip.shape[2:]
        up = resize(low, size) + low_shift[:, None, None].to(low.dtype)
        raw = torch.cat((up, skip * resize(weight, size)), 1)
        return raw, affine_relu(raw, scale, shift)
    batch, channels, *hw = skip.shape
    raw = _like(skip, (batch, 2 * channels, *hw))
    act = torch.empty_like(raw)
    _, blocks, sizes = _blocks(skip)
    _kernels().beside[(*blocks, 2)](
        low, low_shift, skip, weight, scale, shift, raw, act, _pixels(skip), *hw, *low.shape[2:], *weight.shape[2:],
        C=channels, **sizes,
    )  # fmt: skip
    return raw, act


def weigh_add(
    x: Tensor, shortcut: Tensor, weights: AttentionWeights, shift: Tensor | None = None, then: Affine | None = None
) -> tuple[Tensor, Tensor | None]:
    """shortcut + shift (C,) + x · weights, of x's shape, and its affine_relu by `then`."""
    if not (fast(x) and fast(shortcut)):
        y = shortcut + _weighed(x, weights)
        y = y if shift is None else y + shift[:, None, None].to(y.dtype)
        return y, None if then is None else affine_relu(y, *then)
    out = torch.empty_like(x)
    act = None if then is None else torch.empty_like(x)
    channels, blocks, sizes = _blocks(x, per_image=True)
    kind = 0 if weights.channel is None else 3 if weights.centre is not None else 1 if weights.pixel is None else 2
    optional = (weights.channel, weights.centre, weights.pixel, shift, *(then or (None, None)), out, act)
    _kernels().weigh_add[(*blocks, len(x))](
        x, shortcut, *(x if tensor is None else tensor for tensor in optional), _pixels(x) // len(x),
        C=channels, KIND=kind, SHIFT=shift is not None, ACT=then is not None, **sizes,
    )  # fmt: skip
    return out, act


def _weighed(x: Tensor, weights: AttentionWeights) -> Tensor:
    if weights.channel is None:
        return x
    channel = weights.channel[:, :, None, None]
    if weights.centre is not None:
        energy = (x - weights.centre[:, :, None, None]).square() * channel + 0.5
        return x * torch.sigmoid(energy).to(x.dtype)
    x = x * channel.to(x.dtype)
    return x if weights.pixel is None else x * weights.pixel


def channel_stats(x: Tensor) -> ChannelStats:
    """Mean, variance and maximum over the pixels of x (B, C, H, W)."""
    num = x.shape[2] * x.shape[3]
    if not fast(x):
        variance, mean = torch.var_mean(x.float(), (2, 3), correction=min(1, num - 1))
        return ChannelStats(mean, variance, x.amax((2, 3)).float())
    channels, blocks, sizes = _blocks(x, per_image=True)
    chunks = -(-blocks[0] // _CHUNK_STEPS)
    sums = torch.empty((3, len(x), chunks, channels), dtype=torch.float32, device=x.device)
    _kernels().channel_sums[(chunks, blocks[1], len(x))](x, *sums, num, chunks, C=channels, STEPS=_CHUNK_STEPS, **sizes)
    mean = sums[0].sum(1) / num
    variance = (sums[1].sum(1) - num * mean.square()).clamp(min=0) / max(1, num - 1)
    return ChannelStats(mean, variance, sums[2].amax(1))


def pixel_stats(x: Tensor, channel: Tensor) -> Tensor:
    """Mean and maximum over the channels of x times channel (B, C): (B, 2, H, W)."""
    if not fast(x):
        x = x * channel[:, :, None, None].to(x.dtype)
        return torch.stack((x.mean(1), x.amax(1)), 1)
    out = torch.empty((len(x), 2, *x.shape[2:]), dtype=x.dtype, device=x.device)
    channels, _, sizes = _blocks(x)
    sizes["BP"] = 32
    num = _pixels(x) // len(x)
    _kernels().pixel_stats[(-(-num // 32), len(x))](x, channel, out, num, C=channels, **sizes)
    return out


# Launching kernels


def _kernels() -> ModuleType:
    from brim.segmentation.networks import kernels

    return kernels


def _pixels(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def _like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _blocks(x: Tensor, *, per_image: bool = False) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Channels, number of blocks of pixels and of channels, and the blocks' sizes."""
    channels = x.shape[1]
    block = min(128, channels & -channels)  # the largest power of two that divides them
    pixels = _ELEMENTS // block
    num = x.shape[2] * x.shape[3] if per_image else _pixels(x)
    return channels, (-(-num // pixels), channels // block), {"BP": pixels, "BC": block}


def _slots(parts: Sequence[Tensor]) -> list[Tensor]:
    return [parts[index] if index < len(parts) else parts[0] for index in range(4)]


def _sizes(parts: Sequence[Tensor]) -> list[int]:
    return [size for slot in _slots(parts) for size in slot.shape[2:]]


def _kinds(parts: Sequence[Tensor], size: torch.Size) -> dict[str, int]:
    """Whether each of four slots is empty (0), of the output's size (1) or resampled to it (2)."""
    kinds = [1 if part.shape[2:] == size else 2 for part in parts]
    return dict(zip(("KA", "KB", "KD", "KE"), [*kinds, 0, 0, 0], strict=False))

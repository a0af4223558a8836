"""U-Nets whose encoder is a ResNet (He et al., 2016; Ronneberger et al., 2015), as other libraries publish weights for.

The encoder's five levels have 1/2 to 1/32 of the resolution; the decoder doubles it with nearest neighbours,
five times, and joins the level of that size. Sizes that are no multiples of 32 are resampled to those of the encoder.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brim.segmentation.networks.blocks import ConvNorm, ProjectionConv

DECODER = (256, 128, 64, 32, 16)  # channels of its levels, from the coarsest
WIDTHS = (64, 128, 256, 512)  # of a block's inner convolutions, from the finest level


class ResNetUNet(nn.Module):
    """Image (B, 3, H, W) → logits (B, outputs, H, W), any H and W from 32 on."""

    def __init__(self, blocks: tuple[int, ...], *, bottleneck: bool, outputs: int = 1) -> None:
        """blocks of the four levels after the stem; bottleneck: three convolutions a block, four times as wide."""
        super().__init__()
        self.stem = ConvNorm(3, 64, 7, stride=2)
        self.levels = nn.ModuleList()
        before, channels = 64, [64]
        for level, (width, num_blocks) in enumerate(zip(WIDTHS, blocks, strict=True)):
            after = 4 * width if bottleneck else width
            strides = [1 if level == 0 else 2] + [1] * (num_blocks - 1)
            inputs = [before] + [after] * (num_blocks - 1)
            self.levels.append(
                nn.Sequential(*(ResNetBlock(*each, width, after) for each in zip(inputs, strides, strict=True)))
            )
            before = after
            channels.append(after)
        skips = [*reversed(channels[:-1]), 0]
        befores = [before, *DECODER[:-1]]
        self.decoder = nn.ModuleList(
            nn.Sequential(ConvNorm(below + skip, width), ConvNorm(width, width))
            for below, skip, width in zip(befores, skips, DECODER, strict=True)
        )
        self.score = nn.Conv2d(DECODER[-1], outputs, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) normalised → logits (B, outputs, H, W)."""
        x = self.stem(images)
        skips = [x]
        x = F.max_pool2d(x, 3, 2, 1)
        for level in self.levels:
            x = level(x)
            skips.append(x)
        sizes = [*(skip.shape[2:] for skip in skips[-2::-1]), images.shape[2:]]
        joined: list[Tensor | None] = [*skips[-2::-1], None]
        for up, skip, size in zip(self.decoder, joined, sizes, strict=True):
            x = F.interpolate(x, size=size, mode="nearest")
            x = up(x if skip is None else torch.cat([x, skip], 1))
        return cast(Tensor, self.score(x))


class ResNetBlock(nn.Module):
    """Two 3 × 3 convolutions, or 1 × 1, 3 × 3 and 1 × 1 if it widens, and a shortcut."""

    def __init__(self, inputs: int, stride: int, width: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *([ConvNorm(inputs, width, 1), ConvNorm(width, width, 3, stride)] if outputs > width else [])
        ) or nn.Sequential(ConvNorm(inputs, width, 3, stride))
        self.last = ConvNorm(width, outputs, 1 if outputs > width else 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ProjectionConv(inputs, outputs, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.body(x), self.shortcut(x)))

    def fold(self) -> None:
        """Add the shortcut's shift in the last convolution."""
        if isinstance(self.shortcut, ProjectionConv):
            cast(Tensor, self.last.conv.bias).add_(cast(Tensor, self.shortcut.shift))


class UNetResNet18(ResNetUNet):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__((2, 2, 2, 2), bottleneck=False, outputs=outputs)


class UNetResNet34(ResNetUNet):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__((3, 4, 6, 3), bottleneck=False, outputs=outputs)


class UNetResNet50(ResNetUNet):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__((3, 4, 6, 3), bottleneck=True, outputs=outputs)

"""ResUNet (Zhang et al., "Road Extraction by Deep Residual U-Net") with attention, in two sizes, and two small ones.

Encoder and decoder are pre-activation residual units; each level halves the resolution with a stride, as in the paper.
Every level of the decoder resamples its input to the size of the skip, so any image size works.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from brim.segmentation.networks import fused
from brim.segmentation.networks.blocks import (
    CBAM,
    AttentionGate,
    ConvNorm,
    NoAttention,
    NormReLU,
    PixelScore,
    ProjectionConv,
    SelfAttention,
    SimAM,
    SpatialAttention,
    SqueezeExcite,
    embed,
    pad_channels,
)

Attention = NoAttention | SqueezeExcite | CBAM | SimAM


class ResUNet(nn.Module):
    """Image (B, 3, H, W) → logits (B, outputs, H, W), any H and W from 32 on."""

    def __init__(
        self,
        widths: tuple[int, ...],
        encoder: tuple[int, ...],
        decoder: tuple[int, ...],
        *,
        attention: Callable[[int, int], Attention],
        bottleneck: Callable[[int], nn.Module],
        inputs: int = 3,
        outputs: int = 1,
    ) -> None:
        """widths of the levels, the last is the bottleneck's; units per level of the encoder and of the decoder.

        attention(level, channels) makes the attention of a unit, bottleneck(channels) the layer after the coarsest
        level. Images are padded with zeros to `inputs` channels.
        """
        super().__init__()
        self.inputs = inputs
        self.stem = nn.Conv2d(inputs, widths[0], 3, padding=1, bias=False)
        self.encoder = nn.ModuleList()
        before = widths[0]
        for level, (width, num_units) in enumerate(zip(widths, encoder, strict=True)):
            first = ResidualUnit(before, width, attention(level, width), stride=1 if level == 0 else 2)
            rest = [ResidualUnit(width, width, attention(level, width)) for _ in range(num_units - 1)]
            self.encoder.append(Units([first, *rest]))
            before = width
        self.bottleneck = bottleneck(before)
        self.decoder = nn.ModuleList(
            Up(widths[level], widths[level + 1], [attention(level, widths[level]) for _ in range(decoder[level])])
            for level in reversed(range(len(widths) - 1))
        )
        self.norm = NormReLU(widths[0])
        self.score = PixelScore(widths[0], outputs)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) normalised → logits (B, outputs, H, W)."""
        x = self.stem(pad_channels(images, self.inputs))
        entered: Tensor | None = None
        levels = cast("list[Units]", self.encoder)
        skips: list[Tensor] = []
        for level, following in zip(levels, [*(level.enter for level in levels[1:]), None], strict=True):
            x, entered = level(x, entered, following)
            skips.append(x)
        x = self.bottleneck(skips.pop())
        for up in self.decoder:
            x, entered = up(x, skips.pop(), self.norm if not skips else None)
        return cast(Tensor, self.score(self.norm(x) if entered is None else entered))


class ResidualUnit(nn.Module):
    """Pre-activation residual unit: norm, ReLU, convolution, twice; attention on the residual."""

    def __init__(self, inputs: int, outputs: int, attention: Attention, stride: int = 1) -> None:
        super().__init__()
        self.enter = NormReLU(inputs)
        self.first = ConvNorm(inputs, outputs, stride=stride)
        self.last = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.attention = attention
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ProjectionConv(inputs, outputs, stride=stride)

    def forward(
        self, x: Tensor, entered: Tensor | None = None, following: NormReLU | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, inputs, H, W) → (B, outputs, H/stride, W/stride), and following(result) if following is folded.

        entered is self.enter(x) if the previous unit has computed it: both results take one pass over memory.
        """
        residual = self.last(self.first(self.enter(x) if entered is None else entered))
        shift = self.shortcut.shift if isinstance(self.shortcut, ProjectionConv) else None
        then = None if following is None else following.affine
        return fused.weigh_add(residual, self.shortcut(x), self.attention.weigh(residual), shift, then)

    def fold(self) -> None:
        if isinstance(self.shortcut, ProjectionConv) and self.last.weight.device.type == "cpu":
            self.shortcut.add_shift()


class Units(nn.ModuleList):
    """Residual units in a row."""

    @property
    def enter(self) -> NormReLU:
        return cast(ResidualUnit, self[0]).enter

    def forward(self, x: Tensor, entered: Tensor | None, following: NormReLU | None) -> tuple[Tensor, Tensor | None]:
        units = cast("list[ResidualUnit]", list(self))
        for unit, after in zip(units, [*(unit.enter for unit in units[1:]), following], strict=True):
            x, entered = unit(x, entered, after)
        return x, entered


class Up(nn.Module):
    """One level of the decoder: upsample, concatenate with the gated skip, residual units."""

    def __init__(self, width: int, below: int, attentions: Sequence[Attention]) -> None:
        """From `below` channels to `width`, with one unit per attention."""
        super().__init__()
        self.gate = AttentionGate(width, below)
        self.reduce = ProjectionConv(below, width)  # before the resize: a quarter of the pixels
        first, *rest = attentions
        self.units = Units(
            [ResidualUnit(2 * width, width, first), *(ResidualUnit(width, width, attention) for attention in rest)]
        )

    def forward(self, x: Tensor, skip: Tensor, following: NormReLU | None) -> tuple[Tensor, Tensor | None]:
        """x (B, below, about H/2, about W/2), skip (B, width, H, W) → (B, width, H, W), and following of that."""
        low, weight, size = self.reduce(x), self.gate(skip, x), skip.shape[2:]
        entered: Tensor | None = None
        if self.reduce.shift is None or self.units.enter.affine is None:
            raw = torch.cat((fused.resize(low, size), skip * fused.resize(weight, size)), 1)
        else:
            raw, entered = fused.beside(low, self.reduce.shift, skip, weight, *self.units.enter.affine)
        return cast("tuple[Tensor, Tensor | None]", self.units(raw, entered, following))

    def fold(self) -> None:
        if self.reduce.conv.weight.device.type == "cpu":
            self.reduce.add_shift()


class ResUNetSmall(ResUNet):
    """Five levels of 48 to 512 channels over a bottleneck of 1024, squeeze-excite in every unit, gated skips."""

    def __init__(self, width: int = 48, inputs: int = 3, outputs: int = 1) -> None:
        super().__init__(
            (width, 96, 192, 384, 512, 1024),
            encoder=(1, 1, 1, 1, 1, 2),
            decoder=(1, 1, 1, 1, 1),
            attention=lambda level, channels: SqueezeExcite(channels),
            bottleneck=lambda channels: SpatialAttention(),
            inputs=inputs,
            outputs=outputs,
        )

    def aligned(self) -> nn.Module:
        """An equivalent network with numbers of channels that suit tensor cores."""
        wide = ResUNetSmall(64, inputs=8, outputs=self.score.out_channels)
        return embed(self, wide, {(96, 128): [(48, 64), (48, 64)]})


class ResUNetAdvanced(ResUNet):
    """Four levels of 64 to 512 channels over a bottleneck of 1024 with self-attention, attention in every unit."""

    def __init__(self, inputs: int = 3, outputs: int = 1) -> None:
        """SimAM on the large maps, which it reads once less than CBAM."""
        super().__init__(
            (64, 128, 256, 512, 1024),
            encoder=(2, 2, 2, 3, 2),
            decoder=(2, 2, 2, 3),
            attention=lambda level, channels: SimAM() if level < 2 else CBAM(channels),
            bottleneck=SelfAttention,
            inputs=inputs,
            outputs=outputs,
        )

    def aligned(self) -> nn.Module:
        """An equivalent network with numbers of channels that suit tensor cores."""
        return embed(self, ResUNetAdvanced(inputs=8, outputs=self.score.out_channels), {})


class UNetTiny(ResUNet):
    """Three levels of 16 to 64 channels, with attention gates only: for CPUs, demonstrations and tests."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__(
            (16, 32, 64),
            encoder=(1, 1, 1),
            decoder=(1, 1),
            attention=lambda level, channels: NoAttention(),
            bottleneck=lambda channels: nn.Identity(),
            outputs=outputs,
        )


class CellsUNet(ResUNet):
    """Five levels of 16 to 256 channels, with attention gates only: the network of the default model."""

    def __init__(self, inputs: int = 3, outputs: int = 1) -> None:
        super().__init__(
            (16, 32, 64, 128, 256),
            encoder=(1, 1, 1, 1, 1),
            decoder=(1, 1, 1, 1),
            attention=lambda level, channels: NoAttention(),
            bottleneck=lambda channels: nn.Identity(),
            inputs=inputs,
            outputs=outputs,
        )

    def aligned(self) -> nn.Module:
        """An equivalent network with numbers of channels that suit tensor cores."""
        return embed(self, CellsUNet(inputs=8, outputs=self.score.out_channels), {})

"""HRNetV2-W48 (Wang et al., "Deep High-Resolution Representation Learning for Visual Recognition").

Four branches of 48, 96, 192 and 384 channels at 1/4, 1/8, 1/16 and 1/32 of the resolution run in parallel and exchange
features after every module; the head combines all of them at 1/4.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brim.segmentation.networks import fused
from brim.segmentation.networks.blocks import ConvNorm, PixelScore, ProjectionConv, embed, pad_channels

WIDTHS = (48, 96, 192, 384)
MODULES = (1, 4, 3)  # of stages 2, 3 and 4
BLOCKS = 4  # residual blocks of a branch in a module


class HRNet(nn.Module):
    """Image (B, 3, H, W) → logits (B, outputs, H, W), any H and W from 32 on."""

    def __init__(
        self, widths: tuple[int, ...] = WIDTHS, inputs: int = 3, mixed: int = sum(WIDTHS), outputs: int = 1
    ) -> None:
        """Stem, four stages, head of `mixed` channels; images are padded with zeros to `inputs` channels."""
        super().__init__()
        self.inputs = inputs
        self.stem = nn.Sequential(ConvNorm(inputs, 64, stride=2), ConvNorm(64, 64, stride=2))
        self.stage1 = nn.Sequential(Bottleneck(64), *(Bottleneck(256) for _ in range(3)))
        self.entries = nn.ModuleList()  # one per stage: makes its newest branch; for stage 2 both branches
        self.entries.append(nn.ModuleList([ConvNorm(256, widths[0]), ConvNorm(256, widths[1], stride=2)]))
        for index in (2, 3):
            self.entries.append(nn.ModuleList([ConvNorm(widths[index - 1], widths[index], stride=2)]))
        self.stages = nn.ModuleList(
            nn.Sequential(*(Exchange(widths[: stage + 2]) for _ in range(modules)))
            for stage, modules in enumerate(MODULES)
        )
        self.head = Head(widths, mixed, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) normalised → logits (B, outputs, H, W)."""
        x = self.stage1(self.stem(pad_channels(images, self.inputs)))
        branches: list[Tensor] = []
        for entry, stage in zip(self.entries, self.stages, strict=True):
            sources = [x, x] if not branches else [branches[-1]]
            new = [layer(source) for layer, source in zip(cast(nn.ModuleList, entry), sources, strict=True)]
            branches = stage([*branches, *new])
        return fused.resize(self.head(branches), images.shape[2:])

    def aligned(self) -> nn.Module:
        """An equivalent network with numbers of channels that suit tensor cores."""
        widths = (64, *WIDTHS[1:])
        pieces = {(sum(WIDTHS), sum(widths)): list(zip(WIDTHS, widths, strict=True))}
        return embed(self, HRNet(widths, inputs=8, mixed=768, outputs=self.head.score.out_channels), pieces)


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3, 1 × 1 residual block of stage 1, 64 channels inside and 256 outside."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvNorm(inputs, 64, 1), ConvNorm(64, 64))
        self.last = ConvNorm(64, 256, 1)
        self.shortcut = nn.Identity() if inputs == 256 else ProjectionConv(inputs, 256)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.body(x), self.shortcut(x)))

    def fold(self) -> None:
        """Add the shortcut's shift in the last convolution."""
        if isinstance(self.shortcut, ProjectionConv):
            cast(Tensor, self.last.conv.bias).add_(cast(Tensor, self.shortcut.shift))


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels)
        self.last = ConvNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.first(x), x))


class Exchange(nn.Module):
    """Residual blocks on every branch, then every branch becomes the sum of all."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(BasicBlock(width) for _ in range(BLOCKS))) for width in widths)
        num = len(widths)
        self.rows = nn.ModuleList(
            nn.ModuleList(_path(widths, source, target) for source in range(num)) for target in range(num)
        )
        self.shifts: list[Tensor | None] = [None] * num  # of all paths to a branch, once folded

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        """One tensor per branch in and out, each (B, width, H/4/2^i, W/4/2^i)."""
        branches = [body(branch) for body, branch in zip(self.branches, branches, strict=True)]
        rows = zip(cast("list[nn.ModuleList]", self.rows), branches, self.shifts, strict=True)
        return [
            fused.merge([path(branch) for path, branch in zip(row, branches, strict=True)], target.shape[2:], shift)
            for row, target, shift in rows
        ]

    def fold(self) -> None:
        """Sum the shifts of the paths to each branch."""
        projections = [[layer for layer in row.modules() if isinstance(layer, ProjectionConv)] for row in self.rows]
        self.shifts = [torch.stack([cast(Tensor, layer.shift) for layer in row]).sum(0) for row in projections]


class Head(nn.Module):
    """Scores per pixel from all branches, at the finest branch's resolution."""

    def __init__(self, widths: tuple[int, ...], mixed: int, outputs: int) -> None:
        super().__init__()
        self.widths = widths
        self.mix = ConvNorm(sum(widths), mixed, 1)
        self.score = PixelScore(mixed, outputs)

    def forward(self, branches: list[Tensor]) -> Tensor:
        """One tensor per branch → (B, outputs, H/4, W/4)."""
        size = branches[0].shape[2:]
        if self.mix.folded and fused.fast(branches[0]):
            return self._score_merged(branches, size)
        return cast(Tensor, self.score(self.mix(torch.cat([fused.resize(branch, size) for branch in branches], 1))))

    def _score_merged(self, branches: list[Tensor], size: torch.Size) -> Tensor:
        # The 1 × 1 convolution runs before the resampling: an eighth of the operations, and no concatenation.
        weights = torch.split(self.mix.conv.weight, list(self.widths), 1)
        parts = [F.conv2d(branch, weight.contiguous()) for branch, weight in zip(branches, weights, strict=True)]
        bias = cast(Tensor, self.mix.conv.bias)
        maps = [fused.merge_score(parts, bias, weight, size) for weight in self.score.weight.flatten(1)]
        return torch.cat(maps, 1) + cast(Tensor, self.score.bias)[:, None, None]


def _path(widths: tuple[int, ...], source: int, target: int) -> nn.Module:
    """Maps a branch to the channels of another, and to its resolution if that is coarser."""
    if source == target:
        return nn.Identity()
    if source > target:
        return ProjectionConv(widths[source], widths[target])
    halvings = [ConvNorm(widths[source], widths[source], stride=2) for _ in range(target - source - 1)]
    return nn.Sequential(*halvings, ProjectionConv(widths[source], widths[target], 3, stride=2))

"""Other views of the same crops, made on the device: turned, mirrored, moved, lit and disturbed at random.

Axes: B crops, S pixels of a side. Every crop of a batch draws its own numbers, all crops go through the same kernels,
and nothing depends on a value on the device, so a captured step can hold it. Mirror, quarter turn, scale, rotation and
shift are one sampling of the crop, the same for image and mask; a quarter turn or mirror alone gives back exact pixels.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from brim.engine.training.rank_share import drawn
from brim.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """How much crops are changed; every range is symmetric about no change."""

    turn: bool = True  # mirror and quarter turns
    affine: float = 0.5  # share of crops that are scaled, rotated and shifted; the others keep their pixels
    scale: float = 0.15  # up to 1 ± this
    rotation_deg: float = 20.0
    shift: float = 0.06  # of a side
    brightness: float = 0.1  # of full scale, added
    contrast: float = 0.2  # factor 1 ± this about the crop's mean
    gamma: float = 0.2  # exponent, e to the ± this
    noise: float = 0.02  # of full scale, greatest standard deviation

    def __post_init__(self) -> None:
        """Check every value."""
        for field in fields(self):
            value, limit = getattr(self, field.name), {"rotation_deg": 180.0}.get(field.name, 1.0)
            if field.name != "turn" and not 0 <= value <= limit:
                raise ConfigError(f"{field.name}={value} must be from 0 to {limit:g}")
        if self.scale == 1:
            raise ConfigError("scale=1.0 would shrink a crop to nothing; use less, such as 0.15")


def augment(images: Tensor, masks: Tensor, rng: torch.Generator, config: Augmentation) -> tuple[Tensor, Tensor]:
    """Changed copies of crops and their masks.

    images  (B, 3, S, S)  uint8
    masks   (B, 1, S, S)  uint8 or bool; their values are moved, never mixed
    """
    moved, moved_masks = _move(images.float(), masks, rng, config)
    lit = _light(moved / 255, rng, config)
    return (lit * 255).round_().clamp_(0, 255).to(torch.uint8), moved_masks


# Where a pixel comes from


def _move(images: Tensor, masks: Tensor, rng: torch.Generator, config: Augmentation) -> tuple[Tensor, Tensor]:
    grid = F.affine_grid(_transforms(len(images), images.device, rng, config), [*images.shape], align_corners=False)
    sampled = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    found = F.grid_sample(masks.float(), grid, mode="nearest", padding_mode="reflection", align_corners=False)
    return sampled, found.to(masks.dtype)


def _transforms(count: int, device: torch.device, rng: torch.Generator, config: Augmentation) -> Tensor:
    """(B, 2, 3) float32: from where in the crop, in units of half a side, each place takes its pixel."""
    draws = drawn(lambda whole: torch.rand(whole, device=device, generator=rng), (8, count), axis=1)
    some = (draws[0] < config.affine).float()
    scale, angle, right, down = (some * (2 * draw - 1) for draw in draws[1:5])
    scale, angle = 1 + config.scale * scale, math.radians(config.rotation_deg) * angle
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    # Exact: cos(π / 2) is not 0 in floating point, and would blur what a quarter turn must not.
    mirror, swap, flip = ((draw < 0.5) & config.turn for draw in draws[5:8])
    along, across = 1 - 2 * mirror.float(), 1 - 2 * flip.float()
    rows = [
        torch.stack([along * torch.where(swap, sin, cos), along * torch.where(swap, cos, -sin)], 1),
        torch.stack([across * torch.where(swap, cos, sin), across * torch.where(swap, -sin, cos)], 1),
    ]
    move = 2 * config.shift * torch.stack([right, down], 1)
    return torch.cat([torch.stack(rows, 1), move[:, :, None]], 2)


# What a pixel becomes


def _light(images: Tensor, rng: torch.Generator, config: Augmentation) -> Tensor:
    """Brightness, contrast, gamma and noise; images (B, 3, S, S) float32 from 0 to 1."""
    device = images.device
    draws = drawn(lambda whole: torch.rand(whole, device=device, generator=rng), (4, len(images), 1, 1, 1), axis=1)
    brightness, contrast, gamma = (2 * draw - 1 for draw in draws[:3])
    mean = images.mean((1, 2, 3), keepdim=True)
    lit = (images - mean) * (1 + config.contrast * contrast) + mean + config.brightness * brightness
    lit = lit.clamp_(1e-6, 1) ** torch.exp(config.gamma * gamma)
    noise = drawn(lambda whole: torch.randn(whole, device=device, generator=rng), tuple(images.shape))
    return torch.addcmul(lit, noise, draws[3] * config.noise)

"""Other views of the same crops, made on the device: turned, mirrored, moved, lit and disturbed at random.

Axes: B crops, S pixels of a side. Every crop of a batch draws its own numbers, all crops go through the same kernels,
and nothing depends on a value on the device, so a captured step can hold it. Mirror, quarter turn, scale, rotation and
shift are one sampling of the crop, the same for image and mask; a quarter turn or mirror alone gives back exact pixels.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from brim.engine.training import drawn
from brim.segmentation.config import Augmentation


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

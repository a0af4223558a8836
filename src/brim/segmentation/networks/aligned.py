"""The same network with channels in the multiples that tensor cores are fast at.

cuDNN's bf16 convolutions of 48 channels reach 192 TFLOP/s on an H200 where those of 64 reach 468: with 16 channels more
that are always zero, one computes the same function in three quarters of the time. One of three channels padded to
eight leaves the slow path for odd counts. See benchmarks/results/segment_kernels_h200_2026-11-15.md.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

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

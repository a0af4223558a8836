"""Augmentation on the device, in place: cropping, noise, and masked spans of frames and bands of features.

Axes: B sequences, T frames, D features. Every sequence draws its own strengths at every call, relative to its length,
and all go through the same kernels; no shape depends on a value on the device, so a captured step can contain it.
Frames behind a sequence's end stay 0.
"""

import torch
from torch import Tensor
from torch.nn import functional

from brim.engine.training import Batch, drawn
from brim.sequences.config import Augmentation
from brim.sequences.model import frame_mask


def augment(
    frames: Tensor,
    length: Tensor,
    rng: torch.Generator,
    config: Augmentation,
    *,
    mean: Tensor | None = None,  # (D,) the value of masked places; None: 0
    std: Tensor | float = 1.0,  # (D,) or one for all: scale of the noise
) -> Tensor:
    """Change the frames in place and return their new lengths, (B,) int64.

    frames  (B, T, D)  float16, bfloat16 or float32, 0 behind each end
    length  (B,)       int64
    """
    if config.crop:
        length = crop(frames, length, rng, config.crop)
    if config.noise:
        add_noise(frames, rng, config.noise, std)
    masked = span_mask(length, frames.shape[1], rng, config.time_masks, config.time_width)
    hide(frames, masked.unsqueeze(-1) | feature_mask(frames, rng, config), mean)
    clear_padding(frames, length)
    return length


def two_views(
    batch: Batch,
    rng: torch.Generator,
    config: Augmentation,
    *,
    hidden: float = 0.15,  # share of the first view's frames that are masked, to be predicted
    span: int = 8,  # frames masked together: a single one follows from its neighbours
    mean: Tensor | None = None,
    std: Tensor | float = 1.0,
) -> Batch:
    """Two augmented views of a batch, in place of its frames and lengths; other columns are kept.

    view         (B, 2, T, D)
    view_length  (B, 2)        int64
    target       (B, T, D)     the first view without noise or masks
    hidden       (B, T)        bool, masked frames of the first view, to be predicted
    """
    views = batch["frames"].unsqueeze(1).repeat(1, 2, 1, 1)
    whole = views.flatten(0, 1)  # the same memory
    length = crop(whole, batch["length"].unsqueeze(1).expand(-1, 2).flatten(), rng, config.crop)
    target, first = views[:, 0].clone(), length.view(-1, 2)[:, 0]
    add_noise(whole, rng, config.noise, std)
    masked = span_mask(length, whole.shape[1], rng, config.time_masks, config.time_width)
    places = hidden_spans(first, whole.shape[1], rng, hidden, span)
    masked.view(-1, 2, whole.shape[1])[:, 0] |= places
    hide(whole, masked.unsqueeze(-1) | feature_mask(whole, rng, config), mean)
    clear_padding(whole, length)
    rest = {name: tensor for name, tensor in batch.items() if name not in ("frames", "length")}
    return {"view": views, "view_length": length.view(-1, 2), "target": target, "hidden": places} | rest


def crop(frames: Tensor, length: Tensor, rng: torch.Generator, most: float) -> Tensor:
    """Move a random part of each sequence to the front, in place, at least 1 - most of it; returns the new lengths."""
    cut, at = _uniform((2, len(length)), rng, frames.device, axis=1)
    kept: Tensor = (length * (1 - most * cut)).round().long().clamp(min=1).minimum(length)
    start = _start(length - kept, at)
    num_items, num_frames = frames.shape[:2]
    time = torch.arange(num_frames, device=frames.device)
    rows = (start.unsqueeze(-1) + time).clamp(max=num_frames - 1)  # behind the new end: anything, cleared below
    rows += num_frames * torch.arange(num_items, device=frames.device).unsqueeze(-1)
    frames.copy_(frames.flatten(0, 1).index_select(0, rows.flatten()).view(frames.shape))
    clear_padding(frames, kept)
    return kept


def add_noise(frames: Tensor, rng: torch.Generator, most: float, std: Tensor | float = 1.0) -> None:
    """Add white noise in place, padding included; each sequence draws its strength up to `most` times std."""
    strength = most * _uniform((len(frames), 1, 1), rng, frames.device)

    def normal(whole: tuple[int, ...]) -> Tensor:
        return torch.randn(whole, dtype=frames.dtype, device=frames.device, generator=rng)

    noise = drawn(normal, tuple(frames.shape))
    frames.addcmul_(noise, (strength * std).to(frames.dtype))


def span_mask(length: Tensor, num_frames: int, rng: torch.Generator, count: int, most: float) -> Tensor:
    """(B, T) bool: `count` spans of each sequence, each up to a share `most` of it, never all; they may overlap."""
    if not count:
        return torch.zeros(len(length), num_frames, dtype=torch.bool, device=length.device)
    width, at = _uniform((2, count, len(length), 1), rng, length.device, axis=2)
    whole = length.unsqueeze(-1)
    spans = (width * (most * whole + 1)).long().minimum((whole - 1).clamp(min=0))
    start = _start(whole - spans, at)
    time = torch.arange(num_frames, device=length.device)
    inside: Tensor = (time >= start) & (time < start + spans)
    return inside.any(0)


def feature_mask(frames: Tensor, rng: torch.Generator, config: Augmentation) -> Tensor:
    """(B, 1, D) bool: bands of features of each sequence."""
    num_items, _, dim = frames.shape
    whole = torch.full((num_items,), dim, device=frames.device)
    return span_mask(whole, dim, rng, config.feature_masks, config.feature_width).unsqueeze(1)


def hidden_spans(length: Tensor, num_frames: int, rng: torch.Generator, share: float, span: int) -> Tensor:
    """(B, T) bool: random spans that cover about a share of each sequence.

    A span is at most a quarter of its sequence. At least one frame is masked and at least one is not; a sequence of one
    frame is not masked.
    """
    valid, time = frame_mask(length, num_frames), torch.arange(num_frames, device=length.device)
    draws = _uniform((len(length), num_frames), rng, length.device)
    spans = (length // 4).clamp(min=1, max=span).unsqueeze(-1)
    # each frame begins a span with the probability that leaves 1 - share of the frames outside all spans
    begun = (draws < 1 - (1 - share) ** (1 / spans)).cumsum(1)
    over = functional.pad(begun, (1, 0)).gather(1, (time + 1 - spans).clamp(min=0))  # spans begun that long ago
    hidden: Tensor = (begun > over) | (draws.masked_fill(~valid, 2).argmin(1, keepdim=True) == time)
    return hidden & valid & (draws.masked_fill(~valid, -1).argmax(1, keepdim=True) != time)


def hide(frames: Tensor, masked: Tensor, mean: Tensor | None = None) -> None:
    """Set masked places, in place, to the features' mean or to 0; masked broadcasts to the frames."""
    if mean is None:
        frames.masked_fill_(masked, 0)
    else:
        torch.where(masked, mean.to(frames.dtype), frames, out=frames)


def clear_padding(frames: Tensor, length: Tensor) -> None:
    """Set frames behind each end to 0, in place."""
    frames.masked_fill_(~frame_mask(length, frames.shape[1]).unsqueeze(-1), 0)


def _uniform(shape: tuple[int, ...], rng: torch.Generator, device: torch.device, axis: int = 0) -> Tensor:
    """Draws from [0, 1); the axis is the sequences."""
    return drawn(lambda whole: torch.rand(whole, device=device, generator=rng), shape, axis)


def _start(room: Tensor, at: Tensor) -> Tensor:
    """Start of a span with that much room, for draws `at` in [0, 1)."""
    start: Tensor = (at * (room + 1)).long()
    return start.minimum(room)

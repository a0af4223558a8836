"""Summary statistics of ragged sequences: what a plain model would be given, and what zero-mean kernels cannot see.

Axes: B sequences, T frames, D channels. Values are rounded to multiples of 2⁻¹⁴ first: sums of these are exact in
float64, so that the order of addition, and with it the batch, has no influence.
"""

import torch
from torch import Tensor

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_GRID = 2.0**14
_LARGEST = 1e4  # standard deviations; what is beyond is cut off


def num_statistics(dim: int) -> int:
    return dim * (len(QUANTILES) + 6) + 1


@torch.no_grad()
def summary(frames: Tensor, length: Tensor) -> Tensor:
    """(B, 13 D + 1) float32: mean, spread, quantiles, both of the steps, first, last; logarithm of the length.

    frames  (B, T, D)  float32, normalised; values behind the end have no influence
    length  (B,)       int64, at least 1
    """
    valid = (torch.arange(frames.shape[1], device=frames.device) < length[:, None])[..., None]
    x = (frames.clamp(-_LARGEST, _LARGEST) * _GRID).round() / _GRID
    mean, spread = _moments(x, valid, length)
    steps, both = x[:, 1:] - x[:, :-1], valid[:, 1:]
    _, step_spread = _moments(steps, both, (length - 1).clamp(min=1))
    step_size = (steps.abs() * both).sum(1, dtype=torch.float64) / (length - 1).clamp(min=1)[:, None]
    ordered = x.masked_fill(~valid, torch.inf).sort(1).values
    last = length - 1
    parts = [mean, spread, step_spread, step_size, x[:, 0], x[torch.arange(x.shape[0], device=x.device), last]]
    for quantile in QUANTILES:
        place = quantile * last.double()
        low, high = place.floor().long(), place.ceil().long()
        share = (place - low)[:, None]
        below, above = (ordered[torch.arange(x.shape[0], device=x.device), at].double() for at in (low, high))
        parts.append(below + share * (above - below))
    parts.append(length.double().log()[:, None])
    return torch.cat([part.float() for part in parts], 1)


def _moments(x: Tensor, valid: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the valid frames, (B, D) float64."""
    mean = (x * valid).sum(1, dtype=torch.float64) / count[:, None]
    square = (x.double().square() * valid).sum(1) / count[:, None]
    return mean, (square - mean.square()).clamp(min=0).sqrt()

"""Contrast: an image's own range of values, stretched to the 256 levels a network sees.

The darkest hundredth becomes black and the brightest fivehundredth white, over all channels together, so that colours
stay. A faint image then looks like a bright one; a range of fewer than 16 levels is noise and is not stretched further.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUANTILES = (0.01, 0.998)
LEAST_RANGE = 16
_SAMPLED = 2**16  # pixels from which the quantiles are taken


def contrast_of(image: NDArray[np.uint8]) -> tuple[float, float]:
    """The values of an image, (H, W, 3) uint8, that are shown as black and as white."""
    low, high = _usual(_some(image))
    return float(low), float(max(high, low + LEAST_RANGE))


def as_grey(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """image (H, W, 3) uint8; one that shows a single stain in red, green or blue becomes grey."""
    some = _some(image)
    if np.array_equal(some[..., 0], some[..., 1]) and np.array_equal(some[..., 1], some[..., 2]):
        return image
    ranges = [high - low for low, high in (_usual(some[..., channel]) for channel in range(3))]
    if sorted(ranges)[1] >= min(LEAST_RANGE, max(ranges) / 8):
        return image
    channel = image[..., int(np.argmax(ranges))]
    return np.repeat(channel[..., None], 3, axis=2)


def _some(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    step = max(1, int((image.shape[0] * image.shape[1] / _SAMPLED) ** 0.5))
    return image[::step, ::step]


def _usual(values: NDArray[np.uint8]) -> tuple[int, int]:
    """The values at QUANTILES."""
    counts = np.bincount(values.ravel(), minlength=256).cumsum()
    low, high = np.searchsorted(counts, np.array(QUANTILES) * counts[-1]).tolist()
    return low, high


def stretch(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """image (H, W, 3) uint8 with its contrast stretched, a single stain as grey."""
    image = as_grey(image)
    low, high = contrast_of(image)
    levels = (np.arange(256) - low) * (255 / (high - low))
    return np.asarray(np.rint(levels).clip(0, 255).astype(np.uint8)[image])


def stretch_batch(images: Tensor) -> Tensor:
    """images (B, 3, H, W) uint8, each with its own contrast stretched; nothing waits for the device."""
    some = images[:, :, ::4, ::4].flatten(1).sort(1).values
    low, high = (some[:, round(quantile * (some.shape[1] - 1))].float() for quantile in QUANTILES)
    gain = 255 / (high - low).clamp(min=LEAST_RANGE)
    return ((images.float() - low.view(-1, 1, 1, 1)) * gain.view(-1, 1, 1, 1)).round_().clamp_(0, 255).to(torch.uint8)

"""Which precision, memory layout and compilation to run a network with: the fastest whose masks are those of fp32.

Axes: B images, H rows, W columns. The truth is the network in fp32, contiguous, not compiled. A setting is refused when
more than a stated share of mask pixels differs from it. Where masks say nothing, since random weights put every
probability near the threshold or since the images show nothing to find, the probabilities themselves are compared.
"""

import gc
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.device import Halving
from brim.errors import ConfigError
from brim.segmentation.networks.network import Network, Setting
from brim.segmentation.scenes.cells import make_cells
from brim.segmentation.tuning.batch_sizes import LAYOUTS, PRECISIONS

THRESHOLD: Final = 0.5
PROBABILITY_TOLERANCE: Final = 0.05  # largest difference, where masks say nothing
DIMENSIONS: Final = {"precision": PRECISIONS, "layout": LAYOUTS, "compile": (False, True)}
TRUTH: Final = Setting()  # fp32, contiguous, eager

_FIELDS = {"precision": "precision", "layout": "layout", "compile": "compiled"}
_SEED = 20  # of the generated images
_TELLING = (0.001, 0.999)  # share of foreground outside of which masks agree whatever the setting does


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a setting's answers differ from those of fp32."""

    mask_difference: float  # share of pixels on the other side of the threshold
    probability_difference: float  # largest of a pixel; infinite where an answer was not a number
    tolerance: float  # of the one that was judged by
    by_masks: bool  # else by probabilities
    batch: int  # images that went through at once

    @property
    def is_accepted(self) -> bool:
        """Whether the setting may be used."""
        difference = self.mask_difference if self.by_masks else self.probability_difference
        return difference <= self.tolerance and math.isfinite(self.probability_difference)

    def describe(self, setting: Setting) -> str:
        """The judgement in words."""
        verb = "accepted" if self.is_accepted else "refused"
        if not math.isfinite(self.probability_difference):
            return f"{verb} {label(setting)}: its logits are not finite numbers"
        if self.by_masks:
            return (
                f"{verb} {label(setting)}: {_percent(self.mask_difference)} of mask pixels differ from fp32 "
                f"(tolerance {_percent(self.tolerance)})"
            )
        return (
            f"{verb} {label(setting)}: probabilities differ from fp32 by up to {self.probability_difference:.2g} "
            f"(tolerance {self.tolerance:.2g})"
        )


class Reference:
    """The fp32 answers on some images, and settings judged by them."""

    def __init__(
        self, module: nn.Module, device: torch.device, images: Tensor, *, trained: bool, tolerance: float
    ) -> None:
        """Run the images, (B, 3, H, W) uint8, one by one through the network in fp32."""
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8 or not len(images):
            found = f"{images.dtype} {list(images.shape)}"
            raise ConfigError(f"images are {found}; expected uint8 of shape (B, 3, H, W) with at least one image")
        self.images = images.to(device)
        network = Network(module, device, TRUTH)
        self._truth = torch.cat([_probabilities(network, image) for image in torch.split(self.images, 1)])
        self._device = device
        share = (self._truth > THRESHOLD).float().mean().item()
        self.why_not_masks = "" if trained else "weights look random"  # why masks say nothing, where they do
        if trained and not _TELLING[0] <= share <= _TELLING[1]:
            self.why_not_masks = f"{_percent(share)} of the pixels are foreground in fp32"
        self.tolerance = PROBABILITY_TOLERANCE if self.why_not_masks else tolerance

    def judge(self, network: Network) -> Judgement:
        """Compare a network's answers, all images at once or as many as fit."""
        halving = Halving(len(self.images), self._device)
        found = torch.cat(halving.run(lambda part: _probabilities(network, part), self.images))
        differs = (found > THRESHOLD) != (self._truth > THRESHOLD)
        largest = (found - self._truth).abs().max().item()
        return Judgement(
            mask_difference=differs.float().mean().item(),
            probability_difference=largest if math.isfinite(largest) else float("inf"),
            tolerance=self.tolerance,
            by_masks=not self.why_not_masks,
            batch=min(len(self.images), halving.size),
        )


def settings(search: Collection[str], default: Setting) -> list[Setting]:
    """The settings to compare, simplest first: dimensions in `search` vary, the others are the default's."""

    def choices() -> Iterator[list[str | bool]]:
        for name, values in DIMENSIONS.items():
            yield list(values) if name in search else [getattr(default, _FIELDS[name])]

    return [Setting(**dict(zip(_FIELDS.values(), choice, strict=True))) for choice in product(*choices())]  # type: ignore[arg-type]


def label(setting: Setting) -> str:
    """A setting in short: "bf16/channels_last/compiled"."""
    return "/".join([setting.precision, setting.layout, *["compiled"] * setting.compiled])


def is_trained(module: nn.Module) -> bool:
    """Whether the weights look trained: a network fresh from its factory has batch norms that have seen nothing."""
    state = module.state_dict()
    means = [value for name, value in state.items() if name.endswith("running_mean")]
    variances = [value for name, value in state.items() if name.endswith("running_var")]
    if not means:
        return True  # nothing to tell by
    return any(bool(mean.any()) for mean in means) or any(bool((value - 1).any()) for value in variances)


def sample_images(device: torch.device, size: int, count: int) -> Tensor:
    """Generated images of cells on the device, (B, 3, size, size) uint8."""
    images = [make_cells(_SEED, index, size, size)[0] for index in range(count)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().to(device)


def release(device: torch.device) -> None:
    """Give back what a network that is gone held, so that the next is measured alone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _probabilities(network: Network, images: Tensor) -> Tensor:
    return torch.sigmoid(network(images))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"

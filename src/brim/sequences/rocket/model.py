"""Features of sequences, of their steps and their summary statistics, with linear heads that are averaged.

Axes: B sequences of a batch, T frames, D channels, F features, H heads, K outputs, E embedding.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import CoreThreads
from brim.errors import ConfigError
from brim.sequences.model import Classifier, Committee, Network
from brim.sequences.rocket.hydra import Hydra
from brim.sequences.rocket.kernels import Floats, MiniRocket
from brim.sequences.rocket.summary import num_statistics, summary

RocketTask = Literal["classification", "regression"]

KERNEL_VIEWS = ("frames", "steps")  # what MiniRocket's kernels are applied to; Hydra's see both
VIEWS = (*KERNEL_VIEWS, "hydra", "statistics")  # groups of features, in this order
CHUNK = 128  # sequences whose features are computed between reports of progress
_PADDED_NUMBERS = 1 << 25  # of a batch of sequences of similar length
_ROWS = 16  # whose statistics a thread computes at once
_PARTS = ("dilations", "per_kernel", "channels", "thresholds")
_HYDRA_PARTS = ("dilations", "weights", "channels", "scale")


class RocketFeatures:
    """What turns sequences into features: normalisation, kernels for each view, summary statistics."""

    def __init__(
        self, mean: Tensor, scale: Tensor, kernels: Mapping[str, MiniRocket], hydra: Hydra | None = None
    ) -> None:
        """mean and scale are (D,) float32, on the host."""
        self.mean, self.scale, self.kernels, self.hydra = mean, scale, dict(kernels), hydra
        self.dim = len(mean)

    @classmethod
    def fit(
        cls,
        sequences: Sequence[Floats],
        mean: Tensor,
        scale: Tensor,
        num_features: int,
        seed: int = 0,
        views: Collection[str] = VIEWS,
    ) -> Self:
        """Draw the kernels; thresholds come from some of the training sequences, (T, D) float32, not normalised."""
        self = cls(mean, scale, {})
        normalised = [self._normalised(torch.from_numpy(one)).numpy() for one in sequences]
        for number, view in enumerate(view for view in KERNEL_VIEWS if view in views):
            viewed = normalised if view == "frames" else list(map(_steps, normalised))
            self.kernels[view] = MiniRocket.fit(viewed, num_features=num_features, seed=(seed + number) % 2**32)
        if "hydra" in views:
            self.hydra = Hydra.fit(normalised, num_features=num_features, seed=seed)
        return self

    @property
    def widths(self) -> dict[str, int]:
        """Number of features of each view."""
        widths = {name: one.num_features for name, one in self.kernels.items()}
        if self.hydra is not None:
            widths["hydra"] = self.hydra.num_features
        return widths | {"statistics": num_statistics(self.dim)}

    def of(self, sequences: Sequence[Floats], device: torch.device) -> Tensor:
        """(n, F) float32 on the device, of ragged sequences on the host."""
        lengths = torch.tensor([len(one) for one in sequences])
        out = torch.empty(len(sequences), sum(self.widths.values()), device=device)
        order, first = lengths.argsort(descending=True), 0
        while first < len(order):
            longest = int(lengths[order[first]])
            rows = order[first : first + max(1, _PADDED_NUMBERS // (longest * self.dim))]
            rows = rows[2 * lengths[rows] >= longest]
            frames = torch.zeros(len(rows), longest, self.dim)
            for place, row in enumerate(rows.tolist()):
                frames[place, : lengths[row]] = torch.from_numpy(sequences[row])
            out[rows.to(device)] = self.of_batch(frames.to(device), lengths[rows].to(device))
            first += len(rows)
        return out

    def of_batch(self, frames: Tensor, length: Tensor) -> Tensor:
        """(B, F) float32 of a padded batch, (B, T, D), on its device."""
        x = self._normalised(frames.float())
        parts = [self.kernels["frames"].features_on(x, length)] if "frames" in self.kernels else []
        if "steps" in self.kernels:
            steps = x[:, 1:] - x[:, :-1] if x.shape[1] > 1 else x
            if x.shape[1] > 1:  # a single frame has no steps; its own values stand for them
                single = length == 1
                steps = torch.where(single[:, None, None], x[:, :-1], steps)
            parts.append(self.kernels["steps"].features_on(steps, (length - 1).clamp(min=1)))
        if self.hydra is not None:
            parts.append(self.hydra.features_on(x, length))
        return torch.cat([*parts, _summary(x, length)], 1)

    def _normalised(self, frames: Tensor) -> Tensor:
        return (frames - self.mean.to(frames.device)) * self.scale.to(frames.device)

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name; from_tensors reads it back."""
        parts = {
            f"{name}.{part}": torch.from_numpy(np.ascontiguousarray(getattr(one, part)))
            for name, one in self.kernels.items()
            for part in _PARTS
        }
        if self.hydra is not None:
            parts |= {f"hydra.{part}": getattr(self.hydra, part) for part in _HYDRA_PARTS}
        return {"mean": self.mean, "scale": self.scale, **parts}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """KeyError or ValueError if something is missing or does not fit."""
        mean, scale = tensors["mean"], tensors["scale"]
        kernels = {}
        for name in KERNEL_VIEWS:
            if f"{name}.thresholds" in tensors:
                parts = {part: tensors[f"{name}.{part}"].numpy() for part in _PARTS}
                kernels[name] = MiniRocket(dim=len(mean), **parts)
        hydra = Hydra(**{part: tensors[f"hydra.{part}"] for part in _HYDRA_PARTS}) if "hydra.scale" in tensors else None
        return cls(mean, scale, kernels, hydra)


def _summary(x: Tensor, length: Tensor) -> Tensor:
    if x.is_cuda:
        return summary(x, length)
    with CoreThreads() as threads:
        starts = range(0, len(x), _ROWS)
        return torch.cat(threads.map(lambda at: summary(x[at : at + _ROWS], length[at : at + _ROWS]), starts))


def _steps(x: Floats) -> Floats:
    return np.diff(x, axis=0) if len(x) > 1 else x


class Rocket(Network):
    """Features with averaged linear heads: frames and lengths in, log probabilities or values out."""

    weight: Tensor  # (H, F, K)
    bias: Tensor  # (H, K)
    share: Tensor  # (H,) weight of each head, of sum 1
    middle: Tensor  # (F,) mean of the features
    plane: Tensor  # (F, E) principal axes of the features

    def __init__(
        self, features: RocketFeatures, heads: Mapping[str, Tensor], task: RocketTask = "classification"
    ) -> None:
        super().__init__()
        self.features, self.task, self.is_regression = features, task, task == "regression"
        self.outputs = heads["bias"].shape[1]
        for name in ("weight", "bias", "share", "middle", "plane"):
            self.register_buffer(name, heads[name])
        if self.weight.shape != (len(self.share), sum(features.widths.values()), self.outputs):
            raise ConfigError(f"weights of shape {list(self.weight.shape)} do not fit the kernels")

    @property
    def dim(self) -> int:
        return self.features.dim

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """(B, K) log probabilities; values for regression."""
        return self.outputs_of(frames, length)[1]

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, E) and outputs (B, K) of a padded batch."""
        features = self.features.of_batch(frames, length)
        return (features - self.middle) @ self.plane, self.head(features)

    def head(self, features: Tensor) -> Tensor:
        """(B, K) from features (B, F)."""
        each = torch.einsum("bf,hfk->hbk", features, self.weight) + self.bias[:, None]
        if self.task == "regression":
            return torch.einsum("hbk,h->bk", each, self.share)
        return (each.log_softmax(-1) + self.share.log()[:, None, None]).logsumexp(0)

    @torch.no_grad()
    def predict_proba(self, sequences: Sequence[Floats | Tensor]) -> Tensor:
        """(n, K) float32 probabilities of ragged sequences, (T, D) each; for regression the values."""
        device, parts = self.bias.device, []
        for first in range(0, len(sequences), CHUNK):
            chunk = [as_frames(one, self.dim) for one in sequences[first : first + CHUNK]]
            parts.append(self.head(self.features.of(chunk, device)).cpu())
        outputs = torch.cat(parts)
        return outputs if self.task == "regression" else outputs.exp()

    def predict(self, sequences: Sequence[Floats | Tensor]) -> Tensor:
        """(n,) int64 the most likely classes; for regression (n, K) the values."""
        outputs = self.predict_proba(sequences)
        return outputs if self.task == "regression" else outputs.argmax(1)

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name; from_tensors reads it back."""
        heads = {name: getattr(self, name) for name in ("weight", "bias", "share", "middle", "plane")}
        return {**self.features.tensors(), **heads}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], task: RocketTask = "classification") -> Self:
        return cls(RocketFeatures.from_tensors(tensors), tensors, task)


def as_frames(sequence: Floats | Tensor, dim: int | None = None) -> Floats:
    """(T, D) float32 on the host; something else, or values that are not finite, are a ConfigError."""
    frames = np.ascontiguousarray(sequence.cpu() if isinstance(sequence, Tensor) else sequence, dtype=np.float32)
    if frames.ndim != 2 or not len(frames) or (dim is not None and frames.shape[1] != dim):
        expected = "(T, D)" if dim is None else f"(T, {dim})"
        raise ConfigError(f"a sequence has the shape {list(frames.shape)}, expected {expected} with T at least 1")
    if not np.isfinite(frames).all():
        at = int(np.flatnonzero(~np.isfinite(frames).all(1))[0])
        raise ConfigError(f"frame {at} of a sequence holds NaN or Inf; remove or interpolate such frames")
    return frames


class RocketBlend(Network):
    """The average of rocket's and a network's probabilities, or numbers."""

    def __init__(self, rocket: Rocket, network: Classifier | Committee, share: float) -> None:
        """share, between 0 and 1, is the weight of the network."""
        super().__init__()
        self.rocket, self.network, self.share = rocket, network, min(max(share, 1e-6), 1 - 1e-6)
        self.is_regression = rocket.is_regression

    @property
    def dim(self) -> int:
        return self.rocket.dim

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        """Log probabilities, (B, K), or numbers, (B, 1)."""
        return self.outputs_of(frames, length)[1]

    def outputs_of(self, frames: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Both embeddings side by side, and log probabilities or numbers."""
        ours, logits = self.rocket.outputs_of(frames, length)
        theirs, others = self.network.outputs_of(frames, length)
        embedding = torch.cat([ours, theirs.float()], 1)
        if self.is_regression:
            return embedding, torch.lerp(logits, others.float(), self.share)
        parts = [
            logits.log_softmax(-1) + math.log(1 - self.share),
            others.float().log_softmax(-1) + math.log(self.share),
        ]
        return embedding, torch.stack(parts).logsumexp(0)

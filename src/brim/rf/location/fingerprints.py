"""Location by comparison: training samples that were heard alike, of one fixed network, vote for their places.

Axes: B samples, N of the training data, S stations. A fingerprint is the strength at every station, relative to the
mean of those that hear unless the power is known; a station that does not hear counts as one at its threshold. The
estimate is kernel regression (Nadaraya and Watson) whose width is the best of a few on training samples left out.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from brim.rf.config import GenerateConfig
from brim.rf.features import F
from brim.rf.location.model import Estimate, station_numbers
from brim.rf.location.solver import SampleRows, StrengthModel
from brim.rf.physics.geometry import to_local

FINGERPRINT_FILE = "fingerprints.safetensors"  # of a run
MOST = 60_000  # training samples that are kept
_WIDTHS_DB = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 9.0)  # per station
_LEFT_OUT = 500  # samples that choose the width
_NEAREST = 400  # training samples that count
_LEAST_M = 100.0  # no answer is more certain


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Strengths and places of training samples."""

    strength_db: Tensor  # (N, S) float32
    place: Tensor  # (N, 3) float32 lat, lon in degrees and the height that solvers assume
    width_db: Tensor  # () float32
    power_known: bool
    config: GenerateConfig

    @classmethod
    def of(cls, rows: SampleRows, config: GenerateConfig, power_known: bool) -> Self:
        """The first samples of the training data; their transmitters are among the rows."""
        kept = {name: value[:MOST] for name, value in rows.items()}
        place = kept["transmitter"].double().clone()
        place[:, 2] = StrengthModel.of(config).tx_height_m
        own = cls(_strengths(kept, config, power_known), place, torch.tensor(1.0), power_known, config)
        return cls(own.strength_db, own.place, own._best_width(), power_known, config)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "strength_db": self.strength_db.contiguous(),
            "place": self.place.contiguous(),
            "width_db": self.width_db,
        }

    def locate(self, rows: SampleRows, origin: Tensor) -> Estimate:
        """Where samples are, in the frames of the origins."""
        device = origin.device
        strength = _strengths(rows, self.config, self.power_known)
        weight, near = self._weights(strength, self.strength_db.to(device), self.width_db.to(device))
        place = self.place.to(device)[near]  # (B, K, 3)
        flat = to_local(place, origin[:, None])[..., :2]
        mean = (weight[..., None] * flat).sum(1)
        off = flat - mean[:, None]
        spread = (weight[..., None] * off).mT @ off + torch.eye(2, device=device, dtype=off.dtype) * _LEAST_M**2
        root = torch.linalg.cholesky_ex(spread)[0]
        return Estimate.single(mean, root, origin)

    def _weights(self, strength: Tensor, known: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Shares (B, K) of the nearest training samples, and which they are."""
        squares = torch.cdist(strength, known).square() / strength.shape[1]
        near = squares.topk(min(_NEAREST, len(known)), largest=False)
        return torch.softmax(-0.5 * near.values / width.square(), -1), near.indices

    def _best_width(self) -> Tensor:
        left_out = max(1, min(_LEFT_OUT, len(self.strength_db) // 5))
        known, flat = self.strength_db[left_out:], to_local(self.place, self.place[:1])[..., :2].float()
        errors = []
        for width in _WIDTHS_DB:
            weight, near = self._weights(self.strength_db[:left_out], known, torch.tensor(width))
            place = (weight[..., None] * flat[left_out:][near]).sum(1)
            errors.append(float((place - flat[:left_out]).norm(dim=-1).median()))
        return torch.tensor(_WIDTHS_DB[errors.index(min(errors))])


def _strengths(rows: SampleRows, config: GenerateConfig, power_known: bool) -> Tensor:
    """(B, S) in dB above the threshold of hearing."""
    number = station_numbers(rows, config)
    level = torch.nan_to_num(rows["features"][..., F["snr_db"], 0]).float() - config.min_snr_db
    out = torch.zeros(len(level), len(config.stations) + 1, device=level.device)
    heard = torch.zeros_like(out).scatter(1, number, 1.0)[:, 1:]
    out = out.scatter(1, number, level.clamp(min=0))[:, 1:]
    if power_known:
        return out
    mean = (out * heard).sum(-1, keepdim=True) / heard.sum(-1, keepdim=True).clamp(min=1)
    return out - mean

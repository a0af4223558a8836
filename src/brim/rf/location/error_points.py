"""Where a run put transmitters and where they were, for a map: errors, bounds and ellipses of evenly taken samples.

Axes: B samples.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brim.rf.config import GenerateConfig
from brim.rf.location.evaluate import ellipse_scale
from brim.rf.location.run import Evaluation
from brim.rf.location.solver import geographic, target

MAX_POINTS = 2_000
LEVEL = 0.95  # probability inside an ellipse


class Ellipses(NamedTuple):
    """Half-axes in metres, and where the longer one points: degrees clockwise from north, 0 to below 180."""

    semi_major_m: Tensor  # (B,) float64
    semi_minor_m: Tensor
    azimuth_deg: Tensor


def ellipses(covariance: Tensor, level: float = LEVEL) -> Ellipses:
    """The ellipses that hold so much probability.

    covariance  (B, 2, 2)  m², of east and north
    """
    variance, axes = torch.linalg.eigh(covariance.double())  # ascending; axes are columns
    half = ellipse_scale(level) * variance.clamp(min=0).sqrt()
    east, north = axes[:, 0, 1], axes[:, 1, 1]
    azimuth = torch.rad2deg(torch.atan2(east, north)) % 180.0
    return Ellipses(half[:, 1], half[:, 0], torch.where(azimuth >= 180.0, 0.0, azimuth))


def error_points(found: Evaluation, config: GenerateConfig, limit: int = MAX_POINTS) -> list[dict[str, Any]]:
    """Truth, estimate, error, bound and 95 % ellipse of at most so many samples, by the names of the API.

    config is that of the run, whose solver assumes a height; so that errors are those of the metrics.
    """
    total = len(found.estimate.position_en)
    rows = torch.arange(0, total, max(1, math.ceil(total / limit)))
    position, covariance, origin = (part[rows].double() for part in found.estimate[:3])
    true = {"transmitter": found.rows["transmitter"][rows]}
    error = (position - target(true, origin, config)).norm(dim=-1)
    place, around = geographic(position, origin), ellipses(covariance)
    columns = (true["transmitter"], place, error, found.rows["crlb_m"][rows], *around)
    return [
        {
            "truth": [round(value, 7) for value in truth[:2]],
            "estimate": [round(value, 7) for value in estimate[:2]],
            "error_m": _metres(error_m),
            "bound_m": _metres(bound_m),
            "ellipse": {
                "semi_major_m": _metres(major_m),
                "semi_minor_m": _metres(minor_m),
                "azimuth_deg": round(azimuth_deg, 3) % 180,
            },
        }
        for truth, estimate, error_m, bound_m, major_m, minor_m, azimuth_deg in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _metres(value: float) -> float | None:
    """To the centimetre; JSON has no infinity."""
    return round(value, 2) if math.isfinite(value) else None

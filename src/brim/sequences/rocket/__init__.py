"""Rocket: fixed convolutional kernels, linear heads in closed form."""

from brim.sequences.rocket.fit import HeadScore, RocketFit, fit_features, fit_rocket, mixture, principal_axes
from brim.sequences.rocket.kernels import MiniRocket
from brim.sequences.rocket.model import Rocket, RocketBlend, RocketFeatures

__all__ = [
    "HeadScore",
    "MiniRocket",
    "Rocket",
    "RocketBlend",
    "RocketFeatures",
    "RocketFit",
    "fit_features",
    "fit_rocket",
    "mixture",
    "principal_axes",
]

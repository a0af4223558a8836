"""What kinds of image can be drawn: for each quantity of a scene, the range it is taken from.

A new kind is one entry here. Lengths are in diameters of the mean object unless they say pixels.
"""

from collections.abc import Sequence
from typing import Any

# Quantities of a scene, in the order in which `drawing` and `kernels` index them.
QUANTITIES = (
    "diameter",  # pixels, log-uniform
    "spacing",  # between neighbours
    "jitter",  # of an object's place, in spacings
    "occupancy",  # share of the places that hold an object
    "clumping",  # 0 objects anywhere, 1 in clumps
    "size_spread",  # deviation of the logarithm of the size
    "elongation",  # long over short axis is up to 1 + this
    "rod",  # half-length of the straight part
    "waviness",  # amplitude of the outline's harmonics
    "mitosis",  # share of small, bright, condensed objects
    "brightness",  # of an object in the middle; stain density where absorbing
    "brightness_spread",  # deviation of its logarithm
    "dome",  # 0 flat, 1 falls to nothing at the edge
    "rim",  # added along the edge
    "halo",  # added just outside the edge
    "core",  # added in the inner half
    "texture",  # relative, coarse
    "chromatin",  # relative, fine
    "background",
    "haze",  # out-of-focus objects, in brightnesses
    "fibre",  # texture of the background
    "debris",  # specks per 32 × 32 pixels
    "uneven",  # illumination, relative
    "blur",  # pixels, deviation of the lens
    "shot_noise",
    "read_noise",
    "absorbing",  # 0 emits light, 1 absorbs it
    "gamma",
    "colour",  # 0 or less grey, 1 the stain's own colours
    "compression",  # steps in which the coefficients of a JPEG are kept; 0 or less none
)

_FLUORESCENT: dict[str, Any] = {
    "diameter": (9, 90), "spacing": (0.85, 2.2), "jitter": (0.1, 0.5), "occupancy": (-0.05, 1.0), "clumping": (0, 1),
    "size_spread": (0.05, 0.3), "elongation": (0.1, 1.1), "rod": (0, 0), "waviness": (0.0, 0.1), "mitosis": (0, 0.08),
    "brightness": (0.12, 0.8), "brightness_spread": (0.05, 0.5), "dome": (0.0, 0.7), "rim": (-0.1, 0.2),
    "halo": (0, 0), "core": (0, 0), "texture": (0.0, 0.5), "chromatin": (0.0, 0.35), "background": (0.02, 0.15),
    "haze": (0.0, 0.5), "fibre": (0, 0.05), "debris": (0, 0.4), "uneven": (0, 0.5), "blur": (0.5, 2.6),
    "shot_noise": (0, 0.05), "read_noise": (0.003, 0.05), "absorbing": (0, 0), "gamma": (0.7, 1.3), "colour": (-1, 0.8),
    "compression": (-20, 10),
}  # fmt: skip

KINDS: dict[str, dict[str, tuple[float, float]]] = {
    "nuclei": _FLUORESCENT,
    "cytoplasm": _FLUORESCENT | {
        "diameter": (18, 100), "spacing": (0.75, 1.3), "waviness": (0.03, 0.16), "rim": (-0.1, 0.6),
        "core": (-0.25, 0.3),
        "texture": (0.1, 0.7), "elongation": (0.1, 1.4), "mitosis": (0, 0.02),
    },
    "brightfield": _FLUORESCENT | {
        "absorbing": (1, 1), "brightness": (0.08, 0.5), "rim": (0.1, 0.5), "halo": (-0.25, 0.1),
        "background": (0, 0.05),
        "haze": (0, 0.1), "core": (-0.1, 0.25), "mitosis": (0, 0), "colour": (-0.5, 0.6),
    },
    "phase": _FLUORESCENT | {
        "brightness": (-0.3, -0.05), "background": (0.4, 0.6), "halo": (0.1, 0.45), "rim": (-0.15, 0.2),
        "core": (-0.1, 0.1),
        "haze": (0, 0), "mitosis": (0, 0), "diameter": (12, 80), "waviness": (0.0, 0.16), "colour": (-1, 0.1),
    },
    "tissue": _FLUORESCENT | {
        "absorbing": (1, 1), "diameter": (9, 60), "spacing": (1.0, 2.4), "brightness": (0.4, 1.3),
        "texture": (0.1, 0.6),
        "chromatin": (0.1, 0.5), "dome": (0, 0.3), "rim": (0, 0.3), "background": (0.1, 0.5), "fibre": (0.2, 0.9),
        "haze": (0, 0.2), "blur": (0.5, 1.3), "mitosis": (0, 0.02), "colour": (0.6, 1.0),
    },
    "bacteria": _FLUORESCENT | {
        "diameter": (6, 16), "rod": (0.5, 2.2), "spacing": (1.6, 4.0), "jitter": (0.2, 0.5), "elongation": (0, 0.1),
        "waviness": (0, 0.03), "size_spread": (0.03, 0.15), "brightness": (-0.35, 0.8), "background": (0.02, 0.5),
        "halo": (0, 0.3), "mitosis": (0, 0), "haze": (0, 0.1), "blur": (0.5, 1.4), "texture": (0, 0.25),
        "chromatin": (0, 0.15),
    },
    "round": _FLUORESCENT | {
        "diameter": (10, 100), "spacing": (0.95, 2.2), "jitter": (0, 0.35), "elongation": (0, 0.08),
        "waviness": (0, 0.02),
        "size_spread": (0.02, 0.35), "brightness": (-0.4, 0.8), "background": (0.05, 0.6), "rim": (-0.2, 0.4),
        "texture": (0, 0.8), "mitosis": (0, 0), "core": (-0.2, 0.3), "uneven": (0, 0.8),
    },
}  # fmt: skip


def kinds_of(names: Sequence[str]) -> tuple[str, ...]:
    """Kinds by their names; each is drawn as often as it stands here. "all" is every kind, mostly nuclei."""
    every = ("nuclei",) * 5 + tuple(KINDS)
    return tuple(kind for name in names for kind in (every if name == "all" else (name,)))

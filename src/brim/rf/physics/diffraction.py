"""Loss behind the horizon and behind hills: Recommendation ITU-R P.526.

Axes: the leading axes are links, K the points of a terrain profile. Distances in metres, frequencies in MHz. The
effective Earth radius is 4/3 of the true one: the median of a standard atmosphere.
"""

import math

import numpy as np
from numpy.typing import NDArray

from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.ground_wave import CONDUCTIVITY, PERMITTIVITY

F64 = NDArray[np.float64]

EFFECTIVE_RADIUS_M = 4 / 3 * 6_371_000.0
_MIN_HEIGHT_M = 1.0  # of an antenna above the smooth Earth; the formulas divide by heights


def knife_edge_db(v: F64) -> F64:
    """J(ν), loss of one knife edge; ν > 0 when it stands above the line of sight."""
    above = v - 0.1
    loss = 6.9 + 20 * np.log10(np.sqrt(above * above + 1) + above)
    return np.where(v > -0.78, loss, 0.0)


def smooth_earth_db(frequency_mhz: float, distance_m: F64, height_1_m: F64, height_2_m: F64) -> F64:
    """Loss beyond free space over a smooth Earth, antennas at these heights above it; 0 with a clear line of sight.

    Section 3 of P.526: the residue series' first term beyond the horizon, and between the horizon and a clear path
    the value that a smaller Earth would give at its horizon, in proportion to the clearance that is missing.
    """
    h1, h2 = (np.maximum(height, _MIN_HEIGHT_M) for height in (height_1_m, height_2_m))
    d = np.maximum(distance_m, 1.0)
    horizon = math.sqrt(2 * EFFECTIVE_RADIUS_M) * (np.sqrt(h1) + np.sqrt(h2))
    beyond = _first_term_db(frequency_mhz, d, h1, h2, np.full_like(d, EFFECTIVE_RADIUS_M))
    clearance, required = _clearance_m(frequency_mhz, d, h1, h2)
    touching = _first_term_db(frequency_mhz, d, h1, h2, 0.5 * (d / (np.sqrt(h1) + np.sqrt(h2))) ** 2)
    near = np.where(clearance < required, (1 - clearance / required) * np.maximum(touching, 0.0), 0.0)
    return np.where(d >= horizon, np.maximum(beyond, 0.0), near)


def bullington_db(frequency_mhz: float, distance_m: F64, terrain_m: F64, height_1_m: F64, height_2_m: F64) -> F64:
    """Loss beyond free space over a terrain profile: Bullington's construction, section 4.5.1 of P.526.

    distance_m             (...)     between the antennas along the ground
    terrain_m              (..., K)  heights at equal steps strictly between the ends
    height_1_m, height_2_m (...)     antennas above the same datum
    """
    steps = terrain_m.shape[-1]
    share = np.arange(1, steps + 1) / (steps + 1)
    d = np.maximum(distance_m, 1.0)[..., None]
    h1, h2 = height_1_m[..., None], height_2_m[..., None]
    d1, d2 = share * d, (1 - share) * d
    ground = terrain_m + d1 * d2 / (2 * EFFECTIVE_RADIUS_M)  # the Earth bulges towards the middle
    wave = SPEED_OF_LIGHT / (frequency_mhz * 1e6)
    slope_1 = ((ground - h1) / d1).max(-1, keepdims=True)
    slope_2 = ((ground - h2) / d2).max(-1, keepdims=True)
    over = (ground - (h1 * d2 + h2 * d1) / d) * np.sqrt(2 * d / (wave * d1 * d2))
    hidden = slope_1[..., 0] >= ((h2 - h1) / d)[..., 0]
    at = np.clip((h2 - h1 + slope_2 * d) / np.where(hidden[..., None], slope_1 + slope_2, 1.0), 1e-3 * d, 0.999 * d)
    edge = (h1 + slope_1 * at - (h1 * (d - at) + h2 * at) / d) * np.sqrt(2 * d / (wave * at * (d - at)))
    loss = knife_edge_db(np.where(hidden, edge[..., 0], over.max(-1)))
    return np.asarray(loss + (1 - np.exp(-loss / 6)) * (10 + 0.02e-3 * d[..., 0]))


def _first_term_db(frequency_mhz: float, d: F64, h1: F64, h2: F64, radius_m: F64) -> F64:
    """−(F(X) + G(Y₁) + G(Y₂)), the Earth's radius as given."""
    radius_km = radius_m * 1e-3
    ground = math.hypot(PERMITTIVITY - 1, 18_000 * CONDUCTIVITY / frequency_mhz)
    k = 0.36 * (radius_km * frequency_mhz) ** (-1 / 3) * ground**-0.5  # horizontal polarisation
    beta = (1 + 1.6 * k**2 + 0.67 * k**4) / (1 + 4.5 * k**2 + 1.53 * k**4)
    x = 2.188 * beta * frequency_mhz ** (1 / 3) * radius_km ** (-2 / 3) * d * 1e-3
    far = 11 + 10 * np.log10(np.maximum(x, 1.6)) - 17.6 * np.maximum(x, 1.6)
    near = -20 * np.log10(np.minimum(x, 1.6)) - 5.6488 * np.minimum(x, 1.6) ** 1.425
    gain = np.where(x >= 1.6, far, near)
    for height in (h1, h2):
        b = 9.575e-3 * beta * beta * frequency_mhz ** (2 / 3) * radius_km ** (-1 / 3) * height
        over = np.maximum(b, 2.0) - 1.1
        high = 17.6 * np.sqrt(over) - 5 * np.log10(over) - 8
        low = 20 * np.log10(np.minimum(b, 2.0) + 0.1 * np.minimum(b, 2.0) ** 3)
        gain = gain + np.maximum(np.where(b > 2, high, low), 2 + 20 * np.log10(k))
    return np.asarray(-gain)


def _clearance_m(frequency_mhz: float, d: F64, h1: F64, h2: F64) -> tuple[F64, F64]:
    """Least height of the ray above the smooth Earth, and the height from which on nothing is lost."""
    c = (h1 - h2) / (h1 + h2)
    m = d * d / (4 * EFFECTIVE_RADIUS_M * (h1 + h2))
    inner = np.clip(1.5 * c * np.sqrt(3 * m / (m + 1) ** 3), -1.0, 1.0)
    b = 2 * np.sqrt((m + 1) / (3 * m)) * np.cos(np.pi / 3 + np.arccos(inner) / 3)
    d1 = d / 2 * (1 + b)
    d2 = d - d1
    bulge_1, bulge_2 = d1 * d1 / (2 * EFFECTIVE_RADIUS_M), d2 * d2 / (2 * EFFECTIVE_RADIUS_M)
    clearance = ((h1 - bulge_1) * d2 + (h2 - bulge_2) * d1) / d
    wave = SPEED_OF_LIGHT / (frequency_mhz * 1e6)
    return clearance, 0.552 * np.sqrt(np.maximum(d1 * d2, 1.0) * wave / d)

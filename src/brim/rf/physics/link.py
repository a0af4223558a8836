"""How strong: path loss, noise power, and the slope of the loss that bounds ranging by strength."""

import logging
import math

import numpy as np
from numpy.typing import NDArray

from brim.rf.config import CHANNEL_HZ, AreaType, GenerateConfig, PathLoss
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.ground_wave import attenuation_db

F64 = NDArray[np.float64]

_BOLTZMANN = 1.380649e-23  # J/K
_T0_K = 290.0
_MIN_DISTANCE_M = 10.0  # closer than this the far-field formulas mean nothing
_BREAK_M = 1_000.0  # log_distance is free space up to here
# ITU-R P.372, median man-made noise figure F_am = c − d·log10(f_MHz): (c, d) per environment.
_MAN_MADE: dict[AreaType, tuple[float, float]] = {
    "city": (76.8, 27.7),
    "residential": (72.5, 27.7),
    "rural": (67.2, 27.7),
}
# What each model was stated for: MHz, and distances in m; free space and log-distance are stated for any.
_VALID: dict[PathLoss, tuple[tuple[float, float], tuple[float, float]]] = {
    "hata": ((150.0, 1500.0), (1_000.0, 20_000.0)),
    "cost231": ((1500.0, 2000.0), (1_000.0, 20_000.0)),
    "ground_wave": ((0.01, 30.0), (1_000.0, 2_000_000.0)),
    "two_ray": ((30.0, 6000.0), (100.0, 50_000.0)),
}
_log = logging.getLogger("brim")


def noise_dbm(config: GenerateConfig) -> float:
    """Noise power in the 12.5 kHz channel, dBm: kT₀B·(f_a + f_r − 1), the factors linear."""
    c, d = _MAN_MADE[config.environment]
    external = 10 ** ((c - d * math.log10(config.frequency_mhz)) / 10)
    receiver = 10 ** (config.noise_figure_db / 10)
    return 10 * math.log10(_BOLTZMANN * _T0_K * CHANNEL_HZ * (external + receiver - 1) * 1e3)


def path_loss_db(config: GenerateConfig, distance_m: F64) -> F64:
    """Basic transmission loss in dB of the configured model."""
    d = np.maximum(distance_m, _MIN_DISTANCE_M)
    if config.loss == "free_space":
        return free_space_db(config.frequency_mhz, d)
    if config.loss == "log_distance":
        near = free_space_db(config.frequency_mhz, np.minimum(d, _BREAK_M))
        return near + 10 * config.loss_exponent * np.log10(np.maximum(d, _BREAK_M) / _BREAK_M)
    if config.loss == "two_ray":
        return two_ray_db(config.frequency_mhz, d, config.rx_antenna_m, config.tx_antenna_m)
    if config.loss == "ground_wave":
        return free_space_db(config.frequency_mhz, d) + attenuation_db(config.frequency_mhz, d)
    if config.loss == "cost231":
        return cost231_db(config.frequency_mhz, d, config.rx_antenna_m, config.tx_antenna_m, config.environment)
    return hata_db(config.frequency_mhz, d, config.rx_antenna_m, config.tx_antenna_m, config.environment)


def loss_exponent(config: GenerateConfig, distance_m: F64) -> F64:
    """Local slope of the loss, as the n of 10·n·log10(d)."""
    if config.loss == "free_space":
        return np.full_like(distance_m, 2.0)
    if config.loss == "log_distance":
        return np.where(distance_m > _BREAK_M, config.loss_exponent, 2.0)
    if config.loss in ("two_ray", "ground_wave"):
        rise = path_loss_db(config, distance_m * 1.01) - path_loss_db(config, distance_m / 1.01)
        return np.asarray(rise / (20 * math.log10(1.01)))
    return np.full_like(distance_m, (44.9 - 6.55 * math.log10(max(config.rx_antenna_m, 1.0))) / 10)


def free_space_db(frequency_mhz: float, distance_m: F64) -> F64:
    """Free-space basic transmission loss, ITU-R P.525: 20·log10(4πd/λ)."""
    return np.asarray(20 * np.log10(4 * np.pi * distance_m * frequency_mhz * 1e6 / SPEED_OF_LIGHT))


def hata_db(frequency_mhz: float, distance_m: F64, base_m: float, mobile_m: float, environment: AreaType) -> F64:
    """Okumura-Hata loss (Hata, IEEE Trans. VT-29, 1980): city = urban, residential = suburban, rural = open."""
    f = math.log10(frequency_mhz)
    base = math.log10(max(base_m, 1.0))
    mobile = (1.1 * f - 0.7) * mobile_m - (1.56 * f - 0.8)  # small and medium-sized cities
    urban = 69.55 + 26.16 * f - 13.82 * base - mobile + (44.9 - 6.55 * base) * np.log10(distance_m / 1e3)
    if environment == "residential":
        return np.asarray(urban - 2 * math.log10(frequency_mhz / 28) ** 2 - 5.4)
    if environment == "rural":
        return np.asarray(urban - 4.78 * f**2 + 18.33 * f - 40.94)
    return np.asarray(urban)


def cost231_db(frequency_mhz: float, distance_m: F64, base_m: float, mobile_m: float, environment: AreaType) -> F64:
    """COST-231 extension of Hata (final report of COST 231, 1999): city = metropolitan centre, else medium cities."""
    f, base = math.log10(frequency_mhz), math.log10(max(base_m, 1.0))
    mobile = (1.1 * f - 0.7) * mobile_m - (1.56 * f - 0.8)
    dense = 3.0 if environment == "city" else 0.0
    loss = 46.3 + 33.9 * f - 13.82 * base - mobile + (44.9 - 6.55 * base) * np.log10(distance_m / 1e3) + dense
    return np.asarray(loss)


def two_ray_db(frequency_mhz: float, distance_m: F64, base_m: float, mobile_m: float) -> F64:
    """Direct and ground-reflected ray over a plane: free space up to 4πh₁h₂/λ, then 40 dB a decade; heights ≥ 1 m."""
    heights = max(base_m, 1.0) * max(mobile_m, 1.0)
    turn = 4 * math.pi * heights * frequency_mhz * 1e6 / SPEED_OF_LIGHT
    beyond = 20 * np.log10(np.maximum(distance_m / turn, 1.0))
    return np.asarray(free_space_db(frequency_mhz, distance_m) + beyond)


def warn_outside_validity(config: GenerateConfig, reach_m: float) -> None:
    """Say once when a model is used outside the range it was stated for; links are at most `reach_m` long."""
    if config.loss not in _VALID:
        return
    (low, high), (near, far) = _VALID[config.loss]
    outside = []
    if not low <= config.frequency_mhz <= high:
        outside.append(f"frequency_mhz={config.frequency_mhz:g}")
    if reach_m > far:
        outside.append(f"links up to {reach_m / 1e3:.0f} km")
    if outside:
        stated = f"{low:g}-{high:g} MHz and {near / 1e3:g}-{far / 1e3:g} km"
        _log.warning("loss=%s is stated for %s; used outside it: %s", config.loss, stated, ", ".join(outside))

"""How well a position can be known: the Cramér-Rao bound from strengths and arrival times."""

import numpy as np
from numpy.typing import NDArray

from brim.rf.config import CHANNEL_HZ, GenerateConfig
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.link import loss_exponent
from brim.rf.physics.scene import Scenes

F64 = NDArray[np.float64]

_MIN_SHADOWING_DB = 0.1  # strength is never known better: the estimator's own error


def time_sigma_s(config: GenerateConfig, snr_db: F64, rms_frequency_hz: F64) -> F64:
    """Standard deviation of an arrival time, clock error included; infinite for a carrier without modulation.

    snr_db            (B, R)  of the link, in the channel
    rms_frequency_hz  (B,)    β, rms instantaneous frequency of the waveform
    """
    slope = (2 * np.pi * rms_frequency_hz[:, None]) ** 2
    energy = 2 * CHANNEL_HZ * config.duration_s * 10 ** (snr_db / 10)
    with np.errstate(divide="ignore"):
        return np.sqrt(config.clock_sigma_s**2 + 1 / (slope * energy))


def information(config: GenerateConfig, scenes: Scenes, rms_frequency_hz: F64) -> tuple[F64, F64, F64]:
    """Fisher information on the horizontal position (east-east, east-north, north-north), each (B,), in 1/m².

    Transmitter height and power are known, the emission time is not; present receivers only.
    """
    here = scenes.present
    # Derivative of the range by the transmitter's position: minus the horizontal part of the line of sight.
    range_m = np.maximum(scenes.range_m, 1.0)
    ue, un = -scenes.east / range_m, -scenes.north / range_m

    sigma_db = max(config.shadowing_db, _MIN_SHADOWING_DB)
    per_metre = 10 * loss_exponent(config, scenes.range_m) / (np.log(10) * range_m)  # dB/m
    strength = np.where(here, (per_metre / sigma_db) ** 2, 0.0)

    sigma_m = SPEED_OF_LIGHT * time_sigma_s(config, scenes.snr_db, rms_frequency_hz)
    weight = np.where(here, 1 / sigma_m**2, 0.0)
    total = np.maximum(weight.sum(-1), 1e-300)
    me, mn = (weight * ue).sum(-1), (weight * un).sum(-1)  # the unknown emission time takes the mean out
    both = strength + weight
    return (
        (both * ue * ue).sum(-1) - me * me / total,
        (both * ue * un).sum(-1) - me * mn / total,
        (both * un * un).sum(-1) - mn * mn / total,
    )


def crlb_m(config: GenerateConfig, scenes: Scenes, rms_frequency_hz: F64) -> F64:
    """sqrt(trace(J⁻¹)) in metres, (B,): no unbiased estimator has a smaller rms horizontal error."""
    jee, jen, jnn = information(config, scenes, rms_frequency_hz)
    det = jee * jnn - jen * jen
    return np.sqrt((jee + jnn) / np.maximum(det, 1e-300))

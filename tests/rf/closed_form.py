"""What a transmitter sends at any instant, in float64 from the message itself: nothing is sampled or interpolated."""

import numpy as np

from brim.rf.config import GenerateConfig
from brim.rf.physics.waveform import Messages

TABLE_HZ = 50_000.0


def message(messages: Messages, row: int, t: np.ndarray, derivative: int = 0) -> np.ndarray:
    """The message of nbfm or am at times t in s, or its integral over 2π with derivative −1."""
    out = np.zeros_like(t)
    for step, phase, a in zip(messages.step[row], messages.phase[row], messages.amplitude[row], strict=True):
        frequency = float(step) / 2**32 * TABLE_HZ
        angle = 2 * np.pi * (frequency * t + float(phase) / 2**32)
        out += float(a) * (np.cos(angle) if derivative == 0 else np.sin(angle) / frequency)
    return out


def sent(config: GenerateConfig, messages: Messages, row: int, peak: float, t: np.ndarray) -> np.ndarray:
    """The transmitted complex envelope at times t, unit mean power."""
    if config.waveform == "nbfm":
        return np.exp(1j * 2_500.0 / peak * message(messages, row, t, derivative=-1))
    if config.waveform == "am":
        depth = 0.8 / peak
        return (1 + depth * message(messages, row, t)) / np.sqrt(1 + depth**2) + 0j
    return np.ones_like(t) + 0j

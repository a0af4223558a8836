"""Rows without IQ: measurements drawn from the scene and from the errors that features are known to have.

Strengths and arrivals are those of the scene with Gaussian errors; other features are 0.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import GenerateConfig
from brim.rf.features import FEATURES, F
from brim.rf.generation.rows import crlb_m
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.philox import Purpose, normal, uniform
from brim.rf.physics.scene import make_scenes

FADING_DB = 1.5  # what is left of fading in a record's mean strength
TIMING_S = 0.3e-6  # echoes and fading in a record's mean arrival
_RMS_FREQUENCY_HZ = 700.0  # of the built-in waveform, nbfm
_MIN_SNR_DB = -20.0


def draw_rows(config: GenerateConfig, index: NDArray[np.int64]) -> dict[str, Tensor]:
    """Rows as a dataset holds them, of the accepted among the given attempts."""
    scenes = make_scenes(config, index)
    scenes = scenes[np.nonzero(scenes.accepted)[0]]
    draws = uniform(config.seed, scenes.index[:, None], np.arange(scenes.valid.shape[1]), Purpose.NOISE, 4)
    beta = np.full(len(scenes), _RMS_FREQUENCY_HZ)
    energy = 2 * 12_500 * config.duration_s * 10 ** (scenes.snr_db / 10)
    sigma_s = np.hypot(1 / (2 * np.pi * _RMS_FREQUENCY_HZ * np.sqrt(energy)), TIMING_S)
    power = scenes.power_dbm + FADING_DB * normal(draws[..., 0], draws[..., 1])
    arrival = scenes.delay_s + scenes.clock_error_s + scenes.echo_delay_s[..., 0]
    arrival = arrival + sigma_s * normal(draws[..., 2], draws[..., 3])
    reference = np.where(scenes.present, power, -np.inf).argmax(-1)
    later_us = (arrival - arrival[np.arange(len(scenes)), reference][:, None]) * 1e6
    floor = noise_dbm(config)
    features = np.zeros((*power.shape, len(FEATURES), 4), np.float32)
    columns = {
        "snr_db": np.maximum(power - floor, _MIN_SNR_DB),
        "rssi_dbm": 10 * np.log10(10 ** (power / 10) + 10 ** (floor / 10)),
        "noise_floor_dbm": np.full_like(power, floor),
        "arrival_difference_us": later_us,
        "arrival_sigma_us": sigma_s * 1e6,
    }
    for name, values in columns.items():
        features[:, :, F[name], [0, 2, 3]] = values[..., None]
    features[~scenes.present] = 0
    return {
        "features": torch.from_numpy(features),
        "present": torch.from_numpy(scenes.present),
        "valid": torch.from_numpy(scenes.valid),
        "receivers": torch.from_numpy(scenes.receivers),
        "transmitter": torch.from_numpy(scenes.transmitter),
        "reference": torch.from_numpy(reference),
        "gdop": torch.from_numpy(scenes.gdop.astype(np.float32)),
        "crlb_m": torch.from_numpy(crlb_m(config, scenes, beta).astype(np.float32)),
    }

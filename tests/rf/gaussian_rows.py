"""SampleRows as a dataset holds them, with measurements drawn straight from the model that the bound assumes: no IQ."""

import numpy as np
import torch

from brim.rf.config import GenerateConfig, preset
from brim.rf.features import FEATURES, F
from brim.rf.location.model import Estimate
from brim.rf.location.solver import TX_HEIGHT_M, NoiseModel
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef
from brim.rf.physics.link import loss_exponent, noise_dbm, path_loss_db
from brim.rf.physics.scene import make_scenes

PRODUCTION = preset("production", seed=3)
EXACT = NoiseModel(strength_bias_db=0.0, strength_db=0.0, timing_us=0.0, timing_snr_us=0.0, timing_spread=0.0)


def gaussian_rows(config: GenerateConfig = PRODUCTION, attempts: int = 64, *, noisy: bool = True, level: bool = False):
    """SampleRows of the accepted attempts; `level` puts every transmitter at the height that solvers assume."""
    scenes = make_scenes(config, np.arange(attempts))
    scenes = scenes[np.nonzero(scenes.accepted)[0]]
    place = scenes.transmitter.copy()
    place[:, 2] = TX_HEIGHT_M if level else place[:, 2]
    here = ecef(*(scenes.receivers[..., 0], scenes.receivers[..., 1], scenes.receivers[..., 2] + config.rx_antenna_m))
    there = ecef(place[:, :1], place[:, 1:2], place[:, 2:] + config.tx_antenna_m)
    distance = np.sqrt(sum((a - b) ** 2 for a, b in zip(here, there, strict=True)))
    power = config.tx_power_dbm - path_loss_db(config, distance) + noisy * scenes.shadowing_db
    arrival = distance / SPEED_OF_LIGHT + noisy * scenes.clock_error_s
    reference = np.where(scenes.present, power, -np.inf).argmax(-1)
    later = (arrival - arrival[np.arange(len(scenes)), reference][:, None]) * 1e6
    features = np.zeros((*power.shape, len(FEATURES), 4), np.float32)
    floor = noise_dbm(config)
    for name, value in (("snr_db", power - floor), ("noise_floor_dbm", 0 * power + floor), ("rssi_dbm", power)):
        features[:, :, F[name], :] = value[..., None]
    features[:, :, F["arrival_difference_us"], :] = later[..., None]
    features[:, :, [F["snr_db"], F["rssi_dbm"], F["arrival_difference_us"]], 1] = 0
    features[~scenes.present] = 0
    return {
        "features": torch.from_numpy(features),
        "present": torch.from_numpy(scenes.present),
        "valid": torch.from_numpy(scenes.valid),
        "receivers": torch.from_numpy(scenes.receivers),
        "transmitter": torch.from_numpy(place),
        "reference": torch.from_numpy(reference),
        "gdop": torch.from_numpy(scenes.gdop.astype(np.float32)),
        "crlb_m": torch.from_numpy(bound_m(config, scenes).astype(np.float32)),
    }


def bound_m(config, scenes):
    """(B,) Cramér-Rao bound with shadowing and clock errors alone, by the inverse of the whole information matrix."""
    slope = -np.stack([scenes.east, scenes.north], -1) / scenes.range_m[..., None]
    times = np.concatenate([slope, np.ones_like(slope[..., :1])], -1) / (SPEED_OF_LIGHT * config.clock_sigma_s)
    per_metre = 10 * loss_exponent(config, scenes.range_m) / np.log(10) / scenes.range_m
    strengths = np.concatenate([slope, 0 * slope[..., :1]], -1) * (per_metre / config.shadowing_db)[..., None]
    rows = np.concatenate([times, strengths], 1) * np.tile(scenes.present, 2)[..., None]
    return np.sqrt(np.trace(np.linalg.inv(rows.mT @ rows)[:, :2, :2], axis1=1, axis2=2))


def permuted(rows, order):
    """The same rows with their receivers in another order."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    moved = {name: rows[name][:, order] for name in ("features", "present", "receivers")}
    return rows | moved | {"reference": inverse[rows["reference"]]}


def padded(rows, extra=3, fill=1e4):
    """The same rows with absent receivers full of nonsense at the end."""
    num = len(rows["present"])
    more = {
        "features": torch.full((num, extra, *rows["features"].shape[2:]), fill),
        "present": torch.zeros(num, extra, dtype=torch.bool),
        "receivers": torch.full((num, extra, 3), 10.0, dtype=torch.float64),
    }
    return rows | {name: torch.cat([rows[name], value], 1) for name, value in more.items()}


def solver_estimate(batch):
    """What `prepare` found, in the form of a network's answer."""
    axes = batch["axes"]
    return Estimate.single(batch["solver_position"], axes, batch["origin"])

"""Rows of a dataset: packed measurements over the padded receiver axis, with the truth and the bounds behind them.

Axes: B samples, R receivers, M packed records, C chunks, F features.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, GenerateConfig
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.backend import Measured, Transmissions, record_power
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.link import loss_exponent, noise_dbm
from brim.rf.physics.scene import Scenes
from brim.rf.physics.waveform import rms_frequency_hz

TRUTH: tuple[tuple[str, str], ...] = (
    ("power_dbm", "dBm"),
    ("snr_db", "dB"),
    ("rssi_dbm", "dBm"),
    ("bandwidth_hz", "Hz"),
    ("power_record_dbm", "dBm"),
    ("snr_record_db", "dB"),
    ("link_power_dbm", "dBm"),
    ("link_snr_db", "dB"),
    ("noise_dbm", "dBm"),
    ("delay_s", "s"),
    ("clock_error_s", "s"),
    ("arrival_difference_us", "us"),
    ("frequency_offset_hz", "Hz"),
    ("distance_m", "m"),
    ("loss_db", "dB"),
    ("shadowing_db", "dB"),
    ("doppler_hz", "Hz"),
    ("coherence_time_s", "s"),
    ("delay_spread_us", "us"),
    ("rms_frequency_hz", "Hz"),
)
TRUTH_CHUNKS: tuple[tuple[str, str], ...] = (
    ("power_dbm", "dBm"),
    ("snr_db", "dB"),
    ("rssi_dbm", "dBm"),
    ("bandwidth_hz", "Hz"),
)
_MIN_SHADOWING_DB = 0.1  # strength is never known better: the estimator's own error
_PER_SAMPLE = 3 * 8 + 8 + 8 + 4 + 4  # transmitter, reference and index, gdop and crlb_m
_PER_SHARD = 2_048  # of its header and its entry in the manifest; measured 1.3 kB
_MANIFEST = 16_384  # of the rest of the manifest; measured 6 kB with seven stations


def assemble(
    config: GenerateConfig, batch: Transmissions, measured: Measured, *, chunks: bool = False
) -> dict[str, Tensor]:
    """Rows of the dataset: packed measurements laid out over the padded receiver axis, with truth and bounds."""
    scenes, pick = batch.scenes, (batch.links.sample, batch.links.receiver)
    shape = scenes.valid.shape
    power = np.zeros((*shape, NUM_CHUNKS))
    bandwidth = np.zeros((*shape, NUM_CHUNKS))
    power[pick], bandwidth[pick] = (measured.truth[..., k].double().numpy() for k in range(2))
    beta = rms_frequency_hz(config, batch.messages, measured.peak.double().numpy())
    whole = np.zeros(shape)
    whole[pick] = record_power(measured.truth).double().numpy()
    reference = whole.argmax(-1)
    truth, truth_chunks = _truth(config, scenes, power, bandwidth, whole, reference, beta)
    out = {
        "features": _padded(measured.features, pick, shape),
        "valid": torch.from_numpy(scenes.valid),
        "present": torch.from_numpy(scenes.present),
        "receivers": torch.from_numpy(scenes.receivers),
        "transmitter": torch.from_numpy(scenes.transmitter),
        "truth": truth,
        "reference": torch.from_numpy(reference),
        "gdop": torch.from_numpy(scenes.gdop.astype(np.float32)),
        "crlb_m": torch.from_numpy(crlb_m(config, scenes, beta).astype(np.float32)),
        "index": torch.from_numpy(scenes.index),
    }
    if measured.iq is not None:
        out["iq"] = _padded(measured.iq, pick, shape)
    if chunks and measured.chunks is not None:
        out["features_chunks"] = _padded(measured.chunks, pick, shape)
        out["truth_chunks"] = truth_chunks
    return out


def dataset_bytes(config: GenerateConfig, samples: int) -> int:
    """Bytes on disk of a dataset of so many samples, the headers of its shards and its manifest included."""
    per_receiver = 4 * len(FEATURES) * len(STATISTICS) + 4 * len(TRUTH) + 3 * 8 + 2  # float32, float64, two flags
    if config.dataset_type == "iq_raw":
        per_receiver += 8 * config.num_samples_iq
    per_sample = config.max_receivers * per_receiver + _PER_SAMPLE
    return samples * per_sample + -(-samples // config.shard_items) * _PER_SHARD + _MANIFEST


def _padded(packed: Tensor, pick: tuple[NDArray[np.int64], NDArray[np.int64]], shape: tuple[int, ...]) -> Tensor:
    out = torch.zeros(*shape, *packed.shape[1:], dtype=packed.dtype)
    out[torch.from_numpy(pick[0]), torch.from_numpy(pick[1])] = packed
    return out


def _truth(
    config: GenerateConfig,
    scenes: Scenes,
    power: NDArray[np.float64],
    bandwidth: NDArray[np.float64],
    whole: NDArray[np.float64],
    reference: NDArray[np.int64],
    beta: NDArray[np.float64],
) -> tuple[Tensor, Tensor]:
    """(B, R, k) and (B, R, C, 4): link values for every valid receiver, realised ones for the present."""
    floor, here = noise_dbm(config), scenes.present
    snr_chunks = 10 * np.log10(np.maximum(power, 1e-30))
    per_chunk = np.stack([snr_chunks + floor, snr_chunks, 10 * np.log10(power + 1) + floor, bandwidth], -1)
    per_chunk[~here] = 0
    record_snr = 10 * np.log10(np.maximum(whole, 1e-30))
    arrival = scenes.delay_s + scenes.clock_error_s
    later = arrival - arrival[np.arange(len(scenes)), reference][:, None]
    share = scenes.path_power
    mean = (share * scenes.echo_delay_s).sum(-1)
    spread = np.sqrt(np.maximum((share * scenes.echo_delay_s**2).sum(-1) - mean**2, 0))
    columns = {name: per_chunk[..., k].mean(-1) for k, (name, _) in enumerate(TRUTH_CHUNKS)}
    columns |= {
        "power_record_dbm": np.where(here, record_snr + floor, 0),
        "snr_record_db": np.where(here, record_snr, 0),
        "link_power_dbm": scenes.power_dbm,
        "link_snr_db": scenes.snr_db,
        "noise_dbm": np.full(here.shape, floor),
        "delay_s": scenes.delay_s,
        "clock_error_s": scenes.clock_error_s,
        "arrival_difference_us": np.where(here, later * 1e6, 0),
        "frequency_offset_hz": scenes.frequency_offset_hz,
        "distance_m": scenes.range_m,
        "loss_db": scenes.loss_db,
        "shadowing_db": scenes.shadowing_db,
        "doppler_hz": scenes.doppler_hz,
        "coherence_time_s": scenes.coherence_time_s,
        "delay_spread_us": spread * 1e6,
        "rms_frequency_hz": np.broadcast_to(beta[:, None], here.shape),
    }
    stacked = np.stack([columns[name] for name, _ in TRUTH], -1)
    stacked[~scenes.valid] = 0
    return torch.from_numpy(stacked.astype(np.float32)), torch.from_numpy(per_chunk.astype(np.float32))


# The Cramér-Rao bound: how well a position can be known from strengths and arrival times


def time_sigma_s(
    config: GenerateConfig, snr_db: NDArray[np.float64], rms_frequency_hz: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Standard deviation of an arrival time, clock error included; infinite for a carrier without modulation.

    snr_db            (B, R)  of the link, in the channel
    rms_frequency_hz  (B,)    β, rms instantaneous frequency of the waveform
    """
    slope = (2 * np.pi * rms_frequency_hz[:, None]) ** 2
    energy = 2 * CHANNEL_HZ * config.duration_s * 10 ** (snr_db / 10)
    with np.errstate(divide="ignore"):
        return np.sqrt(config.clock_sigma_s**2 + 1 / (slope * energy))


def information(
    config: GenerateConfig, scenes: Scenes, rms_frequency_hz: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
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


def crlb_m(config: GenerateConfig, scenes: Scenes, rms_frequency_hz: NDArray[np.float64]) -> NDArray[np.float64]:
    """sqrt(trace(J⁻¹)) in metres, (B,): no unbiased estimator has a smaller rms horizontal error."""
    jee, jen, jnn = information(config, scenes, rms_frequency_hz)
    det = jee * jnn - jen * jen
    return np.sqrt((jee + jnn) / np.maximum(det, 1e-300))

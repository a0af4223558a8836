"""Rows of a dataset: packed measurements over the padded receiver axis, with the truth and the bounds behind them.

Axes: B samples, R receivers, M packed records, C chunks, F features.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, GenerateConfig
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.backend import Measured, Transmissions, record_power
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.link import loss_exponent, noise_dbm
from brim.rf.physics.scene import COHERENCE_TIME_S, DOPPLER_TIMES_COHERENCE, Scenes, make_scenes
from brim.rf.physics.waveform import rms_frequency_hz

F64 = NDArray[np.float64]

TRUTH: tuple[tuple[str, str], ...] = (
    ("power_dbm", "dBm"), ("snr_db", "dB"), ("rssi_dbm", "dBm"), ("bandwidth_hz", "Hz"), ("power_record_dbm", "dBm"),
    ("snr_record_db", "dB"), ("link_power_dbm", "dBm"), ("link_snr_db", "dB"), ("noise_dbm", "dBm"), ("delay_s", "s"),
    ("clock_error_s", "s"), ("arrival_difference_us", "us"), ("frequency_offset_hz", "Hz"), ("distance_m", "m"),
    ("loss_db", "dB"), ("shadowing_db", "dB"), ("doppler_hz", "Hz"), ("coherence_time_s", "s"),
    ("delay_spread_us", "us"), ("rms_frequency_hz", "Hz"),
)  # fmt: skip
TRUTH_CHUNKS = TRUTH[:4]  # those that are known for each chunk
_MIN_STRENGTH_DB = 0.1  # strength is never known better: the estimator's own error
_LAW_LINKS = 8_192  # that the law of echoes is taken from
_DIRECTIONS = 512  # of fading, over half a circle
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
    heard = np.full(shape, -np.inf)
    heard[pick] = measured.power.double().numpy()
    reference = heard.argmax(-1)
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
    arrival = scenes.delay_s + scenes.clock_error_s + scenes.echo_delay_s[..., 0]
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


@dataclass(frozen=True, slots=True)
class _Echoes:
    """What echoes and fading do to the links of a configuration, as means over its links."""

    mean_delay_s2: float  # variance of the power-weighted mean delay from link to link
    spread_s2: float  # mean square delay spread
    still_s2: float  # Σ p² (τ − mean)² of the shares p of the paths: what paths do not do to each other
    power_squares: float  # Σ p²
    steady: float  # share of the power that does not fade

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, config: GenerateConfig) -> "_Echoes":
        plain = replace(config, seed=0, terrain=None, horizon=False)
        scenes = make_scenes(plain, np.arange(-(-_LAW_LINKS // config.max_receivers)))
        share = scenes.path_power[scenes.valid]
        late = (scenes.echo_delay_s - scenes.echo_delay_s[..., :1])[scenes.valid]
        mean = (share * late).sum(-1)
        squares = (late - mean[:, None]) ** 2
        k = 10 ** (config.rician_k_db / 10) if config.fading == "rician" else 0.0
        return cls(
            float(mean.var()), float((share * squares).sum(-1).mean()), float((share**2 * squares).sum(-1).mean()),
            float((share**2).sum(-1).mean()), float(share[:, 0].mean()) * k / (k + 1),
        )  # fmt: skip


@lru_cache(maxsize=8)
def _slow_share(low: float, high: float) -> tuple[F64, F64, F64]:
    """How much of a fade's variance is left in the mean over a record, by Doppler shift times its length.

    Clarke's model is a sum over directions, so the mean over the triangle of lags is sinc² of the Doppler shift, or of
    the difference of two where both factors of a product fade.
    """
    turns = np.geomspace(low, high, 12)
    cosine = np.cos(np.pi * (np.arange(_DIRECTIONS) + 0.5) / _DIRECTIONS)
    one = np.array([(np.sinc(x * cosine) ** 2).mean() for x in turns])
    both = np.array([(np.sinc(x * (cosine - cosine[:, None])) ** 2).mean() for x in turns])
    return np.log(turns), one, both


def _fading_share(config: GenerateConfig, doppler_hz: F64) -> tuple[F64, F64]:
    """(B, R) variances of a record's mean: of the strength, relative, and of the arrival over half the spread²."""
    echoes = _Echoes.of(config)
    if config.fading == "none":  # phases are random, and stay
        one = np.ones_like(doppler_hz)
        return one * (1 - echoes.power_squares), one * (1 - 2 * echoes.still_s2 / max(echoes.spread_s2, 1e-30))
    slowest, fastest = (DOPPLER_TIMES_COHERENCE / end * config.duration_s for end in reversed(COHERENCE_TIME_S))
    at, single, double = _slow_share(slowest, fastest)
    turns = np.log(doppler_hz * config.duration_s)
    one, both = np.interp(turns, at, single), np.interp(turns, at, double)
    still, rest = echoes.steady, 1 - echoes.steady
    return 2 * still * rest * one + rest**2 * both, still * one + rest * both


def time_sigma_s(config: GenerateConfig, scenes: Scenes, rms_frequency_hz: F64) -> F64:
    """(B, R) standard deviation of an arrival: clock, noise, echoes and fading; infinite where it says nothing.

    rms_frequency_hz  (B,)  β, rms instantaneous frequency of the waveform
    """
    if config.clock == "none" or config.bound == "strength":
        return np.full(scenes.snr_db.shape, np.inf)
    slope = (2 * np.pi * rms_frequency_hz[:, None]) ** 2
    energy = 2 * CHANNEL_HZ * config.duration_s * 10 ** (scenes.snr_db / 10)
    echoes, (_, share) = _Echoes.of(config), _fading_share(config, scenes.doppler_hz)
    with np.errstate(divide="ignore"):
        noise_s2 = 1 / (slope * energy)
    excess_s = scenes.blocked * config.blocked_delay_us * 1e-6
    known = config.clock_sigma_s**2 + echoes.mean_delay_s2 + 0.5 * echoes.spread_s2 * share
    return np.asarray(np.sqrt(known + noise_s2 + excess_s**2))


def strength_sigma_db(config: GenerateConfig, scenes: Scenes) -> F64:
    """(B, R) standard deviation of a strength by shadowing, the stations and fading; infinite: not counted."""
    if config.bound == "timing":
        return np.full(scenes.snr_db.shape, np.inf)
    fading, _ = _fading_share(config, scenes.doppler_hz)
    squares = config.shadowing_db**2 + config.station_gain_db**2 + (10 / np.log(10)) ** 2 * fading
    return np.asarray(np.sqrt(np.maximum(squares, _MIN_STRENGTH_DB**2)))


def information(config: GenerateConfig, scenes: Scenes, rms_frequency_hz: F64) -> tuple[F64, F64, F64]:
    """Fisher information on the horizontal position (east-east, east-north, north-north), each (B,), in 1/m².

    The transmitter's height is known, and its power if it is the same in all samples; the emission time is not. Which
    links are blocked is known, their extra delay is not. Present receivers only.
    """
    here = scenes.present
    # Derivative of the range by the transmitter's position: minus the horizontal part of the line of sight.
    range_m = np.maximum(scenes.range_m, 1.0)
    ue, un = -scenes.east / range_m, -scenes.north / range_m

    certain = np.where(here, strength_sigma_db(config, scenes) ** -2, 0.0)
    per_metre = 10 * loss_exponent(config, scenes.range_m) / (np.log(10) * range_m)  # dB/m
    strength = per_metre**2 * certain

    sigma_m = SPEED_OF_LIGHT * time_sigma_s(config, scenes, rms_frequency_hz)
    weight = np.where(here, 1 / np.maximum(sigma_m, 1e-6) ** 2, 0.0)
    total = np.maximum(weight.sum(-1), 1e-300)
    me, mn = (weight * ue).sum(-1), (weight * un).sum(-1)  # the unknown emission time takes the mean out
    both = strength + weight
    jee = (both * ue * ue).sum(-1) - me * me / total
    jen = (both * ue * un).sum(-1) - me * mn / total
    jnn = (both * un * un).sum(-1) - mn * mn / total
    if config.power_spread_db:  # so does the unknown power, of which its range is known
        level = per_metre * certain
        prior = 3 / config.power_spread_db**2
        pe, pn = (level * ue).sum(-1), (level * un).sum(-1)
        known = certain.sum(-1) + prior
        jee, jen, jnn = jee - pe * pe / known, jen - pe * pn / known, jnn - pn * pn / known
    return jee, jen, jnn


def crlb_m(config: GenerateConfig, scenes: Scenes, rms_frequency_hz: F64) -> F64:
    """sqrt(trace(J⁻¹)) in metres, (B,): no unbiased estimator has a smaller rms horizontal error."""
    jee, jen, jnn = information(config, scenes, rms_frequency_hz)
    det = jee * jnn - jen * jen
    return np.asarray(np.sqrt((jee + jnn) / np.maximum(det, 1e-300)))

"""Rows without IQ: strengths and arrivals of accepted scenes from their paths, a thousand times faster on a CPU.

Axes: M packed records, P paths, C chunks, J fading points, F features.

Each path's gain follows the same sinusoids as in the channel (`physics/channel.py`), at 30 points a second. A signal
far narrower than the echoes' inverse delays arrives with the sum A of the gains, late by Re(B·conj A)/|A|² with B their
sum weighted by delay; the correlation of two demodulated records weighs moments by the power of both. Noise is added as
it falls on powers and arrivals. Other features stay 0: `DRAWN` names those that mean something.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf import features as ft
from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, PATH_STRIDE, GenerateConfig
from brim.rf.features import FEATURES, F
from brim.rf.generation.rows import crlb_m
from brim.rf.physics.channel import NUM_SINUSOIDS
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.philox import Purpose, normal, uniform, words
from brim.rf.physics.scene import NUM_PATHS, Scenes, make_scenes
from brim.rf.physics.waveform import FSK_DEVIATION_HZ, PEAK_DEVIATION_HZ

DRAWN = ("rssi_dbm", "snr_db", "noise_floor_dbm", "arrival_difference_us", "arrival_sigma_us")
FADING_STEP_S = 1 / 30  # the fastest fading, 8.5 Hz, turns by a quarter meanwhile
FLOOR_SHARE = 0.03  # standard deviation of a chunk's measured noise floor: 0.13 dB
TIMING_S = 3.2e-6  # standard deviation of a second's arrival at 0 dB by noise alone
SIGMA_NEPERS = 0.45  # scatter of the sigmas that the estimator states
_MESSAGE_PEAK = 3.6  # of built-in messages over their rms
_BLOCK = 512  # samples computed at once


def draw_rows(config: GenerateConfig, index: NDArray[np.int64]) -> dict[str, Tensor]:
    """Rows as a dataset holds them, of the accepted among the given attempts."""
    parts = [_draw(config, index[at : at + _BLOCK]) for at in range(0, max(len(index), 1), _BLOCK)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def draw_accepted(config: GenerateConfig, samples: int) -> dict[str, Tensor]:
    """The first so many accepted samples."""
    parts: list[dict[str, Tensor]] = []
    at = count = 0
    while count < samples:
        part = _draw(config, np.arange(at, at + _BLOCK))
        parts.append(part)
        at, count = at + _BLOCK, count + len(part["index"])
        if at >= 200_000 and not count:
            raise _nothing(config, at)
    return {name: torch.cat([part[name] for part in parts])[:samples] for name in parts[0]}


def _draw(config: GenerateConfig, index: NDArray[np.int64]) -> dict[str, Tensor]:
    scenes = make_scenes(config, index)
    scenes = scenes[np.nonzero(scenes.accepted)[0]]
    sample, receiver = np.nonzero(scenes.present)
    pick = (sample, receiver)
    gain = _gains(config, scenes, pick)  # (M, P, J)
    points = gain.shape[-1] // NUM_CHUNKS
    snr = 10 ** (scenes.snr_db[pick] / 10)
    amplitude = torch.from_numpy(np.sqrt(snr[:, None] * scenes.path_power[pick]).astype(np.float32))
    late_us = torch.from_numpy((scenes.echo_delay_s[pick] * 1e6).astype(np.float32))
    paths = gain * amplitude[..., None]
    if config.adc_clip_db:
        paths = paths * _clipped_gain(paths.sum(1, keepdim=True).abs(), 10 ** (config.adc_clip_db / 20))
    whole, delayed = paths.sum(1), (paths * late_us[..., None]).sum(1)  # (M, J)
    power = whole.abs().square()
    moment = (delayed * whole.conj()).real  # power times how late it is, µs

    draws = normal(
        *np.split(uniform(config.seed, scenes.index[sample], receiver, Purpose.NOISE, 8 * NUM_CHUNKS), 2, -1)
    )
    noise = torch.from_numpy(draws.astype(np.float32)).reshape(len(sample), 4, NUM_CHUNKS)

    def chunked(values: Tensor) -> Tensor:
        return values.reshape(len(values), NUM_CHUNKS, points).mean(-1)

    signal, bins = chunked(power), CHANNEL_HZ * config.duration_s / NUM_CHUNKS
    total = signal + 1 + noise[:, 0] * ((1 + 2 * signal) / bins).sqrt()
    floor = 1 + FLOOR_SHARE * noise[:, 1]
    shape, unit = scenes.present.shape, noise_dbm(config)
    heard = np.full(shape, -np.inf)
    heard[pick] = ft.sum_chunks(total).numpy()
    reference = heard.argmax(-1)
    record = np.zeros(shape, np.int64)
    record[pick] = np.arange(len(sample))
    ref = torch.from_numpy(record[np.arange(len(scenes)), reference][sample])

    direct = scenes.delay_s[pick] + scenes.clock_error_s[pick]
    apart_us = torch.from_numpy((direct - direct[ref.numpy()]) * 1e6)
    weight = chunked(power * power[ref]).clamp(min=1e-20)
    echoes_us = chunked(power[ref] * moment - power * moment[ref]) / weight
    thermal_us = _timing_us(config) / signal.clamp(min=1e-3).sqrt()  # of each chunk
    apart = apart_us[:, None].float() + echoes_us + thermal_us * noise[:, 2] - thermal_us[ref] * noise[ref, 2]
    stated = (thermal_us.square() + thermal_us[ref].square()) * (2 * SIGMA_NEPERS * noise[:, 3]).exp()
    sigma_us = (stated + (ft.ECHO_SIGMA_S * 1e6) ** 2).sqrt()
    strong = ft.sum_chunks(total) > (1 + ft.TIMING_SNR) * ft.sum_chunks(floor)
    can_time = (strong & strong[ref] & (config.waveform != "cw"))[:, None]
    own = (torch.arange(len(sample)) == ref)[:, None]
    apart, sigma_us = (torch.where(own, 0.0, values) for values in (apart, sigma_us))

    chunks = torch.zeros(len(sample), NUM_CHUNKS, len(FEATURES))
    chunks[..., F["rssi_dbm"]] = ft.decibel(total) + unit
    chunks[..., F["snr_db"]] = ft.decibel(ft.linear_snr(total, floor))
    chunks[..., F["noise_floor_dbm"]] = ft.decibel(floor) + unit
    chunks[..., F["arrival_difference_us"]] = torch.where(can_time, apart, 0.0)
    chunks[..., F["arrival_sigma_us"]] = torch.where(can_time, sigma_us, ft.UNKNOWN_SIGMA_US)
    features = torch.zeros(*shape, len(FEATURES), len(ft.STATISTICS))
    features[torch.from_numpy(sample), torch.from_numpy(receiver)] = ft.aggregate(chunks)
    return {
        "features": features,
        "valid": torch.from_numpy(scenes.valid),
        "present": torch.from_numpy(scenes.present),
        "receivers": torch.from_numpy(scenes.receivers),
        "transmitter": torch.from_numpy(scenes.transmitter),
        "reference": torch.from_numpy(reference),
        "gdop": torch.from_numpy(scenes.gdop.astype(np.float32)),
        "crlb_m": torch.from_numpy(crlb_m(config, scenes, np.full(len(scenes), _rms_frequency_hz(config)))).float(),
        "index": torch.from_numpy(scenes.index),
    }


def _gains(config: GenerateConfig, scenes: Scenes, pick: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Tensor:
    """(M, P, J) complex64 gain of every path over the record, mean power 1; see `channel.fading`."""
    sample, receiver = pick
    paths = receiver[:, None] + np.arange(NUM_PATHS) * PATH_STRIDE
    draws = words(config.seed, scenes.index[sample][:, None], paths, Purpose.FADING, 2 * NUM_SINUSOIDS + 1)
    turns = torch.from_numpy(draws.astype(np.float32)) * 2.0**-32
    count = NUM_CHUNKS * max(1, round(config.duration_s / NUM_CHUNKS / FADING_STEP_S))
    step_s = config.duration_s / count
    still = torch.polar(torch.ones(turns.shape[:2]), turns[..., -1] * (2 * math.pi))
    if config.fading == "none":
        return still[..., None].expand(*still.shape, count)
    place, start = turns[..., :-1].reshape(*turns.shape[:2], NUM_SINUSOIDS, 2).unbind(-1)
    doppler = torch.from_numpy(scenes.doppler_hz[pick].astype(np.float32))[:, None, None]
    doppler = doppler * torch.cos((torch.arange(NUM_SINUSOIDS) + place) * (2 * math.pi / NUM_SINUSOIDS))
    one = torch.ones(())
    now = torch.polar(one, (start + doppler * step_s / 2) * (2 * math.pi))
    turn = torch.polar(one, doppler * (step_s * 2 * math.pi))
    gain = torch.empty(*still.shape, count, dtype=torch.complex64)
    for n in range(count):
        gain[..., n] = now.sum(-1)
        now = now * turn
    gain *= NUM_SINUSOIDS**-0.5
    if config.fading == "rician":
        k = 10 ** (config.rician_k_db / 10)
        gain[:, 0] = gain[:, 0] * (1 / (k + 1)) ** 0.5 + still[:, :1] * (k / (k + 1)) ** 0.5
    return gain


def _clipped_gain(amplitude: Tensor, full: float) -> Tensor:
    """What is left of the fundamental of a sine of this amplitude that is cut off at `full`."""
    share = (full / amplitude.clamp(min=full)).clamp(max=1.0)
    return (torch.asin(share) + share * (1 - share.square()).sqrt()) * (2 / math.pi)


def _rms_frequency_hz(config: GenerateConfig) -> float:
    return {"nbfm": PEAK_DEVIATION_HZ / _MESSAGE_PEAK, "fsk": 0.9 * FSK_DEVIATION_HZ, "am": 330.0, "cw": 0.0}[
        config.waveform
    ]


def _timing_us(config: GenerateConfig) -> float:
    """Standard deviation of a chunk's arrival at 0 dB."""
    if config.waveform == "cw":
        return 0.0
    slower = PEAK_DEVIATION_HZ / _MESSAGE_PEAK / _rms_frequency_hz(config)
    return 1e6 * TIMING_S * slower * math.sqrt(NUM_CHUNKS / config.duration_s)


def _nothing(config: GenerateConfig, tried: int) -> Exception:
    from brim.rf.generation.attempts import nothing_accepted

    few = make_scenes(config, np.arange(2_000))
    rejected = {"receivers": int((~few.enough).sum()), "gdop": int((few.enough & ~few.accepted).sum())}
    return nothing_accepted(config, tried, rejected)

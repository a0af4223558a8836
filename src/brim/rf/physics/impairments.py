"""What real receivers and their surroundings do to a record: others on the channel, impulses, ripple of filters, phase
noise, steps of the gain, converters that clip, and blocks that get lost. Each is off by default.

Axes: M records, N samples at 200 kHz, K tones. Normalised units: 1 is the noise power in the 12.5 kHz channel. Random
numbers are drawn on the host, a few per record, and every operation is elementwise, so that a record is the same in any
batch. The same torch code runs on every device.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.physics.philox import Purpose, normal, uniform

I64 = NDArray[np.int64]

NUM_TONES = 32  # of phase noise, from 1 Hz to 1 kHz, equally many per octave
PHASE_NOISE_HZ = (1.0, 1_000.0)
RIPPLE_SAMPLES = (8, 40)  # delay of a filter's echo: ripples of 25 to 5 kHz
AGC_STEPS = 4  # of a record at most
LOST_BLOCK_S = 0.02
INTERFERER_HZ = 18_000.0  # its carrier lies within ± this: in the channel, or beside it
INTERFERER_SPREAD_DB = 6.0  # of its level from receiver to receiver
IMPULSE_SAMPLES = 4  # that an impulse lasts
MOST_IMPULSES = 512  # per record and second
_AT_ONCE = 64  # records


def is_impaired(config: GenerateConfig) -> bool:
    """Whether anything is done to records."""
    return bool(
        config.interferer_share or config.impulses_per_s or config.filter_ripple_db or config.phase_noise_deg
        or config.agc_step_db or config.adc_clip_db or config.lost_share
    )  # fmt: skip


def impair(config: GenerateConfig, iq: Tensor, index: I64, receiver: I64) -> Tensor:
    """Records as such receivers hand them over.

    iq               (M, N)  complex64, changed in place
    index, receiver  (M,)    attempt number and receiver of each
    """
    for at in range(0, len(iq), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        iq[part] = _impaired(config, iq[part], index[part], receiver[part])
    return iq


def _impaired(config: GenerateConfig, iq: Tensor, index: I64, receiver: I64) -> Tensor:
    seed, clock = config.seed, torch.arange(iq.shape[1], device=iq.device)
    if config.interferer_share:
        iq = iq + _interferer(config, clock, index, receiver)
    if config.impulses_per_s:
        iq = _with_impulses(config, iq, index, receiver)
    if config.filter_ripple_db:
        draws = uniform(seed, index, receiver, Purpose.FILTER, 2)
        depth = (10 ** (config.filter_ripple_db / 20) - 1) / (10 ** (config.filter_ripple_db / 20) + 1)
        low, high = RIPPLE_SAMPLES
        delay = _on(iq, low + np.floor(draws[:, 0] * (high - low + 1)).astype(np.int64))[:, None]
        source = clock - delay
        echo = torch.where(source >= 0, iq.gather(1, source.clamp(min=0)), 0)
        iq = iq + echo * torch.polar(_full(iq, depth), _on(iq, 2 * np.pi * draws[:, 1:2]).float())
    if config.phase_noise_deg:
        angle = phase_noise(config, clock, index, receiver)
        iq = iq * torch.polar(torch.ones_like(angle), angle)
    if config.agc_step_db:
        iq = iq * _agc(config, clock, index, receiver)
    if config.adc_clip_db:
        full = 10 ** (config.adc_clip_db / 20)
        iq = torch.complex(iq.real.clamp(-full, full), iq.imag.clamp(-full, full))
    if config.lost_share:
        block = round(LOST_BLOCK_S * SAMPLE_RATE_HZ)
        draws = uniform(seed, index, receiver, Purpose.LOST, -(-iq.shape[1] // block))
        iq = iq * _on(iq, draws >= config.lost_share)[:, clock // block]
    return iq


def phase_noise(config: GenerateConfig, clock: Tensor, index: I64, receiver: I64) -> Tensor:
    """(M, N) rad: tones whose powers fall with the square of their frequency, as of an oscillator that wanders."""
    draws = uniform(config.seed, index, receiver, Purpose.OSCILLATOR, 2 * NUM_TONES)
    low, high = PHASE_NOISE_HZ
    edges = low * (high / low) ** (np.arange(NUM_TONES + 1) / NUM_TONES)
    frequency = edges[:-1] * (edges[1:] / edges[:-1]) ** draws[:, :NUM_TONES]  # (M, K)
    power = 1 / edges[:-1] - 1 / edges[1:]  # the integral of f⁻² over each band
    amplitude = math.radians(config.phase_noise_deg) * np.sqrt(2 * power / power.sum())
    angle = torch.zeros(len(index), len(clock), device=clock.device)
    for k in range(NUM_TONES):
        step = _on(clock, frequency[:, k : k + 1] * (2 * math.pi / SAMPLE_RATE_HZ))
        start = _on(clock, draws[:, NUM_TONES + k : NUM_TONES + k + 1] * (2 * math.pi))
        angle.add_(torch.cos(clock * step.float() + start.float()), alpha=float(amplitude[k]))
    return angle


def _interferer(config: GenerateConfig, clock: Tensor, index: I64, receiver: I64) -> Tensor:
    """(M, N) a carrier of another transmitter, which starts and stops; the same for all receivers of a sample."""
    draws = uniform(config.seed, index, 0, Purpose.INTERFERER, 4)
    own = uniform(config.seed, index, receiver, Purpose.INTERFERER_LINK, 3)
    hertz = INTERFERER_HZ * (2 * draws[:, 1] - 1)
    step = np.round(hertz / SAMPLE_RATE_HZ * 2**32).astype(np.int64)[:, None]
    turn = (clock * _on(clock, step)) & 0xFFFFFFFF  # whole numbers: exact however long the record
    level_db = config.interferer_db + INTERFERER_SPREAD_DB * normal(own[:, 0], own[:, 1])
    amplitude = np.where(draws[:, 0] < config.interferer_share, 10 ** (level_db / 20), 0.0)
    ends = np.sort(draws[:, 2:4], axis=1) * len(clock)
    begin, end = (_on(clock, ends[:, k : k + 1]) for k in range(2))
    angle = turn.to(torch.float32) * (2 * math.pi / 2**32) + _on(clock, 2 * np.pi * own[:, 2:3]).float()
    size = torch.where((clock >= begin) & (clock < end), _on(clock, amplitude[:, None]).float(), 0.0)
    return torch.polar(size, angle)


def _with_impulses(config: GenerateConfig, iq: Tensor, index: I64, receiver: I64) -> Tensor:
    """Impulses at random times, as of ignitions: exponential powers, random phases, each on its own receiver."""
    most = round(MOST_IMPULSES * config.duration_s)
    draws = uniform(config.seed, index, receiver, Purpose.IMPULSE, 4 * most)
    place, there, power, phase = (draws[:, k * most : (k + 1) * most] for k in range(4))
    on = there < config.impulses_per_s / MOST_IMPULSES
    size = np.where(on, np.sqrt(-np.log(power)) * 10 ** (config.impulse_db / 20), 0.0)
    first = np.floor(place * (iq.shape[1] - IMPULSE_SAMPLES)).astype(np.int64)
    value = _on(iq, (size * np.exp(2j * np.pi * phase)).astype(np.complex64))
    iq = iq.clone()
    for k in range(most):  # one by one: two impulses that meet add up in the same order everywhere
        if on[:, k].any():
            at = _on(iq, first[:, k : k + 1] + np.arange(IMPULSE_SAMPLES))
            iq.scatter_(1, at, iq.gather(1, at) + value[:, k : k + 1])
    return iq


def _agc(config: GenerateConfig, clock: Tensor, index: I64, receiver: I64) -> Tensor:
    """(M, N) gain of a receiver that changes it in steps; it is 1 before the first."""
    draws = uniform(config.seed, index, receiver, Purpose.AGC, 2 * AGC_STEPS)
    when = np.sort(draws[:, :AGC_STEPS], axis=1) * 2 * len(clock)  # half of them after the end
    level_db = config.agc_step_db * (2 * draws[:, AGC_STEPS:] - 1)
    gain = torch.ones(len(index), len(clock), device=clock.device)
    for k in range(AGC_STEPS):
        step = _on(clock, 10 ** (level_db[:, k : k + 1] / 20)).float()
        gain = torch.where(clock >= _on(clock, when[:, k : k + 1]), step, gain)
    return gain


def _on(other: Tensor, values: NDArray[Any]) -> Tensor:
    """Values on the device of another tensor."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(other.device)


def _full(iq: Tensor, value: float) -> Tensor:
    return torch.full((len(iq), 1), value, device=iq.device)

"""From the transmitter to each antenna: delays, echoes, fading, oscillator offset, at 50 kHz and without noise.

Axes: M records (one present receiver of one sample, packed), P paths, J fading points at 1 kHz, L points at 50 kHz.
Everything is in normalised units: 1 is the noise power in the 12.5 kHz channel.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import PATH_STRIDE, GenerateConfig
from brim.rf.physics.philox import Purpose, words
from brim.rf.physics.scene import NUM_PATHS, Scenes
from brim.rf.physics.waveform import MARGIN, TABLE_HZ, channel_points, guard_points

FADING_HZ = 1_000  # linear interpolation between these errs below −69 dB at the fastest fading, 8.5 Hz
NUM_SINUSOIDS = 32  # per path: power is within 1/32 of Rayleigh's in its second moment
TAPS = 4  # of the fractional delay: cubic, errs below −80 dB at the table's rate
_POINTS_PER_FADE = TABLE_HZ // FADING_HZ


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the channel needs of each record, packed: no padding, no absent receivers."""

    sample: NDArray[np.int64]  # (M,) row of the record's sample in the batch
    receiver: NDArray[np.int64]  # (M,)
    index: NDArray[np.int64]  # (M,) attempt number, part of the random key
    amplitude: NDArray[np.float32]  # (M, P) sqrt of the path's mean SNR
    shift: NDArray[np.int32]  # (M, P) whole points of delay, into the table
    weights: NDArray[np.float32]  # (M, P, TAPS) of the fraction that remains
    doppler_hz: NDArray[np.float32]  # (M,)
    offset_step: NDArray[np.uint32]  # (M,) oscillator offset, 2^32 per turn and point

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def make_links(config: GenerateConfig, scenes: Scenes) -> Links:
    """Pack the present receivers of a batch, sample by sample."""
    sample, receiver = np.nonzero(scenes.present)
    pick = (sample, receiver)
    arrival = scenes.delay_s[pick] + scenes.clock_error_s[pick]
    late = (arrival[:, None] + scenes.echo_delay_s[pick]) * TABLE_HZ  # (M, P) in points
    whole = np.floor(late)
    snr = 10 ** (scenes.snr_db[pick] / 10)
    return Links(
        sample=sample,
        receiver=receiver,
        index=scenes.index[sample],
        amplitude=np.sqrt(snr[:, None] * scenes.path_power[pick]).astype(np.float32),
        shift=(guard_points(config) - MARGIN - whole - TAPS // 2).astype(np.int32),
        weights=lagrange(1 - (late - whole), TAPS).astype(np.float32),
        doppler_hz=scenes.doppler_hz[pick].astype(np.float32),
        offset_step=np.round(scenes.frequency_offset_hz[pick] / TABLE_HZ * 2**32).astype(np.int64).astype(np.uint32),
    )


def lagrange(fraction: NDArray[np.float64], taps: int) -> NDArray[np.float64]:
    """Weights that interpolate between points taps/2 − 1 and taps/2 at the given fraction; shape (..., taps)."""
    at = np.asarray(fraction, np.float64)[..., None] + taps // 2 - 1
    nodes = np.arange(taps, dtype=np.float64)
    out = np.ones((*np.shape(fraction), taps))
    for k in range(taps):
        others = nodes[nodes != k]
        out[..., k] = np.prod((at - others) / (k - others), axis=-1)
    return out


def fading_points(config: GenerateConfig) -> int:
    """J, points of the fading at 1 kHz: from one before time 0 to one past the end, margins included."""
    return -(-(channel_points(config) + MARGIN) // _POINTS_PER_FADE) + 2


def fading(config: GenerateConfig, links: Links, row: int) -> Tensor:
    """Complex gain of every path of one record, mean power 1.  (P, J) complex64, first point at −1 ms.

    Clarke's model: sinusoids from random directions, one per equal sector, so that the autocorrelation is J₀.
    """
    draws = words(
        config.seed,
        links.index[row],
        links.receiver[row] + np.arange(NUM_PATHS) * PATH_STRIDE,
        Purpose.FADING,
        2 * NUM_SINUSOIDS + 1,
    )
    turns = torch.from_numpy(draws.astype(np.float32)) * 2.0**-32
    still = torch.polar(torch.ones(NUM_PATHS), turns[:, -1] * float(2 * np.pi))  # what does not fade, in its own phase
    if config.fading == "none":
        return still[:, None].expand(NUM_PATHS, fading_points(config)).contiguous()
    place, start = turns[:, :-1].reshape(NUM_PATHS, NUM_SINUSOIDS, 2).unbind(-1)
    sector = torch.arange(NUM_SINUSOIDS, dtype=torch.float32)
    doppler = float(links.doppler_hz[row]) * torch.cos((sector + place) * float(2 * np.pi / NUM_SINUSOIDS))
    time = (torch.arange(fading_points(config), dtype=torch.float32) - 1) / FADING_HZ
    angle = (doppler[..., None] * time + start[..., None]) * float(2 * np.pi)  # (P, sinusoids, J)
    gain = torch.complex(torch.cos(angle).sum(1), torch.sin(angle).sum(1)) * float(NUM_SINUSOIDS**-0.5)
    if config.fading == "rician":
        k = 10 ** (config.rician_k_db / 10)
        gain[0] = gain[0] * float((1 / (k + 1)) ** 0.5) + still[0] * float((k / (k + 1)) ** 0.5)
    return gain


def receive(config: GenerateConfig, links: Links, row: int, table: Tensor, scale: float) -> Tensor:
    """One record's received signal before noise.  (L + 2·MARGIN,) complex64 at 50 kHz, MARGIN points early.

    table  (T,)  float32  of the record's sample
    scale        what the table is multiplied by
    """
    points = channel_points(config) + 2 * MARGIN
    gain = fading(config, links, row)
    total = torch.zeros(points, dtype=torch.complex64)
    for p in range(NUM_PATHS):
        amplitude = float(links.amplitude[row, p])
        if amplitude == 0:
            continue
        begin = int(links.shift[row, p])
        late = torch.zeros(points)
        for k in range(TAPS):
            late.add_(table[begin + k : begin + k + points], alpha=float(links.weights[row, p, k]))
        total.addcmul_(_modulate(config, late, scale), _interpolate(gain[p], points) * amplitude)
    clock = (np.arange(points) - MARGIN).astype(np.uint32)
    turn = (clock * links.offset_step[row]).view(np.int32)
    angle = torch.from_numpy(turn).to(torch.float32).mul_(float(np.pi * 2**-31))
    return total.mul_(torch.complex(torch.cos(angle), torch.sin(angle)))


def am_norm(scale: float) -> float:
    """What an am signal is divided by for unit mean power; the message's rms is 1."""
    return float((1 + scale**2) ** 0.5)


def _modulate(config: GenerateConfig, late: Tensor, scale: float) -> Tensor:
    if config.waveform == "am":
        wave = (late * scale + 1).div_(am_norm(scale))
        return torch.complex(wave, torch.zeros_like(wave))
    angle = late * scale
    return torch.complex(torch.cos(angle), torch.sin(angle))


def _interpolate(gain: Tensor, points: int) -> Tensor:
    """Linear interpolation from 1 kHz to 50 kHz; the first point is MARGIN points before time 0."""
    fraction = torch.arange(_POINTS_PER_FADE, dtype=torch.float32) / _POINTS_PER_FADE
    dense = (gain[:-1, None] + (gain[1:] - gain[:-1])[:, None] * fraction).reshape(-1)
    return dense[_POINTS_PER_FADE - MARGIN : _POINTS_PER_FADE - MARGIN + points]

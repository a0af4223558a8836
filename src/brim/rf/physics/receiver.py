"""What a receiver records: the signal at 200 kHz with white noise, then the 12.5 kHz channel at 25 kHz.

Axes: N samples at 200 kHz, C chunks, W points of a chunk at 25 kHz. Normalised units: 1 is the noise power in the
12.5 kHz channel, so the noise of the whole sampled band has a power of 16.
"""

import statistics
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.physics.channel import lagrange
from brim.rf.physics.philox import PURPOSE_SHIFT, Purpose, philox
from brim.rf.physics.waveform import MARGIN, OVERSAMPLING

STREAM_HZ = 25_000  # rate of the channel stream, from which every feature but the noise floor is measured
DECIMATION = SAMPLE_RATE_HZ // STREAM_HZ
NOISE_POWER = SAMPLE_RATE_HZ / CHANNEL_HZ  # of the whole band, in units of the channel's noise
UPSAMPLING_TAPS = 8

# The channel filter runs as one matrix product: a row of 320 samples (and its past and future) gives 40 points of the
# stream.
ROW = 320
ROW_POINTS = ROW // DECIMATION
FILTER_TAPS = 129
WINDOW = 448  # 320 − 8 + 129 samples, rounded up to a multiple of 64
_HALF = FILTER_TAPS // 2
_BLOCK = 8  # points upsampled by one row of the product

# Noise floor: short spectra spread over a chunk, of which loud moments and loud bins do not count.
FLOOR_POINTS = 128  # of a segment: 1.6 kHz a bin
FLOOR_SEGMENTS = 72  # of a chunk at most
FLOOR_BAND_HZ = (18_000.0, 72_000.0)  # from the carrier: beyond the channel's leakage, within a filter of 80 %
FLOOR_RANKS = (0.03, 0.6)  # of the bins in order of power: these are averaged
FLOOR_BIAS = 0.9972  # of white noise, over 12 000 chunks: bins of one window are correlated
QUIET = 0.7  # nepers above the lower quartile of a chunk's segments: beyond it a segment holds an impulse


def upsampling_weights() -> NDArray[np.float32]:
    """(UPSAMPLING_TAPS, OVERSAMPLING): eight-point Lagrange interpolation from 50 to 200 kHz."""
    fraction = np.arange(OVERSAMPLING) / OVERSAMPLING
    return np.ascontiguousarray(lagrange(fraction, UPSAMPLING_TAPS).T.astype(np.float32))


@lru_cache(maxsize=2)
def filter_matrix(row: int = ROW, window: int = WINDOW) -> NDArray[np.float32]:
    """(window, row / DECIMATION): the channel filter for rows of so many samples; the window starts 64 samples early.

    A window holds row − 8 + 129 samples at least.
    """
    # Kaiser window, 80 dB: flat to 6.25 kHz, closed from 14.1 kHz; what folds over lands beyond 10.9 kHz.
    cutoff = 10_200.0 / SAMPLE_RATE_HZ
    k = np.arange(FILTER_TAPS) - _HALF
    taps = 2 * cutoff * np.sinc(2 * cutoff * k) * np.kaiser(FILTER_TAPS, 7.857)
    taps /= taps.sum()
    out = np.zeros((window, row // DECIMATION))
    for column in range(row // DECIMATION):
        out[column * DECIMATION : column * DECIMATION + FILTER_TAPS, column] = taps
    return _tf32(out.astype(np.float32))


def _tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to the 11 significant bits of the GPU's matrix units, so that the filter is the same on every device."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@lru_cache(maxsize=1)
def _upsampling_matrix() -> Tensor:
    """The upsampling of _BLOCK points as one product over interleaved real and imaginary parts."""
    weights = upsampling_weights()
    out = torch.zeros(_BLOCK + UPSAMPLING_TAPS - 1, 2, _BLOCK, OVERSAMPLING, 2)
    for point in range(_BLOCK):
        for part in range(2):
            out[point : point + UPSAMPLING_TAPS, part, point, :, part] = torch.from_numpy(weights)
    return out.reshape(2 * (_BLOCK + UPSAMPLING_TAPS - 1), -1)


def noise(config: GenerateConfig, index: int, receiver: int) -> Tensor:
    """Complex white noise of one record, (N,) complex64, power 16: a counter makes two samples."""
    counter = np.arange(config.num_samples_iq // 2, dtype=np.uint64)
    key = (int(Purpose.NOISE) << PURPOSE_SHIFT | receiver, index & 0xFFFFFFFF, index >> 32)
    drawn = philox(counter, *(np.uint64(word) for word in key), seed=config.seed)
    bits = np.empty((2, len(counter), 2), np.uint32)  # radius and angle of two samples
    bits[0, :, 0], bits[1, :, 0], bits[0, :, 1], bits[1, :, 1] = drawn
    radius = torch.from_numpy((bits[0] >> 8).view(np.int32)).reshape(-1).to(torch.float32)
    radius = radius.add_(0.5).mul_(2.0**-24).log_().mul_(-NOISE_POWER).sqrt_()  # each part has half the power
    angle = torch.from_numpy(bits[1].view(np.int32)).reshape(-1).to(torch.float32).mul_(float(np.pi * 2**-31))
    return torch.complex(torch.cos(angle).mul_(radius), angle.sin_().mul_(radius))


def record(config: GenerateConfig, signal: Tensor, index: int, receiver: int) -> Tensor:
    """The IQ record: the signal brought to 200 kHz, and noise.  (N,) complex64

    signal  (L + 2·MARGIN,)  complex64  at 50 kHz, MARGIN points early
    """
    begin = MARGIN - UPSAMPLING_TAPS // 2 + 1
    window = signal[begin : begin + config.num_samples_iq // OVERSAMPLING + UPSAMPLING_TAPS - 1]
    matrix = _upsampling_matrix()
    blocks = torch.view_as_real(window).reshape(-1).unfold(0, len(matrix), 2 * _BLOCK)
    clean = torch.view_as_complex((blocks @ matrix).reshape(-1, 2))
    return noise(config, index, receiver).add_(clean)


def tune(config: GenerateConfig, iq: Tensor) -> tuple[Tensor, Tensor]:
    """The channel stream of a record and its noise floor per chunk.

    iq       (N,)    complex64  at 200 kHz
    returns  (C, W)  complex64  at 25 kHz;  (C,) float32 noise power in the channel
    """
    rows = config.num_samples_iq // ROW
    padded = torch.nn.functional.pad(torch.view_as_real(iq).T, (_HALF, WINDOW - ROW - _HALF))  # (2, N + …)
    out = padded.unfold(1, WINDOW, ROW)[:, :rows] @ torch.from_numpy(filter_matrix())  # (2, rows, 64)
    stream = torch.complex(out[0].contiguous(), out[1].contiguous())
    floor = noise_floor(iq[None, floor_samples(config.num_samples_iq)])
    return stream.reshape(NUM_CHUNKS, -1), floor[0]


@lru_cache(maxsize=8)
def floor_samples(num_samples: int) -> Tensor:
    """(C, T, P) int64: samples of the segments whose spectra give the noise floor, at uneven distances."""
    chunk = num_samples // NUM_CHUNKS
    number = np.arange(min(FLOOR_SEGMENTS, chunk // FLOOR_POINTS))
    spacing = chunk / len(number)
    uneven = (number * 0.6180339887) % 1  # a golden section: what repeats is not always hit
    start = np.floor(number * spacing + uneven * (spacing - FLOOR_POINTS)).astype(np.int64)
    first = np.arange(NUM_CHUNKS)[:, None, None] * chunk + start[:, None]
    return torch.from_numpy(first + np.arange(FLOOR_POINTS))


def noise_floor(segments: Tensor) -> Tensor:
    """Noise power in the channel per chunk, whatever else the sampled band holds.

    segments  (M, C, T, P)  complex64  of records, as `floor_samples` picks them
    returns   (M, C)        float32

    Segments with an impulse are left out, then the quieter bins are averaged: filters cut what lies beyond the band
    looked at, and neighbours are not among the quieter ones. Sums are taken by halves, not by a reduction kernel,
    whose order may change with the batch.
    """
    bins, ranks, (first, second, third) = floor_plan()
    spectrum = torch.fft.fft(segments * floor_taper())
    power = spectrum[..., bins].abs().square_()  # (M, C, T, K)
    level = _sum_halves(power.clamp(min=1e-30).log()) / len(bins)
    quiet = level <= level.sort(-1).values[..., level.shape[-1] // 4, None] + QUIET
    kept = _sum_halves(quiet.to(torch.float32))
    mean = _sum_halves((power * quiet[..., None]).transpose(-1, -2)) / kept[..., None]
    low = mean.sort(-1).values[..., ranks]
    # means of n exponential values: what these ranks have on average, by Wilson and Hilferty
    a, b = 1 - 1 / (9 * kept), 1 / (3 * kept.sqrt())
    expected: Tensor = a * a * a + 3 * a * a * b * first + 3 * a * b * b * second + b * b * b * third
    floor: Tensor = _sum_halves(low) / low.shape[-1] / expected / (FLOOR_BIAS * NOISE_POWER)
    return floor


@lru_cache(maxsize=1)
def floor_plan() -> tuple[Tensor, slice, tuple[float, float, float]]:
    """Bins that are looked at, which of them in order of power, and the first moments of a normal variable there."""
    frequency = np.abs(np.fft.fftfreq(FLOOR_POINTS, 1 / SAMPLE_RATE_HZ))
    bins = np.nonzero((frequency >= FLOOR_BAND_HZ[0]) & (frequency <= FLOOR_BAND_HZ[1]))[0]
    ranks = slice(*(round(share * len(bins)) for share in FLOOR_RANKS))
    normal = statistics.NormalDist()
    z = np.array([normal.inv_cdf((rank + 0.625) / (len(bins) + 0.25)) for rank in range(ranks.start, ranks.stop)])
    return torch.from_numpy(bins), ranks, (float(z.mean()), float((z**2).mean()), float((z**3).mean()))


@lru_cache(maxsize=1)
def floor_taper() -> Tensor:
    """(P,) Blackman-Harris window of unit power whose side lobes are 92 dB down."""
    angle = 2 * np.pi * np.arange(FLOOR_POINTS) / FLOOR_POINTS
    weights = (0.35875, -0.48829, 0.14128, -0.01168)
    window = np.array(weights) @ np.cos(np.arange(len(weights))[:, None] * angle)
    return torch.from_numpy(np.asarray(window / np.sqrt((window**2).sum()), np.float32))


def _sum_halves(values: Tensor) -> Tensor:
    """Sum over the last axis by adding its halves, elementwise: the same bits for any batch."""
    size = values.shape[-1]
    values = torch.nn.functional.pad(values, (0, (1 << (size - 1).bit_length()) - size))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]

"""What a receiver records: the signal at 200 kHz with white noise, then the 12.5 kHz channel at 25 kHz.

Axes: N samples at 200 kHz, C chunks, W points of a chunk at 25 kHz. Normalised units: 1 is the noise power in the
12.5 kHz channel, so the noise of the whole sampled band has a power of 16.
"""

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
# stream and 24 probes of the noise outside the channel.
ROW = 320
ROW_POINTS = ROW // DECIMATION
FILTER_TAPS = 129
NUM_PROBES = 24
PROBE_TAPS = (
    1,
    -6,
    15,
    -20,
    15,
    -6,
    1,
)  # sixth difference: a sixfold zero at the carrier, 117 dB down at 6 kHz
PROBE_GAIN = 924  # sum of the squares
WINDOW = 448  # 320 − 8 + 129 samples, rounded up to a multiple of 64
_HALF = FILTER_TAPS // 2
_BLOCK = 8  # points upsampled by one row of the product


def upsampling_weights() -> NDArray[np.float32]:
    """(UPSAMPLING_TAPS, OVERSAMPLING): eight-point Lagrange interpolation from 50 to 200 kHz."""
    fraction = np.arange(OVERSAMPLING) / OVERSAMPLING
    return np.ascontiguousarray(lagrange(fraction, UPSAMPLING_TAPS).T.astype(np.float32))


@lru_cache(maxsize=1)
def filter_matrix() -> NDArray[np.float32]:
    """(WINDOW, ROW_POINTS + NUM_PROBES): channel filter, then noise probes; the window starts 64 samples early."""
    # Kaiser window, 80 dB: flat to 6.25 kHz, closed from 14.1 kHz; what folds over lands beyond 10.9 kHz.
    cutoff = 10_200.0 / SAMPLE_RATE_HZ
    k = np.arange(FILTER_TAPS) - _HALF
    taps = 2 * cutoff * np.sinc(2 * cutoff * k) * np.kaiser(FILTER_TAPS, 7.857)
    taps /= taps.sum()
    out = np.zeros((WINDOW, ROW_POINTS + NUM_PROBES))
    for column in range(ROW_POINTS):
        out[column * DECIMATION : column * DECIMATION + FILTER_TAPS, column] = taps
    for probe in range(NUM_PROBES):
        begin = _HALF + probe * (ROW // NUM_PROBES)
        out[begin : begin + len(PROBE_TAPS), ROW_POINTS + probe] = PROBE_TAPS
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
    stream = torch.complex(out[0, :, :ROW_POINTS].contiguous(), out[1, :, :ROW_POINTS].contiguous())
    probes = out[..., ROW_POINTS:].square().reshape(2, NUM_CHUNKS, -1).sum(-1).sum(0)
    count = rows // NUM_CHUNKS * NUM_PROBES
    return stream.reshape(NUM_CHUNKS, -1), probes / (count * PROBE_GAIN * NOISE_POWER)

"""What a receiver can say of what it heard: estimators over chunks of the channel stream.

Axes: M records, C chunks, W points of a chunk at 25 kHz, F features. Every estimator is tested against the truth that
made the signal. Powers are in units of the noise in the channel until the last line turns them into dBm.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, GenerateConfig
from brim.rf.geometry import SPEED_OF_LIGHT
from brim.rf.receiver import STREAM_HZ

FEATURES: tuple[tuple[str, str], ...] = (
    ("rssi_dbm", "dBm"),
    ("snr_db", "dB"),
    ("noise_floor_dbm", "dBm"),
    ("frequency_offset_hz", "Hz"),
    ("bandwidth_hz", "Hz"),
    ("psd_dbm_per_hz", "dBm/Hz"),
    ("spectral_centroid_hz", "Hz"),
    ("spectral_rolloff_hz", "Hz"),
    ("spectral_flatness", "1"),
    ("envelope_mean", "1"),
    ("envelope_std", "1"),
    ("envelope_max", "1"),
    ("peak_to_avg_ratio_db", "dB"),
    ("zero_crossing_rate", "1/s"),
    ("multipath_delay_spread_us", "us"),
    ("coherence_bandwidth_khz", "kHz"),
    ("delay_spread_confidence", "1"),
    ("confidence_score", "1"),
    ("arrival_difference_us", "us"),
    ("arrival_sigma_us", "us"),
)
F = {name: i for i, (name, _) in enumerate(FEATURES)}
STATISTICS = ("mean", "std", "min", "max")

NUM_BANDS = 100  # the channel in bands of 125 Hz: smooths the spectrum without losing the edges
BAND_HZ = CHANNEL_HZ / NUM_BANDS
OFFSET_HZ = 3_750.0  # the carrier is looked for within ± this
OCCUPIED = 0.99  # share of the power in the occupied bandwidth
ROLLOFF = 0.85
MIN_SNR = 0.01  # −20 dB: below this an SNR is not told from nothing
MAX_COHERENCE_KHZ = 1_000.0
TIMING_HZ = (300.0, 3_000.0)  # band of the demodulated signal that is correlated
TIMING_BAND_HZ = 100.0  # fading correlates neighbouring bins, bands this wide are independent
LAG_STEP_S = 20e-6  # of the coarse search: a sixteenth of the highest tone's period
NEWTON_STEPS = 4
MAX_STEP_S = 20e-6  # a chunk moves no further than this from the whole record's lag
PRIOR = 0.25  # weight of the whole record's lag in a chunk's, in chunks of mean information
UNKNOWN_SIGMA_US = 1e6  # an arrival difference that cannot be measured


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes that follow from the record length."""

    points: int  # W
    bins: int  # of the channel, half of them below the carrier
    bin_hz: float
    timing: tuple[int, int]  # first and one past the last bin of the timing band
    timing_group: int  # bins per independent band
    lags: int  # of the coarse search, on either side of 0

    @classmethod
    def of(cls, config: GenerateConfig, baseline_m: float) -> "Grid":
        """The grid of a configuration whose receivers stand at most `baseline_m` apart."""
        points = round(config.duration_s * STREAM_HZ) // NUM_CHUNKS
        per_hz = points / STREAM_HZ
        return cls(
            points=points,
            bins=round(CHANNEL_HZ * per_hz),
            bin_hz=1 / per_hz,
            timing=(round(TIMING_HZ[0] * per_hz), round(TIMING_HZ[1] * per_hz)),
            timing_group=round(TIMING_BAND_HZ * per_hz),
            lags=math.ceil((baseline_m / SPEED_OF_LIGHT + lag_slack_s(config)) / LAG_STEP_S) + 1,
        )


def lag_slack_s(config: GenerateConfig) -> float:
    """How far beyond the light time of the baseline an arrival difference may lie."""
    return 5 * config.clock_sigma_s + 10e-6


def channel_power(spectrum: Tensor, grid: Grid) -> Tensor:
    """Power per bin of the channel, from −6.25 kHz up.

    spectrum  (..., W)  complex64  FFT of the stream
    returns   (..., bins)  float32
    """
    half = grid.bins // 2
    inside = torch.cat([spectrum[..., -half:], spectrum[..., :half]], -1)
    return inside.abs().square_().div_(float(grid.points) ** 2)


def measure_truth(clean: Tensor, grid: Grid) -> Tensor:
    """Power in the channel and 99 % occupied bandwidth of the noiseless signal.

    clean    (M, C, W)  complex64
    returns  (M, C, 2)  float32   power, bandwidth in Hz
    """
    power = channel_power(torch.fft.fft(clean), grid)
    total = power.sum(-1)
    share = power.cumsum(-1) / total.clamp(min=1e-30).unsqueeze(-1)
    tail = (1 - OCCUPIED) / 2
    occupied = (share < 1 - tail).sum(-1) - (share < tail).sum(-1)
    return torch.stack([total, occupied.to(torch.float32) * grid.bin_hz], -1)


def measure_envelope(stream: Tensor, snr: Tensor, config: GenerateConfig) -> tuple[dict[str, Tensor], Tensor]:
    """Features of the stream in time, and the demodulated signal that carries the timing.

    stream   (M, C, W)  complex64
    snr      (M, C)     float32   linear
    returns  features (M, C) by name;  (M, C, W) float32, last point 0
    """
    power = stream.abs().square_()
    square = power.mean(-1)
    rms = square.sqrt().clamp(min=1e-15)
    envelope = power.sqrt()
    mean, peak = envelope.mean(-1) / rms, envelope.amax(-1) / rms
    crossings = (stream.real[..., 1:] * stream.real[..., :-1] < 0).sum(-1)
    product = stream[..., 1:] * stream[..., :-1].conj()
    turning = product.imag
    both = (power[..., 1:] + power[..., :-1]) * 0.5
    sums = [x.sum(-1) for x in (both, both * both, turning, turning * turning, both * turning)]
    spread, confidence = delay_spread(*sums, snr, stream.shape[-1])
    out = {
        "envelope_mean": mean,
        "envelope_std": (1 - mean * mean).clamp(min=0).sqrt(),
        "envelope_max": peak,
        "peak_to_avg_ratio_db": 20 * torch.log10(peak.clamp(min=1e-6)),
        "zero_crossing_rate": crossings.to(torch.float32) * (STREAM_HZ / stream.shape[-1]),
        "multipath_delay_spread_us": spread * 1e6,
        "coherence_bandwidth_khz": (1e-3 / (5 * spread.clamp(min=1e-9))).clamp(max=MAX_COHERENCE_KHZ),
        "delay_spread_confidence": confidence,
    }
    demodulated = both if config.waveform == "am" else turning
    return out, torch.nn.functional.pad(demodulated, (0, 1))


def delay_spread(
    power: Tensor, power2: Tensor, turning: Tensor, turning2: Tensor, both: Tensor, snr: Tensor, points: int
) -> tuple[Tensor, Tensor]:
    """Delay spread in s and confidence from how the strength follows the instantaneous frequency.

    Echoes make the gain vary over frequency; a modulated carrier sweeps a few kHz and shows the slope of the gain,
    d ln|H|²/df = 4π·Δτ. With so narrow a sweep the slope is often below its own error: the confidence says so.
    The arguments are sums over a chunk of the power p, p², p·ω, (p·ω)² and p²·ω, ω the phase advance per point.
    """
    tiny = 1e-30
    sweep = turning2 / power2.clamp(min=tiny)  # mean ω²
    slope = (both / power2.clamp(min=tiny) - turning / power.clamp(min=tiny)) / sweep.clamp(
        min=1e-9
    )  # per rad
    per_hz = slope.abs() * (2 * math.pi / STREAM_HZ)
    error = (2 / (snr.clamp(min=MIN_SNR) * points * sweep.clamp(min=1e-9))).sqrt() * (2 * math.pi / STREAM_HZ)
    confidence = per_hz.square() / (per_hz.square() + 4 * error.square() + 1e-20)
    return (per_hz / (4 * math.pi)).clamp(max=1e-4), confidence


def measure_spectrum(power: Tensor, floor: Tensor, noise_dbm: float, grid: Grid) -> dict[str, Tensor]:
    """Features of the channel's spectrum.

    power    (M, C, bins)  float32
    floor    (M, C)        float32   noise power in the channel
    returns  features (M, C) by name
    """
    half = grid.bins // 2
    frequency = (torch.arange(grid.bins, dtype=torch.float32) - half) * grid.bin_hz
    total = power.sum(-1)
    signal = torch.maximum(total - floor, MIN_SNR * floor)
    snr = signal / floor

    reach = round(OFFSET_HZ / grid.bin_hz)
    near = power[..., half - reach : half + reach] - (floor / grid.bins).unsqueeze(-1)
    weight = torch.maximum(near.sum(-1), MIN_SNR * floor)
    offset = ((near * frequency[half - reach : half + reach]).sum(-1) / weight).clamp(-OFFSET_HZ, OFFSET_HZ)

    bands = power.reshape(*power.shape[:-1], NUM_BANDS, -1).sum(-1)
    mean_log = bands.clamp(min=1e-30).log().mean(-1)
    edges = NUM_BANDS // 2
    folded = (bands[..., edges:] + bands[..., :edges].flip(-1)).cumsum(-1)
    return {
        "rssi_dbm": decibel(total) + noise_dbm,
        "snr_db": decibel(snr),
        "noise_floor_dbm": decibel(floor) + noise_dbm,
        "frequency_offset_hz": offset,
        "bandwidth_hz": _occupied_hz(bands - (floor / NUM_BANDS).unsqueeze(-1)),
        "psd_dbm_per_hz": decibel(bands.amax(-1) / BAND_HZ) + noise_dbm,
        "spectral_centroid_hz": (power * frequency).sum(-1) / total.clamp(min=1e-30),
        "spectral_rolloff_hz": ((folded < ROLLOFF * folded[..., -1:]).sum(-1) + 1).to(torch.float32)
        * BAND_HZ,
        "spectral_flatness": mean_log.exp() * NUM_BANDS / total.clamp(min=1e-30),
        "confidence_score": snr / (snr + 1),
    }


def decibel(power: Tensor) -> Tensor:
    """10·log10, floored far below anything measured so that no input gives −Inf."""
    return 10 * torch.log10(power.clamp(min=1e-30))


def _occupied_hz(bands: Tensor) -> Tensor:
    """Width that holds 99 % of the power: from the first band past 0.5 % to the last below 99.5 %, interpolated."""
    share = bands.cumsum(-1)
    total = share[..., -1:].clamp(min=1e-30)
    tail = (1 - OCCUPIED) / 2
    position = torch.arange(NUM_BANDS)
    above, below = share >= tail * total, share < (1 - tail) * total
    low = torch.where(above, position, NUM_BANDS - 1).amin(-1, keepdim=True)
    high = (torch.where(below, position, -1).amax(-1, keepdim=True) + 1).clamp(max=NUM_BANDS - 1)
    edges = []
    for band, level in ((low, tail * total), (high, (1 - tail) * total)):
        inside = bands.gather(-1, band)
        before = share.gather(-1, band) - inside
        edges.append(band + ((level - before) / inside.clamp(min=1e-30)).clamp(0, 1))
    return ((edges[1] - edges[0]) * BAND_HZ).squeeze(-1).clamp(0, CHANNEL_HZ)


def measure_arrival(
    demodulated: Tensor, reference: int, limit_s: Tensor, config: GenerateConfig, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Arrival differences to the reference record of one sample, and their own standard deviations.

    demodulated  (M, C, W)  float32  of one sample's records
    limit_s      (M,)       float32  how far a difference may lie from 0
    returns      (M, C) and (M, C) float32, in s; 0 and 1 s where nothing can be measured

    The lag comes from the whole record; chunks only refine around it, so that none can be an outlier.
    """
    zero = torch.zeros(demodulated.shape[:2])
    if config.waveform == "cw":
        return zero, zero + UNKNOWN_SIGMA_US * 1e-6
    first, last = grid.timing
    spectrum = torch.fft.rfft(demodulated)[..., first:last]
    cross = spectrum * spectrum[reference].conj()  # (M, C, K)
    turn = torch.arange(first, last, dtype=torch.float32) * (2 * math.pi * grid.bin_hz)  # rad/s
    whole = cross.sum(1)
    lag = _coarse_lag(whole, limit_s, turn, grid)
    for _ in range(NEWTON_STEPS):
        pull, stiff = _pull(whole, lag, turn)
        step = (pull / stiff.clamp(min=1e-30)).clamp(-MAX_STEP_S, MAX_STEP_S)
        lag = torch.maximum(torch.minimum(lag + torch.where(stiff > 0, step, 0.0), limit_s), -limit_s)
    _, stiff = _pull(whole, lag, turn)
    rotated = cross * torch.polar(torch.ones(()), turn * lag[:, None])[:, None]
    torque = -(rotated.imag * turn)
    firm = (rotated.real * turn.square()).sum(-1).clamp(min=0) + PRIOR * stiff.clamp(min=0)[
        :, None
    ] / NUM_CHUNKS
    known = (firm > 0) & (stiff > 0)[:, None]
    safe = torch.where(known, firm, 1.0)
    value = lag[:, None] + (torque.sum(-1) / safe).clamp(-MAX_STEP_S, MAX_STEP_S)
    bands = torque.reshape(*torque.shape[:2], -1, grid.timing_group).sum(-1)
    sigma = (bands.square().sum(-1).sqrt() / safe).clamp(max=UNKNOWN_SIGMA_US * 1e-6)
    value, sigma = torch.where(known, value, 0.0), torch.where(known, sigma, UNKNOWN_SIGMA_US * 1e-6)
    value[reference], sigma[reference] = 0.0, 0.0
    return value, sigma


def _coarse_lag(whole: Tensor, limit_s: Tensor, turn: Tensor, grid: Grid) -> Tensor:
    lags = torch.arange(-grid.lags, grid.lags + 1, dtype=torch.float32) * LAG_STEP_S
    angle = turn[:, None] * lags
    height = whole.real @ torch.cos(angle) - whole.imag @ torch.sin(angle)  # (M, lags)
    allowed = lags.abs() <= limit_s[:, None]
    return lags[torch.where(allowed, height, -math.inf).argmax(-1)]


def _pull(whole: Tensor, lag: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """First and minus second derivative of the correlation's height at a lag."""
    rotated = whole * torch.polar(torch.ones(()), turn * lag[:, None])
    return -(rotated.imag * turn).sum(-1), (rotated.real * turn.square()).sum(-1)


def aggregate(chunks: Tensor) -> Tensor:
    """mean, std, min and max over the chunks.

    chunks   (..., C, F)  →  (..., F, 4)  float32
    Added one by one, not by a reduction kernel, whose order may change with the batch.
    """
    parts = chunks.unbind(-2)
    low, high, total = parts[0], parts[0], parts[0]
    for part in parts[1:]:
        low, high, total = torch.minimum(low, part), torch.maximum(high, part), total + part
    mean = total / len(parts)
    square = (parts[0] - mean).square()
    for part in parts[1:]:
        square = square + (part - mean).square()
    return torch.stack([mean, (square / len(parts)).sqrt(), low, high], -1)


def feature_tensor(named: dict[str, Tensor]) -> Tensor:
    """Stack features by name into the order of FEATURES, along a new last axis."""
    return torch.stack([named[name] for name, _ in FEATURES], -1)


def noise_free_units(noise_dbm: float) -> float:
    """Amplitude in sqrt(mW) of a normalised unit."""
    return float(np.sqrt(10 ** (noise_dbm / 10)))

"""What a receiver can say of what it heard: estimators over chunks of the channel stream.

Axes: M records, C chunks, W points of a chunk at 25 kHz, F features. Every estimator is tested against the truth that
made the signal. Powers are in units of the noise in the channel until the last line turns them into dBm.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, GenerateConfig
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.receiver import STREAM_HZ
from brim.rf.physics.scene import max_excess_s

FEATURES: tuple[tuple[str, str], ...] = (
    ("rssi_dbm", "dBm"), ("snr_db", "dB"), ("noise_floor_dbm", "dBm"), ("frequency_offset_hz", "Hz"),
    ("bandwidth_hz", "Hz"), ("psd_dbm_per_hz", "dBm/Hz"), ("spectral_centroid_hz", "Hz"),
    ("spectral_rolloff_hz", "Hz"), ("spectral_flatness", "1"), ("envelope_mean", "1"), ("envelope_std", "1"),
    ("envelope_max", "1"), ("peak_to_avg_ratio_db", "dB"), ("zero_crossing_rate", "1/s"),
    ("multipath_delay_spread_us", "us"), ("coherence_bandwidth_khz", "kHz"), ("delay_spread_confidence", "1"),
    ("confidence_score", "1"), ("arrival_difference_us", "us"), ("arrival_sigma_us", "us"),
)  # fmt: skip
F = {name: i for i, (name, _) in enumerate(FEATURES)}
STATISTICS = ("mean", "std", "min", "max")

NUM_BANDS = 100  # the channel in bands of 125 Hz: smooths the spectrum without losing the edges
BAND_HZ = CHANNEL_HZ / NUM_BANDS
OFFSET_HZ = 3_750.0  # the carrier is looked for within ± this
OCCUPIED = 0.99  # share of the power in the occupied bandwidth
ROLLOFF = 0.85
MIN_SNR = 0.01  # −20 dB: below this, an SNR cannot be told from no signal
MAX_COHERENCE_KHZ = 1_000.0
TIMING_HZ = (300.0, 3_000.0)  # band of the demodulated signal that is correlated
TIMING_BAND_HZ = 100.0  # fading correlates neighbouring bins, bands this wide are independent
LAG_STEP_S = 20e-6  # of the coarse search: a sixteenth of the highest tone's period
ECHO_SIGMA_S = 0.4e-6  # what echoes that cannot be resolved shift an arrival by: 0.35 to 0.77 µs above 40 dB
FINE_LAGS = 2  # steps on either side once records are aligned to a point, which is two steps
FINE_LIMIT_S = 2.5 * LAG_STEP_S
NEWTON_STEPS = 4
MAX_STEP_S = 20e-6  # a chunk moves no further than this from the whole record's lag
PRIOR = 0.25  # weight of the whole record's lag in a chunk's, in chunks of mean information
TIMING_SNR = 10**-0.5  # −5 dB over the record: below it, another peak is often higher; sigma does not show it
UNKNOWN_SIGMA_US = 1e6  # an arrival difference that cannot be measured


@dataclass(frozen=True, slots=True)
class FeatureGrid:
    """Sizes that follow from the record length."""

    points: int  # W
    bins: int  # of the channel, half of them below the carrier
    bin_hz: float
    timing: tuple[int, int]  # first and one past the last bin of the timing band
    timing_group: int  # bins per independent band
    lags: int  # of the coarse search, on either side of 0

    @classmethod
    def of(cls, config: GenerateConfig, baseline_m: float) -> "FeatureGrid":
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
    return 5 * config.clock_sigma_s + 10e-6 + max_excess_s(config)


def channel_power(spectrum: Tensor, grid: FeatureGrid) -> Tensor:
    """Power per bin of the channel, from −6.25 kHz up.

    spectrum  (..., W)  complex64  FFT of the stream
    returns   (..., bins)  float32
    """
    half = grid.bins // 2
    inside = torch.cat([spectrum[..., -half:], spectrum[..., :half]], -1)
    return inside.abs().square_().div_(float(grid.points) ** 2)


def measure_truth(clean: Tensor, grid: FeatureGrid) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class EnvelopeSums:
    """What a chunk of the stream comes down to in time; every tensor is (M, C) float32.

    p is the mean power of two neighbouring points, t their product's imaginary part: power times phase advance.
    """

    envelope: Tensor  # sum of |y|
    square: Tensor  # sum of |y|²
    peak: Tensor  # largest |y|
    crossings: Tensor  # sign changes of the real part
    p: Tensor
    pp: Tensor
    t: Tensor
    tt: Tensor
    pt: Tensor


def sum_envelope(stream: Tensor, config: GenerateConfig) -> tuple[EnvelopeSums, Tensor]:
    """Reduce the stream in time, and demodulate the signal that carries the timing.

    stream   (M, C, W)  complex64
    returns  sums, and (M, C, W) float32 with 0 as the record's last point
    """
    power = stream.abs().square_()
    envelope = power.sqrt()
    real = stream.real
    p = (power[..., 1:] + power[..., :-1]) * 0.5
    t = (stream[..., 1:] * stream[..., :-1].conj()).imag
    sums = EnvelopeSums(
        envelope=envelope.sum(-1),
        square=power.sum(-1),
        peak=envelope.amax(-1),
        crossings=(real[..., 1:] * real[..., :-1] < 0).sum(-1).to(torch.float32),
        p=p.sum(-1),
        pp=(p * p).sum(-1),
        t=t.sum(-1),
        tt=(t * t).sum(-1),
        pt=(p * t).sum(-1),
    )
    demodulated = torch.nn.functional.pad(p if config.waveform == "am" else t, (0, 1))
    return sums, bridge_chunks(stream, demodulated, config)


def envelope_features(sums: EnvelopeSums, snr: Tensor, config: GenerateConfig, grid: FeatureGrid) -> dict[str, Tensor]:
    """Features of the stream in time, (M, C) by name; envelopes are relative to the chunk's rms.

    snr  (M, C)  float32  linear
    """
    rms = (sums.square / grid.points).sqrt().clamp(min=1e-15)
    mean, peak = sums.envelope / grid.points / rms, sums.peak / rms
    spread, confidence = _delay_spread(sums, snr, config, grid)
    return {
        "envelope_mean": mean,
        "envelope_std": (1 - mean * mean).clamp(min=0).sqrt(),
        "envelope_max": peak,
        "peak_to_avg_ratio_db": 20 * torch.log10(peak.clamp(min=1e-6)),
        "zero_crossing_rate": sums.crossings * (STREAM_HZ / grid.points),
        "multipath_delay_spread_us": spread * 1e6,
        "coherence_bandwidth_khz": (1e-3 / (5 * spread.clamp(min=1e-9))).clamp(max=MAX_COHERENCE_KHZ),
        "delay_spread_confidence": confidence,
    }


def _delay_spread(sums: EnvelopeSums, snr: Tensor, config: GenerateConfig, grid: FeatureGrid) -> tuple[Tensor, Tensor]:
    """Delay spread in s and its confidence, from how the strength follows the instantaneous frequency.

    Echoes make the gain vary over frequency; a modulated carrier sweeps a few kHz and shows the slope of the gain,
    d ln|H|²/df = 4π·Δτ. Confidence is the slope's significance, times how much of the resolution 1/bandwidth the
    spread is: echoes of microseconds in a few kHz cannot be resolved, and get a confidence near 0.
    """
    if config.waveform in ("am", "cw"):  # nothing sweeps
        return torch.zeros_like(snr), torch.zeros_like(snr)
    tiny, to_hz = 1e-30, 2 * math.pi / STREAM_HZ
    sweep = (sums.tt / sums.pp.clamp(min=tiny)).clamp(min=1e-9)  # mean square phase advance
    slope = (sums.pt / sums.pp.clamp(min=tiny) - sums.t / sums.p.clamp(min=tiny)).abs() / sweep * to_hz  # per Hz
    error = (2 / (snr.clamp(min=MIN_SNR) * grid.points * sweep)).sqrt() * to_hz
    spread = (slope / (4 * math.pi)).clamp(max=1e-4)
    significance = slope.square() / (slope.square() + 4 * error.square() + tiny)
    resolved = (10 * spread * 4 * sweep.sqrt() / to_hz).clamp(max=1)
    return spread, significance * resolved


@dataclass(frozen=True, slots=True)
class SpectrumSums:
    """What a chunk's spectrum comes down to; every tensor is (M, C) float32, powers with the noise."""

    total: Tensor  # power in the channel
    moment: Tensor  # sum of power times frequency, Hz
    near: Tensor  # power within ± OFFSET_HZ, noise taken off
    near_moment: Tensor  # its sum of power times frequency, Hz
    band_peak: Tensor  # power of the strongest band
    band_log: Tensor  # mean logarithm of the bands' powers
    rolloff: Tensor  # bands on either side of the carrier that hold 85 % of the power
    occupied: Tensor  # width in bands that holds 99 % of the power, noise taken off


def sum_spectrum(power: Tensor, floor: Tensor, grid: FeatureGrid) -> SpectrumSums:
    """Reduce the channel's spectrum.

    power  (M, C, bins)  float32
    floor  (M, C)        float32  noise power in the channel
    """
    half, reach = grid.bins // 2, round(OFFSET_HZ / grid.bin_hz)
    frequency = (torch.arange(grid.bins, dtype=torch.float32) - half) * grid.bin_hz
    near = power[..., half - reach : half + reach] - (floor / grid.bins).unsqueeze(-1)
    bands = power.reshape(*power.shape[:-1], NUM_BANDS, -1).sum(-1)
    edges = NUM_BANDS // 2
    folded = (bands[..., edges:] + bands[..., :edges].flip(-1)).cumsum(-1)
    return SpectrumSums(
        total=power.sum(-1),
        moment=(power * frequency).sum(-1),
        near=near.sum(-1),
        near_moment=(near * frequency[half - reach : half + reach]).sum(-1),
        band_peak=bands.amax(-1),
        band_log=bands.clamp(min=1e-30).log().mean(-1),
        rolloff=((folded < ROLLOFF * folded[..., -1:]).sum(-1) + 1).to(torch.float32),
        occupied=_occupied_bands(bands - (floor / NUM_BANDS).unsqueeze(-1)),
    )


def spectrum_features(sums: SpectrumSums, floor: Tensor, noise_dbm: float) -> dict[str, Tensor]:
    """Features of the channel's spectrum, (M, C) by name."""
    snr = linear_snr(sums.total, floor)
    offset = sums.near_moment / torch.maximum(sums.near, MIN_SNR * floor)
    total = sums.total.clamp(min=1e-30)
    return {
        "rssi_dbm": decibel(sums.total) + noise_dbm,
        "snr_db": decibel(snr),
        "noise_floor_dbm": decibel(floor) + noise_dbm,
        "frequency_offset_hz": offset.clamp(-OFFSET_HZ, OFFSET_HZ),
        "bandwidth_hz": sums.occupied * BAND_HZ,
        "psd_dbm_per_hz": decibel(sums.band_peak / BAND_HZ) + noise_dbm,
        "spectral_centroid_hz": sums.moment / total,
        "spectral_rolloff_hz": sums.rolloff * BAND_HZ,
        "spectral_flatness": sums.band_log.exp() * NUM_BANDS / total,
        "confidence_score": snr / (snr + 1),
    }


def linear_snr(total: Tensor, floor: Tensor) -> Tensor:
    """Signal over noise in the channel from the power of both together, never below −20 dB."""
    return torch.maximum(total / floor.clamp(min=1e-30) - 1, torch.full_like(total, MIN_SNR))


def decibel(power: Tensor) -> Tensor:
    """10·log10, floored far below anything measured so that no input gives −Inf."""
    return 10 * torch.log10(power.clamp(min=1e-30))


def _occupied_bands(bands: Tensor) -> Tensor:
    """Width in bands that holds 99 % of the power: from the first past 0.5 % to the last below 99.5 %, interpolated."""
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
    return (edges[1] - edges[0]).squeeze(-1).clamp(0, NUM_BANDS)


def timing_scale(sums: EnvelopeSums, grid: FeatureGrid) -> Tensor:
    """(M,) what a demodulated record is multiplied by for unit power; without it strong pairs overflow float32."""
    return grid.points * NUM_CHUNKS / sum_chunks(sums.square).clamp(min=1e-30)


def reference_power(sums: SpectrumSums) -> Tensor:
    """(M,) measured power of a record; the strongest of a sample is what the others' arrivals are compared with."""
    return sum_chunks(sums.total)


def timing_heard(sums: SpectrumSums, floor: Tensor) -> Tensor:
    """(M,) whether a record is strong enough for its arrival to be measured."""
    return sum_chunks(sums.total) > (1 + TIMING_SNR) * sum_chunks(floor)


def unknown_arrival(num: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """(M, C) and (M, C): what is said of arrivals that cannot be measured."""
    zero = torch.zeros(num, NUM_CHUNKS, device=device)
    return zero, zero + UNKNOWN_SIGMA_US * 1e-6


def only_heard(value: Tensor, sigma: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Arrivals of the pairs that could be measured, (M, C) each."""
    nothing, unknown = unknown_arrival(len(value), value.device)
    return torch.where(heard[:, None], value, nothing), torch.where(heard[:, None], sigma, unknown)


def measure_arrival(
    demodulated: Tensor, reference: int, limit_s: Tensor, config: GenerateConfig, grid: FeatureGrid
) -> tuple[Tensor, Tensor]:
    """Arrival differences to the reference record of one sample, and their own standard deviations.

    demodulated  (M, C, W)  float32  of one sample's records, scaled by timing_scale
    limit_s      (M,)       float32  how far a difference may lie from 0
    returns      (M, C) and (M, C) float32, in s; 0 and 1 s where nothing can be measured

    The lag comes from the whole record; chunks only refine around it, so that none can be an outlier. Records are
    aligned to a point of the stream before they are compared in chunks: unaligned ones share less of each chunk the
    later they are, which pulls the difference towards 0.
    """
    if config.waveform == "cw":
        return unknown_arrival(len(demodulated))
    first, last = grid.timing
    spectrum = torch.fft.rfft(demodulated)[..., first:last]
    rough, _ = _compare(spectrum, spectrum[reference], limit_s, grid.lags, grid)
    points = whole_points(rough)
    stations, references = align(demodulated, demodulated[reference].expand_as(demodulated), points)
    stations, references = (torch.fft.rfft(part)[..., first:last] for part in (stations, references))
    fine_s = torch.full_like(limit_s, FINE_LIMIT_S)
    value, sigma = _compare(stations, references, fine_s, FINE_LAGS, grid)
    own = torch.arange(len(value)) == reference
    return whole_arrival(value, sigma, points, limit_s, own)


def bridge_chunks(stream: Tensor, demodulated: Tensor, config: GenerateConfig) -> Tensor:
    """(M, C, W) the demodulated signal with its last point of each chunk, which needs the next chunk's first."""
    last, following = stream[:, :-1, -1], stream[:, 1:, 0]
    if config.waveform == "am":
        power = [last.real.square() + last.imag.square(), following.real.square() + following.imag.square()]
        demodulated[:, :-1, -1] = (power[0] + power[1]) * 0.5
    else:
        demodulated[:, :-1, -1] = following.imag * last.real - following.real * last.imag
    return demodulated


def whole_points(rough_s: Tensor) -> Tensor:
    """(M,) int64: points of the stream that records lie behind the reference, from their chunks (M, C) in s."""
    return (sum_chunks(rough_s) * (STREAM_HZ / NUM_CHUNKS)).round().to(torch.int64)


def align(stations: Tensor, references: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Stations moved earlier by whole points; both 0 where only one of them has been recorded.

    stations, references  (M, C, W)  float32
    points                (M,)       int64
    """
    shape, length = stations.shape, stations.shape[1] * stations.shape[2]
    place = torch.arange(length, device=points.device) + points[:, None]
    inside = (place >= 0) & (place < length)
    moved = stations.reshape(-1, length).gather(1, place.clamp(0, length - 1))
    zero = torch.zeros((), device=points.device)
    return (
        torch.where(inside, moved, zero).view(shape),
        torch.where(inside, references.reshape(-1, length), zero).view(shape),
    )


def whole_arrival(value: Tensor, sigma: Tensor, points: Tensor, limit_s: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """(M, C) differences with the points that records were moved by, and their sigmas; 0 for the reference."""
    known = sigma < UNKNOWN_SIGMA_US * 1e-6
    reach = (limit_s + MAX_STEP_S)[:, None]
    moved = value + (points.to(torch.float32) / STREAM_HZ)[:, None]
    value = torch.where(known, torch.maximum(torch.minimum(moved, reach), -reach), 0.0)
    sigma = torch.where(known, (sigma.square() + ECHO_SIGMA_S**2).sqrt(), sigma)
    return torch.where(own[:, None], 0.0, value), torch.where(own[:, None], 0.0, sigma)


def _compare(
    spectrum: Tensor, references: Tensor, limit_s: Tensor, lags: int, grid: FeatureGrid
) -> tuple[Tensor, Tensor]:
    """(M, C) lags of chunks behind their references by the timing band's spectra (M, C, K), and their sigmas, s."""
    cross = spectrum * references.conj()  # (M, C, K)
    turn = torch.arange(*grid.timing, dtype=torch.float32) * (2 * math.pi * grid.bin_hz)  # rad/s
    whole = cross.sum(1)
    lag = _coarse_lag(whole, limit_s, turn, lags)
    for _ in range(NEWTON_STEPS):
        pull, stiff = _pull(whole, lag, turn)
        step = (pull / stiff.clamp(min=1e-30)).clamp(-MAX_STEP_S, MAX_STEP_S)
        lag = torch.maximum(torch.minimum(lag + torch.where(stiff > 0, step, 0.0), limit_s), -limit_s)
    _, stiff = _pull(whole, lag, turn)
    rotated = cross * torch.polar(torch.ones(()), turn * lag[:, None])[:, None]
    torque = -(rotated.imag * turn)
    firm = (rotated.real * turn.square()).sum(-1).clamp(min=0) + PRIOR * stiff.clamp(min=0)[:, None] / NUM_CHUNKS
    known = (firm > 0) & (stiff > 0)[:, None]
    safe = torch.where(known, firm, 1.0)
    value = lag[:, None] + (torque.sum(-1) / safe).clamp(-MAX_STEP_S, MAX_STEP_S)
    bands = torque.reshape(*torque.shape[:2], -1, grid.timing_group).sum(-1)
    sigma = (bands.square().sum(-1).sqrt() / safe).clamp(max=UNKNOWN_SIGMA_US * 1e-6)
    return torch.where(known, value, 0.0), torch.where(known, sigma, UNKNOWN_SIGMA_US * 1e-6)


def _coarse_lag(whole: Tensor, limit_s: Tensor, turn: Tensor, reach: int) -> Tensor:
    lags = torch.arange(-reach, reach + 1, dtype=torch.float32) * LAG_STEP_S
    angle = turn[:, None] * lags
    height = whole.real @ torch.cos(angle) - whole.imag @ torch.sin(angle)  # (M, lags)
    allowed = lags.abs() <= limit_s[:, None]
    return lags[torch.where(allowed, height, -math.inf).argmax(-1)]


def _pull(whole: Tensor, lag: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """First and minus second derivative of the correlation's height at a lag."""
    rotated = whole * torch.polar(torch.ones(()), turn * lag[:, None])
    return -(rotated.imag * turn).sum(-1), (rotated.real * turn.square()).sum(-1)


def sum_chunks(values: Tensor) -> Tensor:
    """(..., C) → (...,), added one by one: a reduction kernel's order may change with the batch."""
    first, *rest = values.unbind(-1)
    return functools.reduce(torch.add, rest, first)


def aggregate(chunks: Tensor) -> Tensor:
    """mean, std, min and max over the chunks, in order as in sum_chunks.

    chunks   (..., C, F)  →  (..., F, 4)  float32
    """
    parts = chunks.unbind(-2)
    mean = sum_chunks(chunks.transpose(-1, -2)) / len(parts)
    variance = sum_chunks((chunks - mean.unsqueeze(-2)).square().transpose(-1, -2)) / len(parts)
    low, high = functools.reduce(torch.minimum, parts), functools.reduce(torch.maximum, parts)
    return torch.stack([mean, variance.sqrt(), low, high], -1)


def milliwatt_units(noise_dbm: float) -> float:
    """Amplitude in sqrt(mW) of a normalised unit."""
    return float(10 ** (noise_dbm / 20))

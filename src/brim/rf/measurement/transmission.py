"""Finding the transmission: the band that stands out of the noise at most receivers, and how strong it is at each.

Axes: R receivers, K bins of the power spectrum.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from brim.errors import ConfigError
from brim.rf.measurement.streams import Receiver, to_complex

F64 = NDArray[np.float64]

BINS = 8_192
MAX_WINDOWS = 96  # of the spectrum, spread over the recording
USABLE = 0.9  # of the sampled band: beyond it an anti-alias filter may cut
FLOOR_QUANTILE = 0.2  # of the bins: below most signals, above what a filter cut away
OUT = 10**0.12  # smoothed bins stand out of the noise from 1.2 dB on: they scatter by a few per cent
OTHERS = 10**0.3  # a band is not widened over what stands out by 3 dB
DEPTH = 1e-3  # bins 30 dB below the rest of a band are the skirts of a filter, not of the transmission
GAP_SHARE = 0.02  # of the sampled band: quieter stretches up to this do not end a transmission
MIN_WIDTH_HZ = 50.0
KEPT_HZ = 3_000.0  # a narrower band is widened to this where nothing else is: weak sidebands help too


@dataclass(frozen=True, slots=True, kw_only=True)
class BandSpectrum:
    """Mean power per bin of one receiver, in rising frequency; full scale is 1."""

    frequency_hz: F64  # (K,) absolute
    power: F64  # (K,)
    floor: float  # noise power per bin

    @property
    def bin_hz(self) -> float:
        return float(self.frequency_hz[1] - self.frequency_hz[0])

    def inside(self, centre_hz: float, width_hz: float) -> F64:
        return self.power[np.abs(self.frequency_hz - centre_hz) <= width_hz / 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """A band in which something was transmitted."""

    centre_hz: float
    width_hz: float
    core: tuple[float, float] | None = None  # centre and width of what stands out, where the band was widened

    @property
    def narrower(self) -> "Transmission | None":
        """What stands out alone; None where the band was not widened by much."""
        if self.core is None or self.core[1] > 0.5 * self.width_hz:
            return None
        return Transmission(centre_hz=self.core[0], width_hz=self.core[1])


def power_spectrum(
    receiver: Receiver, start_s: float, seconds: float, device: torch.device | str = "cpu"
) -> BandSpectrum:
    """Welch's estimate over windows spread evenly through a stretch of time."""
    clock, samples = receiver.clock, receiver.recording.samples
    line = max(clock.lines, key=lambda one: one.end - one.first)
    first = max(line.first, int(clock.sample_at(start_s - receiver.late_s, line)))
    last = min(line.end, int(clock.sample_at(start_s + seconds - receiver.late_s, line)))
    size = BINS
    while size > 64 and last - first < 4 * size:
        size //= 2
    num = int(min(MAX_WINDOWS, max(1, 2 * (last - first) // size - 1)))
    starts = np.linspace(first, max(first, last - size), num).astype(np.int64)
    taper = torch.hann_window(size, dtype=torch.float32, device=device)
    total = torch.zeros(size, dtype=torch.float64, device=device)
    for begin in starts.tolist():
        values = torch.from_numpy(samples.read(begin, min(size, len(samples) - begin)).copy()).to(device)
        chunk = to_complex(values, samples.offset, samples.full_scale)
        chunk = torch.nn.functional.pad(chunk, (0, size - len(chunk)))
        total += torch.fft.fft(chunk * taper).abs().square().double()
    power = np.fft.fftshift(total.cpu().numpy()) / (num * float(taper.square().sum()) * size)
    frequency = receiver.centre_hz + np.fft.fftshift(np.fft.fftfreq(size, 1 / clock.rate_hz))
    keep = np.abs(frequency - receiver.centre_hz) <= USABLE / 2 * clock.rate_hz
    if receiver.recording.is_real:
        keep &= frequency > receiver.centre_hz
    power, frequency = power[keep], frequency[keep]
    return BandSpectrum(frequency_hz=frequency, power=power, floor=noise_floor(power))


def noise_floor(power: F64) -> float:
    """Noise per bin: a low quantile of smoothed bins, brought up to the mean of noise alone."""
    smooth = _smooth(power, max(1, len(power) // 256))
    return float(np.quantile(smooth, FLOOR_QUANTILE))


def find_transmission(
    spectra: list[BandSpectrum], frequency_hz: float | None, bandwidth_hz: float | None, tuned_hz: float | None = None
) -> Transmission:
    """The strongest band that most receivers hear, or the one asked for.

    tuned_hz  centre of receivers that are hardly wider than a transmission: a signal there takes precedence
    """
    low = max(float(one.frequency_hz[0]) for one in spectra)
    high = min(float(one.frequency_hz[-1]) for one in spectra)
    if high - low < MIN_WIDTH_HZ:
        raise ConfigError("the recordings share no band of frequencies", code="conflict")
    if frequency_hz is not None and not low <= frequency_hz <= high:
        raise ConfigError(
            f"is outside what the recordings share, {low / 1e6:.6f} to {high / 1e6:.6f} MHz",
            field="frequency_mhz",
            value=frequency_hz / 1e6,
            code="out_of_range",
        )
    if frequency_hz is not None and bandwidth_hz is not None:
        return _inside(frequency_hz, bandwidth_hz, low, high)
    grid = np.linspace(low, high, min(len(one.power) for one in spectra))
    step = float(grid[1] - grid[0])
    near = max(1, round(len(grid) / 400))
    rows = np.stack([_smooth(np.interp(grid, one.frequency_hz, one.power), near) for one in spectra])
    excess = np.median(rows / np.array([[max(one.floor, 1e-30)] for one in spectra]), axis=0)
    gap = max(2, round(GAP_SHARE * len(grid)))
    wanted_hz = frequency_hz
    if tuned_hz is not None and excess[np.abs(grid - tuned_hz) <= 2 * near * step].max(initial=0.0) > OTHERS:
        wanted_hz = wanted_hz or tuned_hz
    first, last = _region(excess, grid, wanted_hz, gap)
    first, last = _without_skirts(np.median(rows / rows.mean(1, keepdims=True), axis=0), first, last, 4 * near + 2)
    width = max((last - first + 1) * step, MIN_WIDTH_HZ)
    centre = float(grid[first] + grid[last]) / 2
    if bandwidth_hz is not None:
        strength = excess[first : last + 1]
        weighted = float((grid[first : last + 1] * strength).sum() / strength.sum())
        return _inside(weighted if width > bandwidth_hz else centre, bandwidth_hz, low, high)
    if frequency_hz is not None:  # the band around what was asked for, as wide as the found one reaches
        width = 2 * max(frequency_hz - float(grid[first]), float(grid[last]) - frequency_hz, MIN_WIDTH_HZ / 2)
        centre = frequency_hz
    core = _inside(centre, width, low, high)
    first, last = _widened(excess, first, last, math.ceil(KEPT_HZ / step), 2 * near)
    if frequency_hz is not None:
        width = max(width, 2 * min(frequency_hz - float(grid[first]), float(grid[last]) - frequency_hz))
    else:
        width, centre = max((last - first + 1) * step, MIN_WIDTH_HZ), float(grid[first] + grid[last]) / 2
    return replace(_inside(centre, width, low, high), core=(core.centre_hz, core.width_hz))


def own_band(spectrum: BandSpectrum, frequency_hz: float) -> Transmission:
    """The transmission nearest to a frequency as one receiver sees it, at the frequency of its own oscillator."""
    near = max(1, round(len(spectrum.power) / 400))
    smooth = _smooth(spectrum.power, near)
    gap = max(2, round(GAP_SHARE * len(smooth) / 4))
    first, last = _region(smooth / max(spectrum.floor, 1e-30), spectrum.frequency_hz, frequency_hz, gap)
    inside = slice(first, last + 1)
    weight = np.maximum(spectrum.power[inside] - spectrum.floor, 0.0)
    centre = float((spectrum.frequency_hz[inside] * weight).sum() / max(float(weight.sum()), 1e-30))
    return Transmission(centre_hz=centre, width_hz=max((last - first + 1) * spectrum.bin_hz, MIN_WIDTH_HZ))


def _inside(centre_hz: float, width_hz: float, low: float, high: float) -> Transmission:
    first, last = max(low, centre_hz - width_hz / 2), min(high, centre_hz + width_hz / 2)
    return Transmission(centre_hz=(first + last) / 2, width_hz=max(last - first, MIN_WIDTH_HZ))


def _region(excess: F64, grid: F64, frequency_hz: float | None, gap: int) -> tuple[int, int]:
    """First and last bin of the strongest stretch above the noise, over short gaps; all bins where none stands out."""
    above = np.nonzero(excess > OUT)[0]
    if not len(above):
        return 0, len(grid) - 1
    pieces = np.split(above, np.nonzero(np.diff(above) > gap)[0] + 1)
    if frequency_hz is not None:
        at = int(np.abs(grid - frequency_hz).argmin())
        best = min(pieces, key=lambda piece: max(0, int(piece[0]) - at, at - int(piece[-1])))
    else:
        best = max(pieces, key=lambda piece: float((excess[piece] - 1).sum()))
    return int(best[0]), int(best[-1])


def _widened(excess: F64, first: int, last: int, wanted: int, clear: int) -> tuple[int, int]:
    """The stretch with quiet bins beside it until it is `wanted` long, `clear` bins off what else stands out."""
    more = max(0, wanted - (last - first + 1) + 1) // 2
    above = np.nonzero(excess > OTHERS)[0]
    before, after = above[above < first - clear], above[above > last + clear]
    low = int(before[-1]) + clear if len(before) else 0
    high = int(after[0]) - clear if len(after) else len(excess) - 1
    return min(first, max(low, first - more)), max(last, min(high, last + more))


def _without_skirts(power: F64, first: int, last: int, lines: int) -> tuple[int, int]:
    """The stretch within 30 dB of its level, where a carrier or two, `lines` bins wide, are not the level."""
    inside = np.sort(power[first : last + 1])[::-1]
    limit = float(inside[min(lines, len(inside) - 1)]) * DEPTH
    kept = first + np.nonzero(power[first : last + 1] >= limit)[0]
    return int(kept[0]), int(kept[-1])


def _smooth(values: F64, near: int) -> F64:
    kernel = np.ones(2 * near + 1) / (2 * near + 1)
    return np.convolve(np.pad(values, near, mode="edge"), kernel, "valid")

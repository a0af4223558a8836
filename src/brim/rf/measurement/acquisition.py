"""First look at a pair: roughly how much later, and how far apart the oscillators are.

Axes: W windows, S frequency shifts, N points of a window.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from brim.rf.measurement.spectra import demodulate
from brim.rf.measurement.streams import Band

NUM_WINDOWS = 6
CHEAP_POINTS = 4_096  # windows up to this cost little: twice as many are compared
PRODUCT = 4_000.0  # bandwidth times length of a coherent window
WINDOW_S = (0.05, 2.0)
LONG_S = 4.0  # windows of demodulated signals: oscillators do not matter there
LINES = 2.5  # amplitude, over the rms around it, to which a line is cut
SURE = 1.25  # how far above what noise reaches a peak must stand
ENOUGH_WINDOWS, CERTAIN = 3, 3.0  # windows, and times SURE, after which no more are compared
SHIFT_STEP = 2
CELLS = 1 << 23  # complex values of the search held at once


@dataclass(frozen=True, slots=True)
class Coarse:
    """Where a pair's correlation peaks."""

    lag_s: float  # station minus reference
    shift_hz: float
    sure: float  # height over what noise alone reaches; below SURE nothing was found
    kind: str


def acquire(first: Tensor, second: Tensor, band: Band, limit_s: float, shift_limit_hz: float) -> Coarse:
    """The best of the three kinds of comparison.

    first, second  (N,)  complex64  streams of the reference and the station, in the same time base
    """
    searches = [_complex_search(first, second, band, limit_s, shift_limit_hz)]
    searches += [real_search(first, second, band, limit_s, kind) for kind in ("envelope", "frequency")]
    best = max(searches, key=lambda one: one.sure)
    # the complex search alone knows the shift, and is the finest: it wins where it is sure
    return searches[0] if searches[0].sure >= SURE else best


def _complex_search(first: Tensor, second: Tensor, band: Band, limit_s: float, shift_limit_hz: float) -> Coarse:
    window_s = max(WINDOW_S[0], min(WINDOW_S[1], PRODUCT / band.width_hz))
    points, starts = _windows(len(first), band, window_s, first, 2)
    taper = torch.hann_window(points, device=first.device)  # sharp ends correlate with each other
    size = 1 << (points + math.ceil(limit_s * band.rate_hz) + 1).bit_length()
    lags = min(size // 2 - 1, math.ceil(limit_s * band.rate_hz))
    step_hz = band.rate_hz / size
    # the taper is four bins of a window wide: every second one of the padded transform is enough
    reach = round(shift_limit_hz / step_hz / SHIFT_STEP) * SHIFT_STEP
    shifts = torch.arange(-reach, reach + 1, SHIFT_STEP, device=first.device)
    index = torch.cat([torch.arange(lags + 1), torch.arange(size - lags, size)]).to(first.device)
    total = torch.zeros(len(shifts), len(index), device=first.device)
    best = Coarse(0.0, 0.0, 0.0, "complex")
    for done, at in enumerate(starts, 1):
        a = _whitened(torch.fft.fft(first[at : at + points] * taper, size))
        b = _whitened(torch.fft.fft(second[at : at + points] * taper, size))
        per = max(1, CELLS // size)
        for k in range(0, len(shifts), per):
            # station's spectrum moved down by the shift, against the reference's
            moved = torch.stack([torch.roll(b, -int(shift)) for shift in shifts[k : k + per]])
            height = torch.fft.ifft(moved * a.conj()).abs().square()[:, index]
            total[k : k + per] += height
        if done < min(ENOUGH_WINDOWS, len(starts)):
            continue
        row, column = divmod(int(total.argmax()), len(index))
        noise = 1 + math.sqrt(2 * math.log(total.numel()) / done) + math.log(total.numel()) / done
        sure = float(total[row, column] / total.mean().clamp(min=1e-30)) / noise
        place = int(index[column])
        lag = place if place <= lags else place - size
        best = Coarse(lag / band.rate_hz, float(shifts[row]) * step_hz, sure, "complex")
        if sure > CERTAIN * SURE:
            break
    return best


def real_search(
    first: Tensor, second: Tensor, band: Band, limit_s: float, kind: str, window_s: float = LONG_S, whole: bool = False
) -> Coarse:
    """The lag of demodulated signals; `whole` compares a window of the reference with all of the station's stream."""
    points, starts = _windows(len(first), band, window_s, first)
    reach = math.ceil(limit_s * band.rate_hz)
    size = 1 << (max(points, len(second) if whole else 0) + reach + 1).bit_length()
    lags = min(size // 2 - 1, reach)
    index = torch.cat([torch.arange(lags + 1), torch.arange(size - lags, size)]).to(first.device)
    total = torch.zeros(len(index), device=first.device)
    if whole:  # the middle of the reference may be anywhere in the station's stream
        middle = (len(first) - points) // 2
        starts = [middle]
    for at in starts:
        low, high = (0, len(second)) if whole else (at, at + points)
        a = demodulate(first[None, at : at + points], kind)[0]
        b = demodulate(second[None, low:high], kind)[0]
        a, b = a - a.mean(), b - b.mean()
        if whole:
            a = torch.nn.functional.pad(a, (at, 0))
        total += torch.fft.irfft(_whitened(torch.fft.rfft(b, size)) * _whitened(torch.fft.rfft(a, size)).conj(), size)[
            index
        ]
    spread = 1.48 * float((total - total.median()).abs().median()) + 1e-30
    place = int(index[int(total.argmax())])
    noise = math.sqrt(2 * math.log(len(index) + 10)) + 3.5
    lag = place if place <= lags else place - size
    return Coarse(lag / band.rate_hz, 0.0, float(total.max()) / spread / noise, kind)


def residual_shift_hz(first: Tensor, second: Tensor, band: Band) -> float:
    """How far the oscillators still differ, from the product of aligned streams over the whole look."""
    near_hz = min(4 * band.rate_hz / max(64, min(len(first), PRODUCT / band.width_hz * band.rate_hz)), band.rate_hz / 4)
    block = max(1, int(band.rate_hz / (4 * near_hz)))
    product = (second * first.conj())[: len(first) // block * block].reshape(-1, block).sum(-1)
    size = 8 << len(product).bit_length()
    height = torch.fft.fft(product, size).abs()
    step_hz = band.rate_hz / block / size
    reach = max(1, round(near_hz / step_hz))
    inside = torch.cat([height[-reach:], height[: reach + 1]])
    return (int(inside.argmax()) - reach) * step_hz


def _windows(total: int, band: Band, seconds: float, stream: Tensor, overlap: int = 1) -> tuple[int, list[int]]:
    """Points of a window and where the strongest ones begin."""
    points = min(total, max(64, round(seconds * band.rate_hz)))
    starts = list(range(0, total - points + 1, max(1, points // overlap)))
    power = [float(stream[at : at + points].abs().square().sum()) for at in starts]
    num = NUM_WINDOWS * overlap * (2 if points <= CHEAP_POINTS else 1)
    best = sorted(range(len(starts)), key=lambda k: -power[k])[:num]
    return points, [starts[k] for k in sorted(best)]


def _whitened(spectrum: Tensor) -> Tensor:
    """Strong lines held down: divided by the root of the power around each bin."""
    power = spectrum.abs().square()
    near = max(1, len(power) // 512)
    padded = torch.nn.functional.pad(power[None, None], (near, near), mode="circular")
    around = torch.nn.functional.avg_pool1d(padded, 2 * near + 1, 1)[0, 0]
    level = around + 1e-3 * around.mean()  # outside the band there is nothing to lift
    flat = spectrum / level.clamp(min=1e-30).sqrt()
    return flat / (flat.abs() / LINES).clamp(min=1.0)  # a carrier correlates at every lag

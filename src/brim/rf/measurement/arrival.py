"""Arrival differences from cross-spectra: where the correlation peaks, how sharp it is, and what else it could be.

Axes: G groups of chunks, P pairs, K bands of frequency.

The cross-spectrum of a pair turns by 2πfτ. Each band's phase counts with 2·n·γ²/(1 − γ²), its Fisher information at the
measured coherence γ and n independent values, which makes the fit the maximum-likelihood one. Receivers and paths bend
the phase too: a square and a cube of the frequency are fitted along where the data asks for them, and the delay is
that at the middle of the band.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.rf.measurement.spectra import CrossSums

MAX_COHERENCE = 0.9999
NEWTON_STEPS = 6
BEND_GAIN = 12.0  # how much χ² must fall, per its degrees of freedom, for a bend of the phase to be believed
BEND_SHARE = 0.25  # of the change it makes that counts as uncertainty
MIN_INFORMATION = 40.0  # of all bands but the heaviest; below it there is no clear peak
CURVE_POINTS = 161
RUN = 16  # lags whose phases are those of the first, turned further
MIN_GROUPS = 4
SKIRT = 1e-3
SMOOTHED = 60.0  # independent values that a coherence is the mean of
GATED = 1_500.0  # and those of the wider mean that separates signal from noise
NOISE_LIMIT = 6.0  # times what noise alone shows on average
BURSTS = 4.0  # times more in an envelope: where a carrier is keyed, its noise is all from the moments without it
LINE = 5.0  # a bin this far above its neighbours is a carrier, a tone or hum
LINE_REACH = 16  # bins to either side that a bin is compared with
LEAKS = 12  # and that it may leak into
TONES = 6  # lines of one transmission at most
CARRIER = 10.0  # times the next line: a carrier
LINES_NEEDED = 3.0  # times MIN_INFORMATION, in what is left without lines

F64 = NDArray[np.float64]
C128 = NDArray[np.complex128]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """One pair's arrival difference by one kind of signal, relative to the alignment of the streams."""

    kind: str
    delay_s: float
    plain_delay_s: float  # without bends of the phase
    sigma_s: float
    plain_s: float  # standard deviation by the coherence alone: what decides between kinds and chunks
    peak: float  # correlation coefficient
    information: float  # sum of the weights: SNR of the whole comparison
    ambiguity: float
    alternatives_s: tuple[float, ...]
    chunks: int
    spread_s: float | None
    order: int  # 1: a plain delay; 2, 3: with bends of the phase
    misfit: float  # χ² per degree of freedom
    chunk_s: float
    curve: tuple[float, float, tuple[float, ...]]  # first lag, step, heights
    coherence: float  # power-weighted mean of γ²


def fit_delay(sums: CrossSums, pair: int, first: int, second: int, reach_s: float) -> Delay | None:
    """The delay of one pair; None where nothing rises above the noise. It is looked for within ± reach_s."""
    frequency = sums.frequency_hz.numpy()
    cross = sums.cross[:, pair].numpy()  # (G, K)
    values = float(sums.values.sum())
    power = sums.power.sum(0).numpy()
    limit = NOISE_LIMIT * (1 if sums.kind == "complex" else BURSTS)
    gamma = _coherence(cross.sum(0), power[first], power[second], values, limit)
    weight = 2 * values * gamma / (1 - gamma) * _in_band(power[first]) * _in_band(power[second])
    weight = _without_lines(weight, power[first], power[second])
    if weight.sum() - weight.max() < MIN_INFORMATION:
        return None
    whole = cross.sum(0)
    unit = whole / np.maximum(np.abs(whole), 1e-300)
    free = sums.kind == "complex"
    lag, curve, others, ambiguity = _peak(unit, weight, frequency, reach_s, free)
    fits = {order: _fit(unit, weight, frequency, lag, order, free) for order in _orders(sums.kind, weight)}
    order = 1
    for more in sorted(fits)[1:]:
        gained = (fits[order].chi2 - fits[more].chi2) / max(1e-9, fits[more].chi2 / max(1, fits[more].free))
        if gained > BEND_GAIN * (more - order):
            order = more
    best = fits[order]
    misfit = max(1.0, best.chi2 / max(1, best.free))
    if weight.sum() - weight.max() < MIN_INFORMATION * misfit:
        return None
    spread, correction = _spread(cross, power, best, weight, frequency, sums)
    bent = fits[max(fits)]
    doubt = max(0.0, abs(bent.delay_s - best.delay_s) - math.sqrt(bent.variance * misfit))
    bend = max(doubt * 2, abs(best.delay_s - fits[1].delay_s))
    variance = best.variance * misfit + (BEND_SHARE * bend) ** 2
    variance = max(variance, 0.0 if spread is None else spread**2 / len(cross))
    return Delay(
        kind=sums.kind,
        delay_s=best.delay_s + correction,
        plain_delay_s=fits[1].delay_s,
        sigma_s=math.sqrt(variance),
        plain_s=math.sqrt(fits[1].variance),
        peak=float(np.abs((np.abs(whole) * np.exp(1j * np.angle(unit * _turned(frequency, lag)))).sum()))
        / float(np.sqrt(power[first].sum() * power[second].sum())),
        information=float(weight.sum()),
        ambiguity=ambiguity,
        alternatives_s=others,
        chunks=len(cross),
        spread_s=spread,
        order=order,
        misfit=misfit,
        chunk_s=sums.chunk_s,
        curve=curve,
        coherence=float((gamma * np.abs(whole)).sum() / max(np.abs(whole).sum(), 1e-300)),
    )


def _coherence(cross: C128, first: F64, second: F64, values: float, limit: float) -> F64:
    """γ² per band, smoothed over neighbours, with its bias taken off: noise alone has 1/n.

    Bands are scaled to unit power before they are averaged, so that a carrier lends nothing to those beside it. Where
    a wider average is no more than noise shows, there is none: hundreds of empty bands would tell a delay otherwise.
    """
    scaled = cross / np.maximum(np.sqrt(first * second), 1e-300)
    (fine, bias), (wide, wide_bias) = (_averaged(scaled, values, wanted) for wanted in (SMOOTHED, GATED))
    gamma = np.where(wide > limit * wide_bias, fine, 0.0)
    return np.clip((gamma - bias) / (1 - bias), 0.0, MAX_COHERENCE)


def _averaged(scaled: C128, values: float, wanted: float) -> tuple[F64, float]:
    """|mean|² over neighbours until `wanted` independent values are in it, and what noise alone has."""
    near = min(math.ceil(wanted / max(values, 1.0) / 2), max(1, len(scaled) // 40))
    kernel = np.ones(2 * near + 1) / (2 * near + 1)
    gamma = _smooth(scaled.real, kernel) ** 2 + _smooth(scaled.imag, kernel) ** 2
    return gamma, 1 / max(values * (2 * near + 1), 1.5)


def _without_lines(weight: F64, first: F64, second: F64) -> F64:
    """Weights without a carrier or hum: the bins a line leaks into have its phase, which says nothing about the delay.

    A few lines of like power are tones of the transmission and stay. Where little else is known, each line keeps its
    own bin: several of them tell a delay together.
    """
    reach = min(LINE_REACH, len(weight) // 2)
    power = np.maximum(first / first.sum(), second / second.sum())
    padded = np.pad(power, reach, mode="reflect")
    ratio = power / np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1), -1)
    top = (ratio > LINE) & (power >= np.maximum(np.roll(power, 1), np.roll(power, -1)))
    heights = np.sort(power[top])[::-1]
    if not len(heights) or (1 < len(heights) <= TONES and heights[0] < CARRIER * heights[1]):
        return weight
    lines = (ratio > LINE) & ((len(heights) > TONES) | (power > heights[0] / CARRIER))
    near = np.zeros(len(weight), bool)
    for step in range(-LEAKS, LEAKS + 1):  # Hann's sidelobes fall with the sixth power
        near |= np.roll(lines & ((abs(step) <= 2) | (ratio > 0.1 * abs(step) ** 6)), step)
    rest = np.where(near, 0.0, weight)
    if rest.sum() - rest.max() >= LINES_NEEDED * MIN_INFORMATION:
        return rest
    return np.where(near & ~top, 0.0, weight)


def _in_band(power: F64) -> NDArray[np.bool_]:
    """Bands within 30 dB of the level of most: beyond a receiver's filter phases are the filter's own."""
    level = np.sort(power)[::-1][max(8, len(power) // 12) % len(power)]
    return np.asarray(_smooth(power, np.ones(3) / 3) >= SKIRT * level)


def _smooth(values: F64, kernel: F64) -> F64:
    edge = len(kernel) // 2
    return np.convolve(np.pad(values, edge, mode="edge"), kernel, "valid")


def _turned(frequency: F64, lag_s: float | F64) -> C128:
    return np.asarray(np.exp(2j * math.pi * frequency * lag_s), np.complex128)


def _correlation(values: C128, frequency: F64, first_s: float, step_s: float, num: int) -> C128:
    """(num,) sums over the bands at equidistant lags.

    The phase of lag RUN·k + j is the product of two, which saves most of the exponentials.
    """
    runs, within = (np.arange(count, dtype=np.float64)[:, None] for count in (-(-num // RUN), RUN))
    coarse = _turned(frequency, first_s + RUN * step_s * runs) * values
    fine = _turned(frequency, step_s * within)
    return np.asarray(np.einsum("ak,bk->ab", coarse, fine).reshape(-1)[:num])


def _peak(
    unit: C128, weight: F64, frequency: F64, reach_s: float, free: bool
) -> tuple[float, tuple[float, float, tuple[float, ...]], tuple[float, ...], float]:
    """Highest lag, the curve around it, the next peaks, and the probability that one of them is the true one."""
    width = max(math.sqrt(float((weight * frequency**2).sum() / weight.sum())), 1e-3)
    step = 1 / (16 * max(float(np.abs(frequency).max()), width))
    num = min(2 * math.ceil(reach_s / step) + 1, 20_001)
    lags, step_s = np.linspace(-reach_s, reach_s, num, retstep=True)
    part = _correlation(unit * weight, frequency, -reach_s, step_s, num)
    heights = np.abs(part) if free else part.real
    top = int(heights.argmax())
    rising = np.nonzero((heights[1:-1] >= heights[:-2]) & (heights[1:-1] > heights[2:]))[0] + 1
    others = sorted((k for k in rising if abs(k - top) > 2), key=lambda k: -heights[k])[:3]
    # log-likelihood of a lag is the height: each band adds w·cos
    odds = [math.exp(max(-700.0, min(0.0, float(heights[k] - heights[top])))) for k in others]
    total = sum(odds)
    worth = tuple(float(lags[k]) for k, odd in zip(others, odds, strict=True) if odd > 1e-4)
    span = min(reach_s, 6 / width)
    from_s, shown_s = float(lags[top]) - span, 2 * span / (CURVE_POINTS - 1)
    part = _correlation(unit * weight, frequency, from_s, shown_s, CURVE_POINTS) / weight.sum()
    values = np.abs(part) if free else part.real
    curve = (from_s, shown_s, tuple(np.round(values, 4).tolist()))
    return float(lags[top]), curve, worth, total / (1 + total)


@dataclass(frozen=True, slots=True)
class _Fit:
    delay_s: float
    variance: float
    chi2: float
    free: int
    design: F64
    solution: F64


def _orders(kind: str, weight: F64) -> tuple[int, ...]:
    return (1, 2, 3) if kind == "complex" and int((weight > weight.max() * 1e-3).sum()) >= 24 else (1,)


def _fit(unit: C128, weight: F64, frequency: F64, lag_s: float, order: int, free: bool) -> _Fit:
    """Weighted least squares of the phase, by Newton's steps from a lag; the sine forgives bands that are noise."""
    scale = max(float(np.abs(frequency).max()), 1e-9)
    columns = [-2 * math.pi * frequency, np.ones_like(frequency), (frequency / scale) ** 2, (frequency / scale) ** 3]
    design = np.stack(columns[: order + 1] if free else columns[:1], 1)
    solution = np.zeros(design.shape[1])
    solution[0] = lag_s
    if free:
        solution[1] = np.angle((weight * unit * np.exp(-1j * (design @ solution))).sum())
    normal = design.T @ (weight[:, None] * design)
    inverse = np.linalg.pinv(normal)
    for _ in range(NEWTON_STEPS):
        residual = np.sin(np.angle(unit * np.exp(-1j * (design @ solution))))
        solution = solution + inverse @ (design.T @ (weight * residual))
    residual = np.angle(unit * np.exp(-1j * (design @ solution)))
    counted = weight > 1.0  # the phase of weaker bands is not normally distributed
    chi2 = float((weight * residual**2)[counted].sum())
    return _Fit(
        delay_s=float(solution[0]),
        variance=float(inverse[0, 0]),
        chi2=chi2,
        free=int(counted.sum()) - design.shape[1],
        design=design,
        solution=solution,
    )


def _spread(
    cross: C128, power: F64, best: _Fit, weight: F64, frequency: F64, sums: CrossSums
) -> tuple[float | None, float]:
    """Robust standard deviation of the groups' own delays, and what their robust mean adds to the delay of all."""
    if len(cross) < MIN_GROUPS:
        return None, 0.0
    model = np.exp(-1j * (best.design @ best.solution))
    slope = best.design[:, 0]
    share = (sums.values / sums.values.sum()).numpy()
    delays = np.empty(len(cross))
    for group, part in enumerate(cross):
        own = weight * share[group]
        unit = part / np.maximum(np.abs(part), 1e-300) * model
        design = np.stack([slope, np.ones_like(slope)], 1) if sums.kind == "complex" else slope[:, None]
        inverse = np.linalg.pinv(design.T @ (own[:, None] * design))
        step = np.zeros(design.shape[1])
        for _ in range(4):
            residual = np.sin(np.angle(unit * np.exp(-1j * (design @ step))))
            step = step + inverse @ (design.T @ (own * residual))
        delays[group] = step[0]
    middle = float(np.median(delays))
    spread = 1.48 * float(np.median(np.abs(delays - middle))) * (1 + 1.5 / len(delays))
    limit = 2.5 * max(spread, 1e-15)
    mean = float(np.clip(delays, middle - limit, middle + limit).mean())
    outliers = np.abs(delays - middle) > 2 * limit
    return spread, mean if outliers.any() else 0.0

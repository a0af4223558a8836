"""The clock of a recording: one robust line through its time stamps gives the start and the true sample rate.

Axes: K stamps. Stamps are not believed one by one: the first ones of a file are often stale, some repeat, and a lost
or repeated block shifts all that follow. Runs of stamps that agree are segments; all segments share one rate.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WEEK_S = 604_800.0
TOLERANCE_S = 25e-6  # neighbouring stamps that differ by more from the sample count are not of one run
JITTERS = 4.0  # or by more than this many times what four of five neighbours differ by: some firmware's stamps scatter
MAX_TOLERANCE_S = 250e-6
OUTLIER = 9.0  # medians of the residuals beyond which a stamp is not used
MAX_RESIDUAL_S = 50e-6  # rms around the line beyond which the stamps are not a clock
MIN_SHARE = 0.5  # of the stamps that must follow the line
MIN_RUN = 3
STALE_S = 30.0  # stamps at the start that are further than this from most others are stale, however many agree
BEND_S = 10.0  # length of the pieces in which the line may bend, where one line does not fit
BEND_FLOOR_S = 0.3e-6
MAX_MISSTATED = 0.8  # of a sample period: beyond it the stamps are not a clock of another rate, but none
MAX_PPM = 1_000.0  # stated and fitted rate may differ by this


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLine:
    """A stretch of samples without a gap: time = start_s + (sample − first) / rate."""

    first: int
    end: int  # one past the last sample
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Sample number to seconds after the recording's epoch."""

    rate_hz: float
    lines: tuple[ClockLine, ...]
    residual_s: float = 0.0  # rms of the stamps that were used
    bend_samples: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    bend_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))  # added to the line, interpolated
    problems: tuple[str, ...] = ()

    @property
    def start_s(self) -> float:
        return float(self.time_s(self.lines[0].first))

    @property
    def end_s(self) -> float:
        line = self.lines[-1]
        return float(line.start_s + (line.end - line.first) / self.rate_hz)

    def time_s(self, sample: float) -> float:
        """Time of a sample; of one before the first line by extrapolation."""
        line = next((one for one in reversed(self.lines) if sample >= one.first), self.lines[0])
        bend = float(np.interp(sample, self.bend_samples, self.bend_s))
        return line.start_s + (sample - line.first) / self.rate_hz + bend

    def sample_at(self, time_s: float, line: ClockLine) -> float:
        """Sample position of a time, on one line."""
        position = line.first + (time_s - line.start_s) * self.rate_hz
        return position - float(np.interp(position, self.bend_samples, self.bend_s)) * self.rate_hz


def steady_clock(num_samples: int, start_s: float, rate_hz: float) -> Clock:
    """The clock of a recording with a single start time."""
    return Clock(rate_hz=rate_hz, lines=(ClockLine(first=0, end=num_samples, start_s=start_s),))


def fit_clock(
    samples: NDArray[np.int64], times_s: NDArray[np.float64], num_samples: int, rate_hz: float
) -> Clock | str:
    """The clock behind stamps, or a sentence that says why they are none.

    samples  (K,)  int64    first sample of each stamped block, rising
    times_s  (K,)  float64  its time; wraps at the end of the GPS week
    """
    if len(samples) < 2 * MIN_RUN:
        return f"{len(samples)} time stamps are too few to fit a clock"
    at, time = samples.astype(np.float64), times_s.astype(np.float64)
    off = time - at / rate_hz
    wraps = np.round((off - np.median(off)) / WEEK_S)
    off = off - wraps * WEEK_S
    fresh = np.nonzero(np.r_[True, np.diff(time) != 0])[0]  # a stamp that is given again says nothing
    if len(fresh) < 2 * MIN_RUN:
        return "its time stamps do not advance with its samples"
    steps = np.diff(off[fresh]) / np.maximum(np.diff(at[fresh]), 1)
    near = np.abs(steps) * rate_hz < MAX_PPM * 1e-6
    if near.mean() < MIN_SHARE:
        typical = float(np.median(steps))
        steady = np.abs(steps - typical) * rate_hz < MAX_PPM * 1e-6
        if steady.mean() > MIN_SHARE and abs(typical) * rate_hz < MAX_MISSTATED:
            return f"wrong rate: its stamps give {1 / (1 / rate_hz + typical):.1f} Hz, its header says {rate_hz:g} Hz"
        return "its time stamps do not advance with its samples"
    slope = float(np.median(steps[near]))
    for _ in range(3):  # the slope from neighbours is rough; each pass sees further
        runs = _runs(fresh, off - slope * at)
        if not runs:
            return "its time stamps follow no line"
        slope += _slope(at, off - slope * at, runs)
    flat = off - slope * at
    runs = [_without_outliers(run, flat) for run in _merge(flat, _runs(fresh, flat), _tolerance_s(flat[fresh]))]
    used = np.concatenate(runs)
    if len(used) < MIN_SHARE * len(fresh):
        return f"only {len(used)} of {len(at)} time stamps follow one line"
    fitted_hz = 1 / (1 / rate_hz + slope)
    if abs(fitted_hz / rate_hz - 1) > MAX_PPM * 1e-6:
        return f"wrong rate: its stamps give {fitted_hz:.1f} Hz, its header says {rate_hz:g} Hz"
    return _clock(at, off, runs, num_samples, fitted_hz, rate_hz, wraps)


def _clock(
    at: NDArray[np.float64],
    off: NDArray[np.float64],
    runs: list[NDArray[np.int64]],
    num_samples: int,
    fitted_hz: float,
    rate_hz: float,
    wraps: NDArray[np.float64],
) -> Clock | str:
    time = off + at / rate_hz
    level = [float(np.median(time[run] - at[run] / fitted_hz)) for run in runs]
    residual = np.concatenate([time[run] - at[run] / fitted_hz - c for run, c in zip(runs, level, strict=True)])
    used = np.concatenate(runs)
    bend_at, bend = _bends(at[used], residual, fitted_hz)
    rms = float(np.sqrt(np.mean((residual - np.interp(at[used], bend_at, bend)) ** 2)))
    if rms > MAX_RESIDUAL_S:
        return f"its time stamps scatter by {rms * 1e6:.0f} µs around the fitted line"
    edges = [*(int(at[run[0]]) for run in runs), num_samples]  # before a stale stamp nothing is known
    lines = tuple(
        ClockLine(first=first, end=end, start_s=c + first / fitted_hz)
        for first, end, c in zip(edges, edges[1:], level, strict=False)
    )
    problems = _problems(at, off, used, level, wraps, rate_hz, len(runs))
    return Clock(
        rate_hz=fitted_hz, lines=lines, residual_s=rms, bend_samples=bend_at, bend_s=bend, problems=tuple(problems)
    )


def _tolerance_s(flat: NDArray[np.float64]) -> float:
    """How far neighbouring stamps of one run may be apart."""
    jitter = float(np.quantile(np.abs(np.diff(flat)), 0.8))
    return min(max(TOLERANCE_S, JITTERS * jitter), MAX_TOLERANCE_S)


def _runs(fresh: NDArray[np.int64], flat: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Stretches of neighbouring stamps that agree."""
    jump = np.abs(np.diff(flat[fresh])) > _tolerance_s(flat[fresh])
    pieces = np.split(fresh, np.nonzero(jump)[0] + 1)
    return [piece for piece in pieces if len(piece) >= MIN_RUN]


def _without_outliers(run: NDArray[np.int64], flat: NDArray[np.float64]) -> NDArray[np.int64]:
    away = np.abs(flat[run] - np.median(flat[run]))
    return run[away <= max(TOLERANCE_S, OUTLIER * float(np.median(away)))]


def _slope(at: NDArray[np.float64], flat: NDArray[np.float64], runs: list[NDArray[np.int64]]) -> float:
    """Theil–Sen slope over half the length of each run, the median weighted by length; then a least-squares touch."""
    slopes, weights = [], []
    for run in runs:
        half = len(run) // 2
        step = max(1, half // 500)  # a few hundred pairs decide as well as all
        low, high = run[:half:step], run[len(run) - half :: step]
        num = min(len(low), len(high))
        slopes.append((flat[high[:num]] - flat[low[:num]]) / (at[high[:num]] - at[low[:num]]))
        weights.append(np.full(num, float(len(run)) ** 2))
    values, weight = np.concatenate(slopes), np.concatenate(weights)
    order = np.argsort(values)
    middle = float(values[order][np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)])
    top = bottom = 0.0
    for run in runs:
        x, y = at[run] - at[run].mean(), flat[run] - middle * at[run]
        y = y - np.median(y)
        good = np.abs(y) <= 4 * np.median(np.abs(y)) + 1e-9
        top, bottom = top + float((x * y)[good].sum()), bottom + float((x * x)[good].sum())
    return middle + (top / bottom if bottom else 0.0)


def _merge(flat: NDArray[np.float64], runs: list[NDArray[np.int64]], tolerance_s: float) -> list[NDArray[np.int64]]:
    """Join runs on one line with only bad stamps between them; drop short runs that are on no other's line.

    Samples are lost or repeated once: what returns to a line that it left was never off it.
    """
    joined: list[NDArray[np.int64]] = []
    for run in runs:
        level = float(np.median(flat[run]))
        same = [n for n, one in enumerate(joined) if abs(level - np.median(flat[one])) <= tolerance_s]
        if same:
            joined[same[0] :] = [np.concatenate([joined[same[0]], run])]
        elif joined and len(run) < MIN_RUN * 2 and len(joined[-1]) > 10 * len(run):
            continue
        else:
            joined.append(run)
    longest = max(joined, key=len)
    usual = np.median(flat[longest])
    return [
        run
        for run in joined
        if (len(run) * 20 >= len(longest) or len(run) >= 4 * MIN_RUN)
        and not (
            run[0] < longest[0] and len(run) * 4 < len(longest) and abs(float(np.median(flat[run]) - usual)) > STALE_S
        )
    ]


def _bends(
    at: NDArray[np.float64], residual: NDArray[np.float64], rate_hz: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Knots and corrections where the rate itself drifts over minutes; one line is kept where it fits."""
    piece = np.floor((at - at[0]) / (BEND_S * rate_hz)).astype(np.int64)
    names, counts = np.unique(piece, return_counts=True)
    names = names[counts >= 8]
    if len(names) < 2:
        return np.zeros(1), np.zeros(1)
    centre = np.array([at[piece == name].mean() for name in names])
    middle = np.array([np.median(residual[piece == name]) for name in names])
    noise = 1.25 * 1.48 * np.median(np.abs(residual - middle[np.searchsorted(names, piece).clip(0, len(names) - 1)]))
    expected = noise / np.sqrt(np.median(counts))
    if np.abs(middle).max() <= max(BEND_FLOOR_S, 5 * expected):
        return np.zeros(1), np.zeros(1)
    return centre, middle


def _problems(
    at: NDArray[np.float64],
    off: NDArray[np.float64],
    used: NDArray[np.int64],
    level: list[float],
    wraps: NDArray[np.float64],
    rate_hz: float,
    num_runs: int,
) -> list[str]:
    out = []
    bad = np.setdiff1d(np.arange(len(at)), used)
    stale = int((bad < used[0]).sum())
    if stale:
        out.append(f"{stale} stale time stamp{'s' * (stale != 1)} at the start")
    if len(bad) > stale:
        time = off + at / rate_hz
        repeats = int((np.diff(time)[np.maximum(bad[bad > used[0]] - 1, 0)] == 0).sum())
        out.append(f"{len(bad) - stale} time stamps do not fit, {repeats} of them repeated")
    if num_runs > 1:
        jumps = ", ".join(f"{step * 1e3:+.3f} ms" for step in np.diff(level)[:5])
        kinds = [
            word for word, is_so in (("gap", max(np.diff(level)) > 0), ("repeat", min(np.diff(level)) < 0)) if is_so
        ]
        out.append(f"time jumps ({jumps}): {' and '.join(kinds)} in the samples")
    if np.ptp(wraps[used]) > 0:
        out.append("the GPS week ends in this recording")
    return out

"""From files to receivers that can be compared: stations, positions, clocks, and a stretch of time they share.

A recording that cannot be used is left out with the reason. The caller decides whether enough are left.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError
from brim.rf.measurement.observations import LeftOut
from brim.rf.measurement.streams import Receiver
from brim.rf.recordings import (
    Clock,
    ListedFile,
    Recording,
    Site,
    fit_clock,
    match_site,
    named_in,
    open_recordings,
)
from brim.rf.recordings.clock import MIN_RUN, TOLERANCE_S, WEEK_S, ClockLine, steady_clock
from brim.rf.recordings.sigmf import read_time

MIN_STATIONS = 3
MIN_SHARED_S = 0.05
PEEK = 1 << 16  # samples of a window that is looked at for silence and clipping
NUM_PEEKS = 24
CLIPPED_NOTED = 1e-5  # share of the samples
CLIPPED_REFUSED = 0.02
STEREO = 0.5  # coherence between the two halves of the spectrum, above which two channels are audio
STALE_PPM = 0.1  # how far a receiver's own oscillator drifts while it has no fix


def open_receivers(paths: Iterable[Path | ListedFile], sites: Sequence[Site]) -> tuple[list[Receiver], list[LeftOut]]:
    """Every recording as a receiver on its own clock, and those that are left out."""
    recordings, refused = open_recordings(paths)
    left_out: list[LeftOut] = []
    receivers: list[Receiver] = []
    for recording in recordings:
        site = match_site(recording, sites) or _own_site(recording)
        name = site.name if site is not None else recording.station or recording.path.name
        reason = "no position; add it to the stations file" if site is None else _fault(recording)
        if reason is None and any(other.name.lower() == name.lower() for other in receivers):
            name, reason = recording.path.name, f"a second recording of station {name}; the first is used"
        if reason is not None or site is None:
            left_out.append(LeftOut(name=name, reason=reason or ""))
            continue
        receiver = _timed(recording, site)
        if isinstance(receiver, str):
            left_out.append(LeftOut(name=name, reason=receiver))
        else:
            receivers.append(receiver)
    used = {one.name for one in receivers}
    for file in refused:
        site = named_in(file.path, sites)
        name = file.path.name if site is None or site.name in used else site.name
        left_out.append(LeftOut(name=name, reason=file.reason))
    return _one_epoch(receivers), left_out


def _own_site(recording: Recording) -> Site | None:
    if recording.place is None:
        return None
    lat, lon, alt = recording.place
    stem = recording.path.name.partition(".")[0]
    return Site(name=recording.station or stem, lat=lat, lon=lon, alt=alt)


def check_enough(receivers: Sequence[Receiver], left_out: Sequence[LeftOut], given: int) -> None:
    """Two recordings can be compared; of three or more, three must be good."""
    if len(receivers) >= max(2, min(MIN_STATIONS, given)):
        return
    reasons = "; ".join(f"{one.name}: {one.reason}" for one in left_out) or "give one recording of each station"
    needed = max(2, min(MIN_STATIONS, given))
    raise ConfigError(
        f"{len(receivers)} of {max(given, len(receivers) + len(left_out))} recordings can be used, "
        f"{needed} are needed: {reasons}",
        code="too_few",
    )


# What is wrong with samples


def _fault(recording: Recording) -> str | None:
    """Why the samples are of no use."""
    power = peak = 0.0
    for values in _peeks(recording):
        power += float((np.abs(values - values.mean()) ** 2).mean())
        peak = max(peak, float(np.abs(values).max(initial=0.0)))
    if not math.isfinite(peak):
        return "its samples are not all finite numbers"
    if power <= 0:
        return "silent: every sample is the same"
    share = clipped_share(recording)
    if share > CLIPPED_REFUSED:
        return f"{share:.1%} of its samples are clipped"
    if recording.format == "wav" and _mirrored(recording):
        return "its two channels are stereo audio, not I and Q"
    return None


def _peeks(recording: Recording) -> Iterable[NDArray[np.complex64]]:
    samples = recording.samples
    size = min(PEEK, len(samples))
    num = min(NUM_PEEKS, max(1, len(samples) // size))
    for first in np.linspace(0, len(samples) - size, num).astype(np.int64).tolist():
        yield samples.complex(first, size)


def clipped_share(recording: Recording) -> float:
    """Share of samples at the end of the scale; floating point has none."""
    if recording.samples.dtype.kind == "f":
        return 0.0
    limit = 1.0 - 1.5 / recording.samples.full_scale
    clipped = total = 0
    for values in _peeks(recording):
        clipped += int(((np.abs(values.real) >= limit) | (np.abs(values.imag) >= limit)).sum())
        total += len(values)
    return clipped / max(1, total)


def _mirrored(recording: Recording) -> bool:
    """Whether positive and negative frequencies carry the same, noise included: two real channels that are alike."""
    size, num = 256, 0
    cross = np.zeros(size, np.complex128)
    power = np.zeros(size)
    for values in _peeks(recording):
        chunks = values[: len(values) // size * size].reshape(-1, size)[:256]
        spectrum = np.fft.fft(chunks * np.hanning(size), axis=1)
        mirror = np.roll(spectrum[:, ::-1], 1, axis=1)
        cross += (spectrum * mirror).sum(0)
        power += (np.abs(spectrum) ** 2).sum(0)
        num += len(chunks)
    inside = slice(4, size // 2 - 4)
    coherence = np.abs(cross[inside]) ** 2 / np.maximum(power[inside] * np.roll(power[::-1], 1)[inside], 1e-300)
    return num >= 16 and float(np.median(coherence)) > STEREO


# Clocks


def _timed(recording: Recording, site: Site) -> Receiver | str:
    """A receiver with its clock, or why its stamps are none."""
    clock: Clock | str
    model, sigma_s = "gnss", recording.stamp_sigma_s
    count = len(recording.stamp_samples)
    if count >= 2 * MIN_RUN:
        clock = fit_clock(recording.stamp_samples, recording.stamp_times_s, len(recording.samples), recording.rate_hz)
    elif count:
        clock = _stepped(recording)
    else:
        model, clock = "none", steady_clock(len(recording.samples), 0.0, recording.rate_hz)
    if isinstance(clock, str):
        return clock
    sigma_s = math.hypot(sigma_s, clock.residual_s / math.sqrt(max(1, count)), recording.fix_age_s * STALE_PPM * 1e-6)
    share = clipped_share(recording)
    problems = [*recording.problems, *clock.problems]
    if share > CLIPPED_NOTED:
        problems.append(f"{share:.3%} of its samples are clipped")
    if model == "none":
        problems.append("no time: its strength alone is used")
    return Receiver(
        name=site.name,
        recording=recording,
        site=site,
        clock=clock,
        model=model,
        sigma_s=sigma_s,
        problems=tuple(problems),
    )


def _stepped(recording: Recording) -> Clock:
    """The stated rate between a few stamps; a stamp that continues the line before it begins no new one."""
    lines: list[tuple[int, float]] = []
    for sample, time_s in zip(recording.stamp_samples.tolist(), recording.stamp_times_s.tolist(), strict=True):
        expected = lines[-1][1] + (sample - lines[-1][0]) / recording.rate_hz if lines else None
        if expected is None or abs(expected - time_s) > TOLERANCE_S:
            lines.append((sample, time_s))
    ends = [*(first for first, _ in lines[1:]), len(recording.samples)]
    first, time_s = lines[0]
    lines[0] = (0, time_s - first / recording.rate_hz)
    return Clock(
        rate_hz=recording.rate_hz,
        lines=tuple(
            ClockLine(first=first, end=end, start_s=start_s) for (first, start_s), end in zip(lines, ends, strict=True)
        ),
        problems=(f"{len(lines) - 1} gaps between captures",) if len(lines) > 1 else (),
    )


def _one_epoch(receivers: list[Receiver]) -> list[Receiver]:
    """Seconds of all clocks from one epoch; undated weeks are taken to be that of the first receiver."""
    timed = [one for one in receivers if one.model != "none"]
    if not timed:
        return receivers
    first = next((one for one in timed if one.recording.dated), timed[0])
    epoch = first.recording.epoch_s
    out = []
    for one in receivers:
        late = one.recording.epoch_s - epoch
        if one.model == "none":
            late = first.clock.start_s - one.clock.start_s  # nothing better is known
        elif not one.recording.dated or not first.recording.dated:
            late = WEEK_S * round((first.clock.start_s - one.clock.start_s) / WEEK_S)
        out.append(replace(one, late_s=late))
    return out


# The stretch of time and frequency they share


def share_time(receivers: list[Receiver]) -> tuple[list[Receiver], list[LeftOut], float, float]:
    """Receivers that overlap with most others, those that do not, and the start and end they share."""
    best: list[Receiver] = []
    for one in receivers:
        at = one.start_s + MIN_SHARED_S
        group = [other for other in receivers if other.start_s <= one.start_s and other.end_s >= at]
        if (len(group), _shared(group)) > (len(best), _shared(best)):
            best = group
    names = {one.name for one in best}
    out = []
    for one in receivers:
        if one.name not in names:
            begin = utc(one, one.start_s)
            reason = f"its {one.end_s - one.start_s:.1f} s from {begin} do not overlap with the other recordings"
            out.append(LeftOut(name=one.name, reason=reason))
    if not best:
        return [], out, 0.0, 0.0
    return best, out, max(one.start_s for one in best), min(one.end_s for one in best)


def _shared(group: list[Receiver]) -> float:
    return min(one.end_s for one in group) - max(one.start_s for one in group) if group else -math.inf


def share_band(receivers: list[Receiver], frequency_hz: float | None) -> tuple[list[Receiver], list[LeftOut]]:
    """Receivers tuned to the same transmission, and those tuned elsewhere."""

    def hears(one: Receiver, centre_hz: float) -> bool:
        return abs(one.centre_hz - centre_hz) < 0.45 * one.clock.rate_hz

    centres = [frequency_hz] if frequency_hz is not None else [one.centre_hz for one in receivers]
    centre = max(centres, key=lambda hz: sum(hears(one, hz) for one in receivers))
    inside = [one for one in receivers if hears(one, centre)]
    if frequency_hz is not None and not inside:
        tuned = ", ".join(sorted({f"{one.centre_hz / 1e6:.6f}" for one in receivers}))
        raise ConfigError(
            f"is outside what the recordings share; they are tuned to {tuned} MHz",
            field="frequency_mhz",
            value=frequency_hz / 1e6,
            code="out_of_range",
        )
    out = [
        LeftOut(
            name=one.name,
            reason=f"tuned to {one.centre_hz / 1e6:.6f} MHz, the others to {centre / 1e6:.6f}: another transmission",
        )
        for one in receivers
        if not hears(one, centre)
    ]
    return inside, out


def choose_time(
    receivers: list[Receiver], low: float, high: float, start: str | None, seconds: float | None
) -> tuple[float, float]:
    """Start and length of the stretch to measure, on the common time base."""
    begin = low
    if start is not None:
        try:
            begin = low + float(start)
        except ValueError:
            try:
                second, fraction, _ = read_time(Path("start"), start)
            except ConfigError as failure:
                hint = "write it as 2026-01-31T12:00:00Z, or as seconds after the recordings' common start"
                raise ConfigError("is no time", field="start", value=start, code="wrong_type", hint=hint) from failure
            begin = second - epoch_of(receivers) + fraction
        if not low - 1e-6 <= begin < high - MIN_SHARED_S:
            shared = f"{utc(receivers[0], low)} to {utc(receivers[0], high)}"
            raise ConfigError(f"is outside what the recordings share, {shared}", field="start", value=start)
    length = high - begin if seconds is None else min(seconds, high - begin)
    return begin, length


def epoch_of(receivers: list[Receiver]) -> float:
    """Unix time of 0 on the common time base."""
    one = next((one for one in receivers if one.model != "none"), receivers[0])
    return one.recording.epoch_s - one.late_s


def utc(receiver: Receiver, time_s: float) -> str:
    """A moment of the common time base as UTC."""
    unix = receiver.recording.epoch_s - receiver.late_s + time_s
    micro = round(unix * 1e6)
    moment = datetime.fromtimestamp(micro // 10**6, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{micro % 10**6:06d}Z"

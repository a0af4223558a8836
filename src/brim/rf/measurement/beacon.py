"""Clocks from a beacon: receivers without a common clock derive one from a transmitter at a known position.

The beacon's arrivals differ by the light times from its place. Whatever else they differ by is the receiver's clock:
its offset, and over the recording its rate. Oscillators may be off by tens of ppm, so the first look is at signals that
do not care about oscillators, in windows too short for the rate to matter.
"""

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from brim.errors import ConfigError
from brim.rf.measurement.acquisition import SURE, Coarse, real_search, residual_shift_hz
from brim.rf.measurement.arrival import Delay, fit_delay
from brim.rf.measurement.observations import LeftOut
from brim.rf.measurement.spectra import KINDS, Spectra
from brim.rf.measurement.streams import Band, Receiver, extract
from brim.rf.measurement.transmission import own_band, power_spectrum
from brim.rf.physics.geometry import SPEED_OF_LIGHT, geodesic_m
from brim.rf.recordings.clock import Clock, ClockLine

NUM_LOOKS = 16
LOOK_S = 0.25  # of a window: 100 ppm are 25 µs in it
UNKNOWN_S = 5.0  # how far starts may be apart where nothing is known
FIRST_PPM = 150.0
PASSES = 3
MIN_LOOKS = 4
_BEACON = re.compile(r"([^=]+)=([-+\d.]+),([-+\d.]+)@([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beacon:
    """A transmitter whose place is known."""

    name: str
    lat: float
    lon: float
    frequency_hz: float

    @classmethod
    def parse(cls, text: str) -> "Beacon":
        match = _BEACON.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            lat, lon, mhz = (float(match[n]) for n in (2, 3, 4))
            if not (-90 <= lat <= 90 and -180 <= lon <= 180 and mhz > 0):
                raise ValueError
        except ValueError as failure:
            hint = "write it as NAME=LAT,LON@MHZ, such as tower=46.5,8.8@98.3"
            raise ConfigError("is no beacon", field="beacon", value=text, code="wrong_type", hint=hint) from failure
        return cls(name=match[1], lat=lat, lon=lon, frequency_hz=mhz * 1e6)


def beacon_clocks(
    receivers: list[Receiver], beacon: Beacon, start_s: float, seconds: float
) -> tuple[list[Receiver], list[LeftOut]]:
    """Receivers whose clocks agree on the beacon, and those that do not hear it."""
    spectra = [power_spectrum(one, start_s, seconds) for one in receivers]
    own = [own_band(one, beacon.frequency_hz) for one in spectra]
    width_hz = float(np.median([one.width_hz for one in own]))
    heard = [
        float(spectrum.inside(one.centre_hz, width_hz).mean()) / max(spectrum.floor, 1e-30)
        for spectrum, one in zip(spectra, own, strict=True)
    ]
    best = max(range(len(receivers)), key=lambda n: (receivers[n].model == "gnss", heard[n]))
    reference = receivers[best]
    band = Band.around(own[best].centre_hz, width_hz, [one.clock.rate_hz for one in receivers])
    kept, left_out = [], []
    for n, one in enumerate(receivers):
        if n == best:
            kept.append(replace(one, model="beacon", problems=tuple(p for p in one.problems if "no time" not in p)))
            continue
        light_s = (_distance_m(beacon, one) - _distance_m(beacon, reference)) / SPEED_OF_LIGHT
        tied = _tie(reference, one, band, light_s, start_s, seconds, own[n].centre_hz - own[best].centre_hz)
        if tied is None:
            left_out.append(LeftOut(name=one.name, reason=f"does not hear the beacon {beacon.name}"))
        else:
            kept.append(tied)
    off_hz = own[best].centre_hz - beacon.frequency_hz  # of the reference's own oscillator
    return [_retuned(one, off_hz) for one in kept], left_out


def _tie(
    reference: Receiver, one: Receiver, band: Band, light_s: float, start_s: float, seconds: float, shift_hz: float
) -> Receiver | None:
    """The receiver with its clock turned and moved until the beacon arrives when it should."""
    look_s = min(LOOK_S, seconds / 4)
    moments = np.linspace(start_s + 0.5 * look_s, start_s + seconds - 1.5 * look_s, NUM_LOOKS)
    limit = UNKNOWN_S if one.model == "none" else 5 * one.sigma_s + 2e-3
    rough = _first_look(reference, one, band, float(moments[0]), min(limit, seconds / 4), look_s, shift_hz)
    if rough is None:
        return None
    lags = [(float(moments[0]), rough.lag_s, band.rate_hz**-1)]
    for before, at in pairwise(moments):  # follow the lag through the recording
        reach = FIRST_PPM * 1e-6 * float(at - before) + 4 / band.width_hz
        count = int(look_s * band.rate_hz)
        first = extract(reference, band, float(at), count)
        second = extract(one, band, float(at), count, lag_s=lags[-1][1], shift_hz=shift_hz)
        here = _compared(first, second, band, look_s, reach, KINDS[1:])
        if here is not None:
            lags.append((float(at), lags[-1][1] + here.delay_s, max(here.plain_s, 1e-9)))
    if len(lags) < MIN_LOOKS:
        return None
    one, _ = _moved(one, lags, light_s)
    for _ in range(PASSES):
        lags, shift_hz = _fine(reference, one, band, moments.tolist(), look_s, light_s, shift_hz)
        if len(lags) < MIN_LOOKS:
            return None
        one, sigma = _moved(one, lags, light_s)
    problems = tuple(problem for problem in one.problems if "no time" not in problem)
    return replace(_retuned(one, shift_hz), model="beacon", sigma_s=sigma, problems=problems)


def _retuned(one: Receiver, shift_hz: float) -> Receiver:
    """The receiver at the centre frequency that its oscillator really had."""
    return replace(one, recording=replace(one.recording, centre_hz=one.centre_hz - shift_hz))


def _first_look(
    reference: Receiver, one: Receiver, band: Band, at_s: float, limit_s: float, look_s: float, shift_hz: float
) -> Coarse | None:
    count = int((2 * limit_s + look_s) * band.rate_hz)
    first = extract(reference, band, at_s, count)
    second = extract(one, band, at_s, count, shift_hz=shift_hz)
    searches = [real_search(first, second, band, limit_s, kind, look_s, whole=True) for kind in KINDS[1:]]
    best = max(searches, key=lambda one: one.sure)
    return best if best.sure >= SURE else None


def _fine(
    reference: Receiver, one: Receiver, band: Band, moments: list[float], look_s: float, light_s: float, shift_hz: float
) -> tuple[list[tuple[float, float, float]], float]:
    """Time, lag and its standard deviation in every window that knows it, and the oscillators' difference."""
    out, shifts = [], []
    count = int(look_s * band.rate_hz)
    for at in moments:
        first = extract(reference, band, at, count)
        second = extract(one, band, at, count, lag_s=light_s, shift_hz=shift_hz)
        shifts.append(shift_hz + residual_shift_hz(first, second, band))
        second = extract(one, band, at, count, lag_s=light_s, shift_hz=shifts[-1])
        best = _compared(first, second, band, look_s, 8 / band.width_hz, KINDS)
        if best is not None:
            out.append((at, light_s + best.delay_s, max(best.plain_s, 1e-9)))
    return out, float(np.median(shifts))


def _compared(
    first: Tensor, second: Tensor, band: Band, look_s: float, reach_s: float, kinds: tuple[str, ...]
) -> Delay | None:
    """The delay in one window by the signal that knows it best."""
    delays: list[Delay] = []
    for kind in kinds:
        adder = Spectra(kind, band, look_s / 4, 2, 1, torch.device("cpu"))
        if adder.usable:
            adder.add(torch.stack([first, second]), 0)
            delay = fit_delay(adder.sums(), 0, 0, 1, reach_s)
            delays += [delay] if delay is not None and delay.ambiguity < 0.1 else []
    return min(delays, key=lambda delay: delay.plain_s, default=None)


def _moved(one: Receiver, lags: list[tuple[float, float, float]], light_s: float) -> tuple[Receiver, float]:
    """The receiver with the clock that a robust line through its lags asks for, and how well that is known."""
    at, lag, sigma = (np.array(column) for column in zip(*lags, strict=True))
    middle = float(at.mean())
    weight = 1 / sigma
    design = np.stack([np.ones_like(at), at - middle], 1)
    for _ in range(5):
        solution, *_ = np.linalg.lstsq(design * weight[:, None], (lag - light_s) * weight, rcond=None)
        residual = np.abs(lag - light_s - design @ solution)
        scale = max(1.48 * float(np.median(residual)), 1e-10)
        weight = np.where(residual > 3 * scale, 1e-3, 1.0) / sigma
    offset, drift = float(solution[0]), float(solution[1])
    spread = max(scale, 1e-10) / math.sqrt(len(at)) * 1.3
    old = one.clock
    lines = tuple(
        ClockLine(first=line.first, end=line.end, start_s=_true(line.start_s, one.late_s, offset, drift, middle))
        for line in old.lines
    )
    clock = Clock(rate_hz=old.rate_hz / (1 - drift), lines=lines, residual_s=scale, problems=old.problems)
    return replace(one, clock=clock), spread


def _true(start_s: float, late_s: float, offset: float, drift: float, middle_s: float) -> float:
    return start_s - offset - drift * (start_s + late_s - middle_s)


def _distance_m(beacon: Beacon, one: Receiver) -> float:
    return float(geodesic_m(*(np.array(value) for value in (beacon.lat, beacon.lon, one.site.lat, one.site.lon))))

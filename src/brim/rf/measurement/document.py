"""The document of a measurement: stations, pairs, and one arrival per station from all pairs together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from brim.rf.measurement.acquisition import Coarse
from brim.rf.measurement.arrival import Delay
from brim.rf.measurement.channel import channel_features
from brim.rf.measurement.observations import LeftOut, Observation, PairMeasurement, StationMeasurement, StationTime
from brim.rf.measurement.receivers import utc
from brim.rf.measurement.streams import Band, Receiver
from brim.rf.measurement.transmission import BandSpectrum, Transmission


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The observation with what drawing and datasets need of it."""

    observation: Observation
    receivers: list[Receiver]
    band: Band
    start_s: float
    seconds: float
    levels_db: list[float]  # of each receiver, dB of full scale
    lags_s: list[float]
    shifts_hz: list[float]


def make_measurement(
    receivers: list[Receiver],
    spectra: list[BandSpectrum],
    transmission: Transmission,
    band: Band,
    rough: list[Coarse],
    delays: dict[tuple[int, int], Delay],
    left_out: list[LeftOut],
    start_s: float,
    seconds: float,
    reference: int,
) -> Measurement:
    pairs = tuple(_pair(receivers, rough, i, j, delay) for (i, j), delay in sorted(delays.items()))
    arrivals = solve_arrivals(len(receivers), reference, receivers, pairs)
    share = _signal_share(len(receivers), delays)
    channel = channel_features(receivers, spectra, transmission, start_s, seconds)
    if channel is not None:
        reference = channel.reference
    stations = tuple(
        _station(
            one, spectra[n], transmission, share[n], channel.of(n) if channel is not None else _arrival(arrivals.get(n))
        )
        for n, one in enumerate(receivers)
    )
    observation = Observation(
        id=f"{transmission.centre_hz / 1e6:.6f} MHz {utc(receivers[0], start_s)}",
        reference=receivers[reference].name if pairs or channel is not None else None,
        frequency_hz=None if any(not one.centre_hz for one in receivers) else round(transmission.centre_hz, 3),
        bandwidth_hz=round(transmission.width_hz, 3),
        start=utc(receivers[0], start_s),
        seconds=round(seconds, 6),
        stations=_relative(stations),
        pairs=pairs,
        left_out=tuple(left_out),
    )
    return Measurement(
        observation=observation,
        receivers=receivers,
        band=band,
        start_s=start_s,
        seconds=seconds,
        levels_db=[
            10 * math.log10(max(float(one.inside(transmission.centre_hz, transmission.width_hz).sum()), 1e-30))
            for one in spectra
        ],
        lags_s=[one.lag_s for one in rough],
        shifts_hz=[one.shift_hz for one in rough],
    )


def _pair(receivers: list[Receiver], rough: list[Coarse], i: int, j: int, delay: Delay) -> PairMeasurement:
    offset = rough[j].lag_s - rough[i].lag_s
    clocks = math.hypot(receivers[i].sigma_s, receivers[j].sigma_s)
    first, step, heights = delay.curve
    return PairMeasurement(
        reference=receivers[i].name,
        station=receivers[j].name,
        difference_us=round((offset + delay.delay_s) * 1e6, 4),
        sigma_us=max(round(math.hypot(delay.sigma_s, clocks) * 1e6, 4), 1e-4),
        kind=delay.kind,  # type: ignore[arg-type]
        peak=round(min(1.0, delay.peak), 4),
        ambiguity=round(delay.ambiguity, 6),
        alternatives_us=tuple(round((offset + lag) * 1e6, 3) for lag in delay.alternatives_s),
        chunks=delay.chunks,
        spread_us=None if delay.spread_s is None else round(delay.spread_s * 1e6, 4),
        curve={
            "start_us": round((offset + first) * 1e6, 4),
            "step_us": round(step * 1e6, 6),
            "values": list(heights),
        },
    )


def solve_arrivals(
    num: int, reference: int, receivers: list[Receiver], pairs: Sequence[PairMeasurement]
) -> dict[int, tuple[float, float]]:
    """Arrival of each station after the reference in µs and its standard deviation, from all pairs together."""
    place = {one.name: n for n, one in enumerate(receivers)}
    if not pairs:
        return {}
    linked = _linked(reference, [(place[one.reference], place[one.station]) for one in pairs])
    unknown = [n for n in sorted(linked) if n != reference]
    rows, values, weights = [], [], []
    for one in pairs:
        i, j = place[one.reference], place[one.station]
        if i not in linked:
            continue
        row = np.zeros(len(unknown))
        for n, sign in ((j, 1.0), (i, -1.0)):
            if n != reference:
                row[unknown.index(n)] = sign
        rows.append(row)
        values.append(one.difference_us)
        weights.append(1 / one.sigma_us)
    if not rows:
        return {}
    design = np.array(rows) * np.array(weights)[:, None]
    solution, *_ = np.linalg.lstsq(design, np.array(values) * np.array(weights), rcond=None)
    direct = {frozenset((place[one.reference], place[one.station])): one.sigma_us for one in pairs}
    covariance = np.linalg.pinv(design.T @ design)
    out = {reference: (0.0, 0.0)}
    for k, n in enumerate(unknown):
        # pairs share their stations' noise: together they are not better than the direct one
        sigma = direct.get(frozenset((reference, n)), math.sqrt(covariance[k, k]))
        out[n] = (float(solution[k]), max(sigma, math.sqrt(covariance[k, k])))
    return out


def _linked(reference: int, edges: list[tuple[int, int]]) -> set[int]:
    linked, grown = {reference}, True
    while grown:
        more = {n for edge in edges if linked & set(edge) for n in edge} - linked
        linked |= more
        grown = bool(more)
    return linked


def _signal_share(num: int, delays: dict[tuple[int, int], Delay]) -> list[float | None]:
    """Share of each station's power that others hear too, from the coherences of its pairs.

    γ²ᵢⱼ = gᵢ·gⱼ, so that with three stations g₀² = γ²₀₁·γ²₀₂/γ²₁₂; the median over such triples.
    """
    known = {frozenset(pair): max(delay.coherence, 1e-6) for pair, delay in delays.items() if delay.kind == "complex"}
    out: list[float | None] = []
    for n in range(num):
        shares = [
            math.sqrt(known[a] * known[b] / known[c])
            for i in range(num)
            for j in range(i + 1, num)
            if n not in (i, j)
            and (a := frozenset((n, i))) in known
            and (b := frozenset((n, j))) in known
            and (c := frozenset((i, j))) in known
        ]
        direct = [math.sqrt(value) for pair, value in known.items() if n in pair]
        values = shares or direct
        out.append(min(float(np.median(values)), 1 - 1e-7) if values else None)
    return out


def _arrival(arrival: tuple[float, float] | None) -> dict[str, Any]:
    if arrival is None:
        return {}
    return {"arrival_difference_us": round(arrival[0], 4), "arrival_sigma_us": round(arrival[1], 4)}


def _station(
    one: Receiver,
    spectrum: BandSpectrum,
    transmission: Transmission,
    share: float | None,
    features: dict[str, Any],
) -> StationMeasurement:
    inside = spectrum.inside(transmission.centre_hz, transmission.width_hz)
    total = max(float(inside.sum()), 1e-30)
    noise = min(spectrum.floor * len(inside), 0.999 * total)
    if share is not None:  # what only this station hears is noise too, inside a filter where no floor is to be seen
        noise = max(noise, (1 - share) * total)
    level = 0.0 if one.recording.milliwatt else -(one.site.gain_db or 0.0)
    absolute = one.recording.milliwatt or one.site.gain_db is not None
    return StationMeasurement(
        name=one.name,
        lat=one.site.lat,
        lon=one.site.lon,
        alt=one.site.alt,
        height_m=one.site.height_m,
        strength_db=round(10 * math.log10(max(total - noise, 1e-30)) + level, 3),
        strength_absolute=absolute,
        snr_db=round(10 * math.log10(max(total - noise, 1e-30) / max(noise, 1e-30)), 3),
        noise_db=round(10 * math.log10(max(noise, 1e-30)) + level, 3),
        time=StationTime(
            model=one.model,  # type: ignore[arg-type]
            rate_hz=round(one.clock.rate_hz, 6),
            start=utc(one, one.start_s),
            residual_us=round(one.clock.residual_s * 1e6, 4),
            sigma_us=round(one.sigma_s * 1e6, 4),
        ),
        problems=one.problems,
        features=features,
    )


def _relative(stations: tuple[StationMeasurement, ...]) -> tuple[StationMeasurement, ...]:
    """Levels without a calibration are relative to the strongest station; one without makes all relative."""
    if all(one.strength_absolute for one in stations):
        return stations
    top = max(one.strength_db for one in stations)
    return tuple(
        replace(
            one,
            strength_db=round(one.strength_db - top, 3),
            noise_db=round(one.noise_db - top, 3),
            strength_absolute=False,
        )
        for one in stations
    )

"""Recordings in, observations out: the transmission is found, and every pair of stations that heard it is compared.

Axes: R receivers, N points of a stream. The way of a measurement:

    open, fit clocks → common time → spectra, band → rough lag of each station → aligned streams, cross-spectra over
    all chunks → a delay for each pair by the signal that knows it best → one arrival per station from all pairs
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import CoreThreads
from brim.errors import ConfigError
from brim.rf.measurement.acquisition import SURE, Coarse, acquire, residual_shift_hz
from brim.rf.measurement.arrival import Delay, fit_delay
from brim.rf.measurement.beacon import Beacon, beacon_clocks
from brim.rf.measurement.config import MeasureConfig
from brim.rf.measurement.document import Measurement, make_measurement
from brim.rf.measurement.observations import LeftOut
from brim.rf.measurement.receivers import check_enough, choose_time, open_receivers, share_band, share_time
from brim.rf.measurement.spectra import (
    KINDS,
    LONG_OVERLAP,
    LONG_POINTS,
    OVERLAP,
    CrossSums,
    Spectra,
    live_chunks,
    pairs_of,
    windows,
)
from brim.rf.measurement.streams import Band, Receiver, extract
from brim.rf.measurement.transmission import BandSpectrum, Transmission, find_transmission, power_spectrum
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef
from brim.rf.recordings import ListedFile, Site

Progress = Callable[[int, int], None]
_T = TypeVar("_T")

CHUNKS_S = (0.05, 0.25, 0.5)  # lengths of chunks that are tried; the one that knows the delay best is used
LONG_CHUNK_S = 2.0  # of bands below NARROW_HZ, where a carrier leaks into all bins of shorter ones
NARROW_HZ = 400.0
FADES_S = 0.5  # of demodulated signals
GROUPS = 16
LOOK_S = 8.0  # of the recording for the rough lag
LOOK_LEAST = 40_000  # points of it, where the recording has as many
LOOK_POINTS = 1 << 19
TUNED_HZ = 25_000.0  # a receiver of this rate or less is tuned to one transmission
WINDOW_POINTS = 1 << 18  # of a stream that are held at once: more only costs memory
SKY_HZ = 30e6  # below this a wave may come by the ionosphere, later than along the ground
SKY_SLACK_S = 2e-3
SLACK_S = 30e-6
SHIFT_PPM = 3.0  # oscillators of receivers may differ by this
MIN_SHIFT_HZ = 20.0
MAX_DOUBT = 0.1  # a lag whose other peaks are likelier than this is not refined
COMPLEX_PREFERRED = 3.0  # a demodulated signal must be better by this: it cannot see what bends the phase


def measure(
    paths: Iterable[Path | str | ListedFile],
    sites: Sequence[Site] = (),
    config: MeasureConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Measurement:
    """Measure one transmission in recordings of several stations."""
    config = config or MeasureConfig()
    files = [path if isinstance(path, ListedFile) else Path(path) for path in paths]
    receivers, left_out = open_receivers(files, sites)
    given = len(receivers) + len(left_out)
    check_enough(receivers, left_out, given)
    frequency_hz = None if config.frequency_mhz is None else config.frequency_mhz * 1e6
    receivers, elsewhere = share_band(receivers, frequency_hz)
    receivers, apart, low, high = share_time(receivers)
    left_out += [*elsewhere, *apart]
    check_enough(receivers, left_out, given)
    start_s, seconds = choose_time(receivers, low, high, config.start, config.seconds)
    if config.beacon is not None:
        if frequency_hz is None:
            hint = "give {frequency_mhz} of the transmission beside {beacon}"
            raise ConfigError(
                "needs the frequency of what is to be located", field="beacon", value=config.beacon, hint=hint
            )
        receivers, unheard = beacon_clocks(receivers, Beacon.parse(config.beacon), start_s, seconds)
        left_out += unheard
        check_enough(receivers, left_out, given)
        start_s = max(start_s, *(one.start_s for one in receivers))
        seconds = min(seconds, min(one.end_s for one in receivers) - start_s)
    return _measure(receivers, left_out, given, config, start_s, seconds, torch.device(device), progress)


def _measure(
    receivers: list[Receiver],
    left_out: list[LeftOut],
    given: int,
    config: MeasureConfig,
    start_s: float,
    seconds: float,
    device: torch.device,
    progress: Progress | None,
) -> Measurement:
    with CoreThreads() as workers:
        spectra = workers.map(lambda one: power_spectrum(one, start_s, seconds), receivers)
        frequency_hz = None if config.frequency_mhz is None else config.frequency_mhz * 1e6
        width_hz = None if config.bandwidth_khz is None else config.bandwidth_khz * 1e3
        transmission = find_transmission(spectra, frequency_hz, width_hz, _tuned_hz(receivers))
        rates_hz = [one.clock.rate_hz for one in receivers]
        band = Band.around(transmission.centre_hz, transmission.width_hz, rates_hz)
        reference, coarse = _align(receivers, spectra, band, start_s, seconds, workers, device)
        narrower = transmission.narrower
        if narrower is not None and _num_sure(coarse) < len(receivers):  # sidebands too weak to be found by
            inner = Band.around(narrower.centre_hz, narrower.width_hz, rates_hz)
            aligned = _align(receivers, spectra, inner, start_s, seconds, workers, device)
            if _num_sure(aligned[1]) > _num_sure(coarse):
                transmission, band, (reference, coarse) = narrower, inner, aligned
        deaf = {
            one.name
            for one, rough in zip(receivers, coarse, strict=True)
            if rough is not None and rough.sure < SURE and one.model != "none"
        }
        left_out = [*left_out, *(LeftOut(name=name, reason=_DEAF) for name in sorted(deaf))]
        kept = [n for n, one in enumerate(receivers) if one.name not in deaf]
        receivers, spectra = [receivers[n] for n in kept], [spectra[n] for n in kept]
        rough = [coarse[n] or Coarse(0.0, 0.0, 0.0, "complex") for n in kept]
        check_enough(receivers, left_out, given)
        timed = [n for n, one in enumerate(receivers) if one.model != "none"]
        delays: dict[tuple[int, int], Delay] = {}
        if len(timed) > 1:
            sums = _cross_spectra(
                [receivers[n] for n in timed], [rough[n] for n in timed], [spectra[n] for n in timed], transmission,
                band, start_s, seconds, workers, device, progress,
            )  # fmt: skip
            delays = {(timed[i], timed[j]): delay for (i, j), delay in _delays(sums, len(timed), band, workers).items()}
    return make_measurement(
        receivers, spectra, transmission, band, rough, delays, left_out, start_s, seconds, kept.index(reference)
    )


def _num_sure(coarse: list[Coarse | None]) -> int:
    return sum(one is None or one.sure >= SURE for one in coarse)


def _tuned_hz(receivers: list[Receiver]) -> float | None:
    """Where all receivers are tuned to, if they are so narrow that it was for one transmission."""
    centres = {one.centre_hz for one in receivers}
    narrow = all(one.clock.rate_hz <= TUNED_HZ and not one.recording.is_real for one in receivers)
    return centres.pop() if len(centres) == 1 and narrow else None


_DEAF = "hears another transmission, or none: nothing in it correlates with the other recordings"


# Rough lags


def _align(
    receivers: list[Receiver],
    spectra: list[BandSpectrum],
    band: Band,
    start_s: float,
    seconds: float,
    workers: CoreThreads,
    device: torch.device,
) -> tuple[int, list[Coarse | None]]:
    """The reference station, and each station's rough lag against it; None for those without a clock."""
    timed = [n for n, one in enumerate(receivers) if one.model != "none"]
    heard = [_snr(spectra[n], band.centre_hz, band.width_hz) for n in range(len(receivers))]
    order = sorted(timed, key=lambda n: -heard[n])
    none: list[Coarse | None] = [None] * len(receivers)
    if len(timed) < 2:
        return int(np.argmax(heard)), none
    look_s = min(seconds, max(LOOK_S, LOOK_LEAST / band.rate_hz), LOOK_POINTS / band.rate_hz)
    look_start = start_s + (seconds - look_s) / 2
    count = int(look_s * band.rate_hz)
    streams = dict(
        zip(
            timed,
            workers.map(lambda n: extract(receivers[n], band, look_start, count, device=device), timed),
            strict=True,
        )
    )
    shift_hz = max(MIN_SHIFT_HZ, SHIFT_PPM * 1e-6 * band.centre_hz)
    shift_hz = min(shift_hz, band.rate_hz / 4)
    best: tuple[int, int, list[Coarse | None]] = (-1, order[0], none)
    for reference in order[:3]:  # the strongest may be the one that hears something else

        def against(n: int, reference: int = reference) -> Coarse:
            limit = _limit_s(receivers[reference], receivers[n], band.centre_hz)
            return acquire(streams[reference], streams[n], band, limit, shift_hz)

        others = [n for n in timed if n != reference]
        by_receiver = dict(zip(others, workers.map(against, others), strict=True))
        rows = [by_receiver.get(n) for n in range(len(receivers))]
        rows[reference] = Coarse(0.0, 0.0, math.inf, "complex")
        sure = sum(one.sure >= SURE for one in by_receiver.values())
        if sure > best[0]:
            best = (sure, reference, rows)
        if sure * 2 >= len(others):
            break
    reference, rows = best[1], best[2]

    def finer(n: int) -> Coarse | None:
        rough = rows[n]
        if rough is None or n == reference or rough.sure < SURE:
            return rough
        return _refine(rough, streams[reference], receivers[n], band, look_start, count, device)

    return reference, workers.map(finer, range(len(receivers)))


def _refine(
    rough: Coarse, reference: Tensor, station: Receiver, band: Band, start_s: float, count: int, device: torch.device
) -> Coarse:
    """Lag to a fraction of a point, and the shift to a fraction of a turn over the look: chunks must not smear."""
    for _ in range(2):
        stream = extract(station, band, start_s, count, lag_s=rough.lag_s, shift_hz=rough.shift_hz, device=device)
        if rough.kind == "complex":
            rough = replace(rough, shift_hz=rough.shift_hz + residual_shift_hz(reference, stream, band))
            stream = extract(station, band, start_s, count, lag_s=rough.lag_s, shift_hz=rough.shift_hz, device=device)
        fine_s = CHUNKS_S[1] if band.width_hz > NARROW_HZ else LONG_CHUNK_S
        chunk_s = min(fine_s if rough.kind == "complex" else FADES_S, count / band.rate_hz / 4)
        adder = Spectra(rough.kind, band, chunk_s, 2, 1, device)
        if not adder.usable:
            return rough
        adder.add(torch.stack([reference, stream]), 0)
        delay = fit_delay(adder.sums(), 0, 0, 1, 4 / band.width_hz)
        if delay is None or delay.ambiguity > MAX_DOUBT:
            return rough
        rough = replace(rough, lag_s=rough.lag_s + delay.plain_delay_s)
    return rough


def _limit_s(first: Receiver, second: Receiver, frequency_hz: float) -> float:
    """How far apart arrivals can be: the light time between the stations, and slack for clocks and the ionosphere."""
    a, b = (
        np.array(ecef(*(np.array(v) for v in (one.site.lat, one.site.lon, one.site.alt)))) for one in (first, second)
    )
    slack = SKY_SLACK_S if frequency_hz < SKY_HZ else SLACK_S
    # light goes around the Earth, not through it: up to π/2 further
    chord = float(np.linalg.norm(a - b))
    arc = 2 * 6.371e6 * math.asin(min(1.0, chord / 2 / 6.371e6))
    return arc / SPEED_OF_LIGHT * 1.01 + slack + 5 * math.hypot(first.sigma_s, second.sigma_s)


def _snr(spectrum: BandSpectrum, centre_hz: float, width_hz: float) -> float:
    inside = spectrum.inside(centre_hz, width_hz)
    return float(inside.mean() / max(spectrum.floor, 1e-30)) if len(inside) else 0.0


# Cross-spectra over everything


def _cross_spectra(
    receivers: list[Receiver],
    rough: list[Coarse],
    spectra: list[BandSpectrum],
    transmission: Transmission,
    band: Band,
    start_s: float,
    seconds: float,
    workers: CoreThreads,
    device: torch.device,
    progress: Progress | None,
) -> list[CrossSums]:
    """Sums of every kind of signal; the complex one in chunks of several lengths."""
    lengths = CHUNKS_S if band.width_hz > NARROW_HZ else (*CHUNKS_S, LONG_CHUNK_S)
    tried = [("complex", chunk_s) for chunk_s in lengths if chunk_s * 8 <= seconds or chunk_s == CHUNKS_S[0]]
    tried += [(kind, min(FADES_S, seconds / 2)) for kind in KINDS[1:]]
    overlap = OVERLAP if seconds * band.rate_hz * len(receivers) < LONG_POINTS else LONG_OVERLAP
    adders = [Spectra(kind, band, chunk_s, len(receivers), GROUPS, device, overlap) for kind, chunk_s in tried]
    adders = [one for one in adders if one.usable] or adders[:1]
    floor = torch.tensor(
        [one.floor / one.bin_hz * band.rate_hz * (band.width_hz / band.rate_hz) for one in spectra], device=device
    )
    longest = max(one.points for one in adders) / band.rate_hz
    window_s = max(2 * longest, min(seconds / GROUPS, WINDOW_POINTS / band.rate_hz))
    parts = list(windows(start_s, seconds, min(window_s, seconds)))
    starts = [int(length_s * band.rate_hz) for _, length_s in parts]

    def window(number: int) -> list[Future[Tensor]]:
        """Streams of a window, begun in the background."""
        begin_s = parts[number][0]
        count = starts[number] + (int(longest * band.rate_hz) if number + 1 < len(parts) else 0)

        def one_stream(n: int) -> Tensor:
            lag = rough[n]
            return extract(receivers[n], band, begin_s, count, lag_s=lag.lag_s, shift_hz=lag.shift_hz, device=device)

        return [workers.start(one_stream, n) for n in range(len(receivers))]

    coming = window(0)
    for number in range(len(parts)):
        streams = torch.stack([one.result() for one in coming])
        coming = window(number + 1) if number + 1 < len(parts) else []
        group = number * GROUPS // len(parts)

        def add(adder: Spectra, streams: Tensor = streams, group: int = group, first: int = starts[number]) -> None:
            adder.add(streams, group, live_chunks(streams, band, adder.chunk_s, floor, overlap), first)

        _beside(add, adders, workers)
        if number + 1 == max(1, len(parts) // 8) and len(adders) > 1:  # enough to know which signals are worth the rest
            best = {
                (one.kind, one.chunk_s)
                for one in _delays([one.sums() for one in adders], len(receivers), band, workers).values()
            }
            adders = [one for one in adders if (one.kind, one.chunk_s) in best] or adders
        if progress is not None:
            progress(number + 1, len(parts))
    return [one.sums() for one in adders]


def _beside(work: Callable[[_T], None], items: Sequence[_T], workers: CoreThreads) -> None:
    """Work on one item in this thread, which would wait otherwise, and on the others in the background."""
    started = [workers.start(work, item) for item in items[1:]]
    work(items[0])
    for one in started:
        one.result()


def _delays(sums: list[CrossSums], num: int, band: Band, workers: CoreThreads) -> dict[tuple[int, int], Delay]:
    """The best delay of every pair by its own standard deviation."""
    reach = 4 / band.width_hz

    def merit(one: Delay) -> float:
        return one.plain_s * (1 if one.kind == "complex" else COMPLEX_PREFERRED)

    def best(pair: int) -> Delay | None:
        fits = [fit_delay(one, pair, *pairs[pair], reach) for one in sums if len(one.seconds)]
        return min((one for one in fits if one is not None), key=merit, default=None)

    pairs = pairs_of(num)
    known = zip(pairs, workers.map(best, range(len(pairs))), strict=True)
    return {pair: delay for pair, delay in known if delay is not None}

"""A band of a recording on the time base that all receivers share.

Axes: b blocks, n samples of a block, N points of the stream. Every receiver samples at its own rate, fitted to its
stamps. A block is transformed, the bins of the band are turned by the fraction of a sample that its clock asks for, and
transformed back at the common rate: one pass filters, mixes, resamples and aligns. Blocks are so short that a
receiver's rate error is a constant within each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.recordings import Clock, Recording, Site

STRETCH_RAD = 0.005  # phase error at the band's edge that a block's rate error may make
SKIRT = 0.25  # of the band's width
BLOCK_POINTS = 16_384  # samples of a block where nothing else limits it
BATCH_SAMPLES = 1 << 20  # of the receiver's samples transformed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A recording with its place and its clock, ready to be measured."""

    name: str
    recording: Recording
    site: Site
    clock: Clock
    late_s: float = 0.0  # its clock's seconds count from this many after the common epoch
    model: str = "gnss"
    sigma_s: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def start_s(self) -> float:
        """First sample on the common time base."""
        return self.late_s + self.clock.start_s

    @property
    def end_s(self) -> float:
        return self.late_s + self.clock.end_s

    @property
    def centre_hz(self) -> float:
        return self.recording.centre_hz or 0.0

    def noted(self, *problems: str) -> Self:
        return replace(self, problems=(*self.problems, *problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A band around a frequency, and the rate of the stream that carries it."""

    centre_hz: float
    width_hz: float
    rate_hz: float

    @classmethod
    def around(cls, centre_hz: float, width_hz: float, rates_hz: list[float]) -> "Band":
        """Twice the width where the receivers sample fast enough: the square of the signal fits too."""
        return cls(centre_hz=centre_hz, width_hz=width_hz, rate_hz=min(2.0 * width_hz, *rates_hz))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How blocks of one receiver become blocks of the stream."""

    taken: int  # n, samples in
    made: int  # points out
    guard: int  # points on either side that the filter's length spoils


def extract(
    receiver: Receiver,
    band: Band,
    start_s: float,
    count: int,
    *,
    lag_s: float = 0.0,
    shift_hz: float = 0.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The band of a receiver as if it had been sampled at start_s + lag_s + n / rate.  (N,) complex64

    Cable delays are taken off. Where the recording has a gap, or no samples at all, the stream is 0.
    """
    plan = _plan(receiver, band)
    keep = plan.made - 2 * plan.guard
    out = torch.zeros(-(-count // keep) * keep, dtype=torch.complex64, device=device)
    begin_s = start_s + lag_s - receiver.late_s + receiver.site.delay_us * 1e-6
    rate = receiver.clock.rate_hz
    offset_hz = band.centre_hz + shift_hz - receiver.centre_hz
    first_bin = round(offset_hz * plan.taken / rate)
    response = (_response(plan, band, rate, first_bin) / receiver.recording.samples.full_scale).to(torch.float32)
    bins = torch.arange(plan.made, dtype=torch.float64) - plan.made // 2 + first_bin
    turn = (2 * math.pi * bins / plan.taken).to(torch.float32)  # at most half a turn: single precision is enough
    rest_hz = offset_hz - first_bin * rate / plan.taken
    point = torch.arange(plan.made, dtype=torch.float64) / band.rate_hz
    within = _turns(rest_hz * point).to(device)
    for blocks, samples, fraction in _blocks(receiver, band, plan, begin_s, len(out) // keep, device):
        spectrum = torch.fft.fft(samples)  # (b, n)
        inside = _bins(spectrum, first_bin, plan.made)
        inside = inside * torch.polar(response.expand(len(fraction), -1), turn * fraction[:, None].float()).to(device)
        stream = torch.fft.ifft(torch.fft.ifftshift(inside, -1)) * (plan.made / plan.taken)
        at_s = (torch.as_tensor(blocks, dtype=torch.float64) * keep - plan.guard) / band.rate_hz
        stream = stream * within * _turns(offset_hz * at_s).to(device)[:, None]
        out[blocks[0] * keep : (blocks[-1] + 1) * keep] += stream[:, plan.guard : plan.guard + keep].reshape(-1)
    return out[:count]


def _turns(cycles: Tensor) -> Tensor:
    """Complex64 phases of so many turns backwards, counted in double precision."""
    angle = (-2 * math.pi * torch.remainder(cycles, 1.0)).to(torch.float32)
    return torch.polar(torch.ones_like(angle), angle)


def _plan(receiver: Receiver, band: Band) -> _Plan:
    """Block sizes whose durations agree best at the receiver's true rate."""
    ratio = receiver.clock.rate_hz / band.rate_hz
    guard = max(8, math.ceil(6 * band.rate_hz / max(_skirt_hz(band), band.rate_hz / 20)))
    least = 8 * guard  # a quarter of each block is spoilt at most
    most = max(2 * least, int(BLOCK_POINTS / ratio))
    best: tuple[float, _Plan] | None = None
    for made in range(most - most % 2, least, -2):
        taken = round(made * ratio)
        if _smooth(made) and _smooth(taken):
            stretch = abs(taken - made * ratio) / receiver.clock.rate_hz * math.pi * band.width_hz / 2
            if best is None or stretch < best[0]:
                best = (stretch, _Plan(taken, made, guard))
            if stretch < STRETCH_RAD:
                break
    return best[1] if best is not None else _Plan(round(least * ratio), least, guard)


def _skirt_hz(band: Band) -> float:
    """How far the filter reaches beyond the band: demodulated signals must not hear the neighbours."""
    return min((band.rate_hz - band.width_hz) / 2, SKIRT * band.width_hz)


def _smooth(number: int) -> bool:
    for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23):
        while number % prime == 0:
            number //= prime
    return number == 1


def _response(plan: _Plan, band: Band, rate_hz: float, first_bin: int) -> Tensor:
    """(made,) gain of each bin: flat in the band, a raised cosine beside it."""
    offset = (torch.arange(plan.made, dtype=torch.float64) - plan.made // 2) * (rate_hz / plan.taken)
    share = ((offset.abs() - band.width_hz / 2) / max(_skirt_hz(band), 1e-9)).clamp(0, 1)
    gain = 0.5 + 0.5 * torch.cos(share * math.pi)
    bins = torch.arange(plan.made) - plan.made // 2 + first_bin
    return torch.where((bins >= -(plan.taken // 2)) & (bins < (plan.taken + 1) // 2), gain, 0.0)


def _bins(spectrum: Tensor, centre: int, count: int) -> Tensor:
    """`count` bins around one, in rising order; beyond the ends they wrap and are filtered out."""
    size = spectrum.shape[-1]
    if count <= size:
        first = (centre - count // 2) % size
        if first + count <= size:
            return spectrum[:, first : first + count]
        return torch.cat([spectrum[:, first:], spectrum[:, : first + count - size]], -1)
    index = (torch.arange(count, device=spectrum.device) - count // 2 + centre) % size
    return spectrum[:, index]


def _blocks(
    receiver: Receiver, band: Band, plan: _Plan, begin_s: float, num: int, device: torch.device | str
) -> Iterator[tuple[range, Tensor, Tensor]]:
    """Batches of blocks: their numbers, their samples (b, n) and the fraction each starts late, in samples."""
    keep = plan.made - 2 * plan.guard
    step = max(1, BATCH_SAMPLES // plan.taken)
    samples, clock = receiver.recording.samples, receiver.clock
    for line in clock.lines:
        for first in range(0, num, step):
            blocks = range(first, min(first + step, num))
            # the middle of a block is where it should be: what its rate is off then cancels to first order
            middle_s = [begin_s + (blocks[k] * keep - plan.guard + plan.made / 2) / band.rate_hz for k in (0, -1)]
            ends = [clock.sample_at(at_s, line) - plan.taken / 2 for at_s in middle_s]
            if ends[1] + plan.taken <= line.first or ends[0] >= line.end:
                continue
            positions = np.linspace(ends[0], ends[1], len(blocks)) if len(blocks) > 1 else np.array([ends[0]])
            whole = np.floor(positions).astype(np.int64)
            low, high = max(int(whole[0]), line.first), min(int(whole[-1]) + plan.taken, line.end)
            if high <= low:
                continue
            window = _padded(samples.read(low, high - low), low - int(whole[0]), int(whole[-1]) + plan.taken - high)
            parts = to_complex(torch.from_numpy(window).to(device), samples.offset, 1.0)
            places = (whole - whole[0]).tolist()
            steps = np.unique(np.diff(whole))
            if len(steps) == 1:  # evenly spaced blocks need no copy
                batch = parts.as_strided((len(places), plan.taken), (int(steps[0]), 1))
            else:
                batch = torch.stack([parts[at : at + plan.taken] for at in places])
            yield blocks, batch, torch.from_numpy(positions - whole)


def _padded(values: NDArray[Any], before: int, after: int) -> NDArray[Any]:
    return np.pad(values, ((before, after), (0, 0))) if before or after else values


def to_complex(values: Tensor, offset: float, full_scale: float) -> Tensor:
    """(N, 2) or (N, 1) of a file's type → (N,) complex64 with full scale 1."""
    if values.dtype in (torch.uint16, torch.uint32):
        values = values.to(torch.int64)
    parts = values.to(torch.float32)
    if offset:
        parts = parts - offset
    if full_scale != 1:
        parts = parts * (1 / full_scale)
    return torch.view_as_complex(parts.contiguous()) if parts.shape[1] == 2 else parts[:, 0].to(torch.complex64)

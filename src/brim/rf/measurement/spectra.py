"""Cross-spectra of aligned streams, summed over chunks: all that the fit of arrival differences needs.

Axes: R receivers, P pairs of them, N points of a stream, M chunks, G groups of chunks, K bands of frequency.

Three signals can be compared: the complex stream itself, its envelope, and its instantaneous frequency. The complex one
holds the most where the receivers' oscillators stay in phase over a chunk; the others do not care about oscillators.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from brim.rf.measurement.streams import Band

KINDS = ("complex", "envelope", "frequency")
MAX_BANDS = 1_024
OVERLAP = 4  # chunks begin every quarter: with the Hann window hardly anything is lost
LONG_OVERLAP = 2  # of long recordings: twice as fast, and 3 % less sharp
LONG_POINTS = 4_000_000
EFFICIENCY = 0.98  # independent values per second and hertz


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSums:
    """Sums over the chunks of each group; frequencies are those of the band's middle, Hz."""

    kind: str
    chunk_s: float
    frequency_hz: Tensor  # (K,) float64
    band_hz: float
    cross: Tensor  # (G, P, K) complex128: station times conjugate of reference
    power: Tensor  # (G, R, K) float64
    seconds: Tensor  # (G,) float64 of signal in each group

    @property
    def values(self) -> Tensor:
        """(G,) independent values in each band of a group."""
        return self.seconds * self.band_hz * EFFICIENCY


def pairs_of(num: int) -> list[tuple[int, int]]:
    """(reference, station) of every pair, the reference first."""
    return list(combinations(range(num), 2))


def chunk_points(band: Band, chunk_s: float) -> int:
    return max(16, 2 * round(chunk_s * band.rate_hz / 2))


class Spectra:
    """Adds up windows of aligned streams."""

    def __init__(
        self, kind: str, band: Band, chunk_s: float, num: int, groups: int, device: torch.device, overlap: int = OVERLAP
    ) -> None:
        self.kind, self.band, self.chunk_s, self.overlap = kind, band, chunk_s, overlap
        self.points = chunk_points(band, chunk_s)
        bins = self._bins()
        self.per_band = -(-len(bins) // MAX_BANDS)
        self.bins = bins[: len(bins) // self.per_band * self.per_band]
        self.taper = torch.hann_window(self.points, device=device)
        self.first, self.second = (list(side) for side in zip(*pairs_of(num), strict=True))
        count = len(self.bins) // self.per_band
        self.cross = torch.zeros(groups, len(self.first), count, dtype=torch.complex128, device=device)
        self.power = torch.zeros(groups, num, count, dtype=torch.float64, device=device)
        self.seconds = torch.zeros(groups, dtype=torch.float64)

    def _bins(self) -> list[int]:
        """Bins inside the band, in rising frequency; a demodulated signal has no meaningful constant."""
        step = self.band.rate_hz / self.points
        if self.kind == "complex":
            reach = min(int(self.band.width_hz / 2 / step), self.points // 2 - 1)
            return list(range(-reach, reach + 1))
        return list(range(2, min(int(self.band.width_hz / step), self.points // 2 - 1) + 1))

    @property
    def usable(self) -> bool:
        return len(self.bins) >= 8

    def add(self, streams: Tensor, group: int, live: Tensor | None = None, starts: int | None = None) -> None:
        """streams (R, N) complex64, aligned; live (M,) bool says which chunks hold the transmission.

        Chunks begin at the first `starts` points: the rest of the streams is the beginning of the next window.
        """
        hop = self.points // self.overlap
        chunks = demodulate(streams, self.kind).unfold(1, self.points, hop)  # (R, M, points)
        chunks = chunks[:, : chunks.shape[1] if starts is None else -(-starts // hop)]
        if live is not None:
            chunks = chunks[:, live[: chunks.shape[1]].to(chunks.device)]
        if not chunks.shape[1]:
            return
        if self.kind != "complex":
            chunks = chunks - chunks.mean(-1, keepdim=True)
        spectrum = self._inside(torch.fft.fft(chunks * self.taper))  # (R, M, bins)
        by_bin = spectrum.permute(2, 0, 1).contiguous()  # (bins, R, M)
        if self.kind == "complex":
            by_bin = by_bin * oscillator_phases(spectrum).conj()
        gram = torch.bmm(by_bin, by_bin.mH)  # (bins, R, R): all pairs in one product
        self.cross[group] += self._banded(gram[:, self.second, self.first].T)
        self.power[group] += self._banded(gram.diagonal(dim1=1, dim2=2).real.T).double()
        self.seconds[group] += chunks.shape[1] * hop / self.band.rate_hz

    def _inside(self, spectrum: Tensor) -> Tensor:
        """The bins of the band: slices, since gathering them one by one takes as long as the transform."""
        first, last = self.bins[0], self.bins[-1]
        if first >= 0:
            return spectrum[..., first : last + 1]
        return torch.cat([spectrum[..., first:], spectrum[..., : last + 1]], -1)

    def _banded(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:-1], -1, self.per_band).sum(-1)

    def sums(self) -> CrossSums:
        step = self.band.rate_hz / self.points
        centre = torch.tensor(self.bins, dtype=torch.float64).reshape(-1, self.per_band).mean(-1) * step
        used = self.seconds > 0
        return CrossSums(
            kind=self.kind,
            chunk_s=self.chunk_s,
            frequency_hz=centre,
            band_hz=self.per_band * step,
            cross=self.cross.cpu()[used],
            power=self.power.cpu()[used],
            seconds=self.seconds[used],
        )


def oscillator_phases(spectrum: Tensor) -> Tensor:
    """(R, M) unit phases of the receivers' oscillators in each chunk: the leading eigenvector of their coherences.

    spectrum  (R, M, bins)  complex64
    """
    by_chunk = spectrum.transpose(0, 1)  # (M, R, bins)
    gram = torch.bmm(by_chunk, by_chunk.mH)
    level = gram.diagonal(dim1=1, dim2=2).real.clamp(min=1e-30).sqrt()
    gram = gram / (level[:, :, None] * level[:, None, :])
    vector = gram[:, :, 0:1]
    for _ in range(4):
        vector = gram @ vector
        vector = vector / vector.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return (vector / vector.abs().clamp(min=1e-30))[:, :, 0].T


def demodulate(streams: Tensor, kind: str) -> Tensor:
    """(R, N) the signal that is compared."""
    if kind == "complex":
        return streams
    if kind == "envelope":
        return streams.abs()
    # power times phase advance: a fade, whose phase is noise, counts for little
    advance = (streams[:, 1:] * streams[:, :-1].conj()).imag
    return torch.nn.functional.pad(advance, (0, 1))


def live_chunks(streams: Tensor, band: Band, chunk_s: float, floor: Tensor, overlap: int = OVERLAP) -> Tensor:
    """(M,) bool: chunks in which half of the receivers hear more than their noise.

    floor  (R,)  noise power of the streams
    """
    points = chunk_points(band, chunk_s)
    hop = points // overlap
    square = streams.real.square() + streams.imag.square()
    part = (
        square[:, : square.shape[1] // hop * hop].reshape(len(square), -1, hop).sum(-1)
    )  # chunks overlap: sum each hop once
    power = part.unfold(1, overlap, 1).sum(-1) / (hop * overlap)  # (R, M)
    # the mean over B·T values scatters by 1/sqrt(B·T)
    limit = floor[:, None] * (1 + 4 / math.sqrt(max(1.0, band.width_hz * chunk_s)))
    return (power > limit).double().mean(0) >= 0.5


def windows(start_s: float, seconds: float, window_s: float) -> Iterator[tuple[float, float]]:
    """Start and length of equal windows that fill a stretch of time."""
    num = max(1, math.ceil(seconds / window_s - 1e-6))
    for n in range(num):
        yield start_s + n * seconds / num, seconds / num

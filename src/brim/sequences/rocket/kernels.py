"""MiniRocket features of ragged, multivariate sequences: how often a convolution exceeds a threshold.

Axes: n sequences, T frames, D channels, J dilations, K = 84 kernels, F features.

A kernel has nine weights: three are 2, six are -1; there are 84 of them. Each is applied at several dilations, to the
sum of a few channels, and compared with thresholds drawn from the training data. A feature is the share of frames at
which the convolution exceeds its threshold. Dempster, Schmidt, Webb: "MiniRocket", KDD 2021, arXiv 2012.08791.
Of a sequence of more than 8192 frames every second one is compared, of more than 16 384 every third, and so on: a share
of 8192 frames is known well enough, and the time for a sequence has a bound.

Every convolution is a sum of shifted copies in a fixed order, and a feature is a number of frames over their number:
the result is the same to the bit alone, in any batch, behind any padding, and on any device.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import worker_count

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

TAPS = tuple(combinations(range(9), 3))  # the three weights of 2 of each kernel
MAX_CHANNELS = 9  # summed by one kernel
MAX_DILATIONS = 32
_STRETCH = 4  # times the median length: the longest that dilations are spread over
_MOST = 8192  # frames of a sequence that are compared; of many sequences at once on a CPU, whose cache they fit in
_SAMPLED = 2048  # frames of a longer one that thresholds are drawn from
_PADDING = 0.2  # share of padding in a block, at most
_WORDS = 255  # 8-byte words of comparisons added before a byte could overflow
_DEVICE_NUMBERS = 1 << 28  # numbers of the padded sequences convolved at once on a GPU


@dataclass(frozen=True, slots=False, kw_only=True, eq=False)
class MiniRocket:
    """Fixed kernels with the dilations, channels and thresholds chosen on training data."""

    dim: int  # channels of a sequence
    dilations: Integers  # (J,)
    per_kernel: Integers  # (J,) features of each kernel at each dilation
    channels: Integers  # (J 84, M) channels that a kernel sums, -1 behind the last
    thresholds: Floats  # (F,) by dilation, kernel, feature

    @property
    def num_features(self) -> int:
        return len(self.thresholds)

    @classmethod
    def fit(cls, sequences: Sequence[Floats], *, num_features: int = 10_000, seed: int = 0) -> Self:
        """Choose dilations by the longest sequence, channels at random, thresholds as quantiles of convolutions.

        A sequence much longer than most does not spread the dilations.
        sequences  (T, D) float32 each, at least one frame; num_features is rounded to the next multiple of 84 below
        """
        dim = sequences[0].shape[1]
        lengths = np.array([len(one) for one in sequences])
        dilations, per_kernel = spread_dilations(longest_of(lengths), num_features)
        rng = np.random.RandomState(seed)  # the generator and the order of draws of the method's other implementations
        channels = draw_channels(dim, len(dilations) * len(TAPS), rng)
        rng.seed(seed)
        quantiles = golden_quantiles(len(TAPS) * int(per_kernel.sum()))
        thresholds = np.empty(len(quantiles), np.float32)
        channels_first = [np.ascontiguousarray(one.T) for one in sequences]
        at = 0
        for number, row in enumerate(channels):
            dilation, count = int(dilations[number // 84]), int(per_kernel[number // 84])
            one = channels_first[rng.randint(len(sequences))]
            values = _convolve_one([one[channel] for channel in row[row >= 0]], dilation, TAPS[number % 84], rng)
            thresholds[at : at + count] = np.quantile(values, quantiles[at : at + count])
            at += count
        return cls(dim=dim, dilations=dilations, per_kernel=per_kernel, channels=channels, thresholds=thresholds)

    def features(self, sequences: Sequence[Floats]) -> Floats:
        """(n, F) float32 of ragged sequences on the host, each (T, D) float32."""
        out = np.empty((len(sequences), self.num_features), np.float32)
        lengths = np.array([len(one) for one in sequences])

        def run(rows: Integers) -> None:
            x = np.zeros((self.dim, len(rows), int(lengths[rows].max())), np.float32)
            for place, row in enumerate(rows.tolist()):
                x[:, place, : lengths[row]] = sequences[row].T
            out[rows] = self._of_block(x, lengths[rows])

        with ThreadPoolExecutor(worker_count()) as pool:
            list(pool.map(run, blocks(lengths, _MOST, _MOST)))
        return out

    def features_on(self, frames: Tensor, length: Tensor) -> Tensor:
        """(B, F) float32 of a padded batch on its device.

        frames  (B, T, D)  float32; values behind the end have no influence
        length  (B,)       int64
        """
        if frames.device.type == "cpu":
            whole = frames.float().numpy()
            return torch.from_numpy(self.features([one[:num] for one, num in zip(whole, length.tolist(), strict=True)]))
        return self._on_device(frames, length)

    # On the host

    def _of_block(self, x: Floats, lengths: Integers) -> Floats:
        """(b, F) of x (D, b, T), 0 behind each end, of one stride."""
        size, num_frames = x.shape[1:]
        stride, halo = int(strides_of(lengths)[0]), 4 * int(self.dilations[-1])
        positions = np.arange(-(-num_frames // (8 * stride)) * 8) * stride  # as many as whole words
        shape = (*x.shape[:2], halo + len(positions) * stride + halo)
        minus, triple = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        np.negative(x, out=minus[..., halo : halo + num_frames])
        np.multiply(x, np.float32(3), out=triple[..., halo : halo + num_frames])
        counts = np.empty((self.num_features, size), np.int64)
        total, spare = np.empty((2, size, len(positions)), np.float32)
        above = np.empty((int(self.per_kernel.max()), *total.shape), np.bool_)
        whole = _outside(positions, np.zeros_like(lengths), lengths)
        at = 0
        for number, (dilation, count) in enumerate(zip(self.dilations.tolist(), self.per_kernel.tolist(), strict=True)):
            spans = [slice(halo + shift * dilation, None, stride) for shift in range(-4, 5)]
            taps = [triple[..., span][..., : len(positions)] for span in spans]
            if stride > 1:
                taps = [np.ascontiguousarray(tap) for tap in taps]
            alpha = _alpha([minus[..., span][..., : len(positions)] for span in spans])
            begun = [alpha + tap for tap in taps[:7]]  # (D, b, P) each, shared by kernels with the same first tap
            inner = _outside(positions, *_inner(lengths, dilation))
            for kernel, (one, two, three) in enumerate(TAPS):
                for slot, channel in enumerate(self._lists[number * 84 + kernel]):
                    into = spare if slot else total
                    np.add(begun[one][channel], taps[two][channel], out=into)
                    into += taps[three][channel]
                    if slot:
                        total += spare
                total += inner if (number + kernel) % 2 else whole
                bits = above[:count]
                np.greater(total, self.thresholds[at : at + count, None, None], out=bits)
                counts[at : at + count] = _count_bytes(bits)
                at += count
        return (counts / self._frames_counted(lengths)).astype(np.float32).T

    # On a device

    def _on_device(self, frames: Tensor, length: Tensor) -> Tensor:
        num_frames, halo = frames.shape[1], 4 * int(self.dilations[-1])
        size = max(1, _DEVICE_NUMBERS // (frames.shape[2] * (num_frames + 2 * halo)))
        strides = strides_of(length.cpu().numpy())
        out = torch.empty(len(frames), self.num_features, device=frames.device)
        for stride in np.unique(strides).tolist():
            for rows in torch.split(torch.from_numpy(np.flatnonzero(strides == stride)).to(frames.device), size):
                own = length[rows]
                valid = torch.arange(num_frames, device=frames.device) < own[:, None]
                x = frames[rows].float().masked_fill(~valid[..., None], 0).permute(2, 0, 1)
                out[rows] = self._of_padded(torch.nn.functional.pad(x, (halo, halo)), own, halo, stride)
        return out

    def _of_padded(self, x: Tensor, length: Tensor, halo: int, stride: int) -> Tensor:
        """(B, F) of x (D, B, halo + T + halo): the sums of _of_block, in the same order."""
        device, minus, triple = x.device, -x, 3 * x
        positions, lengths = torch.arange(0, x.shape[2] - 2 * halo, stride, device=device), length.cpu().numpy()
        counts = torch.empty(self.num_features, x.shape[1], dtype=torch.int64, device=device)
        thresholds = torch.from_numpy(self.thresholds).to(device)
        whole = _outside_on(positions, np.zeros_like(lengths), lengths)
        total, spare = torch.empty(2, x.shape[1], len(positions), device=device)
        at = 0
        for number, (dilation, count) in enumerate(zip(self.dilations.tolist(), self.per_kernel.tolist(), strict=True)):
            spans = [slice(halo + shift * dilation, None, stride) for shift in range(-4, 5)]
            taps = [triple[..., span][..., : len(positions)] for span in spans]
            alpha = _alpha([minus[..., span][..., : len(positions)] for span in spans])
            begun = [alpha + tap for tap in taps[:7]]
            inner = _outside_on(positions, *_inner(lengths, dilation))
            for kernel, (one, two, three) in enumerate(TAPS):
                for slot, channel in enumerate(self._lists[number * 84 + kernel]):
                    into = spare if slot else total
                    torch.add(begun[one][channel], taps[two][channel], out=into)
                    into += taps[three][channel]
                    if slot:
                        total += spare
                total += inner if (number + kernel) % 2 else whole
                above = total > thresholds[at : at + count, None, None]
                torch.sum(above, -1, out=counts[at : at + count])
                at += count
        shares = torch.from_numpy(self._frames_counted(lengths)).to(device)
        return (counts.double() / shares).float().T

    @cached_property
    def _lists(self) -> list[list[int]]:
        return [[channel for channel in row if channel >= 0] for row in self.channels.tolist()]

    def _frames_counted(self, lengths: Integers) -> Integers:
        """(F, b) frames that each feature is a share of."""
        strides = strides_of(lengths)
        spans = (_inner(lengths, dilation) for dilation in self.dilations.tolist())
        inner = [-(-high // strides) + (-low // strides) for low, high in spans]  # multiples of the stride
        whole = -(-lengths // strides)
        pairs = [
            inner[number] if (number + kernel) % 2 else whole for number in range(len(inner)) for kernel in range(84)
        ]
        return np.repeat(np.stack(pairs), np.repeat(self.per_kernel, 84), axis=0)


# Choosing


def longest_of(lengths: Integers) -> int:
    """The length that dilations are spread over: one sequence much longer than most does not count."""
    return min(int(lengths.max()), _STRETCH * int(np.median(lengths)))


def spread_dilations(num_frames: int, num_features: int) -> tuple[Integers, Integers]:
    """Dilations spread evenly by their logarithm up to the length, and the features of a kernel at each."""
    per_kernel = max(1, num_features // len(TAPS))
    steps = min(per_kernel, MAX_DILATIONS)
    exponents = np.linspace(0, np.log2((max(num_frames, 9) - 1) / 8), steps)
    dilations, counts = np.unique((2.0**exponents).astype(np.int64), return_counts=True)
    counts = (counts * (per_kernel / steps)).astype(np.int64)
    missing = per_kernel - int(counts.sum())
    counts += missing // len(counts) + (np.arange(len(counts)) < missing % len(counts))
    return dilations, counts


def draw_channels(dim: int, count: int, rng: np.random.RandomState) -> Integers:
    """(count, M) channels of each kernel, -1 behind the last; how many is drawn evenly by its logarithm."""
    most = min(dim, MAX_CHANNELS)
    sizes = (2 ** rng.uniform(0, np.log2(most + 1), count)).astype(np.int64)
    channels = np.full((count, most), -1)
    for row, size in zip(channels, sizes.tolist(), strict=True):
        row[:size] = rng.choice(dim, size, replace=False)
    return channels


def golden_quantiles(count: int) -> Floats:
    """Quantiles spread evenly in any order of use: multiples of the golden ratio, modulo 1."""
    quantiles: Floats = (np.arange(1, count + 1) * ((np.sqrt(5) + 1) / 2) % 1).astype(np.float32)
    return quantiles


def _convolve_one(x: list[Floats], dilation: int, taps: tuple[int, int, int], rng: np.random.RandomState) -> Floats:
    """(T,) convolution of a few channels, (T,) each, with one kernel; of a long sequence at some frames alone."""
    length, halo = len(x[0]), 4 * dilation
    places: list[Any] = [slice(first, first + length) for first in range(0, 9 * dilation, dilation)]
    if length > _MOST:
        some = rng.randint(length, size=_SAMPLED)
        places = [some + place.start for place in places]
    total: Any = 0
    for channel in x:  # one after another, as features add channels
        padded = np.zeros(length + 2 * halo, np.float32)
        padded[halo : halo + length] = channel
        shifted = [padded[place] for place in places]
        own = _alpha([-one for one in shifted])
        for tap in taps:
            own += np.float32(3) * shifted[tap]
        total = total + own
    return total  # type: ignore[no-any-return]


# Counting


def _alpha(shifted: list[Any]) -> Any:
    """Sum of nine shifted copies; the order is part of the result."""
    total = shifted[4] + shifted[0]
    for other in (1, 2, 3, 5, 6, 7, 8):
        total += shifted[other]
    return total


def strides_of(lengths: Integers, most: int | None = None) -> Integers:
    """Frames from one that is compared to the next."""
    strides: Integers = -(-lengths // (most or _MOST))
    return strides


def _inner(lengths: Integers, dilation: int) -> tuple[Integers, Integers]:
    """The frames at which a kernel lies within each sequence; all, if it is longer than the sequence."""
    fits = lengths >= 8 * dilation + strides_of(lengths)  # then at least one frame is compared
    return np.where(fits, 4 * dilation, 0), np.where(fits, lengths - 4 * dilation, lengths)


def _outside(frames: Integers, low: Integers, high: Integers) -> Floats:
    """(b, S) to add to convolutions: minus infinity, which exceeds no threshold, at frames that are not counted."""
    counted = (frames >= low[:, None]) & (frames < high[:, None])
    return np.where(counted, np.float32(0), np.float32(-np.inf))


def _outside_on(frames: Tensor, low: Integers, high: Integers) -> Tensor:
    """_outside, on the device of the frames."""
    first, last = (torch.from_numpy(side).to(frames.device)[:, None] for side in (low, high))
    return torch.where((frames >= first) & (frames < last), 0.0, -torch.inf)


def _count_bytes(bits: Any) -> Integers:
    """Number of true values along the last axis, whose size is a multiple of 8."""
    words = bits.view(np.int64)
    total: Integers = np.zeros(words.shape[:-1], np.int64)
    for first in range(0, words.shape[-1], _WORDS):
        part = words[..., first : first + _WORDS].sum(-1)  # each byte counts up to 255
        pairs = (part & 0x00FF00FF00FF00FF) + ((part >> 8) & 0x00FF00FF00FF00FF)
        total += ((pairs * 0x0001000100010001) >> 48) & 0xFFFF
    return total


def blocks(lengths: Integers, frames: int, most: int) -> Iterable[Integers]:
    """Rows of similar length and one stride that are convolved together, the longest first.

    frames  in a block, at most, if it is not of a single sequence
    most    frames of a sequence that are compared
    """
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        rows = order[first : first + max(1, frames // longest)]
        rows = rows[lengths[rows] >= (1 - _PADDING) * longest]
        rows = rows[strides_of(lengths[rows], most) == strides_of(lengths[rows[:1]], most)]
        first += len(rows)
        yield rows

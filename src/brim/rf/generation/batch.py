"""A batch before and after a device: the work it is given, the measurements it returns, and what devices share.

Axes: B samples, R receivers, M packed records, C chunks, F features.
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.features import estimators as ft
from brim.rf.physics.channel import Links, make_links
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.scene import Scenes
from brim.rf.physics.waveform import TABLE_HZ, Messages, make_messages

STREAM_STRIDE = TABLE_HZ // 25_000  # points of the channel at 50 kHz per point of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A batch ready to compute: accepted scenes, what is said, and the packed links."""

    scenes: Scenes
    messages: Messages
    links: Links
    starts: NDArray[np.int64]  # (B + 1,) first record of each sample

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, rows: slice) -> Self:
        first, last, step = rows.indices(len(self))
        assert step == 1
        begin, end = int(self.starts[first]), int(self.starts[last])
        links = self.links[begin:end]
        return type(self)(
            scenes=self.scenes[rows],
            messages=self.messages[rows],
            links=replace(links, sample=links.sample - first),
            starts=self.starts[first : last + 1] - begin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the device made of a batch, packed by record."""

    peak: Tensor  # (B,) float32, of each message
    truth: Tensor  # (M, C, 2) float32: power in the channel, in units of its noise; occupied bandwidth in Hz
    features: Tensor  # (M, F, 4) float32
    chunks: Tensor | None = None  # (M, C, F) float32
    iq: Tensor | None = None  # (M, N) complex64, in sqrt(mW)

    def to(self, device: str) -> Self:
        """The same on another device."""
        return type(self)(
            peak=self.peak.to(device),
            truth=self.truth.to(device),
            features=self.features.to(device),
            chunks=None if self.chunks is None else self.chunks.to(device),
            iq=None if self.iq is None else self.iq.to(device),
        )


class Backend(Protocol):
    """A device that turns work into measurements."""

    def measure(self, work: Work, *, iq: bool) -> Measured:
        """Signals, noise and features of a batch, on the device; may return before the device is done."""
        ...


def make_work(config: GenerateConfig, scenes: Scenes) -> Work:
    """Prepare accepted scenes for a device."""
    counts = scenes.present.sum(-1)
    return Work(
        scenes=scenes,
        messages=make_messages(config, scenes.index),
        links=make_links(config, scenes),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def feature_chunks(
    config: GenerateConfig,
    grid: ft.Grid,
    spectrum: ft.SpectrumSums,
    envelope: ft.EnvelopeSums,
    floor: Tensor,
    arrival_s: Tensor,
    sigma_s: Tensor,
) -> Tensor:
    """(M, C, F) from what a device reduced its chunks to; the same formulas on every device."""
    snr = ft.linear_snr(spectrum.total, floor)
    named = ft.spectrum_features(spectrum, floor, noise_dbm(config)) | ft.envelope_features(envelope, snr, config, grid)
    named |= {"arrival_difference_us": arrival_s * 1e6, "arrival_sigma_us": sigma_s * 1e6}
    return torch.stack([named[name] for name, _ in ft.FEATURES], -1)


def record_power(truth: Tensor) -> Tensor:
    """(M,) realised signal power over the whole record."""
    return ft.sum_chunks(truth[..., 0]) / NUM_CHUNKS

"""What the receivers of a sample recorded, and its spectrum: read where a dataset keeps IQ, else made again.

Axes: N samples of a record, P points of a spectrum.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brim.engine.storage import Dataset
from brim.errors import ConfigError
from brim.rf.config import SAMPLE_RATE_HZ, from_mapping
from brim.rf.features import milliwatt_units
from brim.rf.generation.backend import make_transmissions
from brim.rf.physics.channel import receive
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.receiver import record
from brim.rf.physics.scene import make_scenes
from brim.rf.physics.waveform import make_table, scale

F64 = NDArray[np.float64]
IQ = NDArray[np.complex64]

_FLOOR = 1e-30  # mW/Hz; keeps the logarithm of an empty bin finite


class Spectrum(NamedTuple):
    """Mean power density over a record."""

    frequency_hz: F64  # (P,) from the carrier, ascending
    power_mw_hz: F64  # (P,)

    @property
    def power_dbm_hz(self) -> F64:
        """(P,) the same in dBm/Hz."""
        return 10 * np.log10(np.maximum(self.power_mw_hz, _FLOOR))

    def within(self, half_hz: float) -> "Spectrum":
        """The part no further from the carrier than this."""
        here = np.abs(self.frequency_hz) <= half_hz
        return Spectrum(self.frequency_hz[here], self.power_mw_hz[here])


def recordings(data: Dataset, row: int, receivers: Sequence[int]) -> Iterator[IQ]:
    """(N,) IQ in sqrt(mW) of each of these receivers of one row of a dataset, one after the other.

    Where the dataset keeps none they are made again: a sample depends on the configuration and its index alone.
    """
    if "iq" in data.fields:
        stored = data.rows(row, row + 1, ("iq",))["iq"][0].numpy()
        yield from (stored[receiver] for receiver in receivers)
        return
    index = int(data.rows(row, row + 1, ("index",))["index"][0])
    config = from_mapping(data.manifest.get("config") or {})
    work = make_transmissions(config, make_scenes(config, np.array([index], np.int64)))
    places = {int(receiver): place for place, receiver in enumerate(work.links.receiver)}
    if not places.keys() >= set(receivers):
        raise ConfigError(f"sample {index} is another one with this brim; use the one that made the dataset")
    table, peak = make_table(config, work.messages, 0)
    unit = milliwatt_units(noise_dbm(config))
    for receiver in receivers:
        signal = receive(config, work.links, places[receiver], table, float(scale(config, peak)))
        yield record(config, signal, index, receiver).mul_(unit).numpy()


def welch(iq: IQ, points: int) -> Spectrum:
    """Welch's method: the mean over Hann windows of so many samples that overlap by half."""
    window = np.hanning(points + 1)[:-1]
    segments = np.lib.stride_tricks.sliding_window_view(iq, points)[:: points // 2]
    power = np.zeros(points)
    for segment in segments:
        power += np.abs(np.fft.fft(segment * window)) ** 2
    power /= len(segments) * SAMPLE_RATE_HZ * (window**2).sum()
    return Spectrum(np.fft.fftshift(np.fft.fftfreq(points, 1 / SAMPLE_RATE_HZ)), np.fft.fftshift(power))

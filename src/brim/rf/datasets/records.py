"""One sample of a dataset: the IQ records of its receivers, their spectra, and the view that the API shows.

Records are read if the dataset keeps IQ, else computed again. Axes: N samples of a record, P points of a spectrum,
R receivers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brim.engine.storage import Dataset
from brim.errors import ConfigError
from brim.rf.config import CHANNEL_HZ, SAMPLE_RATE_HZ, from_mapping
from brim.rf.datasets.summary import column, fixed_receivers
from brim.rf.features import milliwatt_units
from brim.rf.generation.backend import make_transmissions
from brim.rf.physics.channel import receive
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.receiver import record
from brim.rf.physics.scene import make_scenes
from brim.rf.physics.waveform import make_table, scale

F64 = NDArray[np.float64]
IQ = NDArray[np.complex64]

SPECTRUM_HALF_HZ = 25_000.0  # shown around the carrier: the 12.5 kHz channel and as much noise again on either side
SPECTRUM_POINTS = 2_048  # of a window: 97.7 Hz a bin, of which 511 lie within
_ROW = ("index", "transmitter", "receivers", "valid", "present", "features", "truth", "gdop", "crlb_m")
_FLOOR = 1e-30  # mW/Hz; keeps the logarithm of an empty bin finite


class Spectrum(NamedTuple):
    """Mean power density over a record."""

    frequency_hz: F64  # (P,) from the carrier, ascending
    power_mw_hz: F64  # (P,)

    @property
    def power_dbm_hz(self) -> F64:
        return 10 * np.log10(np.maximum(self.power_mw_hz, _FLOOR))

    def within(self, half_hz: float) -> "Spectrum":
        """The part no further from the carrier than this."""
        here = np.abs(self.frequency_hz) <= half_hz
        return Spectrum(self.frequency_hz[here], self.power_mw_hz[here])


def recordings(data: Dataset, row: int, receivers: Sequence[int]) -> Iterator[IQ]:
    """(N,) IQ in sqrt(mW) of each of these receivers of one row of a dataset, one after the other.

    If the dataset has none they are computed again: a sample depends on the configuration and its index alone.
    """
    if "iq" in data.fields:
        stored = data.rows(row, row + 1, ("iq",))["iq"][0].numpy()
        yield from (stored[receiver] for receiver in receivers)
        return
    index = int(data.rows(row, row + 1, ("index",))["index"][0])
    config = from_mapping(data.manifest.get("config") or {})
    batch = make_transmissions(config, make_scenes(config, np.array([index], np.int64)))
    places = {int(receiver): place for place, receiver in enumerate(batch.links.receiver)}
    if not places.keys() >= set(receivers):
        raise ConfigError(
            f"sample {index} differs in this version of brim",
            code="conflict",
            hint="use the version that made the dataset",
        )
    table, peak = make_table(config, batch.messages, 0)
    unit = milliwatt_units(noise_dbm(config))
    for receiver in receivers:
        signal = receive(config, batch.links, places[receiver], table, float(scale(config, peak)))
        yield record(config, signal, index, receiver).mul_(unit).numpy()


def welch(iq: IQ, points: int) -> Spectrum:
    """Welch's method: the mean over Hann windows of `points` samples that overlap by half."""
    window = np.hanning(points + 1)[:-1]
    segments = np.lib.stride_tricks.sliding_window_view(iq, points)[:: points // 2]
    power = np.zeros(points)
    for segment in segments:
        power += np.abs(np.fft.fft(segment * window)) ** 2
    power /= len(segments) * SAMPLE_RATE_HZ * (window**2).sum()
    return Spectrum(np.fft.fftshift(np.fft.fftfreq(points, 1 / SAMPLE_RATE_HZ)), np.fft.fftshift(power))


def sample(data: Dataset, row: int) -> dict[str, Any]:
    """One row of a dataset by the names of the API; values may be infinite or NaN.

    Spectra are in dBm/Hz; if the records cannot be computed again there are none, and `note` says why.
    """
    fields = {name: tensor[0].numpy() for name, tensor in data.rows(row, row + 1, _ROW).items()}
    heard = np.nonzero(fields["present"])[0].tolist()
    note = None
    try:
        spectra = _spectra(data, row, heard)
    except ConfigError as failure:
        spectra, note = {}, f"no spectra: {failure}"
    stations = fixed_receivers(data)
    measured = column(data.manifest, fields["features"], "features", "snr_db")
    link = column(data.manifest, fields["truth"], "truth", "link_snr_db")
    receivers = [
        {
            "name": str(stations[at]["name"]) if stations else f"receiver {at}",
            **_place(fields["receivers"][at]),
            "snr_db": float(measured[at]) if fields["present"][at] else None,
            "link_snr_db": float(link[at]),
            "heard": bool(fields["present"][at]),
            "spectrum": spectra.get(at),
        }
        for at in np.nonzero(fields["valid"])[0].tolist()
    ]
    return {
        "index": row,
        "attempt": int(fields["index"]),
        "transmitter": _place(fields["transmitter"]),
        "gdop": float(fields["gdop"]),
        "crlb_m": float(fields["crlb_m"]),
        "receivers": receivers,
        "note": note,
    }


def _spectra(data: Dataset, row: int, heard: list[int]) -> dict[int, dict[str, Any]]:
    """By receiver; one record at a time, since each takes some MB."""
    noise_dbm = data.manifest.get("noise_dbm")
    density = None if noise_dbm is None else round(noise_dbm - 10 * float(np.log10(CHANNEL_HZ)), 2)
    out = {}
    for receiver, iq in zip(heard, recordings(data, row, heard), strict=True):
        spectrum = welch(iq, SPECTRUM_POINTS).within(SPECTRUM_HALF_HZ - 1)
        out[receiver] = {
            "frequency_hz": spectrum.frequency_hz.round(2).tolist(),
            "power_db": spectrum.power_dbm_hz.round(2).tolist(),
            "noise_db": density,
        }
    return out


def _place(position: Any) -> dict[str, float]:
    return {name: float(value) for name, value in zip(("lat", "lon", "alt_m"), position, strict=True)}

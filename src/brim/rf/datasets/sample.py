"""One sample of a dataset to look at: where everybody is, how well each receiver heard, and its spectrum."""

from typing import Any

import numpy as np

from brim.engine.storage import Dataset
from brim.errors import ConfigError
from brim.rf.config import CHANNEL_HZ
from brim.rf.datasets.inspect import fixed_receivers, named_columns
from brim.rf.datasets.recording import recordings, welch

SPECTRUM_HALF_HZ = 25_000.0  # shown around the carrier: the 12.5 kHz channel and as much noise again on either side
SPECTRUM_POINTS = 2_048  # of a window: 97.7 Hz a bin, of which 511 lie within
_ROW = ("index", "transmitter", "receivers", "valid", "present", "features", "truth", "gdop", "crlb_m")


def sample(data: Dataset, row: int) -> dict[str, Any]:
    """One row of a dataset, by the names of the API; what is not finite stays so.

    Spectra are in dBm/Hz; where the records cannot be made again there are none, and `note` says why.
    """
    found = {name: tensor[0].numpy() for name, tensor in data.rows(row, row + 1, _ROW).items()}
    heard = np.nonzero(found["present"])[0].tolist()
    note = None
    try:
        spectra = _spectra(data, row, heard)
    except ConfigError as failure:
        spectra, note = {}, f"no spectra: {failure}"
    stations = fixed_receivers(data)
    measured, link = _column(data, found, "features", "snr_db"), _column(data, found, "truth", "link_snr_db")
    receivers = [
        {
            "name": str(stations[at]["name"]) if stations else f"receiver {at}",
            **_place(found["receivers"][at]),
            "snr_db": float(measured[at]) if found["present"][at] else None,
            "link_snr_db": float(link[at]),
            "heard": bool(found["present"][at]),
            "spectrum": spectra.get(at),
        }
        for at in np.nonzero(found["valid"])[0].tolist()
    ]
    return {
        "index": row,
        "attempt": int(found["index"]),
        "transmitter": _place(found["transmitter"]),
        "gdop": float(found["gdop"]),
        "crlb_m": float(found["crlb_m"]),
        "receivers": receivers,
        "note": note,
    }


def _spectra(data: Dataset, row: int, heard: list[int]) -> dict[int, dict[str, Any]]:
    """By receiver; one record at a time, since each takes some MB."""
    noise_dbm = data.manifest.get("noise_dbm")
    density = None if noise_dbm is None else round(noise_dbm - 10 * float(np.log10(CHANNEL_HZ)), 2)
    out = {}
    for receiver, iq in zip(heard, recordings(data, row, heard), strict=True):
        found = welch(iq, SPECTRUM_POINTS).within(SPECTRUM_HALF_HZ - 1)
        out[receiver] = {
            "frequency_hz": found.frequency_hz.round(2).tolist(),
            "power_db": found.power_dbm_hz.round(2).tolist(),
            "noise_db": density,
        }
    return out


def _column(data: Dataset, row: dict[str, Any], key: str, name: str) -> Any:
    """(R,) one quantity of every receiver; the mean over the chunks where there are statistics."""
    values = row[key][:, [known for known, _ in named_columns(data.manifest, key)].index(name)]
    return values[:, 0] if values.ndim == 2 else values


def _place(position: Any) -> dict[str, float]:
    return {name: float(value) for name, value in zip(("lat", "lon", "alt_m"), position, strict=True)}

"""What a dataset holds, for charts and a map: counts, histograms, and transmitters spread evenly over its rows."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.report.svg import Axis, num_bins
from brim.rf.datasets.inspect import Columns, fixed_receivers, survey

MAX_TRANSMITTERS = 2_000


def statistics(path: Path | str) -> dict[str, Any]:
    """Of all that is written so far, by the names of the API; what is not finite stays so.

    Counts are of every sample. Histograms are of at most `inspect.MAX_KEPT` samples, evenly taken; that of the SNR
    counts each receiver that heard one.
    """
    found = survey(path, verify=False)
    summary, columns = found.summary, found.columns
    return {
        "samples": summary.samples,
        "complete": summary.complete,
        "attempted": summary.attempted,
        "acceptance_rate": summary.acceptance_rate,
        "rejected": summary.rejected,
        "histograms": {
            "snr_db": histogram(columns.measured_snr_db, "dB"),
            "gdop": histogram(columns.gdop, "1"),
            "crlb_m": histogram(columns.crlb_m, "m"),
        },
        "receivers": [
            {"name": str(one["name"]), "lat": one["lat"], "lon": one["lon"], "alt_m": one["alt"]}
            for one in fixed_receivers(found.data)
        ],
        "transmitters": _transmitters(columns, summary.samples),
    }


def histogram(values: NDArray[Any], unit: str) -> dict[str, Any]:
    """Edges and counts of the finite ones; bins grow by a factor where values span decades, but for decibels."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"edges": [0.0, 1.0], "counts": [0], "unit": unit}
    axis = Axis.linear(float(finite.min()), float(finite.max())) if unit == "dB" else Axis.fitting(finite)
    edges = axis.edges(num_bins(finite))
    counts, _ = np.histogram(finite, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "unit": unit}


def _transmitters(columns: Columns, samples: int) -> list[dict[str, Any]]:
    kept = len(columns.gdop)
    if not kept:
        return []
    step = -(-samples // kept)  # between the rows that were kept: the first of each `step`
    chosen = np.arange(0, kept, max(1, -(-kept // MAX_TRANSMITTERS)))
    return [
        {
            "index": at * step,
            "lat": float(columns.transmitter[at, 0]),
            "lon": float(columns.transmitter[at, 1]),
            "snr_db": float(columns.best_snr_db[at]),
            "gdop": float(columns.gdop[at]),
            "crlb_m": float(columns.crlb_m[at]),
        }
        for at in chosen.tolist()
    ]

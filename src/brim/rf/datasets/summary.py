"""Summary of a dataset without loading it: counts, bounds, quantiles and histograms, read shard by shard.

Axes: S samples kept, M records (one heard receiver of one kept sample), R receivers. Counts and bounds cover every
sample; quantiles every `step`-th one, so that memory does not grow with the dataset.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.engine.device import worker_count
from brim.engine.storage import MANIFEST, Dataset
from brim.errors import DatasetError
from brim.report.svg import ChartAxis, num_bins
from brim.rf.features import FEATURES, UNKNOWN_SIGMA_US
from brim.rf.generation.rows import TRUTH

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
ShardProgress = Callable[[int, int], None]  # called with (shards done, all shards)

MAX_KEPT = 200_000  # samples the quantiles are taken from
MAX_TRANSMITTERS = 2_000  # in the statistics
MAX_SITED = 500  # samples whose receivers are kept
SITE = ("name", "lat", "lon", "alt")  # what the manifest says of a receiver
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
_FIELDS = ("features", "truth", "valid", "present", "receivers", "transmitter", "reference", "gdop", "crlb_m")
_DEFAULTS = {"features": FEATURES, "truth": TRUTH}
_MEAN = 0  # place of the mean among the statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of a dataset, as the command and the page show it."""

    dataset: str
    format_version: int
    complete: bool
    verified: bool  # every shard's checksum was compared
    created: str
    brim: str | None
    torch: str | None
    device: str | None
    dataset_type: str | None
    waveform: str | None
    seed: int | None
    samples: int
    attempted: int | None
    rejected: dict[str, int]  # by reason
    acceptance_rate: float | None
    records: int  # receivers that heard, over all samples
    receivers_per_sample: dict[str, float] | None  # of those that heard: min, mean, max
    snr_db: dict[str, dict[str, float] | None]  # link, truth, measured → quantiles
    gdop: dict[str, float] | None
    crlb_m: dict[str, float] | None
    quantiles_from: int  # samples
    transmitters: dict[str, list[float]] | None  # lat, lon, alt → lowest and highest
    receivers: dict[str, list[float]] | None
    bytes: int
    shards: int
    throughput: dict[str, Any] | None  # as generation reported it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Values of the kept samples, for quantiles and charts."""

    transmitter: F64  # (S, 3) lat, lon in degrees, alt in metres
    gdop: F32  # (S,)
    crlb_m: F32  # (S,)
    best_snr_db: F32  # (S,) measured by the receiver that heard best
    sites: F64  # (·, 3) receivers of at most MAX_SITED samples, with repetitions
    link_snr_db: F32  # (M,) mean of the link
    truth_snr_db: F32  # (M,) realised
    measured_snr_db: F32  # (M,)
    arrival_error_us: F32  # (≤ M,) measured minus true arrival difference, where one could be measured


@dataclass(frozen=True, slots=True)
class Survey:
    """A dataset read once: its summary and the columns behind it."""

    data: Dataset
    summary: Summary
    columns: Columns


def inspect(path: Path | str, *, verify: bool = True, progress: ShardProgress | None = None) -> Summary:
    """Summarise a dataset; verify compares every shard with its checksum."""
    return survey(path, verify=verify, progress=progress).summary


def survey(path: Path | str, *, verify: bool = True, progress: ShardProgress | None = None) -> Survey:
    """Summarise a dataset and keep what its charts need."""
    data = open_dataset(path)
    steps = tuple(max(1, -(-len(data) // limit)) for limit in (MAX_KEPT, MAX_SITED))
    firsts = accumulate((entry.items for entry in data.shards), initial=0)
    parts = []
    with ThreadPoolExecutor(worker_count()) as pool:  # hashing and page faults let other threads run
        read = partial(_read, data, steps, verify)
        for part in pool.map(read, range(len(data.shards)), firsts):
            parts.append(part)
            if progress is not None:
                progress(len(parts), len(data.shards))
    columns = _join(part.columns for part in parts)
    return Survey(data, _summary(data, parts, columns, verify), columns)


def open_dataset(path: Path | str) -> Dataset:
    """Open a dataset of radio samples; any other kind is rejected."""
    data = Dataset(path)
    kind = data.manifest.get("kind")
    if kind != "rf":
        raise DatasetError(
            f'{data.place} holds kind={kind!r}, expected "rf"',
            code="wrong_kind",
            hint="give a dataset made with {rf generate}",
        )
    return data


def fixed_receivers(data: Dataset) -> list[dict[str, Any]]:
    """name, lat, lon and alt of a fixed network's receivers; empty if each sample has its own."""
    config = _mapping(data.manifest.get("config"))
    if config.get("use_random_receivers", True):
        return []
    stations = config.get("stations") or []
    return [station for station in stations if isinstance(station, dict) and station.keys() >= set(SITE)]


def named_columns(manifest: dict[str, Any], key: str) -> list[tuple[str, str]]:
    """(name, unit) of each column of `features` or `truth`."""
    listed = manifest.get(key)
    if listed is None:
        return list(_DEFAULTS[key])
    try:
        return [(str(entry["name"]), str(entry["unit"])) for entry in listed]
    except (TypeError, KeyError) as failure:
        raise DatasetError(
            f"{MANIFEST}: {key} must be a list of name and unit",
            code="damaged",
            hint="restore the manifest from a copy",
        ) from failure


def column(manifest: dict[str, Any], table: NDArray[Any], key: str, name: str) -> F32:
    """(…, R) one quantity of the receivers' `features` or `truth`; of a feature, its mean over the chunks."""
    known = [known for known, _ in named_columns(manifest, key)]
    if name not in known:
        raise DatasetError(
            f"{MANIFEST}: {key} has no {name}",
            code="other_version",
            hint="use the version of brim that made the dataset",
        )
    values: F32 = table[..., known.index(name), _MEAN] if key == "features" else table[..., known.index(name)]
    return values


@dataclass(frozen=True, slots=True)
class _FilePart:
    columns: Columns
    heard: tuple[int, int, int]  # fewest, sum and most receivers that heard a sample
    low: F64  # (2, 3) of transmitters and receivers
    high: F64  # (2, 3)


def _read(data: Dataset, steps: tuple[int, ...], verify: bool, number: int, first: int) -> _FilePart:
    rows = {name: tensor.numpy() for name, tensor in data.shard(number, _FIELDS, verify=verify).items()}
    kept, sited = (slice(-first % step, None, step) for step in steps)
    transmitter, receivers, valid = rows["transmitter"], rows["receivers"], rows["valid"]
    heard = rows["present"].sum(-1)
    groups = (transmitter, receivers[valid])
    return _FilePart(
        columns=Columns(
            transmitter=transmitter[kept].copy(),  # a view would keep the file mapped
            gdop=rows["gdop"][kept].copy(),
            crlb_m=rows["crlb_m"][kept].copy(),
            sites=receivers[sited][valid[sited]],
            **_records({name: array[kept] for name, array in rows.items()}, data.manifest),
        ),
        heard=(int(heard.min()), int(heard.sum()), int(heard.max())),
        low=np.stack([group.min(0) for group in groups]),
        high=np.stack([group.max(0) for group in groups]),
    )


def _records(rows: dict[str, NDArray[Any]], manifest: dict[str, Any]) -> dict[str, F32]:
    """Values of each record, packed over the receivers that heard; and the best one of each sample."""
    present = rows["present"]

    def packed(key: str, name: str) -> F32:
        values: F32 = column(manifest, rows[key], key, name)[present]
        return values

    measured = np.full(present.shape, -np.inf, np.float32)
    measured[present] = packed("features", "snr_db")
    others = (np.arange(present.shape[1]) != rows["reference"][:, None])[present]
    known = others & (packed("features", "arrival_sigma_us") < UNKNOWN_SIGMA_US)
    error = packed("features", "arrival_difference_us") - packed("truth", "arrival_difference_us")
    return {
        "link_snr_db": packed("truth", "link_snr_db"),
        "truth_snr_db": packed("truth", "snr_db"),
        "measured_snr_db": measured[present],
        "best_snr_db": measured.max(-1),
        "arrival_error_us": error[known],
    }


def _join(parts: Iterable[Columns]) -> Columns:
    listed = list(parts)

    def joined(name: str) -> NDArray[Any]:
        none = np.zeros((0, 3) if name in ("transmitter", "sites") else (0,), np.float32)
        return np.concatenate([getattr(part, name) for part in listed]) if listed else none

    return Columns(**{name: joined(name) for name in Columns.__slots__})


def _summary(data: Dataset, parts: list[_FilePart], columns: Columns, verify: bool) -> Summary:
    manifest, samples = data.manifest, len(data)
    config = _mapping(manifest.get("config"))
    # Counted at the end, or up to where a run was stopped
    counts, totals = _mapping(manifest.get("counts")), _mapping(manifest.get("totals"))
    attempted = counts.get("attempted", totals.get("attempted"))
    rejected = {**totals, **_mapping(counts.get("rejected"))}
    report = _mapping(manifest.get("report"))
    heard = [part.heard for part in parts]
    records = sum(total for _, total, _ in heard)
    return Summary(
        dataset=str(data.place),
        format_version=manifest["format_version"],
        complete=manifest["complete"],
        verified=verify,
        created=manifest["created"],
        brim=manifest.get("brim"),
        torch=manifest.get("torch"),
        device=manifest.get("device") or report.get("device"),
        dataset_type=config.get("dataset_type"),
        waveform=config.get("waveform"),
        seed=manifest.get("seed", config.get("seed")),
        samples=samples,
        attempted=attempted,
        rejected={reason: int(rejected[reason]) for reason in ("receivers", "gdop") if reason in rejected},
        acceptance_rate=samples / attempted if attempted else None,
        records=records,
        receivers_per_sample={
            "min": min(low for low, _, _ in heard),
            "mean": records / samples,
            "max": max(high for _, _, high in heard),
        }
        if samples
        else None,
        snr_db={
            "link": _quantiles(columns.link_snr_db),
            "truth": _quantiles(columns.truth_snr_db),
            "measured": _quantiles(columns.measured_snr_db),
        },
        gdop=_quantiles(columns.gdop),
        crlb_m=_quantiles(columns.crlb_m),
        quantiles_from=len(columns.gdop),
        transmitters=_bounds(parts, 0),
        receivers=_bounds(parts, 1),
        bytes=sum(entry.bytes for entry in data.shards) + data.place.size(MANIFEST),
        shards=len(data.shards),
        throughput=report or None,
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _quantiles(values: F32) -> dict[str, float] | None:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return None
    levels = np.quantile(finite, list(QUANTILES.values()))
    return {name: float(level) for name, level in zip(QUANTILES, levels, strict=True)}


def _bounds(parts: list[_FilePart], group: int) -> dict[str, list[float]] | None:
    if not parts:
        return None
    low = np.min([part.low[group] for part in parts], 0).tolist()
    high = np.max([part.high[group] for part in parts], 0).tolist()
    return {name: list(ends) for name, ends in zip(("lat", "lon", "alt"), zip(low, high, strict=True), strict=True)}


# Statistics for charts and a map


def statistics(path: Path | str) -> dict[str, Any]:
    """Statistics of the samples written so far, by the names of the API; values may be infinite or NaN.

    Counts cover every sample. Histograms cover at most MAX_KEPT samples, evenly spaced; that of the SNR counts each
    receiver that heard one.
    """
    view = survey(path, verify=False)
    summary, columns = view.summary, view.columns
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
            for one in fixed_receivers(view.data)
        ],
        "transmitters": _transmitters(columns, summary.samples),
    }


def histogram(values: NDArray[Any], unit: str) -> dict[str, Any]:
    """Edges and counts of the finite values; bins are logarithmic if values span decades, except for decibels."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"edges": [0.0, 1.0], "counts": [0], "unit": unit}
    axis = ChartAxis.linear(float(finite.min()), float(finite.max())) if unit == "dB" else ChartAxis.fitting(finite)
    edges = axis.edges(num_bins(finite))
    counts, _ = np.histogram(finite, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "unit": unit}


def _transmitters(columns: Columns, samples: int) -> list[dict[str, Any]]:
    kept = len(columns.gdop)
    if not kept:
        return []
    step = -(-samples // kept)  # between the rows that were kept
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

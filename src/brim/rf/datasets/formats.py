"""Export of a dataset for other tools: SigMF recordings, Parquet tables, one HDF5 file.

Axes: n samples of a shard, R receivers, M rows (one valid receiver of one sample). Shards are read one at a time and
compared with their checksums. A directory appears whole or not at all.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.config import nearest
from brim.engine.storage import Dataset
from brim.errors import ConfigError, DatasetError, StorageError
from brim.rf.config import CHANNEL_HZ, SAMPLE_RATE_HZ
from brim.rf.datasets.summary import ShardProgress, named_columns, open_dataset
from brim.rf.features import STATISTICS

FORMATS = ("sigmf", "parquet", "hdf5")
PACKAGES = {"parquet": "pyarrow", "hdf5": "h5py"}
SIGMF_VERSION = "1.2.0"  # of the specification
NAMESPACE = {"name": "brim", "version": "1.0.0", "optional": True}  # what the brim: keys of a recording belong to
SIGMF_EPOCH = datetime(2000, 1, 1)  # of the first attempt
SIGMF_SPACING_S = 20  # longer than any record
HDF5_ROOM = 1 << 20  # bytes for the structure of the file
COLUMNS = (
    "features", "truth", "valid", "present", "receivers", "transmitter", "reference", "gdop", "crlb_m", "index",
)  # fmt: skip
_PLACE = (("lat", "deg"), ("lon", "deg"), ("alt", "m"))
_UNITS = {"gdop": "1", "crlb_m": "m", "iq": "sqrt(mW)", "index": "1", "reference": "1"}


def export(path: Path | str, out: Path | str, fmt: str, *, progress: ShardProgress | None = None) -> dict[str, Any]:
    """Write a dataset in another format into a new directory; returns a report.

    sigmf    one recording per receiver that heard a sample (needs dataset_type iq_raw)
    parquet  a row per sample and receiver, a file per shard
    hdf5     one file with the tensors of all shards
    """
    if fmt not in FORMATS:
        raise ConfigError(f"is unknown; {nearest(fmt, FORMATS)}", field="format", value=fmt, code="unknown_choice")
    data, target = open_dataset(path), Path(out).resolve()
    _check_source(data, fmt)
    _check_target(data, target)
    write = {"sigmf": _write_sigmf, "parquet": _write_parquet, "hdf5": _write_hdf5}[fmt]
    with _directory(target) as place:
        records = write(data, place, progress or (lambda done, total: None))
        sizes = [file.stat().st_size for file in place.iterdir()]
    return {
        "dataset": str(data.place),
        "out": str(out),
        "format": fmt,
        "samples": len(data),
        "records": records,
        "files": len(sizes),
        "bytes": sum(sizes),
    }


# Before anything is written


def _check_source(data: Dataset, fmt: str) -> None:
    if fmt in PACKAGES:
        _package(PACKAGES[fmt], fmt)
    if not len(data):
        raise DatasetError(f"{data.place} holds no samples yet", code="empty", hint="continue it with {rf generate}")
    if fmt == "sigmf" and "iq" not in data.fields:
        raise ConfigError(
            f"needs IQ records, {data.place} has features only",
            field="format",
            value=fmt,
            code="conflict",
            hint="generate it with {dataset_type} iq_raw, or choose parquet or hdf5",
        )


def _package(name: str, fmt: str) -> Any:
    try:
        return import_module(name)
    except ImportError as failure:
        raise ConfigError(
            f"needs the package {name.partition('.')[0]}",
            field="format",
            value=fmt,
            code="missing_package",
            hint="install it with pip install 'brim[export]'",
        ) from failure


def _check_target(data: Dataset, target: Path) -> None:
    if data.place.path is not None and target.is_relative_to(data.path.resolve()):
        raise _occupied(f"{target} is inside the dataset {data.place}")
    try:
        if target.exists() and not target.is_dir():
            raise _occupied(f"{target} is a file, expected a directory")
        if target.exists() and any(target.iterdir()):
            raise _occupied(f"{target} is not empty")
    except OSError as failure:
        raise _storage_error(target, failure) from failure


@contextmanager
def _directory(target: Path) -> Iterator[Path]:
    """A temporary sibling that becomes the target at the end; after a failure nothing of it is left."""
    place = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        place.mkdir(parents=True)
        yield place
        place.replace(target)
    except BaseException as failure:
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()
        if isinstance(failure, OSError):
            raise _storage_error(target, failure) from failure
        raise


def _occupied(message: str) -> DatasetError:
    return DatasetError(message, field="out", code="occupied", hint="choose another {out}")


def _storage_error(target: Path, failure: OSError) -> StorageError:
    reason = failure.strerror or str(failure)
    return StorageError(f"{target}: cannot write, {reason}", hint="free some space or choose another {out}")


def _manifest_text(data: Dataset) -> str:
    """The manifest without its list of shards and without its path, which mean nothing in another format."""
    kept = {key: value for key, value in data.manifest.items() if key != "shards"}
    if isinstance(report := kept.get("report"), dict):
        kept["report"] = {key: value for key, value in report.items() if key != "dataset"}
    return json.dumps(kept, ensure_ascii=False)


# SigMF


def _write_sigmf(data: Dataset, place: Path, progress: ShardProgress) -> int:
    records = 0
    for number in range(len(data.shards)):
        rows = data.shard(number, verify=True)
        for sample, receiver in rows["present"].nonzero().tolist():
            _write_recording(data.manifest, {name: tensor[sample] for name, tensor in rows.items()}, receiver, place)
            records += 1
        progress(number + 1, len(data.shards))
    return records


def _write_recording(manifest: dict[str, Any], row: dict[str, Tensor], receiver: int, place: Path) -> None:
    """The record of one receiver of one sample, whose row this is."""
    config, iq = manifest.get("config") or {}, manifest.get("iq") or {}
    waveform, unit = config.get("waveform", "signal"), iq.get("unit", _UNITS["iq"])
    carrier_hz = round(float(config.get("frequency_mhz", 0.0)) * 1e6, 3)
    content = row["iq"][receiver].numpy().astype("<c8", copy=False).tobytes()
    names = [name for name, _ in named_columns(manifest, "truth")]
    about = {
        "core:datatype": "cf32_le",
        "core:sample_rate": iq.get("sample_rate_hz", SAMPLE_RATE_HZ),
        "core:version": SIGMF_VERSION,
        "core:num_channels": 1,
        "core:sha512": hashlib.sha512(content).hexdigest(),
        "core:description": f"Synthetic {waveform}; amplitude in {unit}, noise over the whole sampled band",
        "core:recorder": f"brim {manifest.get('brim', '')}".strip(),
        "core:extensions": [NAMESPACE],
        "brim:station": _station_name(config, receiver),
        "brim:unit": unit,
    }
    capture: dict[str, Any] = {
        "core:sample_start": 0,
        "core:datetime": _start(int(row["index"])),
        "core:geolocation": _point(row["receivers"][receiver]),
    }
    edges = {}
    if carrier_hz:
        capture["core:frequency"] = carrier_hz
        edges = {
            "core:freq_lower_edge": carrier_hz - CHANNEL_HZ / 2,
            "core:freq_upper_edge": carrier_hz + CHANNEL_HZ / 2,
        }
    annotation = {
        "core:sample_start": 0,
        "core:sample_count": row["iq"].shape[1],
        **edges,
        "core:label": waveform,
        "brim:index": int(row["index"]),
        "brim:seed": manifest.get("seed", config.get("seed")),
        "brim:receiver": receiver,
        "brim:reference": int(row["reference"]) == receiver,
        "brim:transmitter": _point(row["transmitter"]),
        "brim:gdop": _finite(float(row["gdop"])),
        "brim:crlb_m": _finite(float(row["crlb_m"])),
        "brim:truth": dict(zip(names, map(_finite, row["truth"][receiver].tolist()), strict=True)),
    }
    name = f"sample_{int(row['index'])}_rx{receiver}"
    (place / f"{name}.sigmf-data").write_bytes(content)
    meta = {"global": about, "captures": [capture], "annotations": [annotation]}
    text = json.dumps(meta, indent=2, ensure_ascii=False, allow_nan=False)
    (place / f"{name}.sigmf-meta").write_text(f"{text}\n", encoding="utf-8")


def _station_name(config: dict[str, Any], receiver: int) -> str:
    stations = config.get("stations") or []
    known = not config.get("use_random_receivers") and receiver < len(stations)
    return str(stations[receiver]["name"]) if known else f"rx{receiver}"


def _start(index: int) -> str:
    """A time of its own for each sample, so that recordings of different samples do not seem simultaneous."""
    moment = SIGMF_EPOCH + timedelta(seconds=SIGMF_SPACING_S * index)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000000000Z")


def _point(place: Tensor) -> dict[str, Any]:
    lat, lon, alt = place.tolist()
    return {"type": "Point", "coordinates": [lon, lat, alt]}


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


# Parquet


def _write_parquet(data: Dataset, place: Path, progress: ShardProgress) -> int:
    pa, pq = _package("pyarrow", "parquet"), _package("pyarrow.parquet", "parquet")
    text = _manifest_text(data)
    records = 0
    for number in range(len(data.shards)):
        columns = list(_table(data, number))
        fields = [
            pa.field(name, pa.from_numpy_dtype(values.dtype), nullable=False, metadata={"unit": unit})
            for name, unit, values in columns
        ]
        arrays = [pa.array(values) for _, _, values in columns]
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata={"brim": text}))
        pq.write_table(table, place / f"part-{number:06d}.parquet", compression="zstd")
        records += len(table)
        progress(number + 1, len(data.shards))
    return records


def _table(data: Dataset, number: int) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Name, unit and values (M,) of every column of a shard: a row per valid receiver of a sample."""
    rows = {name: tensor.numpy() for name, tensor in data.shard(number, COLUMNS, verify=True).items()}
    valid = rows["valid"]
    sample, receiver = np.nonzero(valid)
    yield "index", "1", rows["index"][sample]
    yield "receiver", "1", receiver.astype(np.int32)
    yield "present", "1", rows["present"][valid]
    for k, (name, unit) in enumerate(_PLACE):
        yield name, unit, rows["receivers"][valid][:, k]
    for k, (name, unit) in enumerate(_PLACE):
        yield f"tx_{name}", unit, rows["transmitter"][sample, k]
    yield "gdop", "1", rows["gdop"][sample]
    yield "crlb_m", "m", rows["crlb_m"][sample]
    yield "reference", "1", rows["reference"][sample].astype(np.int32)
    for k, (name, unit) in enumerate(named_columns(data.manifest, "features")):
        for s, statistic in enumerate(data.manifest.get("statistics") or STATISTICS):
            yield f"{name}_{statistic}", unit, rows["features"][valid, k, s]
    for k, (name, unit) in enumerate(named_columns(data.manifest, "truth")):
        yield f"truth_{name}", unit, rows["truth"][valid, k]


# HDF5


def _write_hdf5(data: Dataset, place: Path, progress: ShardProgress) -> int:
    """Reserves space before writing rows: a disk that fills up while HDF5 writes can end the whole process."""
    h5py = _package("h5py", "hdf5")
    path, first, records = place / "dataset.h5", 0, 0
    text = _manifest_text(data)
    _reserve(path, sum(entry.bytes for entry in data.shards) + len(text) + HDF5_ROOM)
    with _hdf5_failures():
        _lay_out(h5py, path, data, text)
        _reserve(path, path.stat().st_size)
        with h5py.File(path, "r+") as file:
            for number in range(len(data.shards)):
                rows = {name: tensor.numpy() for name, tensor in data.shard(number, verify=True).items()}
                last = first + len(rows["index"])
                for name, values in rows.items():
                    file[name][first:last] = values
                records += int(rows["valid"].sum())
                first = last
                progress(number + 1, len(data.shards))
    return records


def _lay_out(h5py: Any, path: Path, data: Dataset, text: str) -> None:
    """Everything but the rows, whose space is allocated and not filled."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(path, "w", libver=("v108", "latest")) as file:  # before v108 an attribute has at most 64 KiB
        file.attrs["manifest"] = text
        for name, (dtype, shape) in data.fields.items():
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            file.create_dataset(name, (len(data), *shape), kind, dcpl=layout.copy()).attrs.update(
                _attributes(data, name)
            )


def _reserve(path: Path, num_bytes: int) -> None:
    """Make the file system reserve the bytes, or fail now."""
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)


@contextmanager
def _hdf5_failures() -> Iterator[None]:
    """The library reports a write that fails while the file is closed as a RuntimeError."""
    try:
        yield
    except RuntimeError as failure:
        raise OSError(str(failure)) from failure


def _attributes(data: Dataset, name: str) -> dict[str, Any]:
    if name in ("features", "truth"):
        columns = named_columns(data.manifest, name)
        out: dict[str, Any] = {"names": [name for name, _ in columns], "units": [unit for _, unit in columns]}
        if name == "features":
            out["statistics"] = list(data.manifest.get("statistics") or STATISTICS)
    elif name in ("receivers", "transmitter"):
        out = {"names": [name for name, _ in _PLACE], "units": [unit for _, unit in _PLACE]}
    else:
        out = {"unit": _UNITS.get(name, "1")}
    return out | ({"axes": list(_AXES[name])} if name in _AXES else {})


_AXES = {
    "features": ("sample", "receiver", "feature", "statistic"),
    "truth": ("sample", "receiver", "quantity"),
    "receivers": ("sample", "receiver", "coordinate"),
    "transmitter": ("sample", "coordinate"),
    "iq": ("sample", "receiver", "time"),
    **dict.fromkeys(("valid", "present"), ("sample", "receiver")),
    **dict.fromkeys(("reference", "gdop", "crlb_m", "index"), ("sample",)),
}

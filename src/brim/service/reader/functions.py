"""What the reader process can be asked for. Arguments and results are JSON values; a path is one of our own.

The libraries are imported inside the functions, so that the API can name a function without loading them.
"""

import base64
import json
import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from brim.errors import BrimError, CheckpointError, Conflict, DatasetError, ImageError, NotFound, StorageError
from brim.jobs.worker import disk

JsonRecord = dict[str, Any]
MANIFEST: Final = "manifest.json"
_DRAWABLE: Final = (".geojson", "_labels.tif", ".png")  # endings of results whose outlines are drawn over an image
SETTLED_NS: Final = 2_000_000_000
MAX_SIZES: Final = 1000  # different sizes of images that statistics list


def import_libraries() -> None:
    """Import what the functions use; torch alone takes seconds."""
    import brim.jobs.registry.datasets
    import brim.rf.datasets.formats
    import brim.rf.datasets.records
    import brim.rf.datasets.summary
    import brim.rf.location.training
    import brim.rf.measurement.run
    import brim.segmentation.images.reading
    import brim.segmentation.images.writing
    import brim.segmentation.training.run
    import brim.sequences.corpus.packing
    import brim.sequences.training.run  # noqa: F401


# Datasets


def preview(path: str, kind: str, limit: int) -> list[JsonRecord]:
    """The first items of a dataset, small enough for a table."""
    previews = {"rf": _preview_samples, "images": _preview_images, "sequences": _preview_sequences}
    return previews.get(kind, _preview_recordings)(Path(path), limit)


def statistics(path: str, kind: str, stamp: list[int] | None = None) -> JsonRecord:
    """Counts and histograms of a dataset; figures is None if its files still have the given stamp."""
    place = Path(path)
    files = _image_files(place)[0] if kind == "images" else [place / MANIFEST]
    files = sorted(place.iterdir()) if kind == "recordings" else files
    current = _stamp(files)  # before the figures: files written meanwhile make them outdated, not wrong
    if current == stamp:
        return {"stamp": current, "figures": None}
    from brim.rf.datasets import statistics as rf_figures

    makers = {"rf": rf_figures, "images": _image_figures, "sequences": _sequence_figures}
    figures = makers.get(kind, _recording_figures)(place)
    return {"stamp": current, "figures": {"kind": kind, **figures}}


def sample(path: str, index: int) -> JsonRecord:
    """One radio sample with the spectrum of each receiver."""
    from brim.rf.datasets import open_dataset
    from brim.rf.datasets import sample as read_sample

    data = open_dataset(Path(path))
    if index >= len(data):
        known = f"it has {len(data)}, from 0 to {len(data) - 1}" if len(data) else "it has none yet"
        raise NotFound(f"there is no sample {index}: {known}")
    return read_sample(data, index)


def list_images(path: str) -> JsonRecord:
    """Each image and its mask, as paths below the dataset's folders of them; and when each folder last changed."""
    from brim.jobs.registry.datasets import image_folders
    from brim.segmentation.images import find_images
    from brim.segmentation.images.zarrs import SUFFIX

    images, masks = image_folders(Path(path))
    folders: dict[str, int] = {}
    by_stem: dict[tuple[Path, str], str] = {}
    for folder, inner, names in os.walk(path):
        inner[:] = [name for name in inner if not name.lower().endswith(SUFFIX)]
        place = Path(folder)
        changed_ns = place.stat().st_mtime_ns
        is_settled = time.time_ns() - changed_ns > SETTLED_NS
        folders[folder] = changed_ns if is_settled else 0  # a file may still be added at the same time
        if masks is not None and place.is_relative_to(masks):
            below = place.relative_to(masks)
            by_stem |= {(below, Path(name).stem): str(place / name) for name in sorted(names, reverse=True)}
    found = [file.relative_to(images) for file in find_images([images])]
    return {"folders": folders, "images": [(str(name), by_stem.get((name.parent, name.stem))) for name in found]}


def image_tile(
    path: str, image: str, mask: str | None, side: int, outlines: bool, results: str | None = None
) -> JsonRecord:
    """An image of a dataset as a PNG (base64) of at most that side, with the outlines of its mask; name and sizes.

    results  the folder of a prediction, whose outlines are drawn too
    """
    from brim.jobs.registry.datasets import image_folders
    from brim.rf.datasets import histogram as rf_histogram
    from brim.segmentation.images.writing import outlined

    name = Path(image)
    predicted = None if results is None else _result_of(name, Path(results))
    file = image_folders(Path(path))[0] / name
    tile = outlined(file, None if mask is None else Path(mask), side, outlines=outlines, predicted=predicted)
    about: JsonRecord = {"objects": None, "sizes": None}
    if tile.areas is not None:
        about["objects"] = len(tile.areas)
        about["sizes"] = rf_histogram(tile.areas, "pixels") if len(tile.areas) else None
    png = base64.b64encode(tile.png).decode()
    return {"png": png, "name": image, "width": tile.width, "height": tile.height, **about}


def _result_of(image: Path, results: Path) -> Path | None:
    """What a prediction wrote for an image, if it can be drawn over it."""
    place = results / image.parent
    return next((one for ending in _DRAWABLE if (one := place / f"{image.stem}{ending}").is_file()), None)


def list_files(path: str, kind: str) -> JsonRecord:
    """The files of a dataset as they are: names in a zip with their paths, and the manifest where there is one.

    Shards are compared with its checksums, at the first use of each.
    """
    place = Path(path)
    if kind == "images":
        from brim.jobs.registry.datasets import image_folders
        from brim.segmentation.images import find_images

        folders = [folder for folder in image_folders(place) if folder is not None]
        files = [(file.relative_to(place).as_posix(), str(file)) for file in find_images(folders)]
        return {"files": files, "manifest": None}
    if kind == "recordings":
        return {"files": [(file.name, str(file)) for file in sorted(place.iterdir())], "manifest": None}
    from brim.engine.storage import Dataset, check_bytes

    data = Dataset(place)
    for entry in data.shards:
        check_bytes(place / "shards" / entry.name, entry, checksum=None)
    table = [(file.name, str(file)) for file in (place / "items.json",) if file.is_file()]
    shards = [(f"shards/{entry.name}", str(place / "shards" / entry.name)) for entry in data.shards]
    return {"files": [*table, *shards], "manifest": data.manifest}


def export(path: str, folder: str, format: str, min_free_bytes: int) -> list[str]:
    """Write radio samples in another format to a new folder; the paths of its files."""
    from brim.rf.datasets import export as write
    from brim.rf.datasets import open_dataset

    place, out = Path(path), Path(folder)

    def check_room(need_bytes: int) -> None:
        hint = "free some space, or take format=files, which needs none"
        disk.check_room(out, need_bytes, min_free_bytes, "export", hint)

    check_room(sum(entry.bytes for entry in open_dataset(place).shards))
    try:
        out.mkdir(mode=0o700, parents=True)
        write(place, out / "export", format, progress=lambda done, total: check_room(0))
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or not cause.strerror:
            raise
        raise StorageError(f"the export cannot be written: {cause.strerror}", hint="free some space") from error
    return [str(file) for file in sorted((out / "export").iterdir())]


def look_model(path: str) -> JsonRecord:
    """Load the model that a run trained, and say what it is: kind, network, about."""
    from brim.jobs.registry.models import look

    return asdict(look(Path(path)))


# Uploads


def check_images(folder: str) -> JsonRecord:
    """Check and count images that were uploaded."""
    from brim.jobs.registry.datasets import look

    return asdict(look(Path(folder), "images"))


def pack_sequences(folder: str, data: str, id: str, labels: str | None) -> JsonRecord:
    """Pack sequences that were uploaded to DATA/datasets/ID."""
    from brim.jobs.registry.datasets import pack

    contents = pack(Path(folder), Path(data), id, labels=None if labels is None else Path(labels))
    assert contents is not None  # nothing stops it
    return asdict(contents)


# Recordings


def locate_recordings(
    folder: str, stations: str | None, power_dbm: float | None, format: str, config: JsonRecord
) -> str:
    """Measure the recordings in a folder and locate their transmission: GeoJSON, or the map page, as text."""
    from brim.config import read
    from brim.rf.location import collection, locate_inputs, map_page
    from brim.rf.measurement import MeasureConfig

    files = sorted(Path(folder).iterdir())
    table = None if stations is None else Path(stations)
    located = locate_inputs(files, table, power_dbm, measuring=read(MeasureConfig, config))
    return map_page(located) if format == "html" else json.dumps(collection(located), separators=(",", ":"))


# Jobs


def check_job(kind: str, name: str, config: JsonRecord, datasets: list[str], run: str | None) -> int:
    """Check a job against the files it reads; the bytes it will take on disk."""
    from brim.jobs.kinds import KINDS, Inputs, Spec

    spec = Spec(kind, name, config)
    inputs = Inputs(datasets=tuple(map(Path, datasets)), run=None if run is None else Path(run))
    try:
        KINDS[kind].check(spec, inputs)
        return KINDS[kind].estimate_bytes(spec, inputs)
    except (DatasetError, ImageError) as error:  # its files are gone, or changed since it was listed
        raise Conflict(f"config.dataset_ids: {error}", field="config.dataset_ids") from error
    except CheckpointError as error:
        raise Conflict(f"config.run_id: {error}", field="config.run_id") from error


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        preview, statistics, sample, list_files, export, check_images, pack_sequences, check_job, locate_recordings,
        look_model, list_images, image_tile,
    )
}  # fmt: skip


WRITERS: Final = ("export", "pack_sequences", "check_job", "list_files")  # the others cannot write files


# Previews


def _preview_samples(path: Path, limit: int) -> list[JsonRecord]:
    from brim.rf.datasets import named_columns, open_dataset

    dataset = open_dataset(path)
    if not len(dataset):
        return []
    names = ("index", "transmitter", "receivers", "present", "features", "gdop", "crlb_m")
    rows = {name: tensor.numpy() for name, tensor in dataset.rows(0, limit, names).items()}
    snr = [name for name, _ in named_columns(dataset.manifest, "features")].index("snr_db")
    features = rows["features"][:, :, snr]
    means = features[..., 0] if features.ndim == 3 else features
    return [_preview_sample(rows, means, row) for row in range(len(rows["index"]))]


def _preview_sample(rows: JsonRecord, snr_db: Any, row: int) -> JsonRecord:
    heard = rows["present"][row].nonzero()[0]
    receivers = [{**_position(rows["receivers"][row][r]), "snr_db": _number(snr_db[row][r])} for r in heard]
    return {
        "index": int(rows["index"][row]),
        "transmitter": _position(rows["transmitter"][row]),
        "receivers_heard": len(receivers),
        "receivers": receivers,
        "snr_db": max((one["snr_db"] for one in receivers if one["snr_db"] is not None), default=None),
        "gdop": _number(rows["gdop"][row]),
        "bound_m": _number(rows["crlb_m"][row]),
    }


def _position(position: Any) -> JsonRecord:
    return {name: _number(value) for name, value in zip(("lat_deg", "lon_deg", "alt_m"), position, strict=True)}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _preview_images(path: Path, limit: int) -> list[JsonRecord]:
    files, folder, _ = _image_files(path)
    sizes = [(file.relative_to(folder).as_posix(), *_image_size(file)) for file in files[:limit]]
    return [{"name": name, "width": width, "height": height} for name, width, height in sizes]


def _preview_sequences(path: Path, limit: int) -> list[JsonRecord]:
    from brim.sequences.corpus.packed import Corpus

    corpus = Corpus.open(path)
    classes = corpus.classes
    return [
        {"id": id, "frames": int(frames), "label": classes[int(label)] if int(label) >= 0 else None}
        for id, frames, label in zip(corpus.ids[:limit], corpus.lengths[:limit], corpus.labels[:limit], strict=True)
    ]


def _preview_recordings(path: Path, limit: int) -> list[JsonRecord]:
    from brim.jobs.registry.datasets import recording_files

    return [{"name": file.name, "bytes": file.stat().st_size} for file in recording_files(path)[:limit]]


# Statistics


def _recording_figures(place: Path) -> JsonRecord:
    from brim.jobs.registry.datasets import recording_files

    files = recording_files(place)
    return {"items": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _stamp(files: Iterable[Path]) -> list[int]:
    """Number, bytes, newest time and inodes of files: differs once they have changed."""
    number = num_bytes = newest = inodes = 0
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116  # of thousands: a Path takes twice as long
        except OSError:
            continue
        number, num_bytes, newest = number + 1, num_bytes + status.st_size, max(newest, status.st_mtime_ns)
        inodes ^= status.st_ino
    return [number, num_bytes, newest, inodes]


def _image_figures(place: Path) -> JsonRecord:
    files, _, masks = _image_files(place)
    sizes = Counter(map(_image_size, files))
    unreadable = sizes.pop((None, None), 0)
    common = [{"width": w, "height": h, "count": count} for (w, h), count in sizes.most_common(MAX_SIZES)]
    num_masks = len(files) if masks is not None else 0
    return {"items": len(files), "masks": num_masks, "sizes": common, "unreadable": unreadable}


def _sequence_figures(place: Path) -> JsonRecord:
    from brim.rf.datasets import histogram
    from brim.sequences.corpus.packed import Corpus

    corpus = Corpus.open(place)
    counts = Counter(corpus.labels.tolist())
    return {
        "items": len(corpus),
        "features": corpus.dim,
        "classes": {name: counts[number] for number, name in enumerate(corpus.classes)},
        "unlabelled": counts[-1],
        "histograms": {"frames": histogram(corpus.lengths.numpy(), "frames")},
    }


# Helpers


def _image_files(place: Path) -> tuple[list[Path], Path, Path | None]:
    """The images, the folder they are in, and that of the masks."""
    from brim.jobs.registry.datasets import image_folders
    from brim.segmentation.images import find_images

    images, masks = image_folders(place)
    return find_images([images]), images, masks


def _image_size(file: Path) -> tuple[int | None, int | None]:
    """Width and height in pixels; neither if it cannot be read. Mapped: a TIFF may have them at its end."""
    from brim.segmentation.images import image_size

    try:
        with file.open("rb") as opened:
            return image_size(memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)), file.name)
    except (OSError, ValueError, BrimError):  # ValueError: an empty file cannot be mapped
        return None, None

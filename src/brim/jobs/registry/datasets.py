"""Datasets that no job made: checked, counted and listed.

Radio datasets and images stay where they are: deleting such a dataset only removes its row. A folder of sequences
is packed into the data directory. Images are a folder of them, or a folder with `images` and `masks` in it.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import Conflict, DatasetError, StorageError
from brim.jobs.worker.process import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.jobs.store import Catalogue, DatasetKind, DatasetRow, DatasetState
    from brim.sequences.corpus.packing import PackProgress

log = logging.getLogger("brim")

KINDS: Final = ("rf", "images", "sequences", "recordings")
IMAGES: Final = "images"
MASKS: Final = "masks"

_PACKING, _LOCK = ".packing", ".lock"  # in uploads: a corpus that is being packed, held by whoever packs it

# What files begin with that the readers of segmentation know; the rest of a file is read when it is used.
_BEGINNINGS = (
    *(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"BM", b"GIF8"),
    *(b"RIFF", b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    items: int  # samples, images or sequences
    bytes: int
    about: dict[str, Any] = field(default_factory=dict)
    state: "DatasetState" = "ready"


def add(
    catalogue: "Catalogue",
    data: Path,
    *,
    name: str,
    path: Path,
    kind: "DatasetKind",
    labels: Path | None = None,
    progress: Callable[["PackProgress"], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> "DatasetRow | None":
    """List the content of a path as a dataset; None if packing it was stopped."""
    path = _checked(path, data)
    if kind != "sequences" or (path / "manifest.json").is_file():
        return _list(catalogue, name, kind, str(path), look(path, kind))
    from brim.jobs.store import new_id

    id = new_id()
    packed = pack(path, data, id, labels=labels, progress=progress, stop=stop)
    if packed is None:
        return None
    try:
        return _list(catalogue, name, kind, f"datasets/{id}", packed, id)
    except BaseException:
        _discard(data / "datasets" / id)
        raise


def look(path: Path, kind: "DatasetKind") -> DatasetSummary:
    """Check and count the content of a path; if it is missing, foreign or empty, raise a DatasetError."""
    if not path.is_dir():
        raise DatasetError(f"{path} is not a directory", hint=f"give {_EXPECTED[kind]}")
    looks = {"rf": _look_at_rf, "images": _look_at_images, "sequences": _look_at_sequences}
    return looks.get(kind, _look_at_recordings)(path)


def pack(
    folder: Path,
    data: Path,
    id: str,
    *,
    labels: Path | None = None,
    progress: Callable[["PackProgress"], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> DatasetSummary | None:
    """Pack a folder or file of sequences to DATA/datasets/ID, completely or not at all; None if stopped."""
    from brim.sequences.config import SourceConfig
    from brim.sequences.corpus.packing import pack as pack_sequences

    unfinished, finished = data / "uploads" / f"{id}{_PACKING}", data / "datasets" / id
    lock = FileLock(unfinished.with_suffix(_LOCK))
    with _in_words(unfinished):
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        lock.take()
    try:
        source = SourceConfig(device="cpu")  # the GPU is the workers' and the predictors'
        report = pack_sequences(folder, unfinished, labels=labels, source=source, progress=progress, stop=stop)
        if not report.complete:
            return None
        with _in_words(finished):
            finished.parent.mkdir(parents=True, exist_ok=True)
            unfinished.rename(finished)
    finally:
        _discard(unfinished)
        _give_back(lock)
    return _look_at_sequences(finished)


def remove(catalogue: "Catalogue", data: Path, id: str) -> None:
    """Delete a dataset that nothing uses: its files if the service owns them, then its row."""
    _remove_files(catalogue, data, catalogue.datasets.retire(id))


def tidy(catalogue: "Catalogue", data: Path) -> None:
    """Finish deletions and discard packings that a killed process left unfinished."""
    for row in catalogue.datasets.retired():
        try:
            _remove_files(catalogue, data, row)
        except StorageError as failure:
            log.warning("%s; it stays for the next start", failure)
    for file in (data / "uploads").glob(f"*{_LOCK}"):
        lock = FileLock(file)
        try:
            if lock.take():
                _discard(file.with_suffix(_PACKING))
                _give_back(lock)
        except OSError as failure:
            log.warning("%s: %s; it stays for the next start", file, failure.strerror)


def image_folders(path: Path) -> tuple[Path, Path | None]:
    """The folder of a dataset's images, and that of their masks if it has any."""
    if not (path / IMAGES).is_dir():
        return path, None
    return path / IMAGES, path / MASKS if (path / MASKS).is_dir() else None


# Each kind

_EXPECTED: Final = {
    "rf": "the directory of a dataset made by {rf generate}",
    "images": "a folder of images, or one with the folders images and masks",
    "sequences": "a folder or file of sequences, or a corpus made by {sequence pack}",
    "recordings": "a folder of recordings, with a stations.csv where they do not say where they were made",
}


def _look_at_rf(path: Path) -> DatasetSummary:
    from brim.engine.storage import check_bytes
    from brim.rf.datasets import open_dataset

    dataset = open_dataset(path)
    if not len(dataset):
        raise DatasetError(f"{path} holds no samples yet", hint="generate some with {rf generate} and {resume}")
    for entry in dataset.shards:
        check_bytes(path / "shards" / entry.name, entry, checksum=False)
    return DatasetSummary(
        items=len(dataset),
        bytes=sum(entry.bytes for entry in dataset.shards),
        about={"config": dataset.manifest.get("config"), "shards": len(dataset.shards)},
        state="ready" if dataset.manifest["complete"] else "partial",
    )


def _look_at_images(path: Path) -> DatasetSummary:
    from brim.segmentation.images import find_images
    from brim.segmentation.training import pair_files

    images, masks = image_folders(path)
    files = find_images([images])
    if not files:
        raise DatasetError(f"{path} holds no images", hint=f"give {_EXPECTED['images']}")
    if masks is not None:
        pairs = pair_files(images, masks)  # one mask for each image, or an error that names the odd one
        files += [pair.mask for pair in pairs]
    num_bytes = sum(map(_image_bytes, files))
    return DatasetSummary(
        items=len(files) // (1 + (masks is not None)), bytes=num_bytes, about={"masks": masks is not None}
    )


def _image_bytes(file: Path) -> int:
    """Size of an image file, after a look at its first bytes: a text named .png is rejected now, not hours later."""
    with _in_words(file), file.open("rb") as opened:
        start = opened.read(16)
        size = opened.seek(0, 2)
    if not start.startswith(_BEGINNINGS):
        fault = "is empty" if not size else "is no image, whatever its name says"
        raise DatasetError(f"{file} {fault}; mend it or take it out of the folder")
    return size


def _look_at_sequences(path: Path) -> DatasetSummary:
    from brim.sequences.corpus.packed import Corpus

    corpus = Corpus.open(path)
    about = {"frames": corpus.num_frames, "features": corpus.dim, "classes": list(corpus.classes)}
    about["labelled"] = int((corpus.labels >= 0).sum())
    return DatasetSummary(items=len(corpus), bytes=sum(entry.bytes for entry in corpus.dataset.shards), about=about)


def _look_at_recordings(path: Path) -> DatasetSummary:
    """Counted, not parsed: the job that measures them does that, confined."""
    files = recording_files(path)
    if not files:
        raise DatasetError(f"{path} holds no recordings", hint=f"give {_EXPECTED['recordings']}")
    with _in_words(path):
        num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return DatasetSummary(items=len(files), bytes=num_bytes, about={"stations": (path / "stations.csv").is_file()})


def recording_files(path: Path) -> list[Path]:
    """The recordings of a folder by name; a SigMF recording counts by its metadata."""
    with _in_words(path):
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return [file for file in files if file.suffix not in (".sigmf-data", ".csv", ".json")]


# Helpers


def _checked(path: Path, data: Path) -> Path:
    """A path as the catalogue stores it: absolute, UTF-8, and outside the service's own data directory."""
    path = path.resolve()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DatasetError(f"{str(path)!a} is not UTF-8; rename it") from None
    if path == data.resolve() or data.resolve() in path.parents:
        raise DatasetError(f"{path} lies in the service's own data directory; add what lies elsewhere")
    return path


def _list(
    catalogue: "Catalogue", name: str, kind: "DatasetKind", path: str, summary: DatasetSummary, id: str | None = None
) -> "DatasetRow":
    """List a dataset; one with an id is ours."""
    try:
        return catalogue.datasets.add(name=name, kind=kind, path=path, owned=id is not None, id=id, **asdict(summary))
    except Conflict as failure:
        raise Conflict(f"{path}: {failure}") from failure


def _remove_files(catalogue: "Catalogue", data: Path, row: "DatasetRow") -> None:
    place, trash = data / row.path, data / "trash" / row.id
    if row.owned:
        with _in_words(place):
            trash.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                place.rename(trash)  # at once: nobody finds half a dataset at its place
            if trash.exists():
                shutil.rmtree(trash)
    catalogue.datasets.forget(row.id)


def _give_back(lock: FileLock) -> None:
    lock.path.unlink(missing_ok=True)
    lock.release()


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _in_words(path: Path) -> "Iterator[None]":
    try:
        yield
    except OSError as failure:
        raise StorageError(f"{path}: {failure.strerror or failure}; check its permissions and the disk") from failure

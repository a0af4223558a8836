"""Opening sequences in whatever form they are: a packed corpus, a folder of .npy files, or anything that can be packed.

What is neither is packed once, with default settings, into the user's cache, and found there until it changes. What was
not used for a month is removed.
"""

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from brim.engine.storage import MANIFEST, cache_folder
from brim.errors import DatasetError, StorageError
from brim.sequences.corpus.folder import SequenceFolder
from brim.sequences.corpus.labels import LABELS
from brim.sequences.corpus.packed import Corpus
from brim.sequences.corpus.packing import PackProgress, pack
from brim.sequences.corpus.sequences import Sequences, digest
from brim.sequences.corpus.survey import list_files

log = logging.getLogger("brim")

_FORMAT = 1  # of what is packed from the same files


class PackingStopped(Exception):
    """Files were not packed to their end, on request; nothing of them is kept."""


def open_sequences(
    path: Path | str | Sequences,
    progress: Callable[[PackProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Sequences:
    """Open a packed corpus, a folder of .npy files, or other files, which are packed; what is open stays as it is.

    progress and stop are those of packing, which raises PackingStopped.
    """
    if isinstance(path, Sequences):
        return path
    path = Path(path)
    if (path / MANIFEST).is_file():
        return Corpus.open(path)
    kind, names, _ = list_files(path)
    if kind == "npy" and path.is_dir():
        unpacked = SequenceFolder(path)
        for note in unpacked.notes:
            log.info("%s: %s", path, note)
        return unpacked
    return _open_packed(path, names, progress, stop)


def _open_packed(
    path: Path,
    names: list[str],
    progress: Callable[[PackProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> Corpus:
    folder = path if path.is_dir() else path.parent
    files = [folder / name for name in (*names, *([LABELS] if (path / LABELS).is_file() else []))]
    states = [(str(file.resolve()), file.stat()) for file in files]
    # the time of the last change cannot be set: a file whose content differs is another one
    marks = [(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states]
    place = _cache() / f"{path.resolve().stem[:40]}-{digest([_FORMAT, *marks])[:16]}"
    if (place / MANIFEST).is_file():
        try:
            return _use(place)
        except (DatasetError, StorageError) as failure:
            log.warning("what was packed before is not used (%s)", failure.message)
            shutil.rmtree(place, ignore_errors=True)
    if not (place / MANIFEST).is_file():
        log.info("%s: %d files are packed once, into %s", path, len(names), place)
        unfinished = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        try:
            report = pack(path, unfinished, progress=progress, stop=stop)
            if not report.complete:
                raise PackingStopped
            for note in report.notes:
                log.info("%s: %s", path, note)
            for skipped in report.skipped:
                log.warning("%s/%s %s", folder, skipped.file, skipped.fault)
            _move(unfinished, place)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return _use(place)


def _use(place: Path) -> Corpus:
    corpus = Corpus.open(place)
    corpus.dataset.verify(again=False)
    with suppress(OSError):
        os.utime(place)
    return corpus


def _move(unfinished: Path, place: Path) -> None:
    try:
        unfinished.rename(place)
    except OSError as failure:
        if not (place / MANIFEST).is_file():  # otherwise another process was first
            raise StorageError(f"{place} cannot be written: {failure.strerror}", hint="check the disk") from failure


def _cache() -> Path:
    """The folder of packed corpora."""
    folder = cache_folder("sequences")
    if folder is not None and os.access(folder, os.W_OK):
        return folder
    folder = Path(tempfile.gettempdir()) / f"brim-sequences-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as failure:
        raise DatasetError(
            f"there is no place for packed sequences: {failure}", hint="pack them yourself with {sequence pack}"
        ) from failure
    return folder

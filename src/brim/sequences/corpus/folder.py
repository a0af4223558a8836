"""The folder to pack: which .npy files it holds, what their headers say, and a fingerprint to know it again by.

Every header is read before anything is written or allocated.
"""

# Axes: T frames, D features

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.engine.pipeline import Pipeline, Stage
from brim.errors import DatasetError, StorageError
from brim.sequences.corpus.labels import Labels, find_labels
from brim.sequences.corpus.npy import NpyFile, read_header

_HEADER_READERS = 8  # waiting for a network disk, not computing
_CHUNK_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A file that cannot be packed."""

    file: str  # path below the folder
    fault: str  # in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What a folder holds, known from its headers alone."""

    path: Path
    files: tuple[NpyFile, ...]  # those that can be packed, sorted by path
    bad: tuple[Skipped, ...]
    labels: Labels
    dim: int
    fingerprint: dict[str, Any]  # differs when a file or a label does

    @property
    def nbytes(self) -> int:
        """Bytes of all frames in the files."""
        return sum(file.nbytes for file in self.files)


def survey(path: Path, labels: Path | str | None = None, *, skip_bad: bool = False) -> Folder:
    """Read every header below a folder; bad files are an error that names the first, or with skip_bad listed."""
    ids = list_npy(path)
    chosen = find_labels(path, ids, labels)
    found = dict(zip(chosen.of, _read_headers(path, list(chosen.of)), strict=True))
    good = [file for file in found.values() if isinstance(file, NpyFile)]
    bad = [Skipped(file=name, fault=fault) for name, fault in found.items() if isinstance(fault, str)]
    dim = _common_dim(good)
    bad += [Skipped(file=file.id, fault=_other_dim(file, dim, len(good))) for file in good if file.dim != dim]
    bad.sort(key=lambda skipped: skipped.file)
    good = [file for file in good if file.dim == dim]
    if bad and not (skip_bad and good):
        raise refusal(path, bad, "" if good else "none is left")
    marks = [(file.id, file.size, file.mtime_ns) for file in good] + [(skipped.file, 0, 0) for skipped in bad]
    return Folder(
        path=path, files=tuple(good), bad=tuple(bad), labels=chosen, dim=dim, fingerprint=_fingerprint(marks, chosen)
    )


def refusal(path: Path, bad: list[Skipped], left: str = "") -> DatasetError:
    """The error for files that cannot be packed: the first in full, the others counted."""
    more = f" ({len(bad)} bad files in all)" if len(bad) > 1 else ""
    step = left or "mend or remove it, or leave such files out with brim sequence pack --skip-bad"
    return DatasetError(f"{path / bad[0].file} {bad[0].fault}{more}; {step}")


def list_npy(path: Path) -> list[str]:
    """The .npy files below a folder as paths with /, sorted; hidden files and folders are left out."""
    if not path.is_dir():
        raise DatasetError(f"{path} is not a directory; give a folder of .npy sequences")
    found = []
    for place, files in _walk(path):
        below = "" if place == str(path) else os.path.relpath(place, path).replace(os.sep, "/") + "/"
        found += [below + name for name in files if name.endswith(".npy") and not name.startswith(".")]
    if not found:
        raise DatasetError(f"{path} holds no .npy file; give a folder of .npy sequences of shape [frames, features]")
    for name in found:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes that are no text, which no table can hold
            raise DatasetError(f"{path}: the file name {name!a} is not UTF-8; rename it")
    return sorted(found)


def _walk(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and the names in them; links are followed, but not back into a folder they came from."""
    came_by: dict[str, set[str]] = {str(path): {os.path.realpath(path)}}  # folder → real paths from the top to it
    for place, folders, files in os.walk(path, onerror=_unreadable, followlinks=True):
        above = came_by.pop(place)
        inner = {name: str(Path(place) / name) for name in folders if not name.startswith(".")}
        real = {name: os.path.realpath(folder) for name, folder in inner.items()}
        folders[:] = [name for name in inner if real[name] not in above]
        came_by |= {os.path.join(place, name): above | {real[name]} for name in folders}  # noqa: PTH118  as os.walk does
        yield place, files


def _unreadable(failure: OSError) -> None:
    reason = failure.strerror or failure
    raise StorageError(f"{failure.filename} cannot be read: {reason}; check its permissions") from failure


def _read_headers(path: Path, names: list[str]) -> Iterable[NpyFile | str]:
    def read(chunk: list[str]) -> list[NpyFile | str]:
        return [read_header(path / name, name) for name in chunk]

    stage = Stage(name="header", work=read, workers=_HEADER_READERS)
    chunks = (names[start : start + _CHUNK_FILES] for start in range(0, len(names), _CHUNK_FILES))
    with Pipeline(chunks, [stage]) as results:
        return [header for result in results for header in result]


def _common_dim(files: list[NpyFile]) -> int:
    """The number of features most files have: one odd file at the front must not make all others odd."""
    return Counter(file.dim for file in files).most_common(1)[0][0] if files else 0


def _other_dim(file: NpyFile, dim: int, total: int) -> str:
    return f"has {file.dim} features, most of the {total} files have {dim}"


def _fingerprint(marks: list[tuple[str, int, int]], labels: Labels) -> dict[str, Any]:
    rows = sorted((*mark, labels.of[mark[0]].name, labels.of[mark[0]].split) for mark in marks)
    text = json.dumps(rows, ensure_ascii=False).encode()
    return {"files": len(rows), "bytes": sum(row[1] for row in rows), "sha256": hashlib.sha256(text).hexdigest()}

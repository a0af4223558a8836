"""A folder of .npy sequences: its files and headers, a fingerprint that changes with them, and reading it unpacked."""

# Axes: T frames, D features

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.errors import DatasetError, StorageError
from brim.sequences.corpus.labels import Labels, find_labels, number_classes
from brim.sequences.corpus.npy import STORED, NpyFile, read_header
from brim.sequences.corpus.sequences import CountProgress, Sequences

_HEADER_READERS = 8  # waiting for a network disk, not computing
_CHUNK_FILES = 64
_REPAIR = "repair or remove the file, then start again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A file that cannot be packed."""

    file: str  # path below the folder
    fault: str  # continues a sentence that begins with the file


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSurvey:
    """The contents of a folder, known from the headers alone."""

    path: Path
    files: tuple[NpyFile, ...]  # those that can be packed, sorted by path
    bad: tuple[Skipped, ...]
    labels: Labels
    dim: int
    fingerprint: dict[str, Any]  # differs when a file or a label does


def survey(path: Path, labels: Path | str | None = None, *, skip_bad: bool = False) -> FolderSurvey:
    """Read every header below a folder; a bad file is an error that names the first, unless skip_bad lists them."""
    ids = list_npy(path)
    chosen = find_labels(path, ids, labels)
    headers = dict(zip(chosen.of, _read_headers(path, list(chosen.of)), strict=True))
    good = [file for file in headers.values() if isinstance(file, NpyFile)]
    bad = [Skipped(file=name, fault=fault) for name, fault in headers.items() if isinstance(fault, str)]
    dim = _common_dim(good)
    bad += [
        Skipped(file=file.id, fault=f"has {file.dim} features, most of the {len(good)} files have {dim}")
        for file in good
        if file.dim != dim
    ]
    bad.sort(key=lambda skipped: skipped.file)
    good = [file for file in good if file.dim == dim]
    if bad and not (skip_bad and good):
        raise bad_files(path, bad, any_left=bool(good))
    marks = [(file.id, file.size, file.mtime_ns) for file in good] + [(skipped.file, 0, 0) for skipped in bad]
    return FolderSurvey(
        path=path, files=tuple(good), bad=tuple(bad), labels=chosen, dim=dim, fingerprint=_fingerprint(marks, chosen)
    )


def bad_files(path: Path, bad: list[Skipped], *, any_left: bool = True) -> DatasetError:
    """The error for files that cannot be packed: the first in full, the others counted."""
    more = f" ({len(bad)} bad files in all)" if len(bad) > 1 else ""
    hint = "repair or remove it, or leave such files out with {skip_bad}" if any_left else "no good file is left"
    return DatasetError(f"{path / bad[0].file} {bad[0].fault}{more}", code="bad_files", hint=hint)


def list_npy(path: Path) -> list[str]:
    """The .npy files below a folder as paths with /, sorted; hidden files and folders are left out."""
    if not path.is_dir():
        raise DatasetError(f"{path} is not a directory; give a folder of .npy sequences")
    names = []
    for folder, files in _walk(path):
        below = "" if folder == str(path) else os.path.relpath(folder, path).replace(os.sep, "/") + "/"
        names += [below + name for name in files if name.endswith(".npy") and not name.startswith(".")]
    if not names:
        raise DatasetError(f"{path} holds no .npy file; give a folder of .npy sequences of shape [frames, features]")
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # undecodable bytes, which JSON cannot hold
            raise DatasetError(f"{path}: the file name {name!a} is not UTF-8; rename it")
    return sorted(names)


def _walk(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and the file names in them; links are followed, but not in circles."""
    ancestors: dict[str, set[str]] = {str(path): {os.path.realpath(path)}}  # folder → real paths from the top to it
    for folder, folders, files in os.walk(path, onerror=_unreadable, followlinks=True):
        above = ancestors.pop(folder)
        inner = {name: str(Path(folder) / name) for name in folders if not name.startswith(".")}
        real = {name: os.path.realpath(below) for name, below in inner.items()}
        folders[:] = [name for name in inner if real[name] not in above]
        ancestors |= {os.path.join(folder, name): above | {real[name]} for name in folders}  # noqa: PTH118  as os.walk does
        yield folder, files


def _unreadable(failure: OSError) -> None:
    reason = failure.strerror or failure
    raise StorageError(f"{failure.filename} cannot be read: {reason}; check its permissions") from failure


def _read_headers(path: Path, names: list[str]) -> list[NpyFile | str]:
    def read(chunk: list[str]) -> list[NpyFile | str]:
        return [read_header(path / name, name) for name in chunk]

    stage = Stage(name="header", work=read, workers=_HEADER_READERS)
    chunks = (names[start : start + _CHUNK_FILES] for start in range(0, len(names), _CHUNK_FILES))
    with Pipeline(chunks, [stage]) as results:
        return [header for result in results for header in result]


def _common_dim(files: list[NpyFile]) -> int:
    """The number of features that most files have."""
    return Counter(file.dim for file in files).most_common(1)[0][0] if files else 0


def _fingerprint(marks: list[tuple[str, int, int]], labels: Labels) -> dict[str, Any]:
    rows = sorted((*mark, labels.of[mark[0]].name, labels.of[mark[0]].split) for mark in marks)
    text = json.dumps(rows, ensure_ascii=False).encode()
    return {"files": len(rows), "bytes": sum(row[1] for row in rows), "sha256": hashlib.sha256(text).hexdigest()}


class SequenceFolder(Sequences):
    """A folder of .npy files that is not packed; every header is read and checked when it is opened."""

    def __init__(self, path: Path | str, labels: Path | str | None = None) -> None:
        self.path = Path(path)
        folder = survey(self.path, labels)
        known = [folder.labels.of[file.id] for file in folder.files]
        self.ids = tuple(file.id for file in folder.files)
        self.lengths = torch.tensor([file.length for file in folder.files])
        self.classes, numbers = number_classes([label.name for label in known])
        self.labels = torch.tensor(numbers)
        self.split = tuple(label.split for label in known)
        self.dim, self.fingerprint = folder.dim, folder.fingerprint
        kinds = {file.dtype.newbyteorder("=").name for file in folder.files}
        # one dtype for all batches: that of the files if they agree on one that training uses
        self.dtype = STORED.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32

    @cached_property
    def identity(self) -> dict[str, str | None]:
        return {
            "content_sha256": None,
            "source_sha256": self.fingerprint["sha256"],
            "items_sha256": self.table_digest(),
        }

    def read_item(self, index: int, out: Tensor) -> None:
        """Load one file; one that differs from its header, or holds NaN or Inf, is an error that names it."""
        file = self.path / self.ids[index]
        try:
            frames: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as failure:
            reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
            raise DatasetError(f"{file} cannot be read: {reason}", hint=_REPAIR) from failure
        if frames.shape != tuple(out.shape):
            raise DatasetError(
                f"{file} has shape {list(frames.shape)}, it had {list(out.shape)} when it was opened; start again"
            )
        with np.errstate(over="ignore"):  # too large a value becomes Inf, which is rejected below
            np.copyto(out.numpy(), frames, casting="unsafe")  # integers and float64 become the dtype of the batches
        low, high = torch.aminmax(out)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            frame = int((~torch.isfinite(out)).any(1).int().argmax())
            raise DatasetError(
                f"{file}: frame {frame} holds NaN, Inf or a value beyond {str(out.dtype)[6:]}", hint=_REPAIR
            )

    def verify(self, progress: CountProgress | None = None) -> None:
        """Read every file, looking for frames that are not finite."""

        def check(index: int) -> None:
            self.read_item(index, torch.empty(int(self.lengths[index]), self.dim, dtype=self.dtype))

        with ThreadPoolExecutor(worker_count()) as pool:
            for done, _ in enumerate(pool.map(check, range(len(self))), 1):
                if progress is not None:
                    progress(done, len(self))

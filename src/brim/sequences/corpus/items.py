"""The table of a corpus: one line for each sequence, in a JSON file whose checksum the manifest keeps."""

# Axes: n sequences

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.errors import DatasetError, StorageError
from brim.sequences.corpus.labels import SPLITS

TABLE = "items.json"

_REMAKE = "restore it from a copy, or pack the corpus again"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """What is known of each sequence.

    lengths  (n,)  int64  frames
    starts   (n,)  int64  first frame in the store
    labels   (n,)  int64  number of the class, -1 without one
    """

    ids: tuple[str, ...]
    lengths: Tensor
    starts: Tensor
    labels: Tensor
    split: tuple[str, ...]  # "train", "test" or nothing
    classes: tuple[str, ...]


def write_items(path: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Write the table atomically and synced; returns what the manifest has to say of it."""
    text = (json.dumps(columns, ensure_ascii=False, indent=0) + "\n").encode()
    file, temporary = path / TABLE, path / f".{TABLE}.tmp"
    try:
        with temporary.open("wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as failure:
        raise StorageError(
            f"{file}: cannot write, {failure.strerror or failure}; make room, then continue with --resume"
        ) from failure
    return {"name": TABLE, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def read_items(path: Path, entry: Any, num_frames: int) -> Items:
    """The table, once it is sure that it is the one that was written and fits the frames."""
    file = path / TABLE
    try:
        text = file.read_bytes()
    except FileNotFoundError as failure:
        raise DatasetError(f"{file} is missing; {_REMAKE}") from failure
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check the disk") from failure
    if not isinstance(entry, dict) or hashlib.sha256(text).hexdigest() != entry.get("sha256"):
        raise DatasetError(f"{file}: checksum differs from the manifest, it was altered after packing; {_REMAKE}")
    try:
        return _build(json.loads(text), num_frames)
    except (ValueError, KeyError, TypeError, RuntimeError) as failure:
        raise DatasetError(f"{file} does not fit its shards ({failure}); {_REMAKE}") from failure


def _build(columns: dict[str, Any], num_frames: int) -> Items:
    ids, split, classes = (tuple(map(str, columns[name])) for name in ("ids", "split", "classes"))
    lengths, starts, labels = (
        torch.tensor(columns[name], dtype=torch.int64) for name in ("lengths", "starts", "labels")
    )
    if len({len(column) for column in (ids, split, lengths, starts, labels)}) != 1 or len(set(ids)) < len(ids):
        raise ValueError("columns differ in length, or an id is there twice")
    if not len(ids) or int(lengths.min()) < 1 or not torch.equal(starts, lengths.cumsum(0) - lengths):
        raise ValueError("lengths and starts do not follow each other")
    if int(lengths.sum()) != num_frames:
        raise ValueError(f"its sequences have {int(lengths.sum())} frames, the shards {num_frames}")
    if int(labels.min()) < -1 or int(labels.max()) >= len(classes) or not set(split) <= {*SPLITS, ""}:
        raise ValueError("a label or split is not among those allowed")
    return Items(ids=ids, lengths=lengths, starts=starts, labels=labels, split=split, classes=classes)

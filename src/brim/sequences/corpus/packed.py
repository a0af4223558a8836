"""A packed corpus: the frames of all sequences in one store of shards, mapped from disk, and a table of sequences.

    CORPUS/manifest.json              kind, shape, the shards and their checksums
    CORPUS/items.json                 ids, starts, lengths, labels, split, classes; its checksum is in the manifest
    CORPUS/shards/NNNNNN.safetensors  "frames" (n, D); a sequence may continue in the next shard

packing.py writes one.
"""

# Axes: n sequences, N frames of the corpus, D features

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from brim.engine.storage import Dataset, LocalPlace, check_bytes
from brim.errors import DatasetError, ShardCorrupt, StorageError
from brim.sequences.corpus.labels import LABEL, SPLITS
from brim.sequences.corpus.sequences import CountProgress, Sequences, digest
from brim.sequences.corpus.source import STORED, Skipped

KIND = "sequences"
FRAMES = "frames"
TABLE = "items.json"

_REMAKE = "restore it from a copy, or pack the corpus again"


class Corpus(Sequences):
    """A corpus opened for reading, a ragged source of the engine.

    An unfinished, altered or foreign one is an error that gives the reason.
    """

    def __init__(self, dataset: Dataset, table: "_Table", dim: int, dtype: torch.dtype) -> None:
        """Use open() instead."""
        self.dataset, self.dim, self.dtype = dataset, dim, dtype
        self.path = dataset.path
        self.ids, self.lengths, self.starts, self.labels, self.split, self.classes, self.columns = table[:7]
        self.label_column = table.label_column
        self.num_items, self.num_frames = len(self.ids), len(dataset)
        self.fields = {"label": self.labels}
        self.description = f"{self.num_items} sequences, {self.num_frames} frames of {self.path}"
        layers = dataset.manifest.get("layers", 1)
        self.layers = layers if isinstance(layers, int) and layers > 0 and dim % layers == 0 else 1
        self.skipped = read_skipped(dataset.path, dataset.manifest)
        self._per_shard = int(dataset.manifest["items_per_shard"])
        self._mapped: dict[int, Tensor] = {}

    def _set_labels(self, labels: Tensor) -> None:
        self.labels, self.fields = labels, {"label": labels}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}  # maps belong to this process

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read manifest and table, and check every shard's size; verify() compares checksums too."""
        dataset = Dataset(path)
        manifest = dataset.manifest
        if manifest.get("kind") != KIND:
            raise DatasetError(f"{path} is not a packed corpus", hint="make one with {sequence pack}")
        if not manifest["complete"]:
            raise DatasetError(
                f"{path} is not packed to its end", code="incomplete", hint="continue {sequence pack} with {resume}"
            )
        dim, dtype = manifest.get("dim"), STORED.get(str(manifest.get("dtype")))
        if not isinstance(dim, int) or dtype is None:
            raise DatasetError(f"{path}: dim={dim!r} and dtype={manifest.get('dtype')!r} are not valid; pack it again")
        corpus = cls(dataset, _read_table(dataset.path, manifest.get("table"), len(dataset)), dim, dtype)
        corpus._check_shards()
        return corpus

    @cached_property
    def identity(self) -> dict[str, str | None]:
        content = [self.dim, str(self.dtype), *(entry.sha256 for entry in self.dataset.shards)]
        source = self.dataset.manifest.get("source")
        return {
            "content_sha256": digest(content),
            "source_sha256": source.get("sha256") if isinstance(source, dict) else None,
            "items_sha256": self.table_digest(),
        }

    def read_item(self, index: int, out: Tensor) -> None:
        np.copyto(out.numpy(), self.sequence(index).numpy(), casting="same_kind")

    def sequence(self, index: int) -> Tensor:
        """(T, D) frames of one sequence: mapped, or copied if it spans two shards."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        shard, row = divmod(start, self._per_shard)
        if row + length <= self._per_shard:
            return self._shard(shard)[row : row + length]
        out = torch.empty(length, self.dim, dtype=self.dtype)
        self.read(start, start + length, out)
        return out

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy the frames from start to stop; safe to call from several threads.

        out  (stop - start, D)  of the corpus's dtype, on the host
        """
        at = 0
        while start < stop:
            shard, row = divmod(start, self._per_shard)
            num = min(stop - start, self._per_shard - row)
            # NumPy: torch would start its own threads, which compete with the caller's
            np.copyto(out[at : at + num].numpy(), self._shard(shard)[row : row + num].numpy(), casting="same_kind")
            start, at = start + num, at + num

    def verify(self, progress: CountProgress | None = None) -> None:
        """Compare every shard's checksum with the manifest; progress counts shards."""
        self.dataset.verify(progress)
        for shard in range(len(self.dataset.shards)):
            self._shard(shard)

    def _check_shards(self) -> None:
        """Raise ShardCorrupt if a shard is missing or has another size than the manifest says."""
        for number, entry in enumerate(self.dataset.shards):
            last = number == len(self.dataset.shards) - 1
            if entry.items > self._per_shard or (entry.items < self._per_shard and not last):
                raise ShardCorrupt(
                    f"shard {entry.name}: {entry.items} frames listed, expected {self._per_shard}; pack again"
                )
            check_bytes(self.path / "shards" / entry.name, entry, checksum=False)
        self._shard(0)

    def _shard(self, number: int) -> Tensor:
        mapped = self._mapped.get(number)
        if mapped is None:
            mapped = self.dataset.shard(number, (FRAMES,))[FRAMES]
            if mapped.dtype != self.dtype or tuple(mapped.shape[1:]) != (self.dim,):
                name = self.dataset.shards[number].name
                raise ShardCorrupt(
                    f"shard {name}: frames are {mapped.dtype} {list(mapped.shape[1:])}, "
                    f"the manifest says {self.dtype} [{self.dim}]; pack the corpus again"
                )
            self._mapped[number] = mapped
        return mapped


def read_skipped(path: Path, manifest: dict[str, Any]) -> tuple[Skipped, ...]:
    """The files that were left out, from the manifest."""
    try:
        return tuple(Skipped(file=str(file), fault=str(fault)) for file, fault in manifest.get("skipped", ()))
    except (TypeError, ValueError) as failure:
        raise DatasetError(f"{path}: the manifest's list of skipped files was altered; pack it again") from failure


# The table


class _Table(NamedTuple):
    ids: tuple[str, ...]
    lengths: Tensor  # (n,) int64, frames
    starts: Tensor  # (n,) int64, first frame in the store
    labels: Tensor  # (n,) int64, number of the class, -1 without one
    split: tuple[str, ...]  # "train", "test" or ""
    classes: tuple[str, ...]
    columns: dict[str, tuple[str, ...]]
    label_column: str


def write_items(path: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Write the table atomically, synced; returns its entry in the manifest."""
    text = (json.dumps(columns, ensure_ascii=False, indent=0) + "\n").encode()
    LocalPlace(path).put_bytes(text, TABLE)
    return {"name": TABLE, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def _read_table(path: Path, entry: Any, num_frames: int) -> _Table:
    """Read the table and check it against the manifest and the number of frames."""
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
        return _build_table(json.loads(text), num_frames)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as failure:
        raise DatasetError(f"{file} does not fit its shards ({failure}); {_REMAKE}") from failure


def _build_table(columns: dict[str, Any], num_frames: int) -> _Table:
    ids, split, classes = (tuple(map(str, columns[name])) for name in ("ids", "split", "classes"))
    lengths, starts, labels = (
        torch.tensor(columns[name], dtype=torch.int64) for name in ("lengths", "starts", "labels")
    )
    if len({len(column) for column in (ids, split, lengths, starts, labels)}) != 1 or len(set(ids)) < len(ids):
        raise ValueError("columns differ in length, or an id occurs twice")
    if not len(ids) or int(lengths.min()) < 1 or not torch.equal(starts, lengths.cumsum(0) - lengths):
        raise ValueError("lengths and starts do not follow each other")
    if int(lengths.sum()) != num_frames:
        raise ValueError(f"its sequences have {int(lengths.sum())} frames, the shards {num_frames}")
    if int(labels.min()) < -1 or int(labels.max()) >= len(classes) or not set(split) <= {*SPLITS, ""}:
        raise ValueError("a label or split is not among those allowed")
    others = columns.get("columns", {})  # corpora of older versions have none
    more = {str(name): tuple(map(str, others[name])) for name in others}
    if any(len(values) != len(ids) for values in more.values()):
        raise ValueError("columns differ in length")
    return _Table(ids, lengths, starts, labels, split, classes, more, str(columns.get("label_column", LABEL)))

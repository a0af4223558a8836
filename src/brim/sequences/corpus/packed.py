"""A packed corpus: the frames of all sequences in one store of shards, mapped from disk, and a table of sequences.

    CORPUS/manifest.json            what it is, its shards and their checksums
    CORPUS/items.json               ids, starts, lengths, labels, split, classes
    CORPUS/shards/NNNNNN.safetensors  "frames" (n, D), a sequence may go on in the next shard

packing.py writes one. Reading knows no order and no batches.
"""

# Axes: n sequences, N frames of the corpus, D features

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from brim.engine.storage import Dataset, check_bytes
from brim.errors import ConfigError, DatasetError, ShardCorrupt
from brim.sequences.corpus.folder import Skipped
from brim.sequences.corpus.items import Items, read_items
from brim.sequences.corpus.npy import STORED

KIND = "sequences"
FRAMES = "frames"


class Corpus:
    """A corpus opened for reading; one that is unfinished, altered or something else fails here with its reason."""

    def __init__(self, dataset: Dataset, items: Items, dim: int, dtype: torch.dtype) -> None:
        """Store; open() makes one."""
        self.dataset, self.items, self.dim, self.dtype = dataset, items, dim, dtype
        self.path = dataset.path
        self.num_frames = len(dataset)
        self.skipped = read_skipped(dataset.path, dataset.manifest)
        self._per_shard = int(dataset.manifest["items_per_shard"])
        self._mapped: dict[int, Tensor] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read manifest and table, and look at every shard's size; verify() compares checksums too."""
        dataset = Dataset(path)
        manifest = dataset.manifest
        if manifest.get("kind") != KIND:
            raise DatasetError(f"{path} is no packed corpus; make one with brim sequence pack")
        if not manifest["complete"]:
            raise DatasetError(f'{path} is not packed to its end; go on with "brim sequence pack --resume"')
        dim, dtype = manifest.get("dim"), STORED.get(str(manifest.get("dtype")))
        if not isinstance(dim, int) or dtype is None:
            raise DatasetError(f"{path}: dim={dim!r} and dtype={manifest.get('dtype')!r} cannot be; pack it again")
        corpus = cls(dataset, read_items(dataset.path, manifest.get("table"), len(dataset)), dim, dtype)
        corpus._check_shards()
        return corpus

    def __len__(self) -> int:
        """Sequences."""
        return len(self.items.ids)

    @property
    def ids(self) -> tuple[str, ...]:
        """Paths below the folder that was packed."""
        return self.items.ids

    @property
    def lengths(self) -> Tensor:
        """(n,) int64, frames of each sequence."""
        return self.items.lengths

    @property
    def starts(self) -> Tensor:
        """(n,) int64, first frame of each sequence in the store."""
        return self.items.starts

    @property
    def labels(self) -> Tensor:
        """(n,) int64, number of the class, -1 without one."""
        return self.items.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by number."""
        return self.items.classes

    @property
    def split(self) -> tuple[str, ...]:
        """Of each sequence: "train", "test" or nothing."""
        return self.items.split

    def sequence(self, index: int) -> Tensor:
        """(T, D) frames of one sequence: mapped, or copied where it goes over the end of a shard."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        shard, row = divmod(start, self._per_shard)
        if row + length <= self._per_shard:
            return self._shard(shard)[row : row + length]
        out = torch.empty(length, self.dim, dtype=self.dtype)
        self.read(start, start + length, out)
        return out

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy the frames from start to stop; several threads may do so at once.

        out  (stop - start, D)  of the corpus's dtype, on the host
        """
        at = 0
        while start < stop:
            shard, row = divmod(start, self._per_shard)
            num = min(stop - start, self._per_shard - row)
            # NumPy: torch would start threads of its own beside the caller's, which spin for each other
            np.copyto(out[at : at + num].numpy(), self._shard(shard)[row : row + num].numpy(), casting="same_kind")
            start, at = start + num, at + num

    def source(self, rows: Sequence[int] | Tensor | None = None) -> "CorpusSource":
        """The sequences, or the rows of them that are named, as a source of ragged batches."""
        return CorpusSource(self, rows)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare every shard's checksum with the manifest; progress is told (shards done, shards in all)."""
        self.dataset.verify(progress)
        for shard in range(len(self.dataset.shards)):
            self._shard(shard)

    def _check_shards(self) -> None:
        """Raise ShardCorrupt where a shard is missing, of another size, or not where its row numbers say."""
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


class CorpusSource:
    """Sequences of a corpus as engine.ragged reads them: frames numbered through, without those left out."""

    def __init__(self, corpus: Corpus, rows: Sequence[int] | Tensor | None = None) -> None:
        """Store; rows are numbers of sequences, by default all."""
        self.corpus = corpus
        self.rows = _check_rows(corpus, rows)
        self.num_items = len(self.rows)
        self.lengths = corpus.lengths[self.rows]
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.num_frames = int(self.lengths.sum())
        self.dim, self.dtype = corpus.dim, corpus.dtype
        self.nbytes = self.num_frames * self.dim * self.dtype.itemsize
        self.fields = {"label": corpus.labels[self.rows]}
        self.description = f"{self.num_items} sequences, {self.num_frames} frames of {corpus.path}"
        self._runs, self._places = self._find_runs()

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy the frames from start to stop of these sequences; several threads may do so at once.

        out  (stop - start, D)  of the corpus's dtype, on the host
        """
        run, at = bisect_right(self._runs, start) - 1, 0
        while start < stop:
            num = min(stop, self._runs[run + 1]) - start
            place = self._places[run] + start - self._runs[run]
            self.corpus.read(place, place + num, out[at : at + num])
            start, at, run = start + num, at + num, run + 1

    def _find_runs(self) -> tuple[list[int], list[int]]:
        """Where neighbours in the store begin: own frame numbers, with the end, and those of the store."""
        first = self.corpus.starts[self.rows]
        breaks = torch.ones(self.num_items, dtype=torch.bool)
        breaks[1:] = first[1:] != (first + self.lengths)[:-1]
        return [*self.starts[breaks].tolist(), self.num_frames], first[breaks].tolist()


def read_skipped(path: Path, manifest: dict[str, Any]) -> tuple[Skipped, ...]:
    """The files that were left out, as the manifest lists them."""
    try:
        return tuple(Skipped(file=str(file), fault=str(fault)) for file, fault in manifest.get("skipped", ()))
    except (TypeError, ValueError) as failure:
        raise DatasetError(f"{path}: the manifest's list of skipped files was altered; pack it again") from failure


def _check_rows(corpus: Corpus, rows: Sequence[int] | Tensor | None) -> Tensor:
    if rows is None:
        return torch.arange(len(corpus))
    index = torch.as_tensor(rows, dtype=torch.int64).reshape(-1)
    if not len(index):
        raise ConfigError(f"{corpus.path}: no sequence chosen; name at least one")
    if int(index.min()) < 0 or int(index.max()) >= len(corpus):
        raise ConfigError(f"{corpus.path}: rows {int(index.min())} to {int(index.max())}, it has {len(corpus)}")
    return index

"""What a run trains on: a packed corpus, or a folder of .npy files as it is; one table, one way to get batches.

Axes: n sequences, B of a batch, T frames, D features.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from brim.engine.device import worker_count
from brim.engine.rows import Buckets, RaggedResident
from brim.engine.storage import MANIFEST
from brim.engine.training import BatchSource, Ranks, resolve_precision
from brim.errors import DatasetError
from brim.sequences.config import LoaderConfig, SequenceTraining
from brim.sequences.corpus.packed import Corpus
from brim.sequences.corpus.reading import SequenceFolder
from brim.sequences.training.dataloader import SequenceLoader

log = logging.getLogger("brim")

Counted = Callable[[int, int], None]  # (done, in all)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceData:
    """Sequences and what is known of them; labels are (n,) int64, -1 without one."""

    path: Path
    ids: tuple[str, ...]
    lengths: Tensor  # (n,) int64
    labels: Tensor
    classes: tuple[str, ...]
    split: tuple[str, ...]  # of each: "train", "test" or nothing
    dim: int
    identity: dict[str, str | None]  # to know the data again by
    corpus: Corpus | None = None  # packed, or
    folder: SequenceFolder | None = None  # not

    def is_of(self, known: Any) -> bool:
        """Whether a run that noted this identity was trained on these sequences, packed in whatever way.

        Either digest will do: to take training items for new ones would be worse than the reverse.
        """
        return isinstance(known, dict) and any(
            value is not None and known.get(name) == value for name, value in self.identity.items()
        )

    def verify(self, progress: Counted | None = None) -> None:
        """Compare a corpus with its checksums, or read a folder's files for frames that are not finite."""
        if self.corpus is not None:
            self.corpus.verify(progress)
        elif self.folder is not None:
            _check_files(self.folder, progress)

    def batches(
        self,
        config: SequenceTraining,
        device: torch.device,
        rows: Tensor | None = None,
        ranks: Ranks | None = None,
        own: Tensor | None = None,
    ) -> "Batches":
        """Batches of these sequences, or of the rows named, inside a with block.

        Of several ranks each holds the sequences that own, (n,) bool, names.
        """
        if self.corpus is not None:
            return PackedBatches(self.corpus, config, device, rows, ranks, own)
        assert self.folder is not None
        return FolderBatches(self.folder, config, device, ranks, own)


def open_data(path: Path | str) -> SequenceData:
    """Open a packed corpus, or read the headers of a folder of .npy files."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return _from_corpus(Corpus.open(path))
    if not path.is_dir():
        raise DatasetError(f"{path} is not a directory; give a packed corpus, or a folder of .npy sequences")
    return _from_folder(SequenceFolder(path))


def _from_corpus(corpus: Corpus) -> SequenceData:
    manifest = corpus.dataset.manifest
    content = [corpus.dim, str(corpus.dtype), *(entry.sha256 for entry in corpus.dataset.shards)]
    source = manifest.get("source")
    names = [corpus.classes[number] if number >= 0 else "" for number in corpus.labels.tolist()]
    identity = {
        "content_sha256": _digest(content),
        "source_sha256": source.get("sha256") if isinstance(source, dict) else None,
        "items_sha256": _digest([corpus.ids, corpus.lengths.tolist(), names, corpus.split]),
    }
    return SequenceData(
        path=corpus.path, ids=corpus.ids, lengths=corpus.lengths, labels=corpus.labels, classes=corpus.classes,
        split=corpus.split, dim=corpus.dim, identity=identity, corpus=corpus,
    )  # fmt: skip


def _from_folder(folder: SequenceFolder) -> SequenceData:
    names = [folder.classes[number] if number >= 0 else "" for number in folder.labels.tolist()]
    identity = {
        "content_sha256": None,
        "source_sha256": folder.fingerprint["sha256"],
        "items_sha256": _digest([folder.ids, folder.lengths.tolist(), names, folder.split]),
    }
    return SequenceData(
        path=folder.path, ids=folder.ids, lengths=folder.lengths, labels=folder.labels, classes=folder.classes,
        split=folder.split, dim=folder.dim, identity=identity, folder=folder,
    )  # fmt: skip


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values, ensure_ascii=False).encode()).hexdigest()


def _check_files(folder: SequenceFolder, progress: Counted | None) -> None:
    def check(index: int) -> None:
        folder.read_item(index, torch.empty(int(folder.lengths[index]), folder.dim, dtype=folder.dtype))

    with ThreadPoolExecutor(worker_count()) as pool:
        for done, _ in enumerate(pool.map(check, range(len(folder))), 1):
            if progress is not None:
                progress(done, len(folder))


# Batches


Source = BatchSource  # batches with "frames", "length", "item" (the row of the data) and "label"


class Batches(Protocol):
    """Sequences from which batches are made, inside a with block."""

    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> Source:
        """Batches of these rows; label (n,) int64 stands in for the data's own."""

    def plain(self, rows: Tensor) -> Source | None:
        """Batches in a fixed order of those rows that this rank holds; None where it holds none of them."""

    def __enter__(self) -> Self:
        """Load."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go."""


@dataclass(slots=True)
class PackedBatches:
    """A packed corpus in a tier; held once, however many orders and labels there are."""

    corpus: Corpus
    config: SequenceTraining
    device: torch.device
    rows: Tensor | None = None  # those that are held
    ranks: Ranks | None = None
    own: Tensor | None = None
    _resident: RaggedResident | None = None
    _opened: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Choose the tier and load."""
        self._resident = self._opened.enter_context(
            RaggedResident(
                self.corpus.source(), buckets=self.config.buckets(), device=self.device, tier=self.config.tier,
                rows=self.rows, ranks=self.ranks, own=self.own,
                reserve_bytes=step_bytes(self.corpus, self.config, self.device, self.ranks.size if self.ranks else 1),
                # a CPU has no fast half precision: converted once instead of in every layer
                dtype=torch.float32 if self.device.type == "cpu" else None,
            )
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the memory back."""
        self._opened.close()

    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> Source:
        """Batches from buckets of similar length."""
        assert self._resident is not None, "batches are made inside the with block"
        fields = None if label is None else {"label": label}
        return self._resident.view(rows=rows, fields=fields, seed=seed, shuffle=shuffle)

    def plain(self, rows: Tensor) -> Source | None:
        """Batches of the rows held here, in a fixed order."""
        here = rows if self.own is None else rows[self.own[rows]]
        return self.view(here, shuffle=False) if len(here) else None


@dataclass(slots=True)
class FolderBatches:
    """A folder of .npy files, read by the workers of a DataLoader; each view has workers of its own."""

    folder: SequenceFolder
    config: SequenceTraining
    device: torch.device
    ranks: Ranks | None = None
    own: Tensor | None = None
    _fixed: ExitStack = field(default_factory=ExitStack)
    _shuffled: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Say what would be faster."""
        num = self._loading().num_workers
        log.info(
            "%s is not packed: %d workers read it; brim sequence pack makes training faster", self.folder.path, num
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all workers."""
        self._shuffled.close()
        self._fixed.close()

    def view(self, rows: Tensor, *, label: Tensor | None = None, seed: int = 0, shuffle: bool = True) -> Source:
        """Batches from buckets of similar length; a new shuffled view ends the workers of the one before."""
        if shuffle:
            self._shuffled.close()
        loader = SequenceLoader(
            self.folder, replace(self._loading(), persistent_workers=shuffle), device=self.device, seed=seed, rows=rows,
            shuffle=shuffle, fields=None if label is None else {"label": label},
            dtype=torch.float32 if self.device.type == "cpu" else None, ranks=self.ranks, own=self.own,
        )  # fmt: skip
        return (self._shuffled if shuffle else self._fixed).enter_context(loader)

    def plain(self, rows: Tensor) -> Source | None:
        """Batches of the rows that are this rank's, in a fixed order."""
        here = rows if self.own is None else rows[self.own[rows]]
        return self.view(here, shuffle=False) if len(here) else None

    def _loading(self) -> LoaderConfig:
        num = min(self.config.num_workers, worker_count())
        if num and self.ranks is not None:
            num = max(1, num // self.ranks.size)  # the ranks of a machine share its cores
        ahead = self.config.prefetch_factor
        return LoaderConfig(num_workers=num, prefetch_factor=ahead, buckets=self.config.buckets())


def step_bytes(corpus: Corpus, config: SequenceTraining, device: torch.device, num_ranks: int = 1) -> int:
    """What weights, gradients and a step need on the device beside the data; an estimate from above."""
    shape = config.shape(corpus.dim)
    frames = -(-Buckets(corpus.lengths, config.buckets()).max_batch_frames // num_ranks)
    views = 2 if config.mode == "self" else 1
    width = 4 if resolve_precision(config.precision, device) == "fp32" else 2
    kept = 4 * shape.dim + 6 * shape.channels * shape.convolutions + 24 * shape.hidden * shape.layers
    inputs = 16 * frames * shape.dim * corpus.dtype.itemsize  # of captured steps, one for each of up to 32 shapes
    return width * views * frames * kept + inputs + (256 << 20)

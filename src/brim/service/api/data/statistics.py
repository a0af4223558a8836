"""Figures of a dataset, kept until its files change: what is slow the first time is fast the second.

They are made one at a time in a thread of their own, so that however many ask, the API goes on.
"""

import asyncio
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from brim.errors import TooMany
from brim.jobs.store import DatasetRow
from brim.service.api.data.preview import size_of
from brim.service.api.data.reading import readable
from brim.service.api.shapes import finite
from brim.service.api.shapes_views import Histogram, ImageSize, ImageStatistics, RfStatistics, SequenceStatistics

MANIFEST = "manifest.json"
MAX_KEPT = 32  # datasets; a large one takes about 1 MB
MAX_WAITING = 16
MAX_SIZES = 1000
_T = TypeVar("_T")
Figures = RfStatistics | ImageStatistics | SequenceStatistics


class OneAtATime:
    """Runs what takes long, one after the other; refuses when too many wait."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit, self._waiting = limit, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="views")

    async def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """What work returns."""
        if self._waiting >= self._limit:
            raise TooMany(f"{self._limit} requests for figures or samples wait already; try again in a few seconds")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._waiting -= 1


class KeptStatistics:
    """Figures of the datasets that were asked about last."""

    def __init__(self, slow: OneAtATime) -> None:
        self._slow = slow
        self._kept: OrderedDict[str, tuple[tuple[int, ...], Figures]] = OrderedDict()  # by id, the last used last
        self._lock = threading.Lock()

    async def of(self, row: DatasetRow, place: Path) -> Figures:
        """Of one dataset as its files are now."""
        identity = await run_in_threadpool(_identity, row, place)
        known = self._known(row.id, identity)
        return known if known is not None else await self._slow.run(self._make, row, place)

    def _make(self, row: DatasetRow, place: Path) -> Figures:
        """In the thread; what was made while this one waited is used."""
        identity = _identity(row, place)  # before the figures: what is written meanwhile makes them old, not wrong
        known = self._known(row.id, identity)
        if known is None:
            with readable(row, place):
                known = _MAKERS[row.kind](place)
            with self._lock:
                self._kept[row.id] = identity, known
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return known

    def _known(self, id: str, identity: tuple[int, ...]) -> Figures | None:
        with self._lock:
            kept = self._kept.get(id)
            if kept is None or kept[0] != identity:
                return None
            self._kept.move_to_end(id)
            return kept[1]


def _identity(row: DatasetRow, place: Path) -> tuple[int, ...]:
    """What differs once a dataset's files have: of the manifest, or of all images."""
    if row.kind != "images":
        return _stamp([place / MANIFEST])
    with readable(row, place):
        return _stamp(_image_files(place)[0])


def _stamp(files: Iterable[Path]) -> tuple[int, ...]:
    """Number, bytes and times of files; those that are not there do not count."""
    number = num_bytes = newest = numbers = 0
    for file in files:
        try:
            found = os.stat(file)  # noqa: PTH116  # of thousands: a Path takes twice as long
        except OSError:
            continue
        number, num_bytes, newest = number + 1, num_bytes + found.st_size, max(newest, found.st_mtime_ns)
        numbers ^= found.st_ino
    return number, num_bytes, newest, numbers


def _rf(place: Path) -> RfStatistics:
    from brim.rf.datasets.statistics import statistics

    return RfStatistics(**finite(statistics(place)))


def _images(place: Path) -> ImageStatistics:
    files, masks = _image_files(place)
    sizes = Counter(map(size_of, files))
    unreadable = sizes.pop((None, None), 0)
    listed = [ImageSize(width=w or 0, height=h or 0, count=count) for (w, h), count in sizes.most_common(MAX_SIZES)]
    return ImageStatistics(items=len(files), masks=len(files) if masks else 0, sizes=listed, unreadable=unreadable)


def _image_files(place: Path) -> tuple[list[Path], bool]:
    from brim.jobs.registry.datasets import image_folders
    from brim.segmentation.images import find_images

    images, masks = image_folders(place)
    return find_images([images]), masks is not None


def _sequences(place: Path) -> SequenceStatistics:
    from brim.rf.datasets.statistics import histogram
    from brim.sequences.corpus.packed import Corpus

    corpus = Corpus.open(place)
    counts = Counter(corpus.labels.tolist())
    return SequenceStatistics(
        items=len(corpus),
        features=corpus.dim,
        classes={name: counts[number] for number, name in enumerate(corpus.classes)},
        unlabelled=counts[-1],
        histograms={"frames": Histogram(**histogram(corpus.lengths.numpy(), "frames"))},
    )


_MAKERS: dict[str, Callable[[Path], Figures]] = {"rf": _rf, "images": _images, "sequences": _sequences}

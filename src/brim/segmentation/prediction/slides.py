"""Images too large for memory: overlapping tiles are segmented one after the other, and their objects joined.

    slide ──▶ tiles: core and halo ──▶ segment ──▶ labels of each tile ──▶ Stitcher ──▶ objects, each once
                                                                             ▲ │
                                                        labels so far, on disk ┘

An object belongs to the tile in whose core its centre lies. The tiles around it see it too, and leave it out: their
core does not hold the centre, or the pixels already have a label. The halo is wide enough that the owner sees all of
an object of up to twice its width. The parts of a larger object, which some tile's border cuts, are painted by every
tile and joined where they overlap. Memory is that of a few tiles, whatever the size of the slide.

Axes: H, W pixels of the slide, h, w pixels of a tile with its halo, N objects of a tile.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import cv2
import numpy as np
import torch

from brim.errors import StorageError
from brim.segmentation.images.stacks import ImageWindow
from brim.segmentation.objects.measuring import LabelledObjects, find_objects

CORE = 2048  # pixels, side of a tile without its halo
HALO = 128  # pixels on each side
SLACK = 8  # pixels by which two tiles may see the centre of one object at different places
_SAME = 0.5  # share of the smaller of two objects from which on they are one
_OUTLINED_PIXELS = 2**26  # of the box of a joined object; the outline of a larger one is traced at a lower resolution


class TileLabels(NamedTuple):
    """What a segmenter finds in a tile."""

    labels: np.ndarray  # (h, w) whole numbers, 0 background
    confidence: np.ndarray | None = None  # (largest label,) of each label from 1 on


Segment = Callable[[Iterable[np.ndarray]], Iterator[TileLabels]]  # tiles (h, w, 3) uint8, in their order


class TileSource(Protocol):
    """A slide as the stitcher sees it."""

    height: int
    width: int

    def tile(self, window: ImageWindow) -> np.ndarray:
        """(h, w, 3) uint8"""


class TileObjects(NamedTuple):
    """Complete objects, to be written."""

    objects: LabelledObjects  # of one image, in its own pixels
    window: ImageWindow  # where that image lies in the slide
    first: int  # the number of the first object; the others follow
    confidence: np.ndarray  # (N,)
    scale: int = 1  # pixels of the slide in one of the image


WriteObjects = Callable[[TileObjects], None]


def predict_slide(
    segment: Segment,
    slide: TileSource,
    write: WriteObjects | None,
    folder: Path,
    *,
    core: int = CORE,
    halo: int = HALO,
    progress: Callable[[int, int], None] | None = None,
) -> "SlideLabels":
    """Segment a slide tile by tile; `write` is called with complete objects, `progress` with tiles done and in all.

    Without `write`, objects are not traced. Returns the labels of the slide, in a file of that folder.
    """
    grid = tile_grid(slide.height, slide.width, core, halo)
    read: list[np.ndarray] = []  # tiles in the segmenter

    def tiles() -> Iterator[np.ndarray]:
        for _, window in grid:
            read.append(slide.tile(window))
            yield read[-1]

    canvas = SlideLabels(slide.height, slide.width, folder)
    try:
        stitcher = _Stitcher(canvas, halo, write)
        for number, ((inner, window), tile_labels) in enumerate(zip(grid, segment(tiles()), strict=True), 1):
            stitcher.add(inner, window, tile_labels, read.pop(0))
            if progress is not None:
                progress(number, len(grid))
        stitcher.finish(slide)
    except BaseException:
        canvas.close()
        raise
    return canvas


def tile_grid(height: int, width: int, core: int, halo: int) -> list[tuple[ImageWindow, ImageWindow]]:
    """Cores, row by row, and the windows around them, clipped to the slide."""
    windows = []
    for top in range(0, height, core):
        for left in range(0, width, core):
            inner = ImageWindow(top, left, min(top + core, height), min(left + core, width))
            outer = ImageWindow(
                max(0, top - halo),
                max(0, left - halo),
                min(height, inner.bottom + halo),
                min(width, inner.right + halo),
            )
            windows.append((inner, outer))
    return windows


class SlideLabels:
    """The labels of a slide, (H, W) uint32, in a sparse file without a name that ends with this object."""

    def __init__(self, height: int, width: int, folder: Path) -> None:
        self.height, self.width, self.num_objects = height, width, 0
        self.largest = 0  # number
        self.roots: np.ndarray | None = None  # (largest number + 1,) the number of each number's object, if joined
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by close()
            os.ftruncate(self._file.fileno(), 4 * height * width)
        except OSError as error:
            raise _disk_error(folder, error) from error
        self._folder = folder

    def read(self, window: ImageWindow) -> np.ndarray:
        """(h, w) uint32, joined objects under one number."""
        out = np.empty(window.shape, np.uint32)
        view, row_bytes = out.reshape(-1).view(np.uint8).data, 4 * out.shape[1]
        for row in range(out.shape[0]):
            place = 4 * ((window.top + row) * self.width + window.left)
            os.preadv(self._file.fileno(), [view[row * row_bytes : (row + 1) * row_bytes]], place)
        return out if self.roots is None else self.roots[out]

    def write(self, window: ImageWindow, labels: np.ndarray) -> None:
        labels = np.ascontiguousarray(labels, np.uint32)
        view, row_bytes = labels.reshape(-1).view(np.uint8).data, 4 * labels.shape[1]
        try:
            for row in np.flatnonzero(labels.any(1)).tolist():
                place = 4 * ((window.top + row) * self.width + window.left)
                os.pwrite(self._file.fileno(), view[row * row_bytes : (row + 1) * row_bytes], place)
        except OSError as error:
            raise _disk_error(self._folder, error) from error

    def tiles(self, side: int, dtype: np.dtype) -> Iterator[np.ndarray]:
        """(side, side) tiles, row by row, the last ones filled with zeros."""
        for top in range(0, self.height, side):
            band = self.read(ImageWindow(top, 0, min(top + side, self.height), self.width)).astype(dtype)
            for left in range(0, self.width, side):
                out = np.zeros((side, side), dtype)
                part = band[:, left : left + side]
                out[: part.shape[0], : part.shape[1]] = part
                yield out

    def close(self) -> None:
        self._file.close()


class _Found(NamedTuple):
    """Objects of a tile by label; row 0 is the background."""

    area: np.ndarray
    centre: np.ndarray  # (N + 1, 2) y and x in the tile
    extent: np.ndarray  # larger side of the box
    is_cut: np.ndarray  # by the tile's border inside the slide


class _Stitcher:
    def __init__(self, canvas: SlideLabels, halo: int, write: WriteObjects | None) -> None:
        self._canvas, self._write = canvas, write
        self._small = 2 * max(1, halo - SLACK)  # an object of up to this extent is seen whole by its owner
        self._next = 1  # number of the next object
        self._parent: dict[int, int] = {}  # of numbers whose object is joined from parts, or may be yet
        self._box: dict[int, ImageWindow] = {}  # of the parts
        self._confidence: dict[int, tuple[float, float]] = {}  # of the parts: sum of confidence times area, and area

    def add(self, inner: ImageWindow, window: ImageWindow, tile: TileLabels, pixels: np.ndarray) -> None:
        labels = np.ascontiguousarray(tile.labels, np.int32)
        if not labels.any():
            return
        committed = self._canvas.read(window)
        measured = _measured(labels, window, (self._canvas.height, self._canvas.width))
        overlap = _overlaps(labels, committed)
        count = np.unique(committed[committed > 0], return_counts=True)
        visible = dict(zip(count[0].tolist(), count[1].tolist(), strict=True))
        whole: list[int] = []
        new = np.zeros_like(committed)
        for label in self._candidates(measured, inner, window):
            big = bool(measured.extent[label] > self._small)
            is_open = big and (bool(measured.is_cut[label]) or not _is_inside(measured.centre[label], inner, window))
            joined, is_known = self._partners(overlap.get(label, {}), int(measured.area[label]), visible, is_open)
            if is_known:
                continue
            if joined or is_open:
                self._paint(new, label, labels, committed, window, joined, _confidence_of(tile, label))
            else:
                whole.append(label)
        if whole:
            self._commit(whole, labels, committed, new, window, tile, pixels)
        self._canvas.write(window, np.where(new > 0, new, committed))

    def _candidates(self, measured: _Found, inner: ImageWindow, window: ImageWindow) -> list[int]:
        """Labels that may be of this tile: centre in its core, or so large that parts are joined."""
        top, left = window.top, window.left
        y, x = measured.centre[:, 0] + top, measured.centre[:, 1] + left
        mine = (y >= inner.top - SLACK) & (y < inner.bottom + SLACK)
        mine &= (x >= inner.left - SLACK) & (x < inner.right + SLACK)
        mine |= measured.extent > self._small
        mine &= measured.area > 0
        mine[0] = False
        return np.flatnonzero(mine).tolist()

    def _partners(
        self, overlap: dict[int, int], area: int, visible: dict[int, int], is_open: bool
    ) -> tuple[list[int], bool]:
        """Numbers of parts that an object continues, and whether it is an object that is there already."""
        joined = []
        for number, shared in overlap.items():
            is_part = number in self._parent
            if is_part and shared >= _SAME * min(area, visible[number]):
                joined.append(number)
            elif not is_part and shared >= _SAME * (area if is_open else min(area, visible[number])):
                return [], True
        return joined, False

    def _paint(
        self, new: np.ndarray, label: int, labels: np.ndarray, committed: np.ndarray, window: ImageWindow,
        joined: list[int], confidence: float,
    ) -> None:  # fmt: skip
        """Add a part of an object to the parts it overlaps with, or begin one."""
        if not joined:
            self._parent[self._next] = self._next
            joined, self._next = [self._next], self._next + 1
        root = min(self._root(number) for number in joined)
        for number in joined:
            self._parent[self._root(number)] = root
        place = (labels == label) & (committed == 0) & (new == 0)
        rows, columns = np.flatnonzero(place.any(1)), np.flatnonzero(place.any(0))
        if not len(rows):
            return
        new[place] = root
        box = ImageWindow(
            window.top + int(rows[0]), window.left + int(columns[0]),
            window.top + int(rows[-1]) + 1, window.left + int(columns[-1]) + 1,
        )  # fmt: skip
        self._box[root] = _around(self._box[root], box) if root in self._box else box
        area = int(place.sum())
        before = self._confidence.get(root, (0.0, 0.0))
        self._confidence[root] = (before[0] + confidence * area, before[1] + area)

    def _commit(
        self, whole: list[int], labels: np.ndarray, committed: np.ndarray, new: np.ndarray, window: ImageWindow,
        tile: TileLabels, pixels: np.ndarray,
    ) -> None:  # fmt: skip
        """Number and write objects that this tile sees completely."""
        keep = np.zeros(int(labels.max()) + 1, np.int32)
        keep[whole] = np.arange(1, len(whole) + 1)
        own = keep[labels]
        taken = (own > 0) & ((committed > 0) | (new > 0))
        if taken.any():
            trimmed = np.unique(own[taken])
            own[taken] = 0
            for number in trimmed.tolist():
                _keep_largest_part(own, number)
        if self._write is None:
            numbered, num = own, len(whole)
        else:
            image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
            objects = find_objects(torch.from_numpy(own)[None], None, image)
            numbered, num = objects.labels[0].numpy(), len(objects.table)
        inside = numbered > 0
        new[inside] = numbered[inside].astype(np.uint32) + np.uint32(self._next - 1)
        if self._write is not None:
            confidence = np.ones(num)
            if tile.confidence is not None and num:
                at = np.zeros(num + 1, np.int64)
                at[numbered[inside]] = labels[inside]
                confidence = tile.confidence[at[1:] - 1]
            self._write(TileObjects(objects, window, self._next, confidence))
        self._next += num
        self._canvas.num_objects += num

    def finish(self, slide: TileSource) -> None:
        """Write the objects that were joined."""
        groups: dict[int, ImageWindow] = {}
        sums: dict[int, np.ndarray] = {}
        for number, box in self._box.items():
            root = self._root(number)
            groups[root] = _around(groups[root], box) if root in groups else box
            sums[root] = sums.get(root, np.zeros(2)) + self._confidence[number]
        self._canvas.largest = self._next - 1
        if self._parent:
            roots = np.arange(self._next, dtype=np.uint32)
            for number in self._parent:
                roots[number] = self._root(number)
            self._canvas.roots = roots
        self._canvas.num_objects += len(groups)
        if self._write is None:
            return
        for root, box in groups.items():
            scale = 1
            while box.shape[0] * box.shape[1] > _OUTLINED_PIXELS * scale * scale:
                scale *= 2
            own, pixels = self._part(root, box, scale, slide)
            objects = find_objects(torch.from_numpy(own)[None], None, torch.from_numpy(pixels).permute(2, 0, 1)[None])
            confidence = np.array([sums[root][0] / max(sums[root][1], 1)])
            self._write(TileObjects(objects, box, root, confidence, scale))

    def _part(self, root: int, box: ImageWindow, scale: int, slide: TileSource) -> tuple[np.ndarray, np.ndarray]:
        """An object's pixels, (h, w) int32 of 0 and 1, and the slide's there, every scale-th of them."""
        own, pixels = [], []
        step = max(scale, 2048 // scale * scale)
        for top in range(box.top, box.bottom, step):
            band = box._replace(top=top, bottom=min(top + step, box.bottom))
            own.append((self._canvas.read(band)[::scale, ::scale] == root).astype(np.int32))
            pixels.append(slide.tile(band)[::scale, ::scale])
        mask = np.concatenate(own)
        _keep_largest_part(mask, 1)
        return mask, np.concatenate(pixels)

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = number = self._parent[self._parent[number]]
        return number


def _measured(labels: np.ndarray, window: ImageWindow, size: tuple[int, int]) -> _Found:
    num = int(labels.max()) + 1
    height, width = labels.shape
    y, x = np.nonzero(labels)
    own = labels[y, x]
    area = np.bincount(own, minlength=num)
    centre = np.stack([np.bincount(own, values, num) for values in (y, x)], 1) / np.maximum(area, 1)[:, None]
    sides = []
    for values, most in ((y, height), (x, width)):
        low, high = np.full(num, most), np.full(num, -1)
        np.minimum.at(low, own, values)
        np.maximum.at(high, own, values)
        sides.append(high - low + 1)
    is_cut = np.zeros(num, bool)
    borders = [
        (window.top > 0, labels[0]), (window.bottom < size[0], labels[-1]),
        (window.left > 0, labels[:, 0]), (window.right < size[1], labels[:, -1]),
    ]  # fmt: skip
    for is_inside, border in borders:
        if is_inside:
            is_cut[border] = True
    return _Found(area, centre, np.maximum(*sides), is_cut)


def _overlaps(labels: np.ndarray, committed: np.ndarray) -> dict[int, dict[int, int]]:
    """Pixels that each label shares with each number."""
    both = (labels > 0) & (committed > 0)
    if not both.any():
        return {}
    pairs, counts = np.unique(
        labels[both].astype(np.uint64) << np.uint64(32) | committed[both].astype(np.uint64), return_counts=True
    )
    out: dict[int, dict[int, int]] = {}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        out.setdefault(pair >> 32, {})[pair & (2**32 - 1)] = count
    return out


def _is_inside(centre: np.ndarray, inner: ImageWindow, window: ImageWindow) -> bool:
    y, x = centre[0] + window.top, centre[1] + window.left
    down = inner.top - SLACK <= y < inner.bottom + SLACK
    return bool(down and inner.left - SLACK <= x < inner.right + SLACK)


def _confidence_of(tile: TileLabels, label: int) -> float:
    return 1.0 if tile.confidence is None else float(tile.confidence[label - 1])


def _keep_largest_part(labels: np.ndarray, number: int) -> None:
    """Remove all but the largest 4-connected part of an object."""
    rows, columns = np.nonzero(labels == number)
    if not len(rows):
        return
    box = labels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    mask = (box == number).astype(np.uint8)
    num, parts, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    if num > 2:
        largest = 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))
        box[(mask > 0) & (parts != largest)] = 0


def _around(one: ImageWindow, two: ImageWindow) -> ImageWindow:
    return ImageWindow(
        min(one.top, two.top), min(one.left, two.left), max(one.bottom, two.bottom), max(one.right, two.right)
    )


def _disk_error(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder}: labels of a large image cannot be kept there: {error.strerror or error}; free space, or choose "
        "another directory"
    )

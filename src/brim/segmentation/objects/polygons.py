"""Objects of an image: rings of pixel edges, polygons made of them, and back to a mask. Needs only NumPy.

Outlines run along pixel edges, so their points are pixel corners: x from 0 to W, y from 0 to H, y down. A pixel is a
unit square, and an area is a number of pixels. Objects are 4-connected: two that share only a corner are two polygons,
since a ring that touches itself is not a valid polygon for shapely or QuPath. `fill(trace(mask)) == mask`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from brim.errors import ConfigError, ImageError
from brim.segmentation.objects.tables import Measurements


class Rings(NamedTuple):
    """Rings in the order of their first points, from top to bottom; an outline starts at its upper left corner."""

    points: np.ndarray  # (C, 2) int32, x and y; outlines run downwards first, holes the other way
    first: np.ndarray  # (R + 1,) where each ring starts in points, and where the last one ends
    area: np.ndarray  # (R,) float64, pixels that the ring encloses; negative for a hole
    mass: np.ndarray  # (R,) float64, sum of their probabilities, signed like the area; exact
    owner: np.ndarray  # (R,) the outline that the ring belongs to; -1 for none

    def between(self, start: int, end: int, top: int) -> "Rings":
        """The rings from start to end, those of the mask that begins in row top of a stack; points are copied."""
        first, own = self.first[start : end + 1], slice(start, end)
        points = self.points[first[0] : first[-1]] - np.array([0, top], np.int32)
        owner = np.maximum(self.owner[own] - start, -1)
        return Rings(points, first - first[0], self.area[own], self.mass[own], owner)

    @property
    def num_outlines(self) -> int:
        return int((self.owner == np.arange(len(self.owner))).sum())

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        parts = [np.array([len(self.points), len(self.owner)], np.int64)]
        parts += [array.astype(dtype, copy=False) for array, dtype in zip(self, _DTYPES, strict=True)]
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Rings":
        """Read what to_bytes wrote; the arrays are views of it."""
        num_points, num_rings = np.frombuffer(data, np.int64, 2).tolist()
        sizes, at, arrays = (2 * num_points, num_rings + 1, num_rings, num_rings, num_rings), 16, []
        for size, dtype in zip(sizes, _DTYPES, strict=True):
            arrays.append(np.frombuffer(data, dtype, size, at))
            at += size * dtype.itemsize
        return cls(arrays[0].reshape(-1, 2), *arrays[1:])


class ImageObjects(NamedTuple):
    """The objects of one image, before they are polygons."""

    rings: Rings
    mask: np.ndarray | None  # (H, W) uint8, 0 or 255, a view; None: see labels
    labels: np.ndarray | None = None  # (H, W) uint16 or uint32: of instances, the number of each pixel's object
    measurements: Measurements | None = None

    def to_bytes(self) -> bytes:
        """Rings and measurements, for another process of this machine."""
        rings = self.rings.to_bytes()
        table = b"" if self.measurements is None else self.measurements.to_bytes()
        return len(rings).to_bytes(8, "little") + rings + table

    @classmethod
    def from_bytes(cls, data: bytes) -> "ImageObjects":
        end = 8 + int.from_bytes(data[:8], "little")
        measurements = Measurements.from_bytes(data[end:]) if len(data) > end else None
        return cls(Rings.from_bytes(data[8:end]), None, None, measurements)


_DTYPES: tuple[Any, ...] = tuple(map(np.dtype, (np.int32, np.int64, np.float64, np.float64, np.int64)))  # of Rings


def measures(rings: Rings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each polygon: the index of its outline, its area in pixels, its confidence."""
    outlines = np.flatnonzero(rings.owner == np.arange(len(rings.owner)))
    belongs = np.flatnonzero(rings.owner >= 0)
    owner, num = rings.owner[belongs], len(rings.owner)
    area, mass = (np.bincount(owner, values[belongs], num)[outlines] for values in (rings.area, rings.mass))
    return outlines, area, np.clip(mass / area, 0, 1)


@dataclass(frozen=True, slots=True)
class Polygon:
    """One object: its outline, holes, area and confidence."""

    points: np.ndarray  # (N, 2) int32, x and y of pixel corners; not closed, no point on a straight line
    holes: tuple[np.ndarray, ...]  # rings like points, running the other way
    area: float  # pixels inside, holes excluded
    confidence: float  # mean probability of the pixels inside


def to_polygons(rings: Rings) -> list[Polygon]:
    """Polygons of the rings that have an owner; the only Python that runs once per object."""
    outlines, area, confidence = measures(rings)
    belongs = np.flatnonzero(rings.owner >= 0)
    first, points = rings.first.tolist(), rings.points
    parts = [points[start:end] for start, end in pairwise(first)]
    holes: dict[int, list[np.ndarray]] = {}
    inner = belongs[rings.owner[belongs] != belongs]
    for ring, owner in zip(inner.tolist(), rings.owner[inner].tolist(), strict=True):
        holes.setdefault(owner, []).append(parts[ring])
    chosen = outlines.tolist()
    within = [tuple(holes[ring]) if ring in holes else () for ring in chosen]
    return list(map(Polygon, [parts[ring] for ring in chosen], within, area.tolist(), confidence.tolist()))


def without_small(rings: Rings, mask: np.ndarray, min_area: int) -> ImageObjects:
    """The objects of a mask that have at least so many pixels."""
    outlines, area, _ = measures(rings)
    large = np.zeros(len(rings.owner) + 1, bool)  # the last one stands for rings without an owner
    large[outlines[area >= min_area]] = True
    left = rings._replace(owner=np.where(large[rings.owner], rings.owner, -1))
    return ImageObjects(left, fill(to_polygons(left), *mask.shape) * np.uint8(255))


def fill(polygons: Iterable[Polygon], height: int, width: int) -> np.ndarray:
    """Mask (H, W) bool of the pixels whose centre is inside any polygon; the inverse of trace."""
    rings = [(ring, kind) for p in polygons for ring, kind in ((p.points, 1), *((hole, -1) for hole in p.holes))]
    if not rings:
        return np.zeros((height, width), bool)
    start = np.concatenate([ring for ring, _ in rings])  # edges from start (P, 2) to end (P, 2)
    num = np.array([len(ring) for ring, _ in rings])
    first = np.cumsum(num) - num
    end = start[next_points(first, num)]
    turn = np.repeat(np.sign(doubled_areas(start, first, num)) * [kind for _, kind in rings], num)
    # Where each edge crosses the middle of a pixel row, it changes the winding number of the pixels to its right.
    weight = np.sign(end[:, 1] - start[:, 1]) * turn
    swap = (end[:, 1] < start[:, 1])[:, None]
    top, bottom = np.where(swap, end, start), np.where(swap, start, end)
    num_rows = bottom[:, 1] - top[:, 1]
    edge = np.repeat(np.arange(len(top)), num_rows)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    slope = (bottom[:, 0] - top[:, 0]) / np.maximum(num_rows, 1)
    column = np.clip(np.ceil(top[edge, 0] + (row + 0.5) * slope[edge] - 0.5), 0, width).astype(np.int64)
    row += top[edge, 1]
    seen = (row >= 0) & (row < height)
    winding = np.zeros((height, width + 1), np.int32)
    np.add.at(winding, (row[seen], column[seen]), weight[edge[seen]])
    return np.asarray(np.cumsum(winding, axis=1, out=winding)[:, :width] != 0)


def next_points(first: np.ndarray, num: np.ndarray) -> np.ndarray:
    """(P,) index of the point after each point of rings that start at first (R,) and have num (R,) points."""
    after = np.arange(1, num.sum() + 1)
    after[first + num - 1] = first
    return after


def doubled_areas(points: np.ndarray, first: np.ndarray, num: np.ndarray) -> np.ndarray:
    """(R,) twice the area of each ring; the sign tells its direction."""
    x, y = points.astype(np.int64).T
    after = next_points(first, num)
    return np.asarray(np.add.reduceat(x * y[after] - x[after] * y, first))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The objects of one image; if it failed, `error` is set and the rest is empty."""

    name: str  # of the image: its path, or "image N"
    height: int  # pixels
    width: int
    polygons: tuple[Polygon, ...] = ()
    mask: np.ndarray | None = None  # (H, W) uint8, 0 or 255
    error: str | None = None
    labels: np.ndarray | None = None  # (H, W) uint16 or uint32: of instances; polygon n has the label n + 1
    measurements: Measurements | None = None  # of instances; a row for each polygon
    pixel_um: float | None = None  # side of a pixel, if the file says

    @property
    def confidence(self) -> float | None:
        """Mean probability over all pixels inside polygons; None if there are no polygons."""
        area = sum(polygon.area for polygon in self.polygons)
        if not area:
            return None
        return sum(polygon.confidence * polygon.area for polygon in self.polygons) / area

    def to_geojson(self) -> dict[str, Any]:
        """A FeatureCollection of the polygons, in pixels with y down, as files of that format hold it."""
        from brim.segmentation.objects.formats import geojson  # it imports this module

        self._check()
        collection: dict[str, Any] = json.loads(geojson(self.polygons, self.measurements))
        return collection

    def to_coco(self) -> dict[str, Any]:
        """Images, annotations and categories of COCO, of this one image; objects with holes as run lengths."""
        from brim.segmentation.objects.formats import CocoFile

        self._check()
        file = CocoFile(classes=() if self.measurements is None else self.measurements.told_apart)
        file.add(1, self.name, self)
        coco: dict[str, Any] = json.loads(b"".join(file.chunks()))
        file.close()
        return coco

    def to_labels(self) -> np.ndarray:
        """(H, W) uint16, or uint32 where that is too small: polygon n has the label n + 1, 0 is background."""
        self._check()
        if self.labels is not None:
            return self.labels.copy()
        labels = np.zeros((self.height, self.width), np.uint16 if len(self.polygons) < 2**16 else np.uint32)
        for number, polygon in enumerate(self.polygons, 1):
            (left, top), (right, bottom) = polygon.points.min(0).tolist(), polygon.points.max(0).tolist()
            corner = np.array([left, top], np.int32)
            moved = Polygon(polygon.points - corner, tuple(hole - corner for hole in polygon.holes), 0, 0)
            labels[top:bottom, left:right][fill([moved], bottom - top, right - left)] = number
        return labels

    def to_shapely(self) -> list[Any]:
        """A shapely.Polygon for each polygon, with its holes; needs shapely."""
        self._check()
        try:
            import shapely
        except ImportError as failure:
            raise ConfigError(
                "to_shapely needs shapely", code="missing_package", hint="pip install 'brim[shapely]'"
            ) from failure
        return [shapely.Polygon(polygon.points, polygon.holes) for polygon in self.polygons]

    def _check(self) -> None:
        if self.error is not None:
            raise ImageError(f"{self.name} was not predicted: {self.error}", code="failed")

"""Polygons as GeoJSON that QuPath opens."""

# Axes: P points of all rings one after the other, R rings

from collections.abc import Iterable

import numpy as np

from brim.segmentation.objects.polygons import Polygon
from brim.segmentation.rings import collection, grouped, ring_texts


def geojson(polygons: Iterable[Polygon]) -> bytes:
    """A FeatureCollection that QuPath opens as annotations; x and y in pixel corners, y down."""
    polygons = list(polygons)
    rings = [ring for polygon in polygons for ring in (polygon.points, *polygon.holes)]
    if not rings:
        return collection([], [], [])
    points, num = np.concatenate(rings), np.array([len(ring) for ring in rings])
    is_outline = np.array([n == 0 for polygon in polygons for n in range(1 + len(polygon.holes))])
    first = np.cumsum(num) - num
    backwards = (_turn(points, first, num) > 0) != is_outline
    texts = ring_texts(points, first, num, backwards)
    of_each = grouped(texts, [1 + len(polygon.holes) for polygon in polygons])
    about = [(polygon.area, polygon.confidence) for polygon in polygons]
    return collection(of_each, *map(list, zip(*about, strict=True)))


def _turn(points: np.ndarray, first: np.ndarray, num: np.ndarray) -> np.ndarray:
    """(R,) twice what each ring encloses; positive or negative by its direction."""
    x, y = points.astype(np.int64).T
    after = np.arange(1, len(points) + 1)
    after[first + num - 1] = first
    return np.asarray(np.add.reduceat(x * y[after] - x[after] * y, first))

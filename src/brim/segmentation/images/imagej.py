"""Polygons as ImageJ regions of interest: the bytes of one `.roi`, and a zip that the ROI Manager opens.

An outline without holes is a traced region: 16-bit corners relative to its bounding box. Whatever that cannot say,
holes, more than 65 535 points, coordinates beyond 32 767, is a shape made of 32-bit float segments.
"""

import io
import struct
import zipfile
from collections.abc import Iterable

import numpy as np

from brim.segmentation.objects.polygons import Polygon

_VERSION, _RECTANGLE, _TRACED = 228, 1, 8  # a shape calls itself a rectangle: its bounds, for readers without shapes
_MOVE, _LINE, _CLOSE = 0.0, 1.0, 4.0
_LARGEST_SHORT, _MOST_POINTS = 2**15 - 1, 2**16 - 1


def roi_zip(polygons: Iterable[Polygon]) -> bytes:
    """A zip with one region for each polygon, numbered in their order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, polygon in enumerate(polygons, 1):
            entry = zipfile.ZipInfo(f"{number:05d}.roi")  # without a date: the same polygons are the same bytes
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, roi_bytes(polygon))
    return stream.getvalue()


def roi_bytes(polygon: Polygon) -> bytes:
    """One polygon in ImageJ's format."""
    points = polygon.points
    start, end = points.min(0), points.max(0)
    if polygon.holes or len(points) > _MOST_POINTS or end.max() > _LARGEST_SHORT:
        shape = np.concatenate([_segments(ring) for ring in (points, *polygon.holes)])
        floats: bytes = shape.astype(">f4").tobytes()
        return _header(_RECTANGLE, start, end, num_floats=len(shape)) + floats
    corners: bytes = (points - start).T.astype(">i2").tobytes()  # all x, then all y
    return _header(_TRACED, start, end, num_points=len(points)) + corners


def _header(kind: int, start: np.ndarray, end: np.ndarray, *, num_points: int = 0, num_floats: int = 0) -> bytes:
    left, top, right, bottom = (min(int(side), _LARGEST_SHORT) for side in (*start, *end))
    head = struct.pack(">4sHBBhhhhH", b"Iout", _VERSION, kind, 0, top, left, bottom, right, num_points)
    return head.ljust(36, b"\0") + struct.pack(">i", num_floats).ljust(28, b"\0")


def _segments(ring: np.ndarray) -> np.ndarray:
    """A closed ring as ImageJ's numbers: what to do, x, y for each point, and the end."""
    kinds = np.full((len(ring), 1), _LINE)
    kinds[0] = _MOVE
    return np.append(np.hstack([kinds, ring]).ravel(), _CLOSE)

"""Land, coasts and borders for maps, from Natural Earth's 1:10 million map (public domain).

land.bin is deflated: for each line twice its number of points, plus 1 for a border, then differences of
longitude and latitude in hundredths of a degree, all as zigzag varints of base 128. Simplified to 0.015°, about 1.6 km.
"""

import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_FILE = Path(__file__).with_name("land.bin")
_UNIT_DEG = 0.01


class LandLine(NamedTuple):
    """A part of a coast or of a border between countries."""

    is_border: bool
    lat: F64  # (n,)
    lon: F64  # (n,)


def land_lines(south: float, north: float, west: float, east: float) -> list[LandLine]:
    """The lines within a rectangle of degrees, cut off at its edges."""
    lines = []
    for is_border, points, (low, high) in _lines():
        if low[0] > east or high[0] < west or low[1] > north or high[1] < south:
            continue
        for piece in _clipped(points, (west, south), (east, north)):
            lines.append(LandLine(is_border, piece[:, 1], piece[:, 0]))
    return lines


def land_areas(south: float, north: float, west: float, east: float) -> list[F64]:
    """Rings of latitudes and longitudes (n, 2) that cover the land in a rectangle by the even-odd rule.

    What is outside is moved to the rectangle's edges.
    """
    low, high = (south, west), (north, east)
    areas = []
    for ring, box_low, box_high in _rings():
        if (box_low > high).any() or (box_high < low).any():
            continue
        points = ring
        for axis in (0, 1):
            for edge in (low[axis], high[axis]):
                points = _split(points, axis, edge)
        points = points.clip(low, high)
        points = points[np.r_[True, (points[1:] != points[:-1]).any(1)]]
        along_edge = (points[1:] == points[:-1]) & ((points[1:] == low) | (points[1:] == high))
        kept = np.ones(len(points), bool)
        kept[1:-1] = ~(along_edge[:-1] & along_edge[1:]).any(1)
        if (np.ptp(points, axis=0) > 0).all():
            areas.append(points[kept])
    return areas


def _split(points: F64, axis: int, edge: float) -> F64:
    """The same line with a point wherever it crosses an edge."""
    start, end = points[:-1, axis], points[1:, axis]
    at = np.flatnonzero((start < edge) != (end < edge))
    share = (edge - start[at]) / (end[at] - start[at])
    crossings = points[at] + share[:, None] * (points[at + 1] - points[at])
    crossings[:, axis] = edge
    return np.insert(points, at + 1, crossings, axis=0)


def _clipped(points: F64, low: tuple[float, float], high: tuple[float, float]) -> list[F64]:
    """The parts of a line inside a rectangle (Liang-Barsky); each (n, 2)."""
    start, step = points[:-1], np.diff(points, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.sort(np.stack([(low - start) / step, (high - start) / step]), axis=0)
    level = step == 0
    inside = (start >= low) & (start <= high)
    enter = np.where(level, np.where(inside, 0.0, 2.0), ends[0]).max(1).clip(0.0)
    leave = np.where(level, np.where(inside, 1.0, -1.0), ends[1]).min(1).clip(max=1.0)
    pieces: list[list[F64]] = []
    for number in np.flatnonzero(enter < leave):
        first, last = (start[number] + share * step[number] for share in (enter[number], leave[number]))
        if pieces and np.array_equal(pieces[-1][-1], first):
            pieces[-1].append(last)
        else:
            pieces.append([first, last])
    return [np.array(piece) for piece in pieces]


@lru_cache(maxsize=1)
def _lines() -> list[tuple[bool, F64, tuple[F64, F64]]]:
    """Every line as (is it a border, longitudes and latitudes, corners of its box)."""
    data = np.frombuffer(zlib.decompress(_FILE.read_bytes()), np.uint8)
    numbers, out, at = _varints(data), [], 0
    while at < len(numbers):
        count, is_border = numbers[at] >> 1, bool(numbers[at] & 1)
        deltas = numbers[at + 1 : at + 1 + 2 * count]
        signed = np.where(deltas & 1, -((deltas + 1) >> 1), deltas >> 1).reshape(-1, 2)
        points = signed.cumsum(0) * _UNIT_DEG
        out.append((is_border, points, (points.min(0), points.max(0))))
        at += 1 + 2 * int(count)
    return out


@lru_cache(maxsize=1)
def _rings() -> list[tuple[F64, F64, F64]]:
    """Coasts joined where they end at a border, as closed rings of latitudes and longitudes, with corners of boxes."""
    rings: list[F64] = []
    loose: dict[tuple[float, ...], F64] = {}  # by either end
    for is_border, points, _ in _lines():
        if is_border:
            continue
        line = points[:, ::-1].round(2)
        for side in (0, -1):
            if tuple(line[0]) != tuple(line[-1]) and (other := loose.pop(tuple(line[side]), None)) is not None:
                ends = {tuple(other[0]), tuple(other[-1])} - {tuple(line[side])}
                loose.pop(ends.pop())
                other = other if tuple(other[-side - 1]) == tuple(line[side]) else other[::-1]
                line = np.concatenate([other, line[1:]] if side == 0 else [line, other[1:]])
        if tuple(line[0]) == tuple(line[-1]):
            rings.append(line)
        else:
            loose |= {tuple(line[0]): line, tuple(line[-1]): line}
    for ring in rings:
        ring[:, 1] = np.unwrap(ring[:, 1], period=360)
    return [(ring, ring.min(0), ring.max(0)) for ring in rings]


def _varints(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(data)) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((data & 127).astype(np.int64) << (7 * place), starts)

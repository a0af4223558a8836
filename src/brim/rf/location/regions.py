"""The posterior as shapes: regions of 50, 90 and 95 % with their holes, separate places with their weights, pictures.

Axes: rows are latitudes, columns longitudes, both ascending.
"""

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.rf.location.posterior import LEVELS, Cells, Posterior

F64 = NDArray[np.float64]
Ring = list[list[float]]  # closed; longitude, latitude

PICTURE = 512  # pixels of a picture's longer side
_LEAST_WEIGHT = 0.01  # of a place that is listed
_TINTS = {"95": (158, 202, 225), "90": (66, 146, 198), "50": (8, 81, 156)}  # drawn in this order
_MIXTURE_DRAWS, _MIXTURE_LINES = 4_000, 120  # positions that tell thresholds; lines of the grid each way
_FEWEST, _MOST = 48, 400  # points per side of a raster


@dataclass(frozen=True, slots=True)
class Raster:
    """The posterior's log density on a rectangular grid around some places; rows are latitudes, ascending."""

    lat: F64  # (rows,)
    lon: F64  # (columns,)
    log_density: F64  # (rows, columns)


@dataclass(frozen=True, slots=True)
class PositionMode:
    """A separate part of the 95 % region."""

    lat: float  # of its most likely point
    lon: float
    weight: float  # its share of the 95 % region's probability


def rasters_of(posterior: Posterior, level: str = "95") -> list[Raster]:
    """The region of a level in as many grids as it has parts that a straight cut separates."""
    cells = posterior.cells
    inside = cells.at(cells.log_density >= posterior.thresholds[level])
    return [_raster(posterior, inside.at(part)) for part in _separate(inside)]


def region_geometry(posterior: Posterior, level: str) -> dict[str, Any]:
    """The region of a level as a GeoJSON Polygon or MultiPolygon."""
    polygons = [
        [_placed(ring, raster.lat, raster.lon) for ring in polygon]
        for raster in rasters_of(posterior, level)
        for polygon in polygons_of(rings_of(raster.log_density, posterior.thresholds[level]))
    ]
    if len(polygons) == 1:
        return {"type": "Polygon", "coordinates": polygons[0]}
    return {"type": "MultiPolygon", "coordinates": polygons}


def modes_of(posterior: Posterior) -> list[PositionMode]:
    """Separate parts of the 95 % region, heaviest first; those of less than 1 % are not listed."""
    modes = []
    for raster in rasters_of(posterior):
        labels = label(raster.log_density >= posterior.thresholds["95"])
        mass = np.exp(raster.log_density) * np.cos(np.radians(raster.lat))[:, None]
        mass *= (raster.lat[1] - raster.lat[0]) * (raster.lon[1] - raster.lon[0])
        weight = np.bincount(labels.ravel(), mass.ravel())
        for number in range(1, len(weight)):
            masked = np.where(labels == number, raster.log_density, -np.inf)
            modes.append(PositionMode(*_peak(raster, masked), float(weight[number])))
    total = sum(mode.weight for mode in modes)
    modes = [
        PositionMode(mode.lat, mode.lon, mode.weight / total) for mode in modes if mode.weight >= _LEAST_WEIGHT * total
    ]
    return sorted(modes, key=lambda mode: -mode.weight)


def _raster(posterior: Posterior, cells: Cells) -> Raster:
    """A grid around cells, about as fine as the finest of them."""
    sides = []
    for centre, size in ((cells.lat, cells.tall), (cells.lon, cells.wide)):
        pad, fine = float(size.max()), float(size.min())
        low, high = float((centre - size / 2).min()) - pad, float((centre + size / 2).max()) + pad
        count = min(max(round((high - low) / fine), _FEWEST), _MOST)
        sides.append(low + (np.arange(count) + 0.5) / count * (high - low))
    lat, lon = sides
    places = (axis.ravel() for axis in np.meshgrid(lat, lon, indexing="ij"))
    return Raster(lat, lon, posterior.log_density(*places).reshape(len(lat), len(lon)))


def _separate(cells: Cells) -> list[NDArray[np.int64]]:
    """Indices of cells in groups, cut wherever a whole strip of latitude or longitude is empty."""
    out, waiting = [], [np.arange(len(cells.lat))]
    while waiting:
        part = waiting.pop()
        for centre, size in ((cells.lat, cells.tall), (cells.lon, cells.wide)):
            order = part[np.argsort(centre[part] - size[part] / 2, kind="stable")]
            reached = np.maximum.accumulate((centre + size / 2)[order])[:-1]
            gap = (centre - size / 2)[order][1:] - reached
            cuts = np.nonzero(gap > 1.5 * np.maximum(size[order][1:], size[order][:-1]))[0] + 1
            if len(cuts):
                waiting += np.split(order, cuts)
                break
        else:
            out.append(part)
    return out


def _peak(raster: Raster, values: F64) -> tuple[float, float]:
    """Latitude and longitude of the highest value, between the cells."""
    row, column = (int(n) for n in np.unravel_index(int(values.argmax()), values.shape))
    log = raster.log_density
    return (
        float(raster.lat[row] + _vertex(log[:, column], row) * (raster.lat[1] - raster.lat[0])),
        float(raster.lon[column] + _vertex(log[row], column) * (raster.lon[1] - raster.lon[0])),
    )


def _vertex(values: F64, at: int) -> float:
    """Where the parabola through three values is highest, in steps from the middle one."""
    if not 0 < at < len(values) - 1:
        return 0.0
    before, here, after = (float(values[n]) for n in (at - 1, at, at + 1))
    bend = before - 2 * here + after
    return 0.0 if not bend < 0 else float(np.clip(0.5 * (before - after) / bend, -0.5, 0.5))


# Mixtures of Gaussians


@dataclass(frozen=True, slots=True)
class MixtureRegion:
    """The smallest area that holds a probability."""

    polygons: list[list[F64]]  # rings (points, 2) in m, the first of each around the others
    area_m2: float


@dataclass(frozen=True, slots=True)
class DrawnMixture:
    """A mixture as draws from it and on a grid whose lines are dense where the probability is."""

    places: F64  # (draws, 2) m east and north
    heights: F64  # (draws,) log density
    east: F64  # lines
    north: F64
    raster: F64  # (north, east) log density


def draw_mixture(weights: F64, means: F64, roots: F64) -> DrawnMixture:
    """weights (G,), means (G, 2) in m, roots (G, 2, 2) of the covariances in m"""
    rng = np.random.default_rng(0)
    pick = rng.choice(len(weights), _MIXTURE_DRAWS, p=weights / weights.sum())
    draws = means[pick] + (roots[pick] @ rng.standard_normal((_MIXTURE_DRAWS, 2, 1)))[..., 0]

    def log_density(places: F64) -> F64:
        left = np.linalg.solve(roots, (places[..., None, :] - means)[..., None])[..., 0]
        each = -0.5 * (left**2).sum(-1) - np.log(np.abs(np.linalg.det(roots))) + np.log(np.maximum(weights, 1e-300))
        return np.asarray(np.logaddexp.reduce(each, -1))

    sides = []
    for axis in range(2):
        line = np.quantile(draws[:, axis], np.linspace(0, 1, _MIXTURE_LINES))
        pad = (line[-1] - line[0]) * 0.02 + 1e-3
        sides.append(np.unique(np.concatenate([[line[0] - pad], line, [line[-1] + pad]])))
    east, north = sides
    return DrawnMixture(draws, log_density(draws), east, north, log_density(np.stack(np.meshgrid(east, north), -1)))


def mixture_regions(drawn: DrawnMixture) -> dict[str, MixtureRegion]:
    """Regions by level."""
    out = {}
    for name, level in LEVELS.items():
        polygons = polygons_of(rings_of(drawn.raster, float(np.quantile(drawn.heights, 1 - level))))
        placed = [[_on_lines(ring, drawn.east, drawn.north) for ring in polygon] for polygon in polygons]
        area = sum(_signed_area([(y, x) for x, y in ring]) for polygon in placed for ring in polygon)
        out[name] = MixtureRegion(placed, float(area))
    return out


def mixture_modes(drawn: DrawnMixture) -> list[tuple[float, float, float]]:
    """East, north and weight of the separate parts of the 95 % region, heaviest first; less than 1 % is not listed."""
    labels = label(drawn.raster >= np.quantile(drawn.heights, 1 - LEVELS["95"]))
    row, column = (_nearest(line, drawn.places[:, axis]) for line, axis in ((drawn.north, 1), (drawn.east, 0)))
    part = labels[row, column]
    out = []
    for number in set(part.tolist()) - {0}:
        mine = np.nonzero(part == number)[0]
        top = drawn.places[mine[drawn.heights[mine].argmax()]]
        out.append((float(top[0]), float(top[1]), len(mine) / int((part > 0).sum())))
    return sorted((one for one in out if one[2] >= _LEAST_WEIGHT), key=lambda one: -one[2])


def _nearest(lines: F64, values: F64) -> NDArray[np.int64]:
    return np.searchsorted((lines[1:] + lines[:-1]) / 2, values)


def _on_lines(ring: list[tuple[float, float]], east: F64, north: F64) -> F64:
    rows, columns = np.array(ring).T
    return np.stack([np.interp(columns, np.arange(len(east)), east), np.interp(rows, np.arange(len(north)), north)], -1)


def wrap(lon: float) -> float:
    return (lon + 180) % 360 - 180


# Contours


def rings_of(values: F64, threshold: float) -> list[list[tuple[float, float]]]:
    """Closed lines (row, column) around cells at or above the threshold, by marching squares; inside on the left.

    Rows point up: rings around a region run counter-clockwise, those around its holes clockwise.
    """
    low = min(float(values[np.isfinite(values)].min()), threshold) - 10.0
    grid = np.pad(np.where(np.isfinite(values), np.maximum(values, low), low), 1, constant_values=low)
    above = grid >= threshold
    case = above[:-1, :-1] * 1 + above[:-1, 1:] * 2 + above[1:, 1:] * 4 + above[1:, :-1] * 8
    following: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for row, column in zip(*np.nonzero((case > 0) & (case < 15)), strict=True):
        middle = float(grid[row : row + 2, column : column + 2].mean()) >= threshold
        for start, end in _segments(int(case[row, column]), middle):
            following[_edge(int(row), int(column), start)] = _edge(int(row), int(column), end)
    rings = []
    while following:
        first = edge = next(iter(following))
        ring = []
        while edge in following:
            ring.append(_crossing(grid, threshold, edge))
            edge = following.pop(edge)
        assert edge == first  # every crossing has one way in and one out
        rings.append([*ring, ring[0]])
    return rings


# Sides of a square: 0 below, 1 right, 2 above, 3 left. Segments with the inside on their left, by case.
_CASES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((0, 3),), 2: ((1, 0),), 3: ((1, 3),), 4: ((2, 1),), 6: ((2, 0),), 7: ((2, 3),),
    8: ((3, 2),), 9: ((0, 2),), 11: ((1, 2),), 12: ((3, 1),), 13: ((0, 1),), 14: ((3, 0),),
}  # fmt: skip


def _segments(case: int, middle: bool) -> tuple[tuple[int, int], ...]:
    """Two opposite corners are joined if the middle is inside, else apart."""
    if case == 5:
        return ((0, 1), (2, 3)) if middle else ((0, 3), (2, 1))
    if case == 10:
        return ((1, 2), (3, 0)) if middle else ((1, 0), (3, 2))
    return _CASES[case]


def _edge(row: int, column: int, side: int) -> tuple[int, int, int]:
    """An edge of the grid, named from either of its squares alike: its lower left point and whether it goes up."""
    return ((row, column, 0), (row, column + 1, 1), (row + 1, column, 0), (row, column, 1))[side]


def _crossing(grid: F64, threshold: float, edge: tuple[int, int, int]) -> tuple[float, float]:
    """Where the edge crosses the threshold, (row, column) without the padding."""
    row, column, up = edge
    a, b = float(grid[row, column]), float(grid[row + up, column + 1 - up])
    share = 0.5 if a == b else min(max((threshold - a) / (b - a), 0.0), 1.0)
    return row - 1 + share * up, column - 1 + share * (1 - up)


def polygons_of(rings: list[list[tuple[float, float]]]) -> list[list[list[tuple[float, float]]]]:
    """Polygons: rings that run counter-clockwise, each with the holes inside it."""
    outer = [ring for ring in rings if _signed_area(ring) > 0]
    polygons = [[ring] for ring in outer]
    for hole in (ring for ring in rings if _signed_area(ring) <= 0):
        around = [n for n, ring in enumerate(outer) if _contains(ring, hole[0])]
        if around:
            polygons[min(around, key=lambda n: _signed_area(outer[n]))].append(hole)
    return polygons


def _placed(ring: list[tuple[float, float]], lat: F64, lon: F64) -> Ring:
    rows, columns = np.array(ring).T
    south, west, tall, wide = lat[0], lon[0], lat[1] - lat[0], lon[1] - lon[0]
    return [
        [round(float(west + wide * x), 6), round(float(south + tall * y), 6)]
        for y, x in zip(rows, columns, strict=True)
    ]


def _signed_area(ring: list[tuple[float, float]]) -> float:
    y, x = np.array(ring).T
    return float(0.5 * (x[:-1] * y[1:] - x[1:] * y[:-1]).sum())


def _contains(ring: list[tuple[float, float]], point: tuple[float, float]) -> bool:
    (y, x), points = point, np.array(ring)
    (y0, x0), (y1, x1) = points[:-1].T, points[1:].T
    crosses = (y0 > y) != (y1 > y)
    at = x0 + (y - y0) / np.where(y1 == y0, 1.0, y1 - y0) * (x1 - x0)
    return bool((crosses & (at > x)).sum() % 2)


def label(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Connected cells (sides, not corners) with one number each, from 1; 0 outside."""
    far = inside.size + 1
    numbers = np.where(inside, np.arange(1, inside.size + 1).reshape(inside.shape), far)
    while True:
        padded = np.pad(numbers, 1, constant_values=far)
        lowest = np.minimum.reduce([numbers, padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]])
        lowest = np.where(inside, lowest, far)
        lowest = np.where(inside, np.append(0, lowest.ravel())[np.where(inside, lowest, 0)], far)  # jump ahead
        if np.array_equal(lowest, numbers):
            break
        numbers = lowest
    _, labels = np.unique(np.where(inside, numbers, 0), return_inverse=True)
    shaped = labels.reshape(inside.shape)
    return shaped if not inside.all() else shaped + 1


# Pictures


def picture(posterior: Posterior) -> tuple[bytes, tuple[float, float, float, float]]:
    """The regions as a PNG without georeference, and its south, north, west and east."""
    south, north, west, east = bounds(posterior)
    squeeze = math.cos(math.radians((south + north) / 2))
    scale = PICTURE / max((east - west) * squeeze, north - south)
    columns, rows = (max(16, round(side * scale)) for side in ((east - west) * squeeze, north - south))
    lat = north - (np.arange(rows) + 0.5) / rows * (north - south)
    lon = west + (np.arange(columns) + 0.5) / columns * (east - west)
    places = (axis.ravel() for axis in np.meshgrid(lat, lon, indexing="ij"))
    log = posterior.log_density(*places).reshape(rows, columns)
    image = np.full((rows, columns, 3), 255, np.uint8)
    for name, tint in _TINTS.items():
        image[log >= posterior.thresholds[name]] = tint
    return png(image), (south, north, west, east)


def bounds(posterior: Posterior) -> tuple[float, float, float, float]:
    """South, north, west and east of the 95 % region with a margin."""
    cells = posterior.cells
    inside = cells.at(cells.log_density >= posterior.thresholds["95"])
    south, north = float((inside.lat - inside.tall).min()), float((inside.lat + inside.tall).max())
    west, east = float((inside.lon - inside.wide).min()), float((inside.lon + inside.wide).max())
    pad = 0.15 * max(north - south, east - west)
    return south - pad, north + pad, west - pad, east + pad


def png(image: NDArray[np.uint8]) -> bytes:
    """(rows, columns, 3) as a PNG file."""
    rows, columns, _ = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = np.concatenate([np.zeros((rows, 1), np.uint8), image.reshape(rows, -1)], 1)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def inside_level(posterior: Posterior, lat: float, lon: float) -> dict[str, bool]:
    """Whether a place lies in each region."""
    density = float(posterior.log_density(np.array([lat]), np.array([lon]))[0])
    return {name: density >= posterior.thresholds[name] for name in LEVELS}

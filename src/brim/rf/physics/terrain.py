"""The ground under a network: a fractal landscape drawn from the seed, or the user's height maps.

Axes: N, M rows and columns of a map, from south and west; K points of a profile. Heights in metres, degrees of WGS-84.
All ground heights of a scene come from the map, so its vertical datum does not matter.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError
from brim.rf.config import FRACTAL, RANDOM_AREA, GenerateConfig
from brim.rf.physics.diffraction import bullington_db
from brim.rf.physics.philox import Purpose, normal, uniform

F64 = NDArray[np.float64]

MARGIN_DEG = 0.55  # around the receivers; transmitters stand within half a degree of them
PROFILE_POINTS = 64  # between the antennas of a link
PROFILE_ROWS = 256  # samples whose profiles are drawn at once: few enough for a core's cache, long calls into NumPy
_STEP_DEG = 0.005  # of fractal terrain, about 500 m
_MOST_POINTS = 2_048  # per side of fractal terrain
_ROUGHNESS = 3.0  # exponent of the power spectrum over the plane: rolling hills
_HEIGHTS_M = (-500.0, 9_000.0)  # others are the marks of missing data, such as -32768, -9999 or 3.4e38
_UNDER_M = 100.0  # a station may be this much below the map: geoid and ellipsoid differ by as much


@dataclass(frozen=True, slots=True, eq=False)
class HeightMap:
    """Heights over a rectangle of latitude and longitude, between which they are interpolated."""

    south: float
    west: float
    step: tuple[float, float]  # degrees of latitude and longitude between points
    heights: F64  # (N, M)

    @property
    def north(self) -> float:
        return self.south + self.step[0] * (len(self.heights) - 1)

    @property
    def east(self) -> float:
        return self.west + self.step[1] * (len(self.heights[0]) - 1)

    def at(self, lat: F64, lon: F64) -> F64:
        """Bilinear; beyond the edge the edge's height."""
        rows, columns = self.heights.shape
        y = np.clip((lat - self.south) / self.step[0], 0.0, rows - 1.0)
        x = np.clip((lon - self.west) / self.step[1], 0.0, columns - 1.0)
        i, j = np.minimum(y.astype(np.intp), rows - 2), np.minimum(x.astype(np.intp), columns - 2)
        v, u = y - i, x - j
        flat, corner = self.heights.ravel(), i * columns + j
        low = flat.take(corner, mode="clip")
        low += u * (flat.take(corner + 1, mode="clip") - low)
        high = flat.take(corner + columns, mode="clip")
        high += u * (flat.take(corner + (columns + 1), mode="clip") - high)
        return np.asarray(low + v * (high - low))

    def diffraction_db(
        self, frequency_mhz: float, distance_m: F64, here: tuple[F64, F64, F64], there: tuple[F64, F64, F64]
    ) -> F64:
        """Loss of links by the profile between them; each end is latitude, longitude and antenna height."""
        share = np.arange(1, PROFILE_POINTS + 1) / (PROFILE_POINTS + 1)
        loss = np.empty(distance_m.shape)
        for first in range(0, len(loss), PROFILE_ROWS):
            rows = slice(first, first + PROFILE_ROWS)
            ends = zip((part[rows] for part in here[:2]), (part[rows] for part in there[:2]), strict=True)
            lat, lon = (a[..., None] + (b - a)[..., None] * share for a, b in ends)
            ground = self.at(lat, lon)
            loss[rows] = bullington_db(frequency_mhz, distance_m[rows], ground, here[2][rows], there[2][rows])
        return loss


def terrain_of(config: GenerateConfig) -> HeightMap | None:
    """The map of a configuration; None over level ground. Raises ConfigError for maps that do not fit the stations."""
    if config.terrain is None:
        return None
    if config.terrain == FRACTAL:
        return _fractal(config.place_seed, config.terrain_relief_m, *_area(config))
    ground = _read(config.terrain)
    _check_covers(config, ground)
    return ground


def _area(config: GenerateConfig) -> tuple[float, float, float, float]:
    """South, north, west and east of what stations and transmitters may use."""
    if config.use_random_receivers:
        (south, north), (west, east) = RANDOM_AREA
    else:
        lats, lons = [s.lat for s in config.stations], [s.lon for s in config.stations]
        south, north, west, east = min(lats), max(lats), min(lons), max(lons)
    return south - MARGIN_DEG, north + MARGIN_DEG, west - MARGIN_DEG, east + MARGIN_DEG


@lru_cache(maxsize=4)
def _fractal(seed: int, relief_m: float, south: float, north: float, west: float, east: float) -> HeightMap:
    """Heights of a power-law spectrum, by filtering white noise; deepest valleys are level."""
    step = max(_STEP_DEG, (north - south) / (_MOST_POINTS - 1), (east - west) / (_MOST_POINTS - 1))
    rows, columns = (int(np.ceil((high - low) / step)) + 1 for low, high in ((south, north), (west, east)))
    draws = uniform(seed, np.arange(rows), 0, Purpose.TERRAIN, 2 * columns)
    spectrum = np.fft.rfft2(normal(draws[:, :columns], draws[:, columns:]))
    wave = np.hypot(np.fft.fftfreq(rows)[:, None] * rows, np.fft.rfftfreq(columns) * columns * rows / columns)
    field = np.fft.irfft2(
        spectrum * np.where(wave < 1, 0.0, np.maximum(wave, 1.0) ** (-_ROUGHNESS / 2)), (rows, columns)
    )
    heights = np.maximum(relief_m * (1.5 + field / field.std()), 0.0)
    return HeightMap(south, west, (step, step), heights)


# The user's maps


@lru_cache(maxsize=2)
def _read(source: str) -> HeightMap:
    """A file, or a folder of tiles that lie side by side on one grid."""
    path = Path(source)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    tiles = [_read_tile(file) for file in files if file.suffix.lower() in _READERS]
    if not path.exists() or not tiles:
        problem = "holds no height maps" if path.exists() else "does not exist"
        raise _fault(f"{problem}", source, "give a GeoTIFF or SRTM .hgt file, a folder of them, or fractal")
    return _joined(tiles, source)


def _read_tile(path: Path) -> HeightMap:
    try:
        tile = _READERS[path.suffix.lower()](path)
    except ConfigError:
        raise
    except Exception as error:  # damaged files raise whatever their readers happen to stumble over
        raise _fault(f"{path.name} cannot be read: {error}", str(path)) from error
    return tile


def _read_hgt(path: Path) -> HeightMap:
    """SRTM: big-endian 16-bit heights of one degree, named by its south-west corner."""
    corner = re.match(r"([NS])(\d{2})([EW])(\d{3})", path.stem.upper())
    points = round((path.stat().st_size / 2) ** 0.5)
    if corner is None or points not in (1201, 3601):
        raise ValueError("expected a name such as N45E007.hgt and 1201 x 1201 or 3601 x 3601 heights")
    south = float(corner[2]) * (1 if corner[1] == "N" else -1)
    west = float(corner[4]) * (1 if corner[3] == "E" else -1)
    heights = np.fromfile(path, ">i2").reshape(points, points)[::-1]
    return HeightMap(south, west, (1 / (points - 1),) * 2, heights.astype(np.float64))


def _read_geotiff(path: Path) -> HeightMap:
    try:
        import tifffile
    except ImportError as missing:
        raise ConfigError(
            "terrain: GeoTIFF needs the package tifffile, which is not installed",
            code="missing",
            hint='install it with "pip install tifffile"',
        ) from missing
    with tifffile.TiffFile(path) as file:
        page: Any = file.pages[0]
        keys = dict(file.geotiff_metadata or {})
        heights = np.asarray(page.asarray(), np.float64)
        void = page.tags.valueof("GDAL_NODATA")
    if void is not None:
        heights[heights == float(void)] = np.nan
    if int(keys.get("GTModelTypeGeoKey", 2)) != 2 or int(keys.get("GeographicTypeGeoKey", 4326)) != 4326:
        raise ValueError("not in degrees of WGS-84; convert it with: gdalwarp -t_srs EPSG:4326")
    if heights.ndim != 2 or "ModelPixelScale" not in keys or "ModelTiepoint" not in keys:
        raise ValueError("expected one band of heights with a pixel scale and a tie point")
    scale, tie = keys["ModelPixelScale"], keys["ModelTiepoint"]
    inset = 0.0 if int(keys.get("GTRasterTypeGeoKey", 1)) == 2 else 0.5  # of the first point, in pixels
    north = tie[4] - (inset - tie[1]) * scale[1]
    west = tie[3] + (inset - tie[0]) * scale[0]
    south = north - scale[1] * (heights.shape[0] - 1)
    return HeightMap(float(south), float(west), (float(scale[1]), float(scale[0])), heights[::-1])


_READERS = {".hgt": _read_hgt, ".tif": _read_geotiff, ".tiff": _read_geotiff}


def _joined(tiles: list[HeightMap], source: str) -> HeightMap:
    first = tiles[0]
    south, west = min(tile.south for tile in tiles), min(tile.west for tile in tiles)
    rows, columns = (
        round((max(high) - low) / step) + 1
        for high, low, step in (
            ([tile.north for tile in tiles], south, first.step[0]),
            ([tile.east for tile in tiles], west, first.step[1]),
        )
    )
    heights = np.full((rows, columns), np.nan)
    for tile in tiles:
        if not np.allclose(tile.step, first.step, rtol=1e-6):
            raise _fault("has tiles of different resolutions", source, "resample them to one")
        i, j = round((tile.south - south) / first.step[0]), round((tile.west - west) / first.step[1])
        heights[i : i + tile.heights.shape[0], j : j + tile.heights.shape[1]] = tile.heights
    heights[(heights < _HEIGHTS_M[0]) | (heights > _HEIGHTS_M[1])] = np.nan
    return HeightMap(south, west, first.step, heights)


def _check_covers(config: GenerateConfig, ground: HeightMap) -> None:
    """Every place a station or a transmitter may have needs a height."""
    south, north, west, east = _area(config)
    if south < ground.south or north > ground.north or west < ground.west or east > ground.east:
        raise _fault(
            f"covers {ground.south:.2f} to {ground.north:.2f}° N and {ground.west:.2f} to {ground.east:.2f}° E; the "
            f"receivers with {MARGIN_DEG}° around them need {south:.2f} to {north:.2f} and {west:.2f} to {east:.2f}",
            str(config.terrain),
            "add the missing tiles",
        )
    i0, i1 = (int(np.floor((lat - ground.south) / ground.step[0])) for lat in (south, north))
    j0, j1 = (int(np.floor((lon - ground.west) / ground.step[1])) for lon in (west, east))
    holes = np.argwhere(np.isnan(ground.heights[i0 : i1 + 2, j0 : j1 + 2]))
    if len(holes):
        lat, lon = ground.south + (holes[0, 0] + i0) * ground.step[0], ground.west + (holes[0, 1] + j0) * ground.step[1]
        raise _fault(
            f"has {len(holes)} points without a height, the first at {lat:.4f}, {lon:.4f}",
            str(config.terrain),
            "fill them or use another map",
        )
    for station in () if config.use_random_receivers else config.stations:
        height = float(ground.at(np.array(station.lat), np.array(station.lon)))
        if station.alt < height - _UNDER_M:
            raise ConfigError(
                f"stations: {station.name!r} at {station.alt:.0f} m is under ground: the map has {height:.0f} m there",
                field="stations",
                code="conflict",
            )


def _fault(problem: str, source: str, hint: str = "") -> ConfigError:
    return ConfigError(problem, field="terrain", value=source, code="unreadable", hint=hint)

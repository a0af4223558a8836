"""Paths that a ray tracer found, from a file: where transmitters stand, and what arrives of each at every receiver.

Axes: T transmitters, R receivers, P paths, the strongest 4 of which are used. The file is NumPy's .npz or HDF5 with

transmitter  (T, 3)     latitude and longitude in degrees, height of the ground in metres
receiver     (R, 3)     likewise
delay_s      (T, R, P)  from antenna to antenna
gain_db      (T, R, P)  of each path, negative; NaN or −inf where there is none

and optionally `name` (R,). Other arrays, such as angles, are ignored.
"""

import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError
from brim.rf.config import GenerateConfig, Station
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef

F64 = NDArray[np.float64]

MAX_EXCESS_S = 100e-6  # after the straight line's delay; the delay tables must hold it
_EARLY_S = 20e-9  # by which a path may seem faster than light: rounding, and heights of antennas
_NEEDED = {"transmitter": 2, "receiver": 2, "delay_s": 3, "gain_db": 3}


@dataclass(frozen=True, slots=True, eq=False)
class TracedPaths:
    """What a file holds, the strongest paths of each link sorted by delay."""

    transmitter: F64  # (T, 3)
    stations: tuple[Station, ...]  # R
    delay_s: F64  # (T, R, 4) 0 where there is no path
    gain: F64  # (T, R, 4) linear; 0 likewise


def read_paths(source: str, num_paths: int = 4) -> TracedPaths:
    return _read(source, Path(source).stat().st_mtime_ns if Path(source).exists() else 0, num_paths)


def excess_s(config: GenerateConfig, traced: TracedPaths) -> F64:
    """(T, R, 4) delays after the straight line's; raises ConfigError where they cannot belong to these places."""
    places = [(station.lat, station.lon, station.alt + config.rx_antenna_m) for station in config.stations]
    own = [(station.lat, station.lon, station.alt + config.rx_antenna_m) for station in traced.stations]
    if len(places) != len(own) or np.abs(np.subtract(places, own)).max(initial=0.0) > 1e-3:
        raise _fault(f"holds {len(own)} receivers that are not the {len(places)} stations", str(config.paths))
    here = np.stack(ecef(*np.array(own).T), -1)
    there = np.stack(ecef(*(traced.transmitter + np.array([0.0, 0.0, config.tx_antenna_m])).T), -1)
    straight = np.linalg.norm(there[:, None] - here, axis=-1)[..., None] / SPEED_OF_LIGHT
    late = np.where(traced.gain > 0, traced.delay_s - straight, 0.0)
    if late.min(initial=0.0) < -_EARLY_S:
        raise _fault(
            f"has a path {-late.min() * 1e9:.0f} ns faster than light on the straight line",
            str(config.paths),
            "delays are in seconds, from antenna to antenna; check heights and the order of the axes",
        )
    if late.max(initial=0.0) > MAX_EXCESS_S:
        raise _fault(f"has a path {late.max() * 1e6:.0f} µs after the straight line; at most 100 µs", str(config.paths))
    return np.maximum(late, 0.0)


@lru_cache(maxsize=2)
def _read(source: str, changed_ns: int, num_paths: int) -> TracedPaths:
    arrays = _load(source)
    for name, axes in _NEEDED.items():
        if name not in arrays:
            raise _fault(f"has no array {name}; it needs {', '.join(_NEEDED)}", source)
        if arrays[name].ndim != axes or arrays[name].dtype.kind not in "fiu":
            raise _fault(f"has {name} of shape {arrays[name].shape}; expected {axes} axes of numbers", source)
    transmitter, receiver, delay, gain_db = (np.asarray(arrays[name], np.float64) for name in _NEEDED)
    expected = (len(transmitter), len(receiver))
    if (
        delay.shape != gain_db.shape
        or delay.shape[:2] != expected
        or transmitter.shape[1:] + receiver.shape[1:] != (3, 3)
    ):
        raise _fault(
            f"has delay_s {delay.shape} and gain_db {gain_db.shape} for {expected[0]} transmitters and {expected[1]} "
            "receivers; expected (transmitters, receivers, paths) for both, and three numbers for each place",
            source,
        )
    if not all(np.isfinite(places).all() for places in (transmitter, receiver)):
        raise _fault("has places that are not finite numbers", source)
    heard = np.isfinite(gain_db) & np.isfinite(delay)
    if not heard.any() or gain_db[heard].max() > 0:
        raise _fault("has gains above 0 dB, or none at all; gain_db is negative", source)
    gain = np.where(heard, 10 ** (np.where(heard, gain_db, 0.0) / 10), 0.0)
    gain, delay = (_padded(values, num_paths) for values in (gain, np.where(heard, delay, 0.0)))
    strongest = np.argsort(-gain, axis=-1, kind="stable")[..., :num_paths]
    gain, delay = (np.take_along_axis(values, strongest, -1) for values in (gain, delay))
    order = np.argsort(np.where(gain > 0, delay, np.inf), axis=-1, kind="stable")
    gain, delay = (np.take_along_axis(values, order, -1) for values in (gain, delay))
    names = [str(name) for name in arrays.get("name", range(len(receiver)))]
    stations = tuple(
        Station(name if "name" in arrays else f"receiver {name}", *map(float, place))
        for name, place in zip(names, receiver, strict=True)
    )
    return TracedPaths(transmitter, stations, delay, gain)


def _padded(values: F64, num_paths: int) -> F64:
    return np.pad(values, ((0, 0), (0, 0), (0, max(0, num_paths - values.shape[-1]))))


def _load(source: str) -> dict[str, NDArray[np.generic]]:
    path = Path(source)
    try:
        if path.suffix.lower() in (".h5", ".hdf5"):
            return _load_hdf5(path)
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise ValueError("it holds one array without a name")
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _fault(f"cannot be read: {reason}", source, "give a .npz or .h5 file") from error


def _load_hdf5(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        import h5py
    except ImportError as missing:
        raise ConfigError(
            "paths: HDF5 needs the package h5py, which is not installed",
            code="missing",
            hint="install it, or give a .npz file",
        ) from missing
    with h5py.File(path, "r") as file:
        arrays = {name: np.asarray(file[name]) for name in file if hasattr(file[name], "shape")}
    if "name" in arrays:
        arrays["name"] = np.array([name.decode() if isinstance(name, bytes) else str(name) for name in arrays["name"]])
    return arrays


def _fault(problem: str, source: str, hint: str = "") -> ConfigError:
    return ConfigError(problem, field="paths", value=source, code="unreadable", hint=hint)

"""Where things are: WGS-84, straight lines between points, the geometry's dilution of precision.

Axes: B samples, R receivers (always last, so that reductions add in one order whatever the batch).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F64 = NDArray[np.float64]
B1 = NDArray[np.bool_]

SPEED_OF_LIGHT = 299_792_458.0  # m/s
_SEMI_MAJOR_M = 6_378_137.0
_FLATTENING = 1 / 298.257223563
_E2 = _FLATTENING * (2 - _FLATTENING)


def ecef(lat: F64, lon: F64, alt: F64) -> tuple[F64, F64, F64]:
    """Earth-centred, Earth-fixed coordinates (x, y, z) in metres of geodetic points in degrees and metres."""
    phi, lam = np.radians(lat), np.radians(lon)
    sin, cos = np.sin(phi), np.cos(phi)
    radius = _SEMI_MAJOR_M / np.sqrt(1 - _E2 * sin * sin)  # of the prime vertical
    return (
        (radius + alt) * cos * np.cos(lam),
        (radius + alt) * cos * np.sin(lam),
        (radius * (1 - _E2) + alt) * sin,
    )


def enu(lat: F64, lon: F64, alt: F64, lat0: F64, lon0: F64, alt0: F64) -> tuple[F64, F64, F64]:
    """East, north, up in metres of points seen from an origin; the arguments broadcast."""
    x, y, z = ecef(lat, lon, alt)
    x0, y0, z0 = ecef(lat0, lon0, alt0)
    dx, dy, dz = x - x0, y - y0, z - z0
    phi, lam = np.radians(lat0), np.radians(lon0)
    sp, cp, sl, cl = np.sin(phi), np.cos(phi), np.sin(lam), np.cos(lam)
    return (
        -sl * dx + cl * dy,
        -sp * cl * dx - sp * sl * dy + cp * dz,
        cp * cl * dx + cp * sl * dy + sp * dz,
    )


def gdop(east: F64, north: F64, mask: B1) -> F64:
    """Dilution of precision sqrt(trace((HᵀH)⁻¹)), rows of H = (east, north, 1) as horizontal unit directions.

    east, north  (B, R)  metres from the transmitter to each receiver
    mask         (B, R)  the receivers that count
    returns      (B,)    infinite where the geometry is singular
    """
    length = np.hypot(east, north)
    weight = mask / np.maximum(length, 1e-9)
    e, n, one = east * weight, north * weight, mask.astype(np.float64)
    see, snn, sen = (e * e).sum(-1), (n * n).sum(-1), (e * n).sum(-1)
    se, sn, count = e.sum(-1), n.sum(-1), one.sum(-1)
    # Cofactors of the symmetric 3 x 3 matrix [[see, sen, se], [sen, snn, sn], [se, sn, count]].
    c_ee, c_nn, c_tt = snn * count - sn * sn, see * count - se * se, see * snn - sen * sen
    det = see * c_ee - sen * (sen * count - sn * se) + se * (sen * sn - snn * se)
    singular = det <= 1e-12 * np.maximum(count, 1.0) ** 3
    return np.where(
        singular, np.inf, np.sqrt(np.where(singular, 1.0, c_ee + c_nn + c_tt) / np.where(singular, 1.0, det))
    )


def to_local(place: Tensor, origin: Tensor) -> Tensor:
    """East, north, up in metres of points seen from an origin, on the device of the points.

    place   (..., 3)  float64  lat, lon in degrees, alt in metres
    origin  (..., 3)  float64  likewise; the arguments broadcast
    """
    off = _ecef(place) - _ecef(origin)
    return (off[..., None, :] * _axes(origin)).sum(-1)


def from_local(local: Tensor, origin: Tensor) -> Tensor:
    """Latitude, longitude and altitude of points given as east, north, up: the inverse of `to_local`."""
    x, y, z = (_ecef(origin) + (local[..., :, None] * _axes(origin)).sum(-2)).unbind(-1)
    level = torch.hypot(x, y)
    lat = torch.atan2(z, level * (1 - _E2))
    for _ in range(4):  # each step gains three digits and more near the ground
        sin = torch.sin(lat)
        lat = torch.atan2(z + _E2 * _SEMI_MAJOR_M / torch.sqrt(1 - _E2 * sin * sin) * sin, level)
    sin, cos = torch.sin(lat), torch.cos(lat)
    alt = level * cos + z * sin - _SEMI_MAJOR_M * torch.sqrt(1 - _E2 * sin * sin)
    return torch.stack([torch.rad2deg(lat), torch.rad2deg(torch.atan2(y, x)), alt], -1)


def _ecef(place: Tensor) -> Tensor:
    """`ecef` for tensors (..., 3)."""
    phi, lam, alt = torch.deg2rad(place[..., 0]), torch.deg2rad(place[..., 1]), place[..., 2]
    sin, cos = torch.sin(phi), torch.cos(phi)
    radius = _SEMI_MAJOR_M / torch.sqrt(1 - _E2 * sin * sin)
    around = (radius + alt) * cos
    return torch.stack([around * torch.cos(lam), around * torch.sin(lam), (radius * (1 - _E2) + alt) * sin], -1)


def _axes(origin: Tensor) -> Tensor:
    """(..., 3, 3) unit vectors east, north and up as rows, in Earth-centred coordinates."""
    phi, lam = torch.deg2rad(origin[..., 0]), torch.deg2rad(origin[..., 1])
    sp, cp, sl, cl = torch.sin(phi), torch.cos(phi), torch.sin(lam), torch.cos(lam)
    rows = (-sl, cl, 0 * sl, -sp * cl, -sp * sl, cp, cp * cl, cp * sl, sp)
    return torch.stack(rows, -1).reshape(*phi.shape, 3, 3)

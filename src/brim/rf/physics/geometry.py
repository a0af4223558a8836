"""Where things are: WGS-84, straight lines and geodesics between points, the geometry's dilution of precision.

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
    return ((radius + alt) * cos * np.cos(lam), (radius + alt) * cos * np.sin(lam), (radius * (1 - _E2) + alt) * sin)


def enu(lat: F64, lon: F64, alt: F64, lat0: F64, lon0: F64, alt0: F64) -> tuple[F64, F64, F64]:
    """East, north, up in metres of points seen from an origin; the arguments broadcast."""
    x, y, z = ecef(lat, lon, alt)
    x0, y0, z0 = ecef(lat0, lon0, alt0)
    dx, dy, dz = x - x0, y - y0, z - z0
    phi, lam = np.radians(lat0), np.radians(lon0)
    sp, cp, sl, cl = np.sin(phi), np.cos(phi), np.sin(lam), np.cos(lam)
    return (-sl * dx + cl * dy, -sp * cl * dx - sp * sl * dy + cp * dz, cp * cl * dx + cp * sl * dy + sp * dz)


def geodesic_m(lat1: F64, lon1: F64, lat2: F64, lon2: F64) -> F64:
    """Length in metres of the shortest line on the ellipsoid between points in degrees; the arguments broadcast.

    Vincenty's inverse solution (Survey Review 23, 1975), to a tenth of a millimetre. Between points nearly opposite on
    the Earth it does not converge; from 19 000 km on the result is rough.
    """
    flat = 1 - _FLATTENING
    lat1, lon1, lat2, lon2 = np.broadcast_arrays(*(np.radians(angle) for angle in (lat1, lon1, lat2, lon2)))
    u1, u2 = np.arctan(flat * np.tan(lat1)), np.arctan(flat * np.tan(lat2))  # reduced latitudes
    s1, c1, s2, c2 = np.sin(u1), np.cos(u1), np.sin(u2), np.cos(u2)
    span = (lon2 - lon1 + np.pi) % (2 * np.pi) - np.pi
    lam = span
    for _ in range(20):
        sl, cl = np.sin(lam), np.cos(lam)
        sin = np.hypot(c2 * sl, c1 * s2 - s1 * c2 * cl)
        cos = s1 * s2 + c1 * c2 * cl
        sigma = np.arctan2(sin, cos)
        sin_alpha = c1 * c2 * sl / np.where(sin == 0, 1.0, sin)
        cos2_alpha = 1 - sin_alpha**2
        on_equator = cos2_alpha < 1e-15
        cos_2m = np.where(on_equator, 0.0, cos - 2 * s1 * s2 / np.where(on_equator, 1.0, cos2_alpha))
        c = _FLATTENING / 16 * cos2_alpha * (4 + _FLATTENING * (4 - 3 * cos2_alpha))
        further = sigma + c * sin * (cos_2m + c * cos * (2 * cos_2m**2 - 1))
        new = span + (1 - c) * _FLATTENING * sin_alpha * further
        moved, lam = float(np.abs(new - lam).max(initial=0.0)), new
        if moved < 1e-12:
            break
    u = cos2_alpha * _E2 / (1 - _E2)  # e'² cos² α
    a = 1 + u / 16384 * (4096 + u * (-768 + u * (320 - 175 * u)))
    b = u / 1024 * (256 + u * (-128 + u * (74 - 47 * u)))
    wave = cos * (2 * cos_2m**2 - 1) - b / 6 * cos_2m * (4 * sin**2 - 3) * (4 * cos_2m**2 - 3)
    length: F64 = _SEMI_MAJOR_M * flat * a * (sigma - b * sin * (cos_2m + b / 4 * wave))
    return length


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

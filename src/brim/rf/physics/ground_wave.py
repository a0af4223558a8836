"""How strong the ground wave is: vertical polarisation over smooth, uniform land, both antennas on the ground.

An approximation to the curves of ITU-R P.368 for average land. Near the transmitter the Earth counts as flat: Norton's
attenuation in Terman's closed form. Beyond the radio horizon the residue series of van der Pol and Bremmer on a sphere
of 4/3 of the Earth's radius, in Fock's notation: the roots of w'(t) = q·w(t) are followed from q = 0, where they are
those of the Airy function's derivative, along dt/dq = 1/(t − q²).
"""

import cmath
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from brim.rf.physics.geometry import SPEED_OF_LIGHT

F64 = NDArray[np.float64]

PERMITTIVITY = 22.0  # relative; land of ITU-R P.368
CONDUCTIVITY = 3e-3  # S/m
_RADIUS_M = 4 / 3 * 6_371_000.0  # standard refraction
_NUM_ROOTS = 24
_ROOTS_AT_0 = (1.01879297, 3.24819758, 4.82009921, 6.16330736, 7.37217726)  # −zeros of Ai′
_FLAT, _ROUND = 0.25, 0.6  # of the distance x: flat Earth below, residues above, blended between


def attenuation_db(frequency_mhz: float, distance_m: F64) -> F64:
    """Loss beyond free space; 0 on a perfectly conducting plane."""
    flat = _flat(frequency_mhz, distance_m)
    x = distance_m / _RADIUS_M * _scale(frequency_mhz)
    sphere = _sphere(frequency_mhz, np.maximum(x, _FLAT))
    share = np.clip((x - _FLAT) / (_ROUND - _FLAT), 0.0, 1.0)
    magnitude = np.log10(flat) * (1 - share) + np.log10(sphere) * share
    return np.maximum(-20 * magnitude, 0.0)


def _flat(frequency_mhz: float, distance_m: F64) -> F64:
    """Magnitude of Norton's attenuation function; p is the numerical distance, b its phase."""
    wave = SPEED_OF_LIGHT / (frequency_mhz * 1e6)
    x = 18e3 * CONDUCTIVITY / frequency_mhz
    b = math.atan2(PERMITTIVITY + 1, x)
    p = math.pi * distance_m / (wave * x) * math.cos(b)
    tail = np.sqrt(p / 2) * np.exp(-0.6 * np.minimum(p, 100.0)) * math.sin(b)
    return np.asarray(np.maximum((2 + 0.3 * p) / (2 + p + 0.6 * p**2) - tail, 1e-12))


def _sphere(frequency_mhz: float, x: F64) -> F64:
    """Magnitude of the residue series."""
    q = 1j * _scale(frequency_mhz) * _impedance(frequency_mhz)
    roots = np.array(_roots(q))
    series = (np.exp(1j * x[..., None] * roots) / (roots - q * q)).sum(-1)
    return np.asarray(np.maximum(np.sqrt(math.pi * x) * np.abs(series), 1e-30))


def _scale(frequency_mhz: float) -> float:
    """(ka/2)^⅓."""
    return float((math.pi * frequency_mhz * 1e6 / SPEED_OF_LIGHT * _RADIUS_M) ** (1 / 3))


def _impedance(frequency_mhz: float) -> complex:
    """Of the ground over that of air."""
    wave = SPEED_OF_LIGHT / (frequency_mhz * 1e6)
    ground = complex(PERMITTIVITY, 60 * wave * CONDUCTIVITY)
    return cmath.sqrt(ground - 1) / ground


@lru_cache(maxsize=64)
def _roots(q: complex) -> tuple[complex, ...]:
    turn = cmath.exp(1j * math.pi / 3)
    steps = 40 + round(60 * abs(q))
    out = []
    for number in range(_NUM_ROOTS):
        y = 3 * math.pi * (4 * number + 1) / 8
        size = _ROOTS_AT_0[number] if number < len(_ROOTS_AT_0) else y ** (2 / 3) * (1 - 7 / (48 * y * y))
        t, step = size * turn, q / steps
        for k in range(steps):  # Runge-Kutta of the fourth order
            at = k * step
            a = step / (t - at**2)
            b = step / (t + a / 2 - (at + step / 2) ** 2)
            c = step / (t + b / 2 - (at + step / 2) ** 2)
            d = step / (t + c - (at + step) ** 2)
            t += (a + 2 * b + 2 * c + d) / 6
        out.append(t)
    return tuple(out)

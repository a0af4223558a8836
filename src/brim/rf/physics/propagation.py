"""How long waves travel from 10 kHz to 6 GHz, what is not known about that, and where it is not known.

From 30 MHz on, paths are straight lines between antennas at the speed of light. Below, they follow the ground:
geodesics on the ellipsoid at the speed of light in air. The ionosphere returns a part of the power below 30 MHz, which
arrives later. Below 3 MHz it blurs what travels along the ground, more with distance and by night; from 3 to 30 MHz it
is all that arrives beyond a range, by a path whose height nobody told: arrivals from there tell no distance.
"""

import math

import numpy as np
from numpy.typing import NDArray

from brim.rf.physics.geometry import SPEED_OF_LIGHT

F64 = NDArray[np.float64]

LINE_OF_SIGHT_MHZ = 30.0  # from here on straight lines
SKY_WAVE_MHZ = 3.0  # from here to 30 MHz nothing but sky wave arrives from far
AIR_INDEX = 1.000_315  # standard atmosphere at sea level, ITU-R P.453
_US_PER_M = 1e6 / SPEED_OF_LIGHT
# Over ground of unknown conductivity the wave is later by 0 to 1 µs in 100 km (secondary phase of 100 kHz systems).
_GROUND_US_PER_M = 0.5e-5
# Sky wave beside the ground wave: one hop from the height of the D layer by day, the E layer by night. Two waves of
# amplitude ratio r < 1 and any phase shift the group delay by the hop's times r/√2 rms. r grows with the square of the
# distance and is 1 at these: by day less than that (400 km showed a few µs), by night where long waves begin to fade,
# some 600 km from the transmitter, and medium waves at 200.
_HEIGHT_M = {"day": 70e3, "night": 90e3}
_EQUAL_M = {"day": 700e3, "night": 600e3, "medium wave by night": 200e3}
_MEDIUM_MHZ = 0.3
_HF_US, _HF_AT_M = 13.0, 400_000.0  # from SKY_WAVE_MHZ on, within the ground wave's range
_EARTH_M = 6_371_000.0


def is_ground_wave(frequency_mhz: float | None) -> bool:
    """Whether waves of this frequency follow the ground; an unknown frequency is taken as VHF or higher."""
    return frequency_mhz is not None and frequency_mhz < LINE_OF_SIGHT_MHZ


def travel_us(frequency_mhz: float | None, distance_m: F64) -> F64:
    index = AIR_INDEX if is_ground_wave(frequency_mhz) else 1.0
    return distance_m * (index * _US_PER_M)


def travel_sigma_us(frequency_mhz: float | None, distance_m: F64, *, night: bool = True) -> F64:
    """Standard deviation of the travel time beyond what is measured; 0 along straight lines."""
    if frequency_mhz is None or not is_ground_wave(frequency_mhz):
        return np.zeros_like(distance_m)
    if frequency_mhz >= SKY_WAVE_MHZ:
        sky = _HF_US * (distance_m / _HF_AT_M) ** 2
    else:
        time = "night" if night else "day"
        equal = _EQUAL_M["medium wave by night" if night and frequency_mhz > _MEDIUM_MHZ else time]
        share = np.minimum((distance_m / equal) ** 2 / math.sqrt(2), 1.0)
        sky = share * hop_delay_us(distance_m, _HEIGHT_M[time])
    return np.hypot(_GROUND_US_PER_M * distance_m, sky)


def hop_delay_us(distance_m: F64, height_m: float) -> F64:
    """How much later than along the ground a wave arrives by one reflection at a height."""
    top = _EARTH_M + height_m
    half = np.sqrt(_EARTH_M**2 + top**2 - 2 * _EARTH_M * top * np.cos(distance_m / 2 / _EARTH_M))
    return np.asarray((2 * half - distance_m) * _US_PER_M)


def sun_elevation_deg(unix_s: float, lat: F64, lon: F64) -> F64:
    """Height of the sun above the horizon, to about 2°: the year as a circle, noon by the longitude."""
    days = unix_s / 86_400
    declination = math.radians(23.44) * math.sin(2 * math.pi * ((days - 79.5) % 365.2422) / 365.2422)
    hour = 2 * math.pi * (days % 1 - 0.5) + np.radians(lon)
    phi = np.radians(lat)
    sine = np.sin(phi) * math.sin(declination) + np.cos(phi) * math.cos(declination) * np.cos(hour)
    return np.degrees(np.arcsin(np.clip(sine, -1, 1)))


def ground_range_m(frequency_mhz: float | None) -> float:
    """How far the ground wave may be heard; infinite where there is no sky wave, or it is modelled as noise.

    400 km at 3 MHz, 130 km at 30 MHz: more than it reaches over land with 1 kW, about what it does over sea.
    """
    if frequency_mhz is None or not SKY_WAVE_MHZ <= frequency_mhz < LINE_OF_SIGHT_MHZ:
        return math.inf
    return 400_000.0 * math.pow(SKY_WAVE_MHZ / frequency_mhz, 0.5)

"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), keyed by (seed, item, receiver, purpose).

A number depends on what it is for and on nothing else, so a sample is the same whatever batch, order, thread or
device count made it. The same words come out of the Triton kernels (`tl.philox`), so noise is the same on every device.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
PURPOSE_SHIFT = 16  # counter word 1 is purpose << 16 | receiver


class Purpose(IntEnum):
    """What a random number is for; part of its key, so new purposes never disturb old data."""

    SCENE = 1
    RECEIVER = 2
    LINK = 3
    ECHO = 4
    MESSAGE = 5
    FADING = 6
    NOISE = 7
    TERRAIN = 8
    SHADOWING = 9
    BLOCKED = 10
    STATION = 11
    POWER = 12
    CLOCK = 13
    FILTER = 14
    OSCILLATOR = 15
    AGC = 16
    LOST = 17
    INTERFERER = 18
    INTERFERER_LINK = 19
    IMPULSE = 20


PhiloxWord = U64 | np.uint64


def philox(
    c0: PhiloxWord, c1: PhiloxWord, c2: PhiloxWord, c3: PhiloxWord, *, seed: int
) -> tuple[PhiloxWord, PhiloxWord, PhiloxWord, PhiloxWord]:
    """Four 32-bit words (in uint64) for each counter; the arguments broadcast and hold 32-bit values."""
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(key0), (p0 >> _SHIFT) ^ c3 ^ np.uint64(key1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & 0xFFFFFFFF, (key1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def words(seed: int, index: NDArray[np.int64], receiver: NDArray[np.int64] | int, purpose: Purpose, count: int) -> U64:
    """`count` words per (index, receiver).

    index, receiver  (...)         broadcast against each other
    returns          (..., count)  uint64 holding 32-bit values
    """
    index, receiver = np.broadcast_arrays(np.asarray(index, np.int64), np.asarray(receiver, np.int64))
    item = index.astype(np.uint64)[..., None]
    stream = (receiver.astype(np.uint64) | np.uint64(int(purpose) << PURPOSE_SHIFT))[..., None]
    block = np.arange(-(-count // 4), dtype=np.uint64)
    shape = np.broadcast_shapes(item.shape, block.shape)
    c0 = np.ascontiguousarray(np.broadcast_to(block, shape))
    out = philox(c0, stream, item & _LOW, item >> _SHIFT, seed=seed)
    return np.stack(np.broadcast_arrays(*out), axis=-1).reshape(*shape[:-1], 4 * shape[-1])[..., :count]


def uniform(
    seed: int, index: NDArray[np.int64], receiver: NDArray[np.int64] | int, purpose: Purpose, count: int
) -> F64:
    """Uniform numbers in (0, 1), float64, shape (..., count)."""
    return (words(seed, index, receiver, purpose, count).astype(np.float64) + 0.5) * 2.0**-32


def normal(u1: F64, u2: F64) -> F64:
    """Standard normal numbers from two independent uniform ones (Box-Muller, cosine branch)."""
    return np.asarray(np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2))

"""Arrays in .npy files, read without unpickling; safe in several threads."""

import threading
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

VERSIONS = ((1, 0), (2, 0))
# NumPy parses a header with ast.literal_eval, which may raise SystemError in Python 3.11 when two threads are in it.
_parsing = threading.Lock()


def read_npy_header(opened: IO[bytes], version: tuple[int, int]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first axis varies fastest, and dtype; the file stands behind its magic number."""
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with _parsing:
        return read(opened)


def load_npy(path: Path) -> np.ndarray[Any, Any]:
    """The array of a file; ValueError if it holds objects, is truncated or is not an .npy file."""
    with path.open("rb") as opened:
        version = np.lib.format.read_magic(opened)
        if version not in VERSIONS:
            raise ValueError(f"has .npy format version {version[0]}.{version[1]}, expected 1.0 or 2.0")
        shape, fortran, dtype = read_npy_header(opened, version)
        if dtype.hasobject:
            raise ValueError("holds Python objects, which are never loaded")
        count = prod(shape)
        values = np.fromfile(opened, dtype, count)
    if len(values) < count:
        raise ValueError(f"is truncated: {len(values)} of {count} values")
    return values.reshape(shape, order="F" if fortran else "C")

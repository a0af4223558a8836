"""One .npy file of a sequence: its header is checked without reading it; its frames are read, checked and converted.

A fault of a file is returned as text that continues a sentence about it, not raised, so that a caller can count bad
files or leave them out. Nothing is ever unpickled.
"""

# Axes: T frames, D features

import io
import math
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from brim.engine.rows import read_npy_header
from brim.sequences.corpus.source import SequenceSource, convert

# Values handled at once: from 32768 on torch starts its own threads, which compete with ours and took ten times as
# long on two busy cores; this many also stay in a core's cache.
CHUNK_VALUES = 32767
_CHECK_BYTES = 4 << 20  # read at a time when a large file is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyFile(SequenceSource):
    """The header of an .npy file, and the size and time by which a change is noticed."""

    in_pieces: ClassVar[bool] = True

    dtype: np.dtype[Any]
    fortran: bool  # features vary slowest in the file
    offset: int  # of the first value, bytes
    is_transposed: bool = False  # the file is (D, T)

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def read(self, first: int, out: Tensor) -> str:
        return FrameReader(self).read(first, out)

    def check(self, dtype: torch.dtype) -> str:
        return FrameReader(self).check(dtype)

    def transposed(self) -> "NpyFile":
        """The same file, understood as (D, T)."""
        return replace(self, length=self.dim, dim=self.length, fortran=not self.fortran, is_transposed=True)


def parse(data: bytes | memoryview) -> Tensor | str:
    """Frames (T, D) float32 of an .npy file's bytes, or their fault."""
    header = parse_header(io.BytesIO(data), len(data))
    if isinstance(header, str):
        return header
    shape, fortran, dtype, offset = header
    values = np.frombuffer(data, dtype, shape[0] * shape[1], offset).reshape(shape, order="F" if fortran else "C")
    out = torch.empty(shape)
    return convert(np.array(values, order="C"), 0, out) or out


def parse_header(opened: IO[bytes], size: int) -> tuple[tuple[int, int], bool, np.dtype[Any], int] | str:
    """Shape, whether features vary slowest, dtype and the first value's offset; or the fault. size is in bytes."""
    header = parse_stack(opened, size)
    if isinstance(header, str):
        return header
    (layers, *shape), fortran, dtype, offset = header
    if layers > 1:
        return f"has shape {[layers, *shape]}, expected [frames, features]"
    return (shape[0], shape[1]), fortran, dtype, offset


def parse_stack(opened: IO[bytes], size: int) -> tuple[tuple[int, int, int], bool, np.dtype[Any], int] | str:
    """As parse_header, for one or several layers: the shape is (L, T, D)."""
    try:
        version = np.lib.format.read_magic(opened)
        if version not in ((1, 0), (2, 0)):
            return f"has .npy format version {version[0]}.{version[1]}, expected 1.0 or 2.0"
        shape, fortran, dtype = read_npy_header(opened, version)
        offset = opened.tell()
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}"
    except Exception as failure:  # the header is a Python literal; its parser raises anything
        return f"is not an .npy file ({str(failure).splitlines()[0] if str(failure) else type(failure).__name__})"
    if len(shape) == 2:
        shape = (1, *shape)
    fault = _find_fault(dtype, shape, size - offset)
    return fault or ((int(shape[0]), int(shape[1]), int(shape[2])), bool(fortran), dtype, offset)


def read_header(path: Path, name: str) -> NpyFile | str:
    """The header of a file that can be packed, or its fault; no frame is read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "is not a file"  # opening a pipe would block forever
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            header = parse_stack(opened, status.st_size)
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}"
    if isinstance(header, str):
        return header
    (layers, length, dim), fortran, dtype, offset = header
    return NpyFile(
        id=name, path=path, dtype=dtype, length=length, dim=layers * dim, fortran=fortran, offset=offset,
        size=status.st_size, mtime_ns=status.st_mtime_ns, layers=layers,
    )  # fmt: skip


def _find_fault(dtype: np.dtype[Any], shape: tuple[int, ...], num_bytes: int) -> str:
    if dtype.hasobject:
        return "holds Python objects, which are never loaded; expected numbers"
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        return f"holds {dtype}, expected float16, float32, float64 or integers"
    if len(shape) != 3:
        return f"has shape {list(shape)}, expected [frames, features]"
    if min(shape) < 1:
        known = list(shape[1:] if shape[0] == 1 else shape)
        return f"has shape {known}, expected at least one frame and one feature"
    promised = math.prod(shape) * dtype.itemsize
    if num_bytes < promised:
        return f"is truncated: its header promises {promised} bytes of frames, the file holds {num_bytes}"
    return ""


class FrameReader:
    """An .npy file whose frames are read, checked and converted, piece by piece."""

    def __init__(self, npy: NpyFile) -> None:
        self.npy = npy

    def read(self, first: int, out: Tensor) -> str:
        """Fill out with the frames from first on; returns the fault of the first bad frame, or "".

        out  (n, D)  float16 or float32, contiguous, on the host
        """
        npy, num = self.npy, max(1, CHUNK_VALUES // self.npy.dim)
        try:
            with npy.path.open("rb", buffering=0) as opened:
                status = os.fstat(opened.fileno())
                if (status.st_size, status.st_mtime_ns) != (npy.size, npy.mtime_ns):
                    return "changed while it was being packed"
                if npy.layers > 1:  # all at once: so do those of layers
                    stack = (npy.layers, npy.length, npy.dim // npy.layers)
                    layers = np.memmap(opened, npy.dtype, "r", npy.offset, stack, "F" if npy.fortran else "C")
                    frames = layers[:, first : first + len(out)].transpose(1, 0, 2)  # (n, L, D)
                    return convert(np.array(frames, order="C").reshape(len(out), -1), first, out)
                if npy.fortran:  # all at once: a frame's values lie far apart
                    shape = (npy.length, npy.dim)
                    mapped = np.memmap(opened, npy.dtype, "r", npy.offset, shape, "F")
                    return convert(np.array(mapped[first : first + len(out)], order="C"), first, out)
                rows = np.empty((min(num, len(out)), npy.dim), npy.dtype)
                for start in range(0, len(out), num):
                    part = out[start : start + num]
                    if not _read_into(opened.fileno(), npy.offset + (first + start) * npy.row_bytes, rows[: len(part)]):
                        return "ended early while it was being packed"
                    fault = convert(rows[: len(part)], first + start, part)
                    if fault:
                        return fault
        except OSError as failure:
            return f"cannot be read: {failure.strerror or failure}"
        return ""

    def check(self, dtype: torch.dtype) -> str:
        """Read all frames and keep none; returns the fault of the first bad frame, or ""."""
        step = max(1, _CHECK_BYTES // self.npy.row_bytes)
        out = torch.empty(step, self.npy.dim, dtype=dtype)
        for first in range(0, self.npy.length, step):
            fault = self.read(first, out[: self.npy.length - first])
            if fault:
                return fault
        return ""


def _read_into(handle: int, offset: int, rows: np.ndarray[Any, Any]) -> bool:
    """Fill a contiguous array from a file without holding the GIL; False if the file ends too early."""
    left = memoryview(rows.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
    while left:
        num = os.preadv(handle, [left], offset)
        if not num:
            return False
        left, offset = left[num:], offset + num
    return True

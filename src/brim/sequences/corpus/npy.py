"""One .npy file of a sequence: its header is checked without reading it; its frames are read, checked and converted.

A fault of a file is returned as text that continues a sentence about it, not raised, so that a caller can count bad
files or leave them out. Nothing is ever unpickled.
"""

# Axes: T frames, D features

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

# Values handled at once: from 32768 on torch starts its own threads, which compete with ours and took ten times as
# long on two busy cores; this many also stay in a core's cache.
CHUNK_VALUES = 32767
_CHECK_BYTES = 4 << 20  # read at a time when a large file is checked
_EXACT = {torch.float16: 2**11, torch.float32: 2**24}  # integers up to here are exact
STORED = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyFile:
    """The header of an .npy file, and the size and time by which a change is noticed."""

    id: str  # path below the folder, with /
    path: Path
    dtype: np.dtype[Any]
    length: int  # T, frames
    dim: int  # D, features
    fortran: bool  # features vary slowest in the file
    offset: int  # of the first value, bytes
    size: int  # of the file, bytes
    mtime_ns: int

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.length * self.row_bytes


def parse(data: bytes | memoryview) -> Tensor | str:
    """Frames (T, D) float32 of an .npy file's bytes, or their fault."""
    header = parse_header(io.BytesIO(data), len(data))
    if isinstance(header, str):
        return header
    shape, fortran, dtype, offset = header
    values = np.frombuffer(data, dtype, shape[0] * shape[1], offset).reshape(shape, order="F" if fortran else "C")
    rows = np.array(values, dtype=dtype.newbyteorder("="), order="C")  # a copy: data may be reused
    out = torch.empty(shape)
    return convert(rows, 0, out) or out


def parse_header(opened: IO[bytes], size: int) -> tuple[tuple[int, int], bool, np.dtype[Any], int] | str:
    """Shape, whether features vary slowest, dtype and the first value's offset; or the fault. size is in bytes."""
    try:
        version = np.lib.format.read_magic(opened)
        if version not in ((1, 0), (2, 0)):
            return f"has .npy format version {version[0]}.{version[1]}, expected 1.0 or 2.0"
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(opened)
        offset = opened.tell()
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}"
    except Exception as failure:  # the header is a Python literal; its parser raises anything
        return f"is not an .npy file ({str(failure).splitlines()[0] if str(failure) else type(failure).__name__})"
    fault = _find_fault(dtype, shape, size - offset)
    return fault or ((int(shape[0]), int(shape[1])), bool(fortran), dtype, offset)


def read_header(path: Path, name: str) -> NpyFile | str:
    """The header of a file that can be packed, or its fault; no frame is read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "is not a file"  # opening a pipe would block forever
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            header = parse_header(opened, status.st_size)
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}"
    if isinstance(header, str):
        return header
    shape, fortran, dtype, offset = header
    return NpyFile(
        id=name, path=path, dtype=dtype, length=shape[0], dim=shape[1], fortran=fortran, offset=offset,
        size=status.st_size, mtime_ns=status.st_mtime_ns,
    )  # fmt: skip


def _find_fault(dtype: np.dtype[Any], shape: tuple[int, ...], num_bytes: int) -> str:
    if dtype.hasobject:
        return "holds Python objects, which are never loaded; expected numbers"
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        return f"holds {dtype}, expected float16, float32, float64 or integers"
    if len(shape) != 2:
        return f"has shape {list(shape)}, expected [frames, features]"
    if shape[0] < 1 or shape[1] < 1:
        return f"has shape {list(shape)}, expected at least one frame and one feature"
    promised = shape[0] * shape[1] * dtype.itemsize
    if num_bytes < promised:
        return f"is truncated: its header promises {promised} bytes of frames, the file holds {num_bytes}"
    return ""


class FrameReader:
    """An open .npy file whose frames are read, checked and converted, piece by piece."""

    def __init__(self, npy: NpyFile) -> None:
        self.npy = npy
        self._direct = npy.dtype.kind == "f" and npy.dtype.isnative and not npy.fortran
        self._scratch = torch.empty(0)

    def read(self, first: int, out: Tensor) -> str:
        """Fill out with the frames from first on; returns the fault of the first bad frame, or "".

        out  (n, D)  float16 or float32, contiguous, on the host
        """
        # all at once through a map: each new map of a file faults its pages in again
        step = max(1, CHUNK_VALUES // self.npy.dim) if self._direct else len(out)
        try:
            handle = os.open(self.npy.path, os.O_RDONLY)
        except OSError as failure:
            return f"cannot be read: {failure.strerror or failure}"
        try:
            status = os.fstat(handle)
            if (status.st_size, status.st_mtime_ns) != (self.npy.size, self.npy.mtime_ns):
                return "changed while it was being packed"
            for start in range(0, len(out), step):
                fault = self._read_chunk(handle, first + start, out[start : start + step])
                if fault:
                    return fault
        except OSError as failure:
            return f"cannot be read: {failure.strerror or failure}"
        finally:
            os.close(handle)
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

    def _read_chunk(self, handle: int, first: int, out: Tensor) -> str:
        if not self._direct:
            return convert(self._load(handle, first, len(out)), first, out)
        source = _FLOATS[self.npy.dtype.itemsize]
        rows = out if source == out.dtype else self._room(source, len(out))
        if not _read_into(handle, self.npy.offset + first * self.npy.row_bytes, rows):
            return "ended early while it was being packed"
        fault = _find_bad_frame(rows, first, out.dtype)
        if not fault and rows is not out:
            out.copy_(rows)
        return fault

    def _room(self, dtype: torch.dtype, num: int) -> Tensor:
        if len(self._scratch) < num:
            self._scratch = torch.empty(num, self.npy.dim, dtype=dtype)
        return self._scratch[:num]

    def _load(self, handle: int, first: int, num: int) -> np.ndarray[Any, Any]:
        """Frames in any dtype, byte order or axis order, through a map of the file."""
        with os.fdopen(os.dup(handle), "rb") as opened:
            order = "F" if self.npy.fortran else "C"
            shape = (self.npy.length, self.npy.dim)
            mapped = np.memmap(opened, self.npy.dtype, "r", self.npy.offset, shape, order)  # type: ignore[call-overload]
            return np.array(mapped[first : first + num], dtype=self.npy.dtype.newbyteorder("="), order="C")


def convert(rows: np.ndarray[Any, Any], first: int, out: Tensor) -> str:
    """Fill out (n, D) with rows of any dtype in native byte order; returns the fault of the first bad frame, or ""."""
    if rows.dtype.kind == "f":
        frames = torch.from_numpy(rows)
        fault = _find_bad_frame(frames, first, out.dtype)
    else:
        fault = _find_inexact(rows, first, out.dtype)
        frames = torch.from_numpy(rows.astype(np.float32))
    if not fault:
        out.copy_(frames)
    return fault


_FLOATS = {2: torch.float16, 4: torch.float32, 8: torch.float64}


def _read_into(handle: int, offset: int, rows: Tensor) -> bool:
    """Fill a contiguous tensor from a file without holding the GIL; False if the file ends too early."""
    left = memoryview(rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while left:
        num = os.preadv(handle, [left], offset)
        if not num:
            return False
        left, offset = left[num:], offset + num
    return True


def _find_bad_frame(rows: Tensor, first: int, stored: torch.dtype) -> str:
    """The first frame with NaN, Inf or a value that stored cannot hold; good frames take a single pass."""
    limit = torch.finfo(stored).max
    low, high = (float(value) for value in torch.aminmax(rows))  # NaN propagates and is within no bounds
    if -limit <= low and high <= limit:
        return ""
    bad = ~(rows.double().abs() <= limit)
    frame = int(bad.any(1).int().argmax())
    value = float(rows[frame][bad[frame]][0])
    where = f"frame {first + frame} holds {value:g}"
    if not np.isfinite(value):
        return f"{where}, expected finite numbers"
    return f"{where}, beyond the {limit:g} that {_name(stored)} can hold; {_wider(stored)}"


def _find_inexact(rows: np.ndarray[Any, Any], first: int, stored: torch.dtype) -> str:
    limit = _EXACT[stored]
    if -limit <= int(rows.min()) and int(rows.max()) <= limit:
        return ""
    bad = (rows > limit) | (rows < -limit) if rows.dtype.kind == "i" else rows > limit
    frame = int(bad.any(1).argmax())
    value = int(rows[frame][bad[frame]][0])
    return f"frame {first + frame} holds {value}, {_name(stored)} is exact up to {limit}; {_wider(stored)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wider(stored: torch.dtype) -> str:
    return "use dtype float32" if stored == torch.float16 else "scale the features down"

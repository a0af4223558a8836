"""A sequence that is to be packed: what is known before its frames are read; their check and conversion.

A fault is returned as text that continues a sentence about the sequence, not raised, so that a caller can count bad
ones or leave them out.
"""

# Axes: T frames, D features, L layers

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

_EXACT = {torch.float16: 2**11, torch.float32: 2**24}  # integers up to here are exact
STORED = {"float16": torch.float16, "float32": torch.float32}

Frames = np.ndarray[Any, np.dtype[Any]]  # (T, D)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A sequence that cannot be packed."""

    file: str  # path below the folder
    fault: str  # continues a sentence that begins with the file


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSource(ABC):
    """One sequence of a folder or file."""

    in_pieces: ClassVar[bool] = False  # whether a part of it can be read without the rest

    id: str  # path below the folder, with /; of several in a file, FILE/NAME
    path: Path  # of the file
    length: int  # T, frames
    dim: int  # D, features of a stored frame: of L layers, all of them
    size: int  # of the file or of its part, bytes
    mtime_ns: int
    layers: int = 1  # L

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of a frame in the source, for progress and the size of chunks."""

    @property
    def nbytes(self) -> int:
        return self.length * self.row_bytes

    @abstractmethod
    def read(self, first: int, out: Tensor) -> str:
        """Fill out with the frames from first on; returns the fault of the first bad frame, or "".

        out  (n, D)  float16 or float32, contiguous, on the host
        """

    def check(self, dtype: torch.dtype) -> str:
        """Read all frames and keep none; returns the fault of the first bad frame, or ""."""
        return self.read(0, torch.empty(self.length, self.dim, dtype=dtype))

    @classmethod
    def read_all(cls, parts: "Sequence[SequencePart]", outs: Sequence[Tensor]) -> list[str]:
        """Read parts of several sequences of this class; returns the fault of each, or ""."""
        return [part.source.read(part.first, out) for part, out in zip(parts, outs, strict=True)]


class SequencePart(NamedTuple):
    """Neighbouring frames of one sequence."""

    source: SequenceSource
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.first) * self.source.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSequence(SequenceSource):
    """A sequence in a file that is parsed as a whole; its frames are kept, or the file is parsed again."""

    load: Callable[[], Frames | str]  # (T, D), or the fault

    @property
    def row_bytes(self) -> int:
        return self.dim * 4

    def read(self, first: int, out: Tensor) -> str:
        frames = self.load()
        if isinstance(frames, str):
            return frames
        if frames.shape != (self.length, self.dim):
            return "changed while it was being packed"
        return convert(np.ascontiguousarray(frames[first : first + len(out)]), first, out)


def convert(rows: np.ndarray[Any, Any], first: int, out: Tensor) -> str:
    """Fill out (n, D) with rows of any dtype and byte order; returns the fault of the first bad frame, or ""."""
    if not rows.dtype.isnative:
        rows = rows.astype(rows.dtype.newbyteorder("="))
    if rows.dtype.kind == "f":
        frames = torch.from_numpy(rows)
        fault = _find_bad_frame(frames, first, out.dtype)
    else:
        fault = _find_inexact(rows, first, out.dtype)
        frames = torch.from_numpy(rows.astype(np.float32))
    if not fault:
        out.copy_(frames)
    return fault


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
    return f"{where}, beyond the {limit:g} that {_advice(stored, 'can hold')}"


def _find_inexact(rows: np.ndarray[Any, Any], first: int, stored: torch.dtype) -> str:
    limit = _EXACT[stored]
    if -limit <= int(rows.min()) and int(rows.max()) <= limit:
        return ""
    bad = (rows > limit) | (rows < -limit) if rows.dtype.kind == "i" else rows > limit
    frame = int(bad.any(1).argmax())
    value = int(rows[frame][bad[frame]][0])
    return f"frame {first + frame} holds {value}, {_advice(stored, f'is exact up to {limit}')}"


def _advice(stored: torch.dtype, limit: str) -> str:
    name = str(stored).removeprefix("torch.")
    return f"{name} {limit}; {'use dtype float32' if stored == torch.float16 else 'scale the features down'}"

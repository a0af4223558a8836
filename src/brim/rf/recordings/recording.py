"""A recording as every reader returns it: complex samples that are read by windows, and where and when they were taken.

Axes: N samples. Nothing is loaded when a recording is opened: samples are read from the file a window at a
time; a memory map would count as memory.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError, printable

LIMIT_BYTES = 64 << 20  # of metadata: a header larger than this is none


class Samples:
    """Two-component samples in one or several pieces of a file; native byte order and components (N, 2) come out."""

    def __init__(self, path: Path, dtype: str, offsets: list[int], counts: list[int], *, components: int = 2) -> None:
        """dtype is NumPy's of one component, such as "<i2"; offsets are bytes in the file, counts are in samples."""
        self.path, self.dtype, self.components = path, np.dtype(dtype), components
        self.offsets = np.asarray(offsets, np.int64)
        self.firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def full_scale(self) -> float:
        """Amplitude of the largest value: 1 for floating point."""
        return 1.0 if self.dtype.kind == "f" else 2.0 ** (8 * self.dtype.itemsize - 1)

    @property
    def offset(self) -> float:
        """What stands for zero: the middle of the range for unsigned values."""
        return self.full_scale - 0.5 if self.dtype.kind == "u" else 0.0

    def read(self, first: int, count: int) -> NDArray[Any]:
        """(count, 2) or (count, 1) of the file's type; the window must lie inside."""
        size = self.dtype.itemsize * self.components
        piece = int(np.searchsorted(self.firsts, first, "right")) - 1
        spans, left = [], count
        while left > 0:
            inside = first - int(self.firsts[piece])
            take = min(left, int(self.firsts[piece + 1]) - first)
            spans.append((int(self.offsets[piece]) + inside * size, take * size))
            first, left, piece = first + take, left - take, piece + 1
        parts = self._bytes(spans)
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint8)
        values = np.ascontiguousarray(joined).view(self.dtype).reshape(-1, self.components)
        return values if self.dtype.isnative else values.astype(self.dtype.newbyteorder("="))

    def _bytes(self, spans: list[tuple[int, int]]) -> list[NDArray[np.uint8]]:
        """The bytes of spans of the file: by one read where they lie close together, as blocks with stamps do."""
        if not spans:
            return []
        low, high = min(begin for begin, _ in spans), max(begin + size for begin, size in spans)
        if len(spans) > 1 and high - low > 2 * sum(size for _, size in spans) + (1 << 16):
            return [part for span in spans for part in self._bytes([span])]
        buffer = np.empty(high - low, np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(low)
            filled = 0
            while filled < len(buffer):
                got = file.readinto(buffer[filled:].data)
                if not got:
                    raise unreadable(self.path, f"ends at byte {low + filled} while it is read")
                filled += got
        return [buffer[begin - low : begin - low + size] for begin, size in spans]

    def complex(self, first: int, count: int) -> NDArray[np.complex64]:
        """(count,) complex64, full scale is 1."""
        values = self.read(first, count)
        scaled = (values.astype(np.float32) - np.float32(self.offset)) * np.float32(1 / self.full_scale)
        if self.components == 1:
            return scaled[:, 0].astype(np.complex64)
        return np.ascontiguousarray(scaled).view(np.complex64)[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One file of one receiver."""

    path: Path
    format: str
    samples: Samples
    rate_hz: float  # as stated; the clock fitted to the stamps knows better
    centre_hz: float | None = None
    station: str | None = None  # name in the metadata
    place: tuple[float, float, float] | None = None  # lat, lon in degrees, alt in m
    hardware: str | None = None
    stamp_samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    stamp_times_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # after epoch_s
    epoch_s: float = 0.0  # Unix time; stamps count from here, so that nanoseconds survive float64
    dated: bool = True  # False: seconds of an unknown week
    stamp_sigma_s: float = 0.0  # resolution of a single start time
    fix_age_s: float = 0.0  # longest time without a position fix
    waveform: str | None = None  # what was transmitted, where a label says so
    milliwatt: bool = False  # amplitudes are in sqrt(mW) at the antenna
    problems: tuple[str, ...] = ()

    @property
    def is_real(self) -> bool:
        return self.samples.components == 1

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    def noted(self, *problems: str) -> Self:
        return replace(self, problems=(*self.problems, *problems))


def unreadable(path: Path, reason: str, hint: str = "") -> ConfigError:
    """An error about one recording."""
    return ConfigError(f"recording {printable(path.name)}: {reason}", code="unreadable", hint=hint)


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as failure:
        raise unreadable(path, failure.strerror or str(failure), "give the path of a file") from failure


def check_rate(path: Path, rate_hz: Any) -> float:
    """A sample rate, or an error that says what is wrong with it."""
    if isinstance(rate_hz, bool) or not isinstance(rate_hz, int | float) or not 10 <= rate_hz <= 1e10:
        raise unreadable(path, f"sample rate {rate_hz!r} must be between 10 Hz and 10 GHz")
    return float(rate_hz)

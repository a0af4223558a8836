"""What packing says while it runs and when it is done."""

from dataclasses import asdict, dataclass
from typing import Any

from brim.sequences.corpus.folder import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """How far packing is; bytes are those of the frames in the source files."""

    message: str  # reading headers, opening, verifying, packing, finishing
    done_bytes: int
    total_bytes: int  # 0 until the headers are read
    bytes_per_s: float
    eta_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What packing came to."""

    path: str
    complete: bool  # False when stopped: continue with resume
    items: int  # sequences stored whole
    frames: int
    dim: int
    dtype: str
    bytes: int  # of the shards
    labelled: int  # sequences with a label
    classes: tuple[str, ...]
    labels_from: str  # "folders", "none" or the CSV file
    skipped: tuple[Skipped, ...]
    source_bytes: int  # read and packed by this call
    seconds: float  # of this call, from the first header to the last sync
    bytes_per_s: float  # source_bytes / seconds

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

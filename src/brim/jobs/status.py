"""What a job is to do, its status, and its progress."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

JobStatus = Literal["pending", "queued", "running", "paused", "completed", "failed", "cancelled"]
Wanted = Literal["run", "cancel", "pause"]  # what people last asked for

KIND_NAMES: Final = (
    "rf.generate",
    "rf.train",
    "rf.evaluate",
    "rf.measure",
    "segment.tune",
    "segment.predict",
    "segment.train",
    "sequence.train",
    "sequence.evaluate",
)
STATUSES: Final[tuple[str, ...]] = get_args(JobStatus)
UNFINISHED: Final = frozenset({"pending", "queued", "running"})
RESUMABLE: Final = frozenset({"paused", "cancelled", "failed"})
FINISHED: Final = frozenset({"completed", "failed", "cancelled"})
MAX_NESTING: Final = 50  # levels of JSON


@dataclass(frozen=True, slots=True)
class Spec:
    """What a job is to do; config is complete and JSON-able."""

    kind: str
    name: str
    config: dict[str, Any]

    @property
    def dataset_ids(self) -> tuple[str, ...]:
        return tuple(self.config.get("dataset_ids", ()))

    @property
    def run_id(self) -> str | None:
        id = self.config.get("run_id")
        return None if id is None else str(id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Where the time of the computation went, from its start until now."""

    seconds: float
    waiting: Mapping[str, float]  # of these, seconds by cause


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a job has come; current and total count its own items: samples, steps, images."""

    current: int = 0
    total: int = 0  # 0: not known
    rate: float = 0.0  # items per second
    eta_s: float | None = None
    message: str = ""
    flow: Flow | None = None  # None: the job does not say, or not yet

    @property
    def percent(self) -> float | None:
        """0 to 100; None where the total is not known."""
        return min(100.0, 100.0 * self.current / self.total) if self.total else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "current": self.current,
            "total": self.total,
            "percent": self.percent,
            "rate": self.rate,
            "eta_s": self.eta_s,
            "message": self.message,
        }


def jsonable(value: Any, depth: int = MAX_NESTING) -> Any:
    """As JSON and every database take it, whatever file it comes from: no NaN, no infinity, no tuple, no text that is
    not UTF-8, nothing nested deeper than that; a path is its name."""
    if isinstance(value, Mapping | list | tuple) and not depth:
        return None
    if isinstance(value, Mapping):
        return {clean(str(name)): jsonable(item, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, depth - 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return clean(value)
    return value.name if isinstance(value, Path) else value


def clean(text: str) -> str:
    """Text that both databases can store: no NUL, no lone surrogate."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()

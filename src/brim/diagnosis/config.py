"""Settings of a diagnosis; imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from brim.config import Doc, Range, Unit, check

TryChoice = Literal["data", "batch", "precision", "compile"]
REMEDIES: tuple[TryChoice, ...] = get_args(TryChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyConfig:
    """How long a script is watched, and what is tried with it."""

    seconds: Annotated[
        float, Range(4, 3600), Unit("s"), Doc("Time for the whole answer, besides the script's own start-up.")
    ] = 60.0
    tries: Annotated[
        tuple[TryChoice, ...] | None,
        Doc("Remedies to measure, each in a run of its own; none: those that fit the finding."),
    ] = None

    def __post_init__(self) -> None:
        check(self)

"""Settings of measuring recordings. Nothing here imports torch or NumPy."""

from dataclasses import dataclass
from typing import Annotated

from brim.config import Doc, Length, Range, Unit, check


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Which transmission of which part of the recordings is measured, and by which clock."""

    frequency_mhz: Annotated[
        float | None,
        Range(0.001, 300_000),
        Unit("MHz"),
        Doc("Frequency of the transmission; without it, that of the strongest one that most receivers hear."),
    ] = None
    bandwidth_khz: Annotated[
        float | None,
        Range(0.05, 1_000_000),
        Unit("kHz"),
        Doc("Bandwidth of the transmission; without it, the band that stands out of the noise."),
    ] = None
    start: Annotated[
        str | None,
        Length(1, 40),
        Doc("First moment to measure, UTC as 2026-01-31T12:00:00Z or seconds after the recordings' common start."),
    ] = None
    seconds: Annotated[
        float | None, Range(0.05, 86_400), Unit("s"), Doc("How long to measure; without it, to the common end.")
    ] = None
    beacon: Annotated[
        str | None,
        Length(1, 200),
        Doc("A known transmitter in the same recordings that ties the clocks together: NAME=LAT,LON@MHZ."),
    ] = None

    def __post_init__(self) -> None:
        check(self)

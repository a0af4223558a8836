"""Where the time goes: stages, waiting, and the share of the ceiling that is reached."""

from brim.engine.meter.stalls import RunClock, StepTimes, Times, diagnose, find_syncs, mean_times, time_step
from brim.engine.meter.throughput import BUSY, INPUT, ROOM, GpuSampler, Meter, ceiling_rate, ceiling_share

__all__ = [
    "BUSY",
    "INPUT",
    "ROOM",
    "GpuSampler",
    "Meter",
    "RunClock",
    "StepTimes",
    "Times",
    "ceiling_rate",
    "ceiling_share",
    "diagnose",
    "find_syncs",
    "mean_times",
    "time_step",
]

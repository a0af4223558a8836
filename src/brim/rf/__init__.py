"""Synthetic radio data by the batch: scene → link → waveform → channel → receiver → features, gates first."""

from brim.rf.compute import generate_batch
from brim.rf.config import PRESETS, GenerateConfig, Station, from_mapping, preset, read_stations, read_toml
from brim.rf.features import FEATURES
from brim.rf.generate import Progress, Report, generate
from brim.rf.rows import TRUTH

__all__ = [
    "FEATURES",
    "PRESETS",
    "TRUTH",
    "GenerateConfig",
    "Progress",
    "Report",
    "Station",
    "from_mapping",
    "generate",
    "generate_batch",
    "preset",
    "read_stations",
    "read_toml",
]

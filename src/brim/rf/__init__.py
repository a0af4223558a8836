"""Synthetic radio data by the batch: scene → link → waveform → channel → receiver → features, gates first."""

from brim.rf.config import PRESETS, GenerateConfig, Station, from_mapping, preset, read_stations, read_toml
from brim.rf.features.estimators import FEATURES
from brim.rf.generation.compute import generate_batch
from brim.rf.generation.dataset import Progress, Report, generate
from brim.rf.generation.rows import TRUTH

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

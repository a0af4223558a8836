"""Synthetic radio data by the batch, and positions from what receivers heard."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.rf.config import PRESETS as PRESETS
    from brim.rf.config import GenerateConfig as GenerateConfig
    from brim.rf.config import LocatorTraining as LocatorTraining
    from brim.rf.config import Station as Station
    from brim.rf.config import from_mapping as from_mapping
    from brim.rf.config import preset as preset
    from brim.rf.config import read_stations as read_stations
    from brim.rf.config import read_toml as read_toml
    from brim.rf.features import FEATURES as FEATURES
    from brim.rf.generation.accounting import GenerateProgress as GenerateProgress
    from brim.rf.generation.accounting import GenerateReport as GenerateReport
    from brim.rf.generation.dataset import generate as generate
    from brim.rf.generation.rows import TRUTH as TRUTH
    from brim.rf.generation.stages import generate_batch as generate_batch

__getattr__, __all__ = lazy(__name__, __file__)

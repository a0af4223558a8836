"""Measuring recordings: what each station heard of one transmission, and how much later than the others."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.rf.measurement.config import MeasureConfig as MeasureConfig
    from brim.rf.measurement.document import Measurement as Measurement
    from brim.rf.measurement.labelled import calibrate as calibrate
    from brim.rf.measurement.labelled import dataset_from as dataset_from
    from brim.rf.measurement.observations import SCHEMA as SCHEMA
    from brim.rf.measurement.observations import STATION_KEYS as STATION_KEYS
    from brim.rf.measurement.observations import LeftOut as LeftOut
    from brim.rf.measurement.observations import Observation as Observation
    from brim.rf.measurement.observations import PairMeasurement as PairMeasurement
    from brim.rf.measurement.observations import StationMeasurement as StationMeasurement
    from brim.rf.measurement.observations import StationTime as StationTime
    from brim.rf.measurement.run import measure as measure

__getattr__, __all__ = lazy(__name__, __file__)

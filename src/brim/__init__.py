"""brim fills a GPU to the brim: synthetic data, training and served predictions, without leaving the device waiting."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim import errors as errors
    from brim import loggers as loggers
    from brim.diagnosis.notebook import why as why
    from brim.engine.batching.batcher import Batcher as Batcher
    from brim.engine.library import train as train
    from brim.engine.library import tune_batch as tune_batch
    from brim.engine.rows import Resident as Resident
    from brim.engine.rows.sql import sql as sql
    from brim.engine.storage import Dataset as Dataset
    from brim.runs import load_run as load_run
    from brim.segmentation import contours as contours

__version__ = "0.1.0"

__getattr__, __all__ = lazy(__name__, __file__)


def __dir__() -> list[str]:
    return __all__

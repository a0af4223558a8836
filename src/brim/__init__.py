"""brim fills a GPU to the brim: synthetic data, training and served predictions, without leaving the device waiting."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.engine.rows import Resident as Resident
    from brim.engine.storage import Dataset as Dataset

__version__ = "0.1.0"

__getattr__, __all__ = lazy(__name__, __file__)

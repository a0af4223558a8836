"""The engine as a library: training, batch sizes and batched requests for models and data that are not brim's own."""

from brim.engine.library.batch_size import tune_batch
from brim.engine.library.modules import Column, load_factory, make_module, train_module
from brim.engine.library.training import RUN, train

__all__ = ["RUN", "Column", "load_factory", "make_module", "train", "train_module", "tune_batch"]

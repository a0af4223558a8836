"""From a source of rows to batches on the device: sources, order, tiers, ragged rows and buckets."""

from brim.engine.rows.buckets import Bucketed, Buckets
from brim.engine.rows.files import DatasetSource, NpyFolderSource, open_source
from brim.engine.rows.order import HOST
from brim.engine.rows.ragged import RaggedResident, RaggedView, part_of
from brim.engine.rows.ragged_tiers import RaggedSource, RaggedTensors, check_columns
from brim.engine.rows.resident import Epoch, OpenEpochs, Resident, as_dataloader
from brim.engine.rows.source import Source, TensorSource, read_rows
from brim.engine.rows.sql import SqlSource

__all__ = [
    "HOST",
    "Bucketed",
    "Buckets",
    "DatasetSource",
    "Epoch",
    "NpyFolderSource",
    "OpenEpochs",
    "RaggedResident",
    "RaggedSource",
    "RaggedTensors",
    "RaggedView",
    "Resident",
    "Source",
    "SqlSource",
    "TensorSource",
    "as_dataloader",
    "check_columns",
    "open_source",
    "part_of",
    "read_rows",
]

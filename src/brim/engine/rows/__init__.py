"""From a source of rows to batches on the device: sources, order, tiers, ragged rows and buckets."""

from brim.engine.rows.buckets import Bucketed, Buckets
from brim.engine.rows.files import DatasetSource, NpyFolderSource
from brim.engine.rows.npy import load_npy, read_npy_header
from brim.engine.rows.opening import Form, as_given, open_path, open_rows
from brim.engine.rows.order import HOST
from brim.engine.rows.ragged import RaggedResident, RaggedView, part_of
from brim.engine.rows.ragged_tiers import RaggedSource, RaggedTensors, check_columns
from brim.engine.rows.resident import Epoch, OpenEpochs, Resident, as_dataloader
from brim.engine.rows.source import SideBySide, Source, TensorSource, read_rows
from brim.engine.rows.sql import SqlSource, sql

__all__ = [
    "HOST", "Bucketed", "Buckets", "DatasetSource", "Epoch", "Form", "NpyFolderSource", "OpenEpochs", "RaggedResident",
    "RaggedSource", "RaggedTensors", "RaggedView", "Resident", "SideBySide", "Source", "SqlSource", "TensorSource",
    "as_dataloader", "as_given", "check_columns", "load_npy", "open_path", "open_rows", "part_of", "read_npy_header",
    "read_rows", "sql",
]  # fmt: skip

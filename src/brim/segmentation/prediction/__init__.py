"""Images through a network: one, many, whole folders, a cluster, requests."""

from brim.segmentation.prediction.bulk import (
    FOLDER,
    BulkImage,
    BulkParcel,
    BulkScorer,
    BulkTask,
    Recipe,
    Record,
    Records,
    pack_weights,
    read_parcels,
    recipe_name,
    split_tasks,
    write_parcel,
)
from brim.segmentation.prediction.files import FilesReport, find_inputs, predict_files
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.prediction.serving import SegmentServable
from brim.segmentation.prediction.stream import PredictProgress, PredictReport, predict_one, predict_stream

__all__ = [
    "FOLDER",
    "BulkImage",
    "BulkParcel",
    "BulkScorer",
    "BulkTask",
    "FilesReport",
    "ModelLoader",
    "PredictProgress",
    "PredictReport",
    "Recipe",
    "Record",
    "Records",
    "SegmentServable",
    "find_inputs",
    "pack_weights",
    "predict_files",
    "predict_one",
    "predict_stream",
    "read_parcels",
    "recipe_name",
    "split_tasks",
    "write_parcel",
]

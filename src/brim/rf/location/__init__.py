"""Locating transmitters: the classical solver, the network on top of it, its training, runs and evaluation."""

from brim.rf.location.answers import Located, collection, locate_documents, locate_inputs
from brim.rf.location.evaluate import PLAIN_NAMES
from brim.rf.location.map_page import map_page, write_map
from brim.rf.location.page import LEVEL, error_points, write_evaluation
from brim.rf.location.posterior import LEVELS
from brim.rf.location.regions import inside_level
from brim.rf.location.run import (
    MEASURED,
    LocatorEvaluation,
    LocatorRun,
    differences,
    evaluate_run,
    export_onnx,
    load_run,
    locate,
    read_generation,
)
from brim.rf.location.serving import LocateServable
from brim.rf.location.streaming import Streamed
from brim.rf.location.training import split, train

__all__ = [
    "LEVEL", "LEVELS", "MEASURED", "PLAIN_NAMES", "LocateServable", "Located", "LocatorEvaluation", "LocatorRun",
    "Streamed", "collection",
    "differences", "error_points", "evaluate_run", "export_onnx", "inside_level", "load_run", "locate",
    "locate_documents", "locate_inputs", "map_page", "read_generation", "split", "train", "write_evaluation",
    "write_map",
]  # fmt: skip

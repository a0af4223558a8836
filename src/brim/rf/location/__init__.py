"""Locating transmitters: the classical solver, the network on top of it, its training, runs and evaluation."""

from brim.rf.location.page import LEVEL, error_points, write_evaluation
from brim.rf.location.run import (
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
from brim.rf.location.training import split, train

__all__ = [
    "LEVEL",
    "LocateServable",
    "LocatorEvaluation",
    "LocatorRun",
    "differences",
    "error_points",
    "evaluate_run",
    "export_onnx",
    "load_run",
    "locate",
    "read_generation",
    "split",
    "train",
    "write_evaluation",
]

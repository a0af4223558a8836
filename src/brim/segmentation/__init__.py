"""Segmentation: find the right batch size of a network, train it, turn images into polygons."""

from brim.segmentation.loader import ModelLoader
from brim.segmentation.polygons import Polygon
from brim.segmentation.prediction import Prediction
from brim.segmentation.registry import create_model, model_names, register_model
from brim.segmentation.train import SegmentTrainConfig, SegmentTrainReport, train
from brim.segmentation.tune import Tuned, tune, tune_model

__all__ = [
    "ModelLoader",
    "Polygon",
    "Prediction",
    "SegmentTrainConfig",
    "SegmentTrainReport",
    "Tuned",
    "create_model",
    "model_names",
    "register_model",
    "train",
    "tune",
    "tune_model",
]

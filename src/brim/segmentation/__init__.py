"""Segmentation: find the right batch size of a network, train it, turn images into polygons."""

from brim.segmentation.networks.registry import create_model, model_names, register_model
from brim.segmentation.objects.polygons import Polygon
from brim.segmentation.objects.prediction import Prediction
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.training.run import SegmentTrainConfig, SegmentTrainReport, train
from brim.segmentation.tuning.tune import Tuned, tune, tune_model

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

"""Segmentation: find the right batch size of a network, train it, turn images into polygons."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.segmentation.config import CropAugmentation as CropAugmentation
    from brim.segmentation.config import FilesConfig as FilesConfig
    from brim.segmentation.config import PredictConfig as PredictConfig
    from brim.segmentation.config import SegmentTrainConfig as SegmentTrainConfig
    from brim.segmentation.config import TuneConfig as TuneConfig
    from brim.segmentation.networks import create_model as create_model
    from brim.segmentation.networks import model_names as model_names
    from brim.segmentation.networks import register_model as register_model
    from brim.segmentation.objects import Polygon as Polygon
    from brim.segmentation.objects import Prediction as Prediction
    from brim.segmentation.objects.contours import contours as contours
    from brim.segmentation.prediction import ModelLoader as ModelLoader
    from brim.segmentation.scenes import write_cells as write_cells
    from brim.segmentation.training import SegmentTrainReport as SegmentTrainReport
    from brim.segmentation.training import train as train
    from brim.segmentation.tuning import Tuned as Tuned
    from brim.segmentation.tuning import tune as tune
    from brim.segmentation.tuning import tune_model as tune_model

__getattr__, __all__ = lazy(__name__, __file__)

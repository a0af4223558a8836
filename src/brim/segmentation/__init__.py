"""Segmentation: find the right batch size of a network, train it, turn images into polygons."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.segmentation.config import Augmentation as Augmentation
    from brim.segmentation.config import FilesConfig as FilesConfig
    from brim.segmentation.config import PredictConfig as PredictConfig
    from brim.segmentation.config import SegmentTrainConfig as SegmentTrainConfig
    from brim.segmentation.config import TuneConfig as TuneConfig
    from brim.segmentation.networks.registry import create_model as create_model
    from brim.segmentation.networks.registry import model_names as model_names
    from brim.segmentation.networks.registry import register_model as register_model
    from brim.segmentation.objects.polygons import Polygon as Polygon
    from brim.segmentation.objects.prediction import Prediction as Prediction
    from brim.segmentation.prediction.loader import ModelLoader as ModelLoader
    from brim.segmentation.scenes.cells import write_cells as write_cells
    from brim.segmentation.training.run import SegmentTrainReport as SegmentTrainReport
    from brim.segmentation.training.run import train as train
    from brim.segmentation.tuning.tune import Tuned as Tuned
    from brim.segmentation.tuning.tune import tune as tune
    from brim.segmentation.tuning.tune import tune_model as tune_model

__getattr__, __all__ = lazy(__name__, __file__)

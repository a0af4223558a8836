"""Training a segmentation network on images and masks."""

from brim.segmentation.training.crops import augment, pair_files, windows
from brim.segmentation.training.objective import Agreement, agreement
from brim.segmentation.training.run import CONFIG, SegmentTrainReport, split, train, write_config

__all__ = [
    "CONFIG",
    "Agreement",
    "SegmentTrainReport",
    "agreement",
    "augment",
    "pair_files",
    "split",
    "train",
    "windows",
    "write_config",
]

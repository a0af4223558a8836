"""Training a segmentation network on images and masks."""

from brim.segmentation.training.crops import augment, pair_files, windows
from brim.segmentation.training.run import RUN, SegmentTrainReport, split, train

__all__ = ["RUN", "SegmentTrainReport", "augment", "pair_files", "split", "train", "windows"]

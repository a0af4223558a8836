"""The fastest safe batch size of a network on a device."""

from brim.segmentation.tuning.batch_sizes import (
    FILE_NAME,
    BatchSizeEntry,
    BatchSizes,
    device_info,
    device_key,
    save_entry,
    sizes_file,
)
from brim.segmentation.tuning.tuner import KnownSizes, Tuned, tune, tune_model

__all__ = [
    "FILE_NAME",
    "BatchSizeEntry",
    "BatchSizes",
    "KnownSizes",
    "Tuned",
    "device_info",
    "device_key",
    "save_entry",
    "sizes_file",
    "tune",
    "tune_model",
]

"""Batch sizes, as if they had been tuned on this device."""

from pathlib import Path
from typing import Any

import torch

from brim.segmentation.tuning import BatchSizeEntry, device_key, save_entry

HERE = device_key(torch.device("cpu"))


def entry_of(**changes: Any) -> BatchSizeEntry:
    values: dict[str, Any] = {
        "optimal_batch_size": 3, "max_safe_batch_size": 5, "expected_throughput": 10.0, "p50_latency_ms": 1.0,
        "p95_latency_ms": 2.0, "memory_limit_mb": 100.0, "image_size": 1024, "precision": "fp32",
        "layout": "contiguous", "compiled": False,
    }  # fmt: skip
    return BatchSizeEntry(**values | changes)


def sizes_file(path: Path | str, name: str = "unet_tiny", key: str = HERE, **changes: Any) -> Path:
    save_entry(path, key, {}, name, entry_of(**changes), [])
    return Path(path)

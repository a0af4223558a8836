"""Which device to use, its memory and true peak, and named random streams."""

from brim.engine.device.devices import (
    CoreThreads,
    describe,
    gpu_uuid,
    named_device,
    resolve_device,
    stream,
    with_index,
    worker_count,
)
from brim.engine.device.memory import (
    Halving,
    PeakMemory,
    batch_for,
    check_injected,
    format_size,
    free_bytes,
    guard,
    keep_to_share,
    parse_size,
    total_bytes,
)

__all__ = [
    "CoreThreads", "Halving", "PeakMemory", "batch_for", "check_injected", "describe", "format_size", "free_bytes",
    "gpu_uuid", "guard", "keep_to_share", "named_device", "parse_size", "resolve_device", "stream", "total_bytes",
    "with_index", "worker_count",
]  # fmt: skip

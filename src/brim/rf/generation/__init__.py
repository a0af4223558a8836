"""Generating datasets: attempts and their gates, the stages of one device, workers of a pool, and the run itself."""

from brim.rf.generation.accounting import GenerateProgress, GenerateReport
from brim.rf.generation.dataset import generate
from brim.rf.generation.pool import (
    LEAVE_S,
    START_S,
    Assignment,
    PackedError,
    Pool,
    PooledWorker,
    PoolEvent,
    TaskDone,
    TaskFailed,
    WorkerFacts,
    WorkerHost,
    WorkerLost,
    WorkerReady,
    start_workers,
)
from brim.rf.generation.rows import TRUTH, dataset_bytes
from brim.rf.generation.stages import generate_batch

__all__ = [
    "LEAVE_S", "START_S", "TRUTH", "Assignment", "GenerateProgress", "GenerateReport", "PackedError", "Pool",
    "PoolEvent", "PooledWorker", "TaskDone", "TaskFailed", "WorkerFacts", "WorkerHost", "WorkerLost", "WorkerReady",
    "dataset_bytes", "generate", "generate_batch", "start_workers",
]  # fmt: skip

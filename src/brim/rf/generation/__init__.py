"""Generating datasets: attempts and their gates, the stages of one device, workers of a pool, and the run itself."""

from brim.rf.generation.accounting import GenerateProgress, GenerateReport
from brim.rf.generation.dataset import generate
from brim.rf.generation.pool import (
    Assignment,
    PackedError,
    Pool,
    PoolEvent,
    TaskDone,
    TaskFailed,
    WorkerFacts,
    WorkerLost,
    WorkerReady,
)
from brim.rf.generation.rows import TRUTH, dataset_bytes
from brim.rf.generation.stages import generate_batch

__all__ = [
    "TRUTH",
    "Assignment",
    "GenerateProgress",
    "GenerateReport",
    "PackedError",
    "Pool",
    "PoolEvent",
    "TaskDone",
    "TaskFailed",
    "WorkerFacts",
    "WorkerLost",
    "WorkerReady",
    "dataset_bytes",
    "generate",
    "generate_batch",
]

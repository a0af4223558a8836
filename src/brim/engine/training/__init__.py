"""The training loop: step, trainer, checkpoint, ranks and report."""

from brim.engine.training.checkpoint import copy_in, has_checkpoint, load_weights, locked
from brim.engine.training.compiler import uncompiled
from brim.engine.training.hub import HUB_CONFIG, HUB_WEIGHTS, write_hub
from brim.engine.training.optimization import MakeOptimizer, MakeScheduler
from brim.engine.training.rank_share import (
    Cut,
    Dropout,
    Share,
    check_enough,
    current,
    cut,
    drawn,
    dropout,
    gathered,
    own_rows,
    share_norms,
)
from brim.engine.training.ranks import Ranks, joined
from brim.engine.training.report import TrainProgress, TrainReport, summary_line
from brim.engine.training.run_directory import RunFile, check_same, read_json, write_json
from brim.engine.training.source import Batch, BatchSource, Fetcher, InputsFor
from brim.engine.training.step import LossFn, Stepper, Transform, resolve_precision
from brim.engine.training.trainer import Evaluate, train

__all__ = [
    "HUB_CONFIG", "HUB_WEIGHTS", "Batch", "BatchSource", "Cut", "Dropout", "Evaluate", "Fetcher", "InputsFor",
    "LossFn",
    "MakeOptimizer", "MakeScheduler", "Ranks", "RunFile", "Share",
    "Stepper", "TrainProgress", "TrainReport", "Transform", "check_enough", "check_same", "copy_in", "current", "cut",
    "drawn", "dropout", "gathered", "has_checkpoint", "joined", "load_weights", "locked", "own_rows", "read_json",
    "resolve_precision", "share_norms", "summary_line", "train", "uncompiled", "write_hub", "write_json",
]  # fmt: skip

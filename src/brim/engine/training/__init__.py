"""The training loop: step, trainer, checkpoint, ranks and report."""

from brim.engine.training.checkpoint import copy_in, has_checkpoint, load_weights, locked
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
from brim.engine.training.source import Batch, BatchSource, StepInputs
from brim.engine.training.step import LossFn, Stepper, Transform, resolve_precision
from brim.engine.training.trainer import Evaluate, train

__all__ = [
    "Batch",
    "BatchSource",
    "Cut",
    "Dropout",
    "Evaluate",
    "LossFn",
    "Ranks",
    "Share",
    "StepInputs",
    "Stepper",
    "TrainProgress",
    "TrainReport",
    "Transform",
    "check_enough",
    "copy_in",
    "current",
    "cut",
    "drawn",
    "dropout",
    "gathered",
    "has_checkpoint",
    "joined",
    "load_weights",
    "locked",
    "own_rows",
    "resolve_precision",
    "share_norms",
    "summary_line",
    "train",
]

"""Trained runs: loading, scoring, embedding and serving them."""

from brim.sequences.evaluation.encode import Encodings, FeatureStatistics, encode, measure
from brim.sequences.evaluation.folds import (
    FoldPrediction,
    FoldReport,
    TrainOne,
    check_folds,
    cross_validate,
    fold_lines,
)
from brim.sequences.evaluation.runs import (
    NETWORK,
    REPORT,
    RUN,
    STATISTICS,
    WEIGHTS,
    TrainedRun,
    as_one,
    check_free,
    describe,
    load_network,
    load_run,
    read_tensors,
    tensors_of,
    write_tensors,
)
from brim.sequences.evaluation.scores import accuracy, cluster_scores
from brim.sequences.evaluation.scoring import Evaluation, ScoresByName, embed, evaluate, predict, project, score
from brim.sequences.evaluation.tables import write_tables

__all__ = [
    "NETWORK",
    "REPORT",
    "RUN",
    "STATISTICS",
    "WEIGHTS",
    "Encodings",
    "Evaluation",
    "FeatureStatistics",
    "FoldPrediction",
    "FoldReport",
    "ScoresByName",
    "TrainOne",
    "TrainedRun",
    "accuracy",
    "as_one",
    "check_folds",
    "check_free",
    "cluster_scores",
    "cross_validate",
    "describe",
    "embed",
    "encode",
    "evaluate",
    "fold_lines",
    "load_network",
    "load_run",
    "measure",
    "predict",
    "project",
    "read_tensors",
    "score",
    "tensors_of",
    "write_tables",
    "write_tensors",
]

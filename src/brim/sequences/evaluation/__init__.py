"""Trained runs: loading, scoring, embedding and serving them."""

from brim.sequences.evaluation.encode import FeatureStatistics, embed_rows, measure, predict
from brim.sequences.evaluation.runs import (
    REPORT,
    RUN,
    STATISTICS,
    WEIGHTS,
    TrainedRun,
    as_one,
    check_free,
    describe,
    load_run,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from brim.sequences.evaluation.scores import accuracy
from brim.sequences.evaluation.scoring import Evaluation, ScoresByName, embed, evaluate, project, score

__all__ = [
    "REPORT",
    "RUN",
    "STATISTICS",
    "WEIGHTS",
    "Evaluation",
    "FeatureStatistics",
    "ScoresByName",
    "TrainedRun",
    "accuracy",
    "as_one",
    "check_free",
    "describe",
    "embed",
    "embed_rows",
    "evaluate",
    "load_run",
    "measure",
    "predict",
    "project",
    "read_json",
    "read_tensors",
    "score",
    "write_json",
    "write_tensors",
]

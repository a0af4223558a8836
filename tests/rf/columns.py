"""Columns of a batch by their names in the manifest, so that no test depends on their order."""

from torch import Tensor

from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.rows import TRUTH, TRUTH_CHUNKS

SampleRows = dict[str, Tensor]


def feature(rows: SampleRows, name: str, statistic: str = "mean") -> Tensor:
    """(n, R) one aggregate of a feature."""
    return rows["features"][..., _place(FEATURES, name), STATISTICS.index(statistic)]


def feature_chunks(rows: SampleRows, name: str) -> Tensor:
    """(n, R, 5) a feature per chunk."""
    return rows["features_chunks"][..., _place(FEATURES, name)]


def truth(rows: SampleRows, name: str) -> Tensor:
    """(n, R) what made the signal."""
    return rows["truth"][..., _place(TRUTH, name)]


def truth_chunks(rows: SampleRows, name: str) -> Tensor:
    """(n, R, 5) the same per chunk."""
    return rows["truth_chunks"][..., _place(TRUTH_CHUNKS, name)]


def _place(columns: tuple[tuple[str, str], ...], name: str) -> int:
    return [column for column, _ in columns].index(name)

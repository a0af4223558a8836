"""Datasets of radio samples: their summary, their records, the HTML page, and export to other formats."""

from brim.rf.datasets.formats import FORMATS, export
from brim.rf.datasets.page import write_report
from brim.rf.datasets.records import sample
from brim.rf.datasets.summary import histogram, inspect, named_columns, open_dataset, statistics

__all__ = [
    "FORMATS", "export", "histogram", "inspect", "named_columns", "open_dataset", "sample", "statistics",
    "write_report",
]  # fmt: skip

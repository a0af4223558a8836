"""Sequences on disk: folders of .npy files, packed corpora, labels and splits."""

from brim.sequences.corpus.folder import SequenceFolder
from brim.sequences.corpus.folds import Fold, FoldPlan, plan_folds
from brim.sequences.corpus.npy import parse, parse_header
from brim.sequences.corpus.opening import PackingStopped, open_sequences
from brim.sequences.corpus.packed import Corpus
from brim.sequences.corpus.packing import PackProgress, PackReport, pack
from brim.sequences.corpus.sequences import CountProgress, Sequences
from brim.sequences.corpus.splits import SequenceSplit, check_labels, number_groups, split, split_sequences
from brim.sequences.corpus.synthetic import make_sequences

__all__ = [
    "Corpus",
    "CountProgress",
    "Fold",
    "FoldPlan",
    "PackProgress",
    "PackReport",
    "PackingStopped",
    "SequenceFolder",
    "SequenceSplit",
    "Sequences",
    "check_labels",
    "make_sequences",
    "number_groups",
    "open_sequences",
    "pack",
    "parse",
    "parse_header",
    "plan_folds",
    "split",
    "split_sequences",
]

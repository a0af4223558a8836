"""Sequences on disk: folders of .npy files, packed corpora, labels and splits."""

from brim.sequences.corpus.folder import SequenceFolder
from brim.sequences.corpus.npy import parse, parse_header
from brim.sequences.corpus.packed import Corpus, open_sequences
from brim.sequences.corpus.packing import PackProgress, PackReport, pack
from brim.sequences.corpus.sequences import CountProgress, Sequences
from brim.sequences.corpus.splits import SequenceSplit, check_labels, split
from brim.sequences.corpus.synthetic import make_sequences

__all__ = [
    "Corpus",
    "CountProgress",
    "PackProgress",
    "PackReport",
    "SequenceFolder",
    "SequenceSplit",
    "Sequences",
    "check_labels",
    "make_sequences",
    "open_sequences",
    "pack",
    "parse",
    "parse_header",
    "split",
]

"""Sequences: pack variable-length features once, train on them at the ceiling, learn with or without labels."""

from brim.sequences.corpus.pack_report import PackReport
from brim.sequences.corpus.packed import Corpus
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.evaluation.load import load_run
from brim.sequences.evaluation.run import Evaluation, embed, evaluate
from brim.sequences.model.network import Classifier, Encoder, SequenceConfig
from brim.sequences.training.augment import Augmentation
from brim.sequences.training.run import SequenceReport, SequenceTraining, train

__all__ = [
    "Augmentation",
    "Classifier",
    "Corpus",
    "Encoder",
    "Evaluation",
    "PackReport",
    "SequenceConfig",
    "SequenceReport",
    "SequenceTraining",
    "embed",
    "evaluate",
    "load_run",
    "make_sequences",
    "pack",
    "train",
]

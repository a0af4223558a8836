"""Sequences: pack variable-length features once, train on them at the ceiling, learn with or without labels."""

from brim.sequences.augment import Augmentation
from brim.sequences.corpus import Corpus
from brim.sequences.evaluate import Evaluation, embed, evaluate
from brim.sequences.model import Classifier, Encoder, SequenceConfig
from brim.sequences.pack_report import PackReport
from brim.sequences.packing import pack
from brim.sequences.run import load_run
from brim.sequences.synthetic import make_sequences
from brim.sequences.train import SequenceReport, SequenceTraining, train

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

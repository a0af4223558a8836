"""Sequences: pack variable-length features once, train on them with or without labels."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.sequences.config import Augmentation as Augmentation
    from brim.sequences.config import EncoderShape as EncoderShape
    from brim.sequences.config import SequenceConfig as SequenceConfig
    from brim.sequences.config import SequenceTraining as SequenceTraining
    from brim.sequences.corpus.packed import Corpus as Corpus
    from brim.sequences.corpus.packing import PackReport as PackReport
    from brim.sequences.corpus.packing import pack as pack
    from brim.sequences.corpus.synthetic import make_sequences as make_sequences
    from brim.sequences.evaluation.runs import load_run as load_run
    from brim.sequences.evaluation.scoring import Evaluation as Evaluation
    from brim.sequences.evaluation.scoring import embed as embed
    from brim.sequences.evaluation.scoring import evaluate as evaluate
    from brim.sequences.model.network import Classifier as Classifier
    from brim.sequences.model.network import Encoder as Encoder
    from brim.sequences.training.run import SequenceReport as SequenceReport
    from brim.sequences.training.run import train as train

__getattr__, __all__ = lazy(__name__, __file__)

"""Training with and without labels."""

from brim.sequences.training.objectives import SelfSupervised, classification_loss, self_supervised_loss
from brim.sequences.training.phases import PhaseReport, cudnn_autotune
from brim.sequences.training.run import SequenceReport, train

__all__ = [
    "PhaseReport",
    "SelfSupervised",
    "SequenceReport",
    "classification_loss",
    "cudnn_autotune",
    "self_supervised_loss",
    "train",
]

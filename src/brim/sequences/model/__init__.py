"""The CNN→LSTM network."""

from brim.sequences.model.brought import BroughtClassifier, make_classifier, remembered
from brim.sequences.model.lstm import BiLstm
from brim.sequences.model.network import Classifier, Committee, Encoder, FrameNorm, Network, frame_mask

__all__ = [
    "BiLstm", "BroughtClassifier", "Classifier", "Committee", "Encoder", "FrameNorm", "Network", "frame_mask",
    "make_classifier", "remembered",
]  # fmt: skip

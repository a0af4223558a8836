"""The CNN→LSTM network."""

from brim.sequences.model.lstm import BiLstm
from brim.sequences.model.network import (
    Classifier,
    Committee,
    Encoder,
    FrameNorm,
    Network,
    frame_mask,
    num_parameters,
)

__all__ = ["BiLstm", "Classifier", "Committee", "Encoder", "FrameNorm", "Network", "frame_mask", "num_parameters"]

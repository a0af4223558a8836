"""The networks, their layers, names and weights."""

from brim.segmentation.networks.network import (
    CAPTURE_AFTER,
    DTYPES,
    GRAPHS,
    InferenceNetwork,
    default_setting,
    normalise,
)
from brim.segmentation.networks.registry import (
    WEIGHTS,
    create_model,
    find_model,
    find_weights,
    load_weights,
    model_names,
    network_of,
    read_metadata,
    register_model,
    save_weights,
)

__all__ = [
    "CAPTURE_AFTER",
    "DTYPES",
    "GRAPHS",
    "WEIGHTS",
    "InferenceNetwork",
    "create_model",
    "default_setting",
    "find_model",
    "find_weights",
    "load_weights",
    "model_names",
    "network_of",
    "normalise",
    "read_metadata",
    "register_model",
    "save_weights",
]

"""Weights of a run in half precision, with their recipe and a hash, to be shipped: python -m … RUN FILE."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from brim.segmentation.networks.registry import find_weights, read_metadata

RECIPE = ("model", "task", "scenes", "scenes_per_epoch", "epochs", "size", "batch_size", "learning_rate", "seed")


def pack(run: Path, file: Path) -> None:
    """Write the best weights of a run with half the bits; numbers that are not floats stay."""
    saved = {
        name: tensor.clone() for name, tensor in load_file(find_weights(run)).items()
    }  # not mapped: it may be `file`
    halves = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in saved.items()}
    training = json.loads((run / "config.json").read_text(encoding="utf-8"))["training"]
    recipe = json.dumps({name: training[name] for name in RECIPE})
    file.write_bytes(save(halves, {**read_metadata(run), "recipe": recipe, "sha256": digest(halves)}))


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the names and bytes of tensors, in the order of their names."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))

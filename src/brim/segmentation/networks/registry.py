"""Networks by name, the built-in ones and those a user registers, and their weights.

AttentionWeights are safetensors, or a checkpoint that loads without running code; every tensor must match.
"""

import contextlib
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from brim.errors import CheckpointError, ConfigError, StorageError
from brim.segmentation.config import REGISTERED, check_network, network_names
from brim.segmentation.networks.hrnet import HRNet
from brim.segmentation.networks.resunet import ResUNetAdvanced, ResUNetSmall, UNetTiny

Factory = Callable[[], nn.Module]

_BUILT_IN: dict[str, Factory] = {
    "hrnet": HRNet,
    "resunet_small": ResUNetSmall,
    "resunet_advanced": ResUNetAdvanced,
    "unet_tiny": UNetTiny,
}


def create_model(name: str) -> nn.Module:
    """A new network of that name with random weights: (B, 3, H, W) normalised → logits (B, 1, H, W)."""
    return find_model(name)()


def register_model(name: str, factory: Factory, *, replace: bool = False) -> None:
    """Make a network of your own known by name; factory() returns a new nn.Module with random weights.

    It takes (B, 3, H, W) float images and returns (B, 1, H, W) logits.
    """
    if not name or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise ConfigError(f'model name "{name}" must be letters, digits, "_", "-" or "."')
    if name in network_names() and not replace:
        raise ConfigError(f'model "{name}" is registered already; choose another name or pass replace=True')
    if not callable(factory):
        raise ConfigError(f'model "{name}": factory is a {type(factory).__name__}, expected a function that makes one')
    REGISTERED[name] = factory


def model_names() -> tuple[str, ...]:
    """The networks that can be named: built-in ones first, then those registered."""
    return network_names()


def find_model(name: str) -> Factory:
    """The function that makes the network of that name."""
    check_network(name)
    return REGISTERED.get(name) or _BUILT_IN[name]


WEIGHTS = "weights.safetensors"  # of a run
_NAMED = 5  # tensors a message names before it only counts
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # where checkpoints of other programs keep the tensors


def find_weights(path: Path | str) -> Path:
    """The file of weights that a FILE or a RUN directory means."""
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"weights {path} do not exist; give a .safetensors file or the directory of a run")
        return path
    candidates = (WEIGHTS, "train/best/model.safetensors", "train/last/model.safetensors")
    for candidate in candidates:
        if (path / candidate).is_file():
            return path / candidate
    raise CheckpointError(f"{path} holds none of {', '.join(candidates)}; give a file or the directory of a run")


@torch.no_grad()
def load_weights(module: nn.Module, path: Path | str) -> None:
    """Put the weights of a FILE or a RUN into the module; a missing, unexpected or misshapen tensor is an error."""
    file = find_weights(path)
    saved, targets = _read(file), module.state_dict()
    faults = [f"{name} is missing" for name in targets if name not in saved]
    faults += [f"{name} is unexpected" for name in saved if name not in targets]
    faults += [
        f"{name} is {list(saved[name].shape)}, expected {list(target.shape)}"
        for name, target in targets.items()
        if name in saved and saved[name].shape != target.shape
    ]
    if faults:
        more = f", and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(
            f"{file} is not of this network: {', '.join(faults[:_NAMED])}{more}; "
            "name the model these weights were trained with"
        )
    for name, target in targets.items():
        if target.is_floating_point() and not bool(saved[name].isfinite().all()):
            raise CheckpointError(f"{file}: {name} holds NaN or Inf; take an earlier checkpoint or train again")
        target.copy_(saved[name])


def save_weights(module: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Write all tensors of the module as safetensors, whole or not at all; metadata goes into the file's header."""
    tensors = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in module.state_dict().items()}
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_bytes(save(tensors, metadata=dict(metadata)))  # save_file would let nobody but its owner read it
        new.replace(path)
    except (OSError, SafetensorError) as failure:
        with contextlib.suppress(OSError):
            new.unlink()
        raise StorageError(f"{path} cannot be written: {failure}; free space or change the permissions") from failure


def read_metadata(path: Path | str) -> dict[str, str]:
    """What save_weights wrote beside the tensors of a FILE or a RUN; empty for files of other programs."""
    file = find_weights(path)
    if file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, "pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError) as failure:
        raise _unreadable(file, failure) from failure


def network_of(path: Path | str) -> str | None:
    """The network whose weights a FILE or a RUN holds, if anything says so; a run that was cut short may not."""
    if "model" in (metadata := read_metadata(path)):
        return metadata["model"]
    try:
        return str(json.loads(Path(path, "config.json").read_text(encoding="utf-8"))["training"]["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with file.open("rb"):  # safetensors would say that a file which may not be read does not exist
            pass
        if file.suffix == ".safetensors":
            return load_file(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles: either they load or the error says why not
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as failure:  # torch's own words would advise to run the file's code
        reason = f"{file} is neither safetensors nor a checkpoint of nothing but tensors"
        raise CheckpointError(f"{reason}; give a .safetensors file or a run") from failure
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as failure:
        raise _unreadable(file, failure) from failure
    return _unwrap(file, found)


def _unwrap(file: Path, found: Any) -> dict[str, Tensor]:
    for key in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(f"{file} holds no dictionary of tensors; save module.state_dict() as safetensors")
    # torch's data-parallel wrapper puts this before every name
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def _unreadable(file: Path, failure: Exception) -> CheckpointError:
    reason = (
        getattr(failure, "strerror", None)
        or str(failure).strip().split("\n")[0].split(". ")[0]
        or type(failure).__name__
    )
    return CheckpointError(f"{file} cannot be read as weights ({reason}); give a .safetensors file or a run")

"""Networks by name, built-in or registered by a user, and their weights.

Weights are safetensors, or a checkpoint that loads without running code; every tensor must match.
"""

import contextlib
import json
import logging
import os
import pickle
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from brim.engine.networks import (
    NetworkFactory,
    NetworkSource,
    check_module,
    is_program,
    is_reference,
    load_program,
    make_module,
    title_of,
)
from brim.engine.training import HUB_WEIGHTS
from brim.errors import CheckpointError, ConfigError, StorageError, with_article
from brim.segmentation.config import (
    DEFAULT_WEIGHTS,
    OUTPUTS,
    REGISTERED,
    BroughtFactory,
    SegmentTask,
    bring,
    check_network,
    network_names,
    source_named,
)
from brim.segmentation.networks.hrnet import HRNet
from brim.segmentation.networks.network import ModelTraits
from brim.segmentation.networks.resnet_unet import UNetResNet18, UNetResNet34, UNetResNet50
from brim.segmentation.networks.resunet import CellsUNet, ResUNetAdvanced, ResUNetSmall, UNetTiny

log = logging.getLogger("brim")


_BUILT_IN: dict[str, NetworkFactory] = {
    "hrnet": HRNet,
    "resunet_small": ResUNetSmall,
    "resunet_advanced": ResUNetAdvanced,
    "unet_tiny": UNetTiny,
    "cells": CellsUNet,
    "unet_resnet18": UNetResNet18,
    "unet_resnet34": UNetResNet34,
    "unet_resnet50": UNetResNet50,
}


def create_model(name: str, task: SegmentTask = "mask", num_classes: int = 0) -> nn.Module:
    """A new network of that name with random weights: (B, 3, H, W) normalised → logits (B, 1, H, W).

    For the task instances there are two maps: foreground, and height inside an object; and one for each class.
    """
    outputs = OUTPUTS[task] + num_classes
    factory, settings = find_model(name), {} if task == "mask" else {"outputs": outputs}
    if name in _BUILT_IN and name not in REGISTERED:
        return factory(**settings)
    try:
        module = make_module(factory, f'network "{title_of(name)}"', **settings)
    except ConfigError as failure:
        if task == "mask" or not isinstance(failure.__cause__, TypeError):
            raise
        raise ConfigError(
            f'model "{title_of(name)}": its factory takes no number of outputs ({failure.__cause__}), which the task '
            f"{task} needs",
            field="task",
            value=task,
            code="conflict",
            hint="let the factory accept outputs",
        ) from failure
    check_module(module, f'network "{title_of(name)}"', outputs)
    return module


def register_model(name: str, factory: NetworkFactory, *, replace: bool = False) -> None:
    """Register a network under a name; factory() returns a new nn.Module with random weights.

    It takes (B, 3, H, W) float images and returns (B, 1, H, W) logits; factory(outputs=2), if it is to find
    instances, returns one with (B, 2, H, W).
    """
    if not name or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise ConfigError(f'model name "{name}" must be letters, digits, "_", "-" or "."')
    if name in network_names() and not replace:
        raise ConfigError(f'model "{name}" is registered already; choose another name or pass replace=True')
    if not callable(factory):
        raise ConfigError(f'model "{name}": factory is {with_article(factory)}, expected a function that makes one')
    REGISTERED[name] = factory


model_names = network_names  # the public name


def find_model(name: str) -> NetworkFactory:
    """The function that makes the network of that name."""
    check_network(name)
    return REGISTERED.get(name) or _BUILT_IN.get(name) or BroughtFactory(cast(NetworkSource, source_named(name)))


def admit(name: str) -> None:
    """Make a network usable that the administrator's catalogue names; a file that has changed since is an error."""
    if is_reference(name) and name not in REGISTERED:
        bring(name)
    check_network(name)


WEIGHTS = "weights.safetensors"  # of a run
_NAMED = 5  # tensors named in a message; more are only counted
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # where checkpoints of other programs keep the tensors


def default_weights() -> Path:
    """The weights of the model that comes with brim."""
    return DEFAULT_WEIGHTS


def find_weights(path: Path | str) -> Path:
    """The file of weights of a FILE or a RUN directory."""
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"weights {path} do not exist; give a .safetensors file or the directory of a run")
        return path
    candidates = (WEIGHTS, HUB_WEIGHTS, "train/best/model.safetensors", "train/last/model.safetensors")
    for candidate in candidates:
        if (path / candidate).is_file():
            return path / candidate
    raise CheckpointError(f"{path} holds none of {', '.join(candidates)}; give a file or the directory of a run")


def load_model(name: str, path: Path | str) -> nn.Module:
    """The network of that name for the task of the weights in a FILE or a RUN, with these weights."""
    if untrained := read_metadata(path).get("untrained"):
        names = untrained.split(", ")
        raise CheckpointError(
            f"{path}: {len(names)} tensors were missing when it was imported, and are random: "
            f"{', '.join(names[:_NAMED])}{', …' * (len(names) > _NAMED)}",
            code="untrained",
            hint="train the network from these weights first, with {segment train}",
        )
    module = create_model(name, task_of(path), len(classes_of(path)))
    if not is_program(Path(path)):
        load_weights(module, path)
    return module


@torch.no_grad()
def load_weights(module: nn.Module, path: Path | str, *, num_maps: int | None = None) -> None:
    """Load the weights of a FILE or a RUN; a missing or unexpected tensor, or another shape, raises.

    With num_maps, only so many of a network's maps are taken from the file; the others stay as they are.
    """
    file = find_weights(path)
    saved, targets = read_tensors(file), module.state_dict()
    if num_maps is not None:
        for name in saved.keys() & targets.keys():
            own, target = saved[name], targets[name]
            if own.shape != target.shape and own.shape[1:] == target.shape[1:] and len(own) >= num_maps:
                saved[name] = torch.cat([own[:num_maps].to(target.dtype), target[num_maps:].cpu()])
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
    """Write the tensors of the module as safetensors, atomically; metadata goes into the file's header."""
    tensors = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in module.state_dict().items()}
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_bytes(save(tensors, metadata=dict(metadata)))  # save_file would make it readable for its owner only
        new.replace(path)
    except (OSError, SafetensorError) as failure:
        with contextlib.suppress(OSError):
            new.unlink()
        raise StorageError(f"{path} cannot be written: {failure}; free space or change the permissions") from failure


def read_metadata(path: Path | str) -> dict[str, str]:
    """The metadata that save_weights wrote into a FILE or a RUN; empty for files of other programs."""
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


def source_in(path: Path | str) -> NetworkSource | None:
    """The file that the network of a FILE or a RUN came from, if it is not one of brim's own."""
    try:
        written = read_metadata(path).get("network")
        about = json.loads(written) if written else json.loads(Path(path, "config.json").read_bytes())["network"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return NetworkSource.of(about)


def recall(path: Path | str) -> str | None:
    """The network of a FILE, a RUN or a program, usable here: code that it was trained with is found again.

    Code that has changed since is used with a warning: tensors of other names or shapes are errors anyway.
    """
    if is_program(Path(path)):
        return bring(str(path))
    name, source = network_of(path), source_in(path)
    if source is None or name in REGISTERED:
        return name
    now = source.now()
    if now.sha256 != source.sha256:
        log.warning(
            "%s has changed since %s was trained: its SHA-256 was %s and is %s now",
            now.path, path, source.sha256[:16], now.sha256[:16],
        )  # fmt: skip
    return bring(now.package or now.reference)


def traits_of(path: Path | str) -> ModelTraits:
    """What the metadata of a FILE or a RUN says of the images it was trained on."""
    known = read_metadata(path)
    stretches = known.get("contrast") == "stretch"
    try:
        scale = float(known["scale"]) if "scale" in known else None if stretches else 1.0
    except ValueError:
        raise CheckpointError(f"{path}: its scale is {known['scale']}, not a number; restore it from a copy") from None
    return ModelTraits(task=task_of(path), stretches=stretches, scale=scale, classes=classes_of(path))


def classes_of(path: Path | str) -> tuple[str, ...]:
    """The kinds of object that the weights of a FILE or a RUN distinguish."""
    try:
        return tuple(str(name) for name in json.loads(read_metadata(path).get("classes", "[]")))
    except (ValueError, TypeError):
        raise CheckpointError(f"{path}: its classes are not a list of names; restore it from a copy") from None


def task_of(path: Path | str) -> SegmentTask:
    """What the weights of a FILE or a RUN predict; files that do not say so are of masks."""
    if is_program(Path(path)):
        return _task_of_program(Path(path), Path(path).stat().st_mtime_ns)
    named = read_metadata(path).get("task")
    if named is None:
        try:
            named = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))["training"]["task"]
        except (OSError, ValueError, KeyError, TypeError):
            named = "mask"
    if named not in OUTPUTS:
        raise CheckpointError(f'{path}: weights for the task "{named}", which this version does not know; update brim')
    return cast(SegmentTask, named)


@cache
def _task_of_program(file: Path, written_ns: int) -> SegmentTask:
    """From the number of maps it makes of an image; anything else is an error when it is made."""
    with torch.no_grad(), contextlib.suppress(Exception):
        maps = load_program(file)(torch.zeros(1, 3, 64, 64))
        return "instances" if isinstance(maps, Tensor) and maps.ndim == 4 and maps.shape[1] == 2 else "mask"
    return "mask"


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a checkpoint that loads without running code."""
    try:
        with file.open("rb"):  # safetensors reports a file without read permission as missing
            pass
        if file.suffix == ".safetensors":
            return load_file(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles: they load, or the error says why not
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as failure:  # torch's own message advises to run the file's code
        raise CheckpointError(
            f"{file} is neither safetensors nor a checkpoint of tensors alone; give a .safetensors file or a run"
        ) from failure
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as failure:
        raise _unreadable(file, failure) from failure
    for key in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{file} holds no dictionary of tensors; save module.state_dict() as safetensors")
    # torch's data-parallel wrapper adds this prefix to every name
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _unreadable(file: Path, failure: Exception) -> CheckpointError:
    reason = (
        getattr(failure, "strerror", None)
        or str(failure).strip().split("\n")[0].split(". ")[0]
        or type(failure).__name__
    )
    return CheckpointError(f"{file} cannot be read as weights ({reason}); give a .safetensors file or a run")

"""A training run on disk: its description, whether it may be resumed, and the trained network.

RUN/run.json                     settings, network, corpus, and the ids of the items held out
RUN/statistics.safetensors       mean and standard deviation of the features, over the training items
RUN/encoder-1/, classifier-1/ …  the trainer's files, a folder per phase; or supervised/, supervised-1/ …
RUN/pseudo-1.safetensors …       clusters of the training items, one file per iteration
RUN/weights.safetensors          the trained model: rocket, a network or both
RUN/network.safetensors          without labels: the network, which may not be the model
RUN/report.json                  the report, written last
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from brim.engine.networks import find_source
from brim.engine.storage import LocalPlace
from brim.engine.training import HUB_WEIGHTS, RunFile, check_same, copy_in
from brim.errors import CheckpointError, ConfigError, StorageError
from brim.sequences.config import EncoderShape, SequenceConfig, SequenceTraining
from brim.sequences.corpus import Sequences, SequenceSplit
from brim.sequences.model import Classifier, Committee, Encoder, Network, make_classifier, remembered
from brim.sequences.rocket import Rocket, RocketBlend

RUN = RunFile("run.json", "sequence-train", "sequence train")
REPORT, WEIGHTS, STATISTICS = "report.json", "weights.safetensors", "statistics.safetensors"
NETWORK = "network.safetensors"

# May differ when a run is resumed: they affect where the data is and when checkpoints are written, not the results.
# The initial encoder is compared by its digest, because its run may have moved.
ROCKET = "rocket."  # begins the names of its tensors, beside those of a network

_FREE = ("tier", "autotune", "num_workers", "prefetch_factor", "checkpoint_every_s", "encoder", "budget")


# settings that older runs do not list
_OLDER = {"network": None, "task": "auto", "seeds": 1, "method": "auto", "balance": 0.5}

_OTHER = "resume with the same, or choose another {out}"


class TrainedRun(NamedTuple):
    path: Path
    about: dict[str, Any]  # run.json
    module: Network  # on the host, in eval mode


def load_run(run: Path | str, *, strict: bool = False) -> TrainedRun:
    """Load the network of a run; a missing, unfinished, damaged or foreign one is a CheckpointError.

    strict  whether code that has changed since the run was trained is an error; else it is said
    """
    path = Path(run)
    about = read_about(path)
    file = path / WEIGHTS if (path / WEIGHTS).is_file() else path / HUB_WEIGHTS
    if not file.is_file() and isinstance(about.get("folds"), list):
        raise CheckpointError(
            f"{path} is a cross-validation, which has a run for each fold and none of its own",
            code="wrong_kind",
            hint=f"give one of {path / 'folds'}",
        )
    if not file.is_file():
        raise CheckpointError(
            f"{path} is not trained to its end", code="incomplete", hint="continue {sequence train} with {resume}"
        )
    try:
        tensors = read_tensors(file)
        network = {name: tensor for name, tensor in tensors.items() if not name.startswith(ROCKET)}
        module: Network
        if len(network) == len(tensors):
            module = _network(about, path, strict)
            copy_in(tensors, module.state_dict(), file)
        else:
            module = _with_rocket(about, tensors, network, file)
    except ConfigError as failure:
        if failure.field == "network":
            raise
        raise _unusable(path, failure) from failure
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as failure:
        # RuntimeError: not enough memory for a network of that size
        raise _unusable(path, failure) from failure
    return TrainedRun(path, about, module.eval())


def _unusable(path: Path, failure: Exception) -> CheckpointError:
    return CheckpointError(f"{path / RUN.name} cannot be used ({failure}); restore it, or train again")


def load_network(run: Path | str) -> tuple[TrainedRun, Path]:
    """Load a run with its network, kept or not, and the file with its weights."""
    loaded = load_run(run)
    file = loaded.path / NETWORK
    if isinstance(loaded.module, Classifier | Committee) or not file.is_file():
        own = loaded.path / WEIGHTS
        return loaded, own if own.is_file() else loaded.path / HUB_WEIGHTS
    module = _network(loaded.about)
    copy_in(read_tensors(file), module.state_dict(), file)
    return loaded._replace(module=module.eval()), file


def _network(about: Mapping[str, Any], path: Path | None = None, strict: bool = False) -> Network:
    shape, outputs = SequenceConfig(**about["model"]), int(about["outputs"])
    source = remembered(about.get("network"), path, strict=strict)
    if source is not None:
        return make_classifier(source, shape.dim, outputs)
    return _own_network(about)


def _own_network(about: Mapping[str, Any]) -> Classifier | Committee:
    shape, outputs = SequenceConfig(**about["model"]), int(about["outputs"])
    numbers = about.get("task") == "regression" and about["mode"] == "supervised"
    members = range(int(about.get("members", 1)))
    return as_one([Classifier(Encoder(shape), outputs, is_regression=numbers) for _ in members])


def _with_rocket(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor], network: Mapping[str, Tensor], file: Path
) -> Network:
    """Rocket alone, or averaged with a network."""
    own = {name.removeprefix(ROCKET): tensor for name, tensor in tensors.items() if name.startswith(ROCKET)}
    share = own.pop("of_network", None)
    rocket = Rocket.from_tensors(own, "regression" if about.get("task") == "regression" else "classification")
    if share is None:
        return rocket
    other = _own_network(about)
    copy_in(dict(network), other.state_dict(), file)
    return RocketBlend(rocket, other, float(share))


def tensors_of(module: Network) -> dict[str, Tensor]:
    """What load_run needs to make the module again."""
    rocket = module.rocket if isinstance(module, RocketBlend) else module
    if not isinstance(rocket, Rocket):
        return dict(module.state_dict())
    own = {f"{ROCKET}{name}": tensor for name, tensor in rocket.tensors().items()}
    if not isinstance(module, RocketBlend):
        return own
    return {**own, f"{ROCKET}of_network": torch.tensor(module.share), **module.network.state_dict()}


def as_one(members: Sequence[Classifier]) -> Classifier | Committee:
    """A single classifier as it is, several as a committee."""
    return members[0] if len(members) == 1 else Committee(members)


def describe(
    data: Sequences,
    config: SequenceTraining,
    parts: SequenceSplit,
    encoder: Mapping[str, str] | None = None,
    used: SequenceTraining | None = None,
) -> dict[str, Any]:
    """The content of run.json; encoder identifies the one that training starts from.

    used are the settings with everything that they leave to the data.
    """
    used = used or config
    supervised = config.mode == "supervised"
    return RUN.describe(
        mode=config.mode,
        task="regression" if data.targets is not None else "classification",
        method=used.method,
        model=used.shape(data.dim, data.layers).as_dict(),
        **({} if config.network is None else {"network": find_source(config.network).as_dict()}),
        outputs=len(data.classes) if supervised else config.num_clusters(len(data.classes)),
        members=used.members,
        classes=list(data.classes),
        training=json.loads(json.dumps(asdict(config))),  # as JSON reads it back
        corpus={"name": data.path.resolve().name, "sequences": len(data.ids), **data.identity},
        encoder=None if encoder is None else dict(encoder),
        split={"train": len(parts.train), "validation": len(parts.validation), "held_out": len(parts.held_out)},
        held_out=[data.ids[row] for row in parts.held_out.tolist()],
        validation=[data.ids[row] for row in parts.validation.tolist()],
    )


def check_free(out: Path, about: Mapping[str, Any], resume: bool) -> None:
    """Raise unless `out` is new or empty, or holds this very run and resume is set."""
    known = RUN.read_begun(out, resume)
    if known is None:
        return
    _check_types(out, known)
    old, new = known["corpus"], about["corpus"]
    if any(old.get(name) != value for name, value in new.items() if name != "name"):  # it may have moved
        raise CheckpointError(f"{out} was begun with another corpus", code="conflict", hint=_OTHER)
    if _digest(known) != _digest(about):
        raise CheckpointError(f"{out} was begun with another encoder", code="conflict", hint=_OTHER)
    check_same(out, _full_settings(known["training"], out), about["training"], _FREE)
    for name in ("model", "outputs", "held_out", "validation"):
        old = known.get(name)
        if name == "model" and isinstance(old, dict):
            old = {"stride": 1, "front": "plain", **old}
        if old != about[name]:
            raise CheckpointError(
                f"{out}: {name} in {RUN.name} was altered", code="conflict", hint="choose another {out}"
            )


def _full_settings(training: Any, out: Path) -> dict[str, Any]:
    """Stored settings with the whole shape of the network: older runs list only what differs from the defaults."""
    try:
        return {**_OLDER, **training, "model": asdict(EncoderShape(**training["model"]))}
    except (KeyError, TypeError, ConfigError) as failure:
        raise CheckpointError(
            f"{out / RUN.name} does not describe the network ({failure}); restore it from a copy, or train again"
        ) from failure


def _digest(about: Mapping[str, Any]) -> Any:
    known = about.get("encoder")
    return known.get("sha256") if isinstance(known, dict) else known


# Files, each written atomically


def read_about(path: Path) -> dict[str, Any]:
    """The content of run.json; that of something else or of another version is rejected."""
    about = RUN.read(path)
    _check_types(path, about)
    return about


def _check_types(path: Path, about: Mapping[str, Any]) -> None:
    for name, kind in (("mode", str), ("classes", list), ("held_out", list), ("corpus", dict)):
        value = about.get(name)
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(
                f"{path / RUN.name}: {name} is {str(value)[:60]}, expected a {kind.__name__}",
                code="damaged",
                hint="restore it from a copy, or train again",
            )


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        with file.open("rb"):  # safetensors reports a file without read permission as missing
            pass
        return load_file(file)
    except SafetensorError as failure:
        raise CheckpointError(f"{file} is damaged ({failure}); restore it from a copy, or train again") from failure
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    host = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in tensors.items()}
    LocalPlace(file.parent).put_bytes(save(host, metadata=dict(metadata or {})), file.name)

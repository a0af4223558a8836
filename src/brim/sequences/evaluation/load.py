"""A run of training on disk: what it is of, whether it may go on, and the network it ended with.

RUN/run.json                     what is trained on what, the items held out by id
RUN/statistics.safetensors       mean and spread of the features, of the training items
RUN/encoder-1/, classifier-1/ …  the trainer's own, a folder for each phase; or supervised/, supervised-1/ …
RUN/pseudo-1.safetensors …       clusters of the training items, one file for each iteration
RUN/weights.safetensors          the network at the end, then
RUN/report.json                  what training came to
"""

import contextlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

import brim
from brim.engine.training import copy_in
from brim.errors import CheckpointError, ConfigError, StorageError
from brim.sequences.config import EncoderShape, SequenceConfig, SequenceTraining
from brim.sequences.model.network import Classifier, Committee, Encoder, Network
from brim.sequences.training.data import SequenceData
from brim.sequences.training.splits import Split

FORMAT_VERSION = 1
KIND = "sequence-train"
RUN, REPORT, WEIGHTS, STATISTICS = "run.json", "report.json", "weights.safetensors", "statistics.safetensors"

# May change when a run goes on: they change where the data is and when a checkpoint is written, no number.
# The encoder to start from is known by its digest; its run may have moved.
_FREE = ("tier", "autotune", "num_workers", "prefetch_factor", "checkpoint_every_s", "encoder")


class Run(NamedTuple):
    """A trained network."""

    path: Path
    about: dict[str, Any]  # run.json
    module: Network  # on the host, in eval mode


def load_run(run: Path | str) -> Run:
    """The network of a run; one that is missing, unfinished, damaged or of something else is a CheckpointError."""
    path = Path(run)
    about = read_about(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f'{path} is not trained to its end; go on with "brim sequence train --resume"')
    try:
        shape, outputs = SequenceConfig(**about["model"]), int(about["outputs"])
        members = [Classifier(Encoder(shape), outputs) for _ in range(int(about.get("members", 1)))]
        module = as_one(members)
        tensors = read_tensors(path / WEIGHTS)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, ConfigError) as failure:
        # RuntimeError: no memory for a network of that size
        raise CheckpointError(f"{path / RUN} cannot be used ({failure}); restore it, or train again") from failure
    copy_in(tensors, module.state_dict(), path / WEIGHTS)
    return Run(path, about, module.eval())


def as_one(members: Sequence[Classifier]) -> Network:
    """One network of one or several."""
    return members[0] if len(members) == 1 else Committee(members)


def describe(
    data: SequenceData, config: SequenceTraining, found: Split, encoder: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What run.json says; encoder identifies the one that training starts from."""
    supervised = config.mode == "supervised"
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "mode": config.mode,
        "model": config.shape(data.dim).as_dict(),
        "outputs": len(data.classes) if supervised else config.num_clusters(len(data.classes)),
        "members": config.members,
        "classes": list(data.classes),
        "training": json.loads(json.dumps(asdict(config))),  # as it will be read back
        "corpus": {"name": data.path.resolve().name, "sequences": len(data.ids), **data.identity},
        "encoder": None if encoder is None else dict(encoder),
        "split": {"train": len(found.train), "validation": len(found.validation), "held_out": len(found.held_out)},
        "held_out": [data.ids[row] for row in found.held_out.tolist()],
        "validation": [data.ids[row] for row in found.validation.tolist()],
        "versions": {"brim": brim.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def check_free(out: Path, about: Mapping[str, Any], resume: bool) -> None:
    """Raise unless `out` is new or empty, or holds this very run and resume is asked for."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; choose another --out")
    names = {entry.name for entry in out.iterdir()} - {_beside(RUN)} if out.exists() else set()
    if not names:
        return
    if RUN not in names:
        raise CheckpointError(f"{out} is not empty and has no {RUN}; choose another --out")
    if not resume:
        raise CheckpointError(f"{out} is not empty; add --resume to continue it or choose another --out")
    _check_same(out, read_about(out), about)


def _check_same(out: Path, known: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    old, new = known.get("corpus"), about["corpus"]
    if any((old or {}).get(name) != value for name, value in new.items() if name != "name"):  # it may have moved
        raise CheckpointError(f"{out} was begun with another corpus; resume with the same, or choose another --out")
    if _digest(known) != _digest(about):
        raise CheckpointError(f"{out} began with another encoder; resume with the same, or choose another --out")
    old, new = _full(known.get("training"), out), about["training"]
    for name in dict.fromkeys((*(old or {}), *new)):
        was, now = ((side or {}).get(name) for side in (old, new))
        if was != now and name not in _FREE:
            raise CheckpointError(
                f"{out}: {name} was {was} and is {now} now; resume with the same, or choose another --out"
            )
    for name in ("model", "outputs", "held_out", "validation"):
        if known.get(name) != about[name]:
            raise CheckpointError(f"{out}: {RUN} names another {name}; it was altered: choose another --out")


def _full(training: Any, out: Path) -> Any:
    """Settings as stored, with the whole shape of the network: older runs list only what differs from the defaults."""
    try:
        return {**training, "model": asdict(EncoderShape(**training["model"]))}
    except (KeyError, TypeError, ConfigError) as failure:
        raise CheckpointError(
            f"{out / RUN} does not describe the network ({failure}); restore it from a copy, or train again"
        ) from failure


def _digest(about: Mapping[str, Any]) -> Any:
    known = about.get("encoder")
    return known.get("sha256") if isinstance(known, dict) else known


# Files, each there entirely or not at all


def read_about(path: Path) -> dict[str, Any]:
    """What run.json says; that of something else or of another version is refused."""
    if not path.is_dir() or not (path / RUN).is_file():
        fault = f"has no {RUN}" if path.is_dir() else "is not a directory"
        raise CheckpointError(f'{path} {fault}; give the directory of a run made by "brim sequence train"')
    about = read_json(path / RUN)
    if about.get("kind") != KIND:
        raise CheckpointError(f'{path} is a run of something else: kind={about.get("kind")!r}, expected "{KIND}"')
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / RUN}: format_version is {about.get('format_version')!r}, expected {FORMAT_VERSION}; "
            "use its own brim"
        )
    for name, kind in (("mode", str), ("classes", list), ("held_out", list), ("corpus", dict)):
        value = about.get(name)
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(
                f"{path / RUN}: {name} is {str(value)[:60]}, expected a {kind.__name__}; it was altered: restore it "
                "from a copy, or train again"
            )
    return about


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a run."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(f"{file} is not valid JSON ({failure}); restore it from a copy") from failure
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object; restore it from a copy")
    return found


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, synced."""
    write_bytes(file, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors by name."""
    try:
        with file.open("rb"):  # safetensors would say that a file which may not be read does not exist
            pass
        return load_file(file)
    except SafetensorError as failure:
        raise CheckpointError(f"{file} is damaged ({failure}); restore it from a copy, or train again") from failure
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, synced."""
    host = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in tensors.items()}
    write_bytes(file, save(host, metadata=dict(metadata or {})))


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file under another name, sync it, then rename it."""
    new = file.with_name(_beside(file.name))
    try:
        with new.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError as failure:
        with contextlib.suppress(OSError):
            new.unlink()
        raise StorageError(
            f"{file}: cannot write, {failure.strerror or failure}; make room or choose another --out"
        ) from failure


def _beside(name: str) -> str:
    return f".{name}.new"

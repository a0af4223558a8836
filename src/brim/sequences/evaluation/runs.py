"""A training run on disk: its description, whether it may be resumed, and the trained network.

RUN/run.json                     settings, network, corpus, and the ids of the items held out
RUN/statistics.safetensors       mean and standard deviation of the features, over the training items
RUN/encoder-1/, classifier-1/ …  the trainer's files, a folder per phase; or supervised/, supervised-1/ …
RUN/pseudo-1.safetensors …       clusters of the training items, one file per iteration
RUN/weights.safetensors          the trained network
RUN/report.json                  the report, written last
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
from brim.sequences.corpus import Sequences, SequenceSplit
from brim.sequences.model import Classifier, Committee, Encoder, Network

FORMAT_VERSION = 1
KIND = "sequence-train"
RUN, REPORT, WEIGHTS, STATISTICS = "run.json", "report.json", "weights.safetensors", "statistics.safetensors"

# May differ when a run is resumed: they affect where the data is and when checkpoints are written, not the results.
# The initial encoder is compared by its digest, because its run may have moved.
_FREE = ("tier", "autotune", "num_workers", "prefetch_factor", "checkpoint_every_s", "encoder")


class TrainedRun(NamedTuple):
    path: Path
    about: dict[str, Any]  # run.json
    module: Network  # on the host, in eval mode


def load_run(run: Path | str) -> TrainedRun:
    """Load the network of a run; a missing, unfinished, damaged or foreign one is a CheckpointError."""
    path = Path(run)
    about = read_about(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(
            f"{path} is not trained to its end", code="incomplete", hint="continue {sequence train} with {resume}"
        )
    try:
        shape, outputs = SequenceConfig(**about["model"]), int(about["outputs"])
        members = [Classifier(Encoder(shape), outputs) for _ in range(int(about.get("members", 1)))]
        module = as_one(members)
        tensors = read_tensors(path / WEIGHTS)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, ConfigError) as failure:
        # RuntimeError: not enough memory for a network of that size
        raise CheckpointError(f"{path / RUN} cannot be used ({failure}); restore it, or train again") from failure
    copy_in(tensors, module.state_dict(), path / WEIGHTS)
    return TrainedRun(path, about, module.eval())


def as_one(members: Sequence[Classifier]) -> Network:
    """A single classifier as it is, several as a committee."""
    return members[0] if len(members) == 1 else Committee(members)


def describe(
    data: Sequences, config: SequenceTraining, parts: SequenceSplit, encoder: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The content of run.json; encoder identifies the one that training starts from."""
    supervised = config.mode == "supervised"
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "mode": config.mode,
        "model": config.shape(data.dim).as_dict(),
        "outputs": len(data.classes) if supervised else config.num_clusters(len(data.classes)),
        "members": config.members,
        "classes": list(data.classes),
        "training": json.loads(json.dumps(asdict(config))),  # as JSON reads it back
        "corpus": {"name": data.path.resolve().name, "sequences": len(data.ids), **data.identity},
        "encoder": None if encoder is None else dict(encoder),
        "split": {"train": len(parts.train), "validation": len(parts.validation), "held_out": len(parts.held_out)},
        "held_out": [data.ids[row] for row in parts.held_out.tolist()],
        "validation": [data.ids[row] for row in parts.validation.tolist()],
        "versions": {"brim": brim.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def check_free(out: Path, about: Mapping[str, Any], resume: bool) -> None:
    """Raise unless `out` is new or empty, or holds this very run and resume is set."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file", code="occupied", hint="choose another {out}")
    names = {entry.name for entry in out.iterdir()} - {_beside(RUN)} if out.exists() else set()
    if not names:
        return
    if RUN not in names:
        raise CheckpointError(f"{out} is not empty and has no {RUN}", code="occupied", hint="choose another {out}")
    if not resume:
        raise CheckpointError(
            f"{out} is not empty", code="occupied", hint="add {resume} to continue it or choose another {out}"
        )
    _check_same(out, read_about(out), about)


def _check_same(out: Path, known: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    old, new = known.get("corpus"), about["corpus"]
    if any((old or {}).get(name) != value for name, value in new.items() if name != "name"):  # it may have moved
        raise _other_run(f"{out} was begun with another corpus")
    if _digest(known) != _digest(about):
        raise _other_run(f"{out} was begun with another encoder")
    old, new = _full_settings(known.get("training"), out), about["training"]
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name) and name not in _FREE:
            raise _other_run(f"{out}: {name} was {old.get(name)} and is {new.get(name)} now", field=name)
    for name in ("model", "outputs", "held_out", "validation"):
        if known.get(name) != about[name]:
            raise CheckpointError(f"{out}: {name} in {RUN} was altered", code="conflict", hint="choose another {out}")


def _other_run(message: str, field: str | None = None) -> CheckpointError:
    return CheckpointError(message, field=field, code="conflict", hint="resume with the same, or choose another {out}")


def _full_settings(training: Any, out: Path) -> dict[str, Any]:
    """Stored settings with the whole shape of the network: older runs list only what differs from the defaults."""
    try:
        return {**training, "model": asdict(EncoderShape(**training["model"]))}
    except (KeyError, TypeError, ConfigError) as failure:
        raise CheckpointError(
            f"{out / RUN} does not describe the network ({failure}); restore it from a copy, or train again"
        ) from failure


def _digest(about: Mapping[str, Any]) -> Any:
    known = about.get("encoder")
    return known.get("sha256") if isinstance(known, dict) else known


# Files, each written atomically


def read_about(path: Path) -> dict[str, Any]:
    """The content of run.json; that of something else or of another version is rejected."""
    if not path.is_dir() or not (path / RUN).is_file():
        fault = f"has no {RUN}" if path.is_dir() else "is not a directory"
        raise CheckpointError(f"{path} {fault}", hint="give the directory of a run of {sequence train}")
    about = read_json(path / RUN)
    if about.get("kind") != KIND:
        raise CheckpointError(f'{path} is a run of something else: kind={about.get("kind")!r}, expected "{KIND}"')
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / RUN}: format_version is {about.get('format_version')!r}, expected {FORMAT_VERSION}; "
            "use the version of brim that wrote it"
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
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(f"{file} is not valid JSON ({failure}); restore it from a copy") from failure
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is not a JSON object; restore it from a copy")
    return values


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    write_bytes(file, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


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
    write_bytes(file, save(host, metadata=dict(metadata or {})))


def write_bytes(file: Path, content: bytes) -> None:
    """Write under another name, sync, then rename."""
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
            f"{file}: cannot write, {failure.strerror or failure}", hint="make room or choose another {out}"
        ) from failure


def _beside(name: str) -> str:
    return f".{name}.new"

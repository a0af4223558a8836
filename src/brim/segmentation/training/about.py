"""What a run of training is of, as its config.json says, and whether it may go on."""

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import brim
from brim.engine.training import has_checkpoint
from brim.errors import CheckpointError, DatasetError, StorageError
from brim.segmentation.networks.weights import find_weights
from brim.segmentation.training.crops import Pair, find_change

FORMAT_VERSION = 1
KIND = "segment-train"
CONFIG = "config.json"
_UNFINISHED = f".{CONFIG}.new"  # what a process killed while writing it leaves
_FREE = ("epochs", "tier", "early_stopping_patience", "checkpoint_every_s")  # may change when a run goes on


def describe(pairs: list[Pair], training: dict[str, Any], num_val: int, weights: Path | str | None) -> dict[str, Any]:
    """What config.json says."""
    inputs = json.dumps([[pair.name, *pair.identity()] for pair in pairs])
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "training": training,
        "weights_sha256": None if weights is None else _digest(find_weights(weights)),
        "images": len(pairs),
        "split": {"train": len(pairs) - num_val, "validation": num_val},
        "inputs_sha256": hashlib.sha256(inputs.encode()).hexdigest(),
        "versions": {"brim": brim.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def check_free(out: Path, pairs: list[Pair], about: dict[str, Any], resume: bool) -> None:
    """Raise unless `out` is empty or holds this very run; one that has begun to train needs resume."""
    names = {entry.name for entry in out.iterdir()} - {_UNFINISHED}
    if not names:
        return
    if CONFIG not in names:
        raise CheckpointError(f"{out} is not empty and has no {CONFIG}; choose another --out")
    known = _read_config(out / CONFIG)
    if not has_checkpoint(out / "train" / "last"):
        return  # nothing was trained yet: crops that fit are used, others made anew
    if not resume:
        raise CheckpointError(f"{out} is not empty; add --resume to continue it or choose another --out")
    _check_same(out, pairs, known, about)


def write_config(out: Path, about: dict[str, Any]) -> None:
    """Write config.json; it is there entirely or not at all."""
    new = out / _UNFINISHED
    try:
        with new.open("w", encoding="utf-8") as opened:
            opened.write(json.dumps(about, indent=1, allow_nan=False) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(out / CONFIG)
    except OSError as failure:
        raise StorageError(f"{out}: cannot write, {failure.strerror or failure}; choose another --out") from failure


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_same(out: Path, pairs: list[Pair], known: dict[str, Any], about: dict[str, Any]) -> None:
    flat = [dict(side["training"], weights_sha256=side.get("weights_sha256")) for side in (known, about)]
    for name in dict.fromkeys((*flat[0], *flat[1])):
        old, new = (side.get(name) for side in flat)
        if old != new and name not in _FREE:
            raise CheckpointError(
                f"{out}: {name} was {old} and is {new} now; resume with the same, or choose another --out"
            )
    if known.get("inputs_sha256") != about["inputs_sha256"]:
        change = find_change(pairs, out / "crops", about["training"]["size"])
        raise DatasetError(f"{out}: {change} since the run began; restore it, or choose another --out")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(f"{file} is not valid JSON ({failure}); choose another --out") from failure
    if not isinstance(known, dict) or known.get("kind") != KIND or not isinstance(known.get("training"), dict):
        kind = known.get("kind") if isinstance(known, dict) else None
        raise CheckpointError(f'{file} is of another run: kind={kind!r}, expected "{KIND}"; choose another --out')
    if known.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {known.get('format_version')!r}, expected {FORMAT_VERSION}; use its own brim"
        )
    return known

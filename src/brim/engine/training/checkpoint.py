"""State of a training run on disk: `model.safetensors`, `optimizer.safetensors` and `state.json` in one directory.

A checkpoint is written whole under another name, synced, then renamed; the one before it stays until then. After a
crash at any moment one of the two is complete. Nothing is pickled: loading runs no code.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from brim.errors import CheckpointError, StorageError

FORMAT_VERSION = 1
STATE = "state.json"

Groups = dict[str, dict[str, Tensor]]  # file stem → tensors by name


def save_checkpoint(directory: Path, groups: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Put a checkpoint in the place of the one there, which stays until the new one is synced."""
    new, old = _beside(directory, "new"), _beside(directory, "old")
    with _refusals(directory):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        files = {stem: _write(new / f"{stem}.safetensors", _to_bytes(group)) for stem, group in groups.items()}
        text = json.dumps({"format_version": FORMAT_VERSION, **state, "files": files}, allow_nan=False, indent=1)
        _write(new / STATE, text.encode())
        _sync(new)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)  # a directory cannot be replaced in one call: load_checkpoint looks here too
        new.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)


def has_checkpoint(directory: Path) -> bool:
    """Whether load_checkpoint would find something, whole or damaged."""
    return directory.is_dir() or _beside(directory, "old").is_dir()


def load_checkpoint(directory: Path) -> tuple[Groups, dict[str, Any]]:
    """Tensors and state of a checkpoint; a missing or damaged one is a CheckpointError."""
    found = directory
    if not directory.is_dir():
        found = _beside(directory, "old")  # killed between two renames
        if not found.is_dir():
            raise CheckpointError(f"{directory} has no checkpoint; give the directory of a training run")
    state = _read_state(found / STATE)
    return {stem: _read_group(found / f"{stem}.safetensors", sums) for stem, sums in state["files"].items()}, state


def load_weights(
    module: nn.Module, run: Path | str, phase: str = "train", which: Literal["best", "last"] = "best"
) -> dict[str, Any]:
    """Put a run's weights into the module and return the checkpoint's state; best is last where nothing was evaluated.

    Loads on the device the module is on. Weights of another model are a CheckpointError that names the first
    difference.
    """
    directory = Path(run) / phase / which
    if which == "best" and not has_checkpoint(directory):
        directory = directory.with_name("last")
    groups, state = load_checkpoint(directory)
    copy_in(groups.get("model", {}), module.state_dict(), directory)
    return state


@torch.no_grad()
def copy_in(saved: Mapping[str, Tensor], targets: Mapping[str, Tensor], directory: Path) -> None:
    """Copy saved tensors into those of the same name, in place; the first that differs is named, and nothing copied."""
    for name in dict.fromkeys((*targets, *saved)):
        mine, other = (_describe(tensors.get(name)) for tensors in (targets, saved))
        if mine != other:
            raise CheckpointError(
                f'{directory} is of another model: "{name}" is {other} in the checkpoint and {mine} in this model; '
                "use the model and the configuration it was trained with, or another directory"
            )
    for name, tensor in saved.items():
        targets[name].copy_(tensor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the directory and keep other writers out; the lock ends with the process, however that ends."""
    with _refusals(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as failure:
        os.close(handle)
        raise CheckpointError(f"{directory} is being written by another process; wait for it to end") from failure
    except OSError:
        pass  # a file system without locks, such as some NFS: go on without
    try:
        yield
    finally:
        os.close(handle)


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _beside(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}")


def _to_bytes(group: Mapping[str, Tensor]) -> bytes:
    # to("cpu") before clone(): tied weights must not share memory in the file, and a GPU need not hold the clone
    return save({name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in group.items()})


def _write(file: Path, content: bytes) -> dict[str, Any]:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(_read(file))
    except (ValueError, RecursionError) as failure:
        raise _damaged(file, f"is not valid JSON ({failure})") from failure
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{file}: format_version is {version!r}, expected {FORMAT_VERSION}; use its own brim")
    if not isinstance(state.get("files"), dict):
        raise _damaged(file, "lists no files")
    return dict(state)


def _read_group(file: Path, sums: Any) -> dict[str, Tensor]:
    content = _read(file)
    wanted = sums.get("sha256") if isinstance(sums, dict) else None
    if hashlib.sha256(content).hexdigest() != wanted:
        raise _damaged(file, f"({len(content)} bytes) differs from the checksum in {STATE}")
    try:
        return load(content)
    except SafetensorError as failure:
        raise _damaged(file, f"is no safetensors file ({failure})") from failure


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as failure:
        raise _damaged(file, "is missing") from failure
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure


def _damaged(file: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{file} {fault}; restore it from a copy, or remove {file.parent} and train again")


@contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or failure
        raise StorageError(
            f"{directory}: cannot write, {reason}; the checkpoint before it stays: free space or change the "
            "permissions, then resume"
        ) from failure

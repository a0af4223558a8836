"""A trained run as others share models: config.json, model.safetensors and a README.md with its metrics.

Such a folder, alone, is read wherever a run is. It lies in the run's own directory, written when the run is done.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save
from torch import Tensor

from brim.engine.training.run_directory import write_json
from brim.errors import StorageError

HUB_CONFIG: Final = "config.json"
HUB_WEIGHTS: Final = "model.safetensors"
HUB_README: Final = "README.md"


def write_hub(
    out: Path,
    weights: Path | Mapping[str, Tensor],
    *,
    title: str,
    metrics: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the three files into a run's directory.

    weights  a file of the run, which gets a second name, or tensors
    about    what config.json says; None: it is the run's own description already
    """
    try:
        if isinstance(weights, Path):
            _link(weights, out / HUB_WEIGHTS)
        else:
            tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
            _replace(out / HUB_WEIGHTS, save(tensors))
        if about is not None:
            write_json(out / HUB_CONFIG, about)
        _replace(out / HUB_README, _readme(title, metrics).encode())
    except OSError as failure:
        raise StorageError(
            f"{out} cannot be written: {failure.strerror or failure}", hint="free some space"
        ) from failure


def _link(file: Path, name: Path) -> None:
    """A second name for a file, or a copy where the file system has no links."""
    new = name.with_name(f".{name.name}.{os.getpid()}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    try:
        os.link(file, new)
    except OSError:
        shutil.copyfile(file, new)
    new.replace(name)


def _replace(file: Path, content: bytes) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        new.write_bytes(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _readme(title: str, metrics: Mapping[str, Any]) -> str:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    head = ["---", "library_name: brim", "tags:", f"- {json.dumps(title)}", "---", "", f"# {title}", ""]
    table = ["| metric | value |", "| --- | --- |", *(f"| {name} | {value:.4g} |" for name, value in numbers.items())]
    body = table if numbers else ["It was not evaluated."]
    return "\n".join([*head, *body, "", "brim reads this folder wherever it takes a run.", ""])

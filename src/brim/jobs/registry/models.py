"""Models and training runs that people bring: each is loaded once, strictly, before it is listed."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import CheckpointError, ConfigError, StorageError
from brim.jobs.kinds import KINDS
from brim.jobs.registry.outputs import run_output

if TYPE_CHECKING:
    from torch import nn

    from brim.jobs.store import Catalogue, ModelKind, ModelRow, RunRow

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RUN_JSON = "run.json"  # of locators and of sequence runs; those of segmentation have a config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    kind: "ModelKind"
    network: str
    about: dict[str, Any]


def add(
    catalogue: "Catalogue",
    *,
    name: str,
    path: Path,
    network: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple["ModelRow", bool] | None:
    """List a model, and whether it replaced another of its name; None if stopped."""
    check_name(name)
    try:
        path = path.expanduser().resolve()
        there = path.exists()
    except OSError as failure:
        raise StorageError(f"{path}: {failure.strerror}; check its permissions") from failure
    if not there:
        raise CheckpointError(f"{path} does not exist; give the directory of a run or a file of weights")
    summary = look(path, network)
    if stop():
        return None
    return catalogue.models.put(
        name=name, kind=summary.kind, network=summary.network, path=str(path), about=summary.about
    )  # fmt: skip


def check_name(name: str) -> None:
    """Reject a name that could not stand in a URL or a form as it is."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"NAME {name!r} must be 1 to 100 letters, digits, dots, - or _, and begin with a letter or digit"
        )


def look(path: Path, network: str | None = None) -> ModelSummary:
    """Find out what a run or a file is of, and load it; what is missing, foreign or damaged is an error that says so.

    network  what a file of weights is of; a run says that itself
    """
    kind = _said_kind(path / _RUN_JSON) if path.is_dir() else None
    if kind in _OTHERS:
        if network is not None:
            raise ConfigError(
                f"is for segmentation weights, but {path} names its own network",
                field="network",
                value=network,
                code="conflict",
                hint="omit {network}",
            )
        return _OTHERS[kind](path)
    return _look_segment(path, network)


def _look_segment(path: Path, network: str | None) -> ModelSummary:
    from brim.jobs.kinds.segment import trained_model
    from brim.segmentation.networks import create_model, find_weights, load_weights, model_names

    find_weights(path)  # first: what is missing is said before what it is of is asked
    known = ", ".join(model_names())
    trained = trained_model(path) if path.is_dir() else None
    if network is not None and network not in model_names():
        raise ConfigError(f"is unknown; choose one of {known}", field="network", value=network, code="unknown_choice")
    if network is None and trained is None:
        raise ConfigError(
            f"{path} does not say what network it is of",
            field="network",
            code="missing",
            hint=f"add {{network}}, one of {known}",
        )
    if network is not None and trained is not None and network != trained:
        raise ConfigError(
            f"but {path} is a run of {trained}", field="network", value=network, code="conflict", hint="omit {network}"
        )
    named = network or trained
    assert named is not None
    module = create_model(named)
    load_weights(module, path)
    return ModelSummary(kind="segment", network=named, about=_size(module))


def _look_locator(path: Path) -> ModelSummary:
    from brim.rf.location import load_run

    return ModelSummary(kind="locate", network="locator", about=_size(load_run(path).module))


def _look_classifier(path: Path) -> ModelSummary:
    from brim.sequences.evaluation.runs import load_run

    run = load_run(path)
    about = {"classes": list(run.about["classes"]), "mode": run.about["mode"]}
    return ModelSummary(kind="classify", network="cnn_lstm", about={**_size(run.module), **about})


_OTHERS: Final[dict[str, Callable[[Path], ModelSummary]]] = {
    "rf-locator": _look_locator,
    "sequence-train": _look_classifier,
}


def _size(module: "nn.Module") -> dict[str, Any]:
    return {"parameters": sum(parameter.numel() for parameter in module.parameters())}


def _said_kind(file: Path) -> str | None:
    """The kind in a run.json; None if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror}; check its permissions") from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(f"{file} is not valid JSON ({failure}); restore it from a copy") from failure
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in _OTHERS:
        raise CheckpointError(f"{file}: kind is {str(kind)[:60]!r}, expected one of {', '.join(_OTHERS)}")
    return str(kind)


# Training runs


def add_run(catalogue: "Catalogue", *, name: str, path: Path, kind: str, config: Mapping[str, Any]) -> "RunRow":
    """List the run in a directory, which stays where it is; one that is listed already is returned as it is.

    kind    of the job that would have made it, such as rf.train
    config  of that job; what is left out is its default
    """
    path = path.resolve()
    output = run_output(path)
    if not output.items:
        raise CheckpointError(f"{path} holds no checkpoint; give the directory of a run that has been trained")
    resolved = KINDS[kind].resolve(dict(config))
    return catalogue.runs.add(name=name, kind=kind, path=str(path), config=resolved, summary=output.about)

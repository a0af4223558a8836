"""Models and training runs that people bring: each is loaded once, strictly, before it is listed."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import CheckpointError, ConfigError, Conflict, StorageError
from brim.jobs.kinds import KINDS
from brim.jobs.registry.outputs import read_json, run_output
from brim.segmentation.config import NETWORKS

if TYPE_CHECKING:
    from torch import nn

    from brim.jobs.store import Catalogue, ModelKind, ModelRow, RunRow

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HUB_CONFIG = "config.json"
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
    summary = look(path, network, may_run_code=True)
    if stop():
        return None
    return catalogue.models.put(
        name=name, kind=summary.kind, network=summary.network, path=str(path), about=summary.about
    )  # fmt: skip


def put_run(
    catalogue: "Catalogue", run: "RunRow", *, name: str, path: Path, summary: ModelSummary
) -> tuple["ModelRow", bool]:
    """List the model that a run trained, and whether it replaced another of its name.

    path     the run's directory, absolute
    summary  what `look` finds there
    """
    about = {**summary.about, "run_id": run.id, "run_name": run.name}
    return catalogue.models.put(name=name, kind=summary.kind, network=summary.network, path=str(path), about=about)


def check_trained(run: "RunRow") -> None:
    """Raise Conflict while the weights of a run still change."""
    if run.state == "training":
        raise Conflict(f'the run "{run.name}" is still training', hint="wait for its job, or cancel it")


def check_name(name: str) -> None:
    """Reject a name that could not stand in a URL or a form as it is."""
    if not NAME.fullmatch(name):
        text = "must be 1 to 100 letters, digits, dots, - or _, and begin with a letter or digit"
        raise ConfigError(f"NAME {name!r} {text}", field="name", code="unknown_choice")


def look(path: Path, network: str | None = None, *, may_run_code: bool = False) -> ModelSummary:
    """Find out what a run or a file is of, and load it; what is missing, foreign or damaged is an error that says so.

    network       what a file of weights is of; a run says that itself
    may_run_code  whether a network may come from a file that it or the run names; only the administrator says so
    """
    kind = _said_kind(path) if path.is_dir() else None
    if kind in _OTHERS:
        if network is not None:
            raise ConfigError(
                f"is for segmentation weights, but {path} names its own network",
                field="network",
                value=network,
                code="conflict",
                hint="omit {network}",
            )
        about = read_json(path / _RUN_JSON) or read_json(path / HUB_CONFIG) or {}
        if about.get("network") and not may_run_code:
            raise ConfigError(
                f"{path.name} was trained with code, which only the administrator may load", field="network"
            )
        return _OTHERS[kind](path)
    return _look_segment(path, network, may_run_code)


def _look_segment(path: Path, network: str | None, may_run_code: bool) -> ModelSummary:
    from brim.engine.networks import is_program, is_reference
    from brim.segmentation.config import bring, source_named
    from brim.segmentation.networks import find_weights, load_model, model_names, network_of, recall

    find_weights(path)  # first: what is missing is said before what it is of is asked
    known = ", ".join(model_names())
    if may_run_code and network is not None and is_reference(network):
        network = bring(network)
    says = path.is_dir() or is_program(path)
    trained = (recall if may_run_code and network is None else network_of)(path) if says else None
    if network is not None and network not in model_names():
        raise ConfigError(f"is unknown; choose one of {known}", field="network", value=network, code="unknown_choice")
    if network is None and trained is None:
        raise ConfigError(
            f"{path} does not say what network it is of",
            field="network",
            code="missing",
            hint=f"add {{network}}, one of {known}",
        )
    if network is not None and trained is not None and network != trained and trained in NETWORKS:
        raise ConfigError(
            f"but {path} is a run of {trained}", field="network", value=network, code="conflict", hint="omit {network}"
        )
    named = network or trained
    assert named is not None
    module = load_model(named, path)
    source = source_named(named)
    if source is None:
        return ModelSummary(kind="segment", network=named, about=_size(module))
    about = {**_size(module), "source": source.as_dict()}
    return ModelSummary(kind="segment", network=source.name, about=about)


def _look_locator(path: Path) -> ModelSummary:
    from brim.rf.location import load_run

    return ModelSummary(kind="locate", network="locator", about=_size(load_run(path).module))


def _look_classifier(path: Path) -> ModelSummary:
    from brim.sequences.evaluation.runs import load_run
    from brim.sequences.rocket import Rocket, RocketBlend

    run = load_run(path)
    about = {"classes": list(run.about["classes"]), "mode": run.about["mode"]}
    names = {Rocket: "rocket", RocketBlend: "rocket + cnn_lstm"}
    network = names.get(type(run.module), "cnn_lstm")
    if isinstance(run.about.get("network"), dict):
        network, about = str(run.about["network"]["name"]), {**about, "source": run.about["network"]}
    return ModelSummary(kind="classify", network=network, about={**_size(run.module), **about})


_OTHERS: Final = {"rf-locator": _look_locator, "sequence-train": _look_classifier}


def _size(module: "nn.Module") -> dict[str, Any]:
    trained = sum(parameter.numel() for parameter in module.parameters())
    return {"parameters": trained or sum(buffer.numel() for buffer in module.buffers())}  # solved for, not trained


def _said_kind(path: Path) -> str | None:
    """The kind in a run.json, or in the config.json of a folder that was shared; None for segmentation."""
    if not (path / _RUN_JSON).is_file() and (path / HUB_CONFIG).is_file():
        value = read_json(path / HUB_CONFIG) or {}
        return value["kind"] if value.get("kind") in _OTHERS else None
    file = path / _RUN_JSON
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


def add_run(
    catalogue: "Catalogue",
    *,
    name: str,
    path: Path,
    kind: str,
    config: Mapping[str, Any],
    scores: Mapping[str, Any] | None = None,
) -> "RunRow":
    """List the run in a directory, which stays where it is; one that is listed already is returned as it is.

    kind    of the job that would have made it, such as rf.train
    config  of that job; what is left out is its default
    scores  what its evaluation measured
    """
    path = path.resolve()
    output = run_output(path)
    if not output.items:
        raise CheckpointError(f"{path} holds no checkpoint; give the directory of a run that has been trained")
    resolved = KINDS[kind].resolve(dict(config))
    return catalogue.runs.add(
        name=name, kind=kind, path=str(path), config=resolved, summary={**output.about, **(scores or {})}
    )

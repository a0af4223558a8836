"""Images: segment.tune and segment.train, by the functions of the command line.

A dataset of images is a folder of them, or one with the folders images and masks.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from brim.errors import BrimError, Conflict, DatasetError
from brim.jobs.kinds.alone import alone
from brim.jobs.kinds.fields import (
    CHECKPOINT_S,
    Accelerator,
    Count,
    Devices,
    Fields,
    OneDatasetId,
    Text,
    build,
    model_of,
    own,
    settle,
    tier_of,
)
from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import Inputs, Stopped, Task, Voice, attempt, device_of, in_training, refused
from brim.jobs.registry.datasets import image_folders
from brim.jobs.worker.group import by_ranks

if TYPE_CHECKING:
    from torch import nn

    from brim.jobs.kinds.specs import Spec

_MODEL_BYTES = 16 * 2**20  # of trials and logs
_PROBED = 64  # images whose headers are read to estimate the rest


def model_name() -> Any:
    """The type of a network's name."""
    from brim.segmentation.config import SegmentTrainConfig, network_names

    return alone(Text, "model", SegmentTrainConfig, hint={"enum": list(network_names())})


# segment.tune


def tune_model() -> type[Fields]:
    """Models by name, and tune_model's own options."""
    from brim.segmentation.config import TuneConfig

    usual = TuneConfig()

    def option(kind: Any, name: str) -> Any:
        return alone(kind, name, TuneConfig)

    search = list[Literal["precision", "layout", "compile"]]
    models: Any = Annotated[list[model_name()], Field(min_length=1, max_length=100)]  # type: ignore[misc]
    return create_model(
        "Tuning", __base__=Fields,
        models=(models | None, None), model=(model_name() | None, None), run_id=(Text | None, None),
        size=(option(Count, "size"), usual.size), seconds=(option(float, "seconds"), usual.seconds),
        p95_ms=(option(float | None, "p95_ms"), None), search=(search, []),
        reserve=(option(float, "reserve"), usual.reserve), tolerance=(option(float, "tolerance"), usual.tolerance),
        accelerator=(Accelerator, "auto"),
    )  # fmt: skip


_TUNED = ("size", "seconds", "p95_ms", "reserve", "tolerance")


def resolve_tune(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which models, and how; weights fit one of them."""
    from brim.segmentation.config import TuneConfig

    if values.get("model") is not None and values.get("models") is not None:
        raise Conflict("config.model and config.models are both given; give one of them", field="config.model")
    one = values.get("model")
    models = [one] if one is not None else list(dict.fromkeys(values.get("models") or TuneConfig().models))
    if values.get("run_id") is not None and len(models) > 1:
        raise Conflict("config.run_id has the weights of one model; name it in config.model", field="config.run_id")
    defaults = {name: info.get_default() for name, info in tune_model().model_fields.items()}
    return {**defaults, **values, "models": models, "model": None, "search": sorted(set(values.get("search", [])))}


def tune_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the trials."""
    return _MODEL_BYTES


@attempt
def run_tune(task: Task, voice: Voice) -> dict[str, Any]:
    """Tune one model after the other; those that an attempt before this one saved are not tuned again."""
    config = task.spec.config
    found = {}
    for done, name in enumerate(config["models"]):
        voice.or_stop(Progress(current=done, total=len(config["models"]), message=name))
        found[name] = _read_tuned(task.out / f"{name}.json") or _tune_one(task, name, voice)
    voice(Progress(current=len(found), total=len(found), message="tuned"))
    return {"models": found, "files": [f"{name}.json" for name in found]}


def _tune_one(task: Task, name: str, voice: Voice) -> dict[str, Any]:
    from brim.segmentation.config import TuneConfig
    from brim.segmentation.tuning.tune import tune

    config, place = task.spec.config, voice.last

    def tell(text: str) -> None:
        voice.or_stop(Progress(current=place.current, total=place.total, message=text))

    options = TuneConfig(
        models=(name,), search=tuple(config["search"]), **{option: config[option] for option in _TUNED}
    )
    tuned = tune(
        options, device_of(task), out=task.batch_sizes, make=lambda _: _module(name, task.inputs.run), progress=tell
    )[name]
    entry = {**asdict(tuned.entry), "messages": tuned.messages}
    _write_json(task.out / f"{name}.json", {**entry, "trials": tuned.trials})
    return entry


def _module(name: str, run: Path | None) -> "nn.Module":
    from brim.segmentation.networks.registry import create_model as create
    from brim.segmentation.networks.weights import load_weights

    module = create(name)
    if run is not None:
        load_weights(module, run)
    return module


def _read_tuned(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "trials"}


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    with new.open("w", encoding="utf-8") as opened:
        opened.write(json.dumps(values))
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)


# segment.train


def train_model() -> type[Fields]:
    """SegmentTrainConfig and what to train on."""
    from brim.segmentation.config import SegmentTrainConfig
    from brim.segmentation.config import network_names as model_names

    return model_of(
        SegmentTrainConfig,
        others=({"model": model_names()[0]},),
        hints={"model": {"enum": list(model_names())}},
        dataset_ids=(OneDatasetId, ...),
        run_id=(Text | None, None),
        preload_to_gpu=(bool | None, None),
        num_workers=(Annotated[Count, Field(ge=0)], 0),
        accelerator=(Accelerator, "auto"),
        devices=(Devices, 1),
        checkpoint_every_s=(float, CHECKPOINT_S),
    )


def resolve_train(values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe."""
    from brim.segmentation.config import SegmentTrainConfig

    usual = {"checkpoint_every_s": CHECKPOINT_S, **tier_of(values)}
    recipe = build(SegmentTrainConfig, usual | own(SegmentTrainConfig, values))
    beside = {"run_id": None, "preload_to_gpu": None, "num_workers": 0, "accelerator": "auto", "devices": 1}
    return {**beside, **values, **asdict(recipe)}


def check_train(spec: "Spec", inputs: Inputs) -> None:
    """Refuse images without masks, pairs that are none, and too few to hold one out."""
    from brim.segmentation.config import SegmentTrainConfig
    from brim.segmentation.training.crops import pair_files
    from brim.segmentation.training.run import split

    (dataset,), field = inputs.datasets, "config.dataset_ids[0]"
    images, masks = image_folders(dataset)
    if masks is None:
        raise Conflict(f"{field} has no masks; add a dataset with a mask for every image", field=field)
    try:
        pairs = pair_files(images, masks)
    except DatasetError as failure:
        raise refused(field, dataset, failure) from failure
    recipe = build(SegmentTrainConfig, own(SegmentTrainConfig, spec.config))
    settle(lambda: split(len(pairs), recipe), field, ())
    check_weights(spec, inputs)


def train_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of crops and checkpoints."""
    import torch

    from brim.segmentation.networks.registry import create_model as create

    with torch.device("meta"):
        module = create(spec.config["model"])
    weights = int(sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values()))
    checkpoints = 3 * 3 * weights + weights  # last, the next and best, each with two moments; and what is kept
    return checkpoints + _crop_bytes(image_folders(inputs.datasets[0])[0], spec.config["size"]) + _MODEL_BYTES


def _crop_bytes(folder: Path, size: int) -> int:
    from brim.segmentation.images.reading import find_images
    from brim.segmentation.prediction.loader import header_size
    from brim.segmentation.training.crops import windows

    files = list(find_images([folder]))
    some = files[:: max(1, len(files) // _PROBED)]
    known = [found for found in map(header_size, some) if found is not None]
    crops = sum(len(windows(height, width, size)) for width, height in known) / max(1, len(known))
    return int(len(files) * crops * size * size * 4)


@attempt
def run_train(task: Task, voice: Voice) -> dict[str, Any]:
    """Train the network, or go on with it."""
    if (found := by_ranks(task, voice)) is not None:
        return found
    from brim.engine.training import TrainProgress
    from brim.segmentation.config import SegmentTrainConfig
    from brim.segmentation.training.run import train

    images, masks = image_folders(task.inputs.datasets[0])
    if masks is None:
        raise DatasetError("the dataset has no masks; add one with a mask for every image")
    recipe = build(SegmentTrainConfig, own(SegmentTrainConfig, task.spec.config))
    voice.say("pairing images and masks")

    def tell(where: TrainProgress) -> None:
        voice(in_training(where, "cutting crops"))

    report = train(
        images, masks, recipe, task.out, device=device_of(task), weights=task.inputs.run, resume=True,
        progress=tell, stop=task.stop,
    )  # fmt: skip
    if report.stopped:
        raise Stopped
    kept = {name: value for name, value in report.to_json().items() if name not in ("run", "weights")}
    return {**kept, "run_id": task.out.name}


# Weights


def check_weights(spec: "Spec", inputs: Inputs) -> None:
    """Refuse a run of another network than the one named."""
    if inputs.run is None:
        return
    named = spec.config.get("model") or (spec.config.get("models") or [None])[0]
    try:
        trained = trained_model(inputs.run)
    except BrimError as failure:
        raise Conflict("config.run_id has no weights yet; let its job go on first", field="config.run_id") from failure
    if named is not None and trained is not None and named != trained:
        raise Conflict(f"config.model={named!r} but the run of config.run_id is of {trained!r}", field="config.model")


def trained_model(run: Path) -> str | None:
    """The network that a run's weights are of, where anything says so: those of a run cut short do not."""
    from brim.segmentation.networks.weights import read_metadata
    from brim.segmentation.training.about import CONFIG

    if "model" in (said := read_metadata(run)):
        return said["model"]
    try:
        return str(json.loads((run / CONFIG).read_text(encoding="utf-8"))["training"]["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

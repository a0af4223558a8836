"""Images: segment.tune, segment.predict and segment.train, by the functions of the command line.

A dataset of images is a folder of them, or one with the folders images and masks.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, create_model

from brim.errors import BrimError, DatasetError, FieldError
from brim.jobs.fields import (
    Accelerator,
    Count,
    DatasetIds,
    Fields,
    OneDatasetId,
    Text,
    build,
    model_of,
    own,
    settle,
    tier_of,
)
from brim.jobs.sources import image_folders
from brim.jobs.status import Progress
from brim.jobs.task import Inputs, Stopped, Task, Voice, attempt, counted, device_of, in_training, refused

if TYPE_CHECKING:
    from torch import nn

    from brim.jobs.specs import Spec
    from brim.segmentation.predict import PredictProgress

CHECKPOINT_S = 5.0  # of training that a killed worker loses at most
LISTED = 1000  # files that a result names; the folder has the rest
_MODEL_BYTES = 16 * 2**20  # of trials and logs
_PROBED = 64  # images whose headers are read to estimate the rest

Precision = Literal["auto", "fp32", "bf16", "fp16"]


# segment.tune


def tune_model() -> type[Fields]:
    """Models by name, and tune_model's own options."""
    from brim.segmentation.tune import RESERVE, SECONDS
    from brim.segmentation.tune_search import MASK_TOLERANCE

    search = list[Literal["precision", "layout", "compile"]]
    return create_model(
        "Tuning", __base__=Fields,
        models=(Annotated[list[Text], Field(min_length=1, max_length=100)] | None, None), model=(Text | None, None),
        run_id=(Text | None, None), size=(Count, 1024), seconds=(float, SECONDS), p95_ms=(float | None, None),
        search=(search, []), reserve=(float, RESERVE), tolerance=(float, MASK_TOLERANCE),
        accelerator=(Accelerator, "auto"),
    )  # fmt: skip


_TUNED = ("size", "seconds", "p95_ms", "reserve", "tolerance")


def resolve_tune(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which models, and how; weights fit one of them."""
    from brim.segmentation.registry import BUILT_IN, find_model
    from brim.segmentation.tune import check_options

    if values.get("model") is not None and values.get("models") is not None:
        raise FieldError("config.model", "config.model and config.models are both given; give one of them")
    one = values.get("model")
    models = [one] if one is not None else list(dict.fromkeys(values.get("models") or BUILT_IN))
    for at, name in enumerate(models):
        field = "config.model" if one is not None else f"config.models[{at}]"
        settle(lambda name=name: find_model(name), field, ())  # type: ignore[misc]
    if values.get("run_id") is not None and len(models) > 1:
        raise FieldError("config.run_id", "config.run_id has the weights of one model; name it in config.model")
    settle(lambda: check_options(**{name: values[name] for name in _TUNED if name in values}), "config", _TUNED)
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
    from brim.segmentation.tune import tune

    config, place = task.spec.config, voice.last

    def tell(text: str) -> None:
        voice.or_stop(Progress(current=place.current, total=place.total, message=text))

    options = {option: config[option] for option in _TUNED}
    tuned = tune(
        [name], device_of(task), out=task.batch_sizes, make=lambda _: _module(name, task.inputs.run), progress=tell,
        search=frozenset(config["search"]), **options,
    )[name]  # fmt: skip
    entry = {**asdict(tuned.entry), "messages": tuned.messages}
    _write_json(task.out / f"{name}.json", {**entry, "trials": tuned.trials})
    return entry


def _module(name: str, run: Path | None) -> "nn.Module":
    from brim.segmentation.registry import create_model as create
    from brim.segmentation.weights import load_weights

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


# segment.predict


def predict_model() -> type[Fields]:
    """FilesConfig and how images are cut; the model is the run's own where it is not named."""
    from brim.segmentation.formats import Format
    from brim.segmentation.predict_files import FilesConfig
    from brim.segmentation.tiles import DEFAULT_TILE

    return model_of(
        FilesConfig, dataset_ids=(DatasetIds, ...), run_id=(Text, ...), model=(Text | None, None),
        format=(Format, "geojson"), tile=(Count, DEFAULT_TILE), resize=(Count | None, None),
        overlap=(Count | None, None), precision=(Precision, "auto"), accelerator=(Accelerator, "auto"),
    )  # fmt: skip


_CUT = ("tile", "resize", "overlap")


def resolve_predict(values: Mapping[str, Any]) -> dict[str, Any]:
    """What to write, and how."""
    from brim.segmentation.predict_config import PredictConfig
    from brim.segmentation.predict_files import FilesConfig
    from brim.segmentation.registry import find_model

    model = values.get("model")
    if model is not None:
        settle(lambda: find_model(model), "config", ("model",))
    files = build(FilesConfig, {**own(FilesConfig, values), "model": model})
    cut = build(PredictConfig, {name: values[name] for name in _CUT if name in values})
    rest = {name: getattr(cut, name) for name in _CUT}
    usual = {"precision": "auto", "accelerator": "auto"}
    return {**usual, **values, **asdict(files), **rest}


def check_weights(spec: "Spec", inputs: Inputs) -> None:
    """Refuse a run of another network than the one named."""
    if inputs.run is None:
        return
    named = spec.config.get("model") or (spec.config.get("models") or [None])[0]
    try:
        trained = _trained(inputs.run)
    except BrimError as failure:
        raise FieldError("config.run_id", "config.run_id has no weights yet; let its job go on first") from failure
    if named is not None and trained is not None and named != trained:
        raise FieldError("config.model", f"config.model={named!r} but the run of config.run_id is of {trained!r}")


def _trained(run: Path) -> str | None:
    """The network that a run's weights are of, where anything says so: those of a run cut short do not."""
    from brim.segmentation.train_run import CONFIG
    from brim.segmentation.weights import read_metadata

    if "model" in (said := read_metadata(run)):
        return said["model"]
    try:
        return str(json.loads((run / CONFIG).read_text(encoding="utf-8"))["training"]["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def predict_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the files, from what the images take: pictures may come out as large, outlines do not."""
    from brim.segmentation.images import find_images

    size = sum(file.stat().st_size for path in inputs.datasets for file in find_images([image_folders(path)[0]]))
    return size if spec.config["format"] in ("mask", "overlay") else size // 4


@attempt
def run_predict(task: Task, voice: Voice) -> dict[str, Any]:
    """Predict every image that has no file yet; of several datasets each has a folder of its own, named by its id."""
    from brim.segmentation.loader import ModelLoader
    from brim.segmentation.predict_files import FilesConfig, predict_files

    run, config = task.inputs.run, task.spec.config
    assert run is not None
    model = config["model"] or _trained(run)
    if model is None:
        raise FieldError("config.model", "config.model is missing, and the weights do not say whose they are; name it")
    files = build(FilesConfig, {**own(FilesConfig, config), "model": model})
    voice.say("loading the network")
    loader = ModelLoader(
        {model: run}, device_of(task), task.batch_sizes, config["precision"], config["tile"], config["resize"],
        overlap=config["overlap"],
    )  # fmt: skip
    parts = _parts(task)
    done, reports, failures = 0, list[dict[str, Any]](), dict[str, str]()
    for part in parts:
        tell = _teller(voice, done, sum(part.num_images for part in parts))
        found = predict_files([part.images], loader, part.out, files, progress=tell, stop=task.stop, resume=True)
        if found.stopped:
            raise Stopped
        done += part.num_images
        reports.append(found.as_dict())
        failures |= {
            part.name_of(image): why.replace(image, part.name_of(image)) for image, why in found.failures.items()
        }
    names = files_in(task.out)
    return {**_together(reports), "failures": failures, "files": names[:LISTED], "num_files": len(names)}


class _Part(NamedTuple):
    """A dataset of a prediction."""

    prefix: str  # of its files
    images: Path
    out: Path
    num_images: int

    def name_of(self, image: str) -> str:
        """As a result names it: below its dataset."""
        path = Path(image)
        inner = path.relative_to(self.images) if path.is_relative_to(self.images) else Path(path.name)
        return self.prefix + inner.as_posix()


def _parts(task: Task) -> list[_Part]:
    from brim.segmentation.images import find_images

    several = len(task.inputs.datasets) > 1
    parts = []
    for id, path in zip(task.spec.dataset_ids, task.inputs.datasets, strict=True):
        images, out = image_folders(path)[0], task.out / id if several else task.out
        parts.append(_Part(f"{id}/" if several else "", images, out, len(find_images([images]))))
    return parts


def _teller(voice: Voice, before: int, total: int) -> "Callable[[PredictProgress], None]":
    def tell(where: "PredictProgress") -> None:
        failed = f", {where.failed} failed" if where.failed else ""
        voice(counted(before + where.done, total, f"predicting{failed}", where.rate))

    return tell


def _together(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several datasets; what only makes sense for each alone is left out."""
    if len(reports) == 1:
        return reports[0]
    sums = {name: sum(report[name] for report in reports) for name in ("images", "failed", "seconds")}
    counts = [report["polygons"] for report in reports]
    return {
        **sums,
        "polygons": None if None in counts else sum(counts),
        "images_per_s": sums["images"] / sums["seconds"] if sums["seconds"] > 0 else 0.0,
        "batch_size": min(report["batch_size"] for report in reports),
    }


def files_in(out: Path) -> list[str]:
    """Names of the files of a result below its folder, sorted; those being written are not among them."""
    found = (file.relative_to(out) for file in out.rglob("*") if file.is_file())
    return sorted(file.as_posix() for file in found if not any(part.startswith(".") for part in file.parts))


# segment.train


def train_model() -> type[Fields]:
    """SegmentTrainConfig and what to train on."""
    from brim.segmentation.train import SegmentTrainConfig

    return model_of(
        SegmentTrainConfig,
        dataset_ids=(OneDatasetId, ...),
        run_id=(Text | None, None),
        preload_to_gpu=(bool | None, None),
        num_workers=(Annotated[Count, Field(ge=0)], 0),
        accelerator=(Accelerator, "auto"),
        checkpoint_every_s=(float, CHECKPOINT_S),
    )


def resolve_train(values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe."""
    from brim.segmentation.train import SegmentTrainConfig

    usual = {"checkpoint_every_s": CHECKPOINT_S, **tier_of(values)}
    recipe = build(SegmentTrainConfig, usual | own(SegmentTrainConfig, values))
    beside = {"run_id": None, "preload_to_gpu": None, "num_workers": 0, "accelerator": "auto"}
    return {**beside, **values, **asdict(recipe)}


def check_train(spec: "Spec", inputs: Inputs) -> None:
    """Refuse images without masks, pairs that are none, and too few to hold one out."""
    from brim.segmentation.crops import pair_files
    from brim.segmentation.train import SegmentTrainConfig, split

    (dataset,), field = inputs.datasets, "config.dataset_ids[0]"
    images, masks = image_folders(dataset)
    if masks is None:
        raise FieldError(field, f"{field} has no masks; add a dataset with a mask for every image")
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

    from brim.segmentation.registry import create_model as create

    with torch.device("meta"):
        module = create(spec.config["model"])
    weights = int(sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values()))
    checkpoints = 3 * 3 * weights + weights  # last, the next and best, each with two moments; and what is kept
    return checkpoints + _crop_bytes(image_folders(inputs.datasets[0])[0], spec.config["size"]) + _MODEL_BYTES


def _crop_bytes(folder: Path, size: int) -> int:
    from brim.segmentation.crops import windows
    from brim.segmentation.images import find_images
    from brim.segmentation.loader import header_size

    files = list(find_images([folder]))
    some = files[:: max(1, len(files) // _PROBED)]
    known = [found for found in map(header_size, some) if found is not None]
    crops = sum(len(windows(height, width, size)) for width, height in known) / max(1, len(known))
    return int(len(files) * crops * size * size * 4)


@attempt
def run_train(task: Task, voice: Voice) -> dict[str, Any]:
    """Train the network, or go on with it."""
    from brim.engine.train_report import TrainProgress
    from brim.segmentation.train import SegmentTrainConfig, train

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

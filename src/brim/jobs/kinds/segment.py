"""Images: segment.tune, segment.predict and segment.train, by the functions of the command line.

A dataset of images is a folder of them, or one with the folders images and masks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from brim.config import Doc, Length, OneOf, Range, part, read
from brim.errors import BrimError, ConfigError, Conflict, DatasetError
from brim.jobs.kinds.kind import (
    CHECKPOINT_S,
    Accelerator,
    DeviceCount,
    JobConfig,
    Kind,
    OnCluster,
    PreloadChoice,
    TextId,
    tier_of,
)
from brim.jobs.kinds.task import Inputs, Stopped, Task, checking, counted, in_training, with_progress
from brim.jobs.registry.datasets import image_folders
from brim.jobs.registry.outputs import read_json, write_json
from brim.jobs.status import JobProgress, Spec
from brim.segmentation.config import FilesConfig, SegmentTrainConfig, TuneConfig, network_names

if TYPE_CHECKING:
    from torch import nn

    from brim.segmentation.prediction import FilesReport, PredictProgress

LISTED = 1000  # files that a result names; the folder has the rest
_LOG_BYTES = 16 * 2**20  # of trials and logs
_PROBED = 64  # images whose headers are read to estimate the rest

# segment.tune


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob(TuneConfig, JobConfig):
    """The config of segment.tune; complete, it names its networks in models alone."""

    models: Annotated[
        tuple[str, ...] | None,
        Length(1, 100),
        OneOf(network_names),
        Doc("Networks to tune; null: all built-in ones."),
    ] = None  # type: ignore[assignment]  # optional here
    model: Annotated[str | None, OneOf(network_names), Doc("One network, instead of several.")] = None
    run_id: Annotated[TextId | None, Doc("Id of a run whose weights to tune with; null: initial weights.")] = None
    accelerator: Accelerator = "auto"

    def __post_init__(self) -> None:
        TuneConfig.__post_init__(self)
        if self.model is not None and self.models is not None:
            raise ConfigError("and models are both given", field="model", value=self.model, code="conflict")
        models = (self.model,) if self.model is not None else tuple(dict.fromkeys(self.models or TuneConfig().models))
        if self.run_id is not None and len(models) > 1:
            raise ConfigError(
                "has the weights of one network",
                field="run_id",
                value=self.run_id,
                code="conflict",
                hint="name it in {model}",
            )
        for name, value in (("models", models), ("model", None), ("search", tuple(sorted(set(self.search))))):
            object.__setattr__(self, name, value)


def tune_bytes(spec: Spec, inputs: Inputs) -> int:
    return _LOG_BYTES


@with_progress
def run_tune(task: Task) -> dict[str, Any]:
    """Tune one network after the other; those that an earlier attempt saved are not tuned again."""
    job = read(TuneJob, task.spec.config)
    tuned: dict[str, Any] = {}
    for done, name in enumerate(job.models or ()):
        task.report_or_stop(JobProgress(current=done, total=len(job.models or ()), message=name))
        saved = read_json(task.out / f"{name}.json")
        tuned[name] = _tune_one(task, name, job) if saved is None else _without_trials(saved)
    task.report(JobProgress(current=len(tuned), total=len(tuned), message="tuned"))
    return {"models": tuned, "files": [f"{name}.json" for name in tuned]}


def _tune_one(task: Task, name: str, job: TuneJob) -> dict[str, Any]:
    from brim.segmentation.tuning import tune

    def tell(text: str) -> None:
        task.report_or_stop(replace(task.last, message=text))

    def module(_: str) -> "nn.Module":
        return _module(name, task.inputs.run)

    options = replace(part(TuneConfig, job), models=(name,))
    result = tune(options, task.torch_device, out=task.batch_sizes, make=module, progress=tell)[name]
    entry = {**asdict(result.entry), "messages": result.messages}
    write_json(task.out / f"{name}.json", {**entry, "trials": result.trials})
    return entry


def _without_trials(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "trials"}


def _module(name: str, run: Path | None) -> "nn.Module":
    from brim.segmentation.networks import create_model, load_weights

    module = create_model(name)
    if run is not None:
        load_weights(module, run)
    return module


# segment.predict


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictJob(FilesConfig, JobConfig):
    """The config of segment.predict."""

    dataset_ids: Annotated[
        tuple[TextId, ...], Length(1, 100, unique=True), Doc("Ids of the image datasets to predict.")
    ]
    run_id: Annotated[TextId, Doc("Id of the run whose weights predict.")]
    accelerator: Accelerator = "auto"
    cluster: OnCluster = False


def predict_bytes(spec: Spec, inputs: Inputs) -> int:
    """Of the files, guessed from the size of the images: it depends on what is in them; the disk is watched too."""
    from brim.segmentation.images import find_images

    size = sum(file.stat().st_size for path in inputs.datasets for file in find_images([image_folders(path)[0]]))
    return int(size * {"overlay": 4, "mask": 1}.get(spec.config["format"], 0.25))  # overlays are PNG, images often JPEG


@with_progress
def run_predict(task: Task) -> dict[str, Any]:
    """Predict every image that has no result yet; each of several datasets has its own folder, named by its id."""
    from brim.jobs.worker.devices import by_leader

    if (result := by_leader(task)) is not None:
        return result
    run, job = task.inputs.run, read(PredictJob, task.spec.config)
    assert run is not None
    model = job.model or trained_model(run)
    if model is None:
        raise Conflict("config.model is missing, and the weights do not say what network they are of", field="model")
    files = replace(part(FilesConfig, job), model=model)
    task.say("loading the network")
    predict = _predict_on_cluster(task, run, files) if job.cluster else _predict_here(task, run, files)
    parts = _parts(task)
    done, reports, failures = 0, list[dict[str, Any]](), dict[str, str]()
    for one in parts:
        tell = _teller(task, done, sum(part.num_images for part in parts))
        report = predict([one.images], one.out, progress=tell, stop=task.stop)
        if report.stopped:
            raise Stopped
        done += one.num_images
        reports.append(report.as_dict())
        failures |= {
            one.name_of(image): why.replace(image, one.name_of(image)) for image, why in report.failures.items()
        }
    names = files_in(task.out)
    return {**_together(reports), "failures": failures, "files": names[:LISTED], "num_files": len(names)}


def _predict_here(task: Task, run: Path, files: FilesConfig) -> "Callable[..., FilesReport]":
    """Prediction in this process, with a network that stays loaded."""
    from brim.segmentation.prediction import ModelLoader, predict_files

    loader = ModelLoader(
        {str(files.model): run}, task.torch_device, task.batch_sizes, files.precision, files.tile, files.resize,
        overlap=files.overlap,
    )  # fmt: skip

    def predict(images: Sequence[Path], out: Path, **hooks: Any) -> "FilesReport":
        return predict_files(images, loader, out, files, resume=True, **hooks)

    return predict


def _predict_on_cluster(task: Task, run: Path, files: FilesConfig) -> "Callable[..., FilesReport]":
    """Prediction on the service's cluster; images that have a result are skipped there too."""
    from brim.cluster import predict_many
    from brim.jobs.worker.devices import service_cluster
    from brim.segmentation.prediction import Recipe

    recipe = Recipe(files=files, device="cpu" if task.spec.config["accelerator"] == "cpu" else "auto")

    def predict(images: Sequence[Path], out: Path, **hooks: Any) -> "FilesReport":
        return predict_many(images, out, recipe, run, service_cluster(task), batch_sizes=task.batch_sizes, **hooks)

    return predict


class _DatasetPart(NamedTuple):
    prefix: str  # of its files
    images: Path
    out: Path
    num_images: int

    def name_of(self, image: str) -> str:
        """As a result names it: relative to its dataset."""
        path = Path(image)
        inner = path.relative_to(self.images) if path.is_relative_to(self.images) else Path(path.name)
        return self.prefix + inner.as_posix()


def _parts(task: Task) -> list[_DatasetPart]:
    from brim.segmentation.images import find_images

    several = len(task.inputs.datasets) > 1
    parts = []
    for id, path in zip(task.spec.dataset_ids, task.inputs.datasets, strict=True):
        images, out = image_folders(path)[0], task.out / id if several else task.out
        parts.append(_DatasetPart(f"{id}/" if several else "", images, out, len(find_images([images]))))
    return parts


def _teller(task: Task, before: int, total: int) -> "Callable[[PredictProgress], None]":
    def tell(progress: "PredictProgress") -> None:
        failed = f", {progress.failed} failed" if progress.failed else ""
        task.report(counted(before + progress.done, total, f"predicting{failed}", progress.rate))

    return tell


def _together(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several datasets, without what only makes sense for each of them."""
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
    """Names of the files of a result relative to its folder, sorted, without those being written."""
    files = (file.relative_to(out) for file in out.rglob("*") if file.is_file())
    return sorted(file.as_posix() for file in files if not any(name.startswith(".") for name in file.parts))


# segment.train


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTrainJob(SegmentTrainConfig, JobConfig):
    """The config of segment.train."""

    dataset_ids: Annotated[tuple[TextId, ...], Length(1, 1), Doc("Id of the dataset of images with masks to train on.")]
    run_id: Annotated[TextId | None, Doc("Id of a run whose weights training starts from; null: new weights.")] = None
    preload_to_gpu: PreloadChoice = None
    num_workers: Annotated[
        int, Range(0), Doc("Accepted for compatibility with data loaders; no worker processes are needed.")
    ] = 0
    accelerator: Accelerator = "auto"
    devices: DeviceCount = 1
    checkpoint_every_s: Annotated[float, Range(above=0), Doc("Seconds between checkpoints.")] = CHECKPOINT_S

    def __post_init__(self) -> None:
        SegmentTrainConfig.__post_init__(self)
        object.__setattr__(self, "tier", tier_of(self.tier, self.preload_to_gpu))


def check_train(spec: Spec, inputs: Inputs) -> None:
    """Reject images without masks, pairs that do not match, and too few to hold one out."""
    from brim.segmentation.training import pair_files, split

    (dataset,), field = inputs.datasets, "config.dataset_ids[0]"
    images, masks = image_folders(dataset)
    if masks is None:
        raise Conflict(f"{field} has no masks; add a dataset with a mask for every image", field=field)
    recipe = part(SegmentTrainConfig, read(SegmentTrainJob, spec.config))
    with checking(field, dataset):
        split(len(pair_files(images, masks)), recipe)
    check_weights(spec, inputs)


def train_bytes(spec: Spec, inputs: Inputs) -> int:
    import torch

    from brim.segmentation.networks import create_model

    with torch.device("meta"):
        module = create_model(spec.config["model"])
    weights = int(sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values()))
    checkpoints = 3 * 3 * weights + weights  # last, the next and best, each with two moments; and the final weights
    return checkpoints + _crop_bytes(image_folders(inputs.datasets[0])[0], spec.config["size"]) + _LOG_BYTES


def _crop_bytes(folder: Path, size: int) -> int:
    from brim.segmentation.images import find_images, header_size
    from brim.segmentation.training import windows

    files = list(find_images([folder]))
    some = files[:: max(1, len(files) // _PROBED)]
    sizes = [side for side in map(header_size, some) if side is not None]
    crops = sum(len(windows(height, width, size)) for width, height in sizes) / max(1, len(sizes))
    return int(len(files) * crops * size * size * 4)


@with_progress
def run_train(task: Task) -> dict[str, Any]:
    """Train the network, or continue its training."""
    from brim.jobs.worker.devices import by_ranks

    if (result := by_ranks(task)) is not None:
        return result
    from brim.engine.training import TrainProgress
    from brim.segmentation.training import train

    def tell(progress: TrainProgress) -> None:
        task.report(in_training(progress, "cutting crops"))

    images, masks = image_folders(task.inputs.datasets[0])
    if masks is None:
        raise DatasetError("the dataset has no masks; add one with a mask for every image")
    task.say("pairing images and masks")
    report = train(
        images,
        masks,
        part(SegmentTrainConfig, read(SegmentTrainJob, task.spec.config)),
        task.out,
        device=task.torch_device,
        weights=task.inputs.run,
        resume=True,
        progress=tell,
        stop=task.stop,
    )
    if report.stopped:
        raise Stopped
    kept = {name: value for name, value in report.to_json().items() if name not in ("run", "weights")}
    return {**kept, "run_id": task.out.name}


# Weights


def check_weights(spec: Spec, inputs: Inputs) -> None:
    """Reject a run of another network than the one named."""
    if inputs.run is None:
        return
    named = spec.config.get("model") or (spec.config.get("models") or [None])[0]
    try:
        trained = trained_model(inputs.run)
    except BrimError as failure:
        raise Conflict(
            "config.run_id has no weights yet; let its job continue first", field="config.run_id"
        ) from failure
    if named is not None and trained is not None and named != trained:
        raise Conflict(f'config.model="{named}" but the run of config.run_id is of "{trained}"', field="config.model")


def trained_model(run: Path) -> str | None:
    """The network that a run's weights are of, if anything says so: those of a run cut short do not."""
    from brim.segmentation.networks import read_metadata
    from brim.segmentation.training import CONFIG

    if "model" in (metadata := read_metadata(run)):
        return metadata["model"]
    try:
        return str(json.loads((run / CONFIG).read_text(encoding="utf-8"))["training"]["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


KINDS = (
    Kind(
        name="segment.tune",
        title="Tune batch sizes",
        description="Find the fastest batch size of segmentation networks that is safe on this device.",
        makes="result",
        reads=None,
        reads_run="segment.train",
        config=TuneJob,
        run=run_tune,
        estimate_bytes=tune_bytes,
        check=check_weights,
    ),
    Kind(
        name="segment.predict",
        title="Segment images",
        description="Find the objects in every image of a dataset with trained weights, as polygons or masks.",
        makes="result",
        reads="images",
        reads_run="segment.train",
        config=PredictJob,
        run=run_predict,
        estimate_bytes=predict_bytes,
        check=check_weights,
    ),
    Kind(
        name="segment.train",
        title="Train segmentation",
        description="Train a network on images and their masks to find objects.",
        makes="run",
        reads="images",
        reads_run="segment.train",
        config=SegmentTrainJob,
        run=run_train,
        estimate_bytes=train_bytes,
        check=check_train,
    ),
)

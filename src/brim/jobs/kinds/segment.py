"""Images: segment.tune, segment.predict and segment.train, by the functions of the command line.

A dataset of images is a folder of them, or one with the folders images and masks.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from brim.config import Doc, Length, OneOf, Range, part, read
from brim.errors import BrimError, ConfigError, Conflict, DatasetError
from brim.jobs.decoding import confined_images
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
from brim.jobs.kinds.task import Inputs, Stopped, Task, checking, counted, in_training
from brim.jobs.registry.datasets import image_folders
from brim.jobs.registry.outputs import read_json, write_json
from brim.jobs.status import JobProgress, Spec
from brim.segmentation.config import FilesConfig, SegmentTrainConfig, TuneConfig, network_names

if TYPE_CHECKING:
    from torch import nn

    from brim.engine.training import TrainProgress
    from brim.segmentation.prediction import FilesReport, PredictProgress

LISTED = 1000  # files that a result names; the folder has the rest
_LOG_BYTES = 16 * 2**20  # of trials and logs
_PROBED = 64  # images whose headers are read to estimate the rest

# segment.tune


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob(TuneConfig, JobConfig):
    """The config of segment.tune; complete, it names its networks in models alone."""

    models: Annotated[
        tuple[str, ...] | None, Length(1, 100), OneOf(network_names), Doc("Networks to tune; null: all built-in ones.")
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


def run_tune(task: Task) -> dict[str, Any]:
    """Tune one network after the other; those that an earlier attempt saved are not tuned again."""
    job = read(TuneJob, task.spec.config)
    tuned: dict[str, Any] = {}
    for done, name in enumerate(job.models or ()):
        task.report_or_stop(JobProgress(current=done, total=len(job.models or ()), message=name))
        saved = read_json(task.out / f"{name}.json")
        tuned[name] = saved or _tune_one(task, name, job)
        tuned[name].pop("trials", None)
    task.report(JobProgress(current=len(tuned), total=len(tuned), message="tuned"))
    return {"models": tuned, "files": [f"{name}.json" for name in tuned]}


def _tune_one(task: Task, name: str, job: TuneJob) -> dict[str, Any]:
    from brim.segmentation.networks import create_model, load_model
    from brim.segmentation.tuning import tune

    def tell(text: str) -> None:
        task.report_or_stop(replace(task.last, message=text))

    def make(_: str) -> "nn.Module":
        return create_model(name) if task.inputs.run is None else load_model(name, task.inputs.run)

    options = replace(part(TuneConfig, job), models=(name,))
    result = tune(options, task.torch_device, out=task.batch_sizes, make=make, progress=tell)[name]
    entry = {**asdict(result.entry), "messages": result.messages}
    write_json(task.out / f"{name}.json", {**entry, "trials": result.trials})
    return entry


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


def run_predict(task: Task) -> dict[str, Any]:
    """Predict every image that has no result yet; each of several datasets has its own folder, named by its id."""
    from brim.segmentation.images import find_images
    from brim.segmentation.networks import network_of

    run, job = task.inputs.run, read(PredictJob, task.spec.config)
    assert run is not None
    model = job.model or network_of(run)
    if model is None:
        raise Conflict("config.model is missing, and the weights do not say what network they are of", field="model")
    task.say("loading the network")
    predict = _predictor(task, run, replace(part(FilesConfig, job), model=model), job.cluster)
    folders = [image_folders(path)[0] for path in task.inputs.datasets]
    counts = [len(find_images([folder])) for folder in folders]
    reports, failures = list[dict[str, Any]](), dict[str, str]()
    for number, (id, folder) in enumerate(zip(task.spec.dataset_ids, folders, strict=True)):
        prefix, before = f"{id}/" if len(folders) > 1 else "", sum(counts[:number])

        def tell(progress: "PredictProgress", before: int = before) -> None:
            failed = f", {progress.failed} failed" if progress.failed else ""
            task.report(counted(before + progress.done, sum(counts), f"predicting{failed}", progress.rate))

        with confined_images():
            report = predict([folder], task.out / prefix, progress=tell, stop=task.stop)
        if report.stopped:
            raise Stopped
        reports.append(report.as_dict())
        for image, why in report.failures.items():
            path = Path(image)
            name = prefix + (path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name)
            failures[name] = why.replace(image, name)
    names = files_in(task.out)
    return {**_together(reports), "failures": failures, "files": names[:LISTED], "num_files": len(names)}


def _predictor(task: Task, run: Path, files: FilesConfig, on_cluster: bool) -> "Callable[..., FilesReport]":
    """Prediction in this process, with a network that stays loaded, or on the service's cluster."""
    from brim.segmentation.prediction import ModelLoader, Recipe, predict_files

    if on_cluster:
        from brim.cluster import predict_many

        recipe = Recipe(files=files, device="cpu" if task.spec.config["accelerator"] == "cpu" else "auto")
        address, sizes = task.cluster_address, task.batch_sizes
        return lambda images, out, **hooks: predict_many(images, out, recipe, run, address, batch_sizes=sizes, **hooks)
    loader = ModelLoader(
        {str(files.model): run}, task.torch_device, task.batch_sizes, files.precision, files.tile, files.resize,
        overlap=files.overlap, planes=files,
    )  # fmt: skip
    return lambda images, out, **hooks: predict_files(images, loader, out, files, resume=True, **hooks)


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
    """Reject images without masks, and pairs that do not match."""
    from brim.segmentation.training import pair_files

    (dataset,), field = inputs.datasets, "config.dataset_ids[0]"
    images, masks = image_folders(dataset)
    if masks is None:
        raise Conflict(f"{field} has no masks; add a dataset with a mask for every image", field=field)
    with checking(field, dataset):
        pair_files(images, masks)
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


def run_train(task: Task) -> dict[str, Any]:
    """Train the network, or continue its training."""
    from brim.segmentation.training import train

    def tell(progress: "TrainProgress") -> None:
        task.report(in_training(progress, "cutting crops"))

    images, masks = image_folders(task.inputs.datasets[0])
    if masks is None:
        raise DatasetError("the dataset has no masks; add one with a mask for every image")
    task.say("pairing images and masks")
    with confined_images():
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
    return task.result("run", report.to_json(), stopped=report.stopped)


# Weights


def check_weights(spec: Spec, inputs: Inputs) -> None:
    """Reject a run of another network than the one named."""
    from brim.segmentation.networks import network_of

    if inputs.run is None:
        return
    named = spec.config.get("model") or (spec.config.get("models") or [None])[0]
    try:
        trained = network_of(inputs.run)
    except BrimError as failure:
        raise Conflict(
            "config.run_id has no weights yet; let its job continue first", field="config.run_id"
        ) from failure
    if trained is not None and named is None and trained not in network_names():
        raise Conflict("the run of config.run_id has a network that this service does not know", field="config.run_id")
    if named is not None and trained is not None and named != trained:
        raise Conflict(f'config.model="{named}" but the run of config.run_id is of "{trained}"', field="config.model")


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
        estimate_bytes=lambda spec, inputs: _LOG_BYTES,
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
        spread="leader",
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
        spread="ranks",
        estimate_bytes=train_bytes,
        check=check_train,
    ),
)

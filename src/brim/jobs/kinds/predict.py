"""Images: segment.predict, by the function of the command line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from brim.errors import Conflict
from brim.jobs.kinds.alone import alone
from brim.jobs.kinds.fields import (
    MAX_COUNT,
    Accelerator,
    Cluster,
    Count,
    DatasetIds,
    Fields,
    Text,
    build,
    model_of,
    own,
)
from brim.jobs.kinds.segment import model_name, trained_model
from brim.jobs.kinds.task import Inputs, Stopped, Task, Voice, attempt, counted, device_of
from brim.jobs.registry.datasets import image_folders
from brim.jobs.worker.group import by_leader, service_cluster

if TYPE_CHECKING:
    from brim.jobs.kinds.specs import Spec
    from brim.segmentation.config import FilesConfig
    from brim.segmentation.prediction.files import FilesReport
    from brim.segmentation.prediction.stream import PredictProgress

LISTED = 1000  # files that a result names; the folder has the rest

Precision = Literal["auto", "fp32", "bf16", "fp16"]


def predict_model() -> type[Fields]:
    """FilesConfig and how images are cut; the model is the run's own where it is not named."""
    from brim.segmentation.config import DEFAULT_TILE, FilesConfig, Format, PredictConfig

    def cut(kind: Any, name: str) -> Any:
        return alone(kind, name, PredictConfig, ({}, {"tile": MAX_COUNT}))

    return model_of(
        FilesConfig, dataset_ids=(DatasetIds, ...), run_id=(Text, ...),
        model=(model_name() | None, None), format=(Format, "geojson"), tile=(cut(Count, "tile"), DEFAULT_TILE),
        resize=(cut(Count | None, "resize"), None), overlap=(cut(Count | None, "overlap"), None),
        precision=(Precision, "auto"), accelerator=(Accelerator, "auto"), cluster=(Cluster, False),
    )  # fmt: skip


def resolve_predict(values: Mapping[str, Any]) -> dict[str, Any]:
    """What to write, and how."""
    from brim.segmentation.config import FilesConfig

    files = build(FilesConfig, own(FilesConfig, values))
    return {"accelerator": "auto", "cluster": False, **values, **asdict(files)}


def predict_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the files, from what the images take: a guess, since it depends on what is seen; the disk is watched too."""
    from brim.segmentation.images.reading import find_images

    size = sum(file.stat().st_size for path in inputs.datasets for file in find_images([image_folders(path)[0]]))
    return int(size * {"overlay": 4, "mask": 1}.get(spec.config["format"], 0.25))  # overlays are PNG, images often JPEG


@attempt
def run_predict(task: Task, voice: Voice) -> dict[str, Any]:
    """Predict every image that has no file yet; of several datasets each has a folder of its own, named by its id."""
    from brim.segmentation.config import FilesConfig

    if (result := by_leader(task, voice)) is not None:
        return result
    run, config = task.inputs.run, task.spec.config
    assert run is not None
    model = config["model"] or trained_model(run)
    if model is None:
        raise Conflict(
            "config.model is missing, and the weights do not say whose they are; name it", field="config.model"
        )
    files = build(FilesConfig, {**own(FilesConfig, config), "model": model})
    voice.say("loading the network")
    predict = _by_cluster(task, run, files) if config.get("cluster") else _here(task, run, files)
    parts = _parts(task)
    done, reports, failures = 0, list[dict[str, Any]](), dict[str, str]()
    for part in parts:
        tell = _teller(voice, done, sum(part.num_images for part in parts))
        found = predict([part.images], part.out, progress=tell, stop=task.stop)
        if found.stopped:
            raise Stopped
        done += part.num_images
        reports.append(found.as_dict())
        failures |= {
            part.name_of(image): why.replace(image, part.name_of(image)) for image, why in found.failures.items()
        }
    names = files_in(task.out)
    return {**_together(reports), "failures": failures, "files": names[:LISTED], "num_files": len(names)}


def _here(task: Task, run: Path, files: "FilesConfig") -> "Callable[..., FilesReport]":
    """What predicts images in this process, with a network that stays loaded."""
    from brim.segmentation.prediction.files import predict_files
    from brim.segmentation.prediction.loader import ModelLoader

    loader = ModelLoader(
        {str(files.model): run}, device_of(task), task.batch_sizes, files.precision, files.tile, files.resize,
        overlap=files.overlap,
    )  # fmt: skip

    def predict(images: Sequence[Path], out: Path, **hooks: Any) -> "FilesReport":
        return predict_files(images, loader, out, files, resume=True, **hooks)

    return predict


def _by_cluster(task: Task, run: Path, files: "FilesConfig") -> "Callable[..., FilesReport]":
    """What predicts them on the service's cluster; images that have their result are kept there too."""
    from brim.cluster.predict import predict_many
    from brim.segmentation.prediction.bulk import Recipe

    recipe = Recipe(files=files, device="cpu" if task.spec.config["accelerator"] == "cpu" else "auto")

    def predict(images: Sequence[Path], out: Path, **hooks: Any) -> "FilesReport":
        return predict_many(images, out, recipe, run, service_cluster(task), batch_sizes=task.batch_sizes, **hooks)

    return predict


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
    from brim.segmentation.images.reading import find_images

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

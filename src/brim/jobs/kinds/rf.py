"""Radio: rf.generate, rf.train and rf.evaluate, by the functions of the command line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from brim.errors import BrimError, Conflict, DatasetError
from brim.jobs.kinds.fields import (
    CHECKPOINT_S,
    Accelerator,
    Cluster,
    Count,
    DatasetIds,
    Devices,
    Fields,
    build,
    model_of,
    one_place,
    own,
    settle,
    tier_of,
)
from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import (
    Inputs,
    Stopped,
    Task,
    Voice,
    attempt,
    counted,
    device_of,
    flow_of,
    in_training,
    refused,
)
from brim.jobs.registry.result_files import ERRORS, write_json
from brim.jobs.worker.group import by_leader, by_ranks, num_devices, service_cluster

if TYPE_CHECKING:
    from brim.jobs.kinds.specs import Spec

REPORT = "evaluation.html"
_SHARDS = 1_000_000  # of a dataset: their names have six digits
_RUN_BYTES = 128 * 2**20  # of a locator's run: checkpoints and logs
_REPORT_BYTES = 16 * 2**20

# rf.generate


def generate_model() -> type[Fields]:
    """GenerateConfig, a preset under it, and how many samples."""
    from brim.rf.config import BUILTIN_STATIONS, PATH_STRIDE, PRESETS, GenerateConfig, Station

    station = model_of(Station, others=({"name": "A", "lat": 45.0, "lon": 7.0, "alt": 0.0},))
    most = tuple(Station(str(at), 45.0, at / PATH_STRIDE, 0.0) for at in range(PATH_STRIDE))
    return model_of(
        GenerateConfig,
        hints={"duration_s": {"multipleOf": 0.2}},
        also={"min_receivers": ({"stations": most},)},
        stations=(Annotated[list[station], Field(max_length=PATH_STRIDE)], list(BUILTIN_STATIONS)),  # type: ignore[valid-type]
        num_samples=(Annotated[Count, Field(ge=1)], ...),
        preset=(Literal[tuple(PRESETS)] | None, None),
        batch_size=(Annotated[Count, Field(ge=1)] | None, None),
        accelerator=(Accelerator, "auto"),
        devices=(Devices, 1),
        cluster=(Cluster, False),
    )


def generate_presets() -> Mapping[str, Mapping[str, Any]]:
    """The library's."""
    from brim.rf.config import PRESETS

    return PRESETS


def resolve_generate(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration over its preset; more shards than a dataset can have are refused now, not after days."""
    from brim.rf.config import GenerateConfig, preset_values

    chosen = values.get("preset")
    under = preset_values(chosen) if chosen is not None else {}
    config = build(GenerateConfig, {**under, **own(GenerateConfig, values)})
    samples = values["num_samples"]
    if samples > _SHARDS * config.shard_items:
        raise Conflict(
            f"config.num_samples={samples} at {config.shard_items} samples a shard makes over a million shards; "
            "give a greater config.samples_per_shard, or make several datasets",
            field="config.num_samples",
        )
    more = {"batch_size": values.get("batch_size"), "accelerator": values.get("accelerator", "auto")}
    return {"num_samples": samples, **config.as_dict(), **more, **one_place(values)}


def generate_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the dataset."""
    from brim.rf.config import GenerateConfig
    from brim.rf.generation.rows import dataset_bytes

    return dataset_bytes(build(GenerateConfig, own(GenerateConfig, spec.config)), spec.config["num_samples"])


@attempt
def run_generate(task: Task, voice: Voice) -> dict[str, Any]:
    """Make the dataset, or the rest of it."""
    if (found := by_leader(task, voice)) is not None:
        return found
    from brim.engine.storage import Dataset
    from brim.rf import GenerateProgress, generate
    from brim.rf.config import GenerateConfig

    config = task.spec.config

    def tell(where: GenerateProgress) -> None:
        voice(counted(where.done, where.total, where.message, where.rate, flow_of(where)))

    with _devices(task) as where:
        report = generate(
            build(GenerateConfig, own(GenerateConfig, config)),
            task.out,
            config["num_samples"],
            **where,
            batch_size=config.get("batch_size"),
            resume=True,
            verify="sizes",
            progress=tell,
            stop=task.stop,
        )
    if report.stopped:
        raise Stopped
    made = Dataset(task.out).manifest["report"]  # not ours: that of an attempt which only found it finished is empty
    return {name: value for name, value in made.items() if name != "dataset"} | {"dataset_id": task.out.name}


@contextmanager
def _devices(task: Task) -> Iterator[dict[str, Any]]:
    """The job's device, or a pool of its devices or of the cluster."""
    if not task.is_member:
        yield {"device": device_of(task)}
        return
    from brim.cluster import open_pool

    on_cluster = task.spec.config.get("cluster")
    with open_pool(**{"cluster": service_cluster(task)} if on_cluster else {"devices": num_devices(task)}) as pool:
        yield {"pool": pool}


# rf.train


def train_model() -> type[Fields]:
    """LocatorTraining, what to train on, and where."""
    from brim.rf.config import LocatorTraining

    return model_of(
        LocatorTraining,
        dataset_ids=(DatasetIds, ...),
        accelerator=(Accelerator, "auto"),
        devices=(Devices, 1),
        preload_to_gpu=(bool | None, True),
        checkpoint_every_s=(float, CHECKPOINT_S),
    )


def resolve_train(values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe; data is preloaded unless a tier says where it is to be."""
    from brim.rf.config import LocatorTraining

    tier_of(values)  # refuses contradictions; the locator has a preload_to_gpu of its own
    preload = True if values.get("tier", "auto") == "auto" else None
    usual = {"checkpoint_every_s": CHECKPOINT_S, "preload_to_gpu": preload}
    recipe = build(LocatorTraining, usual | own(LocatorTraining, values))
    where = {"accelerator": values.get("accelerator", "auto"), "devices": values.get("devices", 1)}
    return {"dataset_ids": values["dataset_ids"], **where, **asdict(recipe)}


def check_train(spec: "Spec", inputs: Inputs) -> None:
    """Refuse datasets that cannot be trained on together, and too few samples to hold some out."""
    from brim.rf.config import GenerateConfig, LocatorTraining
    from brim.rf.datasets.inspect import open_dataset
    from brim.rf.location.run import differences, read_generation
    from brim.rf.location.train import split

    found: list[GenerateConfig] = []
    items = 0
    for at, path in enumerate(inputs.datasets):
        field = f"config.dataset_ids[{at}]"
        try:
            dataset = open_dataset(path)
            found.append(read_generation(dataset.manifest, path))
        except DatasetError as failure:
            raise refused(field, path, failure) from failure
        items += len(dataset)
        for name, (ours, theirs) in differences(found[-1], found[0]).items():
            raise Conflict(
                f"{field} has {name}={ours}, config.dataset_ids[0] has {theirs}; the solver needs one value: "
                "train on them apart or make them again with equal settings",
                field=field,
            )
    recipe = build(LocatorTraining, own(LocatorTraining, spec.config))
    settle(lambda: split(items, recipe), "config", ("val_share",))


def train_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of checkpoints and logs."""
    return _RUN_BYTES


@attempt
def run_train(task: Task, voice: Voice) -> dict[str, Any]:
    """Train the locator, or go on with it."""
    if (found := by_ranks(task, voice)) is not None:
        return found
    from brim.engine.training import TrainProgress
    from brim.rf.config import LocatorTraining
    from brim.rf.location.train import train

    recipe = build(LocatorTraining, own(LocatorTraining, task.spec.config))
    voice.say("reading the datasets")

    def tell(where: TrainProgress) -> None:
        voice(in_training(where, "solving"))

    report = train(
        task.inputs.datasets, task.out, recipe, device=device_of(task), progress=tell, stop=task.stop, resume=True
    )
    if report.stopped:
        raise Stopped
    return {name: value for name, value in report.as_dict().items() if name != "run"} | {"run_id": task.out.name}


# rf.evaluate


def check_evaluate(spec: "Spec", inputs: Inputs) -> None:
    """Refuse a run that has no weights, or not those of this brim."""
    from brim.rf.location.run import load_run

    assert inputs.run is not None
    try:
        load_run(inputs.run)
    except BrimError as failure:
        raise refused("config.run_id", inputs.run, failure) from failure


def evaluate_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the page and the points."""
    return _REPORT_BYTES


@attempt
def run_evaluate(task: Task, voice: Voice) -> dict[str, Any]:
    """Measure the run, and draw the page."""
    from brim.rf.location.error_points import LEVEL, error_points
    from brim.rf.location.page import write_evaluation
    from brim.rf.location.run import evaluate_run, load_run

    assert task.inputs.run is not None
    voice.say("reading the dataset")

    def tell(done: int, total: int) -> None:
        voice.or_stop(Progress(current=done, total=total, message="locating"))

    run = load_run(task.inputs.run)
    found = evaluate_run(run, task.inputs.datasets[0], device=device_of(task), progress=tell)
    voice.say("drawing the report")
    task.out.mkdir(parents=True, exist_ok=True)
    config = task.spec.config
    write_evaluation(config["run_id"], config["dataset_ids"][0], *found, task.out / REPORT)
    write_json(task.out / ERRORS, {"level": LEVEL, "points": error_points(found, run.generation)})
    return {"metrics": found.as_dict(), "samples": found.metrics["samples"], "files": [REPORT, ERRORS]}

"""Radio: rf.generate, rf.train and rf.evaluate, by the functions of the command line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from brim.config import Doc, Length, OneOf, Range, part, read
from brim.errors import ConfigError, Conflict
from brim.jobs.kinds.kind import (
    CHECKPOINT_S,
    MAX_COUNT,
    Accelerator,
    DeviceCount,
    JobConfig,
    Kind,
    OnCluster,
    PreloadChoice,
    RunOnDataset,
    TextId,
    check_place,
    tier_of,
)
from brim.jobs.kinds.task import Inputs, Stopped, Task, checking, counted, flow_of, in_training, with_progress
from brim.jobs.registry.outputs import ERRORS, write_json
from brim.jobs.status import JobProgress, Spec
from brim.rf.config import PRESETS, GenerateConfig, LocatorTraining

REPORT = "evaluation.html"
_SHARDS = 1_000_000  # of a dataset: their names have six digits
_RUN_BYTES = 128 * 2**20  # of a locator's run: checkpoints and logs
_REPORT_BYTES = 16 * 2**20

# rf.generate


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob(GenerateConfig, JobConfig):
    """The config of rf.generate."""

    num_samples: Annotated[int, Range(1, MAX_COUNT), Doc("Samples to generate: transmissions that pass the gates.")]
    preset: Annotated[
        str | None, OneOf(lambda: tuple(PRESETS)), Doc("Values to start with; settings that are given override them.")
    ] = None
    batch_size: Annotated[
        int | None,
        Range(1, MAX_COUNT),
        Doc("Samples computed at once; null: what fits in memory. It does not change the dataset."),
    ] = None
    accelerator: Accelerator = "auto"
    devices: DeviceCount = 1
    cluster: OnCluster = False

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        preset = values.get("preset")
        return {**PRESETS.get(preset if isinstance(preset, str) else "", {}), **values}

    def __post_init__(self) -> None:
        GenerateConfig.__post_init__(self)
        check_place(self.devices, self.cluster)
        if self.num_samples > _SHARDS * self.shard_items:
            raise ConfigError(
                f"at {self.shard_items} samples a shard makes over a million shards",
                field="num_samples",
                value=self.num_samples,
                code="conflict",
                hint="raise {samples_per_shard}, or generate several datasets",
            )


def generate_bytes(spec: Spec, inputs: Inputs) -> int:
    from brim.rf.generation import dataset_bytes

    job = read(GenerateJob, spec.config)
    return dataset_bytes(part(GenerateConfig, job), job.num_samples)


@with_progress
def run_generate(task: Task) -> dict[str, Any]:
    """Generate the dataset, or the rest of it."""
    from brim.jobs.worker.devices import by_leader

    if (result := by_leader(task)) is not None:
        return result
    from brim.engine.storage import Dataset
    from brim.rf import GenerateProgress, generate

    def tell(progress: GenerateProgress) -> None:
        task.report(counted(progress.done, progress.total, progress.message, progress.rate, flow_of(progress)))

    job = read(GenerateJob, task.spec.config)
    with _devices(task) as devices:
        report = generate(
            part(GenerateConfig, job),
            task.out,
            job.num_samples,
            **devices,
            batch_size=job.batch_size,
            resume=True,
            verify="sizes",
            progress=tell,
            stop=task.stop,
        )
    if report.stopped:
        raise Stopped
    # from the manifest: the report of an attempt that found the dataset complete would be empty
    values = Dataset(task.out).manifest["report"]
    return {name: value for name, value in values.items() if name != "dataset"} | {"dataset_id": task.out.name}


@contextmanager
def _devices(task: Task) -> Iterator[dict[str, Any]]:
    """The job's device, or a pool of its devices or of the cluster."""
    if not task.is_member:
        yield {"device": task.torch_device}
        return
    from brim.cluster import open_pool
    from brim.jobs.worker.devices import num_devices, service_cluster

    on_cluster = task.spec.config.get("cluster")
    with open_pool(**{"cluster": service_cluster(task)} if on_cluster else {"devices": num_devices(task)}) as pool:
        yield {"pool": pool}


# rf.train


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatorTrainJob(LocatorTraining, JobConfig):
    """The config of rf.train."""

    dataset_ids: Annotated[
        tuple[TextId, ...],
        Length(1, 100, unique=True),
        Doc("Ids of the rf datasets to train on, generated with equal settings."),
    ]
    accelerator: Accelerator = "auto"
    devices: DeviceCount = 1
    preload_to_gpu: PreloadChoice = True
    checkpoint_every_s: Annotated[float, Range(above=0), Doc("Seconds between checkpoints.")] = CHECKPOINT_S

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values if values.get("tier", "auto") == "auto" else {"preload_to_gpu": None, **values}

    def __post_init__(self) -> None:
        LocatorTraining.__post_init__(self)
        tier_of(self.tier, self.preload_to_gpu)


def check_train(spec: Spec, inputs: Inputs) -> None:
    """Reject datasets that cannot be trained on together, and too few samples to hold some out."""
    from brim.rf.datasets import open_dataset
    from brim.rf.location import differences, read_generation, split

    generations: list[GenerateConfig] = []
    num_items = 0
    for index, path in enumerate(inputs.datasets):
        field = f"config.dataset_ids[{index}]"
        with checking(field, path):
            dataset = open_dataset(path)
            generations.append(read_generation(dataset.manifest, path))
        num_items += len(dataset)
        for name, (ours, theirs) in differences(generations[-1], generations[0]).items():
            raise Conflict(
                f"{field} has {name}={ours}, config.dataset_ids[0] has {theirs}; the solver needs one value: "
                "train on them separately or generate them again with equal settings",
                field=field,
            )
    job = read(LocatorTrainJob, spec.config)
    with checking("config.dataset_ids", inputs.datasets[0], spec.config):
        split(num_items, part(LocatorTraining, job))


def train_bytes(spec: Spec, inputs: Inputs) -> int:
    return _RUN_BYTES


@with_progress
def run_train(task: Task) -> dict[str, Any]:
    """Train the locator, or continue its training."""
    from brim.jobs.worker.devices import by_ranks

    if (result := by_ranks(task)) is not None:
        return result
    from brim.engine.training import TrainProgress
    from brim.rf.location import train

    def tell(progress: TrainProgress) -> None:
        task.report(in_training(progress, "solving"))

    task.say("reading the datasets")
    recipe = part(LocatorTraining, read(LocatorTrainJob, task.spec.config))
    report = train(
        task.inputs.datasets, task.out, recipe, device=task.torch_device, progress=tell, stop=task.stop, resume=True
    )
    if report.stopped:
        raise Stopped
    return {name: value for name, value in report.as_dict().items() if name != "run"} | {"run_id": task.out.name}


# rf.evaluate


def check_evaluate(spec: Spec, inputs: Inputs) -> None:
    """Reject a run that has no weights, or not those of this version."""
    from brim.rf.location import load_run

    assert inputs.run is not None
    with checking("config.run_id", inputs.run):
        load_run(inputs.run)


def evaluate_bytes(spec: Spec, inputs: Inputs) -> int:
    return _REPORT_BYTES


@with_progress
def run_evaluate(task: Task) -> dict[str, Any]:
    """Evaluate the run, and write its page."""
    from brim.rf.location import LEVEL, error_points, evaluate_run, load_run, write_evaluation

    def tell(done: int, total: int) -> None:
        task.report_or_stop(JobProgress(current=done, total=total, message="locating"))

    assert task.inputs.run is not None
    task.say("reading the dataset")
    run = load_run(task.inputs.run)
    evaluation = evaluate_run(run, task.inputs.datasets[0], device=task.torch_device, progress=tell)
    task.say("drawing the report")
    task.out.mkdir(parents=True, exist_ok=True)
    config = task.spec.config
    write_evaluation(config["run_id"], config["dataset_ids"][0], *evaluation, task.out / REPORT)
    write_json(task.out / ERRORS, {"level": LEVEL, "points": error_points(evaluation, run.generation)})
    return {"metrics": evaluation.as_dict(), "samples": evaluation.metrics["samples"], "files": [REPORT, ERRORS]}


KINDS = (
    Kind(
        name="rf.generate",
        title="Generate radio samples",
        description="Make a dataset of simulated transmissions as a network of receivers hears them.",
        makes="dataset",
        reads=None,
        config=GenerateJob,
        run=run_generate,
        estimate_bytes=generate_bytes,
        presets=PRESETS,
    ),
    Kind(
        name="rf.train",
        title="Train a locator",
        description="Train a network on radio datasets that estimates where a transmitter is, and how certain that is.",
        makes="run",
        reads="rf",
        config=LocatorTrainJob,
        run=run_train,
        estimate_bytes=train_bytes,
        check=check_train,
    ),
    Kind(
        name="rf.evaluate",
        title="Evaluate a locator",
        description="Locate a dataset's samples with a trained locator and compare its errors with the bound.",
        makes="result",
        reads="rf",
        reads_run="rf.train",
        config=RunOnDataset,
        run=run_evaluate,
        estimate_bytes=evaluate_bytes,
        check=check_evaluate,
    ),
)

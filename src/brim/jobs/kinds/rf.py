"""Radio: rf.generate, rf.train, rf.evaluate and rf.measure, by the functions of the command line."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from brim.config import Doc, Length, OneOf, Range, Unit, part, plain, read
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
from brim.jobs.kinds.task import Inputs, Task, checking, counted, flow_of, in_training
from brim.jobs.measuring import measure_confined
from brim.jobs.registry.outputs import ERRORS, write_json
from brim.jobs.status import JobProgress, Spec
from brim.rf.config import FRACTAL, PRESETS, GenerateConfig, LocatorTraining
from brim.rf.measurement.config import MeasureConfig

if TYPE_CHECKING:
    from brim.engine.training import TrainProgress

REPORT = "evaluation.html"
OBSERVATIONS, POSITION, MAP = "observations.json", "position.geojson", "map.html"
_SHARDS = 1_000_000  # of a dataset: their names have six digits
_RUN_BYTES = 128 * 2**20  # of a locator's run: checkpoints and logs
_REPORT_BYTES = 16 * 2**20

# rf.generate


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob(GenerateConfig, JobConfig):
    """The config of rf.generate."""

    num_samples: Annotated[int, Range(1, MAX_COUNT), Doc("Samples to generate: transmissions that pass the gates.")]
    # jobs read no files by name
    terrain: Annotated[str | None, OneOf(lambda: (FRACTAL,)), Doc("fractal: hills drawn from the seed.")] = None
    paths: Annotated[str | None, OneOf(tuple), Doc("For the command line alone: a job reads no files by name.")] = None
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


def run_generate(task: Task) -> dict[str, Any]:
    """Generate the dataset, or the rest of it."""
    from brim.engine.storage import Dataset
    from brim.rf import GenerateProgress, generate

    def tell(progress: GenerateProgress) -> None:
        flow = flow_of(progress.seconds, progress.waiting)
        task.report(counted(progress.done, progress.total, progress.message, progress.rate, flow))

    job = read(GenerateJob, task.spec.config)
    with ExitStack() as stack:
        devices: dict[str, Any] = {"device": task.torch_device}
        if task.is_member:
            from brim.cluster import open_pool

            place = {"cluster": task.cluster_address} if job.cluster else {"devices": task.num_devices}
            devices = {"pool": stack.enter_context(open_pool(**place))}
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
    # from the manifest: the report of an attempt that found the dataset complete would be empty
    values = {} if report.stopped else Dataset(task.out).manifest["report"]
    return task.result("dataset", values, stopped=report.stopped)


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


def run_train(task: Task) -> dict[str, Any]:
    """Train the locator, or continue its training."""
    from brim.rf.location import train

    def tell(progress: "TrainProgress") -> None:
        task.report(in_training(progress, "solving"))

    task.say("reading the datasets")
    recipe = part(LocatorTraining, read(LocatorTrainJob, task.spec.config))
    report = train(
        task.inputs.datasets, task.out, recipe, device=task.torch_device, progress=tell, stop=task.stop, resume=True
    )
    return task.result("run", report.as_dict(), stopped=report.stopped)


# rf.evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatorEvaluateJob(RunOnDataset):
    """The config of rf.evaluate."""

    allow_training_data: Annotated[
        bool, Doc("Accept a dataset that the run was trained on, whose errors say little about others.")
    ] = False


def check_evaluate(spec: Spec, inputs: Inputs) -> None:
    """Reject a run that has no weights, or not those of this version."""
    from brim.rf.location import load_run

    assert inputs.run is not None
    with checking("config.run_id", inputs.run):
        load_run(inputs.run)


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


# rf.measure


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob(MeasureConfig, JobConfig):
    """The config of rf.measure."""

    dataset_ids: Annotated[
        tuple[TextId, ...], Length(1, 1), Doc("Id of the recordings of one transmission, with their stations.csv.")
    ]
    power_dbm: Annotated[
        float | None, Range(-50, 120), Unit("dBm"), Doc("Power of the transmitter; null: unknown.")
    ] = None

    def __post_init__(self) -> None:
        MeasureConfig.__post_init__(self)


def run_measure(task: Task) -> dict[str, Any]:
    """Measure the recordings and locate their transmission; the files are parsed in a confined process."""

    def tell(done: int, total: int) -> None:
        task.report_or_stop(JobProgress(current=done, total=total, message="measuring"))

    job = read(MeasureJob, task.spec.config)
    task.say("reading the recordings")
    answers = measure_confined(task.inputs.datasets[0], plain(part(MeasureConfig, job)), job.power_dbm, tell)
    task.out.mkdir(parents=True, exist_ok=True)
    write_json(task.out / OBSERVATIONS, answers["observations"])
    write_json(task.out / POSITION, answers["position"])
    (task.out / MAP).write_text(answers["map"], encoding="utf-8")
    point = answers["position"]["features"][0]
    return {"position": point["geometry"], **point["properties"], "files": [OBSERVATIONS, POSITION, MAP]}


KINDS = (
    Kind(
        name="rf.generate",
        title="Generate radio samples",
        description="Make a dataset of simulated transmissions as a network of receivers hears them.",
        makes="dataset",
        reads=None,
        config=GenerateJob,
        run=run_generate,
        spread="leader",
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
        spread="ranks",
        estimate_bytes=lambda spec, inputs: _RUN_BYTES,
        check=check_train,
    ),
    Kind(
        name="rf.evaluate",
        title="Evaluate a locator",
        description="Locate a dataset's samples with a trained locator and compare its errors with the bound.",
        makes="result",
        reads="rf",
        reads_run="rf.train",
        config=LocatorEvaluateJob,
        run=run_evaluate,
        estimate_bytes=lambda spec, inputs: _REPORT_BYTES,
        check=check_evaluate,
    ),
    Kind(
        name="rf.measure",
        title="Locate recordings",
        description="Measure a transmission in recordings of several receivers, and find where it came from.",
        makes="result",
        reads="recordings",
        config=MeasureJob,
        run=run_measure,
        estimate_bytes=lambda spec, inputs: _REPORT_BYTES,
    ),
)

"""What a kind of job is, and the settings that kinds share.

A kind's config is a dataclass that extends the workload's own settings with what a job needs besides: which datasets
and run it reads, by id, and where it runs. A setting that no request may give, such as a path, is fixed by the subclass
with `field(init=False, …)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from brim.config import Doc, Length, Range, plain, read, settings
from brim.errors import ConfigError
from brim.jobs.kinds.task import Inputs, Task
from brim.jobs.status import Spec

MAX_COUNT = 10**9  # of anything that is counted and has no limit of its own: epochs, samples, items of a batch
MAX_TEXT = 200  # characters of a name or an id
CHECKPOINT_S = 5.0  # of training that a killed worker loses at most; the command line's default is longer

TextId = Annotated[str, Length(1, MAX_TEXT)]
Accelerator = Annotated[
    Literal["auto", "cpu", "gpu", "cuda"],
    Doc("Where it computes; auto: the worker's own device, a GPU where there is one."),
]
DeviceCount = Annotated[
    int | Literal["all"],
    Range(1, 64, note='a number of this machine\'s devices or "all", not an address'),
    Doc('Devices of this machine that share the work: a number or "all"; on a CPU, as many processes.'),
]
OnCluster = Annotated[
    bool, Doc("Whether it runs on the service's cluster; the operator chooses it, a request cannot name one.")
]
PreloadChoice = Annotated[
    bool | None, Doc("Whether data is copied to GPU memory before training; a named tier decides instead.")
]


class JobConfig:
    """Base of the kinds' configs."""

    __slots__ = ()

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of a request with those that follow from them, such as a preset's."""
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnDataset(JobConfig):
    """The config of kinds that evaluate a run."""

    run_id: Annotated[TextId, Doc("Id of the run to evaluate.")]
    dataset_ids: Annotated[
        tuple[TextId, ...], Length(1, 1), Doc("Id of the dataset to evaluate on, one that the run was not trained on.")
    ]
    accelerator: Accelerator = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a job of one kind is."""

    name: str
    title: str  # two or three words, as a button says it
    description: str  # one sentence, for someone who is about to choose
    makes: Literal["dataset", "run", "result"]  # where Task.out is: datasets/ID, runs/ID or results/JOB
    reads: (
        Literal["rf", "images", "sequences", "recordings"] | None
    )  # kind of the datasets that config.dataset_ids names
    reads_run: str | None = None  # kind of the job that made the run of config.run_id
    config: type[JobConfig]
    run: Callable[[Task], dict[str, Any]]  # the result
    spread: Literal["ranks", "leader"] | None = None  # on several devices: a process for each, or one that leads them
    estimate_bytes: Callable[[Spec, Inputs], int]  # on disk when it is done; from above
    check: Callable[[Spec, Inputs], None] = lambda spec, inputs: None  # a Conflict where they do not fit each other
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by name, values of settings to start with

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The complete config of a job from the values that a request gives."""
        config = read(self.config, self.config.completed(values) if isinstance(values, Mapping) else values)
        check_counts(config, "config")
        resolved: dict[str, Any] = plain(config)
        resolved.pop("preset", None)  # its values are in the others now
        return resolved


def check_counts(config: object, path: str) -> None:
    """Reject counts that nobody means, where the workload sets no limit: databases and progress must hold them."""
    for name, setting in settings(type(config)).items():
        value, where = getattr(config, name), f"{path}.{name}"
        if setting.group is not None and value is not None and not isinstance(value, tuple):
            check_counts(value, where)
        is_count = isinstance(value, int) and not isinstance(value, bool) and setting.is_unlimited
        if is_count and value > MAX_COUNT:
            raise ConfigError(f"must be at most {MAX_COUNT}", field=where, value=value, code="out_of_range")


def check_place(devices: int | str, cluster: bool) -> None:
    """A job runs on devices of this machine or on the cluster, not both."""
    if cluster and devices != 1:
        raise ConfigError(
            "is for this machine, cluster=true for another",
            field="devices",
            value=devices,
            code="conflict",
            hint="give {devices} or {cluster}",
        )


def tier_of(tier: str, preload: bool | None) -> str:
    """The tier that preload_to_gpu means: off is the host's memory; one that is named must agree with it."""
    if tier != "auto" and preload is not None and preload != (tier == "vram"):
        raise ConfigError(
            f"contradicts tier={tier}",
            field="preload_to_gpu",
            value=preload,
            code="conflict",
            hint="give {preload_to_gpu} or {tier}",
        )
    return "ram" if tier == "auto" and preload is False else tier

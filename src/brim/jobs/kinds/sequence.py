"""Sequences: sequence.train and sequence.evaluate, by the functions of the command line.

A dataset of sequences is a packed corpus.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from brim.config import Doc, Length, Range, part, read
from brim.errors import Conflict, DatasetError
from brim.jobs.kinds.kind import (
    CHECKPOINT_S,
    MAX_COUNT,
    Accelerator,
    DeviceCount,
    JobConfig,
    Kind,
    PreloadChoice,
    RunOnDataset,
    TextId,
    tier_of,
)
from brim.jobs.kinds.task import Inputs, Task, checking, in_training
from brim.jobs.registry.outputs import EMBEDDING, write_json
from brim.jobs.status import JobProgress, Spec
from brim.sequences.config import SequenceTraining

if TYPE_CHECKING:
    from brim.engine.training import TrainProgress

_EPOCHS = 15  # of a phase that ends by itself, for the progress
_LOG_BYTES = 32 * 2**20

# sequence.train


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTrainJob(SequenceTraining, JobConfig):
    """The config of sequence.train."""

    encoder: None = field(init=False, default=None)  # a path, which no request may give
    network: None = field(init=False, default=None)  # code, which the administrator chooses
    dataset_ids: Annotated[tuple[TextId, ...], Length(1, 1), Doc("Id of the packed corpus to train on.")]
    epochs: Annotated[
        int | None,
        Range(1, MAX_COUNT),
        Doc("Epochs of every phase that has none of its own; null: the phases' defaults."),
    ] = None
    preload_to_gpu: PreloadChoice = None
    accelerator: Accelerator = "auto"
    devices: DeviceCount = 1
    checkpoint_every_s: Annotated[float, Range(above=0), Doc("Seconds between checkpoints.")] = CHECKPOINT_S

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        if values.get("folds") is not None and "mode" not in values:
            values = {**values, "mode": "supervised"}  # the only mode that has folds
        if values.get("epochs") is None:
            return values
        phases = ("encoder_epochs", "classifier_epochs")
        return {**values, **{name: values["epochs"] for name in phases if name not in values}}

    def __post_init__(self) -> None:
        SequenceTraining.__post_init__(self)
        object.__setattr__(self, "tier", tier_of(self.tier, self.preload_to_gpu))


def _recipe(spec: Spec) -> SequenceTraining:
    return part(SequenceTraining, read(SequenceTrainJob, spec.config))


def check_train(spec: Spec, inputs: Inputs) -> None:
    """Reject a corpus that the settings do not fit: no labels, too few sequences, batches too small."""
    from brim.engine.rows import Buckets
    from brim.sequences.corpus import Corpus, check_labels, open_sequences, split_sequences
    from brim.sequences.evaluation import check_folds

    field, recipe = "config.dataset_ids[0]", _recipe(spec)
    with checking(field, inputs.datasets[0], spec.config):
        data = open_sequences(inputs.datasets[0])
        if not isinstance(data, Corpus):
            raise DatasetError("it is not packed")
        data = data.with_labels(recipe.label, recipe.task)
        if recipe.folds is not None:
            check_folds(data, recipe)
        else:
            parts = split_sequences(data, recipe, field)
            check_labels(data.labels, data.classes, parts, recipe, field, is_regression=data.targets is not None)
        Buckets(data.lengths, recipe.buckets())


def train_bytes(spec: Spec, inputs: Inputs) -> int:
    import torch

    from brim.sequences.corpus import open_sequences
    from brim.sequences.model import Classifier, Encoder

    recipe, dim = _recipe(spec), open_sequences(inputs.datasets[0]).dim
    with torch.device("meta"):
        module = Classifier(Encoder(recipe.shape(dim)), 1000)
    weights = int(sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values()))
    return len(_phases(recipe)) * 3 * 3 * weights + weights + _LOG_BYTES  # last, the next and best, with two moments


def run_train(task: Task) -> dict[str, Any]:
    """Train the network, or continue its training."""
    from brim.sequences.training.run import train

    task.say("reading the corpus")
    recipe = _recipe(task.spec)
    phases = _PhaseProgress(recipe)

    def tell(progress: "TrainProgress") -> None:
        task.report(phases.overall(progress))

    report = train(
        task.inputs.datasets[0], task.out, recipe, device=task.torch_device, resume=True, progress=tell, stop=task.stop
    )
    if not report.stopped and task.last.total:  # not every phase that could have come did
        task.report(replace(task.last, current=task.last.total))
    return task.result("run", report.as_dict(), stopped=report.stopped)


class _PhaseProgress:
    """Progress of a run of several phases, in steps of all of them; later phases count as long as the current one."""

    def __init__(self, recipe: SequenceTraining) -> None:
        self._phases, self._furthest = _phases(recipe), 0

    def overall(self, progress: "TrainProgress") -> JobProgress:
        phase = in_training(progress, "checking")
        if progress.phase not in self._phases:
            return replace(phase, current=self._furthest)
        per_epoch = progress.steps / max(1, progress.epochs)
        names = list(self._phases)
        before = sum(self._phases[name] for name in names[: names.index(progress.phase)])
        self._furthest = max(self._furthest, round(before * per_epoch) + progress.step)
        total = max(self._furthest, round(sum(self._phases.values()) * per_epoch))
        left = (total - self._furthest) / max(1, progress.steps - progress.step)
        eta_s = None if phase.eta_s is None or progress.step >= progress.steps else phase.eta_s * left
        message = f"{progress.phase}, {phase.message}"
        return replace(phase, current=self._furthest, total=total, eta_s=eta_s, message=message)


def _phases(recipe: SequenceTraining) -> dict[str, int]:
    if recipe.mode == "supervised":
        method, network = recipe.resolved_method, {"supervised": recipe.classifier_epochs or _EPOCHS}
        return network if method == "cnn_lstm" else {"rocket": 1} if method == "rocket" else {"rocket": 1, **network}
    rounds = range(1, recipe.iterations + 1)
    both = (("encoder", recipe.encoder_epochs), ("classifier", recipe.classifier_epochs or _EPOCHS))
    return {f"{name}-{number}": epochs for number in rounds for name, epochs in both}


# sequence.evaluate


def check_evaluate(spec: Spec, inputs: Inputs) -> None:
    """Reject a run whose training is not complete, and a corpus without labels or with other features."""
    from brim.sequences.corpus import open_sequences
    from brim.sequences.evaluation import load_run

    field, (path,) = "config.dataset_ids[0]", inputs.datasets
    assert inputs.run is not None
    with checking("config.run_id", inputs.run):
        dim = load_run(inputs.run).module.dim
    with checking(field, path):
        data = open_sequences(path)
    if data.dim != dim:
        raise Conflict(f"{field} has {data.dim} features, the run of config.run_id was trained on {dim}", field=field)
    if not bool((data.labels >= 0).any()):
        raise Conflict(f"{field} has no labels to score against; give a corpus with labels", field=field)


def run_evaluate(task: Task) -> dict[str, Any]:
    """Score the run, and project its embeddings to the plane."""
    from brim.sequences.evaluation import evaluate, project

    def tell(done: int, total: int) -> None:
        task.report_or_stop(JobProgress(current=done, total=total, message="evaluating"))

    def tell_drawing(done: int, total: int) -> None:
        task.report_or_stop(replace(task.last, message="drawing the embeddings"))

    run, (corpus,) = task.inputs.run, task.inputs.datasets
    assert run is not None
    task.say("reading the corpus")
    evaluation = evaluate(run, corpus, device=task.torch_device, progress=tell)
    projection = project(run, corpus, device=task.torch_device, progress=tell_drawing)
    write_json(task.out / EMBEDDING, projection.as_dict())
    return {"metrics": evaluation.as_dict(), "files": [EMBEDDING]}


KINDS = (
    Kind(
        name="sequence.train",
        title="Train on sequences",
        description="Train a network on sequences of any length, on their labels or without any.",
        makes="run",
        reads="sequences",
        config=SequenceTrainJob,
        run=run_train,
        spread="ranks",
        estimate_bytes=train_bytes,
        check=check_train,
    ),
    Kind(
        name="sequence.evaluate",
        title="Evaluate on sequences",
        description="Score a trained network on a labelled corpus of sequences.",
        makes="result",
        reads="sequences",
        reads_run="sequence.train",
        config=RunOnDataset,
        run=run_evaluate,
        estimate_bytes=lambda spec, inputs: 2**20,
        check=check_evaluate,
    ),
)

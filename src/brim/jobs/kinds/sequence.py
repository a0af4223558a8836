"""Sequences: sequence.train and sequence.evaluate, by the functions of the command line.

A dataset of sequences is a packed corpus.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from brim.errors import BrimError, Conflict, DatasetError
from brim.jobs.kinds.fields import (
    CHECKPOINT_S,
    Accelerator,
    Count,
    Devices,
    Fields,
    OneDatasetId,
    build,
    model_of,
    own,
    settle,
    tier_of,
)
from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import Inputs, Stopped, Task, Voice, attempt, device_of, in_training, refused
from brim.jobs.registry.result_files import EMBEDDING, write_json
from brim.jobs.worker.group import by_ranks

if TYPE_CHECKING:
    from brim.engine.training import TrainProgress
    from brim.jobs.kinds.specs import Spec
    from brim.sequences.config import SequenceTraining

_LOG_BYTES = 32 * 2**20
# What nobody wants and would take the service's memory before the job has even begun.
_MOST = {"iterations": 1000, "restarts": 10_000, "variants": 1000}
_MOST_SHAPE = dict.fromkeys(("convolutions", "layers"), 64) | dict.fromkeys(
    ("channels", "kernel", "hidden", "attention", "embedding"), 16_384
)

_PATHS = ("encoder",)  # of the recipe, which no request may give

# sequence.train


def train_model() -> type[Fields]:
    """SequenceTraining and what to train on; epochs are those of every phase."""
    from brim.sequences.config import SequenceConfig, SequenceTraining

    shape = model_of(
        SequenceConfig, leave=("dim",), most=_MOST_SHAPE, name="EncoderShape", others=({"dim": 1},),
        hints={"kernel": {"not": {"multipleOf": 2}}},
    )  # fmt: skip
    return model_of(
        SequenceTraining,
        leave=_PATHS,
        others=({}, {"mode": "supervised"}),
        most=_MOST,
        dataset_ids=(OneDatasetId, ...),
        epochs=(Annotated[Count, Field(ge=1)] | None, None),
        preload_to_gpu=(bool | None, None),
        accelerator=(Accelerator, "auto"),
        devices=(Devices, 1),
        checkpoint_every_s=(float, CHECKPOINT_S),
        model=(shape, {}),
    )


def resolve_train(values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe; epochs stand in for those of the phases that are not named."""
    from brim.sequences.config import SequenceConfig, SequenceTraining

    usual: dict[str, Any] = {"checkpoint_every_s": CHECKPOINT_S, **tier_of(values)}
    if values.get("epochs") is not None:
        usual |= dict.fromkeys(("encoder_epochs", "classifier_epochs"), values["epochs"])
    build(SequenceConfig, {"dim": 1, **values.get("model", {})}, "config.model")
    recipe = build(SequenceTraining, usual | own(SequenceTraining, values))
    beside = {"epochs": None, "preload_to_gpu": None, "accelerator": "auto", "devices": 1}
    found = {**beside, **values, **asdict(recipe)}
    return {name: value for name, value in found.items() if name not in _PATHS}


def check_train(spec: "Spec", inputs: Inputs) -> None:
    """Refuse a corpus that the recipe does not fit: no labels, too few sequences, batches too small."""
    from brim.engine.rows import Buckets
    from brim.sequences.training.data import open_data
    from brim.sequences.training.splits import check_labels, split

    field, recipe = "config.dataset_ids[0]", _recipe(spec)

    def check() -> None:
        data = open_data(inputs.datasets[0])
        if data.corpus is None:
            raise DatasetError("it is not packed")
        found = split(data.labels, data.split, recipe, name=field)
        check_labels(data.labels, data.classes, found, recipe, field)
        Buckets(data.lengths, recipe.buckets())

    try:
        settle(check, "config", tuple(spec.config), other=field)
    except DatasetError as failure:
        raise refused(field, inputs.datasets[0], failure) from failure


def _recipe(spec: "Spec") -> "SequenceTraining":
    from brim.sequences.config import SequenceTraining

    return build(SequenceTraining, own(SequenceTraining, spec.config))


def train_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the checkpoints of every phase."""
    import torch

    from brim.sequences.model.network import Classifier, Encoder
    from brim.sequences.training.data import open_data

    recipe, dim = _recipe(spec), open_data(inputs.datasets[0]).dim
    with torch.device("meta"):
        module = Classifier(Encoder(recipe.shape(dim)), 1000)
    weights = int(sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values()))
    return len(_phases(recipe)) * 3 * 3 * weights + weights + _LOG_BYTES  # last, the next and best, with two moments


@attempt
def run_train(task: Task, voice: Voice) -> dict[str, Any]:
    """Train the network, or go on with it."""
    if (found := by_ranks(task, voice)) is not None:
        return found
    from brim.sequences.training.run import train

    recipe = _recipe(task.spec)
    voice.say("reading the corpus")
    journey = _Journey(recipe)

    def tell(where: "TrainProgress") -> None:
        voice(journey.at(where))

    report = train(
        task.inputs.datasets[0], task.out, recipe, device=device_of(task), resume=True, progress=tell,
        stop=task.stop,
    )  # fmt: skip
    if report.stopped:
        raise Stopped
    return {name: value for name, value in report.as_dict().items() if name != "run"} | {"run_id": task.out.name}


class _Journey:
    """Where a run of several phases is, in steps of all of them; the phases to come are as long as the one now."""

    def __init__(self, recipe: "SequenceTraining") -> None:
        self._phases, self._furthest = _phases(recipe), 0

    def at(self, where: "TrainProgress") -> Progress:
        """As a whole."""
        told = in_training(where, "checking")
        if where.phase not in self._phases:
            return replace(told, current=self._furthest)
        per_epoch = where.steps / max(1, where.epochs)
        names = list(self._phases)
        before = sum(self._phases[name] for name in names[: names.index(where.phase)])
        self._furthest = max(self._furthest, round(before * per_epoch) + where.step)
        total = max(self._furthest, round(sum(self._phases.values()) * per_epoch))
        left = (total - self._furthest) / max(1, where.steps - where.step)
        eta_s = None if told.eta_s is None or where.step >= where.steps else told.eta_s * left
        message = f"{where.phase}, {told.message}"
        return replace(told, current=self._furthest, total=total, eta_s=eta_s, message=message)


def _phases(recipe: "SequenceTraining") -> dict[str, int]:
    """Epochs of every phase, in order."""
    if recipe.mode == "supervised":
        return {"supervised": recipe.classifier_epochs}
    rounds = range(1, recipe.iterations + 1)
    both = (("encoder", recipe.encoder_epochs), ("classifier", recipe.classifier_epochs))
    return {f"{name}-{number}": epochs for number in rounds for name, epochs in both}


# sequence.evaluate


def check_evaluate(spec: "Spec", inputs: Inputs) -> None:
    """Refuse a run that is not trained to its end, and a corpus without labels or of other features."""
    from brim.sequences.evaluation.load import load_run
    from brim.sequences.training.data import open_data

    field, (path,) = "config.dataset_ids[0]", inputs.datasets
    assert inputs.run is not None
    try:
        dim = load_run(inputs.run).module.encoder.config.dim
    except BrimError as failure:
        raise refused("config.run_id", inputs.run, failure) from failure
    try:
        data = open_data(path)
    except BrimError as failure:
        raise refused(field, path, failure) from failure
    if data.dim != dim:
        raise Conflict(f"{field} has {data.dim} features, the run of config.run_id was trained on {dim}", field=field)
    if not bool((data.labels >= 0).any()):
        raise Conflict(f"{field} has no labels to score against; give a corpus with some", field=field)


def evaluate_bytes(spec: "Spec", inputs: Inputs) -> int:
    """Of the points, from above."""
    return 2**20


@attempt
def run_evaluate(task: Task, voice: Voice) -> dict[str, Any]:
    """Score the run, and lay its embeddings out in the plane."""
    from brim.sequences.evaluation.projection import project
    from brim.sequences.evaluation.run import evaluate

    assert task.inputs.run is not None
    voice.say("reading the corpus")

    def tell(done: int, total: int) -> None:
        voice.or_stop(Progress(current=done, total=total, message="evaluating"))

    def tell_drawing(done: int, total: int) -> None:
        voice.or_stop(replace(voice.last, message="drawing the embeddings"))

    asked = (task.inputs.run, task.inputs.datasets[0])
    found = evaluate(*asked, device=device_of(task), progress=tell)
    drawn = project(*asked, device=device_of(task), progress=tell_drawing)
    places = ([round(value, 6) for value in point] for point in drawn.points.tolist())
    points = [
        {"x": x, "y": y, "label": label, "predicted": predicted}
        for (x, y), label, predicted in zip(places, drawn.labels, drawn.predicted, strict=True)
    ]
    write_json(task.out / EMBEDDING, {"explained": list(drawn.explained), "points": points})
    return {"metrics": found.as_dict(), "files": [EMBEDDING]}

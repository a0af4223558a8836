"""The registry of what a job can be: for each kind what it reads and makes, its config, and the function that does it.

Light to import: a kind's library, and torch with it, is imported when its model or one of its functions is first asked
for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from brim.jobs.kinds import predict as kinds_predict
from brim.jobs.kinds import rf as kinds_rf
from brim.jobs.kinds import segment as kinds_segment
from brim.jobs.kinds import sequence as kinds_sequence
from brim.jobs.kinds.fields import Fields, RunOnDataset, resolve_run_on_dataset
from brim.jobs.kinds.task import Inputs, Stopped, Task

if TYPE_CHECKING:
    from brim.jobs.kinds.specs import Spec

__all__ = ["KINDS", "Inputs", "Kind", "Stopped", "Task"]


def _no_presets() -> Mapping[str, Mapping[str, Any]]:
    """For kinds that have none."""
    return {}


def _nothing_to_check(spec: "Spec", inputs: Inputs) -> None:
    """For kinds whose inputs the catalogue knows well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a job of one kind is."""

    name: str
    title: str  # two or three words, as a button says it
    description: str  # one sentence, for someone who is about to choose
    makes: Literal["dataset", "run", "result"]  # where Task.out is: datasets/ID, runs/ID or results/JOB
    reads: Literal["rf", "images", "sequences"] | None  # kind of the datasets that config.dataset_ids names
    reads_run: str | None = None  # kind of the job that made the run of config.run_id
    make_model: Callable[[], type[Fields]]  # of its config; see model
    resolve: Callable[[Mapping[str, Any]], dict[str, Any]]  # what a request gave → all of its config, checked
    run: Callable[[Task], dict[str, Any]]  # the result, as JSON-able values
    estimate_bytes: Callable[["Spec", Inputs], int]  # on disk when it is done; from above
    check: Callable[["Spec", Inputs], None] = _nothing_to_check  # an error where inputs and config do not fit
    presets: Callable[[], Mapping[str, Mapping[str, Any]]] = _no_presets  # by name, values of fields to begin with

    @property
    def model(self) -> type[Fields]:
        """The model of its config, made once."""
        return _model(self.name)


@cache
def _model(name: str) -> type[Fields]:
    return KINDS[name].make_model()


KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(
            name="rf.generate",
            title="Generate radio samples",
            description="Make a dataset of simulated transmissions as a network of receivers hears them.",
            makes="dataset",
            reads=None,
            make_model=kinds_rf.generate_model,
            resolve=kinds_rf.resolve_generate,
            run=kinds_rf.run_generate,
            estimate_bytes=kinds_rf.generate_bytes,
            presets=kinds_rf.generate_presets,
        ),
        Kind(
            name="rf.train",
            title="Train a locator",
            description="Train a network on radio datasets that says where a transmitter is, and how sure that is.",
            makes="run",
            reads="rf",
            make_model=kinds_rf.train_model,
            resolve=kinds_rf.resolve_train,
            run=kinds_rf.run_train,
            estimate_bytes=kinds_rf.train_bytes,
            check=kinds_rf.check_train,
        ),
        Kind(
            name="rf.evaluate",
            title="Evaluate a locator",
            description="Locate a dataset's samples with a trained locator and compare its errors with the bound.",
            makes="result",
            reads="rf",
            reads_run="rf.train",
            make_model=lambda: RunOnDataset,
            resolve=resolve_run_on_dataset,
            run=kinds_rf.run_evaluate,
            estimate_bytes=kinds_rf.evaluate_bytes,
            check=kinds_rf.check_evaluate,
        ),
        Kind(
            name="segment.tune",
            title="Tune batch sizes",
            description="Find the fastest batch size of segmentation networks that is safe on this device.",
            makes="result",
            reads=None,
            reads_run="segment.train",
            make_model=kinds_segment.tune_model,
            resolve=kinds_segment.resolve_tune,
            run=kinds_segment.run_tune,
            estimate_bytes=kinds_segment.tune_bytes,
            check=kinds_segment.check_weights,
        ),
        Kind(
            name="segment.predict",
            title="Segment images",
            description="Find the objects in every image of a dataset with trained weights, as polygons or masks.",
            makes="result",
            reads="images",
            reads_run="segment.train",
            make_model=kinds_predict.predict_model,
            resolve=kinds_predict.resolve_predict,
            run=kinds_predict.run_predict,
            estimate_bytes=kinds_predict.predict_bytes,
            check=kinds_segment.check_weights,
        ),
        Kind(
            name="segment.train",
            title="Train segmentation",
            description="Train a network on images and their masks to find objects.",
            makes="run",
            reads="images",
            reads_run="segment.train",
            make_model=kinds_segment.train_model,
            resolve=kinds_segment.resolve_train,
            run=kinds_segment.run_train,
            estimate_bytes=kinds_segment.train_bytes,
            check=kinds_segment.check_train,
        ),
        Kind(
            name="sequence.train",
            title="Train on sequences",
            description="Train a network on sequences of any length, on their labels or without any.",
            makes="run",
            reads="sequences",
            make_model=kinds_sequence.train_model,
            resolve=kinds_sequence.resolve_train,
            run=kinds_sequence.run_train,
            estimate_bytes=kinds_sequence.train_bytes,
            check=kinds_sequence.check_train,
        ),
        Kind(
            name="sequence.evaluate",
            title="Evaluate on sequences",
            description="Score a trained network on a labelled corpus of sequences.",
            makes="result",
            reads="sequences",
            reads_run="sequence.train",
            make_model=lambda: RunOnDataset,
            resolve=resolve_run_on_dataset,
            run=kinds_sequence.run_evaluate,
            estimate_bytes=kinds_sequence.evaluate_bytes,
            check=kinds_sequence.check_evaluate,
        ),
    )
}

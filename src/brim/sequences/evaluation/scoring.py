"""Evaluate a trained run: scores against true labels, embeddings in a file, and their projection to a plane.

Axes: n sequences, E embedding.
"""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.device import resolve_device
from brim.engine.training import Ranks
from brim.errors import CheckpointError, ConfigError, DatasetError, StorageError
from brim.report.frames import data_frame
from brim.sequences.batches import SequenceBatches
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import CountProgress, Sequences, SequenceSplit, open_sequences
from brim.sequences.evaluation.encode import Encodings, encode
from brim.sequences.evaluation.folds import FoldPrediction
from brim.sequences.evaluation.measures import class_measures, confusion, number_measures, per_class, sums
from brim.sequences.evaluation.runs import TrainedRun, load_run, write_tensors
from brim.sequences.evaluation.scores import cluster_scores, probe_accuracy
from brim.sequences.model import Network

log = logging.getLogger("brim")

ScoresByName = dict[str, float | None]
MAX_POINTS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of a run on labelled sequences it was not trained on; None if one does not apply to its mode."""

    items: int
    accuracy: float | None = None  # supervised
    ari: float | None = None  # without labels: of the clusters
    nmi: float | None = None
    matched_accuracy: float | None = None  # under the best matching of clusters and classes
    uar: float | None = None  # supervised: unweighted average recall
    macro_f1: float | None = None
    # precision, recall, f1 and number of sequences, in the order of classes
    per_class: dict[str, list[float | None]] | None = None
    confusion: list[list[int]] | None = None  # rows are true classes
    classes: list[str] | None = None
    ccc: float | None = None  # of numbers: concordance correlation coefficient
    rmse: float | None = None
    r2: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each class, or one row of scores where there are none."""
        if self.per_class and self.classes:
            return data_frame(self.per_class, self.classes)
        scores = {name: value for name, value in self.as_dict().items() if isinstance(value, int | float)}
        return data_frame({name: [value] for name, value in scores.items()})


def evaluate(
    run: Path | str, corpus: Path | str, *, device: str = "auto", progress: CountProgress | None = None
) -> Evaluation:
    """Score a run: on its own corpus the items held out, on another one all labelled items."""
    where, loaded = resolve_device(device), load_run(run)
    data = _open(loaded, corpus)
    _check_fits(loaded, data)
    rows = _scored_rows(loaded, data)
    truth = torch.empty(0) if data.targets is not None else _truth(loaded, data, rows)
    data.verify()
    if len(rows) < len(data.ids):
        log.info("%s: scoring the %d of %d sequences that are labelled and unseen", data.path, len(rows), len(data.ids))
    encoded = _encode_rows(loaded, data, rows, where, progress)
    if data.targets is not None:
        numbers: dict[str, Any] = {**_number_scores(encoded.output[:, 0], data.targets[rows])}
        return Evaluation(items=len(rows), **numbers)
    predicted = encoded.prediction
    scores: dict[str, Any] = {**_scores(loaded.about["mode"], predicted, truth)}
    if loaded.about["mode"] == "supervised":
        classes = list(loaded.about["classes"])
        table = confusion(predicted, truth, len(classes))
        scores |= {"classes": classes, "confusion": table.tolist(), "per_class": per_class(table)}
    return Evaluation(items=len(rows), **scores)


def embed(
    run: Path | str,
    corpus: Path | str,
    out: Path | str,
    *,
    device: str = "auto",
    progress: CountProgress | None = None,
) -> dict[str, Any]:
    """Write embedding, prediction and label of every sequence of a corpus, in its order, to a safetensors file.

    embedding   (n, E)  float32
    prediction  (n,)    int64    most likely class or cluster
    label       (n,)    int64    true class in the corpus's numbering, -1 without one

    Of a run that predicts numbers, these two are float32, NaN for no label. The metadata holds, as JSON, the ids, the
    names of the predicted classes (empty for clusters) and those of the corpus.
    """
    where, loaded, file = resolve_device(device), load_run(run), Path(out)
    data = _open(loaded, corpus)
    _check_fits(loaded, data)
    _check_file(file)
    data.verify()
    _, embedding, prediction, output = _encode_rows(loaded, data, torch.arange(len(data)), where, progress)
    mode = loaded.about["mode"]
    named = loaded.about["classes"] if mode == "supervised" else []
    texts = {"ids": data.ids, "predicted_classes": named, "classes": data.classes, "mode": mode}
    tensors = {"embedding": embedding, "prediction": prediction, "label": data.labels}
    if data.targets is not None:
        tensors |= {"prediction": output[:, 0], "label": data.targets.float()}
    write_tensors(file, tensors, {name: json.dumps(value, ensure_ascii=False) for name, value in texts.items()})
    return {"file": str(file), "items": len(data.ids), "embedding": embedding.shape[1], "bytes": file.stat().st_size}


@torch.no_grad()
def predict(
    run: Path | str, data: Sequences, rows: Tensor, *, device: str = "auto", progress: CountProgress | None = None
) -> FoldPrediction:
    """What a run predicts for some sequences: probabilities and embeddings."""
    where, loaded = resolve_device(device), load_run(run)
    row, embedding, _, output = _encode_rows(loaded, data, rows, where, progress)
    return FoldPrediction(row, output, embedding)


def score(
    module: Network,
    batches: SequenceBatches,
    data: Sequences,
    parts: SequenceSplit,
    ranks: Ranks | None = None,
) -> tuple[ScoresByName | None, FoldPrediction | None]:
    """Scores at the end of training, on the labelled items held out, and their predictions; None without any.

    Without labels also the accuracy of a linear layer fitted to the embeddings of the labelled training items.
    """
    mode, device = batches.config.mode, batches.device
    rows = parts.held_out[data.labels[parts.held_out] >= 0]
    if not len(rows):
        return None, None
    test = encode(module, batches.plain(rows), device, ranks=ranks)
    predictions = FoldPrediction(test.row, test.output, test.embedding)
    if data.targets is not None and mode == "supervised":
        return _number_scores(test.output[:, 0], data.targets[rows]), predictions
    scores = _scores(mode, test.prediction, data.labels[rows])
    if mode == "self":
        scores["probe_accuracy"] = None
        known_rows = parts.train[data.labels[parts.train] >= 0]
        if len(known_rows):
            known = encode(module, batches.plain(known_rows), device, ranks=ranks).embedding
            scores["probe_accuracy"] = probe_accuracy(
                known, data.labels[known_rows], test.embedding, data.labels[test.row]
            )
    return scores, predictions


def _scores(mode: str, predicted: Tensor, truth: Tensor) -> ScoresByName:
    if mode == "supervised":
        table = confusion(predicted, truth, int(torch.maximum(predicted.max(), truth.max())) + 1)
        return {name: float(value) for name, value in class_measures(table).items()}
    return dict(cluster_scores(predicted, truth))


def _number_scores(predicted: Tensor, truth: Tensor) -> ScoresByName:
    middle = truth.mean()  # squares far from 0 would lose their variance to rounding
    measured = number_measures(sums(predicted.double() - middle, truth - middle).sum(0))
    return {name: float(value) if math.isfinite(float(value)) else None for name, value in measured.items()}


# Checks


def _open(loaded: TrainedRun, corpus: Path | str) -> Sequences:
    """A corpus with the labels that the run has learned, if it has that column."""
    data, training = open_sequences(corpus), loaded.about.get("training")
    column = training.get("label") if isinstance(training, dict) else None
    if not isinstance(column, str) or column.lower() not in data.columns:
        column = None
    is_regression = loaded.about.get("task") == "regression" and bool((data.labels >= 0).any())
    return data.with_labels(column, "regression" if is_regression else "classification")


def _encode_rows(
    loaded: TrainedRun, data: Sequences, rows: Tensor, device: torch.device, progress: CountProgress | None
) -> Encodings:
    """Encode rows in batches of the run's size; the tier is chosen again."""
    try:
        training, mode = loaded.about["training"], loaded.about["mode"]
        sizes = {name: training[name] for name in ("batch_size", "max_frames", "num_workers", "prefetch_factor")}
        if sizes["max_frames"] is not None:  # chosen for the run's sequences; these may be longer
            sizes["max_frames"] = max(sizes["max_frames"], int(data.lengths.max()))
        config = SequenceTraining(mode=mode, **sizes)
    except (KeyError, TypeError, ConfigError) as failure:
        raise CheckpointError(f"{loaded.path}/run.json was altered ({failure}); restore it from a copy") from failure
    with SequenceBatches(data, config, device, rows) as batches:
        return encode(loaded.module.to(device), batches.view(rows, shuffle=False), device, progress)


def _check_fits(loaded: TrainedRun, data: Sequences) -> None:
    dim = loaded.module.dim
    if data.dim != dim:
        raise DatasetError(
            f"{data.path} has {data.dim} features, {loaded.path} was trained on {dim}; give a corpus of the same kind"
        )


def _scored_rows(loaded: TrainedRun, data: Sequences) -> Tensor:
    """Labelled rows to score: those held out if the run was trained on this corpus, else all."""
    labelled = data.labels >= 0
    if not bool(labelled.any()):
        raise DatasetError(
            f"{data.path} has no labels to score against",
            code="no_labels",
            hint="pack it with {labels}, or use {sequence embed}",
        )
    if not data.is_same_data(loaded.about.get("corpus")):
        return labelled.nonzero().flatten()
    held = set(loaded.about.get("held_out", ()))
    chosen = labelled & torch.tensor([name in held for name in data.ids])
    if not bool(chosen.any()):
        raise DatasetError(f"{data.path}: {loaded.path} was trained on all of it; give a corpus it has not seen")
    return chosen.nonzero().flatten()


def _truth(loaded: TrainedRun, data: Sequences, rows: Tensor) -> Tensor:
    """Labels of the rows, in supervised mode in the run's numbering of the classes."""
    labels = data.labels[rows]
    if loaded.about.get("mode") != "supervised":
        return labels
    number = {name: index for index, name in enumerate(loaded.about["classes"])}
    for label in torch.unique(labels).tolist():
        if data.classes[label] not in number:
            raise DatasetError(
                f"{data.path} has the class {data.classes[label]!r}, {loaded.path} knows {', '.join(number)}; "
                "give a corpus with the same classes"
            )
    return torch.tensor([number.get(name, -1) for name in data.classes])[labels]


def _check_file(file: Path) -> None:
    """Reject a file before the work if it could not be written after it."""
    if file.is_dir():
        raise ConfigError(
            f"{file} is a directory; give the file to write, such as {file / 'embeddings.safetensors'}", field="out"
        )
    if file.suffix != ".safetensors":
        raise ConfigError(f"{file} must end in .safetensors", field="out")
    if not file.parent.is_dir():
        raise StorageError(
            f"{file}: the folder {file.parent} does not exist", hint="create it, or choose another {out}"
        )


# Projection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaneProjection:
    """Embeddings in the plane of their two principal axes, of evenly chosen sequences that an evaluation scores."""

    explained: tuple[float, float]  # share of the embeddings' variance along each axis
    points: Tensor  # (n, 2) float64
    labels: list[str]  # true classes
    predicted: list[str]  # classes, or "cluster K"

    def as_dict(self) -> dict[str, Any]:
        """The points with their labels, as JSON-able values."""
        places = ([round(value, 6) for value in point] for point in self.points.tolist())
        points = [
            {"x": x, "y": y, "label": label, "predicted": predicted}
            for (x, y), label, predicted in zip(places, self.labels, self.predicted, strict=True)
        ]
        return {"explained": list(self.explained), "points": points}


def project(
    run: Path | str,
    corpus: Path | str,
    *,
    device: str = "auto",
    progress: CountProgress | None = None,
    limit: int = MAX_POINTS,
) -> PlaneProjection:
    """Project the embeddings of at most limit sequences that `evaluate` scores."""
    where, loaded = resolve_device(device), load_run(run)
    data = _open(loaded, corpus)
    rows = _scored_rows(loaded, data)
    rows = rows[:: max(1, math.ceil(len(rows) / limit))]
    _, embedding, prediction, _ = _encode_rows(loaded, data, rows, where, progress)
    points, explained = principal_plane(embedding)
    names = loaded.about["classes"] if loaded.about["mode"] == "supervised" else None
    return PlaneProjection(
        explained=explained,
        points=points,
        labels=[data.classes[number] for number in data.labels[rows].tolist()],
        predicted=[f"cluster {number}" if names is None else names[number] for number in prediction.tolist()],
    )


def principal_plane(embedding: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """(n, 2) float64 along the two principal axes, and the share of the variance along each.

    The sign of an axis is arbitrary; its largest component is made positive, so that the same embeddings look the same.
    """
    centred = embedding.double() - embedding.double().mean(0)
    _, spread, axes = torch.linalg.svd(centred, full_matrices=False)  # axes are rows
    axes = axes[:2] * torch.where(axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0)
    points = torch.nn.functional.pad(centred @ axes.T, (0, 2 - len(axes)))  # one feature or one sequence: a line
    total = float(spread.square().sum())
    shares = [float(one) ** 2 / total if total > 0 else 0.0 for one in spread[:2]] + [0.0, 0.0]
    return points, (shares[0], shares[1])

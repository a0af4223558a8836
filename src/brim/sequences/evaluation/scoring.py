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
from brim.sequences.batches import SequenceBatches, open_batches
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import CountProgress, Sequences, SequenceSplit, open_sequences
from brim.sequences.evaluation.encode import embed_and_predict, embed_rows, predict
from brim.sequences.evaluation.runs import TrainedRun, load_run, write_tensors
from brim.sequences.evaluation.scores import accuracy, cluster_scores, probe_accuracy
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

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def evaluate(
    run: Path | str, corpus: Path | str, *, device: str = "auto", progress: CountProgress | None = None
) -> Evaluation:
    """Score a run: on its own corpus the items held out, on another one all labelled items."""
    where, loaded, data = resolve_device(device), load_run(run), open_sequences(corpus)
    _check_fits(loaded, data)
    rows = _scored_rows(loaded, data)
    truth = _truth(loaded, data, rows)
    data.verify()
    if len(rows) < len(data.ids):
        log.info("%s: scoring the %d of %d sequences that are labelled and unseen", data.path, len(rows), len(data.ids))
    config = _reading_settings(loaded, data)
    with open_batches(data, config, where, rows) as batches:
        source = batches.view(rows, shuffle=False)
        predicted = predict(loaded.module.to(where), source, where, progress)
    return Evaluation(items=len(rows), **_scores(config.mode, predicted.value, truth))


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

    The metadata holds, as JSON, the ids, the names of the predicted classes (empty for clusters) and those of the
    corpus.
    """
    where, loaded, data, file = resolve_device(device), load_run(run), open_sequences(corpus), Path(out)
    _check_fits(loaded, data)
    _check_file(file)
    data.verify()
    config, rows = _reading_settings(loaded, data), torch.arange(len(data.ids))
    with open_batches(data, config, where) as batches:
        source = batches.view(rows, shuffle=False)
        (_, embedding), prediction = embed_and_predict(loaded.module.to(where), source, where, progress)
    named = loaded.about["classes"] if config.mode == "supervised" else []
    texts = {"ids": data.ids, "predicted_classes": named, "classes": data.classes, "mode": config.mode}
    tensors = {"embedding": embedding, "prediction": prediction, "label": data.labels}
    write_tensors(file, tensors, {name: json.dumps(value, ensure_ascii=False) for name, value in texts.items()})
    return {"file": str(file), "items": len(data.ids), "embedding": embedding.shape[1], "bytes": file.stat().st_size}


def score(
    module: Network,
    batches: SequenceBatches,
    data: Sequences,
    parts: SequenceSplit,
    ranks: Ranks | None = None,
) -> ScoresByName | None:
    """Scores at the end of training, on the labelled items held out; None without any.

    Without labels also the accuracy of a linear layer fitted to the embeddings of the labelled training items.
    """
    mode, device = batches.config.mode, batches.device
    rows = parts.held_out[data.labels[parts.held_out] >= 0]
    if not len(rows):
        return None
    test, predicted = embed_and_predict(module, batches.plain(rows), device, ranks=ranks)
    scores = _scores(mode, predicted, data.labels[rows])
    if mode == "self":
        scores["probe_accuracy"] = None
        known_rows = parts.train[data.labels[parts.train] >= 0]
        if len(known_rows):
            known = embed_rows(module.encoder, batches.plain(known_rows), device, ranks=ranks)
            scores["probe_accuracy"] = probe_accuracy(
                known.value, data.labels[known_rows], test.value, data.labels[test.row]
            )
    return scores


def _scores(mode: str, predicted: Tensor, truth: Tensor) -> ScoresByName:
    if mode == "supervised":
        return {"accuracy": accuracy(predicted, truth)}
    return dict(cluster_scores(predicted, truth).as_dict())


# Checks


def _reading_settings(loaded: TrainedRun, data: Sequences) -> SequenceTraining:
    """The run's settings that matter for reading: mode and batch sizes; the tier is chosen again."""
    try:
        training, mode = loaded.about["training"], loaded.about["mode"]
        sizes = {name: training[name] for name in ("batch_size", "max_frames", "num_workers", "prefetch_factor")}
        if sizes["max_frames"] is not None:  # chosen for the run's sequences; these may be longer
            sizes["max_frames"] = max(sizes["max_frames"], int(data.lengths.max()))
        return SequenceTraining(mode=mode, **sizes)
    except (KeyError, TypeError, ConfigError) as failure:
        raise CheckpointError(f"{loaded.path}/run.json was altered ({failure}); restore it from a copy") from failure


def _check_fits(loaded: TrainedRun, data: Sequences) -> None:
    dim = loaded.module.encoder.config.dim
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


def project(
    run: Path | str,
    corpus: Path | str,
    *,
    device: str = "auto",
    progress: CountProgress | None = None,
    limit: int = MAX_POINTS,
) -> PlaneProjection:
    """Project the embeddings of at most limit sequences that `evaluate` scores."""
    where, loaded, data = resolve_device(device), load_run(run), open_sequences(corpus)
    rows = _scored_rows(loaded, data)
    rows = rows[:: max(1, math.ceil(len(rows) / limit))]
    config = _reading_settings(loaded, data)
    with open_batches(data, config, where, rows) as batches:
        source = batches.view(rows, shuffle=False)
        (_, embedding), prediction = embed_and_predict(loaded.module.to(where), source, where, progress)
    points, explained = principal_plane(embedding)
    names = loaded.about["classes"] if config.mode == "supervised" else None
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

"""What a trained network is worth, and what it makes of sequences: scores against true labels, embeddings in a file.

Axes: n sequences, E embedding.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.device import resolve_device
from brim.engine.training import Ranks
from brim.errors import CheckpointError, ConfigError, DatasetError, StorageError
from brim.sequences.config import SequenceTraining
from brim.sequences.evaluation.encode import Answers, embed_and_predict, predict
from brim.sequences.evaluation.encode import embed as encode
from brim.sequences.evaluation.load import Run, load_run, write_tensors
from brim.sequences.evaluation.probe import probe_accuracy
from brim.sequences.evaluation.scores import accuracy, cluster_scores
from brim.sequences.model.network import Network
from brim.sequences.training.data import Batches, Counted, SequenceData, open_data
from brim.sequences.training.splits import Split

log = logging.getLogger("brim")

Scores = dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of a run on labelled sequences it was not trained on; None where one does not apply to its mode."""

    items: int
    accuracy: float | None = None  # supervised
    ari: float | None = None  # of clusters, which have no names
    nmi: float | None = None
    matched_accuracy: float | None = None  # under the best matching of clusters and classes

    def as_dict(self) -> dict[str, Any]:
        """The figures of the contract."""
        return {name: getattr(self, name) for name in self.__slots__}


def evaluate(
    run: Path | str, corpus: Path | str, *, device: str = "auto", progress: Counted | None = None
) -> Evaluation:
    """Score a run: on its own corpus the items held out, on another all that are labelled."""
    where, loaded, data = resolve_device(device), load_run(run), open_data(corpus)
    _check_fits(loaded, data)
    rows = scored_rows(loaded, data)
    truth = _truth(loaded, data, rows)
    data.verify()
    if len(rows) < len(data.ids):
        log.info(
            "%s: scoring %d of %d sequences, those labelled and not trained on", data.path, len(rows), len(data.ids)
        )
    config = reading_settings(loaded, data)
    with data.batches(config, where, rows) as batches:
        source = batches.view(rows, shuffle=False)
        found = predict(loaded.module.to(where), source, where, progress)
    return Evaluation(items=len(rows), **_scores(config.mode, found.value, truth))


def embed(
    run: Path | str,
    corpus: Path | str,
    out: Path | str,
    *,
    device: str = "auto",
    progress: Counted | None = None,
) -> dict[str, Any]:
    """Write what a run makes of every sequence of a corpus, in its order, to a safetensors file.

    embedding   (n, E)  float32
    prediction  (n,)    int64    likeliest class or cluster
    label       (n,)    int64    true class by the corpus's numbering, -1 without one

    The file's metadata holds, as JSON, the ids, the names of the predicted classes (empty for clusters) and those of
    the corpus.
    """
    where, loaded, data, file = resolve_device(device), load_run(run), open_data(corpus), Path(out)
    _check_fits(loaded, data)
    _check_file(file)
    data.verify()
    config, rows = reading_settings(loaded, data), torch.arange(len(data.ids))
    with data.batches(config, where) as batches:
        source = batches.view(rows, shuffle=False)
        (_, embedding), prediction = embed_and_predict(loaded.module.to(where), source, where, progress)
    named = loaded.about["classes"] if config.mode == "supervised" else []
    texts = {"ids": data.ids, "predicted_classes": named, "classes": data.classes, "mode": config.mode}
    tensors = {"embedding": embedding, "prediction": prediction, "label": data.labels}
    write_tensors(file, tensors, {name: json.dumps(value, ensure_ascii=False) for name, value in texts.items()})
    return {"file": str(file), "items": len(data.ids), "embedding": embedding.shape[1], "bytes": file.stat().st_size}


def score(
    module: Network,
    batches: Batches,
    data: SequenceData,
    found: Split,
    mode: str,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Scores | None:
    """Scores at the end of training, on the labelled items held out; None without any.

    Without labels also the accuracy of a linear layer fitted to the embeddings of the labelled training items.
    """
    rows = found.held_out[data.labels[found.held_out] >= 0]
    if not len(rows):
        return None
    answers, predicted = embed_and_predict(module, batches.plain(rows), device, ranks=ranks)
    truth = data.labels[rows]
    scores = _scores(mode, predicted, truth)
    if mode == "self":
        scores["probe_accuracy"] = _probe(module, batches, data, found, answers, device, ranks)
    return scores


def _scores(mode: str, predicted: Tensor, truth: Tensor) -> Scores:
    if mode == "supervised":
        return {"accuracy": accuracy(predicted, truth)}
    return dict(cluster_scores(predicted, truth).as_dict())


def _probe(
    module: Network,
    batches: Batches,
    data: SequenceData,
    found: Split,
    asked: Answers,
    device: torch.device,
    ranks: Ranks | None,
) -> float | None:
    rows = found.train[data.labels[found.train] >= 0]
    if not len(rows):
        return None
    known = encode(module.encoder, batches.plain(rows), device, ranks=ranks)
    return probe_accuracy(known.value, data.labels[rows], asked.value, data.labels[asked.row])


# What may be asked


def reading_settings(loaded: Run, data: SequenceData) -> SequenceTraining:
    """What of the run's settings matters for reading: mode and sizes of batches; the tier is chosen anew."""
    try:
        training, mode = loaded.about["training"], loaded.about["mode"]
        sizes = {name: training[name] for name in ("batch_size", "max_frames", "num_workers", "prefetch_factor")}
        if sizes["max_frames"] is not None:  # of the run's own sequences; these may be longer
            sizes["max_frames"] = max(sizes["max_frames"], int(data.lengths.max()))
        return SequenceTraining(mode=mode, **sizes)
    except (KeyError, TypeError, ConfigError) as failure:
        raise CheckpointError(f"{loaded.path}/run.json was altered ({failure}); restore it from a copy") from failure


def _check_fits(loaded: Run, data: SequenceData) -> None:
    dim = loaded.module.encoder.config.dim
    if data.dim != dim:
        raise DatasetError(
            f"{data.path} has {data.dim} features, {loaded.path} was trained on {dim}; give a corpus of the same kind"
        )


def scored_rows(loaded: Run, data: SequenceData) -> Tensor:
    """Rows to score: those held out of this very corpus, else all; of them those with a label."""
    labelled = data.labels >= 0
    if not bool(labelled.any()):
        raise DatasetError(
            f"{data.path} has no labels to score against; pack it with --labels, or use brim sequence embed"
        )
    if not data.is_of(loaded.about.get("corpus")):
        return labelled.nonzero().flatten()
    held = set(loaded.about.get("held_out", ()))
    chosen = labelled & torch.tensor([name in held for name in data.ids])
    if not bool(chosen.any()):
        raise DatasetError(f"{data.path}: {loaded.path} was trained on all of it; give a corpus it has not seen")
    return chosen.nonzero().flatten()


def _truth(loaded: Run, data: SequenceData, rows: Tensor) -> Tensor:
    """Labels of the rows, in supervised mode by the run's numbering of the classes."""
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
    """Refuse at once what could not be written after long work."""
    if file.is_dir():
        raise ConfigError(f"{file} is a directory; give the file to write, such as {file / 'embeddings.safetensors'}")
    if file.suffix != ".safetensors":
        raise ConfigError(f"{file} must end in .safetensors, which is what is written")
    if not file.parent.is_dir():
        raise StorageError(f"{file}: there is no folder {file.parent}; make it, or choose another --out")

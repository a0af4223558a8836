"""Training without labels: in each iteration the encoder learns from augmented views, its embeddings are clustered, and
a classifier learns the clusters.

RUN/encoder-K     contrastive loss between two augmented views, and masked frames are predicted
RUN/pseudo-K      k-means on the embeddings of the training items
RUN/classifier-K  the clusters as labels, with the encoder or on top of it
"""

import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from brim.engine.training import Batch
from brim.errors import CheckpointError
from brim.sequences.batches import two_views
from brim.sequences.config import KmeansConfig
from brim.sequences.evaluation import accuracy, embed_rows, predict, read_tensors, write_tensors
from brim.sequences.model import Classifier, Encoder
from brim.sequences.training.kmeans import kmeans
from brim.sequences.training.objectives import SelfSupervised, classification_loss, self_supervised_loss
from brim.sequences.training.phases import PhaseReport, SequenceRun, run_phase

log = logging.getLogger("brim")


def train_self_supervised(run: SequenceRun) -> tuple[Classifier, list[PhaseReport]]:
    """Train encoder and classifier; if the last report says stopped, the run is not done."""
    encoder = run.new_encoder("encoder")
    clusters = run.config.num_clusters(len(run.data.classes))
    phases: list[PhaseReport] = []
    for number in range(1, run.config.iterations + 1):
        classifier: Classifier = run.new(partial(Classifier, encoder, clusters), f"classifier-{number}")
        phases.append(_train_encoder(run, encoder, number))
        if phases[-1].stopped:
            break
        labels = _pseudo_labels(run, encoder, clusters, number)
        phases.append(_train_classifier(run, classifier, labels, number))
        if phases[-1].stopped:
            break
        _log_agreement(run, classifier, labels, number)
    return classifier, phases


def _train_encoder(run: SequenceRun, encoder: Encoder, number: int) -> PhaseReport:
    name, augmentation, (mean, std) = f"encoder-{number}", run.config.augmentation, run.statistics
    assert augmentation is not None, "checked by SequenceTraining"
    module = run.new(lambda: SelfSupervised(encoder, run.config.objective), name)
    encoder.requires_grad_(True)

    def views(batch: Batch, rng: torch.Generator) -> Batch:
        return two_views(batch, rng, augmentation, mean=mean, std=std)

    source = run.view(run.split.train, name)
    return run_phase(run, name, module, self_supervised_loss, source, epochs=run.config.encoder_epochs, transform=views)


def _train_classifier(run: SequenceRun, classifier: Classifier, labels: Tensor, number: int) -> PhaseReport:
    name, config = f"classifier-{number}", run.config
    classifier.frozen = not config.fine_tune
    classifier.encoder.requires_grad_(config.fine_tune)
    source = run.view(run.split.train, name, labels)
    loss = partial(classification_loss, smoothing=config.label_smoothing)
    return run_phase(run, name, classifier, loss, source, epochs=config.classifier_epochs, transform=run.augmented())


def _pseudo_labels(run: SequenceRun, encoder: Encoder, clusters: int, number: int) -> Tensor:
    """(n,) int64: the cluster of each training item, -1 elsewhere; computed once in a run, then read."""
    file, rows = run.out / f"pseudo-{number}.safetensors", run.split.train
    clusters_of_rows = run.ranks.from_main(lambda: _read_clusters(file, rows))
    if clusters_of_rows is None:
        row, embedding = embed_rows(encoder, run.batches.plain(rows), run.device, ranks=run.ranks)
        clusters_of_rows = run.ranks.from_main(lambda: _find_clusters(run, row, embedding, clusters, number, file))
    labels = torch.full((len(run.data),), -1)
    labels[rows] = clusters_of_rows
    return labels


def _read_clusters(file: Path, rows: Tensor) -> Tensor | None:
    if not file.is_file():
        return None
    tensors = read_tensors(file)
    if set(tensors) != {"row", "label"} or not torch.equal(tensors["row"], rows):
        raise CheckpointError(f"{file} belongs to other items", hint="restore it, or choose another {out}")
    return tensors["label"]


def _find_clusters(run: SequenceRun, row: Tensor, embedding: Tensor, clusters: int, number: int, file: Path) -> Tensor:
    """Cluster the training items and write the result to the file."""
    labels = torch.full((len(run.data),), -1)
    rows = run.split.train
    # directions: the views were compared by them, and norms depend on the number of frames
    points = functional.normalize(embedding, dim=1).to(run.device)
    config = KmeansConfig(clusters=clusters, restarts=run.config.restarts, seed=run.seed("clusters", number))
    labels[row] = kmeans(points, config).labels.cpu()
    write_tensors(file, {"row": rows, "label": labels[rows]})
    return labels[rows]


def _log_agreement(run: SequenceRun, classifier: Classifier, labels: Tensor, number: int) -> None:
    """Log how well the classifier fits its clusters: a sign that it has learned, not a score."""
    row, predicted = predict(classifier, run.batches.plain(run.split.train), run.device, ranks=run.ranks)
    log.info("iteration %d: classifier and clusters agree on %.1f %%", number, 100 * accuracy(predicted, labels[row]))

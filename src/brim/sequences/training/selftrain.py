"""Learning without labels: an encoder, clusters of what it makes, a classifier of these; then all of it again.

    encoder-i     two augmented views of a sequence meet, hidden frames are foretold
    pseudo-i      k-means on the embeddings of the training items, as they are
    classifier-i  an MLP on the encoder learns the clusters

The classifier trains the encoder too: frozen, it would teach the encoder nothing, and the next iteration would be no
more than further epochs of the first phase. Labels are never looked at; of the classes only their number, where no
number of clusters is given.
"""

# Axes: n sequences of the corpus, m to train on, E embedding, K clusters

import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.training import Batch, Transform
from brim.errors import CheckpointError
from brim.sequences.config import Augmentation, KmeansConfig
from brim.sequences.evaluation.encode import embed, predict
from brim.sequences.evaluation.load import read_tensors, write_tensors
from brim.sequences.evaluation.scores import accuracy
from brim.sequences.model.network import Classifier, Encoder
from brim.sequences.training.augment import augment, two_views
from brim.sequences.training.kmeans import kmeans
from brim.sequences.training.objectives import SelfSupervised, cross_entropy, self_supervised_loss
from brim.sequences.training.phases import Job, PhaseReport, run_phase

log = logging.getLogger("brim")


def self_train(job: Job, encoder: Encoder) -> tuple[Classifier, list[PhaseReport]]:
    """Train encoder and classifier; where the last report says stopped, there is more to do."""
    clusters = job.config.num_clusters(len(job.data.classes))
    phases: list[PhaseReport] = []
    for number in range(1, job.config.iterations + 1):
        classifier: Classifier = job.new(lambda: Classifier(encoder, clusters), f"classifier-{number}")
        phases.append(_learn_views(job, encoder, number))
        if phases[-1].stopped:
            break
        labels = _pseudo_labels(job, encoder, clusters, number)
        phases.append(_learn_clusters(job, classifier, labels, number))
        if phases[-1].stopped:
            break
        _tell_agreement(job, classifier, labels, number)
    return classifier, phases


def _learn_views(job: Job, encoder: Encoder, number: int) -> PhaseReport:
    name, config = f"encoder-{number}", job.config
    module = job.new(lambda: SelfSupervised(encoder, config.objective), name)
    encoder.requires_grad_(True)
    source = job.view(job.split.train, name)
    return run_phase(
        job, name, module, self_supervised_loss, source, epochs=config.encoder_epochs, transform=views(job)
    )


def _learn_clusters(job: Job, classifier: Classifier, labels: Tensor, number: int) -> PhaseReport:
    name, config = f"classifier-{number}", job.config
    classifier.frozen = not config.fine_tune
    classifier.encoder.requires_grad_(config.fine_tune)
    source = job.view(job.split.train, name, labels)
    loss = partial(classification, smoothing=config.label_smoothing)
    return run_phase(job, name, classifier, loss, source, epochs=config.classifier_epochs, transform=augmented(job))


def _pseudo_labels(job: Job, encoder: Encoder, clusters: int, number: int) -> Tensor:
    """(n,) int64: the cluster of each training item, -1 elsewhere; found once in a run, then read."""
    file, rows = job.run / f"pseudo-{number}.safetensors", job.split.train
    labels = torch.full((len(job.data.ids),), -1)
    found = job.ranks.from_main(lambda: _read_labels(file, rows))
    if found is None:
        row, embedding = embed(encoder, job.plain(rows), job.device, ranks=job.ranks)
        found = job.ranks.from_main(lambda: _find_labels(job, row, embedding, clusters, number, file))
    labels[rows] = found
    return labels


def _read_labels(file: Path, rows: Tensor) -> Tensor | None:
    """The clusters of these rows; None where they were not found yet."""
    if not file.is_file():
        return None
    found = read_tensors(file)
    if set(found) != {"row", "label"} or not torch.equal(found["row"], rows):
        raise CheckpointError(f"{file} is of other items; restore it, or choose another --out")
    return found["label"]


def _find_labels(job: Job, row: Tensor, embedding: Tensor, clusters: int, number: int, file: Path) -> Tensor:
    """The clusters of the training items, kept in the file."""
    labels = torch.full((len(job.data.ids),), -1)
    rows = job.split.train
    # directions: that is what the views were compared by, and lengths follow the number of frames
    points = functional.normalize(embedding, dim=1).to(job.device)
    config = KmeansConfig(clusters=clusters, restarts=job.config.restarts, seed=job.seed("clusters", number))
    labels[row] = kmeans(points, config).labels.cpu()
    write_tensors(file, {"row": rows, "label": labels[rows]})
    return labels[rows]


def _tell_agreement(job: Job, classifier: Classifier, labels: Tensor, number: int) -> None:
    """Log how far the classifier follows its own clusters: a sign of trained weights, no score of anything."""
    row, found = predict(classifier, job.plain(job.split.train), job.device, ranks=job.ranks)
    log.info("iteration %d: classifier and clusters agree on %.1f %%", number, 100 * accuracy(found, labels[row]))


# What a step does to a batch


def classification(module: nn.Module, batch: Batch, smoothing: float) -> Tensor:
    """Cross entropy of a classifier on a batch."""
    return cross_entropy(module(batch["frames"], batch["length"]), batch["label"], smoothing)


def views(job: Job) -> Transform:
    """Two views of every sequence instead of it."""
    mean, std = (part.to(job.device) for part in job.statistics)
    config = job.config.augmentation or Augmentation()

    def change(batch: Batch, rng: torch.Generator) -> Batch:
        return two_views(batch, rng, config, mean=mean, std=std)

    return change


def augmented(job: Job) -> Transform | None:
    """Every sequence changed a little, in place."""
    config = job.config.augmentation
    if config is None:
        return None
    mean, std = (part.to(job.device) for part in job.statistics)

    def change(batch: Batch, rng: torch.Generator) -> Batch:
        length = augment(batch["frames"], batch["length"], rng, config, mean=mean, std=std)
        return {**batch, "length": length}

    return change

"""Training without labels, beside clusters of rocket features and of summary statistics; the best clusters are kept.

Where training sequences have labels, clusters are compared by their adjusted Rand index with these. Elsewhere by their
stability: k-means on two random halves should divide all sequences in the same way.

Axes: n sequences, F features, E embedding, K clusters.
"""

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from brim.engine.device import stream
from brim.engine.rows import HOST
from brim.sequences.evaluation import NETWORK, Encodings, cluster_scores, encode, write_tensors
from brim.sequences.model import Network
from brim.sequences.rocket import Rocket, fit_features, principal_axes
from brim.sequences.training.kmeans import kmeans
from brim.sequences.training.methods import Candidate, Outcome, SequenceRows, rocket_phase
from brim.sequences.training.phases import PhaseStopped, SequenceRun, train_self_supervised

log = logging.getLogger("brim")

_VIEWS = {"rocket clusters": ("frames", "steps", "statistics"), "statistics clusters": ("statistics",)}
_SAMPLE = 2_000  # sequences that the principal axes are found on
_REPEATS = 3  # of the halves


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clustering:
    name: str
    module: Network
    encoded: Encodings  # of the training part


def train_without_labels(run: SequenceRun) -> Outcome:
    """Train by the method of the run's settings, and keep the best clusters; cnn_lstm keeps its own in any case."""
    if not run.ranks.alone:
        return Outcome(module=train_self_supervised(run), model="cnn_lstm")
    began_s = time.perf_counter()
    try:
        tried = [_cluster_features(run, name) for name in _VIEWS]
    except PhaseStopped:
        run.reports.append(rocket_phase(0, time.perf_counter() - began_s, None, stopped=True))
        raise
    run.reports.append(rocket_phase(len(run.split.train), time.perf_counter() - began_s, None))
    if run.config.method != "rocket":
        module = train_self_supervised(run)
        write_tensors(run.out / NETWORK, module.state_dict())  # others may start from its encoder, kept or not
        tried.append(_Clustering(name="cnn_lstm", module=module, encoded=_encode(run, module)))
    scored = [(_quality(run, one), one) for one in tried]
    best = max(scored, key=lambda pair: pair[0][0])[1]
    if run.config.method == "cnn_lstm":
        best = tried[-1]
    table = [_row(run, one, *quality, kept=one is best) for quality, one in scored]
    return Outcome(module=best.module, model=best.name, comparison=table)


def _encode(run: SequenceRun, module: Network) -> Encodings:
    return encode(module.to(run.device), run.batches.plain(run.split.train), run.device)


# Clusters of features


def _cluster_features(run: SequenceRun, name: str) -> _Clustering:
    """k-means along the principal axes of the features; the nearest centre is a linear function of the features."""
    rows, clusters = run.split.train, run.config.num_clusters(len(run.data.classes))
    sequences = SequenceRows(run.data, rows, run.stop)
    features = fit_features(sequences, seed=run.config.seed % 2**31, views=_VIEWS[name])
    chosen = torch.randperm(len(rows), generator=stream(run.config.seed, name, device=HOST))[:_SAMPLE].sort().values
    sample = features.of([sequences[place].numpy() for place in chosen.tolist()], run.device)
    plane = principal_axes(sample.cpu())
    width = plane["plane"].shape[0]
    none = {"weight": torch.zeros(1, width, clusters), "bias": torch.zeros(1, clusters), "share": torch.ones(1)}
    points = _encode(run, Rocket(features, {**none, **plane})).embedding
    clustering = kmeans(points.to(run.device), clusters, restarts=run.config.restarts, seed=run.seed(name))
    centres = clustering.centres.cpu().float()
    sharp = 1 / max(clustering.inertia / len(points), 1e-12)  # one mean squared distance is a factor of e
    weight = plane["plane"] @ (2 * centres.T)
    bias = -centres.square().sum(1) - plane["middle"] @ weight
    head = {"weight": (sharp * weight)[None], "bias": (sharp * bias)[None], "share": torch.ones(1)}
    module = Rocket(features, {**head, **plane})
    return _Clustering(name=name, module=module, encoded=_encode(run, module))


# Comparison


def _quality(run: SequenceRun, one: _Clustering) -> tuple[float, str]:
    """How good clusters are, between 0 and 1, and how that is known."""
    labels = run.data.labels[one.encoded.row]
    if len(torch.unique(labels[labels >= 0])) > 1:
        known = labels >= 0
        ari = cluster_scores(one.encoded.prediction[known], labels[known])["ari"]
        return ari, "training labels (ARI)"
    return _stability(run, one), "stability"


def _stability(run: SequenceRun, one: _Clustering) -> float:
    points = one.encoded.embedding
    if one.name == "cnn_lstm":
        points = functional.normalize(points, dim=1)
    clusters = run.config.num_clusters(len(run.data.classes))
    if len(points) < 4 * clusters:
        return 0.0
    scores = []
    for repeat in range(_REPEATS):
        order = torch.randperm(len(points), generator=stream(run.config.seed, "halves", repeat, device=HOST))
        sides = [_assign(points, order[half::2], clusters, run.seed("halves", repeat, half)) for half in (0, 1)]
        scores.append(cluster_scores(*sides)["ari"])
    return sum(scores) / len(scores)


def _assign(points: Tensor, chosen: Tensor, clusters: int, seed: int) -> Tensor:
    """(n,) int64: clusters of all points by the centres of some."""
    centres = kmeans(points[chosen], clusters, restarts=4, seed=seed).centres.to(points)
    return torch.cdist(points, centres).argmin(1)


def _row(run: SequenceRun, one: _Clustering, score: float, measured_on: str, *, kept: bool) -> Candidate:
    rows = run.split.held_out[run.data.labels[run.split.held_out] >= 0]
    scores: dict[str, float] = {}
    if len(rows):
        held = encode(one.module.to(run.device), run.batches.plain(rows), run.device)
        scores = cluster_scores(held.prediction, run.data.labels[held.row])
    return Candidate(
        model=one.name, score=score, loss=None, weight=float(kept), measured_on=measured_on,
        held_out=scores or None,
    )  # fmt: skip

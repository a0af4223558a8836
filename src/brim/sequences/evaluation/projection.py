"""Embeddings as points of a plane: the two directions in which they differ most.

Axes: n sequences, E embedding.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from brim.engine.device import resolve_device
from brim.sequences.evaluation.encode import embed_and_predict
from brim.sequences.evaluation.load import load_run
from brim.sequences.evaluation.run import reading_settings, scored_rows
from brim.sequences.training.data import Counted, open_data

MAX_POINTS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """Labelled sequences in the plane, evenly taken from those that an evaluation scores."""

    explained: tuple[float, float]  # share of the embeddings' variance along each axis
    points: Tensor  # (n, 2) float64
    labels: list[str]  # true classes
    predicted: list[str]  # classes, or "cluster K"


def project(
    run: Path | str,
    corpus: Path | str,
    *,
    device: str = "auto",
    progress: Counted | None = None,
    limit: int = MAX_POINTS,
) -> Projection:
    """Embed at most so many of the sequences that `evaluate` scores, and lay them out in the plane."""
    where, loaded, data = resolve_device(device), load_run(run), open_data(corpus)
    rows = scored_rows(loaded, data)
    rows = rows[:: max(1, math.ceil(len(rows) / limit))]
    config = reading_settings(loaded, data)
    with data.batches(config, where, rows) as batches:
        source = batches.view(rows, shuffle=False)
        (_, embedding), prediction = embed_and_predict(loaded.module.to(where), source, where, progress)
    points, explained = principal_plane(embedding)
    names = loaded.about["classes"] if config.mode == "supervised" else None
    return Projection(
        explained=explained,
        points=points,
        labels=[data.classes[number] for number in data.labels[rows].tolist()],
        predicted=[f"cluster {number}" if names is None else names[number] for number in prediction.tolist()],
    )


def principal_plane(embedding: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """(n, 2) float64 along the two principal axes, and the share of the variance along each.

    Which way an axis points is free; here its largest part is positive, so that the same embeddings look the same.
    """
    centred = embedding.double() - embedding.double().mean(0)
    _, spread, axes = torch.linalg.svd(centred, full_matrices=False)  # axes are rows
    axes = axes[:2] * torch.where(axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0)
    points = torch.nn.functional.pad(centred @ axes.T, (0, 2 - len(axes)))  # one feature or one sequence: a line
    total = float(spread.square().sum())
    shares = [float(one) ** 2 / total if total > 0 else 0.0 for one in spread[:2]] + [0.0, 0.0]
    return points, (shares[0], shares[1])

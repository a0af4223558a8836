"""How much of the classes a frozen encoder knows: one linear layer on its embeddings, by logistic regression.

Axes: n sequences, E embedding, K classes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from brim.sequences.evaluation.scores import accuracy

_DECAY = 1e-3  # of squared weights, on embeddings of unit spread
_STEPS = 200


def probe_accuracy(known: Tensor, labels: Tensor, asked: Tensor, truth: Tensor) -> float:
    """Share of the items asked about whose class a layer fitted to the known ones tells.

    known, asked   (n, E)  embeddings; spread and mean are taken from the known ones
    labels, truth  (n,)    int64
    """
    mean, std = known.double().mean(0), known.double().std(0, correction=0)
    scale = torch.where(std > 0, 1 / std, 0.0)
    layer = _fit((known.double() - mean) * scale, labels)
    logits = functional.linear((asked.double() - mean) * scale, layer[:, :-1], layer[:, -1])
    return accuracy(logits.argmax(-1), truth)


def _fit(points: Tensor, labels: Tensor) -> Tensor:
    """(K, E + 1) weights and biases with the least cross entropy; convex, so the start does not matter."""
    layer = torch.zeros(int(labels.max()) + 1, points.shape[1] + 1, dtype=points.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([layer], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        solver.zero_grad()
        logits = functional.linear(points, layer[:, :-1], layer[:, -1])
        value = functional.cross_entropy(logits, labels) + _DECAY * layer[:, :-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    solver.step(loss)  # type: ignore[no-untyped-call]
    return layer.detach()

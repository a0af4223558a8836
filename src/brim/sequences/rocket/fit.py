"""Fits the heads of rocket features in closed form, compares them by left-out predictions, and weighs their average.

Axes: n training sequences, m of them with a left-out prediction, F features, H heads, K outputs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from brim.engine.device import stream
from brim.engine.rows import HOST
from brim.errors import ConfigError
from brim.sequences.rocket.kernels import Floats
from brim.sequences.rocket.model import CHUNK, VIEWS, Rocket, RocketFeatures, RocketTask, as_frames
from brim.sequences.rocket.ridge import MAX_DUAL, Ridge, block, fit_dual, fit_streamed, standardisation

HEADS: Mapping[str, tuple[str, ...]] = {
    "rocket": ("frames",),
    "rocket + hydra": ("frames", "hydra"),
    "rocket + steps + hydra": ("frames", "steps", "hydra"),
    "rocket + steps + hydra + statistics": ("frames", "steps", "hydra", "statistics"),
    "statistics": ("statistics",),
}
NUM_FEATURES = 10_000  # of the kernels of each view
_FITTED_ON = 2_000  # sequences that thresholds are drawn from, at most,
_FITTED_NUMBERS = 1 << 25  # and numbers in them
_LARGE_FEATURES = {"cpu": 1_700, "cuda": 3_400}  # of each view of a large corpus: the Gram matrix is square in them
_MAX_STATISTICS = 2_000  # in that matrix
_ASIDE = 0.15  # share of a large corpus that chooses the penalty
_EMBEDDING = 64
# Belief in each head before it is compared, in items: statistics alone do well by chance where there are few items.
_PRIOR = {
    "rocket": 4.0,
    "rocket + hydra": 4.0,
    "rocket + steps + hydra": 4.0,
    "rocket + steps + hydra + statistics": 0.4,
    "statistics": 0.2,
}
_STATISTICS_WEIGHT = 0.4  # of their block beside one of kernels
_SHARPNESS = torch.logspace(-1, 2.5, 71, dtype=torch.float64)  # factors of scores that are tried

FitProgress = Callable[[int, int], None]  # sequences done, of how many


class HeadScore(NamedTuple):
    """How a head does on sequences that it was not fitted on."""

    name: str
    score: float  # accuracy; for regression R²
    loss: float  # cross entropy; for regression the mean squared error
    weight: float  # in the average


@dataclass(frozen=True, kw_only=True, eq=False)
class RocketFit:
    module: Rocket  # on the host
    heads: tuple[HeadScore, ...]
    rows: Tensor  # (m,) int64, the training sequences of left_out
    left_out: Tensor  # (m, K) float64, probabilities or values by models that were fitted without the sequence

    def predict_proba(self, sequences: Sequence[Floats | Tensor]) -> Tensor:
        """(n, K) float32 of ragged sequences: probabilities, or values for regression."""
        return self.module.predict_proba(sequences)

    def predict(self, sequences: Sequence[Floats | Tensor]) -> Tensor:
        """(n,) int64 classes; for regression (n, K) values."""
        return self.module.predict(sequences)


@torch.no_grad()
def fit_rocket(
    sequences: Sequence[Floats | Tensor],
    labels: Tensor | Sequence[int] | Sequence[float],
    *,
    task: RocketTask = "classification",
    num_classes: int | None = None,
    groups: Tensor | Sequence[int] | None = None,
    aside: Tensor | None = None,
    num_features: int = NUM_FEATURES,
    heads: Sequence[str] = tuple(HEADS),
    seed: int = 0,
    device: torch.device = HOST,
    progress: FitProgress | None = None,
) -> RocketFit:
    """Fit a classifier, or a regression, to ragged sequences.

    sequences  n times (T, D); read one after another, so they may come from disk
    labels     (n,) class numbers; for regression (n,) or (n, K) values
    groups     (n,) numbers of groups, whose sequences are left out together when heads are compared
    aside      (n,) bool, of more than 2048: those that choose the penalty; None: drawn at random, whole groups of them
    heads      names among HEADS

    Up to 2048 sequences are left out one by one, or group by group, in closed form. More are fitted in one pass.
    """
    if len(sequences) < 2:
        raise ConfigError(f"{len(sequences)} sequences to fit, expected at least 2")
    targets, truth = _targets(labels, task, num_classes, len(sequences))
    group = None if groups is None else torch.as_tensor(groups, dtype=torch.int64)
    if group is not None and len(torch.unique(group)) < 2:
        group = None  # one group cannot be left out
    large = len(sequences) > MAX_DUAL
    if large:
        num_features = min(num_features, _LARGE_FEATURES[device.type])
    features = fit_features(sequences, num_features, seed, {view for name in heads for view in HEADS[name]})
    chunks = _chunks(sequences, features, device, progress)
    fits, sample = (
        _fit_large(chunks, targets, _aside(len(sequences), group, seed) if aside is None else aside, features, device)
        if large
        else _fit_small(chunks, targets, group, features, heads)
    )
    rows = next(iter(fits.values())).rows
    left_out, sharp, scores = _compare(fits, task, targets[rows], truth[rows])
    stacked = _stack(fits, features, sharp, torch.tensor([one.weight for one in scores]))
    module = Rocket(features, {**stacked, **principal_axes(sample)}, task)
    return RocketFit(module=module, heads=scores, rows=rows, left_out=left_out)


def _targets(
    labels: Tensor | Sequence[int] | Sequence[float], task: RocketTask, num_classes: int | None, num: int
) -> tuple[Tensor, Tensor]:
    """(n, K) float64 targets of the ridge, and the truth: (n,) int64 classes or (n, K) values."""
    values = torch.as_tensor(labels)
    if len(values) != num:
        raise ConfigError(f"{len(values)} labels for {num} sequences")
    if task == "regression":
        truth = values.double().reshape(num, -1)
        if not bool(truth.isfinite().all()):
            raise ConfigError("a value to predict is NaN or Inf; remove such sequences")
        return truth, truth
    truth = values.long()
    count = max(int(truth.max()) + 1, num_classes or 0)
    if int(truth.min()) < 0 or len(torch.unique(truth)) < 2:
        raise ConfigError("classification needs labels of at least two classes, numbered from 0")
    return 2 * functional.one_hot(truth, count).double() - 1, truth


# Features


def fit_features(
    sequences: Sequence[Floats | Tensor],
    num_features: int = NUM_FEATURES,
    seed: int = 0,
    views: Collection[str] = VIEWS,
) -> RocketFeatures:
    """Normalisation and kernels from some of the sequences."""
    order = torch.randperm(len(sequences), generator=stream(seed, "rocket", device=HOST)).tolist()
    chosen: dict[int, Floats] = {}
    while len(chosen) < min(len(order), _FITTED_ON) and sum(one.size for one in chosen.values()) < _FITTED_NUMBERS:
        chosen[order[len(chosen)]] = as_frames(sequences[order[len(chosen)]])
    some = [chosen[row] for row in sorted(chosen)]
    dim = some[0].shape[1]
    for one in some:
        as_frames(one, dim)
    count = sum(map(len, some))
    mean = torch.stack([torch.from_numpy(one).sum(0, dtype=torch.float64) for one in some]).sum(0) / count
    squares = [torch.from_numpy(one).double().sub(mean).square().sum(0) for one in some]
    mean, scale = standardisation(mean, torch.stack(squares).sum(0) / count)
    scale = torch.where(scale > 0, scale, 1.0)  # a constant channel is only shifted
    return RocketFeatures.fit(some, mean.float(), scale.float(), num_features, seed, views)


def _chunks(
    sequences: Sequence[Floats | Tensor], features: RocketFeatures, device: torch.device, progress: FitProgress | None
) -> Iterator[Tensor]:
    for first in range(0, len(sequences), CHUNK):
        rows = range(first, min(first + CHUNK, len(sequences)))
        yield features.of([as_frames(sequences[row], features.dim) for row in rows], device)
        if progress is not None:
            progress(rows.stop, len(sequences))


def _columns(features: RocketFeatures) -> dict[str, slice]:
    at, columns = 0, {}
    for view, width in features.widths.items():
        columns[view] = slice(at, at + width)
        at += width
    return columns


# Heads


def _fit_small(
    chunks: Iterator[Tensor], targets: Tensor, groups: Tensor | None, features: RocketFeatures, heads: Sequence[str]
) -> tuple[dict[str, Ridge], Tensor]:
    whole = torch.cat(list(chunks))
    blocks = {view: block(whole[:, columns]) for view, columns in _columns(features).items()}
    if len(blocks) > 1:
        blocks["statistics"] = blocks["statistics"].weighted(_STATISTICS_WEIGHT)
    return {name: fit_dual([blocks[view] for view in HEADS[name]], targets, groups) for name in heads}, whole


def _fit_large(
    chunks: Iterator[Tensor],
    targets: Tensor,
    aside: Tensor,
    features: RocketFeatures,
    device: torch.device,
) -> tuple[dict[str, Ridge], Tensor]:
    """One head on all features; what is kept is their Gram matrix."""
    name = "rocket + steps + hydra" + (" + statistics" if features.widths["statistics"] <= _MAX_STATISTICS else "")
    name = name if features.kernels else "statistics"
    used = sum(features.widths[view] for view in HEADS[name])  # statistics come last
    kept: list[Tensor] = []

    def passing() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        at = 0
        for chunk in chunks:
            rows = slice(at, at + len(chunk))
            at += len(chunk)
            if sum(map(len, kept)) < MAX_DUAL // 2:
                kept.append(chunk.cpu())
            yield chunk[:, :used], targets[rows], aside[rows]

    ridge = fit_streamed(passing(), used, targets.shape[1], device)
    return {name: ridge}, torch.cat(kept)


def _aside(count: int, groups: Tensor | None, seed: int) -> Tensor:
    """(n,) bool: a random share of the sequences, or of the groups."""
    group = torch.arange(count) if groups is None else torch.unique(groups, return_inverse=True)[1]
    order = torch.rand(int(group.max()) + 1, generator=stream(seed, "aside", device=HOST))
    return (order < order.quantile(_ASIDE))[group] if len(order) < 10_000 else (order < _ASIDE)[group]


def _stack(fits: Mapping[str, Ridge], features: RocketFeatures, sharp: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Weights of all heads over all features; sharp, (H,), multiplies a head's scores."""
    columns = _columns(features)
    weight = torch.zeros(len(fits), sum(features.widths.values()), next(iter(fits.values())).bias.shape[0])
    bias = []
    for number, (name, ridge) in enumerate(fits.items()):
        at = 0
        for view in HEADS[name]:
            place = columns[view]
            weight[number, place] = ridge.weight[at : at + place.stop - place.start] * sharp[number]
            at += place.stop - place.start
        bias.append(ridge.bias * sharp[number])
    return {"weight": weight, "bias": torch.stack(bias), "share": share.float()}


def _compare(
    fits: Mapping[str, Ridge], task: RocketTask, targets: Tensor, truth: Tensor
) -> tuple[Tensor, Tensor, tuple[HeadScore, ...]]:
    """Left-out predictions of the average, (m, K); a factor for each head's scores, (H,); and how good each head is."""
    if task == "regression":
        each = torch.stack([ridge.left_out for ridge in fits.values()])  # (H, m, K)
        spread = targets.var(0, correction=0).clamp(min=1e-30)
        loss = ((each - targets).square().mean(1) / spread).mean(1)
        share = (loss <= 1.05 * loss.min()).double()
        share /= share.sum()
        scores, sharp = 1 - loss, torch.ones(len(each))
        left_out = (share[:, None, None] * each).sum(0)
    else:
        pairs = [calibrate(ridge.left_out, truth) for ridge in fits.values()]
        sharp = torch.tensor([factor for factor, _ in pairs])
        each = torch.stack([probability for _, probability in pairs])
        of_truth = each[:, torch.arange(len(truth)), truth]  # (H, m)
        share = mixture(of_truth, torch.tensor([_PRIOR[name] for name in fits]).double())
        loss, scores = (
            of_truth.clamp(min=1e-12).log().mean(1).abs(),
            (each.argmax(-1) == truth).double().mean(1),
        )
        left_out = (share[:, None, None] * each).sum(0)
    rows = zip(fits, scores.tolist(), loss.tolist(), share.tolist(), strict=True)
    return left_out, sharp, tuple(HeadScore(*row) for row in rows)


def calibrate(scores: Tensor, truth: Tensor) -> tuple[float, Tensor]:
    """The factor of left-out scores, (m, K), with the least cross entropy, and the probabilities it gives."""
    losses = [float(functional.cross_entropy(scores * factor, truth)) for factor in _SHARPNESS]
    factor = float(_SHARPNESS[losses.index(min(losses))])
    return factor, (scores * factor).softmax(-1)


def mixture(of_truth: Tensor, prior: Tensor) -> Tensor:
    """(H,) weights of models in the average with the most likely truth, from their left-out probabilities (H, m).

    prior, (H,), counts for so many items that each model alone explains.
    """
    share = prior / prior.sum()
    for _ in range(100):  # expectation maximisation
        own = share[:, None] * of_truth.double().clamp(min=1e-12)
        share = (own / own.sum(0)).sum(1) + prior
        share /= share.sum()
    return share


def principal_axes(sample: Tensor) -> dict[str, Tensor]:
    """Principal axes of features, which embeddings are coordinates along."""
    part = block(sample)
    values, vectors = torch.linalg.eigh(part.gram)
    width = min(_EMBEDDING, len(values))
    chosen = vectors[:, -width:].flip(1) / values[-width:].flip(0).clamp(min=1e-9).sqrt()
    plane = part.scale[:, None] * (part.z.T @ chosen.to(part.z)).double() / part.z.shape[1]
    return {"middle": part.mean.float().cpu(), "plane": plane.float().cpu()}

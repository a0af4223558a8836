"""Ridge regression in closed form, with leave-one-out or leave-one-group-out residuals for every penalty at once.

Axes: n items, F features, K outputs, S penalties. Features are standardised; the intercept is not penalised.

With Q = (Z Zᵀ / F + λ I)⁻¹ restricted to what the intercept leaves, the dual coefficients are C = Q Y, and the
residuals of items left out together are (Q of these items)⁻¹ C of these items: one eigendecomposition gives the
prediction of every item by a model that was fitted without it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brim.errors import ConfigError

PENALTIES = tuple(10 ** (exponent / 2) for exponent in range(-14, 3))  # relative to the features' mean square
_LEAST_STREAMED = 1e-4  # smaller ones are lost in the rounding of products in float32
_GATHERED = 1024
MAX_DUAL = 2048  # items; more are fitted by the Gram matrix of the features


class Ridge(NamedTuple):
    """A fitted linear map of features, on the host."""

    weight: Tensor  # (F, K) float32
    bias: Tensor  # (K,) float32
    penalty: float
    left_out: Tensor  # (m, K) float64, predictions of items by models fitted without them
    rows: Tensor  # (m,) int64, which items these are

    def __call__(self, features: Tensor) -> Tensor:
        """(n, K) float32."""
        return features @ self.weight.to(features.device) + self.bias.to(features.device)


class FeatureBlock(NamedTuple):
    """A group of features, standardised, and its share of the Gram matrix."""

    z: Tensor  # (n, F) float32
    mean: Tensor  # (F,) float64
    scale: Tensor  # (F,) float64
    gram: Tensor  # (n, n) float64

    def weighted(self, weight: float) -> "FeatureBlock":
        """The same features, with another weight beside those of other blocks."""
        root = weight**0.5
        return FeatureBlock(self.z * root, self.mean, self.scale * root, self.gram * weight)


def block(features: Tensor) -> FeatureBlock:
    """Standardise features, (n, F) float32 on any device."""
    mean, scale = standardisation(features.mean(0, dtype=torch.float64), features.var(0, correction=0))
    z = (features - mean.to(features)) * scale.to(features)
    return FeatureBlock(z, mean, scale, (z @ z.T).double() / features.shape[1])


def fit_dual(blocks: Sequence[FeatureBlock], targets: Tensor, groups: Tensor | None = None) -> Ridge:
    """Fit items held in memory; the penalty with the least squared error of left-out items is chosen.

    Every block has the same weight, however many features it has; the weights follow the order of the blocks.

    targets   (n, K)  float
    groups    (n,)    int64; items of a group are left out together. None: one by one
    """
    y = targets.to(blocks[0].z.device, torch.float64)
    gram = torch.stack([part.gram for part in blocks]).mean(0)
    values, vectors = torch.linalg.eigh(_spread_constant(gram))
    constant = int(vectors.sum(0).abs().argmax())  # the intercept's direction takes no penalty
    projected = vectors.T @ y
    best: tuple[float, float, Tensor, Tensor] | None = None
    for penalty in PENALTIES:
        inverse = 1 / (values.clamp(min=0) + penalty)
        inverse[constant] = 0
        dual = vectors @ (inverse[:, None] * projected)
        residual = _left_out_residuals(vectors, inverse, dual, groups)
        error = float(residual.square().mean())
        if best is None or error < best[0]:
            best = error, penalty, dual, residual
    assert best is not None
    _, penalty, dual, residual = best
    weights = [part.scale[:, None] * (part.z.T @ dual.to(part.z)).double() / part.z.shape[1] for part in blocks]
    weight = torch.cat(weights) / len(blocks)
    bias = y.mean(0) - torch.cat([part.mean for part in blocks]) @ weight
    return Ridge(weight.float().cpu(), bias.float().cpu(), penalty, (y - residual).cpu(), torch.arange(len(y)))


def standardisation(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale, (F,) float64 each; a constant feature is scaled to 0."""
    std = variance.double().clamp(min=0).sqrt()
    return mean.double(), torch.where(std > 1e-6 * (1 + mean.abs()), 1 / std, 0.0)


def _spread_constant(gram: Tensor) -> Tensor:
    """The Gram matrix with the constant vector, which has eigenvalue 0, moved away from its other null vectors."""
    return gram + gram.diagonal().sum() / len(gram)


def _left_out_residuals(vectors: Tensor, inverse: Tensor, dual: Tensor, groups: Tensor | None) -> Tensor:
    if groups is None:
        diagonal = (vectors.square() @ inverse)[:, None]
        return dual / diagonal.clamp(min=1e-12)
    residual = torch.empty_like(dual)
    for group in torch.unique(groups):
        rows = (groups == group).nonzero().flatten()
        own = vectors[rows]
        block = (own * inverse) @ own.T
        residual[rows] = torch.linalg.lstsq(block, dual[rows]).solution
    return residual


# More items than fit


def fit_streamed(
    chunks: Iterable[tuple[Tensor, Tensor, Tensor]], width: int, outputs: int, device: torch.device
) -> Ridge:
    """Fit items that pass by once; the penalty is chosen on those set aside, which are then fitted too.

    chunks  features (m, F) float32, targets (m, K), aside (m,) bool: set aside to choose the penalty
    """
    size = width + outputs
    gram = torch.zeros(2, size, size, dtype=torch.float64, device=device)  # fitted, set aside
    sums, counts = torch.zeros(2, size, dtype=torch.float64, device=device), torch.zeros(2, dtype=torch.float64)
    aside_features: list[Tensor] = []
    aside_targets: list[Tensor] = []
    rows: list[Tensor] = []
    at = 0
    for features, targets, aside in _gathered(chunks):
        both = torch.cat([features.to(device), targets.to(device, torch.float32)], 1)
        for part, chosen in enumerate((~aside, aside)):
            own = both[chosen.to(device)]
            gram[part] += (own.T @ own).double()
            sums[part] += own.sum(0, dtype=torch.float64)
            counts[part] += len(own)
        aside_features.append(features[aside].cpu())
        aside_targets.append(targets[aside].cpu().double())
        rows.append(at + aside.nonzero().flatten())
        at += len(aside)
    held, truth = torch.cat(aside_features), torch.cat(aside_targets)

    def left_out_of(ridge: Ridge) -> Tensor:
        return ridge(held).double()

    fit = _least_error(
        lambda penalty: _solve(gram[0], sums[0], float(counts[0]), width, penalty),
        lambda ridge: float((left_out_of(ridge) - truth).square().mean()),
    )
    final = _solve(gram.sum(0), sums.sum(0), float(counts.sum()), width, fit.penalty)
    if final is None:
        raise _too_alike()
    return final._replace(left_out=left_out_of(fit), rows=torch.cat(rows))


def _least_error(solve: Callable[[float], Ridge | None], error: Callable[[Ridge], float]) -> Ridge:
    """The fit whose penalty has the least error, found downhill: a fit takes seconds, and errors have one valley."""
    penalties = [one for one in PENALTIES if one >= _LEAST_STREAMED]
    known: dict[int, tuple[float, Ridge | None]] = {}

    def of(place: int) -> tuple[float, int]:
        if place not in known:
            ridge = solve(penalties[place])
            known[place] = (torch.inf if ridge is None else error(ridge), ridge)
        return known[place][0], -place  # where none could be solved, larger penalties

    at, step = len(penalties) // 2, 2
    while step:
        best = min((place for place in (at - step, at, at + step) if 0 <= place < len(penalties)), key=of)
        step, at = (step // 2 if best == at else step), best
    ridge = known[at][1]
    if ridge is None:
        raise _too_alike()
    return ridge


def _too_alike() -> ConfigError:
    return ConfigError("the features of these sequences are too alike for a regression; check the data")


def _gathered(chunks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Chunks joined to at least 1024 items: adding to the Gram matrix takes as long as multiplying a hundred."""
    joined: list[tuple[Tensor, Tensor, Tensor]] = []
    for chunk in chunks:
        joined.append(chunk)
        if sum(len(one) for one, _, _ in joined) >= _GATHERED:
            yield tuple(map(torch.cat, zip(*joined, strict=True)))  # type: ignore[misc]
            joined = []
    if joined:
        yield tuple(map(torch.cat, zip(*joined, strict=True)))  # type: ignore[misc]


def _solve(gram: Tensor, sums: Tensor, count: float, width: int, penalty: float) -> Ridge | None:
    """None where the penalty is lost in the rounding of the Gram matrix."""
    mean = sums / count
    covariance = gram / count - torch.outer(mean, mean)
    shift, scale = standardisation(mean[:width], covariance.diagonal()[:width])
    system = scale[:, None] * covariance[:width, :width] * scale
    system.diagonal().add_(penalty * width / count)  # as in the dual, where Z Zᵀ is divided by F
    factor, failed = torch.linalg.cholesky_ex(system)
    if bool(failed):
        return None
    weight = scale[:, None] * torch.cholesky_solve(scale[:, None] * covariance[:width, width:], factor)
    bias = mean[width:] - shift @ weight
    nothing = torch.empty(0, gram.shape[0] - width)
    return Ridge(weight.float().cpu(), bias.float().cpu(), penalty, nothing, torch.empty(0).long())

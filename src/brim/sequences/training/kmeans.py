"""k-means on the device: several k-means++ starts at once, then Lloyd's iterations until nothing moves.

Axes: N points, E coordinates, K clusters, R restarts. All restarts share every pass over the points, in chunks, as
matrix products: sums come from one-hot matrices and not from atomic adds, so that a seed gives the same clusters
every time on one device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import stream
from brim.errors import ConfigError

_CHUNK_NUMBERS = {"cpu": 1 << 21, "cuda": 1 << 25}  # distances computed at once
_STEPS = 100  # Lloyd iterations, at most
_TOLERANCE = 1e-4  # squared movement of all centres at which to stop, relative to the points' variance
_LEAST = 1e-30  # squared distance: copies of a centre are not drawn while there are other points


class Clusters(NamedTuple):
    """The best of all restarts, on the device of the points."""

    labels: Tensor  # (N,) int64
    centres: Tensor  # (K, E) float32
    inertia: float  # sum of squared distances to the nearest centres
    steps: int  # of Lloyd


class _Nearest(NamedTuple):
    label: Tensor  # (N, R) int64
    distance: Tensor  # (N, R) float32, squared
    sums: Tensor  # (R, K, E) float32
    counts: Tensor  # (R, K) float32


@torch.no_grad()
def kmeans(points: Tensor, clusters: int, *, restarts: int = 8, seed: int = 0) -> Clusters:
    """Cluster points, (N, E) any float, finite; of all random starts the one with the lowest inertia is kept.

    The result depends on these values and the kind of device alone.
    """
    if points.ndim != 2 or not points.is_floating_point():
        raise ConfigError(f"points of shape {list(points.shape)} and {points.dtype}, expected (N, E) floats")
    if not 1 <= clusters <= len(points):
        message = f"must be between 1 and the {len(points)} items"
        raise ConfigError(message, field="clusters", value=clusters, code="conflict")
    if not bool(torch.isfinite(points).all()):
        raise ConfigError("points hold NaN or Inf", hint="lower {learning_rate}")
    with torch.autocast(points.device.type, enabled=False):
        middle = points.mean(0, dtype=torch.float32)
        x = points.float() - middle  # squares of coordinates far from 0 would lose their differences to rounding
        centres, steps = _lloyd(x, _start_centres(x, clusters, restarts, seed))
        nearest = _nearest(x, centres)
        inertias = nearest.distance.sum(0, dtype=torch.float64)
        best = int(inertias.argmin())
        return Clusters(nearest.label[:, best].clone(), centres[best] + middle, float(inertias[best]), steps)


# Starts


def _start_centres(x: Tensor, clusters: int, restarts: int, seed: int) -> Tensor:
    """(R, K, E) k-means++: each next centre is a point drawn by its squared distance to the nearest earlier centre."""
    rng = stream(seed, "kmeans", device=x.device)
    shape = (restarts, len(x))
    chosen = torch.randint(len(x), (restarts,), device=x.device, generator=rng)
    centres = [x[chosen]]
    distance = torch.full(shape, torch.inf, device=x.device)
    for _ in range(clusters - 1):
        for part, rows in _chunks(x, restarts):
            distance[:, rows] = distance[:, rows].minimum(_distances(part, centres[-1][:, None])[..., 0].T)
        # the smallest exponential draw over weight falls on a point in proportion to its weight, without running sums
        draws = torch.empty(shape, device=x.device).exponential_(generator=rng)
        centres.append(x[(draws / distance.clamp(min=_LEAST)).argmin(1)])
    return torch.stack(centres, 1)


# Steps


def _lloyd(x: Tensor, centres: Tensor) -> tuple[Tensor, int]:
    tolerance = _TOLERANCE * x.var(0, correction=0).mean()
    for step in range(_STEPS):
        moved = _means(x, _nearest(x, centres))
        movement = (moved - centres).square().sum((1, 2)).max()
        centres = moved
        if bool(movement <= tolerance):
            return centres, step + 1
    return centres, _STEPS


def _means(x: Tensor, nearest: _Nearest) -> Tensor:
    """New centres; an empty cluster restarts at one of the points farthest from their own centres."""
    empty = nearest.counts == 0
    means = nearest.sums / nearest.counts.clamp(min=1)[..., None]
    if not bool(empty.any()):
        return means
    far = nearest.distance.topk(nearest.counts.shape[1], dim=0).indices.T  # (R, K)
    turn = (empty.cumsum(1) - 1).clamp(min=0)  # the first empty cluster takes the farthest point, and so on
    return torch.where(empty[..., None], x[far.gather(1, turn)], means)


def _nearest(x: Tensor, centres: Tensor) -> _Nearest:
    num_restarts, num_clusters, width = centres.shape
    label = torch.empty(len(x), num_restarts, dtype=torch.int64, device=x.device)
    distance = torch.empty(len(x), num_restarts, device=x.device)
    sums = torch.zeros(num_restarts * num_clusters, width, device=x.device)
    counts = torch.zeros(num_restarts, num_clusters, device=x.device)
    for part, rows in _chunks(x, num_restarts * num_clusters):
        distance[rows], label[rows] = _distances(part, centres).min(-1)
        member = label[rows, :, None] == torch.arange(num_clusters, device=x.device)
        sums += member.flatten(1).to(x.dtype).T @ part
        counts += member.sum(0)
    return _Nearest(label, distance, sums.view(centres.shape), counts)


def _distances(part: Tensor, centres: Tensor) -> Tensor:
    """(n, R, K) squared distances of points (n, E) to centres (R, K, E)."""
    products = part @ centres.flatten(0, 1).T
    squares = part.square().sum(1)[:, None, None] + centres.square().sum(-1)
    return (squares - 2 * products.view(len(part), *centres.shape[:2])).clamp(min=0)


def _chunks(x: Tensor, width: int) -> Iterator[tuple[Tensor, slice]]:
    size = max(1, _CHUNK_NUMBERS.get(x.device.type, 1 << 21) // max(width, x.shape[1]))
    for start in range(0, len(x), size):
        yield x[start : start + size], slice(start, min(start + size, len(x)))

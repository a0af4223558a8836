"""Embeddings and predictions of a network, in the order of the rows; and the feature statistics it is normalised with.

Axes: n sequences, B of a batch, T frames, D features, E embedding, K classes or clusters.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from brim.engine.device import Halving
from brim.engine.training import BatchSource, Ranks
from brim.sequences.corpus import CountProgress
from brim.sequences.model import Encoder, Network, frame_mask


class RowValues(NamedTuple):
    """One value per sequence, sorted by row, on the host."""

    row: Tensor  # (n,) int64, sorted
    value: Tensor  # (n, …)


class FeatureStatistics(NamedTuple):
    """Mean and standard deviation of each feature over all frames, (D,) float32."""

    mean: Tensor
    std: Tensor


def embed_rows(
    encoder: Encoder,
    source: BatchSource | None,
    device: torch.device,
    progress: CountProgress | None = None,
    ranks: Ranks | None = None,
) -> RowValues:
    """Embeddings, (n, E) float32."""
    return _run(encoder, lambda frames, length: encoder(frames, length).embedding, source, device, progress, ranks)


def predict(
    module: Network,
    source: BatchSource | None,
    device: torch.device,
    progress: CountProgress | None = None,
    ranks: Ranks | None = None,
) -> RowValues:
    """The most likely class or cluster, (n,) int64."""
    return _run(module, lambda frames, length: module(frames, length).argmax(-1), source, device, progress, ranks)


def embed_and_predict(
    module: Network,
    source: BatchSource | None,
    device: torch.device,
    progress: CountProgress | None = None,
    ranks: Ranks | None = None,
) -> tuple[RowValues, Tensor]:
    """Embeddings and the most likely class or cluster of each, from one pass."""

    def both(frames: Tensor, length: Tensor) -> Tensor:
        embedding = module.embedding(frames, length)
        return torch.cat([embedding, module.head(embedding).argmax(-1, keepdim=True).to(embedding.dtype)], 1)

    row, value = _run(module, both, source, device, progress, ranks)
    return RowValues(row, value[:, :-1].contiguous()), value[:, -1].long()


def _run(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    source: BatchSource | None,
    device: torch.device,
    progress: CountProgress | None,
    ranks: Ranks | None,
) -> RowValues:
    """Outputs for the source's sequences; with several ranks each computes its own, and all get all."""
    mine = None if source is None else _run_own(module, forward, source, device, progress)
    parts = [part for part in ([mine] if ranks is None else ranks.all_of(mine)) if part is not None]
    if len(parts) == 1:
        return parts[0]
    row, order = torch.cat([part.row for part in parts]).sort()
    return RowValues(row, torch.cat([part.value for part in parts])[order])


@torch.no_grad()
def _run_own(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    source: BatchSource,
    device: torch.device,
    progress: CountProgress | None,
) -> RowValues:
    """In full precision and without dropout; the module's mode is restored."""

    def run(batch: dict[str, Tensor], part: range) -> Tensor:
        at = slice(part.start, part.stop)
        return forward(batch["frames"][at], batch["length"][at])

    training, halving, done = module.training, Halving(source.batch_size, device), 0
    rows, values = [], []
    module.eval()
    try:
        with closing(source.epoch(0)) as batches:  # type: ignore[type-var]
            for batch in batches:
                values += halving.run(partial(run, batch), range(len(batch["item"])))
                rows.append(batch["item"])
                done += len(rows[-1])
                if progress is not None:
                    progress(done, source.num_items)
    finally:
        module.train(training)
    row, order = torch.cat(rows).cpu().sort()
    return RowValues(row, torch.cat(values).cpu()[order])


def measure(source: BatchSource | None, device: torch.device, ranks: Ranks | None = None) -> FeatureStatistics:
    """Mean and standard deviation of every feature over all frames, in one pass; each rank reads its own."""
    mine = None if source is None else _moments(source, device)
    parts = [part for part in ([mine] if ranks is None else ranks.all_of(mine)) if part is not None]
    mean, variance, _num = parts[0] if len(parts) == 1 else _joined(parts)
    # rounding gives a constant feature a tiny deviation, which normalisation would scale up to 1
    spread = torch.where(variance > 1e-12 * mean.square(), variance.sqrt(), 0.0)
    return FeatureStatistics(mean.float(), spread.float())


class _Moments(NamedTuple):
    mean: Tensor  # (D,) float64, on the host
    variance: Tensor  # (D,) float64
    frames: Tensor  # () int64, how many


def _joined(parts: list[_Moments]) -> _Moments:
    """Moments of all frames, from the moments of parts."""
    count = torch.stack([part.frames for part in parts])  # (parts,)
    share = (count / count.sum()).double()[:, None]
    mean = (share * torch.stack([part.mean for part in parts])).sum(0)
    squares = torch.stack([part.variance + (part.mean - mean).square() for part in parts])
    return _Moments(mean, (share * squares).sum(0), count.sum())


@torch.no_grad()
def _moments(source: BatchSource, device: torch.device) -> _Moments:
    """Mean and variance of every feature.

    Sums are of differences from the first batch's mean, in float64 between batches: the squares of features far from 0
    would lose their variance to rounding.
    """
    middle: Tensor | None = None
    sums = squares = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with closing(source.epoch(0)) as batches:  # type: ignore[type-var]
        for batch in batches:
            frames, length = batch["frames"].float(), batch["length"]
            total = length.sum()
            middle = frames.sum((0, 1)) / total if middle is None else middle  # padding is 0
            deviation = (frames - middle).masked_fill_(~frame_mask(length, frames.shape[1]).unsqueeze(-1), 0)
            sums = sums + deviation.sum((0, 1)).double()
            squares = squares + deviation.square().sum((0, 1)).double()
            count = count + total
    assert middle is not None
    mean = sums / count
    variance = (squares / count - mean.square()).clamp(min=0)
    return _Moments((middle + mean).cpu(), variance.cpu(), count.cpu())

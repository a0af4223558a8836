"""What a trained network says of sequences, in the order of their rows; and the statistics it is given before.

Axes: n sequences asked about, B of a batch, T frames, D features, E embedding, K classes or clusters.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from brim.engine.device import Halving
from brim.engine.training import Ranks
from brim.sequences.model.network import Encoder, Network, frame_mask
from brim.sequences.training.data import Counted, Source


class Answers(NamedTuple):
    """On the host, one row for each sequence, in the order of their rows."""

    row: Tensor  # (n,) int64, sorted
    value: Tensor  # (n, …)


class Statistics(NamedTuple):
    """Of each feature over all frames, (D,) float32."""

    mean: Tensor
    std: Tensor


def embed(
    encoder: Encoder,
    source: Source | None,
    device: torch.device,
    progress: Counted | None = None,
    ranks: Ranks | None = None,
) -> Answers:
    """Embeddings, (n, E) float32."""
    return _answer(encoder, lambda frames, length: encoder(frames, length).embedding, source, device, progress, ranks)


def predict(
    module: Network,
    source: Source | None,
    device: torch.device,
    progress: Counted | None = None,
    ranks: Ranks | None = None,
) -> Answers:
    """The likeliest class or cluster, (n,) int64."""
    return _answer(module, lambda frames, length: module(frames, length).argmax(-1), source, device, progress, ranks)


def embed_and_predict(
    module: Network,
    source: Source | None,
    device: torch.device,
    progress: Counted | None = None,
    ranks: Ranks | None = None,
) -> tuple[Answers, Tensor]:
    """Embeddings and the likeliest class or cluster of each, from one pass."""

    def both(frames: Tensor, length: Tensor) -> Tensor:
        embedding = module.embedding(frames, length)
        return torch.cat([embedding, module.head(embedding).argmax(-1, keepdim=True).to(embedding.dtype)], 1)

    row, value = _answer(module, both, source, device, progress, ranks)
    return Answers(row, value[:, :-1].contiguous()), value[:, -1].long()


def _answer(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    source: Source | None,
    device: torch.device,
    progress: Counted | None,
    ranks: Ranks | None,
) -> Answers:
    """What the module says of the source's sequences; of several ranks each asks about its own, and all know all."""
    mine = None if source is None else _ask(module, forward, source, device, progress)
    parts = [part for part in ([mine] if ranks is None else ranks.all_of(mine)) if part is not None]
    if len(parts) == 1:
        return parts[0]
    row, order = torch.cat([part.row for part in parts]).sort()
    return Answers(row, torch.cat([part.value for part in parts])[order])


@torch.no_grad()
def _ask(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    source: Source,
    device: torch.device,
    progress: Counted | None,
) -> Answers:
    """In full precision and without dropout; the module's mode is put back."""

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
    return Answers(row, torch.cat(values).cpu()[order])


def measure(source: Source | None, device: torch.device, ranks: Ranks | None = None) -> Statistics:
    """Mean and standard deviation of every feature over all frames, in one pass; each rank looks at its own."""
    mine = None if source is None else _moments(source, device)
    parts = [part for part in ([mine] if ranks is None else ranks.all_of(mine)) if part is not None]
    mean, variance, _num = parts[0] if len(parts) == 1 else _joined(parts)
    # rounding leaves a trace of spread where there is none, which would be blown up to 1
    spread = torch.where(variance > 1e-12 * mean.square(), variance.sqrt(), 0.0)
    return Statistics(mean.float(), spread.float())


class _Moments(NamedTuple):
    mean: Tensor  # (D,) float64, on the host
    variance: Tensor  # (D,) float64
    frames: Tensor  # () int64, how many


def _joined(parts: list[_Moments]) -> _Moments:
    """Of all frames, from those of parts of them."""
    count = torch.stack([part.frames for part in parts])  # (parts,)
    share = (count / count.sum()).double()[:, None]
    mean = (share * torch.stack([part.mean for part in parts])).sum(0)
    away = torch.stack([part.variance + (part.mean - mean).square() for part in parts])
    return _Moments(mean, (share * away).sum(0), count.sum())


@torch.no_grad()
def _moments(source: Source, device: torch.device) -> _Moments:
    """Mean and variance of every feature.

    Sums are of differences from the first batch's mean, in float64 between batches: squares of features far from 0
    would drown their spread.
    """
    middle: Tensor | None = None
    sums = squares = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with closing(source.epoch(0)) as batches:  # type: ignore[type-var]
        for batch in batches:
            frames, length = batch["frames"].float(), batch["length"]
            total = length.sum()
            middle = frames.sum((0, 1)) / total if middle is None else middle  # padding is 0
            away = (frames - middle).masked_fill_(~frame_mask(length, frames.shape[1]).unsqueeze(-1), 0)
            sums = sums + away.sum((0, 1)).double()
            squares = squares + away.square().sum((0, 1)).double()
            count = count + total
    assert middle is not None
    mean = sums / count
    variance = (squares / count - mean.square()).clamp(min=0)
    return _Moments((middle + mean).cpu(), variance.cpu(), count.cpu())

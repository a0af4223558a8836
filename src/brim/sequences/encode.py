"""What a trained network says of sequences, in the order of their rows; and the statistics it is given before.

Axes: n sequences asked about, B of a batch, T frames, D features, E embedding, K classes or clusters.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from brim.engine.memory import Halving
from brim.sequences.data import Counted, Source
from brim.sequences.model import Encoder, Network, frame_mask


class Answers(NamedTuple):
    """On the host, one row for each sequence, in the order of their rows."""

    row: Tensor  # (n,) int64, sorted
    value: Tensor  # (n, …)


class Statistics(NamedTuple):
    """Of each feature over all frames, (D,) float32."""

    mean: Tensor
    std: Tensor


def embed(encoder: Encoder, source: Source, device: torch.device, progress: Counted | None = None) -> Answers:
    """Embeddings, (n, E) float32."""
    return _answer(encoder, lambda frames, length: encoder(frames, length).embedding, source, device, progress)


def predict(module: Network, source: Source, device: torch.device, progress: Counted | None = None) -> Answers:
    """The likeliest class or cluster, (n,) int64."""
    return _answer(module, lambda frames, length: module(frames, length).argmax(-1), source, device, progress)


def embed_and_predict(
    module: Network, source: Source, device: torch.device, progress: Counted | None = None
) -> tuple[Answers, Tensor]:
    """Embeddings and the likeliest class or cluster of each, from one pass."""

    def both(frames: Tensor, length: Tensor) -> Tensor:
        embedding = module.embedding(frames, length)
        return torch.cat([embedding, module.head(embedding).argmax(-1, keepdim=True).to(embedding.dtype)], 1)

    row, value = _answer(module, both, source, device, progress)
    return Answers(row, value[:, :-1].contiguous()), value[:, -1].long()


@torch.no_grad()
def _answer(
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


@torch.no_grad()
def measure(source: Source, device: torch.device) -> Statistics:
    """Mean and standard deviation of every feature over all frames, in one pass.

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
    # rounding leaves a trace of spread where there is none, which would be blown up to 1
    spread = torch.where(variance > 1e-12 * (middle.double() + mean).square(), variance.sqrt(), 0.0)
    return Statistics((middle + mean).float().cpu(), spread.float().cpu())

"""Embeddings and predictions of a network, in the order of the rows; and the feature statistics it is normalised with.

Axes: n sequences, B of a batch, T frames, D features, E embedding, K classes or clusters.
"""

from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from brim.engine.device import Halving
from brim.engine.training import Batch, BatchSource, Ranks
from brim.sequences.corpus import CountProgress
from brim.sequences.model import Network, frame_mask


class Encodings(NamedTuple):
    """Sequences sorted by row, on the host."""

    row: Tensor  # (n,) int64, sorted
    embedding: Tensor  # (n, E) float32
    prediction: Tensor  # (n,) int64, the most likely class or cluster
    output: Tensor  # (n, K) float32, probabilities; for regression values


class FeatureStatistics(NamedTuple):
    """Mean and standard deviation of each feature over all frames, (D,) float32."""

    mean: Tensor
    std: Tensor


def encode(
    module: Network,
    source: BatchSource | None,
    device: torch.device,
    progress: CountProgress | None = None,
    ranks: Ranks | None = None,
) -> Encodings:
    """Embeddings and predictions of the source's sequences; with several ranks each computes its own, and all get all.

    In full precision and without dropout; the module's mode is restored.
    """
    mine = None if source is None else _encode_own(module, source, device, progress)
    parts = [part for part in ([mine] if ranks is None else ranks.all_of(mine)) if part is not None]
    row, *others = map(torch.cat, zip(*parts, strict=True))
    row, order = row.sort()
    return Encodings(row, *(other[order] for other in others))


@torch.no_grad()
def _encode_own(
    module: Network, source: BatchSource, device: torch.device, progress: CountProgress | None
) -> Encodings:
    def run(batch: Batch, part: range) -> Encodings:
        row, frames, length = (batch[name][part.start : part.stop] for name in ("item", "frames", "length"))
        embedding, output = module.outputs_of(frames, length)
        output = output.float()
        return Encodings(row, embedding, output.argmax(-1), output if module.is_regression else output.softmax(-1))

    training, halving, done = module.training, Halving(source.batch_size, device), 0
    parts: list[Encodings] = []
    module.eval()
    try:
        with closing(source.epoch(0)) as batches:  # type: ignore[type-var]
            for batch in batches:
                parts += halving.run(partial(run, batch), range(len(batch["item"])))
                done += len(batch["item"])
                if progress is not None:
                    progress(done, source.num_items)
    finally:
        module.train(training)
    return Encodings(*(torch.cat(values).cpu() for values in zip(*parts, strict=True)))


def measure(source: BatchSource | None, device: torch.device, ranks: Ranks | None = None) -> FeatureStatistics:
    """Mean and standard deviation of every feature over all frames, in one pass; each rank reads its own."""
    mine = None if source is None else _moments(source, device)
    parts = [part for part in ([mine] if ranks is None else ranks.all_of(mine)) if part is not None]
    mean, variance, _ = parts[0]
    if len(parts) > 1:
        count = torch.stack([part.frames for part in parts])  # (parts,)
        share = (count / count.sum()).double()[:, None]
        mean = (share * torch.stack([part.mean for part in parts])).sum(0)
        squares = torch.stack([part.variance + (part.mean - mean).square() for part in parts])
        variance = (share * squares).sum(0)
    # rounding gives a constant feature a tiny deviation, which normalisation would scale up to 1
    spread = torch.where(variance > 1e-12 * mean.square(), variance.sqrt(), 0.0)
    return FeatureStatistics(mean.float(), spread.float())


class _Moments(NamedTuple):
    mean: Tensor  # (D,) float64, on the host
    variance: Tensor  # (D,) float64
    frames: Tensor  # () int64, how many


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

"""How a batch is divided among ranks, and how each rank computes its share as if the whole batch were there.

Rank r of N owns every N-th row and holds no others. The batches of an epoch are those of a single process; of each
batch a rank computes the items it owns, whose number varies. Everything that couples items is as in a single process:

    random numbers   drawn for the whole batch on every rank; each takes those of its items
    batch norms      over the whole batch, by sums
    contrasts        with the items of all ranks, gathered

A rank that owns no item of a batch computes a stand-in, which has weight 0.

Axes: B items of the whole batch, n of them this rank's, k rows of each item (two views, for instance).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from brim.engine.training.ranks import Ranks
from brim.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """This rank's part of a batch."""

    ranks: Ranks
    count: int  # B
    places: Tensor  # (n,) int64 on the host: positions of its items in the whole batch, ascending; empty: a stand-in
    _rows: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    @property
    def weight(self) -> float:
        """Weight of the mean over its items in the mean over the batch, times the number of ranks that are averaged."""
        return len(self.places) * self.ranks.size / self.count

    def repeats(self, num_rows: int) -> int:
        """Rows of each item, k, if this rank has num_rows rows."""
        return num_rows // max(1, len(self.places))

    def rows(self, num_rows: int, device: torch.device) -> Tensor:
        """(n k,) int64: positions of this rank's rows in the whole batch of B k; those of an item are adjacent."""
        key = (self.repeats(num_rows), device)
        if key not in self._rows:
            places = self.places if len(self.places) else torch.zeros(1, dtype=torch.int64)
            rows = (places[:, None] * key[0] + torch.arange(key[0])).flatten()
            self._rows[key] = rows.to(device)
        return self._rows[key]


_share: ContextVar[Share | None] = ContextVar("share", default=None)


@contextmanager
def computing(share: Share | None) -> Iterator[None]:
    """Context in which a step computes this share; None: the whole batch."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def current() -> Share | None:
    """The share being computed; None: the whole batch."""
    return _share.get()


# Random numbers


def drawn(make: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...], axis: int = 0) -> Tensor:
    """Random numbers of this shape, whose axis is the rows of a batch; a share gets its part of those of the whole."""
    share = _share.get()
    if share is None:
        return make(shape)
    whole = (*shape[:axis], share.repeats(shape[axis]) * share.count, *shape[axis + 1 :])
    numbers = make(whole)
    return numbers.index_select(axis, share.rows(shape[axis], numbers.device))


def dropout(x: Tensor, probability: float, training: bool, axis: int = 0) -> Tensor:
    """As torch's dropout; an item of a share gets the mask it would get in the whole batch."""
    if _share.get() is None or not training or not probability:
        return functional.dropout(x, probability, training)

    def make(shape: tuple[int, ...]) -> Tensor:
        return functional.dropout(x.new_ones(shape), probability, True)  # the mask, scaled, by torch's own kernel

    return x * drawn(make, tuple(x.shape), axis)


class Dropout(nn.Dropout):
    """nn.Dropout for batches whose first axis is the items."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training)


# Coupled items of a batch


def gathered(rows: Tensor) -> Tensor:
    """The rows of all ranks, (B k, …), in the order of the whole batch; the backward pass returns gradients."""
    share = _share.get()
    if share is None:
        return rows
    whole: Tensor = _Gather.apply(rows, share)  # type: ignore[no-untyped-call]
    return whole


def own_rows(num_rows: int, device: torch.device) -> Tensor:
    """(n k,) int64: positions of this rank's rows in the result of gathered()."""
    share = _share.get()
    return torch.arange(num_rows, device=device) if share is None else share.rows(num_rows, device)


class _Gather(torch.autograd.Function):
    """Each row is in place on one rank and zero on the others, so the sum over ranks is the whole batch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Share) -> Tensor:
        ctx.share, ctx.at = share, share.rows(len(rows), rows.device)
        whole = rows.new_zeros(share.repeats(len(rows)) * share.count, *rows.shape[1:])
        if len(share.places):
            whole.index_copy_(0, ctx.at, rows)
        return share.ranks.add_up(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = ctx.share.ranks.add_up(grad.contiguous().clone()).index_select(0, ctx.at)
        return mine if len(ctx.share.places) else torch.zeros_like(mine), None


def share_norms(module: nn.Module) -> None:
    """Replace the batch norms of a module by ones over whole batches; weights and their names stay."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if not isinstance(child, _BatchNorm) or isinstance(child, nn.SyncBatchNorm | SharedNorm):
                continue
            if not child.track_running_stats or child.momentum is None:
                raise ConfigError(
                    f'batch norm "{name}" keeps no running mean with a momentum', hint="several ranks need one"
                )
            setattr(parent, name, SharedNorm(child))


class SharedNorm(_BatchNorm):
    """A batch norm whose mean and variance are those of the items of all ranks."""

    def __init__(self, norm: _BatchNorm) -> None:
        """Take over the weights and statistics themselves, not copies."""
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(self, name, getattr(norm, name))
        self.training = norm.training

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of axes behind the channels."""

    def forward(self, input: Tensor) -> Tensor:
        """(n, C, …), the same shape."""
        share = _share.get()
        if share is None or not self.training:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            normal, mean, variance, count = _Norm.apply(input, share, self.eps)  # type: ignore[no-untyped-call]
            self._keep(mean, variance, count)
            sides = (1, -1, *[1] * (input.ndim - 2))
            if self.weight is not None:
                normal = torch.addcmul(self.bias.view(sides), normal, self.weight.view(sides))
            return normal.to(input.dtype)

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), self.momentum)  # of the population


class _Norm(torch.autograd.Function):
    """(x - mean) / deviation in float32, both over the items of all ranks, from exchanged sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [0, *range(2, x.ndim)]
        sides = (1, -1, *[1] * (x.ndim - 2))
        counts = 1.0 if len(share.places) else 0.0  # a stand-in has no part in any sum
        values = x if x.dtype == torch.float64 else x.float()
        num_rows = share.repeats(len(x)) * share.count
        count = values.new_full((), num_rows * (x[0].numel() // x.shape[1]))  # no copy: it would synchronise
        mean = share.ranks.add_up(values.sum(axes) * counts) / count
        centred = values - mean.view(sides)
        # a second sum, of squares about the mean: a difference of sums would lose a small variance
        variance = share.ranks.add_up(centred.square().sum(axes) * counts) / count
        scale = torch.rsqrt(variance + eps).view(sides)
        normal = centred.mul_(scale)
        ctx.share, ctx.axes, ctx.sides, ctx.counts, ctx.dtype = share, axes, sides, counts, x.dtype
        ctx.save_for_backward(normal, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        normal, scale, count = ctx.saved_tensors
        both = torch.stack([grad.sum(ctx.axes), (grad * normal).sum(ctx.axes)]) * ctx.counts
        total, along = (part.view(ctx.sides) * ctx.counts for part in (ctx.share.ranks.add_up(both) / count))
        return (scale * (grad - total - normal * along)).to(ctx.dtype), None, None


# Dividing an epoch


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The part of an epoch's batches that a rank computes."""

    items: Tensor  # (m,) int64: positions of the items among the rank's own, batch after batch, stand-ins included
    stops: Tensor  # (b,) int64: where each batch ends in them
    _places: Tensor  # (m',) int64: positions of the items in their batches, without stand-ins
    _owned: Tensor  # (b + 1,) int64: where each batch begins in those
    _counts: Tensor  # (b,) int64: items of the whole batches

    def share(self, ranks: Ranks, batch: int) -> Share:
        places = self._places[int(self._owned[batch]) : int(self._owned[batch + 1])]
        return Share(ranks, int(self._counts[batch]), places)


def cut(order: Tensor, sizes: Tensor, ranks: Ranks) -> Cut:
    """Every N-th item of an epoch's order that is cut into batches; a batch without any gets the item that comes next.

    order  (n,)  int64  items in the order of the epoch
    sizes  (b,)  int64  items of its batches, all of them or the first
    """
    stops = sizes.cumsum(0)
    starts = stops - sizes
    mine = torch.nonzero(order[: int(stops[-1])] % ranks.size == ranks.rank).flatten()
    owned = torch.searchsorted(mine, torch.cat([starts, stops[-1:]]))
    batch = torch.repeat_interleave(torch.arange(len(sizes)), owned.diff())
    empty = torch.nonzero(owned.diff() == 0).flatten()
    if not len(mine):
        raise ConfigError(f"rank {ranks.rank} of {ranks.size} has no item of the epoch", hint="use fewer ranks")
    # the neighbour in the order, which a rotating window also holds
    near = mine[owned[empty].clamp(max=len(mine) - 1)]
    places = torch.cat([mine, near])
    line = torch.sort(torch.cat([batch, empty]), stable=True)
    items = torch.div(order[places[line.indices]], ranks.size, rounding_mode="floor")
    ends = torch.searchsorted(line.values, torch.arange(len(sizes)), right=True)
    return Cut(items, ends, mine - starts[batch], owned, sizes)


def check_enough(num_items: int, ranks: Ranks, what: str = "rows") -> None:
    """Raise ConfigError if there are more ranks than items to train on."""
    if num_items < ranks.size:
        raise ConfigError(
            f"{num_items} {what} to train on are too few for {ranks.size} ranks: each needs at least one",
            code="too_few",
            hint=f"start at most {num_items} ranks",
        )

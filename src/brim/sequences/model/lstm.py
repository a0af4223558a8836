"""A bidirectional LSTM over padded batches with the results of packed sequences, without packing.

Axes: B sequences, T frames, I inputs, H hidden units of a direction. Packing needs the lengths on the host and prevents
cuDNN from using its persistent kernels. Here every call is a plain padded one, and the reverse direction still starts
at each sequence's own end, in one of two ways:

- "gate": both directions in one call. Padding frames carry a flag whose weight closes the reverse direction's input
  gate, σ(−10⁴) = 0: from the padded end to the sequence's own end its cell stays exactly 0, the initial state. Nothing
  is moved.
- "gather": one call per direction; the reverse one gets each sequence reversed within its length, and its output is
  reversed again. Optionally the two directions run on two streams.

Weights are named and shaped as those of nn.LSTM(bidirectional=True), so that state dicts are interchangeable.

On a GPU the recurrence runs in fp16 under either half precision: cuDNN has persistent kernels for it, up to 128 hidden
units also for the backward pass, and PyTorch's autocast supports no other. Under bf16, where the loss is not scaled,
gradients are scaled into fp16's range when they enter the LSTM's backward pass and unscaled when they leave it, by a
factor computed on the device.
"""

from functools import cache, partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.training import dropout, uncompiled
from brim.errors import ConfigError
from brim.sequences.config import Reverse

_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_SIDES = ("", "_reverse")
_FLAGS = 8  # columns for the flag: tensor cores need multiples of 8
_CLOSED = -1e4  # σ of it is 0 in every precision, and fp16 can hold it
_LARGEST_GRAD = 2.0**-6  # in fp16: a weight sums up to a few hundred thousand of them, and must stay below 65504


class BiLstm(nn.Module):
    shut: Tensor

    def __init__(
        self,
        inputs: int,
        hidden: int,
        layers: int = 1,
        *,
        dropout: float = 0.0,  # between layers
        reverse: Reverse = "gate",
        concurrent: bool = False,  # gather only: the two directions on two streams
    ) -> None:
        super().__init__()
        if reverse not in get_args(Reverse):
            raise ConfigError(
                f"is unknown; choose one of {', '.join(get_args(Reverse))}",
                field="reverse", value=reverse, code="unknown_choice",
            )  # fmt: skip
        self.inputs, self.hidden, self.layers = inputs, hidden, layers
        self.dropout, self.reverse, self.concurrent = dropout, reverse, concurrent
        for layer in range(layers):
            width = inputs if layer == 0 else 2 * hidden
            for side in _SIDES:
                for name, shape in zip(_NAMES, ((width,), (hidden,), (), ()), strict=True):
                    self.register_parameter(f"{name}_l{layer}{side}", nn.Parameter(torch.empty(4 * hidden, *shape)))
        shut = torch.zeros(4 * hidden, _FLAGS)
        shut[:hidden, 0] = _CLOSED  # gates in torch's order: input, forget, cell, output
        self.register_buffer("shut", shut, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.LSTM does, but forget gates start open."""
        for name, parameter in self.named_parameters():
            nn.init.uniform_(parameter, -(self.hidden**-0.5), self.hidden**-0.5)
            if name.startswith("bias_ih"):
                with torch.no_grad():
                    parameter[self.hidden : 2 * self.hidden] += 1

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """States of both directions, (B, T, 2 H), 0 behind each sequence's end.

        x       (B, T, I)  any float; values behind the end have no influence as long as they are finite
        length  (B,)       int64
        """
        states: Tensor = self._run(x, length)
        return states

    @uncompiled  # the compiler cannot see into cuDNN
    def _run(self, x: Tensor, length: Tensor) -> Tensor:
        valid = (torch.arange(x.shape[1], device=x.device)[:, None] < length).unsqueeze(-1)  # (T, B, 1)
        dtype, after = _dtypes(x)
        scale = torch.ones((), device=x.device) if dtype == torch.float16 and after == torch.bfloat16 else None
        with torch.autocast(x.device.type, enabled=False):
            h = _unscale_grad(x.transpose(0, 1), scale).to(dtype)
            if self.reverse == "gate":
                run = partial(self._gated, functional.pad((~valid).to(dtype), (0, _FLAGS - 1)), scale)
            else:
                run = partial(self._gathered, _reversed_rows(valid, length), scale)
            for layer in range(self.layers):
                h = run(layer, dropout(h, self.dropout, self.training, axis=1) if layer else h)
            return _scale_grad(h, scale, after).masked_fill(~valid, 0).transpose(0, 1)

    def _gated(self, flags: Tensor, scale: Tensor | None, layer: int, h: Tensor) -> Tensor:
        sides = [self._weights(layer, side) for side in _SIDES]
        sides[0][0] = functional.pad(sides[0][0], (0, _FLAGS))
        sides[1][0] = torch.cat([sides[1][0], self.shut.to(sides[1][0].dtype)], 1)
        return _lstm(torch.cat([h, flags], -1), sides, self.hidden, scale)

    def _gathered(self, rows: Tensor, scale: Tensor | None, layer: int, h: Tensor) -> Tensor:
        h = h.contiguous()
        ahead, back = ([self._weights(layer, side)] for side in _SIDES)
        if self.concurrent and h.is_cuda:
            out, reverse = _two_streams(h, _reverse(h, rows), ahead, back, self.hidden, scale)
        else:
            out, reverse = _lstm(h, ahead, self.hidden, scale), _lstm(_reverse(h, rows), back, self.hidden, scale)
        return torch.cat([out, _reverse(reverse, rows)], -1)

    def _weights(self, layer: int, side: str) -> list[Tensor]:
        return [getattr(self, f"{name}_l{layer}{side}") for name in _NAMES]


def _dtypes(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Precision of the recurrence, and of its result."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x.dtype, x.dtype
    after = torch.get_autocast_dtype(kind)
    return (torch.float32 if kind == "cpu" else torch.float16), after  # a CPU gains nothing from half precision


def _lstm(x: Tensor, sides: list[list[Tensor]], hidden: int, scale: Tensor | None) -> Tensor:
    """One layer with one or two directions; x is (T, B, I), in the precision to compute in."""
    weights = _packed(sides, x.dtype, scale)
    start = x.new_zeros(len(sides), x.shape[1], hidden)
    # "train" keeps what the backward pass needs; without dropout it has no other effect
    train, two = torch.is_grad_enabled(), len(sides) == 2
    return torch.lstm(x, [start, start], weights, True, 1, 0.0, train, two, False)[0]


def _packed(sides: list[list[Tensor]], dtype: torch.dtype, scale: Tensor | None) -> list[Tensor]:
    """Weights as views of one buffer in cuDNN's order, matrices before biases; otherwise it would copy and warn."""
    ordered = [tensor for side in sides for tensor in side[:2]] + [tensor for side in sides for tensor in side[2:]]
    flat = _unscale_grad(torch.cat([tensor.flatten() for tensor in ordered]), scale).to(dtype)
    parts = torch.split(flat, [tensor.numel() for tensor in ordered])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, ordered, strict=True)]
    if len(sides) == 1:
        return views
    return [*views[0:2], *views[4:6], *views[2:4], *views[6:8]]


# Reversal


def _reversed_rows(valid: Tensor, length: Tensor) -> Tensor:
    """(T B,) rows of a (T, B) batch that reverse each sequence within its length and leave padding in place."""
    time = torch.arange(len(valid), device=length.device)[:, None]
    items = torch.arange(len(length), device=length.device)
    source = torch.where(valid[..., 0], length - 1 - time, time)
    return (source * len(length) + items).flatten()


def _reverse(x: Tensor, rows: Tensor) -> Tensor:
    reversed_: Tensor = _Reverse.apply(x, rows)  # type: ignore[no-untyped-call]
    return reversed_


class _Reverse(torch.autograd.Function):
    """A permutation of rows that is its own inverse, so that its backward pass is a gather, not an atomic scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.flatten(0, 1).index_select(0, rows).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, rows).view(grad.shape), None


def _two_streams(
    x: Tensor, reversed_: Tensor, ahead: list[list[Tensor]], back: list[list[Tensor]], hidden: int, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both directions at once; autograd runs the backward pass on the same streams."""
    here, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        reverse = _lstm(reversed_, back, hidden, scale)
    forward = _lstm(x, ahead, hidden, scale)
    here.wait_stream(side)
    for tensor, user in ((reversed_, side), (reverse, here), *([] if scale is None else [(scale, side)])):
        tensor.record_stream(user)  # otherwise its memory could be reused while the other stream reads it
    return forward, reverse


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# Gradients in fp16's range


def _scale_grad(states: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return states.to(dtype)
    scaled: Tensor = _ScaleGrad.apply(states, scale, dtype)  # type: ignore[no-untyped-call]
    return scaled


def _unscale_grad(x: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return x
    unscaled: Tensor = _UnscaleGrad.apply(x, scale)  # type: ignore[no-untyped-call]
    return unscaled


class _ScaleGrad(torch.autograd.Function):
    """Converts the dtype; its backward pass scales the gradient to a known maximum and writes the factor to `scale`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.scale, ctx.dtype = scale, states.dtype  # not save_for_backward: the backward pass writes it
        return states.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        largest = torch.linalg.vector_norm(grad, torch.inf, dtype=torch.float32)
        ctx.scale.copy_(_LARGEST_GRAD / largest.clamp(min=2.0**-100))
        return (grad * ctx.scale).to(ctx.dtype), None, None


class _UnscaleGrad(torch.autograd.Function):
    """The identity; its backward pass divides the gradient by the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.scale, None

"""Functions of torch and Python, wrapped so that they tell the clock what the training thread is doing."""

import builtins
import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from .clock import StepClock, perf
from .feeding import mark_training

SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__repr__", "__format__")
COPIES = ("to", "cuda", "pin_memory", "float", "half", "double", "clone", "contiguous")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter",
)  # fmt: skip
LOSSES = 64  # kept of a run, to compare with a run that has a change
_LIBRARIES: dict[str, bool] = {}  # file → whether it is a library's


def install(clock: StepClock) -> None:
    import torch

    for name in SYNCS:
        _wrap_method(clock, torch.Tensor, name, "sync")
    for name in COPIES:
        _wrap_method(clock, torch.Tensor, name, "copy")
    torch.Tensor.__matmul__ = _product(clock, torch.Tensor.__matmul__)  # type: ignore[method-assign]
    torch.save = _span(clock, torch.save, "checkpoint", "torch.save")
    torch.Tensor.backward = _backward(clock, torch.Tensor.backward)  # type: ignore[method-assign]
    torch.autograd.backward = _backward(clock, torch.autograd.backward)
    module: Any = torch.nn.Module
    module.__call__ = _module_call(clock, module.__call__)
    module.zero_grad = _quick_span(clock, module.zero_grad, "optimizer")
    _watch_optimizers(clock)
    _watch_distributed(clock)
    builtins.print = _span(clock, builtins.print, "sync", "print")
    gc.callbacks.append(_collection(clock))


# Sites


def user_site(frame: Any) -> tuple[str, int, str]:
    """File, line and function of the innermost frame that is not a library's."""
    first = frame
    while frame is not None:
        if not is_library(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back
    return first.f_code.co_filename, first.f_lineno or 0, first.f_code.co_name


def is_library(code: Any) -> bool:
    name = code.co_filename  # as a key: the hash of a code object is computed each time
    known = _LIBRARIES.get(name)
    if known is None:
        known = _LIBRARIES[name] = (
            name.startswith(("<frozen", "<string>", "<__array", _HERE, *_STANDARD))
            or "site-packages" in name
            or "dist-packages" in name
        )
    return known


_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_STANDARD = tuple({os.path.dirname(os.__file__), sys.base_prefix + "/lib/python"})  # noqa: PTH120


# Tensors


def _wrap_method(clock: StepClock, owner: Any, name: str, cause: str) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return
    wrapped = _copy(clock, original, name) if cause == "copy" else _sync(clock, original, name)
    setattr(owner, name, wrapped)


def _sync(clock: StepClock, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    stale: dict[Any, Any] = {}  # values by place in the script, while the ceiling is measured on a GPU

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not clock.here() or clock.cause in ("sync", "checkpoint", "data"):  # a loader reads seeds and indices
            return original(self, *args, **kwargs)
        if clock.cause in ("forward", "backward", "optimizer") and self.is_cpu:  # arithmetic, such as Adam's counter
            return original(self, *args, **kwargs)
        frame = sys._getframe(1)
        if name == "item" and self.is_cuda:
            place = (id(frame.f_code), frame.f_lasti)
            if clock.phase in ("ceiling", "count") and place in stale:
                return stale[place]
            value = stale[place] = _timed(clock, original, frame, "sync", name, (self,), {})
            return value
        return _timed(clock, original, frame, "sync", name, (self, *args), kwargs)

    return call


def _copy(clock: StepClock, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # inside a network, casts and copies are part of its arithmetic
        if not clock.here() or clock.depth or clock.cause not in ("after", "feed", "compute"):
            return original(self, *args, **kwargs)
        held = clock.facts.get("held")
        if held is not None and id(self) in held:
            key = (id(self), name, args, tuple(kwargs.items()))
            if key not in held["moved"]:
                held["moved"][key] = original(self, *args, **kwargs)
            return held["moved"][key]
        return _timed(clock, original, sys._getframe(1), "copy", name, (self, *args), kwargs)

    return call


def _timed(
    clock: StepClock, original: Callable[..., Any], frame: Any, cause: str, what: str, args: Any, kwargs: Any
) -> Any:
    began = perf()
    clock.enter(cause)
    try:
        return original(*args, **kwargs)
    finally:
        clock.at((cause, what, *user_site(frame)), clock.leave() - began)


def _span(clock: StepClock, original: Callable[..., Any], cause: str, what: str) -> Callable[..., Any]:
    """A function whose time in the training thread has a cause, unless it is within a span of the same cause."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not clock.here() or clock.cause in (cause, "evaluation"):
            return original(*args, **kwargs)
        return _timed(clock, original, sys._getframe(1), cause, what, args, kwargs)

    return call


# Passes


def _module_call(clock: StepClock, original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_grad_enabled = torch.is_grad_enabled
    is_compiling = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", lambda: False)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # else every module would break the graph
            return original(self, *args, **kwargs)
        if clock.depth or not clock.here():
            return original(self, *args, **kwargs)
        clock.depth = 1
        try:
            training = is_grad_enabled()
            if training or clock.kind in ("", "forward"):
                for change in clock.facts.get("before_forward", ()):
                    args, kwargs = change(self, args, kwargs)
            count_samples(clock, self, args, kwargs)
            clock.begin_forward(training)
            answer = _with_context(clock, original, self, args, kwargs)
        finally:
            clock.depth = 0
            clock.end_forward()
        if not training or clock.kind in ("", "forward"):
            mark_training(clock)
            _step(clock, "forward", _first(clock, self))
        return answer

    return call


def _product(clock: StepClock, original: Callable[..., Any]) -> Callable[..., Any]:
    """Products with parameters begin the forward pass of a network that is no module."""
    import torch

    is_grad_enabled = torch.is_grad_enabled

    @functools.wraps(original)
    def call(self: Any, other: Any) -> Any:
        begins = not clock.depth and clock.cause in ("after", "feed") and is_grad_enabled() and clock.here()
        if begins and (self.requires_grad or getattr(other, "requires_grad", False)):
            count_samples(clock, original, (self,), {})
            clock.part("compute")
        return original(self, other)

    return call


def _step(clock: StepClock, kind: str, source: Any = None) -> None:
    sites = clock.facts.setdefault("step_sites", {})
    if kind not in sites:  # the line where the first of them ends
        sites[kind] = user_site(sys._getframe(1))
    clock.step(kind, source)


def _with_context(clock: StepClock, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    around = clock.facts.get("around_forward")
    return original(module, *args, **kwargs) if around is None else around(original, module, args, kwargs)


def _first(clock: StepClock, module: Any) -> Any:
    """In inference, the module that was called first marks the steps."""
    return clock.source if clock.kind == "forward" and clock.source is not None else module


def count_samples(clock: StepClock, module: Any, args: Any, kwargs: Any) -> None:
    """Without a loader, a step has the samples of its first forward pass, and of that behind each backward pass."""
    if clock.batches or (clock.samples and module is not clock.accumulates):
        return
    clock.accumulates = None
    for value in (*args, *kwargs.values()):
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape):
            clock.samples += int(shape[0])
            clock.counted = module
            return


def _backward(clock: StepClock, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not clock.here() or clock.cause == "backward":
            return original(*args, **kwargs)
        clock.part("compute")
        mark_training(clock)
        if len(clock.losses) < LOSSES and args:
            loss = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
            clock.losses.append(loss.detach() if getattr(loss, "numel", lambda: 0)() == 1 else None)
        clock.enter("backward")
        try:
            return original(*args, **kwargs)
        finally:
            clock.leave()
            clock.accumulates = clock.counted
            _step(clock, "backward")

    return call


def _watch_optimizers(clock: StepClock) -> None:
    from torch.optim import Optimizer

    def before(optimizer: Any, *_: Any) -> None:
        if clock.here():
            clock.part("compute")
            clock.enter("optimizer")

    def after(optimizer: Any, *_: Any) -> None:
        if clock.here():
            clock.leave()
            _step(clock, "optimizer", optimizer)

    hooks: Any = sys.modules["torch.optim.optimizer"]  # as an attribute it is deleted
    begin = Optimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        clock.trains = True

    Optimizer.__init__ = init  # type: ignore[method-assign]
    if hasattr(hooks, "register_optimizer_step_post_hook"):
        hooks.register_optimizer_step_pre_hook(before)
        hooks.register_optimizer_step_post_hook(after)
    else:

        def init_and_wrap(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            step = self.step

            def timed(*inner: Any, **options: Any) -> Any:
                before(self)
                try:
                    return step(*inner, **options)
                finally:
                    after(self)

            self.step = timed

        Optimizer.__init__ = init_and_wrap  # type: ignore[method-assign]
    Optimizer.zero_grad = _quick_span(clock, Optimizer.zero_grad, "optimizer")  # type: ignore[method-assign]


def _quick_span(clock: StepClock, original: Callable[..., Any], cause: str) -> Callable[..., Any]:
    """A span without a site."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not clock.here():
            return original(*args, **kwargs)
        clock.enter(cause)
        try:
            return original(*args, **kwargs)
        finally:
            clock.leave()

    return call


def _watch_distributed(clock: StepClock) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    for name in COLLECTIVES:
        if hasattr(dist, name):
            wrapped = _span(clock, getattr(dist, name), "communication", name)
            setattr(dist, name, wrapped)
            if hasattr(dist.distributed_c10d, name):
                setattr(dist.distributed_c10d, name, wrapped)


def _collection(clock: StepClock) -> Callable[[str, dict[str, int]], None]:
    open_spans: list[float] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if not clock.here():
            return
        if phase == "start":
            open_spans.append(perf())
            clock.enter("gc")
        elif open_spans:
            seconds = clock.leave() - open_spans.pop()
            frame = sys._getframe().f_back
            if seconds > 1e-3 and frame is not None:  # none at the end of the interpreter
                clock.at(("gc", f"generation {info['generation']}", *user_site(frame)), seconds)

    return callback

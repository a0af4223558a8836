"""One optimisation step: forward, loss, backward, clipping and update; run eagerly or replayed as a CUDA graph.

Nothing in it waits for the device. The learning rate is a device tensor, random numbers depend on (seed, phase, step)
alone, and everything that ran to prepare a graph is undone: the weights are those of a run without preparation.
"""

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brim.engine.config import Precision, TrainConfig
from brim.engine.device import check_injected, guard, stream
from brim.engine.meter import find_syncs
from brim.engine.training.optimization import MakeOptimizer, MakeScheduler, Optimization
from brim.engine.training.rank_share import Share, computing
from brim.engine.training.ranks import Ranks
from brim.engine.training.source import Batch, Fetcher
from brim.errors import ConfigError, OutOfMemory

log = logging.getLogger("brim")

LossFn = Callable[[nn.Module, Batch], Tensor]  # mean over the items of the batch
Transform = Callable[[Batch, torch.Generator], Batch | None]  # in place, or returns another batch

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Trains a module in place, one step at a time."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn,
        *,
        config: TrainConfig,
        device: torch.device,
        transform: Transform | None = None,
        phase: str = "train",
        ranks: Ranks | None = None,
        optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
        scheduler: MakeScheduler | Any = None,
    ) -> None:
        """Make the optimiser and its state; the module must be on the device."""
        self.module, self.config, self.device, self.phase = module, config, device, phase
        self.ranks = ranks or Ranks(device=device)
        self.params = _trainable(module, device)
        self.precision = resolve_precision(config.precision, device)
        self.micro: int | None = None  # items per pass if the whole batch does not fit
        self._loss_fn, self._compiled, self._transform = loss_fn, loss_fn, transform
        self._first: tuple[Any, ...] | None = None  # shape of the first batch, the only one that is compiled
        on_gpu = device.type == "cuda"
        self.optimization = Optimization(self.params, config, device, optimizer, scheduler)
        self.optimizer = self.optimization.optimizer
        # eager with several ranks: shares vary in size, and gradients are sent during the backward pass
        self._compile = config.compile == "compile" and self.ranks.alone
        self._capture = on_gpu and config.compile != "none" and self.ranks.alone and self.optimization.can_capture
        if config.compile == "graph" and not on_gpu:
            log.warning("compile=graph: %s has no CUDA graphs; steps run eagerly", device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self._generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self.fetcher: Fetcher | None = None  # of the captured steps that fetch the batch after theirs
        self._fetching: dict[int, _Graph] = {}  # those steps, by the identity of their inputs
        self._seen: set[tuple[Any, ...]] = set()
        self._pool: Any = None
        self._warned_memory = False
        self._computed = self.ranks.averaging(module)  # what the loss calls

    # State

    def tensors(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    @property
    def kind(self) -> str:
        """How full batches run: eager, compiled or graph."""
        if self._graphs:
            return "graph"
        return "compiled" if self._compile else "eager"

    def release_graphs(self) -> None:
        """Run the steps from here on eagerly: something changed that captured ones hold as a constant."""
        if self._graphs:
            log.warning("the scheduler changes more than the learning rate; steps run eagerly")
        self._forget_graphs()
        self._capture = False

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._fetching.clear()
        self.fetcher = None

    # Steps

    def needs_preparation(self, batch: Batch) -> bool:
        """Whether this shape should be prepared: the first one, and others when they come a second time."""
        if self._first is None:
            return self._compile or self.device.type == "cuda"
        shape, room = shape_of(batch), len(self._graphs) < self.config.max_graphs
        return self._capture and shape in self._seen and shape not in self._graphs and room

    def prepare(self, batch: Batch, share: Share | None = None) -> None:
        """Warm up, compile or capture for batches of this shape, without any effect on the training."""
        shape = shape_of(batch)
        kept = Snapshot(self)
        try:
            if self._first is None:
                self._first = shape
                if self._compile:
                    self._try_compile(_clone(batch))
                self.seed(0)
                self._run_eagerly(_clone(batch), share)  # libraries initialise, and the memory is tested
            kept.restore()
            graph = self._try_capture(batch, kept) if self._capture else None
        finally:
            kept.restore()
        if graph is not None:
            self._graphs[shape] = graph

    def prepare_fetching(self, fetcher: Fetcher, batch: Batch) -> None:
        """Capture the step twice more, once for each of the fetcher's inputs, so that it fetches the next batch itself.

        Both are used by turns. The gathering runs beside the step, on a branch of the graph. Without effect if full
        batches like this one are not captured.
        """
        if shape_of(batch) not in self._graphs or shape_of(batch) != shape_of(fetcher.inputs[0]):
            return
        for inputs in fetcher.inputs:  # values that the step can run on, for the runs before the capture
            _copy(batch, inputs)
        kept = Snapshot(self)
        try:
            with guard():
                graphs = [
                    self._record(inputs, partial(fetcher.fetch, 1 - n)) for n, inputs in enumerate(fetcher.inputs)
                ]
        except Exception as failure:  # of many kinds; full batches are captured anew, and filled from outside
            self._clean_up()
            log.warning("a captured step cannot fetch its own batches (%s); they are copied", _first_line(failure))
            return
        finally:
            kept.restore()
        self.fetcher, self._fetching = fetcher, {id(graph.inputs): graph for graph in graphs}

    def step(self, batch: Batch, number: int, learning_rate: float, share: Share | None = None) -> Tensor:
        """Train on a batch; returns its loss, () float32, on the device until the next step.

        With a share the batch is this rank's part of one, and all ranks step together: the loss is that of the whole.
        """
        shape = shape_of(batch)
        graph = self._fetching.get(id(batch)) or self._graphs.get(shape)
        self.optimization.begin_step(learning_rate)
        self.seed(number)
        if graph is None:
            self._seen.add(shape)
            return self._run_eagerly(batch, share)
        graph.fill(batch)
        graph.graph.replay()
        return graph.loss

    def inputs_with(self, name: str, shape: tuple[int, ...]) -> Batch | None:
        """The inputs of the graph for batches whose field of that name has that shape, for a source that fills them."""
        for graph in self._graphs.values():
            if tuple(graph.inputs[name].shape) == shape:
                return graph.inputs
        return None

    def inputs_like(self, batch: Batch) -> Batch | None:
        """The inputs of the graph for batches of this shape."""
        graph = self._graphs.get(shape_of(batch))
        return None if graph is None else graph.inputs

    def seed(self, number: int) -> None:
        """Set torch's own random streams to those of a step: dropout then needs no saved state to resume."""
        value = stream(self.config.seed, self.phase, number, device=torch.device("cpu")).initial_seed()
        torch.default_generator.manual_seed(value)
        if self._generator is not torch.default_generator:
            self._generator.manual_seed(value)

    def transformed(self, batch: Batch) -> Batch:
        """The batch after the transform, which may change it in place."""
        return (self._transform(batch, self._generator) or batch) if self._transform is not None else batch

    def _run_eagerly(self, batch: Batch, share: Share | None = None) -> Tensor:
        loss_fn = self._loss_for(batch)
        self.optimizer.zero_grad(set_to_none=True)
        if share is not None:
            return self._run_share(batch, share, loss_fn)
        batch = self.transformed(batch)
        while True:
            loss = self._fitting(batch, loss_fn)
            if loss is not None:
                break
            self._halve(batch_items(batch))  # outside the except block: its traceback kept tensors alive
        self._update()
        return loss

    def _run_share(self, batch: Batch, share: Share, loss_fn: LossFn) -> Tensor:
        """As _run_eagerly for a rank's share: its mean is weighted by its items, so gradients sum to the batch's."""
        dtype = _DTYPES[self.precision]
        try:
            with guard(), computing(share):
                batch = self.transformed(batch)
                check_injected(batch_items(batch))
                with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                    loss = _checked(loss_fn(self._computed, batch)).float() * share.weight
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        except OutOfMemory as failure:
            # not in parts: the other ranks would wait in the middle of theirs
            raise OutOfMemory(
                f"rank {self.ranks.rank}: {batch_items(batch)} items, its part of a batch of {share.count}, do not fit "
                f"on {self.device} ({failure}); use a smaller batch size or more ranks"
            ) from failure
        self._update()
        return self.ranks.add_up(loss.detach() / self.ranks.size)

    def _loss_for(self, batch: Batch) -> LossFn:  # other shapes run uncompiled: each would need a compilation
        return self._compiled if self._compile and shape_of(batch) == self._first else self._loss_fn

    def _fitting(self, batch: Batch, loss_fn: LossFn) -> Tensor | None:
        try:
            with guard():
                return self._backward(batch, loss_fn)
        except OutOfMemory as failure:
            self._raise_if_single(batch, failure)
            return None

    def _backward(self, batch: Batch, loss_fn: LossFn) -> Tensor:
        """Gradients of the mean loss over the batch, in parts of at most `micro` items, and that loss."""
        num_items = batch_items(batch)
        dtype = _DTYPES[self.precision]
        losses = []
        size = min(self.micro or num_items, num_items)
        for start in range(0, num_items, size):
            num = min(size, num_items - start)
            is_whole = num == num_items
            part = batch if is_whole else {name: tensor[start : start + num] for name, tensor in batch.items()}
            check_injected(num)
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                loss = _checked(loss_fn(self.module, part)).float()
            if not is_whole:
                loss = loss * (num / num_items)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.config.clip_norm, foreach=True)
        self.scaler.step(self.optimizer)  # skipped on the device when fp16 overflowed; fused, so without a sync
        self.scaler.update()

    def _raise_if_single(self, batch: Batch, failure: OutOfMemory) -> None:
        if min(self.micro or batch_items(batch), batch_items(batch)) <= 1:
            raise OutOfMemory(
                f"a single item does not fit on {self.device} ({failure})",
                hint="use a smaller model or a larger device",
            ) from failure

    def _halve(self, num_items: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        failed = min(self.micro or num_items, num_items)
        self.micro = (failed + 1) // 2
        if not self._warned_memory:
            log.warning(
                "batch of %d did not fit on %s; going on in parts of %d, the effective batch stays the same",
                failed, self.device, self.micro,
            )  # fmt: skip
        self._warned_memory = True

    # Preparation

    def _try_compile(self, batch: Batch) -> None:
        try:
            self._compiled = torch.compile(self._loss_fn, dynamic=False)
            self._backward(batch, self._compiled)
        except Exception as failure:  # of many kinds; an error of the loss itself is raised again when run eagerly
            log.warning("torch.compile failed (%s); steps run eagerly", _first_line(failure))
            self._compile = False

    def _try_capture(self, batch: Batch, kept: "Snapshot") -> "_Graph | None":
        try:
            while True:
                try:
                    with guard():
                        return self._record(_clone(batch))
                except OutOfMemory as failure:
                    self._raise_if_single(batch, failure)
                self._clean_up()
                self._halve(batch_items(batch))
                kept.restore()
        except OutOfMemory:
            raise
        except Exception as failure:  # anything the step does that a graph cannot capture
            self._clean_up()
            log.warning("the step cannot be captured as a CUDA graph (%s); steps run eagerly", _first_line(failure))
            self._capture = False
            return None

    def _record(self, inputs: Batch, beside: Callable[[], None] | None = None) -> "_Graph":
        """The step on these inputs as a graph; `beside` runs at the same time, on a stream of its own."""
        current = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):  # libraries initialise in the first runs, which must not be captured
            if beside is not None:
                beside()
            self._whole(inputs)
            syncs = find_syncs(lambda: self._whole(inputs))
            if syncs:  # before the capture: one that fails half way leaves torch's allocator in an invalid state
                raise RuntimeError(f"the step waits for the device in {', '.join(syncs)}")
            self._whole(inputs)
        current.wait_stream(side)
        torch.cuda.synchronize(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the source's threads continue to copy
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            if beside is not None:
                captured = torch.cuda.current_stream(self.device)
                side.wait_stream(captured)
                with torch.cuda.stream(side):
                    beside()
            loss = self._whole(inputs)
            if beside is not None:
                captured.wait_stream(side)
        return _Graph(graph, inputs, loss)

    def _whole(self, inputs: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(self.transformed(inputs), self._loss_for(inputs))
        self._update()
        return loss

    def _clean_up(self) -> None:
        """After a failed capture: end its allocations and replace the random stream, which is still marked as captured.

        Earlier graphs follow the old random stream, so they go too.
        """
        self._forget_graphs()
        with suppress(RuntimeError, AttributeError, TypeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        with suppress(RuntimeError):
            self._generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
        self._pool = None
        torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Batch
    loss: Tensor

    def fill(self, batch: Batch) -> None:
        if batch is not self.inputs:
            _copy(batch, self.inputs)


class Snapshot:
    """A copy, on the device, of everything a step changes."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._copies = [tensor.detach().clone() for tensor in stepper.tensors()]
        self._optimizer = stepper.optimization.copy()
        self._scaler = dict(stepper.scaler.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        self._stepper.optimizer.zero_grad(set_to_none=True)
        for tensor, copy in zip(self._stepper.tensors(), self._copies, strict=True):
            tensor.copy_(copy)
        self._stepper.optimization.restore(self._optimizer)
        if self._scaler:
            self._stepper.scaler._per_optimizer_states.clear()  # a step that failed half way may have changed them
            self._stepper.scaler.load_state_dict(self._scaler)


def batch_items(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _copy(batch: Batch, inputs: Batch) -> None:
    torch._foreach_copy_(list(inputs.values()), [batch[name] for name in inputs], non_blocking=True)


def _clone(batch: Batch) -> Batch:
    return {name: tensor.clone() for name, tensor in batch.items()}


def shape_of(batch: Batch) -> tuple[Any, ...]:
    """A key that is equal for batches that one captured graph can run."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())


def _trainable(module: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not params:
        raise ConfigError("the module has no trainable parameters", hint="give one whose parameters require gradients")
    for name, param in params.items():
        if param.device != device:
            raise ConfigError(
                f'parameter "{name}" is on {param.device}, training runs on {device}', hint="move the module"
            )
    return params


def _checked(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss_fn returned {got}, expected a scalar tensor", hint="take the mean over the items")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "loss_fn returned a loss that depends on no parameter", hint="compute it from the model, without .detach()"
        )
    return loss


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]


def resolve_precision(name: Precision, device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    """The precision of the forward pass on a device, or a ConfigError if the device does not support it."""
    if device.type == "cpu":
        if name == "fp16":
            raise ConfigError(
                "needs a GPU", field="precision", value=name, code="unsupported", hint="use bf16 or fp32 on a CPU"
            )
        return "fp32" if name == "auto" else name
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "bf16" and not has_bf16:
        gpu = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"is not supported by {gpu}", field="precision", value=name, code="unsupported", hint="use fp16 or fp32"
        )
    return ("bf16" if has_bf16 else "fp16") if name == "auto" else name

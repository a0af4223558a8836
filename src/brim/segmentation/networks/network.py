"""A network for inference: a copy on a device, in a precision and a memory layout, compiled or not.

Axes: B images, H rows, W columns. On a GPU a shape that repeats is captured as a CUDA graph and replayed, so that the
host launches a network of a thousand small kernels at once.
"""

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from brim.config import check
from brim.engine.meter import find_syncs
from brim.segmentation.config import SegmentTask

log = logging.getLogger("brim")

NetworkPrecision = Literal["fp32", "bf16", "fp16"]
MemoryLayout = Literal["contiguous", "channels_last"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet: what published weights expect
GRAPHS = 8  # captured shapes that are kept; they share the memory of the largest
CAPTURE_AFTER = 2  # runs of a shape; a folder of images that all differ captures nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """How a network computes."""

    precision: NetworkPrecision = "fp32"  # fp32 is without TF32
    layout: MemoryLayout = "contiguous"
    compiled: bool = False  # by torch.compile

    def __post_init__(self) -> None:
        check(self)

    def __str__(self) -> str:
        return "/".join([self.precision, self.layout, *["compiled"] * self.compiled])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What prediction needs to know about weights besides their network."""

    task: SegmentTask = "mask"
    stretches: bool = False  # images are shown with their own range of values stretched to all levels
    classes: tuple[str, ...] = ()  # kinds of object that are distinguished, each with a map of its own
    scale: float | None = 1.0  # of images; None: the one at which the objects have the diameter it was trained for


def default_setting(device: torch.device) -> ComputeConfig:
    """The setting without a search: channels-last, in fp16 on a GPU, fp32 on a CPU.

    fp16 is as fast as bf16 and rounds eight times finer; its range is smaller, and tuning checks for overflow.
    """
    return ComputeConfig(precision="fp16" if device.type == "cuda" else "fp32", layout="channels_last")


def normalise(images: Tensor) -> Tensor:
    """images (B, 3, H, W) uint8 or float of 0 to 255 → float32 with ImageNet's mean and deviation."""
    shift, scale = _constants(images.device)
    return torch.addcmul(shift, images.float(), scale)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Shift and scale, (3, 1, 1) float32 each; created once, since a captured graph cannot copy from the host."""
    shift = [-mean / std for mean, std in zip(MEAN, STD, strict=True)]
    scale = [1 / (255 * std) for std in STD]
    with torch.inference_mode(False):
        return tuple(torch.tensor(values, device=device)[:, None, None] for values in (shift, scale))  # type: ignore[return-value]


@runtime_checkable
class Alignable(Protocol):
    """A network that can pad its channels for tensor cores."""

    def aligned(self) -> nn.Module: ...


@runtime_checkable
class Foldable(Protocol):
    """A layer that can fold its batch norm for inference."""

    def fold(self) -> None: ...


class InferenceNetwork:
    """An inference copy of a module; the module itself is not changed."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        setting: ComputeConfig,
        *,
        graphs: int = GRAPHS,
        traits: ModelTraits | None = None,
    ) -> None:
        """graphs is the number of captured shapes that are kept; traits are those of the weights."""
        self.traits = traits or ModelTraits()
        self.device, self.setting, self._num_graphs = device, setting, graphs
        self.compile_s = 0.0  # spent compiling and capturing so far
        module = copy.deepcopy(module)
        if device.type == "cuda" and setting.precision != "fp32" and isinstance(module, Alignable):
            module = module.aligned()
        module.to(device).eval().requires_grad_(False)
        for layer in reversed(list(module.modules())):  # inner layers first: outer ones use their shifts
            if isinstance(layer, Foldable):
                layer.fold()
        module.to(dtype=DTYPES[setting.precision], memory_format=MEMORY_FORMATS[setting.layout])  # type: ignore[call-overload]
        self._run = _runner(module, DTYPES[setting.precision], MEMORY_FORMATS[setting.layout])
        if setting.compiled:
            self._run = torch.compile(self._run, dynamic=False)
        # Not in fp32: its graphs can be huge, 130 GB for one image of resunet_advanced at 1024².
        self._captures = device.type == "cuda" and setting.precision != "fp32"
        self._graphs: OrderedDict[torch.Size, _Graph] = OrderedDict()
        self._pool: Any = None  # one for all graphs: they never run at the same time
        self._runs: dict[torch.Size, int] = {}  # of each shape, until it is captured

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) uint8 on the device → logits (B, maps, H, W) float32 there."""
        with _kernels():
            graph = self._graph_for(images)
            return self._timed(images) if graph is None else graph(images)

    def release(self) -> None:
        self._graphs.clear()
        self._runs.clear()
        self._pool = None

    def _timed(self, images: Tensor) -> Tensor:
        """Run; the first run of a shape counts as compilation if the network is compiled."""
        runs = self._runs[images.shape] = self._runs.get(images.shape, 0) + 1
        if runs > 1 or not self.setting.compiled:
            return self._run(images)
        began_s = time.perf_counter()
        logits = self._run(self._marked(images))
        self.compile_s += time.perf_counter() - began_s
        return logits

    def _marked(self, images: Tensor) -> Tensor:
        """Mark the batch size as dynamic for torch.compile: one compilation for all sizes above one."""
        if self.setting.compiled and len(images) > 1:
            torch._dynamo.mark_dynamic(images, 0)
        return images

    def _prepared(self, images: Tensor) -> Tensor:
        """A copy for the graph to keep, after a run on it, so that everything is compiled before the capture.

        A network that synchronises with the device is detected here: a failed capture corrupts torch's allocator.
        """
        own = self._marked(images.clone())
        self._run(own)
        if not self._graphs and (syncs := find_syncs(lambda: self._run(own))):
            raise _Waits(", ".join(syncs))
        return own

    def _graph_for(self, images: Tensor) -> "_Graph | None":
        """The graph of this shape, captured now if the shape has run often enough."""
        graph = self._graphs.get(images.shape)
        if graph is not None:
            self._graphs.move_to_end(images.shape)
        elif self._captures and self._runs.get(images.shape, 0) >= CAPTURE_AFTER:
            graph = self._capture(images)
        return graph

    def _capture(self, images: Tensor) -> "_Graph | None":
        began_s = time.perf_counter()
        if len(self._graphs) >= self._num_graphs:
            evicted, _ = self._graphs.popitem(last=False)
            # with more shapes than graphs, capturing them in turns costs more than it saves
            self._runs[evicted] = -self._num_graphs * CAPTURE_AFTER
        torch.cuda.empty_cache()  # the graph cannot use memory that the eager run left cached
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph = self._graphs[images.shape] = _Graph(self._prepared(images), self._run, self._pool)
        except torch.OutOfMemoryError:
            # The graph's memory pool may not fit beside the eager one: this shape runs without a graph.
            log.debug("no room for a CUDA graph of %s", tuple(images.shape))
            self._runs[images.shape] = -(2**62)
            graph = None
        except _Waits as failure:
            log.warning("the network synchronises with the host in %s: it runs without CUDA graphs", failure)
            self._captures, graph = False, None
        self.compile_s += time.perf_counter() - began_s
        return graph


def _runner(module: nn.Module, dtype: torch.dtype, layout: torch.memory_format) -> Callable[[Tensor], Tensor]:
    # not a method: a network in a reference cycle would keep its memory until the next garbage collection
    def run(images: Tensor) -> Tensor:
        x = normalise(images).to(dtype=dtype, memory_format=layout)
        return cast(Tensor, module(x)).float()

    return run


class _Waits(Exception):
    """A network that synchronises with the device cannot be captured."""


class _Graph:
    def __init__(self, images: Tensor, run: Callable[[Tensor], Tensor], pool: Any) -> None:
        self._images = images
        torch.cuda.synchronize(images.device)
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads copy images meanwhile, which must not invalidate the capture
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = run(self._images)

    def __call__(self, images: Tensor) -> Tensor:
        self._images.copy_(images)
        self._graph.replay()
        return self._logits.clone()  # the next replay overwrites it


@contextmanager
def _kernels() -> Iterator[None]:
    """No TF32 in fp32; kernels by cuDNN's heuristics, since timing them would change bits from run to run."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        yield

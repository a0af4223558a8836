"""A network as it runs: an inference copy on a device, in a precision and a memory layout, compiled or not.

Axes: B images, H rows, W columns. On a GPU a shape that comes again is captured as a CUDA graph and replayed: a
network of a thousand small kernels then costs the host one launch, however busy its threads are with images.
"""

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from brim.engine.meter import find_syncs
from brim.errors import ConfigError

log = logging.getLogger("brim")

NetworkPrecision = Literal["fp32", "bf16", "fp16"]
MemoryLayout = Literal["contiguous", "channels_last"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet: what published weights expect
GRAPHS = 8  # shapes kept captured; they share the memory of the largest
CAPTURE_AFTER = 2  # runs of a shape: a folder of images that all differ captures nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """How a network computes."""

    precision: NetworkPrecision = "fp32"  # fp32 is without TF32
    layout: MemoryLayout = "contiguous"
    compiled: bool = False  # by torch.compile

    def __post_init__(self) -> None:
        for field, choices in (("precision", get_args(NetworkPrecision)), ("layout", get_args(MemoryLayout))):
            if getattr(self, field) not in choices:
                raise ConfigError(f'{field}="{getattr(self, field)}" must be one of {", ".join(choices)}')

    def __str__(self) -> str:
        return f"{self.precision} {self.layout}{' compiled' * self.compiled}"


def default_setting(device: torch.device) -> ComputeConfig:
    """What runs when nobody searched: fp16 in channels-last on a GPU, fp32 on a CPU.

    fp16 is as fast as bf16 and rounds eight times finer. Its range is smaller: tuning finds out where it overflows.
    """
    return ComputeConfig(precision="fp16", layout="channels_last") if device.type == "cuda" else ComputeConfig()


def normalise(images: Tensor) -> Tensor:
    """images (B, 3, H, W) uint8 or float of 0 to 255 → float32 with ImageNet's mean and deviation."""
    return torch.addcmul(_constant(images.device, "shift"), images.float(), _constant(images.device, "scale"))


_constants: dict[tuple[torch.device, str], Tensor] = {}


def _constant(device: torch.device, name: str) -> Tensor:
    """(3, 1, 1) float32, made once: a graph under capture cannot copy from the host."""
    if (device, name) not in _constants:
        shift = [-mean / std for mean, std in zip(MEAN, STD, strict=True)]
        scale = [1 / (255 * std) for std in STD]
        with torch.inference_mode(False):
            for key, values in (("shift", shift), ("scale", scale)):
                _constants[device, key] = torch.tensor(values, device=device)[:, None, None]
    return _constants[device, name]


@runtime_checkable
class Alignable(Protocol):
    """A network that can pad its channels for tensor cores."""

    def aligned(self) -> nn.Module:
        """The same function in channels that tensor cores prefer."""
        ...


@runtime_checkable
class Foldable(Protocol):
    """A layer that can prepare itself for inference."""

    def fold(self) -> None: ...


class InferenceNetwork:
    """An inference copy of a module; the module itself stays as it is."""

    def __init__(
        self, module: nn.Module, device: torch.device, setting: ComputeConfig, *, graphs: int = GRAPHS
    ) -> None:
        """Copy, fold the norms, convert; so many shapes stay captured."""
        self.device, self.setting, self._num_graphs = device, setting, graphs
        self.compile_s = 0.0  # spent compiling and capturing so far
        module = copy.deepcopy(module)
        if device.type == "cuda" and setting.precision != "fp32" and isinstance(module, Alignable):
            module = module.aligned()
        module.to(device).eval().requires_grad_(False)
        for layer in reversed(list(module.modules())):  # a layer may use what the layers inside it made
            if isinstance(layer, Foldable):
                layer.fold()
        module.to(dtype=DTYPES[setting.precision], memory_format=MEMORY_FORMATS[setting.layout])  # type: ignore[call-overload]
        self._run = _runner(module, DTYPES[setting.precision], MEMORY_FORMATS[setting.layout])
        if setting.compiled:
            self._run = torch.compile(self._run, dynamic=False)
        # Not in fp32: graphs of it were seen to hold 130 GB, for one image of resunet_advanced at 1024².
        self._captures = device.type == "cuda" and setting.precision != "fp32"
        self._graphs: OrderedDict[torch.Size, _Graph] = OrderedDict()
        self._pool: Any = None  # one for all graphs: they never run at the same time
        self._runs: dict[torch.Size, int] = {}  # of each shape, until it is captured

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) uint8 on the device → logits (B, 1, H, W) float32 there."""
        with _kernels():
            graph = self._graph_for(images)
            return self._timed(images) if graph is None else graph(images)

    def release(self) -> None:
        self._graphs.clear()
        self._runs.clear()
        self._pool = None

    def _timed(self, images: Tensor) -> Tensor:
        """Run; the first run of a shape counts as compilation where it is one."""
        runs = self._runs[images.shape] = self._runs.get(images.shape, 0) + 1
        if runs > 1 or not self.setting.compiled:
            return self._run(images)
        began_s = time.perf_counter()
        logits = self._run(self._marked(images))
        self.compile_s += time.perf_counter() - began_s
        return logits

    def _marked(self, images: Tensor) -> Tensor:
        """The images, with a mark for torch.compile: one compilation for every batch but that of one."""
        if self.setting.compiled and len(images) > 1:
            torch._dynamo.mark_dynamic(images, 0)
        return images

    def _prepared(self, images: Tensor) -> Tensor:
        """Images for a graph to keep, after a run on these very tensors: what is compiled must be so by then.

        A network that waits for the device is found out here: a capture that fails half way leaves torch's allocator
        in disorder.
        """
        own = self._marked(images.clone())
        self._run(own)
        if not self._graphs and (syncs := find_syncs(lambda: self._run(own))):
            raise _Waits(", ".join(syncs))
        return own

    def _graph_for(self, images: Tensor) -> "_Graph | None":
        """The graph of this shape, captured now if the shape has come often enough."""
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
            self._runs[evicted] = (
                -self._num_graphs * CAPTURE_AFTER
            )  # more shapes than graphs: capturing in turns costs more
        torch.cuda.empty_cache()  # what the eager run left cached would be taken a second time by the graph
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph = self._graphs[images.shape] = _Graph(self._prepared(images), self._run, self._pool)
        except torch.OutOfMemoryError:
            # Two pools may not fit where one does: this shape stays without a graph.
            log.debug("no room for a CUDA graph of %s", tuple(images.shape))
            self._runs[images.shape] = -(2**62)
            graph = None
        except _Waits as failure:
            log.warning("the network waits for the host in %s: it runs without CUDA graphs", failure)
            self._captures, graph = False, None
        self.compile_s += time.perf_counter() - began_s
        return graph


def _runner(module: nn.Module, dtype: torch.dtype, layout: torch.memory_format) -> Callable[[Tensor], Tensor]:
    # not a method: a network that refers to itself would keep its memory until the garbage collector comes by
    def run(images: Tensor) -> Tensor:
        x = normalise(images).to(dtype=dtype, memory_format=layout)
        return cast(Tensor, module(x)).float()

    return run


class _Waits(Exception):
    """A network cannot be captured, since it waits for the device."""


class _Graph:
    def __init__(self, images: Tensor, run: Callable[[Tensor], Tensor], pool: Any) -> None:
        self._images = images
        torch.cuda.synchronize(images.device)
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads copy images meanwhile, and must not spoil the capture
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = run(self._images)

    def __call__(self, images: Tensor) -> Tensor:
        self._images.copy_(images)
        self._graph.replay()
        return self._logits.clone()  # the next replay overwrites it


@contextmanager
def _kernels() -> Iterator[None]:
    """No TF32 in fp32. cuDNN chooses by its heuristics: timing them would choose other bits from run to run."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        yield

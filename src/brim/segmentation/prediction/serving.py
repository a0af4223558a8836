"""A segmentation network that serves requests: one image in, polygons in any of the formats out.

Axes: h, w pixels of a patch. A part of a request is a patch: the whole image, or a window of one larger than the tile.
Patches of equal shape and threshold share a batch, whichever images they are of; results are those of `predict`.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor

from brim.engine.batching import Answer, DecodedRequest, Payload, RequestShape
from brim.engine.batching.warm_up import ladder
from brim.errors import ImageError, OutOfMemory, TooLarge
from brim.segmentation.config import DEFAULT_TILE, QUICK_SECONDS, PredictConfig, RequestConfig
from brim.segmentation.images import image_size
from brim.segmentation.images.reading import read_image
from brim.segmentation.images.writing import encoded
from brim.segmentation.networks import DTYPES, InferenceNetwork, admit, load_model, traits_of
from brim.segmentation.objects import MEDIA_TYPES, RINGS
from brim.segmentation.prediction.patches import (
    ImageFrame,
    Patch,
    PatchBatch,
    TileGrid,
    cut,
    padded,
    prepare,
    scale_of,
    scaled_size,
    usable_tile,
)
from brim.segmentation.prediction.scoring import ScoredImage, TracedImage
from brim.segmentation.prediction.stream import DECODED_BYTES, PredictRun, prediction_of
from brim.segmentation.tuning import KnownSizes

_UNTUNED = {"cuda": 32, "cpu": 4}  # largest batch tried if the network is not tuned
_LARGE_TILE = 512  # pixels
_MOST = 256  # patches of a batch of small images
_GRAPHS = 64  # sizes × shapes that stay captured; they share the memory of the largest
_RUNS = 16  # combinations of threshold, detect_holes, min_area and diameter whose state is kept
_ANY = 1 << 20  # no limit: the runner forms the batches

RunKey = tuple[float, bool, int | None, float | None]

_numbers = itertools.count()


class ImageReader(Protocol):
    """Reads the images of requests; a service does so in other processes."""

    def size(self, payload: Payload) -> tuple[int, int]:
        """Width and height from the header alone."""

    def read(self, payload: Payload, max_pixels: int) -> np.ndarray:
        """(H, W, 3) uint8, perhaps read-only."""


class ReadHere(ImageReader):
    """Reads images in this process."""

    def size(self, payload: Payload) -> tuple[int, int]:
        return image_size(payload.data, payload.name)

    def read(self, payload: Payload, max_pixels: int) -> np.ndarray:
        return read_image(bytes(payload.data), max_pixels=max_pixels, name=payload.name)


class SegmentServable:
    """One network with its weights on a device."""

    def __init__(
        self,
        network: str,
        weights: str | Path,
        device: torch.device,
        *,
        lock: AbstractContextManager[Any] | None = None,
        batch_sizes: str | Path | None = None,
        may_tune: bool = True,
        tile: int = DEFAULT_TILE,
        images: ImageReader | None = None,
    ) -> None:
        """Load the network; tune it for some seconds if no batch size is known on this device and it takes several.

        network      a name, or the file it comes from as the catalogue names it
        lock         held while the device is used
        batch_sizes  the file that tuning reads and writes
        may_tune     False if others use the device: sizes are then found by warming up, and not saved, as they are
                     if the known size is for smaller images
        images       reads the images of requests; by default in this process
        """
        admit(network)
        self._images = images or ReadHere()
        cv2.setNumThreads(1)  # requests are decoded in parallel: OpenCV's own threads would compete
        self._lock, self._device = lock or threading.RLock(), device
        self._tile = usable_tile(PredictConfig(tile=tile).tile)
        module = load_model(network, weights)
        known = KnownSizes(device, batch_sizes, "auto", QUICK_SECONDS)
        entry = known.find(network)
        # on two cores hrnet and unet_tiny are no faster with several large images at a time, and the first user waits
        one_at_a_time = device.type == "cpu" and self._tile >= _LARGE_TILE
        if entry is None and may_tune and not one_at_a_time:
            entry = known.find_or_tune(network, self._tile, lambda _: module)
        self._traits = traits_of(weights)
        self._network = InferenceNetwork(module, device, known.setting(entry), graphs=_GRAPHS, traits=self._traits)
        if entry is not None and entry.image_size < self._tile:
            entry = None  # for smaller images; it stays in the file
        self.tuned = entry is not None
        self.max_batch_size = entry.max_safe_batch_size if entry else 1 if one_at_a_time else _UNTUNED[device.type]
        self.sizes: Sequence[int] = ladder(entry.optimal_batch_size if entry else self.max_batch_size)
        itemsize = DTYPES[self._network.setting.precision].itemsize
        self.weight_bytes = sum(tensor.numel() * itemsize for tensor in module.state_dict().values())
        self.expected_s: Mapping[int, float] = {}
        self._number = next(_numbers)  # part of the keys: no batch mixes two versions of a model
        self._runs: dict[RunKey, PredictRun] = {}  # the least recently used first
        self._runs_lock = threading.Lock()
        self._rehearsal = self._new_run(0.5, True)
        noise = np.random.default_rng(0).integers(0, 256, (self._tile, self._tile, 3), np.uint8)
        self._example = cut(ImageFrame(0, "warm-up"), noise, **self._cutting()).patches[0].pixels

    # Requests

    def inspect(self, payload: Payload) -> RequestShape:
        """Key and patches from the image's header."""
        options = _options(payload)
        width, height = self._images.size(payload)
        # a thin strip has few pixels, and many once it is padded
        with_padding = padded(width) * padded(height)
        if width * height > options.max_pixels or with_padding > max(2 * options.max_pixels, self._tile**2):
            raise TooLarge(
                f"{payload.name}: {width} x {height} pixels, at most {options.max_pixels} are accepted; "
                "send it in parts"
            )
        if not width or not height:
            raise ImageError(f"{payload.name}: {width} x {height} pixels; expected sides of at least 1")
        shown = scaled_size((height, width), scale_of(self._traits, options.diameter))
        if shown[0] * shown[1] > 2 * options.max_pixels:
            raise TooLarge(
                f"{payload.name}: {width} x {height} pixels with objects of {options.diameter:g} are shown enlarged to "
                f"{shown[1]} x {shown[0]}, at most {2 * options.max_pixels} are accepted; send it in parts"
            )
        shape, num = (padded(shown[0]), padded(shown[1])), 1  # as `cut` makes them
        if max(shape) > self._tile:
            grid = TileGrid(*shape, self._tile)
            shape, num = (grid.rows.size, grid.columns.size), len(grid)
        scale = shape[0] * shape[1] / self._tile**2
        sizes = self._sizes_at(scale)
        return RequestShape(
            self._key(shape, options), num, cost=float(shape[0] * shape[1]), sizes=sizes,
            expected_s={size: self._expected(size, scale) for size in sizes} if self.expected_s else {},
        )  # fmt: skip

    def decode(self, payload: Payload) -> DecodedRequest:
        """Pixels, cut into patches; in pinned memory for a GPU."""
        options = _options(payload)
        _room.wait()
        image = self._images.read(payload, options.max_pixels)
        frame = prepare(ImageFrame(0, payload.name), image, self._traits, options.diameter, **self._cutting())
        run, patches = self._run_of(options), frame.patches
        frame.patches = []  # they refer to the frame
        for patch in patches:
            _room.take(patch.pixels)
        context = _Context(run, frame, options, image if options.format in ("overlay", "csv") else None)
        return DecodedRequest(self._key(patches[0].shape, options), [_Part(run, patch) for patch in patches], context)

    def forward(self, parts: list["_Part"]) -> "_RunningParts":
        """Queue patches of one shape and threshold."""
        run = parts[0].run
        patches = [part.patch for part in parts]
        run.scorer.restore(_ANY)  # a batch that did not fit must not make later ones smaller
        return _RunningParts(run, patches, run.scorer.forward(PatchBatch(patches)))

    def collect(self, running: "_RunningParts") -> list[Any]:
        """An output per patch: the batch's scored images for the last patch of an image, None before, or a failure.

        Waits for the forward alone, so that the next one follows at once; rings are found meanwhile.
        """
        running.run.tracer.wait(running.done)
        if running.run is self._rehearsal and running.run.scorer.size() < len(running.patches):
            raise OutOfMemory(f"a batch of {len(running.patches)} did not fit on {self._device}")
        scored = _ScoredBatch(running.run, running.done)
        complete = {id(done.frame) for done in running.done}
        last = {id(patch.frame): number for number, patch in enumerate(running.patches)}
        return [
            patch.frame.failure or (scored if last[id(patch.frame)] == number and id(patch.frame) in complete else None)
            for number, patch in enumerate(running.patches)
        ]

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        context: _Context = item.context
        (scored,) = [output for output in outputs if isinstance(output, _ScoredBatch)]
        traced, format = scored.trace(context.frame), context.options.format
        if context.options.as_rings and format == "geojson":
            objects = context.run.finish_one(traced, lambda frame, objects: objects)
            body, media_type, num = objects.to_bytes(), RINGS, objects.rings.num_outlines
        else:
            prediction = context.run.finish_one(traced, prediction_of)
            body, media_type = encoded(prediction, format, context.image), MEDIA_TYPES[format]
            num = len(prediction.polygons)
        return Answer(body, media_type, {"polygons": num, "width": context.frame.width, "height": context.frame.height})

    def close(self) -> None:
        self._network.release()
        self._runs.clear()
        del self._network, self._rehearsal, self._example

    def example(self, num: int) -> list["_Part"]:
        shape = (self._tile, self._tile)
        frames = [ImageFrame(0, "warm-up", *shape) for _ in range(num)]
        return [_Part(self._rehearsal, Patch(frame, self._example, shape)) for frame in frames]

    # What a request needs

    def _cutting(self) -> dict[str, Any]:
        return {"tile": self._tile, "overlap": None, "resize": None, "pinned": self._device.type == "cuda"}

    def _key(self, shape: tuple[int, int], options: RequestConfig) -> tuple[Any, ...]:
        return (self._number, shape, *_run_key(options))

    def _sizes_at(self, scale: float) -> Sequence[int]:
        """Batch sizes for patches of this share of a tile: a GPU takes more of smaller ones in the same memory."""
        if self._device.type != "cuda" or scale > 0.5:
            return self.sizes
        return ladder(max(self.sizes[-1], min(_MOST, int(self.sizes[-1] / scale))))

    def _expected(self, size: int, scale: float) -> float:
        """Seconds of a batch by its pixels: interpolated between the measured ones, in proportion beyond them."""
        sizes, tiles = list(self.expected_s), size * scale
        share = min(1.0, tiles / sizes[0]) * max(1.0, tiles / sizes[-1])
        return float(np.interp(tiles, sizes, list(self.expected_s.values()))) * share

    def _run_of(self, options: RequestConfig) -> PredictRun:
        key = _run_key(options)
        with self._runs_lock:
            run = self._runs[key] = self._runs.pop(key) if key in self._runs else self._new_run(*key)
            if len(self._runs) > _RUNS:
                del self._runs[next(iter(self._runs))]
            return run

    def _new_run(
        self, threshold: float, detect_holes: bool, min_area: int | None = None, diameter: float | None = None
    ) -> PredictRun:
        config = PredictConfig(
            batch_size=_ANY, threshold=threshold, detect_holes=detect_holes, min_area=min_area, diameter=diameter,
            tile=self._tile,
        )  # fmt: skip
        return PredictRun(self._network, config, self._lock)


def _run_key(options: RequestConfig) -> "RunKey":
    """Requests that may share a batch."""
    return options.threshold, options.detect_holes, options.min_area, options.diameter


class _Room:
    """Limits the bytes of decoded pixels; they count until their tensors are deleted."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._held_bytes = limit_bytes, 0
        self._changes: deque[int] = deque()  # bytes added and freed: finalisers run anywhere and may take no lock
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until the limit is not reached; the next image may exceed it."""
        while self.held_bytes() >= self._limit_bytes:
            time.sleep(0.005)

    def take(self, pixels: Tensor) -> None:
        self._changes.append(pixels.nbytes)
        weakref.finalize(pixels, self._changes.append, -pixels.nbytes).atexit = False

    def held_bytes(self) -> int:
        with self._lock:
            while self._changes:
                self._held_bytes += self._changes.popleft()
            return self._held_bytes


_room = _Room(DECODED_BYTES)  # for all models of the process


class _Part(NamedTuple):
    run: PredictRun
    patch: Patch


class _RunningParts(NamedTuple):
    run: PredictRun
    patches: list[Patch]
    done: list[ScoredImage]


class _ScoredBatch:
    """The images of a batch; whoever finishes the first of them traces all."""

    def __init__(self, run: PredictRun, done: list[ScoredImage]) -> None:
        self._run, self._scored = run, {id(each.frame): each for each in done}
        self._traced: dict[int, TracedImage] = {}
        self._lock = threading.Lock()

    def trace(self, frame: ImageFrame) -> TracedImage:
        """One image of the batch; each is taken once."""
        with self._lock:
            if id(frame) in self._scored:
                try:
                    self._trace(list(self._scored.values()))
                except Exception:  # broad on purpose: one image must not fail the others
                    self._trace([self._scored[id(frame)]])
            return self._traced.pop(id(frame))

    def _trace(self, scored: list[ScoredImage]) -> None:
        with _tracing:
            traced = self._run.trace(scored)
        for each in traced:
            del self._scored[id(each.frame)]
            self._traced[id(each.frame)] = each


_tracing = threading.Lock()  # a tracer is for one thread at a time, and its stream is shared by all runs of a device


class _Context(NamedTuple):
    """What finish needs of a request."""

    run: PredictRun
    frame: ImageFrame
    options: RequestConfig
    image: np.ndarray | None  # (H, W, 3), for an overlay or measurements


def _options(payload: Payload) -> RequestConfig:
    """The options of a payload that segmentation knows."""
    known = {field.name for field in fields(RequestConfig)}
    return RequestConfig(**{name: value for name, value in payload.options.items() if name in known})

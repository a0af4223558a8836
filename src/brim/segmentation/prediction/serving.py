"""A segmentation network that answers requests: one image in, polygons in any of the formats out.

Axes: h, w pixels of a patch. A part is a patch: an image no larger than the tile has one, a larger one a window each.
Patches of one shape and threshold share a batch, whatever images they are of; results are those of `predict`.
"""

import itertools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

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
from brim.segmentation.networks import DTYPES, InferenceNetwork, create_model, find_model, load_weights
from brim.segmentation.objects import MEDIA_TYPES, RINGS
from brim.segmentation.prediction.patches import ImageFrame, Patch, PatchBatch, TileGrid, cut, padded, usable_tile
from brim.segmentation.prediction.scoring import ScoredImage, TracedImage
from brim.segmentation.prediction.stream import DECODED_BYTES, PredictRun
from brim.segmentation.tuning import BatchSizeEntry, KnownSizes

_UNTUNED = {"cuda": 32, "cpu": 4}  # largest batch tried where nobody tuned
_MOST = 256  # patches of a batch of small images
_GRAPHS = 64  # sizes × shapes that stay captured; they share the memory of the largest
_RUNS = 16  # thresholds whose state is kept
_ANY = 1 << 20  # patches: the batch is formed elsewhere

_numbers = itertools.count()


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
    ) -> None:
        """Load; where no batch size of the network is known on this device it is tuned for some seconds, and saved.

        lock         whoever uses the device holds it
        batch_sizes  the file that tuning reads and writes
        may_tune     False where others use the device: sizes are then found by warming up, and not saved; so they
                     are where the known one is of smaller images
        """
        find_model(network)
        cv2.setNumThreads(1)  # requests are decoded side by side: OpenCV's own threads would only compete
        self._lock, self._tile, self._device = (
            lock or threading.RLock(),
            usable_tile(PredictConfig(tile=tile).tile),
            device,
        )
        module = create_model(network)
        load_weights(module, weights)
        known = KnownSizes(device, batch_sizes, "auto", QUICK_SECONDS)
        entry = known.find(network)
        if entry is None and may_tune:
            entry = known.find_or_tune(network, self._tile, lambda _: module)
        self._network = InferenceNetwork(module, device, known.setting(entry), graphs=_GRAPHS)
        if entry is not None and entry.image_size < self._tile:
            entry = None  # of smaller images, by somebody who wanted just that: it stays in the file
        self._set_sizes(entry)
        itemsize = DTYPES[self._network.setting.precision].itemsize
        self.weight_bytes = sum(tensor.numel() * itemsize for tensor in module.state_dict().values())
        self.expected_s: Mapping[int, float] = {}
        self._number = next(_numbers)  # in the keys: no batch holds parts of two versions of a model
        self._runs: OrderedDict[tuple[float, bool], PredictRun] = OrderedDict()
        self._runs_lock = threading.Lock()
        self._rehearsal = self._new_run(0.5, True)
        self._blank = cut(ImageFrame(0, "warm-up"), _ramps(self._tile), **self._cutting()).patches[0].pixels

    def _set_sizes(self, entry: BatchSizeEntry | None) -> None:
        self.tuned = entry is not None
        self.max_batch_size = entry.max_safe_batch_size if entry else _UNTUNED[self._device.type]
        self.sizes: Sequence[int] = ladder(entry.optimal_batch_size if entry else self.max_batch_size)

    # Requests

    def inspect(self, payload: Payload) -> RequestShape:
        """Key and patches from the image's header."""
        options = _options(payload)
        width, height = image_size(payload.data, payload.name)
        # a thin strip is small as a file and large as windows
        whole = padded(width) * padded(height)
        if width * height > options.max_pixels or whole > max(2 * options.max_pixels, self._tile**2):
            raise TooLarge(
                f"{payload.name}: {width} x {height} pixels, at most {options.max_pixels} are taken; send it in parts"
            )
        if not width or not height:
            raise ImageError(f"{payload.name}: {width} x {height} pixels; expected sides of at least 1")
        shape, num = self._patches(height, width)
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
        image = read_image(bytes(payload.data), max_pixels=options.max_pixels, name=payload.name)
        frame = cut(ImageFrame(0, payload.name), image, **self._cutting())
        run, patches = self._run_of(options), frame.patches
        frame.patches = []  # which refer to it
        for patch in patches:
            _room.take(patch.pixels)
        overlaid = image if options.format == "overlay" else None
        context = _Context(run, frame, options.format, overlaid, options.as_rings and options.format == "geojson")
        return DecodedRequest(self._key(patches[0].shape, options), [_Part(run, patch) for patch in patches], context)

    def forward(self, parts: list["_Part"]) -> "_Running":
        """Queue patches of one shape and threshold."""
        run = parts[0].run
        patches = [part.patch for part in parts]
        run.scorer.restore(_ANY)  # memory that was short once may be there now: no batch pays for one before it
        return _Running(run, patches, run.scorer.forward(PatchBatch(patches)))

    def collect(self, running: "_Running") -> list[Any]:
        """What is done by a batch: an image with its last window, None for those before, a failure.

        Only the forward is waited for, so that the next one follows at once; the rings are found beside it.
        """
        running.run.tracer.wait(running.done)
        if running.run is self._rehearsal and running.run.scorer.size() < len(running.patches):
            raise OutOfMemory(f"a batch of {len(running.patches)} did not fit on {self._device}")
        scored = _ScoredPatches(running.run, running.done)
        complete = {id(done.frame) for done in running.done}
        last = {id(patch.frame): number for number, patch in enumerate(running.patches)}
        return [
            patch.frame.failure or (scored if last[id(patch.frame)] == number and id(patch.frame) in complete else None)
            for number, patch in enumerate(running.patches)
        ]

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        """Polygons, and the answer in the format asked for."""
        context: _Context = item.context
        (scored,) = [output for output in outputs if isinstance(output, _ScoredPatches)]
        traced = scored.trace(context.frame)
        if context.as_rings:
            rings = context.run.rings(traced)
            facts = {"polygons": rings.num_outlines, "width": context.frame.width, "height": context.frame.height}
            return Answer(rings.to_bytes(), RINGS, facts)
        ((_, prediction),) = context.run.finish([traced])
        if context.frame.failure is not None:
            raise context.frame.failure
        facts = {"polygons": len(prediction.polygons), "width": prediction.width, "height": prediction.height}
        return Answer(encoded(prediction, context.format, context.image), MEDIA_TYPES[context.format], facts)

    def close(self) -> None:
        self._network.release()
        self._runs.clear()
        del self._network, self._rehearsal, self._blank

    # Warming up

    def example(self, num: int) -> list["_Part"]:
        shape = (self._tile, self._tile)
        frames = [ImageFrame(0, "warm-up", *shape) for _ in range(num)]
        return [_Part(self._rehearsal, Patch(frame, self._blank, shape)) for frame in frames]

    # What a request needs

    def _cutting(self) -> dict[str, Any]:
        return {"tile": self._tile, "overlap": None, "resize": None, "pinned": self._device.type == "cuda"}

    def _patches(self, height: int, width: int) -> tuple[tuple[int, int], int]:
        """Shape and number of an image's patches, as `cut` makes them."""
        shape = (padded(height), padded(width))
        if max(shape) <= self._tile:
            return shape, 1
        grid = TileGrid(*shape, self._tile)
        return (grid.rows.size, grid.columns.size), len(grid)

    def _key(self, shape: tuple[int, int], options: RequestConfig) -> tuple[Any, ...]:
        return (self._number, shape, options.threshold, options.detect_holes)

    def _sizes_at(self, scale: float) -> Sequence[int]:
        """Sizes for patches of so much of a tile: a GPU is as full with more of smaller ones, in the same memory."""
        if self._device.type != "cuda" or scale > 0.5:
            return self.sizes
        return ladder(max(self.sizes[-1], min(_MOST, int(self.sizes[-1] / scale))))

    def _expected(self, size: int, scale: float) -> float:
        """Seconds of a batch, by its pixels: between those measured, beyond them in proportion."""
        sizes, seconds = list(self.expected_s), list(self.expected_s.values())
        tiles = size * scale
        share = min(1.0, tiles / sizes[0]) * max(1.0, tiles / sizes[-1])
        between = float(np.interp(tiles, sizes, seconds))
        return between * share

    def _run_of(self, options: RequestConfig) -> PredictRun:
        key = (options.threshold, options.detect_holes)
        with self._runs_lock:
            run = self._runs.get(key)
            if run is None:
                run = self._runs[key] = self._new_run(*key)
                if len(self._runs) > _RUNS:
                    self._runs.popitem(last=False)
            self._runs.move_to_end(key)
            return run

    def _new_run(self, threshold: float, detect_holes: bool) -> PredictRun:
        config = PredictConfig(batch_size=_ANY, threshold=threshold, detect_holes=detect_holes, tile=self._tile)
        return PredictRun(self._network, config, self._lock)


class _Room:
    """Bounds the bytes of decoded pixels that wait for the device; they count until nobody has them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._held_bytes = limit_bytes, 0
        self._changes: deque[int] = deque()  # what came and went: finalisers run anywhere and may take no lock
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until there is room; one image may always pass."""
        while self.held_bytes() >= self._limit_bytes:
            time.sleep(0.005)

    def take(self, pixels: Tensor) -> None:
        self._changes.append(pixels.nbytes)
        weakref.finalize(pixels, self._changes.append, -pixels.nbytes).atexit = False

    def held_bytes(self) -> int:
        """Decoded and not yet dropped."""
        with self._lock:
            while self._changes:
                self._held_bytes += self._changes.popleft()
            return self._held_bytes


_room = _Room(DECODED_BYTES)  # of the process, whatever the model


class _Part(NamedTuple):
    """A patch, and the run of its threshold."""

    run: PredictRun
    patch: Patch


class _Running(NamedTuple):
    run: PredictRun
    patches: list[Patch]
    done: list[ScoredImage]


class _ScoredPatches:
    """Images that the network has seen together; whoever finishes the first of them finds the rings of all."""

    def __init__(self, run: PredictRun, done: list[ScoredImage]) -> None:
        self._run, self._done = run, {id(each.frame): each for each in done}
        self._traced: dict[int, TracedImage] = {}
        self._lock = threading.Lock()

    def trace(self, frame: ImageFrame) -> TracedImage:
        """The rings of one image, once."""
        with self._lock:
            if id(frame) in self._done:
                try:
                    self._find(list(self._done.values()))
                except Exception:  # broad on purpose: whatever one image did, the others shall not suffer
                    self._find([self._done[id(frame)]])
            return self._traced.pop(id(frame))

    def _find(self, done: list[ScoredImage]) -> None:
        with _tracing:
            traced = self._run.trace(done)
        for each in traced:
            del self._done[id(each.frame)]
            self._traced[id(each.frame)] = each


_tracing = threading.Lock()  # a tracer is for one thread at a time, and the stream it uses is the device's


class _Context(NamedTuple):
    """What is needed of a request once its pixels are scored."""

    run: PredictRun
    frame: ImageFrame
    format: str
    image: np.ndarray | None  # (H, W, 3), of an overlay
    as_rings: bool  # instead of text


def _options(payload: Payload) -> RequestConfig:
    """Options of a payload; those that are meant for others are left out."""
    known = {field.name for field in fields(RequestConfig)}
    return RequestConfig(**{name: value for name, value in payload.options.items() if name in known})


def _ramps(side: int) -> np.ndarray:
    """(side, side, 3) uint8: some image, the same every time."""
    ramp = np.linspace(0, 255, side).astype(np.uint8)
    return np.stack([np.broadcast_to(ramp, (side, side)), np.broadcast_to(ramp[:, None], (side, side)),
                     np.full((side, side), 128, np.uint8)], -1)  # fmt: skip

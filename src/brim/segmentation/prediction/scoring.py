"""The device's part of a prediction: upload patches, run the network, download masks and rings.

Axes: B patches of a batch, h, w pixels of a patch. Uploads, kernels and downloads run on three streams. The host waits
only for the batch two before the one it has just queued, which bounds how far it runs ahead.

A GPU also finds the rings, on a stream of its own, so that only they cross the bus: some hundred kilobytes an image
instead of four megabytes of probabilities. On the host an image takes a core 3 to 10 ms, and threads compete for the
interpreter lock: at most 350 images a second on 16 cores. On a CPU, the threads that make polygons find the rings.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from brim.engine.device import Halving, check_injected, guard
from brim.engine.meter import ceiling_rate
from brim.engine.pipeline import HostCopy, Pending
from brim.errors import OutOfMemory
from brim.segmentation.networks import InferenceNetwork
from brim.segmentation.objects import ImageObjects, Rings, device_rings
from brim.segmentation.prediction.patches import Blend, ImageFrame, Patch, PatchBatch

AHEAD = 2  # batches queued on the device and not known to be finished: one runs, one waits
TRACING_DEVICES = ("cuda",)  # device types on which device_rings is faster than the host
LEAST_PIXELS = 2**19  # traced on the device; 250 kernels take 2 ms to launch, in which the host traces 700 000 pixels


@dataclass(frozen=True, slots=True)
class BatchScores:
    """Results of B images, queued on the device."""

    probability: Tensor  # (B, h, w) float32; of instances (B, maps, h, w): foreground, height, classes
    mask: Tensor  # (B, h, w) uint8, 255 or 0; of instances empty
    host: Pending  # copies for the host: "mask" (B, h, w) uint8 and "finite" (B,) bool
    ready: torch.cuda.Event | None  # recorded after probability and mask; None on a CPU
    images: Tensor | None = None  # (B, 3, h, w) uint8, of instances that were shown at their own size


@dataclass(frozen=True, slots=True)
class ScoredImage:
    """An image whose result is queued on the device, or that failed."""

    frame: ImageFrame
    scores: BatchScores | None = None
    row: int = 0  # of this image in scores


class _ScoredPatches(NamedTuple):
    patches: list[Patch]
    probability: Tensor  # as in BatchScores
    finite: Tensor  # (B,) bool
    images: Tensor  # (B, 3, h, w) uint8


class Scorer:
    """Runs batches on the network's device; called by one thread at a time.

    The lock is held while a batch is queued and released between batches, so that others can use the network.
    """

    def __init__(
        self,
        network: InferenceNetwork,
        lock: AbstractContextManager[Any],
        *,
        batch_size: int,
        threshold: float,
        resize: int | None,
    ) -> None:
        """resize is the side in pixels to which every image is scaled for the network."""
        self._network, self._lock = network, lock
        self._instances = network.traits.task == "instances"
        self._threshold, self._resize = threshold, resize
        self._device, self._on_gpu = network.device, network.device.type == "cuda"
        self._halving = Halving(batch_size, self._device)
        self._copies = HostCopy()
        self._upload, self._download = (
            torch.cuda.Stream(self._device) if self._on_gpu else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._started: deque[torch.cuda.Event] = deque()
        self._largest = torch.Size((0, 0, 0))  # shape of the largest batch
        self.pixels = 0  # that went through the network

    def size(self) -> int:
        """Patches per batch; halved whenever a batch did not fit."""
        return self._halving.size

    def restore(self, size: int) -> None:
        """Set the batch size again after it was halved."""
        self._halving.size = size

    def forward(self, batch: PatchBatch) -> list[ScoredImage]:
        """Queue a batch on the device; returns the images that it completes."""
        if batch.failed is not None:
            return [ScoredImage(batch.failed)]
        with self._lock, self._on_device():
            done = [image for scored in self._scores(batch.patches) for image in self._collect(scored)]
            if self._on_gpu:
                self._started.append(_recorded(self._device))
        if len(self._started) > AHEAD:
            self._started.popleft().synchronize()
        # Images that failed here: each once, though several of its windows may be in this batch or still to come.
        for frame in {id(patch.frame): patch.frame for patch in batch.patches}.values():
            if frame.failure is not None and frame.missing:
                frame.missing = 0
                done.append(ScoredImage(frame))
        return done

    def ceiling(self, seconds: float) -> float | None:
        """Pixels/s of the forward alone, on a batch that stays on the device; None if nothing ran."""
        num, height, width = self._largest
        if not num:
            return None
        with self._lock, self._on_device():
            images = torch.zeros(num, height, width, 3, dtype=torch.uint8, device=self._device).permute(0, 3, 1, 2)

            def once() -> int:
                maps = self._activated(self._network(images))
                if not self._instances:
                    _mask(maps, self._threshold)
                if self._on_gpu:
                    torch.cuda.synchronize(self._device)
                return num * height * width

            return ceiling_rate(once, seconds=seconds, warmup=int(self._on_gpu))  # which also ends what is queued

    # Through the network

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The calling thread's device and gradient mode."""
        with torch.cuda.device(self._device) if self._on_gpu else nullcontext(), torch.inference_mode():
            yield

    def _scores(self, patches: list[Patch]) -> list[_ScoredPatches]:
        patches = [patch for patch in patches if patch.frame.failure is None]
        if not patches:
            return []
        try:
            return self._halving.run(self._score, patches)
        except OutOfMemory:
            pass  # not even one fits: try each outside the handler, which keeps tensors alive
        scored = []
        for patch in patches:
            try:
                scored += self._halving.run(self._score, [patch])
            except OutOfMemory as failure:
                _fail(patch.frame, failure)
        return scored

    def _score(self, patches: list[Patch]) -> _ScoredPatches:
        images = self._uploaded(patches)
        logits = self._network(stretched(images, [patch.frame.contrast for patch in patches]))
        finite = torch.isfinite(logits).flatten(1).all(1)
        shape = torch.Size((len(logits), *logits.shape[2:]))
        self.pixels += shape.numel()
        if shape.numel() > self._largest.numel():
            self._largest = shape
        return _ScoredPatches(patches, self._activated(logits), finite, images)

    def _activated(self, logits: Tensor) -> Tensor:
        """Logits (B, maps, h, w) as in BatchScores."""
        return instance_maps(logits) if self._instances else torch.sigmoid(logits[:, 0])

    def _uploaded(self, patches: list[Patch]) -> Tensor:
        """(B, 3, h, w) uint8 on the device, copied while the device computes."""
        images = [patch.pixels for patch in patches]
        if self._upload is not None:
            with torch.cuda.stream(self._upload):
                images = [image.to(self._device, non_blocking=True) for image in images]
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._upload)
            for image in images:
                image.record_stream(compute)
        if self._resize is not None:
            return torch.cat([resized(image, self._resize) for image in images])
        return torch.stack(images).permute(0, 3, 1, 2)

    # From patches to images

    def _collect(self, scored: _ScoredPatches) -> Iterator[ScoredImage]:
        """Send the masks of whole images, blend windows, and send images whose last window this was."""
        patches, probability, finite, images = scored
        whole = self._resize is None and any(_is_whole(patch) for patch in patches)
        scores = self._send(probability, finite, images) if whole else None
        for row, patch in enumerate(patches):
            if patch.frame.failure is not None:
                continue
            if scores is not None and _is_whole(patch):
                yield ScoredImage(patch.frame, scores, row)
                continue
            try:
                with guard():
                    done = self._assemble(patch, probability[row], finite[row])
            except OutOfMemory as failure:  # an image too large for the device fails alone
                _fail(patch.frame, failure)
                continue
            if done is not None:
                yield done

    def _assemble(self, patch: Patch, probability: Tensor, finite: Tensor) -> ScoredImage | None:
        """The image at its own size, or None while windows are missing; probability (h, w) or (maps, h, w)."""
        frame = patch.frame
        if patch.window is None:
            return ScoredImage(frame, self._send(_own_size(frame, probability)[None], finite[None]))
        assert frame.grid is not None
        assert frame.weights is not None
        if frame.blend is None:
            rows, columns = (weights.to(self._device, non_blocking=True) for weights in frame.weights)
            frame.blend, frame.finite = Blend(frame.grid, rows, columns, *probability.shape[:-2]), finite
        assert frame.finite is not None
        frame.blend.add(patch.window, probability)
        frame.finite = frame.finite & finite
        frame.missing -= 1
        if frame.missing:
            return None
        total = frame.blend.total if frame.shown is None else _own_size(frame, frame.blend.total)
        done = ScoredImage(frame, self._send(total[None], frame.finite[None]))
        frame.blend = frame.finite = None
        return done

    def _send(self, probability: Tensor, finite: Tensor, images: Tensor | None = None) -> BatchScores:
        """Threshold masks, and copy to the host while the device computes; the parts are those of BatchScores."""
        mask = finite.new_empty(0) if self._instances else _mask(probability, self._threshold)
        images = images if self._instances else None
        tensors = {"mask": mask, "finite": finite}
        if self._download is None:
            return BatchScores(probability, mask, self._copies.start(tensors), None, images)
        ready = _recorded(self._device)
        self._download.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._download):
            return BatchScores(probability, mask, self._copies.start(tensors), ready, images)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps rather than spins
    event.record(torch.cuda.current_stream(device))
    return event


def _mask(probability: Tensor, threshold: float) -> Tensor:
    """uint8, 255 where the probability is above the threshold, else 0."""
    return (probability > threshold).to(torch.uint8) * 255


def instance_maps(logits: Tensor) -> Tensor:
    """Logits (B, 2 + classes, h, w) as foreground and height in [0, 1], and the probability of each class."""
    if logits.shape[1] == 2:
        return torch.sigmoid(logits)
    return torch.cat([torch.sigmoid(logits[:, :2]), torch.softmax(logits[:, 2:], 1)], 1)


def stretched(images: Tensor, contrast: Sequence[tuple[float, float] | None]) -> Tensor:
    """images (B, 3, h, w) uint8 with the values of each one's contrast (low, high) at 0 and 255; None: as it is."""
    if all(limits is None for limits in contrast):
        return images
    limits = torch.tensor([own or (0.0, 255.0) for own in contrast], device=images.device)[:, :, None, None, None]
    values = (images.float() - limits[:, 0]) * (255 / (limits[:, 1] - limits[:, 0]))
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _is_whole(patch: Patch) -> bool:
    """Whether the patch is an image at its own size."""
    return patch.window is None and patch.frame.shown is None


def _own_size(frame: ImageFrame, maps: Tensor) -> Tensor:
    """Maps (…, h, w) of the size that the network saw, at the image's size (…, H, W)."""
    if frame.shown is not None:
        maps = maps[..., : frame.shown[0], : frame.shown[1]]
    planes = maps.reshape(1, -1, *maps.shape[-2:])
    back = F.interpolate(planes, (frame.height, frame.width), mode="bilinear", antialias=True)
    return back.view(*maps.shape[:-2], frame.height, frame.width)


def resized(image: Tensor, side: int) -> Tensor:
    """image (H, W, 3) uint8 → (1, 3, side, side) uint8."""
    pixels = image.permute(2, 0, 1)[None].float()
    resized = F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _fail(frame: ImageFrame, failure: OutOfMemory) -> None:
    frame.blend = frame.finite = None
    frame.failure = OutOfMemory(f"{frame.name}: {failure}")


@dataclass(frozen=True, slots=True)
class TracedRings:
    """Rings of images that were traced together, being copied to the host."""

    pending: Pending  # DeviceRings by the names of its fields
    num_rows: int  # of each image in the stack, with the free row

    def of(self, place: int) -> Rings:
        """The rings of the image at this place; waits for the copy."""
        host = {name: tensor.numpy() for name, tensor in self.pending.wait().items()}
        start, end = host["ends"][place : place + 2].tolist()
        names = ("points", "first", "area", "mass", "owner")
        own = Rings(*(host[name] for name in names)).between(start, end, place * self.num_rows)
        return own._replace(mass=own.mass / device_rings.UNIT)


@dataclass(frozen=True, slots=True)
class TracedImage:
    """An image whose mask and rings are being copied to the host, or that failed."""

    frame: ImageFrame
    scored: Pending | None = None  # "mask" (B, h, w) uint8, "finite" (B,) bool
    row: int = 0  # of this image in scored
    rings: TracedRings | None = None  # None: the host traces
    place: int = 0  # of this image in rings
    probability: Pending | None = None  # "probability" (1, h, w) float32, if the host traces
    objects: "TracedObjects | None" = None  # of instances


class TracedObjects(Protocol):
    """Instances of images that were labelled together, being copied to the host."""

    def wait(self) -> None: ...

    def of(self, place: int, frame: ImageFrame) -> ImageObjects:
        """The objects of the image at this place; waits for the copy."""


class BatchTracer:
    """Finds the objects of batches on their device; called by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = HostCopy()
        self._stream = tracing_stream(device) if device.type == "cuda" else None

    @property
    def on_device(self) -> bool:
        """Whether the threads that make polygons have little to do."""
        return True

    def wait(self, scored: Sequence[ScoredImage]) -> None:
        """Sleep until the device has computed these images; counting objects would spin until then."""
        for ready in {id(each.scores): each.scores.ready for each in scored if each.scores is not None}.values():
            if ready is not None:
                ready.synchronize()

    def trace(self, scored: Sequence[ScoredImage]) -> list[TracedImage]:
        """Find the objects of images, after wait."""
        groups: dict[int, list[ScoredImage]] = {}  # by their scores
        for each in scored:
            groups.setdefault(id(each.scores), []).append(each)
        on_gpu = self._stream is not None
        with (
            torch.cuda.device(self._device) if on_gpu else nullcontext(),
            torch.cuda.stream(self._stream) if on_gpu else nullcontext(),
            torch.inference_mode(),
        ):
            return [traced for group in groups.values() for traced in self._group(group[0].scores, group)]

    def _group(self, scores: BatchScores | None, group: list[ScoredImage]) -> Iterator[TracedImage]:
        if scores is None:
            yield from (TracedImage(each.frame) for each in group)
            return
        if self._stream is not None:
            # They come from the memory pool of the forward's stream. Their last reference may go while kernels of this
            # stream still have to read them: the pool must not reuse their memory before.
            for tensor in (scores.probability, scores.mask, scores.images):
                if tensor is not None:
                    tensor.record_stream(self._stream)
        for part in self._parts(scores, group):
            yield from self._part(scores, part)

    def _part(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        return self._halved(scores, part)

    def _halved(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        """Images together, else in halves."""
        try:
            check_injected(len(part))
            with guard():
                return self._traced(scores, part)
        except OutOfMemory as failure:
            message = str(failure)  # the next try is outside the handler, which would keep this one's tensors alive
        if len(part) == 1:
            return [self._too_large(scores, part[0], message)]
        middle = len(part) // 2
        return self._halved(scores, part[:middle]) + self._halved(scores, part[middle:])

    def _parts(self, scores: BatchScores, group: list[ScoredImage]) -> Iterator[list[ScoredImage]]:
        """Images to be traced together."""
        raise NotImplementedError

    def _traced(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        raise NotImplementedError

    def _too_large(self, scores: BatchScores, scored: ScoredImage, message: str) -> TracedImage:
        """An image that does not fit on the device."""
        raise NotImplementedError


class Tracer(BatchTracer):
    """Finds the rings of masks; small images and those that do not fit are left to the host."""

    def __init__(self, device: torch.device, *, detect_holes: bool) -> None:
        """Compile device_rings now, before the threads of the run compete for the interpreter."""
        super().__init__(device)
        self._detect_holes = detect_holes
        if self.on_device:
            device_rings.prepare()

    @property
    def on_device(self) -> bool:
        return self._device.type in TRACING_DEVICES

    def _parts(self, scores: BatchScores, group: list[ScoredImage]) -> Iterator[list[ScoredImage]]:
        """Images of consecutive rows, as many as may be traced together."""
        _, height, width = scores.mask.shape
        most = (
            max(1, device_rings.band_pixels(scores.mask.device) // (height * width)) if self.on_device else len(group)
        )
        part: list[ScoredImage] = []
        for each in group:
            if part and (len(part) == most or each.row != part[-1].row + 1):
                yield part
                part = []
            part.append(each)
        yield part

    def _part(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        if not self.on_device or len(part) * scores.mask[0].numel() < LEAST_PIXELS:
            return [self._left_to_host(scores, each) for each in part]
        return self._halved(scores, part)

    def _too_large(self, scores: BatchScores, scored: ScoredImage, message: str) -> TracedImage:
        return self._left_to_host(scores, scored)

    def _traced(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        rows = slice(part[0].row, part[-1].row + 1)
        sizes = [(each.frame.height, each.frame.width) for each in part]
        on_device = device_rings.find_rings(scores.mask[rows], scores.probability[rows], sizes, self._detect_holes)
        rings = TracedRings(self._copies.start(on_device._asdict()), max(height for height, _ in sizes) + 1)
        return [TracedImage(each.frame, scores.host, each.row, rings, place) for place, each in enumerate(part)]

    def _left_to_host(self, scores: BatchScores, scored: ScoredImage) -> TracedImage:
        try:
            with guard():
                # whole rows: a part of them would need a copy on the device, which may have no room for it
                probability = self._copies.start({"probability": scores.probability[scored.row : scored.row + 1]})
        except OutOfMemory as failure:
            scored.frame.failure = OutOfMemory(f"{scored.frame.name}: {failure}")
            return TracedImage(scored.frame)
        return TracedImage(scored.frame, scores.host, scored.row, probability=probability)


@cache  # one for all runs: torch keeps memory for every stream that ever used some
def tracing_stream(device: torch.device) -> torch.cuda.Stream:
    # Ahead of the network's kernels: these are few and short, and the host waits for them.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

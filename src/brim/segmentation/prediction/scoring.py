"""The device's part of a prediction: patches up, through the network, masks and rings back down.

Axes: B patches of a batch, h, w pixels of a patch. Uploads, kernels and downloads are queued on three streams. The host
never waits for the batch it has just started, only for the one two before it, so it cannot run ahead without bound.

On a GPU the rings are found where masks and probabilities are, on a stream of their own, and only they cross the bus:
a few hundred kilobytes an image instead of the four megabytes of its probabilities. On the host an image takes a core
3 to 10 ms, and threads get in each other's way at the interpreter's lock: 350 images a second were the most on 16
cores. On a CPU the probabilities just pass by, and the rings are found by the threads that make polygons.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brim.engine.device import Halving, check_injected, guard
from brim.engine.meter import ceiling_rate
from brim.engine.pipeline import HostCopy, Pending
from brim.errors import OutOfMemory
from brim.segmentation.networks import InferenceNetwork
from brim.segmentation.objects import Rings, device_rings
from brim.segmentation.prediction.patches import Blend, ImageFrame, Patch, PatchBatch

AHEAD = 2  # batches queued on the device and not seen finished: one runs, one waits


@dataclass(frozen=True, slots=True)
class BatchScores:
    """Results of images, B at a time, queued on the device."""

    probability: Tensor  # (B, h, w) float32
    mask: Tensor  # (B, h, w) uint8, 255 or 0
    host: Pending  # "mask" (B, h, w) uint8 and "finite" (B,) bool, on their way to the host
    ready: torch.cuda.Event | None  # follows probability and mask on the stream that makes them; None on a CPU


@dataclass(frozen=True, slots=True)
class ScoredImage:
    """An image whose result is queued on the device, or that failed."""

    frame: ImageFrame
    scores: BatchScores | None = None
    row: int = 0  # of this image there


@dataclass(frozen=True, slots=True)
class _ScoredPatches:
    patches: list[Patch]
    probability: Tensor  # (B, h, w) float32
    finite: Tensor  # (B,) bool: no NaN and no infinity among the logits


class Scorer:
    """Runs batches on the network's device; one thread at a time calls it.

    The lock is held while a batch is queued and never between two batches: others can use the network in between.
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
        """Store; resize is the side in pixels at which the network sees every image."""
        self._network, self._lock = network, lock
        self._threshold, self._resize = threshold, resize
        self._device, self._on_gpu = network.device, network.device.type == "cuda"
        self._halving = Halving(batch_size, self._device)
        self._copies = HostCopy()
        self._upload = _stream(self._device)
        self._download = _stream(self._device)
        self._started: deque[torch.cuda.Event] = deque()
        self._largest = (0, 0, 0)  # shape of the largest batch
        self.pixels = 0  # that went through the network

    def size(self) -> int:
        """Patches per batch; halved whenever a batch did not fit."""
        return self._halving.size

    def restore(self, size: int) -> None:
        """Let batches be of this size again, though one did not fit before."""
        self._halving.size = size

    def forward(self, batch: PatchBatch) -> list[ScoredImage]:
        """Queue a batch on the device; returns the images that are complete with it."""
        if batch.failed is not None:
            return [ScoredImage(batch.failed)]
        with self._lock, self._on_device():
            done = [image for scored in self._scores(batch.patches) for image in self._collect(scored)]
            self._mark()
        if len(self._started) > AHEAD:
            self._started.popleft().synchronize()
        return done + _given_up(batch.patches)

    def ceiling(self, seconds: float) -> float | None:
        """Pixels/s of the forward alone, on a batch that stays on the device; None when nothing ran."""
        num, height, width = self._largest
        if not num:
            return None
        with self._lock, self._on_device():
            images = torch.zeros(num, height, width, 3, dtype=torch.uint8, device=self._device).permute(0, 3, 1, 2)

            def once() -> int:
                probability = torch.sigmoid(self._network(images)[:, 0])
                _mask(probability, self._threshold)
                if self._on_gpu:
                    torch.cuda.synchronize(self._device)
                return probability.numel()

            return ceiling_rate(once, seconds=seconds, warmup=2 if self._on_gpu else 0)

    # Through the network

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The calling thread's device and gradient mode."""
        with torch.cuda.device(self._device) if self._on_gpu else nullcontext(), torch.inference_mode():
            yield

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps rather than spins
            event.record(torch.cuda.current_stream(self._device))
            self._started.append(event)

    def _scores(self, patches: list[Patch]) -> list[_ScoredPatches]:
        patches = [patch for patch in patches if patch.frame.failure is None]
        if not patches:
            return []
        try:
            return self._halving.run(self._score, patches)
        except OutOfMemory:
            pass  # not even one fits: find out which, outside the handler that keeps its tensors alive
        return [scored for patch in patches for scored in self._score_alone(patch)]

    def _score_alone(self, patch: Patch) -> list[_ScoredPatches]:
        try:
            return self._halving.run(self._score, [patch])
        except OutOfMemory as failure:
            _give_up(patch.frame, failure)
            return []

    def _score(self, patches: list[Patch]) -> _ScoredPatches:
        logits = self._network(self._uploaded(patches))[:, 0]
        scored = _ScoredPatches(patches, torch.sigmoid(logits), torch.isfinite(logits).flatten(1).all(1))
        num, height, width = logits.shape
        self.pixels += logits.numel()
        if logits.numel() > self._largest[0] * self._largest[1] * self._largest[2]:
            self._largest = (num, height, width)
        return scored

    def _uploaded(self, patches: list[Patch]) -> Tensor:
        """(B, 3, h, w) uint8 on the device, copied beside what the device computes."""
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
        """Send masks of whole images, add windows to their images, and send those that are complete by that."""
        share = self._resize is None and any(patch.window is None for patch in scored.patches)
        scores = self._send(scored.probability, scored.finite) if share else None
        for row, patch in enumerate(scored.patches):
            if patch.frame.failure is not None:
                continue
            if scores is not None and patch.window is None:
                yield ScoredImage(patch.frame, scores, row)
                continue
            try:
                with guard():
                    done = self._assemble(patch, scored.probability[row], scored.finite[row])
            except OutOfMemory as failure:  # an image too large for the device fails alone
                _give_up(patch.frame, failure)
                continue
            if done is not None:
                yield done

    def _assemble(self, patch: Patch, probability: Tensor, finite: Tensor) -> ScoredImage | None:
        """The image at its own size, once all of it is there; probability (h, w), finite ()."""
        frame = patch.frame
        if patch.window is None:
            size = (frame.height, frame.width)
            back = F.interpolate(probability[None, None], size, mode="bilinear", antialias=True)[0]
            return ScoredImage(frame, self._send(back, finite[None]))
        assert frame.grid is not None
        assert frame.weights is not None
        if frame.blend is None:
            rows, columns = (weights.to(self._device, non_blocking=True) for weights in frame.weights)
            frame.blend, frame.finite = Blend(frame.grid, rows, columns), finite
        assert frame.finite is not None
        frame.blend.add(patch.window, probability)
        frame.finite = frame.finite & finite
        frame.missing -= 1
        if frame.missing:
            return None
        done = ScoredImage(frame, self._send(frame.blend.total[None], frame.finite[None]))
        frame.blend = frame.finite = None
        return done

    def _send(self, probability: Tensor, finite: Tensor) -> BatchScores:
        """Threshold, and copy to the host beside what the device computes; probability (B, h, w), finite (B,)."""
        mask = _mask(probability, self._threshold)
        tensors = {"mask": mask, "finite": finite}
        if self._download is None:
            return BatchScores(probability, mask, self._copies.start(tensors), None)
        compute = torch.cuda.current_stream(self._device)
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps rather than spins
        ready.record(compute)
        self._download.wait_stream(compute)
        with torch.cuda.stream(self._download):
            return BatchScores(probability, mask, self._copies.start(tensors), ready)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _mask(probability: Tensor, threshold: float) -> Tensor:
    """uint8, 255 where the probability is above the threshold, else 0."""
    return (probability > threshold).to(torch.uint8) * 255


def resized(image: Tensor, side: int) -> Tensor:
    """image (H, W, 3) uint8 → (1, 3, side, side) uint8."""
    pixels = image.permute(2, 0, 1)[None].float()
    resized = F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _give_up(frame: ImageFrame, failure: OutOfMemory) -> None:
    frame.blend = frame.finite = None
    frame.failure = OutOfMemory(f"{frame.name}: {failure}")


def _given_up(patches: list[Patch]) -> list[ScoredImage]:
    """Images that failed in this batch; each once, though several of its windows may be in it or still to come."""
    failed = {id(patch.frame): patch.frame for patch in patches if patch.frame.failure is not None}
    new = [frame for frame in failed.values() if frame.missing]
    for frame in new:
        frame.missing = 0
    return [ScoredImage(frame) for frame in new]


TRACING_DEVICES = ("cuda",)  # where device_rings is faster than outlines
LEAST_PIXELS = 2**19  # traced together: 250 kernels take 2 ms to launch, for which the host traces 700 000 pixels


@dataclass(frozen=True, slots=True)
class TracedRings:
    """Rings of images that were traced together, on their way to the host."""

    pending: Pending  # DeviceRings by the names of its fields
    num_rows: int  # of each image in the stack, the free one included

    def rings(self, place: int) -> Rings:
        """The rings of the image at this place, once they are on the host."""
        host = {name: tensor.numpy() for name, tensor in self.pending.wait().items()}
        start, end = host["ends"][place : place + 2].tolist()
        names = ("points", "first", "area", "mass", "owner")
        own = Rings(*(host[name] for name in names)).between(start, end, place * self.num_rows)
        return own._replace(mass=own.mass / device_rings.UNIT)


@dataclass(frozen=True, slots=True)
class TracedImage:
    """An image whose mask and rings are on their way to the host, or that failed."""

    frame: ImageFrame
    scored: Pending | None = None  # "mask" (B, h, w) uint8, "finite" (B,) bool
    row: int = 0  # of this image there
    found: TracedRings | None = None  # None: to be traced on the host
    place: int = 0  # of this image in what was found
    probability: Pending | None = None  # for that: "probability" (1, h, w) float32


class Tracer:
    """Finds the rings of batches on their device; one thread at a time calls it."""

    def __init__(self, device: torch.device, *, detect_holes: bool) -> None:
        """Compile what finds them, if nothing has yet: here no threads of the run are in the way."""
        self._device, self._detect_holes = device, detect_holes
        self._copies = HostCopy()
        self._stream = _tracing_stream(device) if device.type == "cuda" else None
        if self.on_device:
            device_rings.prepare()

    @property
    def on_device(self) -> bool:
        return self._device.type in TRACING_DEVICES

    def wait(self, done: Sequence[ScoredImage]) -> None:
        """Sleep until the device has made what is to be traced: counting corners would spin until then."""
        for ready in {id(each.scores): each.scores.ready for each in done if each.scores is not None}.values():
            if ready is not None:
                ready.synchronize()

    def trace(self, done: Sequence[ScoredImage]) -> list[TracedImage]:
        """Find the rings of images, after wait; leave to the host what is small or does not fit."""
        groups: dict[int, list[ScoredImage]] = {}  # by their scores
        for each in done:
            groups.setdefault(id(each.scores), []).append(each)
        with self._on_stream():
            return [traced for group in groups.values() for traced in self._group(group[0].scores, group)]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The calling thread's device, stream and gradient mode."""
        on_gpu = self._stream is not None
        with (
            torch.cuda.device(self._device) if on_gpu else nullcontext(),
            torch.cuda.stream(self._stream) if on_gpu else nullcontext(),
            torch.inference_mode(),
        ):
            yield

    def _group(self, scores: BatchScores | None, group: list[ScoredImage]) -> Iterator[TracedImage]:
        if scores is None:
            yield from (TracedImage(each.frame) for each in group)
            return
        if self._stream is not None:
            # Both come from the pool of the forward's stream. Their last reference may go, here or when a run is left,
            # while kernels of this stream still wait to read them: the pool must not hand them out before those ran.
            scores.probability.record_stream(self._stream)
            scores.mask.record_stream(self._stream)
        if not self.on_device:
            yield from (self._left_to_host(scores, each) for each in group)
            return
        for part in _parts(scores, group):
            if len(part) * scores.mask[0].numel() < LEAST_PIXELS:
                yield from (self._left_to_host(scores, each) for each in part)
            else:
                yield from self._part(scores, part)

    def _part(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        """Images whose rows follow each other: together, else in halves, at last on the host."""
        try:
            check_injected(len(part))
            with guard():
                return self._found(scores, part)
        except OutOfMemory:
            pass  # the next try is outside the handler, which would keep this one's tensors alive
        if len(part) == 1:
            return [self._left_to_host(scores, part[0])]
        middle = len(part) // 2
        return self._part(scores, part[:middle]) + self._part(scores, part[middle:])

    def _found(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        rows = slice(part[0].row, part[-1].row + 1)
        sizes = [(each.frame.height, each.frame.width) for each in part]
        rings = device_rings.find_rings(scores.mask[rows], scores.probability[rows], sizes, self._detect_holes)
        found = TracedRings(self._copies.start(rings._asdict()), max(height for height, _ in sizes) + 1)
        return [TracedImage(each.frame, scores.host, each.row, found, place) for place, each in enumerate(part)]

    def _left_to_host(self, scores: BatchScores, done: ScoredImage) -> TracedImage:
        try:
            with guard():
                # whole rows: a part of them would need a copy on the device, which may be what there is no room for
                probability = self._copies.start({"probability": scores.probability[done.row : done.row + 1]})
        except OutOfMemory as failure:
            done.frame.failure = OutOfMemory(f"{done.frame.name}: {failure}")
            return TracedImage(done.frame)
        return TracedImage(done.frame, scores.host, done.row, probability=probability)


@cache  # one for all runs: memory is kept for every stream that ever used some
def _tracing_stream(device: torch.device) -> torch.cuda.Stream:
    # Before the network's kernels: these are few and short, and it is the host that waits for them.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _parts(scores: BatchScores, group: list[ScoredImage]) -> Iterator[list[ScoredImage]]:
    """Images whose rows follow each other, as many as may be traced together."""
    _, height, width = scores.mask.shape
    most = max(1, device_rings.band_pixels(scores.mask.device) // (height * width))
    part: list[ScoredImage] = []
    for each in group:
        if part and (len(part) == most or each.row != part[-1].row + 1):
            yield part
            part = []
        part.append(each)
    yield part

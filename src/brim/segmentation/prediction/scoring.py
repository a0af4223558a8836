"""The device's part of a prediction: patches up, through the network, masks back down; probabilities stay there.

Axes: B patches of a batch, h, w pixels of a patch. Uploads, kernels and downloads are queued on three streams. The host
never waits for the batch it has just started, only for the one two before it, so it cannot run ahead without bound.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brim.engine.device import Halving, guard
from brim.engine.meter import ceiling_rate
from brim.engine.pipeline import HostCopy, Pending
from brim.errors import OutOfMemory
from brim.segmentation.networks.network import Network
from brim.segmentation.prediction.batching import Batch, Frame, Patch
from brim.segmentation.prediction.tiles import Blend

AHEAD = 2  # batches queued on the device and not seen finished: one runs, one waits


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of images, B at a time, queued on the device."""

    probability: Tensor  # (B, h, w) float32
    mask: Tensor  # (B, h, w) uint8, 255 or 0
    host: Pending  # "mask" (B, h, w) uint8 and "finite" (B,) bool, on their way to the host
    ready: torch.cuda.Event | None  # follows probability and mask on the stream that makes them; None on a CPU


@dataclass(frozen=True, slots=True)
class Done:
    """An image whose result is queued on the device, or that failed."""

    frame: Frame
    scores: Scores | None = None
    row: int = 0  # of this image there


@dataclass(frozen=True, slots=True)
class _Scored:
    """Patches that ran at once."""

    patches: list[Patch]
    probability: Tensor  # (B, h, w) float32
    finite: Tensor  # (B,) bool: no NaN and no infinity among the logits


class Scorer:
    """Runs batches on the network's device; one thread at a time calls it.

    The lock is held while a batch is queued and never between two batches: others can use the network in between.
    """

    def __init__(
        self,
        network: Network,
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

    def forward(self, batch: Batch) -> list[Done]:
        """Queue a batch on the device; returns the images that are complete with it."""
        if batch.failed is not None:
            return [Done(batch.failed)]
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

    def _scores(self, patches: list[Patch]) -> list[_Scored]:
        patches = [patch for patch in patches if patch.frame.failure is None]
        if not patches:
            return []
        try:
            return self._halving.run(self._score, patches)
        except OutOfMemory:
            pass  # not even one fits: find out which, outside the handler that keeps its tensors alive
        return [scored for patch in patches for scored in self._score_alone(patch)]

    def _score_alone(self, patch: Patch) -> list[_Scored]:
        try:
            return self._halving.run(self._score, [patch])
        except OutOfMemory as failure:
            _give_up(patch.frame, failure)
            return []

    def _score(self, patches: list[Patch]) -> _Scored:
        logits = self._network(self._uploaded(patches))[:, 0]
        scored = _Scored(patches, torch.sigmoid(logits), torch.isfinite(logits).flatten(1).all(1))
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

    def _collect(self, scored: _Scored) -> Iterator[Done]:
        """Send masks of whole images, add windows to their images, and send those that are complete by that."""
        share = self._resize is None and any(patch.window is None for patch in scored.patches)
        scores = self._send(scored.probability, scored.finite) if share else None
        for row, patch in enumerate(scored.patches):
            if patch.frame.failure is not None:
                continue
            if scores is not None and patch.window is None:
                yield Done(patch.frame, scores, row)
                continue
            try:
                with guard():
                    done = self._assemble(patch, scored.probability[row], scored.finite[row])
            except OutOfMemory as failure:  # an image too large for the device fails alone
                _give_up(patch.frame, failure)
                continue
            if done is not None:
                yield done

    def _assemble(self, patch: Patch, probability: Tensor, finite: Tensor) -> Done | None:
        """The image at its own size, once all of it is there; probability (h, w), finite ()."""
        frame = patch.frame
        if patch.window is None:
            size = (frame.height, frame.width)
            back = F.interpolate(probability[None, None], size, mode="bilinear", antialias=True)[0]
            return Done(frame, self._send(back, finite[None]))
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
        done = Done(frame, self._send(frame.blend.total[None], frame.finite[None]))
        frame.blend = frame.finite = None
        return done

    def _send(self, probability: Tensor, finite: Tensor) -> Scores:
        """Threshold, and copy to the host beside what the device computes; probability (B, h, w), finite (B,)."""
        mask = _mask(probability, self._threshold)
        tensors = {"mask": mask, "finite": finite}
        if self._download is None:
            return Scores(probability, mask, self._copies.start(tensors), None)
        compute = torch.cuda.current_stream(self._device)
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps rather than spins
        ready.record(compute)
        self._download.wait_stream(compute)
        with torch.cuda.stream(self._download):
            return Scores(probability, mask, self._copies.start(tensors), ready)


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


def _give_up(frame: Frame, failure: OutOfMemory) -> None:
    frame.blend = frame.finite = None
    frame.failure = OutOfMemory(f"{frame.name}: {failure}")


def _given_up(patches: list[Patch]) -> list[Done]:
    """Images that failed in this batch; each once, though several of its windows may be in it or still to come."""
    failed = {id(patch.frame): patch.frame for patch in patches if patch.frame.failure is not None}
    new = [frame for frame in failed.values() if frame.missing]
    for frame in new:
        frame.missing = 0
    return [Done(frame) for frame in new]

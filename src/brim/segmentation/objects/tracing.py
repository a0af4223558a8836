"""From masks on the device to rings on the host.

On a GPU the rings are found where masks and probabilities are, on a stream of their own, and only they cross the bus:
a few hundred kilobytes an image instead of the four megabytes of its probabilities. On the host an image takes a core
3 to 10 ms, and threads get in each other's way at the interpreter's lock: 350 images a second were the most on 16
cores. On a CPU the probabilities just pass by, and the rings are found by the threads that make polygons.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from brim.engine.device import check_injected, guard
from brim.engine.pipeline import HostCopy, Pending
from brim.errors import OutOfMemory
from brim.segmentation.objects import device_rings
from brim.segmentation.prediction.batching import Frame
from brim.segmentation.prediction.scoring import Done, Scores
from brim.segmentation.rings import Rings

TRACING_DEVICES = ("cuda",)  # where device_rings is faster than outlines
LEAST_PIXELS = 2**19  # traced together: 250 kernels take 2 ms to launch, for which the host traces 700 000 pixels


@dataclass(frozen=True, slots=True)
class Found:
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
class Traced:
    """An image whose mask and rings are on their way to the host, or that failed."""

    frame: Frame
    scored: Pending | None = None  # "mask" (B, h, w) uint8, "finite" (B,) bool
    row: int = 0  # of this image there
    found: Found | None = None  # None: to be traced on the host
    place: int = 0  # of this image in what was found
    probability: Pending | None = None  # for that: "probability" (1, h, w) float32


class Tracer:
    """Finds the rings of batches on their device; one thread at a time calls it."""

    def __init__(self, device: torch.device, *, detect_holes: bool) -> None:
        """Compile what finds them, if nothing has yet: here no threads of the run are in the way."""
        self._device, self._detect_holes = device, detect_holes
        self._copies = HostCopy()
        self._stream = _stream(device) if device.type == "cuda" else None
        if self.on_device:
            device_rings.prepare()

    @property
    def on_device(self) -> bool:
        """Whether rings are found on the device."""
        return self._device.type in TRACING_DEVICES

    def wait(self, done: Sequence[Done]) -> None:
        """Sleep until the device has made what is to be traced: counting corners would spin until then."""
        for ready in {id(each.scores): each.scores.ready for each in done if each.scores is not None}.values():
            if ready is not None:
                ready.synchronize()

    def trace(self, done: Sequence[Done]) -> list[Traced]:
        """Find the rings of images, after wait; leave to the host what is small or does not fit."""
        groups: dict[int, list[Done]] = {}  # by their scores
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

    def _group(self, scores: Scores | None, group: list[Done]) -> Iterator[Traced]:
        if scores is None:
            yield from (Traced(each.frame) for each in group)
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

    def _part(self, scores: Scores, part: list[Done]) -> list[Traced]:
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

    def _found(self, scores: Scores, part: list[Done]) -> list[Traced]:
        rows = slice(part[0].row, part[-1].row + 1)
        sizes = [(each.frame.height, each.frame.width) for each in part]
        rings = device_rings.find_rings(scores.mask[rows], scores.probability[rows], sizes, self._detect_holes)
        found = Found(self._copies.start(rings._asdict()), max(height for height, _ in sizes) + 1)
        return [Traced(each.frame, scores.host, each.row, found, place) for place, each in enumerate(part)]

    def _left_to_host(self, scores: Scores, done: Done) -> Traced:
        try:
            with guard():
                # whole rows: a part of them would need a copy on the device, which may be what there is no room for
                probability = self._copies.start({"probability": scores.probability[done.row : done.row + 1]})
        except OutOfMemory as failure:
            done.frame.failure = OutOfMemory(f"{done.frame.name}: {failure}")
            return Traced(done.frame)
        return Traced(done.frame, scores.host, done.row, probability=probability)


@cache  # one for all runs: memory is kept for every stream that ever used some
def _stream(device: torch.device) -> torch.cuda.Stream:
    # Before the network's kernels: these are few and short, and it is the host that waits for them.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _parts(scores: Scores, group: list[Done]) -> Iterator[list[Done]]:
    """Images whose rows follow each other, as many as may be traced together."""
    _, height, width = scores.mask.shape
    most = max(1, device_rings.band_pixels(scores.mask.device) // (height * width))
    part: list[Done] = []
    for each in group:
        if part and (len(part) == most or each.row != part[-1].row + 1):
            yield part
            part = []
        part.append(each)
    yield part
